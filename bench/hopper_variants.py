"""Other tile sizes of the Hopper kernel on the standard workloads: what to try next, in one run.

    python -m bench.hopper_variants P2,P3 base q_in_registers=True stages=2 registers=224,56,0 --page 16 --kv float8_e4m3fn

Each variant is a list of `field=value` joined by `;` over the fields of `hopper_plan.Tiling`. Prints, and writes as JSON,
the median device time of ten calls after a pause and of calls on end for a while, with the chip's clock and power then:
long runs are slower, and only the clock tells whether the power limit is why. Variants run in turn, then all once more.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import jax

from bench import workloads
from bench.timers import burst_times, cupti_times, times_on_end
from pallas_kernels import hopper_plan, paged_hopper
from pallas_kernels.request import make_request

SUSTAINED_MS = 300.0


def parse_variant(text: str) -> dict[str, Any]:
    """`a=1;b=2,3` -> {"a": 1, "b": (2, 3)}; "base" is empty."""
    if text == "base":
        return {}
    fields = {f.name for f in dataclasses.fields(hopper_plan.Tiling)}
    changes = dict(part.split("=", 1) for part in text.split(";"))
    if unknown := changes.keys() - fields:
        raise SystemExit(f"unknown fields {sorted(unknown)}; there are {sorted(fields)}")
    return {name: ast.literal_eval(value) for name, value in changes.items()}


def prepare(batch: workloads.Batch, changes: dict[str, Any]) -> Any:
    """A call of the kernel on a batch with some sizes changed."""
    w = batch.workload

    def call(*args: Any) -> Any:
        options = {"causal": w.causal, "window": w.window, "max_query_len": max(w.query_lens)}
        request, operands = make_request(*args, **options)
        tiling = dataclasses.replace(hopper_plan.choose_tiling(request), **changes)
        if reasons := hopper_plan.misfits(request, tiling):  # it could take the device down
            raise ValueError("; ".join(reasons))
        return paged_hopper.attend(request, operands, tiling=tiling)[0]

    jitted = jax.jit(call)
    args = (batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.query_start_loc)
    return functools.partial(jitted, *args)


def clock_and_power() -> str:
    """The chip's present clock and power draw, as its driver tells them."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def measure(run: Any) -> dict[str, Any]:
    """Milliseconds of a burst and of calls on end."""
    jax.block_until_ready(run())
    burst = median(burst_times(cupti_times, run, 10))
    sustained = times_on_end(cupti_times, run, burst, SUSTAINED_MS)
    for _ in range(int(SUSTAINED_MS / burst)):
        out = run()
    state = clock_and_power()  # while the calls are still under way
    jax.block_until_ready(out)
    return {"burst_ms": burst, "sustained_ms": median(sustained), "clock_and_power": state}


def main() -> None:
    """Run the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", help="names joined by commas")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--kv", default="bfloat16", help="dtype of the cache")
    parser.add_argument("--out", type=Path, default=Path("hopper_variants.json"))
    options = parser.parse_args()
    rows = []
    for name in options.workloads.split(","):
        batch = workloads.build(workloads.WORKLOADS[name], options.page, "bfloat16", options.kv)
        runs = {text: prepare(batch, parse_variant(text)) for text in options.variants}
        for turn in (1, 2):
            for text, run in runs.items():
                row = {"workload": name, "variant": text, "page_size": options.page, "kv": options.kv, "turn": turn}
                try:
                    row |= measure(run) | {"error": workloads.reference_error(batch, run())}
                    line = f"burst {row['burst_ms']:.4f} ms, sustained {row['sustained_ms']:.4f} ms"
                    print(f"{name} {text:40s} {line}, error {row['error']:.1e}, {row['clock_and_power']}", flush=True)
                except Exception as error:  # a variant may not compile; the others still count
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                    print(f"{name} {text:40s} {row['failed'][:150]}", flush=True)
                rows.append(row)
                options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
