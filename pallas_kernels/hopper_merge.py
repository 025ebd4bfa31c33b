"""Finishes the tiles that boundaries between programs cut: a few programs a boundary, rows weighted by log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan as plan

LN2 = 0.6931471805599453
LOW = -1e30
AHEAD = 8  # parts whose loads are in flight together
LANES = 16  # merging programs a boundary; each one that is launched costs all of them time, cut or not


def merge(
    kernel: Any, inputs: dict[str, Array], results: dict[str, Array], interpret: Any
) -> tuple[Array, Array | None]:
    """Write the rows of cut tiles into `out` (and `lse`), in place."""
    t = kernel.tiling
    operands = {n: results[n] for n in ("cut", "part", "part_max", "part_sum")}
    operands |= {n: inputs[n] for n in ("sinks", "scales") if n in inputs}
    names = tuple(operands)
    targets = {n: jax.new_ref(results[n]) for n in ("out", "lse") if n in results}
    lanes = min(LANES, min(plan.likely_query_len(kernel.request), t.q_tile) * t.group)

    def paged_attention_merge(*refs: Any) -> None:
        _merge_rows(kernel, dict(zip(names + tuple(targets), refs, strict=True)), lanes)

    plgpu.kernel(
        paged_attention_merge,
        out_type=(),
        grid=(t.programs, lanes),
        grid_names=("program", "lane"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands.values(), *targets.values())
    out = jax.freeze(targets["out"])
    return out, jax.freeze(targets["lse"]) if "lse" in targets else None


def _merge_rows(kernel: Any, refs: dict[str, Any], lanes: int) -> None:
    """Every `lanes`-th row of the tile that begins in this program and ends in program `last`, if there is one."""
    t = kernel.tiling
    c, lane = lax.axis_index("program"), lax.axis_index("lane")
    last, first_row, tokens, head, tile = (refs["cut"][c, i] for i in range(5))

    def one(i: Array, _: None) -> None:
        row = i * lanes + lane
        token = lax.div(row, jnp.int32(t.group))
        member = row - token * t.group
        wg = lax.div(token, jnp.int32(t.wg_tokens))
        source = wg * plan.ROWS + (token - wg * t.wg_tokens) * t.group + member
        _combine(kernel, refs, c, last, source, (first_row + token, head * t.group + member), (tile, head))

    rows = jnp.where(last < 0, 0, tokens * t.group)
    lax.fori_loop(0, lax.div(rows - lane + lanes - 1, jnp.int32(lanes)), one, None)


def _combine(
    kernel: Any,
    refs: dict[str, Any],
    c: Array,
    last: Array,
    row: Array,
    where: tuple[Array, Array],
    tile: tuple[Array, Array],
) -> None:
    request = kernel.request
    dim = request.head_dim
    if dim % 128 == 0:
        layout: Any = plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)
    else:  # fewer elements than threads, or an odd number each: every warp holds a copy
        layout = plgpu.Layout.WGMMA.reduce(0)

    def wide(x: Array) -> Array:
        return lax.broadcast_in_dim(x, (dim,), [])

    def load(i: Array) -> tuple[Array, Array, Array]:
        here = i <= last
        p = jnp.minimum(i, last)
        slot = jnp.where(p == c, 2 * c + 1, 2 * p)
        m = jnp.where(here, refs["part_max"][slot, row], LOW)
        den = jnp.where(here, refs["part_sum"][slot, row], 0.0)
        return m, den, plgpu.load(refs["part"].at[slot, row], layout=layout, optimized=False)

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        m, den, acc = carry
        parts = [load(c + j * AHEAD + i) for i in range(AHEAD)]
        top = m
        for part in parts:
            top = jnp.maximum(top, part[0])
        scale = jnp.exp2(m - top)
        den, acc = den * scale, acc * wide(scale)
        for i, (pm, part_den, x) in enumerate(parts):
            weight = jnp.where(c + j * AHEAD + i <= last, jnp.exp2(pm - top), 0.0)
            den, acc = den + part_den * weight, acc + x * wide(weight)
        return top, den, acc

    steps = lax.div(last - c + AHEAD, AHEAD)
    zero = plgpu.layout_cast(jnp.zeros((dim,), jnp.float32), layout)
    m, den, acc = lax.fori_loop(0, steps, step, (jnp.float32(LOW), jnp.float32(0.0), zero))
    if request.sinks:
        sink = refs["sinks"][tile[1], row - lax.div(row, kernel.tiling.group) * kernel.tiling.group]
        top = jnp.maximum(m, sink)
        shrink = jnp.exp2(m - top)
        m, den, acc = top, den * shrink + jnp.exp2(sink - top), acc * wide(shrink)
    some = den > 0
    safe = jnp.where(some, den, 1.0)
    inverse = 1.0 / safe
    if request.v_scale != "none":
        inverse = inverse * refs["scales"][tile[1], 1]
    refs["out"].at[where[0], where[1]][...] = kernel.stored(acc * wide(inverse))
    if request.return_lse:
        refs["lse"][tile[0], tile[1], row] = jnp.where(some, (m + jnp.log2(safe)) * LN2, -jnp.inf)
