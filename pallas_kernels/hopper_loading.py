"""The loading warpgroup: it walks the program's pieces of work and streams K and V pages through a ring of stages.

It runs ahead of the others across pieces, so that the memory never idles.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan as plan
from pallas_kernels.hopper_pieces import (
    CAUSAL,
    CLEAN_HI,
    CLEAN_LO,
    DEST,
    F0,
    F1,
    FIELDS,
    FRESH_COLUMN,
    FRESH_PAGE,
    HEAD,
    LAST,
    LENGTH,
    POS,
    ROW,
    START,
    T0,
    T1,
    TILE,
    TOKENS,
    WHOLE,
    Kernel,
    div,
    next_of,
    stage_of,
)
from pallas_kernels.masks import common_span, key_span


def describe_tile(k: Kernel, table: Any, s: Array, tile: Array, head: Array) -> dict[int, Array]:
    """Fields of the whole tile `tile` of sequence `s`, DEST and LAST apart."""
    t, request = k.tiling, k.request
    q_len, seq_len = table[plan.Q_LEN, s], table[plan.SEQ_LEN, s]
    causal, start = table[plan.CAUSAL, s], table[plan.KV_START, s]
    context = seq_len - q_len
    first = tile * t.q_tile
    tokens = jnp.minimum(q_len - first, t.q_tile)
    pos = context + first
    args = {"seq_len": seq_len, "causal": causal != 0, "window": request.window, "kv_start": start}
    lo, hi = key_span(pos, pos + tokens - 1, **args)
    full_lo, full_hi = common_span(pos, pos + tokens - 1, **args)
    seq_lo, _ = key_span(context, seq_len - 1, **args)
    t0, t1 = div(lo, t.block_kv), div(jnp.maximum(hi, 0) + t.block_kv - 1, t.block_kv)
    f0 = jnp.maximum(div(full_lo + t.block_kv - 1, t.block_kv), t0)
    f1 = div(jnp.maximum(full_hi, 0), t.block_kv)
    t1 = jnp.where((hi > lo) & (tokens > 0), t1, t0)
    fresh = {}
    if request.new_kv:
        fresh[FRESH_COLUMN] = div(jnp.maximum(context, 0), request.page_size)
        fresh[FRESH_PAGE] = table[plan.FRESH_BEFORE, s] + request.num_pages
    return fresh | {
        ROW: table[plan.Q_START, s] + first,
        TOKENS: tokens,
        HEAD: head,
        POS: pos,
        LENGTH: seq_len,
        CAUSAL: causal,
        START: start,
        T0: t0,
        F0: f0,
        F1: f1,
        T1: t1,
        # Starts that decrease make more tiles than LSE has room for.
        TILE: jnp.minimum(table[plan.TILES_BEFORE, s] + tile, plan.max_tiles(request, t) - 1),
        CLEAN_LO: seq_lo,
        CLEAN_HI: seq_len,
    }


def clip_piece(fields: dict[int, Array], first: Array, end: Array) -> dict[int, Array]:
    """The part of a tile's KV tiles inside [first, end), masked tiles before F0 and from F1 on."""
    t0 = jnp.maximum(fields[T0], first)
    t1 = jnp.maximum(jnp.minimum(fields[T1], end), t0)
    f0 = jnp.clip(fields[F0], t0, t1)
    return {**fields, T0: t0, T1: t1, F0: f0, F1: jnp.clip(fields[F1], f0, t1)}


