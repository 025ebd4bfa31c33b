"""Tile sizes and splits by measurement: `python -m bench.tune --help`."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Candidates that were compiled ahead need memory beside the batch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import pallas_kernels
from bench.timers import cupti_times, median_and_spread
from bench.tune_candidates import KERNELS, USUAL, Job
from bench.tune_results import Outcome, Results, State, merged, outcomes, read_table, replace_file, table_text
from bench.workloads import WORKLOADS, build, reference_error
from pallas_kernels import tuned

STANDARD = "P1,D1,F1,P2,D2,F3,M1,D1/float8_e4m3fn,F1/float8_e4m3fn,P2/float8_e4m3fn,P3,D3,P2-oss,D1-oss,F1-oss,"
STANDARD += "P2-gemma,D1-gemma,F1-gemma"
TABLES = Path(pallas_kernels.__file__).parent / "tuned"
ERROR_LIMIT = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 5e-6}  # norm over norm, against float32 attention

HELP = f"""Finds the fastest tile sizes and splits of the GPU kernels by measuring them, and writes them into
pallas_kernels/tuned/<arch>.json, where the kernels look them up. Each workload is measured with the heuristic's sizes
and a few others, in turn; a result that is not right cannot win, nor one that is not faster by more than the spread.

  python -m bench.tune                          the standard workloads, the Hopper kernel
  python -m bench.tune --minutes 4              the same, what can be measured in four minutes
  python -m bench.tune -w P2,D1/float8_e4m3fn   two workloads, the second on a cache of 8 bits
  python -m bench.tune --kernel hopper,triton --page-size 16,64
  python -m bench.tune --dry-run                what would be tried; needs no GPU
  python -m bench.tune --dry-run --compile      and what its code for an H200 needs; needs no GPU but a compiler

Results are kept in a file as they come (--state). When stopped, by Ctrl-C or by --minutes, the same command goes on
where it was; to measure anew, remove that file. Workloads: {", ".join(WORKLOADS)}."""

NO_GPU = """bench.tune measures, so it needs a GPU that JAX can see; here JAX sees {platform} only.
  NVIDIA: pip install 'jattn[cuda]'    AMD: pip install 'jattn[rocm]'
Without a GPU, `python -m bench.tune --dry-run` lists what would be measured."""


def main(argv: list[str] | None = None) -> int:
    """Tune; the exit status."""
    warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
    args = _parser().parse_args(argv)
    jobs = jobs_of(args)
    if args.dry_run:
        from bench.tune_dry_run import dry_run

        return dry_run(jobs, args.arch or "sm90", args.compile)
    device = jax.devices()[0]
    arch = tuned.gpu_arch()
    if device.platform != "gpu" or arch is None:
        raise SystemExit(NO_GPU.format(platform=device.platform))
    if importlib.util.find_spec("rich") is None:
        raise SystemExit("bench.tune shows its progress by rich: pip install 'jattn[bench]'")
    out = args.out or TABLES / f"{arch}.json"
    try:
        state = State(
            args.state or out.with_suffix(".state.json"), {"device": device.device_kind, "jax": jax.__version__}
        )
    except ValueError as reason:
        raise SystemExit(str(reason)) from None
    jobs = [job for job in jobs if runnable(job, arch)]
    compiler = Compiler([job for job in jobs if not is_done(job, state, arch)], arch, args.jobs)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    try:
        left = measure_all(jobs, state, arch, deadline, lambda job: measure(job, compiler, args.rounds, args.repeats))
    except KeyboardInterrupt:
        print(f"\nStopped. {state.path} keeps what is measured; the same command goes on from there.", file=sys.stderr)
        return 130
    finally:
        compiler.close()
    found = outcomes(jobs, state, arch)
    source = out if out.exists() else TABLES / f"{arch}.json"
    replace_file(out, table_text(merged(read_table(source), found, arch)))
    print_table(found, state)
    print(f"{out} written from {state.path}")
    if left:
        print(f"Time was over before {', '.join(job.name for job in left)}: the same command measures them.")
    return 0


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every workload for every kernel and page size asked for."""
    kernels, names = args.kernel.split(","), args.workloads.split(",")
    pairs = [(*name.split("/", 1), "")[:2] for name in names]
    for chosen, known, what in ((kernels, KERNELS, "kernel"), ([name for name, _ in pairs], WORKLOADS, "workload")):
        if unknown := [n for n in chosen if n not in known]:
            raise SystemExit(f"unknown {what} {unknown}; known: {', '.join(known)}")
    return [
        Job(WORKLOADS[name], kernel, int(page_size), args.dtype, kv_dtype or args.dtype)
        for kernel in kernels
        for page_size in args.page_size.split(",")
        for name, kv_dtype in pairs
    ]


