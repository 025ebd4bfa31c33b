"""The Hopper kernel on a CPU: its body under the GPU interpreter, with race detection, against the float64 oracle.

Run as a program, `python -m tests.hopper_interpreter NAME...`, it prints one JSON line a case. The interpreter simulates
every warpgroup by a thread that waits inside a callback; with few processors XLA's thread pool then runs dry and the
kernel hangs, so the program asks for more host devices, which enlarges the pool, and the tests run it on its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan, paged_hopper
from pallas_kernels.hopper_steps import ROWS, Steps
from pallas_kernels.request import make_request
from tests import batches, oracle
from tests.cases import Case, build

# Query and context lengths: starts at odd rows, more than one query tile, more than one KV tile, padding sequences.
RAGGED: dict[str, Any] = {"query_lens": (1, 19, 0, 3), "context_lens": (140, 37, 7, 0), "head_dim": 64}
BASE: dict[str, Any] = {"dtype": "bfloat16", "padding_tokens": 3} | RAGGED
DRAFT: dict[str, Any] = BASE | {"query_lens": (5, 2), "context_lens": (300, 60), "max_query_len": 5}
IDLE: dict[str, Any] = DRAFT | {"context_lens": (60, 0), "padding_tokens": 0}

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "split_two_warpgroups": (Case("a", **BASE, num_heads=8), {"wgs": 2}),
    "split_one_warpgroup": (Case("b", **DRAFT, causal=False), {}),
    "split_many_rows": (Case("l", **DRAFT | {"head_dim": 128}, num_heads=16, sinks="some"), {"programs": 8}),
    "idle_programs": (Case("m", **IDLE, causal=False), {"programs": 8}),
    "idle_programs_whole": (Case("n", **IDLE, batch_invariant=True), {"programs": 8}),
    "whole_two_warpgroups": (Case("c", **BASE, num_heads=8, batch_invariant=True), {"wgs": 2}),
    "three_heads_a_group": (Case("d", **DRAFT, num_heads=6), {}),
    "window_and_flags": (Case("e", **BASE, causal="each", window=(20, 3)), {}),
    "scores": (Case("f", **DRAFT, soft_cap=1.5, sinks="some", alibi=True), {}),
    "kv_start_hnd": (Case("g", **BASE, kv_start=True, layout="HND", sinks="finite"), {}),
    "new_kv": (Case("h", **BASE | {"context_lens": (144, 37, 7, 0)}, new_kv=True), {}),
    "fp8": (Case("i", **DRAFT, kv_dtype="float8_e4m3fn", scales=("head", "scalar")), {}),
    "fp8_three_stages": (Case("i", **DRAFT, kv_dtype="float8_e4m3fn", scales="head"), {"stages": 3}),
    "fp8_k_and_v_apart": (Case("k", **BASE, kv_dtype="float8_e5m2", window=(20, 3)), {"convert": 2}),
    "head_96_pages_24": (Case("j", **DRAFT | {"head_dim": 96}, page_size=24), {}),
    "contradictory": (Case("k", **BASE | {"query_lens": (1, 19, 9, 3)}, new_kv=True, causal="each"), {}),
}
# Values of a case that contradict the others: a start other than 0, a length beyond the table, one below the queries.
WRONG = {
    "contradictory": {
        "query_start_loc": np.array([1, 1, 20, 29, 32], np.int32),
        "seq_lens": np.array([141, 2**31 - 1, 4, -1], np.int32),
    }
}


class InterpreterSteps(Steps):
    """See `pallas_kernels.hopper_steps`: plain products, and one view of the query buffer."""

    def q_scratch(self, t: Any, cols: int, dtype: Any) -> Any:
        """Query tiles by token."""
        return plgpu.SMEM((t.q_slots, t.wgs, cols, t.alloc_rows // t.group, t.group, t.col), dtype)

    def q_tma(self, q: Any, slot: Any, wg: Any, c: int, t: Any, offset: Any = 0, count: int | None = None) -> Any:
        """[tokens, group, col]."""
        return q.at[slot, wg, c, pl.ds(offset, t.wg_tokens if count is None else count)]

    def o_put(self, q: Any, slot: Any, wg: Any, c: int, value: Any, t: Any) -> None:
        """Stage a column block of the output."""
        value = jnp.pad(value, ((0, t.alloc_rows - ROWS), (0, 0)))
        q[slot, wg, c] = value.reshape(t.alloc_rows // t.group, t.group, t.col)

    def q_operand(self, q: Any, slot: Any, wg: Any, k: Any) -> Any:
        """Column blocks of the queries, as values."""
        return [q[slot, wg, c].reshape(k.tiling.alloc_rows, k.tiling.col)[:ROWS] for c in range(k.cols)]

    def qk(self, q: Any, keys: Any, ring: Any, between: Any, k: Any) -> Any:
        """Scores."""
        t = k.tiling
        scores = jnp.zeros((ROWS, t.block_kv), jnp.float32)
        for c in range(k.cols):
            right = keys[ring, :, pl.ds(c * t.col, t.col)]
            scores += jnp.dot(q[c].astype(jnp.float32), right.astype(jnp.float32).T)
        plgpu.commit_smem()  # these are ordinary loads; wgmma's are ordered with the copy engine as they are
        between()
        return scores

    def pv(self, acc: Any, p: Any, values: Any, ring: Any, k: Any) -> Any:
        """The output so far."""
        out = acc + jnp.dot(p.astype(jnp.float32), values[ring].astype(jnp.float32))
        plgpu.commit_smem()
        return out


def run(name: str) -> dict[str, Any]:
    """Errors of a case, whose every unseen byte is poison unless it contradicts itself, on three programs."""
    case, changes = CASES[name]
    clean = build(case)
    if case.new_kv:  # then the table need only cover the context
        clean["block_table"] = clean["block_table"][:, : -(-max(case.context_lens) // case.page_size)]
    if name in WRONG:
        given, clean = clean | WRONG[name], batches.as_taken(clean | WRONG[name])
    else:
        given = batches.poison(np.random.default_rng(0), clean)
    arrays, static = batches.split(given)
    request, operands = make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)
    changes = {"programs": 3, "split": not case.batch_invariant} | changes  # so short, it would not be split
    tiling = dataclasses.replace(hopper_plan.choose_tiling(request), **changes)
    attend = jax.jit(
        lambda operands: paged_hopper.attend(
            request,
            operands,
            tiling=tiling,
            steps=InterpreterSteps(),
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
    )
    out, lse = (np.asarray(x).astype(np.float64) for x in attend(operands))
    want, want_lse = oracle.attention(**clean)
    alive = np.isfinite(want_lse)
    return {
        "case": name,
        "error": float(np.linalg.norm(out - want) / np.linalg.norm(want)),
        "same_rows_alive": bool((np.isneginf(lse) == np.isneginf(want_lse)).all()),
        "lse_error": float(np.abs(lse[alive] - want_lse[alive]).max()),
        "dead_rows_zero": bool((out[~np.abs(want).any(-1)] == 0).all()),
        "races": bool(interpret_pallas_call.get_races().races_found),
        "split": tiling.split,
        "warpgroups": tiling.warpgroups,
    }


if __name__ == "__main__":
    for name_ in sys.argv[1:]:
        print(json.dumps(run(name_)), flush=True)
