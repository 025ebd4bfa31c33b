"""Find the fastest tiles of the TPU kernel on the TPU of this host: `python -m bench.tune_tpu --help`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from bench.workloads import WORKLOADS, Batch, Workload, build, reference_error
from pallas_kernels import paged_tpu, tpu_plan
from pallas_kernels.request import AttentionRequest, make_request
from pallas_kernels.tuned import Tile

HELP = """Times the TPU kernel with tiles of several sizes on the standard workloads and prints the fastest of each.
It needs a TPU. Every time is kept in a JSON as soon as it is known, and a second run takes up where the first one
stopped. --write puts the fastest tiles into pallas_kernels/tuned/<chip>.json, where the kernel finds them; the entries
of other kernels and shapes stay. A tile whose result is wrong is reported and never chosen.

Example: python -m bench.tune_tpu --workloads D1,F1,P1,M1 --page-sizes 16,64 --write"""

ROWS, KEYS = (128, 256, 512, 1024), (128, 256, 512, 1024, 2048)
TOLERANCE = 1e-2
CALLS = 10  # in one program, so that the time of a launch is hidden


@dataclasses.dataclass(frozen=True)
class Trial:
    """One tile on one workload."""

    workload: str
    page_size: int
    kv_dtype: str
    rows: int
    keys: int

    @property
    def key(self) -> str:
        """Its name in the JSON."""
        return f"{self.workload} page {self.page_size} {self.kv_dtype} {self.rows}x{self.keys}"


def trials(workloads: list[str], page_sizes: list[int], kv_dtypes: list[str]) -> list[Trial]:
    """Every tile of every workload; decode and drafts, whose rows are few, differ in keys alone."""
    found = []
    for name, page_size, kv_dtype in itertools.product(workloads, page_sizes, kv_dtypes):
        rows = ROWS if kind(WORKLOADS[name]) == "wide" else ROWS[:1]
        found += [Trial(name, page_size, kv_dtype, *x) for x in itertools.product(rows, KEYS) if x[1] >= page_size]
    return found


def kind(workload: Workload) -> str:
    """The kind of work in the words of `tpu_plan.choose_tiling`."""
    group = workload.num_heads // workload.num_kv_heads
    return "narrow" if max(workload.query_lens) * group <= tpu_plan.MID_ROWS else "wide"


def request_of(batch: Batch) -> tuple[AttentionRequest, Any]:
    """The call that a workload is."""
    w = batch.workload
    return make_request(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        causal=w.causal,
        window=w.window,
        max_query_len=max(w.query_lens),
    )


def measure(trial: Trial, batch: Batch, chip: str) -> dict[str, Any]:
    """Median milliseconds of a call, and its error; or why there is none."""
    request, operands = request_of(batch)
    tiling = tpu_plan.tiling_of(request, Tile(trial.rows, trial.keys), chip)
    if tpu_plan.vmem_bytes(tpu_plan.as_stored(request), tiling) > tpu_plan.CHIPS[chip].budget:
        return {"fault": "more VMEM than the kernel may use"}

    @jax.jit
    def call(operands: Any) -> jax.Array:
        def once(_: int, q: jax.Array) -> jax.Array:
            out, _lse = paged_tpu.attend(request, dataclasses.replace(operands, q=q), tiling=tiling)
            return q.at[0, 0, 0].set(out[0, 0, 0])  # the next call depends on this one

        return jax.lax.fori_loop(0, CALLS, once, operands.q)

    try:
        single = jax.jit(lambda operands: paged_tpu.attend(request, operands, tiling=tiling)[0])(operands)
        error = reference_error(batch, single)
        jax.block_until_ready(call(operands))
    except jax.errors.JaxRuntimeError as failure:
        return {"fault": " ".join(str(failure).split())[:200]}
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(call(operands))
        times.append((time.perf_counter() - began) / CALLS * 1e3)
    fault = {} if error < TOLERANCE else {"fault": f"error {error:.1e}"}
    return {"ms": statistics.median(times), "error": error} | fault


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Results so far by trial."""
    return json.loads(path.read_text()) if path.is_file() else {}


def run(
    todo: list[Trial], path: Path, measure_one: Callable[[Trial], dict[str, Any]], say: Callable[[str], None] = print
) -> dict[str, dict[str, Any]]:
    """Measure what the JSON lacks, keeping it complete after each trial."""
    results = load(path)
    for trial in todo:
        if trial.key not in results:
            results[trial.key] = measure_one(trial)
            whole = path.with_suffix(".part")
            whole.write_text(json.dumps(results, indent=1))
            whole.replace(path)  # a run that is stopped leaves the old file or the new one
        say(f"{trial.key}: {results[trial.key]}")
    return results