def runnable(job: Job, arch: str) -> bool:
    """Whether the kernel can run a job on this GPU; says so if not."""
    reasons = job.why_not()
    if job.kernel == "hopper" and not tuned.is_hopper(arch):
        reasons = (f"the Hopper kernel does not run on {arch}",)
    if reasons:
        print(f"{job.name}: left out. {'; '.join(reasons)}")
    return not reasons


def fitting(job: Job, arch: str) -> dict[str, dict[str, Any]]:
    """The candidates that can be tried."""
    return {name: x for name, x in job.candidates(arch).items() if not job.misfits(x, arch)}


def is_done(job: Job, state: State, arch: str) -> bool:
    """Whether nothing is left to measure of a job."""
    return state.has(job, list(fitting(job, arch)))


class Compiler:
    """Compiles the candidates of all jobs in threads, in their order, ahead of the measurements."""

    def __init__(self, jobs: list[Job], arch: str, threads: int) -> None:
        """Start."""
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._tracing = threading.Lock()  # Python holds its own lock for it anyway; XLA's part runs side by side
        self._work = {
            job: {
                name: self._pool.submit(self._compile, job, fields, arch) for name, fields in fitting(job, arch).items()
            }
            for job in jobs
        }

    def _compile(self, job: Job, fields: dict[str, Any], arch: str) -> Any:
        with self._tracing:
            lowered = jax.jit(job.call(fields, arch)).lower(*job.shapes())
        return lowered.compile()

    def take(self, job: Job) -> dict[str, Any]:
        """A job's calls; an exception in place of one that does not compile."""
        done = {}
        for name, future in self._work.pop(job).items():
            try:
                done[name] = future.result()
            except Exception as failure:  # the compiler's refusal of one is a result
                done[name] = failure
        return done

    def close(self) -> None:
        """Leave what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def measure(job: Job, compiler: Compiler, rounds: int, repeats: int) -> Results:
    """Errors and times of a job's candidates; the rounds are interleaved, so that a drift of the clock hits all alike."""
    b = build(job.workload, job.page_size, job.dtype, job.kv_dtype)
    args = (b.q, b.k_cache, b.v_cache, b.block_table, b.seq_lens, b.query_start_loc)
    results: Results = {}
    samples: dict[str, list[float]] = {}
    calls = compiler.take(job)
    for name, call in calls.items():
        try:
            if isinstance(call, Exception):
                raise call
            error = reference_error(b, call(*args))
        except Exception as failure:  # too much shared memory, say
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
            continue
        if error < ERROR_LIMIT[job.dtype]:  # false for NaN
            results[name], samples[name] = {"error": error}, []
        else:
            results[name] = {"failed": f"an error of {error:.1e}", "error": error}
    for _ in range(rounds):
        for name, times in samples.items():
            if "failed" not in results[name]:
                try:
                    times += device_times(calls[name], repeats, args)
                except RuntimeError as failure:
                    results[name]["failed"] = str(failure)[:300]
    for name, times in samples.items():
        if "failed" not in results[name]:
            results[name]["ms"], results[name]["spread_ms"] = median_and_spread(times)
    return results