def whole_piece(
    k: Kernel, table: Any, n: Array, cursors: tuple[Array, Array]
) -> tuple[dict[int, Array], Array, tuple[Array, Array], Array]:
    """The piece at place `n` of the queue: (fields, its sequence, where to look on, whether there is such a piece)."""
    rows = k.request.num_seqs + 1
    total = table[plan.COST_BEFORE, rows], table[plan.SHORT_BEFORE, rows]
    some = n < total[0] + total[1]
    is_short, number = plan.queue(n, *total)

    def find(row: int, s: Array, wanted: Array) -> Array:
        return lax.while_loop(lambda s: wanted & (table[row, s + 1] <= number) & (s + 1 < rows), lambda s: s + 1, s)

    cursors = (
        find(plan.COST_BEFORE, cursors[0], some & ~is_short),
        find(plan.SHORT_BEFORE, cursors[1], some & is_short),
    )
    s = jnp.where(is_short, cursors[1], cursors[0])
    before = jnp.where(is_short, table[plan.SHORT_BEFORE, s], table[plan.COST_BEFORE, s])
    tiles = jnp.maximum(table[plan.TILES_BEFORE, s + 1] - table[plan.TILES_BEFORE, s], 1)
    rest = jnp.where(some, number - before, 0)
    head = lax.div(rest, tiles)
    tile = tiles - 1 - (rest - head * tiles)
    fields = clip_piece(describe_tile(k, table, s, tile, head), jnp.int32(0), jnp.int32(1 << 24))
    fields[TOKENS] = jnp.where(some, fields[TOKENS], 0)
    fields[T1] = jnp.where(some, fields[T1], fields[T0])
    fields[F0], fields[F1] = (jnp.minimum(fields[f], fields[T1]) for f in (F0, F1))
    fields[DEST] = jnp.int32(WHOLE)
    return fields, s, cursors, some


def split_piece(
    k: Kernel, table: Any, position: Array, s: Array
) -> tuple[dict[int, Array], Array, Array, tuple[Array, Array]]:
    """The piece at `position` of the line: (fields, its sequence, the next position, (whether it begins a cut tile,
    the last program that has a part of it)).
    """
    t, request = k.tiling, k.request
    rows = request.num_seqs + 1
    total = table[plan.COST_BEFORE, rows]
    part = plan.share(total, t)
    c = lax.axis_index("program")
    stop = jnp.minimum(c * part + part, total)
    s = lax.while_loop(lambda s: (table[plan.COST_BEFORE, s + 1] <= position) & (s + 1 < rows), lambda s: s + 1, s)
    width = jnp.maximum(table[plan.WIDTH, s], 1)
    tiles = jnp.maximum(table[plan.TILES_BEFORE, s + 1] - table[plan.TILES_BEFORE, s], 1)
    rest = position - table[plan.COST_BEFORE, s]
    item = lax.div(rest, width)
    skip = rest - item * width
    head = lax.div(item, tiles)
    tile = item - head * tiles
    some = position < stop
    fields = describe_tile(k, table, s, jnp.where(some, tile, 0), jnp.where(some, head, 0))
    take = jnp.minimum(width - skip, stop - position)
    first = div(fields[CLEAN_LO], t.block_kv) + skip
    fields = clip_piece(fields, first, first + jnp.where(some, take, 0))
    fields[TOKENS] = jnp.where(some, fields[TOKENS], 0)
    whole = (skip == 0) & (take == width)
    # A program's first piece may be the end or the middle of a tile, its last one the beginning.
    fields[DEST] = jnp.where(whole | ~some, WHOLE, jnp.where(skip > 0, 2 * c, 2 * c + 1))
    begins = some & ~whole & (skip == 0)
    return fields, s, position + jnp.maximum(take, 1), (begins, lax.div(position + width - 1, part))


