"""A call of the Hopper kernel: its inputs, outputs and scratch memory, and what is left to do afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan as plan
from pallas_kernels.hopper_convert import wide_scratch
from pallas_kernels.hopper_copies import FewArrivals
from pallas_kernels.hopper_merge import merge
from pallas_kernels.hopper_new_kv import fresh_pages
from pallas_kernels.hopper_pieces import FIELDS, LOG2E, Kernel
from pallas_kernels.hopper_steps import Steps
from pallas_kernels.paged_hopper_kernel import run_warpgroups
from pallas_kernels.request import AttentionOperands, AttentionRequest

TABLE_BYTES = 15 * 1024  # a plan table larger than this and the promised KiB stays in device memory
HALF_MAX = 65504.0  # the largest float16


def attend(
    request: AttentionRequest,
    operands: AttentionOperands,
    *,
    tiling: plan.Tiling | None = None,
    steps: Steps | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None]:
    """Attention by the Hopper kernel.

    Args:
      request: the static side of the call; `paged_hopper.why_not(request)` must be empty.
      operands: its arrays.
      tiling: overrides the tile sizes.
      steps: another form of the steps that the interpreter lacks (tests).
      interpret: a `plgpu.InterpretGPUParams` to run on a CPU.
    """
    tiling = tiling or plan.choose_tiling(request)
    steps = steps or FewArrivals()
    kernel = Kernel(request, tiling, steps)
    table = plan.table(request, operands, tiling)
    q = operands.q
    if q.dtype != kernel.compute_dtype:
        q = jnp.clip(q, -HALF_MAX, HALF_MAX).astype(kernel.compute_dtype)
    if interpret is not None:  # the interpreter has no out-of-bounds fill
        q = jnp.pad(q, ((0, tiling.q_tile), (0, 0), (0, 0)))
    inputs = {
        "q": q,
        "k": operands.k_cache,
        "v": operands.v_cache,
        "block_table": operands.block_table,
        "table": table,
    }
    if request.new_kv:
        inputs["new_k"], inputs["new_v"] = fresh_pages(request, operands)
    if request.sinks:
        inputs["sinks"] = _by_row(operands.sinks, request) * LOG2E
    if request.alibi:
        inputs["slopes"] = _by_row(operands.alibi_slopes, request)
    if plan.queued(request, tiling):
        inputs["counter"] = jax.new_ref(jnp.zeros((1,), jnp.int32))  # the queue's next place
    if (request.k_scale, request.v_scale) != ("none", "none"):
        ones = jnp.ones((request.num_kv_heads,), jnp.float32)
        pair = [ones if x is None else ones * x for x in (operands.k_scale, operands.v_scale)]
        inputs["scales"] = jnp.stack(pair, axis=1)
    outputs = _outputs(kernel)
    results = _call(kernel, inputs, outputs, interpret)
    out, lse = results["out"], results.get("lse")
    if tiling.split:
        out, lse = merge(kernel, inputs, results, interpret)
    if out.dtype != request.q_dtype:
        out = lax.bitcast_convert_type(out, request.q_dtype)
    if not request.return_lse:
        return out, None
    return out, _gather_lse(request, tiling, table, lse)


def _by_row(x: Array | None, request: AttentionRequest) -> Array:
    """[H] -> [KVH, 64]: the value of each row's head; row r of a tile is head r % group."""
    assert x is not None
    group = request.group_size
    x = x.reshape(request.num_kv_heads, group)
    return jnp.tile(x, (1, -(-plan.ROWS // group)))[:, : plan.ROWS]


def _outputs(kernel: Kernel) -> dict[str, jax.ShapeDtypeStruct]:
    request, tiling = kernel.request, kernel.tiling
    rows = tiling.wgs * plan.ROWS
    shape: tuple[int, ...] = (request.num_tokens, request.num_heads, request.head_dim)
    out = {"out": jax.ShapeDtypeStruct(shape, kernel.compute_dtype)}
    if request.return_lse:
        shape = (plan.max_tiles(request, tiling), request.num_kv_heads, rows)
        out["lse"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if tiling.split:
        slots = 2 * tiling.programs
        out["part"] = jax.ShapeDtypeStruct((slots, rows, request.head_dim), jnp.float32)
        out["part_max"] = jax.ShapeDtypeStruct((slots, rows), jnp.float32)
        out["part_sum"] = jax.ShapeDtypeStruct((slots, rows), jnp.float32)
        out["cut"] = jax.ShapeDtypeStruct((tiling.programs, 8), jnp.int32)
    return out


def _scratch(kernel: Kernel) -> dict[str, Any]:
    request, t = kernel.request, kernel.tiling
    col = kernel.kv_col
    tiled = (plgpu.TilingTransform((8, col)), plgpu.SwizzleTransform(col * request.kv_dtype.itemsize))
    kv = plgpu.SMEM((t.stages, t.block_kv, request.head_dim), request.kv_dtype, transforms=tiled)
    full = kernel.steps.full_barriers(kernel)
    free = plgpu.Barrier(num_arrivals=1 if t.convert else t.wgs, num_barriers=t.stages)
    columns = plan.columns(request)
    table = {}
    rows = plan.table_rows(request)
    if columns * rows * 4 <= 1024 + min(TABLE_BYTES, plan.free_bytes(request, t)):
        table = {
            "table": plgpu.SMEM((rows * columns // plan.FOLD, plan.FOLD), jnp.int32),
            "table_full": plgpu.Barrier(),
        }
    wide = wide_scratch(kernel) if t.convert else {}
    return (
        table
        | wide
        | {
            "ticket": plgpu.SMEM((1,), jnp.int32),
            "q": kernel.steps.q_scratch(t, kernel.cols, kernel.compute_dtype),
            "k": kv,
            "v": kv,
            "desc": plgpu.SMEM((t.q_slots, FIELDS), jnp.int32),
            "q_full": plgpu.Barrier(num_arrivals=1 + t.wgs * kernel.cols, num_barriers=t.q_slots),
            "q_free": plgpu.Barrier(num_arrivals=t.wgs + t.convert, num_barriers=t.q_slots),
            "k_full": full,
            "v_full": full,
            "k_free": free,
            "v_free": free,
            "turn": plgpu.Barrier(num_arrivals=2),
            "clean": plgpu.Barrier(num_arrivals=1),
        }
    )


def _call(
    kernel: Kernel, inputs: dict[str, Array], outputs: dict[str, jax.ShapeDtypeStruct], interpret: Any
) -> dict[str, Array]:
    names, out_names = tuple(inputs), tuple(outputs)

    def paged_attention_hopper(*refs: Any, **scratch: Any) -> None:
        run_warpgroups(kernel, dict(zip(names + out_names, refs, strict=True)), scratch)

    results = plgpu.kernel(
        paged_attention_hopper,
        out_type=tuple(outputs.values()),
        scratch_types=_scratch(kernel),
        grid=(kernel.tiling.programs,),
        grid_names=("program",),
        num_threads=kernel.tiling.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*inputs.values())
    return dict(zip(out_names, results, strict=True))


def _gather_lse(request: AttentionRequest, tiling: plan.Tiling, table: Array, lse: Array | None) -> Array:
    """[tiles, KVH, rows] -> [T, H]."""
    assert lse is not None
    token = jnp.arange(request.num_tokens)
    table = table.reshape(plan.table_rows(request), -1)
    starts = table[plan.Q_START, : request.num_seqs + 1]
    s = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, request.num_seqs)
    within = token - starts[s]
    tile = table[plan.TILES_BEFORE, s] + within // tiling.q_tile
    within = within % tiling.q_tile
    row = within // tiling.wg_tokens * plan.ROWS + within % tiling.wg_tokens * tiling.group
    rows = row[:, None] + jnp.arange(tiling.group)[None]
    picked = lse[tile[:, None, None], jnp.arange(request.num_kv_heads)[None, :, None], rows[:, None, :]]
    picked = picked.reshape(request.num_tokens, request.num_heads)
    return jnp.where((token < starts[request.num_seqs])[:, None], picked, -jnp.inf)
