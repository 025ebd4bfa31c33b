"""Time jattn beside its peers on the standard workloads: `python -m bench.run --help`."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

# The peers need memory beside JAX's.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from bench.peer import CannotRun, Prepared
from bench.peers import PEERS
from bench.timers import burst_times, median_and_spread, times_on_end
from bench.workloads import CPU_STANDARD, GPU_STANDARD, WORKLOADS, Batch, build, reference_error

HELP = """Times jattn and whichever peers are installed in one process and prints ratios (peer / jattn; above 1: jattn is
faster). On a GPU, device time (CUPTI for JAX, graph replay for torch), in two regimes: a burst of a few calls after a
pause, which runs at the highest clock, and calls on end (--sustained), where heavy kernels meet the power limit and all
slow down, by unlike amounts. On a CPU, medians of interleaved rounds with two threads a peer.

  python -m bench.run                          all standard workloads of this device
  python -m bench.run -w P1,D1 --page-size 64  two of them on larger pages
  python -m bench.run --plot roofline.png --json results.json
"""


def main(argv: list[str] | None = None) -> int:
    """Run the measurement; the exit status."""
    args = _parser().parse_args(argv)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    _use_threads(args.threads, on_gpu)
    names = args.workloads.split(",") if args.workloads else list(GPU_STANDARD if on_gpu else CPU_STANDARD)
    peers = args.peers.split(",") if args.peers else [n for n in PEERS if not n.startswith("jattn-")]
    for chosen, known, what in ((names, WORKLOADS, "workload"), (peers, PEERS, "peer")):
        if unknown := [n for n in chosen if n not in known]:
            raise SystemExit(f"unknown {what} {unknown}; known: {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for page_size in map(int, args.page_size.split(",")):
        for dtype in args.dtype.split(","):
            for name in names:
                batch = build(WORKLOADS[name], page_size, dtype, args.kv_dtype or dtype, args.seed)
                rows += measure(batch, peers, args, device.platform)
                gc.collect()
                report = {"environment": environment(device), "rows": rows}
                if args.json:
                    Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print_table(rows)
    if args.plot:
        from bench.plot import roofline

        roofline(rows, Path(args.plot))
    return 0


def measure(batch: Batch, peers: list[str], args: argparse.Namespace, platform_name: str) -> list[dict[str, Any]]:
    """One row for each peer that is installed; a peer that cannot run says why in its row."""
    w, ready, rows = batch.workload, {}, {}
    for name in peers:
        peer = PEERS[name]
        if platform_name not in peer.platforms or not peer.installed:
            continue
        row: dict[str, Any] = {
            "workload": w.name,
            "peer": name,
            "page_size": batch.page_size,
            "dtype": batch.q.dtype.name,
            "kv_dtype": batch.k_cache.dtype.name,
        }
        rows[name] = row
        start = time.perf_counter()
        try:
            prepared: Prepared = peer.prepare(batch)
            row["error"] = reference_error(batch, prepared.output())
        except (CannotRun, NotImplementedError) as reason:
            row["refused"] = str(reason)
        except Exception as failure:  # a peer's failure is a result, not the end of the run
            row["refused"] = f"{type(failure).__name__}: {str(failure)[:200]}"
        else:
            ready[name] = prepared
        print(f"{w.name} {name}: prepared in {time.perf_counter() - start:.1f} s", flush=True)
    on_gpu = platform_name == "gpu"
    burst: dict[str, list[float]] = {name: [] for name in ready}
    sustained: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(args.rounds):  # interleaved, so that drift hits all alike
        for name, prepared in ready.items():
            if not on_gpu:
                burst[name] += prepared.timer(prepared.run, args.repeats)
                continue
            burst[name] += burst_times(prepared.timer, prepared.run, args.repeats)
            if args.sustained:
                typical = statistics.median(burst[name])
                sustained[name] += times_on_end(prepared.timer, prepared.run, typical, args.sustained)
    for name in ready:
        median, spread = median_and_spread(burst[name])
        rows[name] |= {
            "ms": median,
            "spread_ms": spread,
            "samples": len(burst[name]),
            "tflops": w.flops / median / 1e9,
            "gbs": w.min_bytes(batch.k_cache.dtype.itemsize, batch.q.dtype.itemsize) / median / 1e6,
        }
        if sustained[name]:
            rows[name]["sustained_ms"], rows[name]["sustained_spread_ms"] = median_and_spread(sustained[name])
    own = rows.get("jattn", {})
    for row in rows.values():
        for ratio, field in (("times_jattn", "ms"), ("sustained_times_jattn", "sustained_ms")):
            if field in own and field in row:
                row[ratio] = row[field] / own[field]
    return list(rows.values())


def environment(device: Any) -> dict[str, Any]:
    """What a result depends on."""
    packages = ("jax", "jaxlib", "torch", "flashinfer-python", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a measurement, within 80 columns; times and ratios of both regimes where both were measured."""
    from rich.console import Console
    from rich.table import Table

    heads = ("", "dtype", "page", "peer", "ms", "on end", "TFLOP/s", "GB/s", "error", "ratio")
    table = Table(*heads, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        label = (row["workload"], _short(row), str(row["page_size"]), row["peer"])
        if "ms" not in row:
            table.add_row(*label, "-", "", "", "", "", row["refused"][:14])
            continue
        ratios = [f"{row[key]:.2f}" for key in ("times_jattn", "sustained_times_jattn") if key in row]
        on_end = f"{row['sustained_ms']:.4g}" if "sustained_ms" in row else ""
        numbers = (f"{row['ms']:.4g}", on_end, f"{row['tflops']:.3g}", f"{row['gbs']:.3g}", f"{row['error']:.0e}")
        table.add_row(*label, *numbers, " ".join(ratios))
    Console().print(table)


def _short(row: dict[str, Any]) -> str:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    q, kv = (names.get(row[key], row[key]) for key in ("dtype", "kv_dtype"))
    return q if q == kv else f"{q}/{kv}"


def _use_threads(count: int, on_gpu: bool) -> None:
    if on_gpu:
        return
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(count)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("bench.run", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-w", "--workloads", metavar="NAMES", help=f"of {', '.join(WORKLOADS)}")
    p.add_argument("-p", "--peers", metavar="NAMES", help=f"of {', '.join(PEERS)}")
    p.add_argument("--page-size", default="16", metavar="N,..", help="tokens a page (default 16)")
    p.add_argument("--dtype", default="bfloat16", metavar="T,..", help="of q (default bfloat16)")
    p.add_argument("--kv-dtype", metavar="T", help="of the cache (default: q's)")
    p.add_argument("--repeats", type=int, default=10, help="timed calls a round (default 10)")
    p.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    p.add_argument("--sustained", type=float, default=200, metavar="MS", help="calls on end for so long (default 200)")
    p.add_argument("--threads", type=int, default=2, help="torch's threads on a CPU (default 2)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE", help="write every result with its environment")
    p.add_argument("--plot", metavar="FILE", help="draw the roofline: .png, .svg or both (no suffix)")
    return p


if __name__ == "__main__":
    raise SystemExit(main())