def fastest(todo: list[Trial], results: dict[str, dict[str, Any]]) -> Iterator[tuple[Trial, float]]:
    """The best right trial of each workload, page size and cache type."""
    groups: dict[tuple[str, int, str], list[Trial]] = {}
    for trial in todo:
        groups.setdefault((trial.workload, trial.page_size, trial.kv_dtype), []).append(trial)
    for group in groups.values():
        right = [x for x in group if "fault" not in results.get(x.key, {"fault": ""})]
        if right:
            best = min(right, key=lambda x: results[x.key]["ms"])
            yield best, results[best.key]["ms"]


def entries(chosen: list[tuple[Trial, float]]) -> list[dict[str, Any]]:
    """Entries for the tuned JSON; where workloads of one shape and kind differ, the commonest tile wins."""
    by_shape: dict[tuple[Any, ...], list[Trial]] = {}
    for trial, _ in chosen:
        w = WORKLOADS[trial.workload]
        shape = (kind(w), trial.kv_dtype, w.num_heads, w.num_kv_heads, w.head_dim, trial.page_size)
        by_shape.setdefault(shape, []).append(trial)
    found = []
    for (work, kv, heads, kv_heads, head_dim, page_size), best in by_shape.items():
        votes = [(trial.rows, trial.keys) for trial in best]
        rows, keys = max(votes, key=votes.count)
        entry = {"kernel": "tpu", "work": work, "q": "bfloat16", "kv": kv, "heads": heads, "kv_heads": kv_heads}
        entry |= {"head_dim": head_dim, "page_size": page_size}
        found.append(entry | {"tile": {"rows": rows, "keys": keys, "num_warps": 0, "num_stages": 0}})
    return found


def write_tuned(path: Path, fresh: list[dict[str, Any]]) -> None:
    """Put entries into a tuned JSON in place of those of the same kernel, work and shape."""
    old = json.loads(path.read_text()) if path.is_file() else []
    shape = lambda entry: {name: x for name, x in entry.items() if name != "tile"}  # noqa: E731
    kept = [entry for entry in old if shape(entry) not in [shape(x) for x in fresh]]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in kept + fresh)
    path.write_text(f"[\n{lines}\n]\n")


def _measure_all(todo: list[Trial], path: Path, chip: str) -> dict[str, dict[str, Any]]:
    from rich.console import Console
    from rich.progress import Progress

    batches: dict[tuple[str, int, str], Batch] = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"tuning on {chip}", total=len(todo))

        def measure_one(trial: Trial) -> dict[str, Any]:
            at = (trial.workload, trial.page_size, trial.kv_dtype)
            if at not in batches:
                batches.clear()
                batches[at] = build(WORKLOADS[trial.workload], trial.page_size, "bfloat16", trial.kv_dtype)
            return measure(trial, batches[at], chip)

        def say(text: str) -> None:
            progress.console.print(text)
            progress.advance(bar)

        return run(todo, path, measure_one, say)


def main(argv: list[str] | None = None) -> int:
    """Tune; 1 without a TPU or without any right result."""
    parser = argparse.ArgumentParser(
        "bench.tune_tpu", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="D1,F1,P1,M1", help="of " + ", ".join(WORKLOADS))
    parser.add_argument("--page-sizes", default="16,64,256")
    parser.add_argument("--kv-dtypes", default="bfloat16,float8_e4m3fn,int8")
    parser.add_argument("--results", type=Path, default=Path("tune_tpu.json"), help="where the times are kept")
    parser.add_argument("--write", action="store_true", help="update pallas_kernels/tuned/<chip>.json")
    args = parser.parse_args(argv)
    names = args.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--workloads: {', '.join(unknown)} unknown; there are {', '.join(WORKLOADS)}")
    chip = tpu_plan.present_chip()
    if chip is None or jax.default_backend() != "tpu":
        print(
            f"This host has no TPU (jax runs on {jax.default_backend()}): tiles can be timed on a TPU alone.",
            file=sys.stderr,
        )
        return 1
    todo = trials(names, [int(x) for x in args.page_sizes.split(",")], args.kv_dtypes.split(","))
    chosen = list(fastest(todo, _measure_all(todo, args.results, chip)))
    for trial, ms in chosen:
        w = WORKLOADS[trial.workload]
        rate = w.min_bytes(jax.numpy.dtype(trial.kv_dtype).itemsize) / ms / 1e6
        print(f"{trial.key}: {ms:.3f} ms, {w.flops / ms / 1e9:.0f} TFLOP/s, {rate:.0f} GB/s")
    if args.write and chosen:
        path = Path(tpu_plan.__file__).parent / "tuned" / f"{chip}.json"
        write_tuned(path, entries(chosen))
        print(f"wrote {path}")
    return 0 if chosen else 1


if __name__ == "__main__":
    raise SystemExit(main())
