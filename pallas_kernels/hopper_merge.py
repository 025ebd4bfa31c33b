"""Finishes the tiles that boundaries between programs cut: a few programs a boundary, rows weighted by log-sum-exp."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan as plan

LN2 = 0.6931471805599453
LOW = -1e30
AHEAD = 8  # parts whose loads are in flight together
LANES = 16  # merging programs a boundary, for rows of one tile
EACH = (
    4  # boundaries a merging program: most have cut nothing, and each program that is launched costs all of them time
)
HELD = 16  # registers of a thread for rows in flight; as many again for what weighs them


def merge(
    kernel: Any, inputs: dict[str, Array], results: dict[str, Array], interpret: Any
) -> tuple[Array, Array | None]:
    """Write the rows of cut tiles into `out` (and `lse`), in place."""
    t = kernel.tiling
    operands = {n: results[n] for n in ("cut", "part", "part_max", "part_sum")}
    operands |= {n: inputs[n] for n in ("sinks", "scales") if n in inputs}
    names = tuple(operands)
    targets = {n: jax.new_ref(results[n]) for n in ("out", "lse") if n in results}
    lanes = min(LANES, likely_rows(kernel))

    def paged_attention_merge(*refs: Any) -> None:
        _merge_rows(kernel, dict(zip(names + tuple(targets), refs, strict=True)), lanes)

    plgpu.kernel(
        paged_attention_merge,
        out_type=(),
        grid=(t.programs // _each(t), lanes),
        grid_names=("first", "lane"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands.values(), *targets.values())
    out = jax.freeze(targets["out"])
    return out, jax.freeze(targets["lse"]) if "lse" in targets else None


def likely_rows(kernel: Any) -> int:
    """Rows of a tile with queries of the usual length."""
    return min(plan.likely_query_len(kernel.request), kernel.tiling.q_tile) * kernel.tiling.group


def rows_at_once(kernel: Any, lanes: int) -> int:
    """Rows whose parts one program loads together: the loads are what takes the time."""
    dim = kernel.request.head_dim
    values = dim // 128 if dim % 128 == 0 else dim // 4  # of a row in one thread; see `_layout`
    return max(min(HELD // (AHEAD * values), -(-likely_rows(kernel) // lanes)), 1)


def _layout(dim: int) -> Any:
    """Of one row among the threads."""
    if dim % 128 == 0:
        return plgpu.Layout.WG_STRIDED((dim,), vec_size=dim // 128)
    return plgpu.Layout.WGMMA.reduce(0)  # fewer elements than threads, or an odd number each: every warp holds a copy


def _each(t: plan.Tiling) -> int:
    return EACH if t.programs % EACH == 0 else 1


def _merge_rows(kernel: Any, refs: dict[str, Any], lanes: int) -> None:
    """Every `lanes`-th row of the tiles that begin in some programs and end in other ones, if there are such."""
    each = _each(kernel.tiling)
    step, first = kernel.tiling.programs // each, lax.axis_index("first")
    cuts = [[refs["cut"][first + n * step, i] for i in range(5)] for n in range(each)]  # loaded together

    def one(n: Array, _: None) -> None:
        cut = [
            functools.reduce(lambda x, m: jnp.where(n == m, cuts[m][i], x), range(each), cuts[0][i]) for i in range(5)
        ]
        _merge_tile(kernel, refs, lanes, first + n * step, cut)

    lax.fori_loop(0, each, one, None)


def _merge_tile(kernel: Any, refs: dict[str, Any], lanes: int, c: Array, cut: list[Array]) -> None:
    """Every `lanes`-th row of the tile that begins in program `c` and ends in program `last`, or nothing."""
    t, lane = kernel.tiling, lax.axis_index("lane")
    last, first_row, tokens, head, tile = cut
    rows, at_once = jnp.where(last < 0, 0, tokens * t.group), rows_at_once(kernel, lanes)

    def some(i: Array, _: None) -> None:
        sources, stores = [], []
        for n in range(at_once):
            row = (i * at_once + n) * lanes + lane
            within = jnp.minimum(row, rows - 1)
            token = lax.div(within, jnp.int32(t.group))
            member = within - token * t.group
            wg = lax.div(token, jnp.int32(t.wg_tokens))
            source = wg * plan.ROWS + (token - wg * t.wg_tokens) * t.group + member
            sources.append(source)
            where = (first_row + token, head * t.group + member)
            stores.append((row < rows, where, (tile, head, source)))
        for sums, (real, *places) in zip(_combined(kernel, refs, c, last, sources), stores, strict=True):
            pl.when(real)(functools.partial(_store, kernel, refs, sums, *places))

    lax.fori_loop(0, lax.div(rows - lane + lanes * at_once - 1, jnp.int32(lanes * at_once)), some, None)


Sums = tuple[Array, Array, Array]  # of a row: maximum, denominator, output so far


def _combined(kernel: Any, refs: dict[str, Any], c: Array, last: Array, rows: list[Array]) -> list[Sums]:
    """The parts of some rows together, `AHEAD` programs at a time."""
    dim = kernel.request.head_dim

    def load(i: Array, row: Array) -> Sums:
        here = i <= last
        p = jnp.minimum(i, last)
        slot = jnp.where(p == c, 2 * c + 1, 2 * p)
        m = jnp.where(here, refs["part_max"][slot, row], LOW)
        den = jnp.where(here, refs["part_sum"][slot, row], 0.0)
        return m, den, plgpu.load(refs["part"].at[slot, row], layout=_layout(dim), optimized=False)

    def step(j: Array, carry: list[Sums]) -> list[Sums]:
        first = c + j * AHEAD
        parts = [[load(first + i, row) for i in range(AHEAD)] for row in rows]
        return [_added(first, last, sums, of_row) for sums, of_row in zip(carry, parts, strict=True)]

    zero = plgpu.layout_cast(jnp.zeros((dim,), jnp.float32), _layout(dim))
    start = [(jnp.float32(LOW), jnp.float32(0.0), zero)] * len(rows)
    return lax.fori_loop(0, lax.div(last - c + AHEAD, AHEAD), step, start)


def _added(first: Array, last: Array, sums: Sums, parts: list[Sums]) -> Sums:
    """The sums of a row with the parts of programs from `first` on; those past `last` are not its own."""
    m, den, acc = sums
    top = functools.reduce(jnp.maximum, [part[0] for part in parts], m)
    scale = jnp.exp2(m - top)
    den, acc = den * scale, acc * _wide(scale, acc)
    for i, (pm, part_den, x) in enumerate(parts):
        weight = jnp.where(first + i <= last, jnp.exp2(pm - top), 0.0)
        den, acc = den + part_den * weight, acc + x * _wide(weight, acc)
    return top, den, acc


def _wide(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, [])


def _store(
    kernel: Any, refs: dict[str, Any], sums: Sums, where: tuple[Array, Array], at: tuple[Array, Array, Array]
) -> None:
    """Write a row of the output, and its LSE at (tile, head, row)."""
    request, (m, den, acc) = kernel.request, sums
    tile, head, row = at
    if request.sinks:
        sink = refs["sinks"][head, row - lax.div(row, kernel.tiling.group) * kernel.tiling.group]
        top = jnp.maximum(m, sink)
        shrink = jnp.exp2(m - top)
        m, den, acc = top, den * shrink + jnp.exp2(sink - top), acc * _wide(shrink, acc)
    some = den > 0
    safe = jnp.where(some, den, 1.0)
    inverse = 1.0 / safe
    if request.v_scale != "none":
        inverse = inverse * refs["scales"][head, 1]
    refs["out"].at[where[0], where[1]][...] = kernel.stored(acc * _wide(inverse, acc))
    if request.return_lse:
        refs["lse"][tile, head, row] = jnp.where(some, (m + jnp.log2(safe)) * LN2, -jnp.inf)