def device_times(call: Any, repeats: int, args: tuple[Any, ...]) -> list[float]:
    """Milliseconds on the device; on AMD, where JAX has no such clock, of the whole call.

    The clock sees all kernels of the process and refuses to tell them apart: should one come from elsewhere, say from
    a compilation, it is asked again.
    """
    if "cuda" in jax.devices()[0].client.platform_version:
        for _ in range(2):
            try:
                return cupti_times(call, repeats, *args)
            except RuntimeError:
                continue
        return cupti_times(call, repeats, *args)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:]


def measure_all(
    jobs: list[Job], state: State, arch: str, deadline: float | None, measure_job: Callable[[Job], Results]
) -> list[Job]:
    """Measure what the state lacks, with progress; returns the jobs that the time was too short for."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("tuning", total=len(jobs))
        for i, job in enumerate(jobs):
            progress.update(bar, description=job.name)
            if not is_done(job, state, arch):
                if deadline is not None and time.monotonic() > deadline:
                    return [x for x in jobs[i:] if not is_done(x, state, arch)]
                results = measure_job(job)
                progress.console.print(summary(job, results), markup=False, highlight=False)
                if any("error" in row for row in results.values()):  # else nothing ran: the GPU may be to blame
                    state.keep(job, results)
            progress.advance(bar)
    return []


def summary(job: Job, results: Results) -> str:
    """One line on a job that is done."""
    times = {name: row["ms"] for name, row in results.items() if "ms" in row}
    failed = f", {len(results) - len(times)} failed" if len(times) < len(results) else ""
    if USUAL not in times:
        return f"{job.name}: the heuristic failed: {results[USUAL].get('failed')}"
    best = min(times, key=lambda name: times[name])
    return f"{job.name}: {times[USUAL]:.4g} ms; {best} {times[best]:.4g} ms{failed}"


def print_table(found: list[Outcome], state: State) -> None:
    """The best against the heuristic, a line a workload, within 80 columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table("workload", "KV", "page", "heuristic", "tuned", "gain", "sizes", box=None, pad_edge=False)
    for o in found:
        for job in o.jobs:
            rows = state.jobs[job.name]
            usual, best = rows[USUAL]["ms"], rows[o.best]["ms"]
            kv = job.kv_dtype.replace("float8_", "").replace("bfloat16", "bf16")
            label = job.workload.name if job.kernel == "hopper" else f"{job.workload.name} {job.kernel}"
            numbers = [f"{usual:.4g}", "", ""]
            if o.best != USUAL:
                numbers[1:] = [f"{best:.4g}", f"{usual / best:.3f}x"]
            table.add_row(label, kv, str(job.page_size), *numbers, o.best)
    Console(width=80).print(table)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("bench.tune", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "-w", "--workloads", default=STANDARD, metavar="NAMES", help="joined by commas; NAME/DTYPE: its cache's"
    )
    p.add_argument("--kernel", default="hopper", metavar="K,..", help=f"of {', '.join(KERNELS)} (default hopper)")
    p.add_argument("--page-size", default="16", metavar="N,..", help="tokens a page (default 16)")
    p.add_argument("--dtype", default="bfloat16", metavar="T", help="of q, and of a cache not named (default bfloat16)")
    p.add_argument("--minutes", type=float, metavar="N", help="begin no measurement after so long")
    p.add_argument("--out", type=Path, metavar="FILE", help="the table (default pallas_kernels/tuned/<arch>.json)")
    p.add_argument("--state", type=Path, metavar="FILE", help="results so far (default beside the table: .state.json)")
    p.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    p.add_argument("--repeats", type=int, default=8, help="timed calls a round (default 8)")
    p.add_argument("-j", "--jobs", type=int, default=max((os.cpu_count() or 4) - 2, 1), help="compiling threads")
    p.add_argument("--dry-run", action="store_true", help="list the candidates and whether they fit; no GPU needed")
    p.add_argument("--compile", action="store_true", help="with --dry-run: compile them and show registers and spills")
    p.add_argument("--arch", metavar="A", help="with --dry-run: the GPU, e.g. gfx942 (default sm90)")
    return p


if __name__ == "__main__":
    raise SystemExit(main())