def load_pieces(k: Kernel, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
    """The loading warpgroup's walk through the pieces."""
    t, request = k.tiling, k.request
    rows = request.num_seqs + 1
    for name in ("k_full", "v_full"):
        k.steps.init_full(scratch[name])
    table = refs["table"]
    if "table" in scratch:
        plgpu.copy_gmem_to_smem(table, scratch["table"], scratch["table_full"])
        plgpu.barrier_wait(scratch["table_full"])
        table = scratch["table"]
    table = plan.Table(table, plan.columns(request))
    program = lax.axis_index("program")
    zero = jnp.int32(0)

    def deliver(count: Array, fields: dict[int, Array], s: Array, ring: Array) -> Array:
        """Describe a piece, fetch its queries, stream its keys and values."""
        slot = count & (t.q_slots - 1)
        plgpu.barrier_wait(scratch["q_free"].at[slot])
        for f in range(FIELDS):
            scratch["desc"][slot, f] = fields[f]
        plgpu.barrier_arrive(scratch["q_full"].at[slot])
        for w in range(t.wgs):
            for c in range(k.cols):
                src = refs["q"].at[
                    pl.ds(fields[ROW] + w * t.wg_tokens, t.wg_tokens),
                    pl.ds(fields[HEAD] * t.group, t.group),
                    pl.ds(c * t.col, t.col),
                ]
                plgpu.copy_gmem_to_smem(src, k.steps.q_tma(scratch["q"], slot, w, c, t), scratch["q_full"].at[slot])
        return _stream_tiles(k, refs, scratch, fields, s, ring)

    def split_step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, position, s, ring, _ = carry
        fields, s, position, (begins, last) = split_piece(k, table, position, s)
        more = position < stop
        fields[LAST] = jnp.where(more, 0, 1)

        @pl.when(~more)
        def _for_merge() -> None:
            cut = (jnp.where(begins, last, -1), fields[ROW], fields[TOKENS], fields[HEAD], fields[TILE])
            for i, value in enumerate(cut):
                refs["cut"][program, i] = value

        return count + 1, position, s, deliver(count, fields, s, ring), more

    def whole_step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, n, cursors, ring, _ = carry
        fields, s, cursors, _ = whole_piece(k, table, n, cursors)
        n = k.steps.take_ticket(refs, scratch, count, t)
        more = n < table[plan.COST_BEFORE, rows] + table[plan.SHORT_BEFORE, rows]
        fields[LAST] = jnp.where(more, 0, 1)
        return count + 1, n, cursors, deliver(count, fields, s, ring), more

    if t.split:
        total = table[plan.COST_BEFORE, rows]
        part = plan.share(total, t)
        begin = program * part
        stop = jnp.minimum(begin + part, total)
        s = plan.find_sequence(lambda i: table[plan.COST_BEFORE, i], jnp.minimum(begin, total - 1), rows)
        lax.while_loop(lambda carry: carry[4], split_step, (zero, begin, s, zero, jnp.bool_(True)))
    else:
        lax.while_loop(lambda carry: carry[4], whole_step, (zero, program, (zero, zero), zero, jnp.bool_(True)))
    for name in ("k_free", "v_free"):  # every phase of a barrier is seen by whoever waits on it
        for i in range(t.stages):
            plgpu.barrier_wait(scratch[name].at[i])
    for i in range(t.q_slots):
        plgpu.barrier_wait(scratch["q_free"].at[i])


def _stream_tiles(
    k: Kernel, refs: dict[str, Any], scratch: dict[str, Any], fields: dict[int, Array], s: Array, ring: Array
) -> Array:
    """Issue the copies of K and V for the KV tiles of a piece."""
    t = k.tiling

    def step(tile: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        ring, pages = carry
        stage = stage_of(ring, t)
        plgpu.barrier_wait(scratch["k_free"].at[stage])
        k.steps.load_pages(refs, scratch, "k", stage, pages, fields, tile, k)
        following = k.steps.find_pages(refs, fields, s, tile + 1, k)  # in flight while this tile waits for its stage
        plgpu.barrier_wait(scratch["v_free"].at[stage])
        k.steps.load_pages(refs, scratch, "v", stage, pages, fields, tile, k)
        return next_of(ring, t), following

    pages = k.steps.find_pages(refs, fields, s, fields[T0], k)
    return lax.fori_loop(fields[T0], fields[T1], step, (ring, pages))[0]
