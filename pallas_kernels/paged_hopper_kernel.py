"""The body of the Hopper kernel: one loading warpgroup, one or two computing ones, all in a persistent program.

The loading warpgroup walks the program's pieces of work (a piece is one query tile of one KV head and a range of KV
tiles), describes each in shared memory, and streams K and V pages through a ring of stages; it runs ahead of the
computing warpgroups across pieces, so that the memory never idles. Each computing warpgroup keeps 64 rows (tokens x the
query heads of one KV head) of the output in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_plan as plan
from pallas_kernels.hopper_convert import convert_tile
from pallas_kernels.hopper_steps import Steps
from pallas_kernels.masks import common_span, key_span, visible
from pallas_kernels.request import AttentionRequest

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
LOW = -1e30  # start of the running maximum: finite, so that a row without keys needs no special case

# Fields of a piece's description in shared memory.
ROW, TOKENS, HEAD, POS, LENGTH, CAUSAL, START, T0, F0, F1, T1, DEST, TILE, LAST, CLEAN_LO, CLEAN_HI = range(16)
FIELDS = 16
FRESH_COLUMN, FRESH_PAGE = 16, 17  # known to the loading side only: the first column of fresh pages, and its page
WHOLE = -1  # DEST of a piece that is a whole tile; otherwise the number of its slot among the partial results


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Static facts of one kernel and the body itself."""

    request: AttentionRequest
    tiling: plan.Tiling
    steps: Steps

    @property
    def copies(self) -> int:
        """TMA copies of one K or V tile."""
        return self.tiling.block_kv // self.tiling.chunk

    @property
    def cols(self) -> int:
        """Swizzled column blocks of a head."""
        return self.request.head_dim // self.tiling.col

    @property
    def compute_dtype(self) -> Any:
        """What the tensor cores multiply; see `hopper_convert` for an 8-bit cache."""
        return jnp.dtype(jnp.float16) if self.request.quantized else self.request.q_dtype

    @property
    def kv_col(self) -> int:
        """Columns of one swizzled tile of K and V as they are loaded."""
        if not self.request.quantized:
            return self.tiling.col
        return next(c for c in (128, 64, 32) if self.request.head_dim % c == 0)

    def stored(self, out: Array) -> Array:
        """The output in q's dtype, with its bits in the dtype of the query buffer, in which it is staged."""
        out = out.astype(self.request.q_dtype)
        return out if out.dtype == self.compute_dtype else lax.bitcast_convert_type(out, self.compute_dtype)

    def page_of(self, refs: Any, fields: Any, s: Array, copy: Any, tile: Array) -> Array:
        """The page of copy `copy` of a KV tile; past the last page of the sequence, that page again."""
        t, request = self.tiling, self.request
        last = jnp.minimum(_div(jnp.maximum(fields[LENGTH] - 1, 0), request.page_size), request.max_pages - 1)
        column = jnp.minimum(_div(tile * t.block_kv + copy * t.chunk, request.page_size), last)
        page = refs["block_table"][jnp.minimum(s, request.num_seqs - 1), column]
        page = jnp.clip(page, 0, request.num_pages - 1)
        if request.new_kv:  # fresh pages are numbered after the pool's
            page = jnp.where(column < fields[FRESH_COLUMN], page, fields[FRESH_PAGE] + column - fields[FRESH_COLUMN])
        return page

    def sources(self, refs: Any, name: str, page: Array) -> list[tuple[Any, Array, Array]]:
        """Where a page may lie: (pool, its number there, whether it is there)."""
        pages = self.request.num_pages
        if not self.request.new_kv:
            return [(refs[name], page, jnp.bool_(True))]
        fresh = jnp.clip(page - pages, 0, refs[f"new_{name}"].shape[0] - 1)
        return [
            (refs[name], jnp.minimum(page, pages - 1), page < pages),
            (refs[f"new_{name}"], fresh, page >= pages),
        ]

    def offset_of(self, copy: Any, tile: Array) -> Array:
        """The first row of copy `copy` inside its page."""
        t, request = self.tiling, self.request
        if request.page_size == t.chunk:
            return jnp.int32(0)
        position = tile * t.block_kv + copy * t.chunk
        return position - _div(position, request.page_size) * request.page_size

    def copies_in_use(self, fields: Any, tile: Array) -> Array:
        """Copies of a KV tile that hold a key of the sequence; the others are left out, their rows masked and zeroed."""
        t = self.tiling
        return jnp.clip(_div(fields[LENGTH] - tile * t.block_kv + (t.chunk - 1), t.chunk), 1, self.copies)

    def head_of(self, fields: Any) -> Array:
        """The KV head of a piece."""
        return fields[HEAD]

    def body(self, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
        """What each warpgroup of each program does."""
        wgs = self.tiling.wgs
        wg = lax.axis_index("wg")
        several = self.tiling.warpgroups > 2  # with two, each thread has all the registers it can use

        @pl.when(wg < wgs)
        def _compute() -> None:
            if several:
                plgpu.set_max_registers(self.tiling.registers[0], action="increase")
            _compute_pieces(self, refs, scratch, wg)

        @pl.when(wg == wgs)
        def _load() -> None:
            if several:
                plgpu.set_max_registers(self.tiling.registers[1], action="decrease")
            _load_pieces(self, refs, scratch)

        if self.request.quantized:

            @pl.when(wg == wgs + 1)
            def _convert() -> None:
                plgpu.set_max_registers(self.tiling.registers[2], action="decrease")
                _convert_pieces(self, scratch)


# ---------------------------------------------------------------------------------------------------- the loading side


def stage_of(ring: Array, t: plan.Tiling) -> Array:
    """The stage of a ring position; positions run through two rounds, so that they tell a barrier's phase as well."""
    return jnp.where(ring >= t.stages, ring - t.stages, ring)


def next_of(ring: Array, t: plan.Tiling) -> Array:
    """The ring position after this one."""
    return jnp.where(ring + 1 == 2 * t.stages, 0, ring + 1)


def _div(a: Array, b: int) -> Array:
    """Division of non-negative integers; a shift where it can be."""
    if b & (b - 1) == 0:
        return lax.shift_right_logical(a, jnp.int32(b.bit_length() - 1))
    return lax.div(a, jnp.int32(b))


def describe_tile(k: Kernel, table: Any, s: Array, tile: Array, head: Array) -> dict[int, Array]:
    """Fields of the whole tile `tile` of sequence `s`, DEST and LAST apart."""
    t, request = k.tiling, k.request
    q_len, seq_len = table[plan.Q_LEN, s], table[plan.SEQ_LEN, s]
    causal, start = table[plan.CAUSAL, s], table[plan.KV_START, s]
    context = seq_len - q_len
    first = tile * t.q_tile
    tokens = jnp.minimum(q_len - first, t.q_tile)
    pos = context + first
    args = dict(seq_len=seq_len, causal=causal != 0, window=request.window, kv_start=start)
    lo, hi = key_span(pos, pos + tokens - 1, **args)
    full_lo, full_hi = common_span(pos, pos + tokens - 1, **args)
    seq_lo, _ = key_span(context, seq_len - 1, **args)
    t0, t1 = _div(lo, t.block_kv), _div(jnp.maximum(hi, 0) + t.block_kv - 1, t.block_kv)
    f0 = jnp.maximum(_div(full_lo + t.block_kv - 1, t.block_kv), t0)
    f1 = _div(jnp.maximum(full_hi, 0), t.block_kv)
    t1 = jnp.where((hi > lo) & (tokens > 0), t1, t0)
    fresh = {}
    if request.new_kv:
        fresh[FRESH_COLUMN] = _div(jnp.maximum(context, 0), request.page_size)
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
        TILE: table[plan.TILES_BEFORE, s] + tile,
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
    first = _div(fields[CLEAN_LO], t.block_kv) + skip
    fields = clip_piece(fields, first, first + jnp.where(some, take, 0))
    fields[TOKENS] = jnp.where(some, fields[TOKENS], 0)
    whole = (skip == 0) & (take == width)
    # A program's first piece may be the end or the middle of a tile, its last one the beginning.
    fields[DEST] = jnp.where(whole | ~some, WHOLE, jnp.where(skip > 0, 2 * c, 2 * c + 1))
    begins = some & ~whole & (skip == 0)
    return fields, s, position + jnp.maximum(take, 1), (begins, lax.div(position + width - 1, part))


def _load_pieces(k: Kernel, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
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

    def whole_step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
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


# -------------------------------------------------------------------------------------------------- the computing side


@dataclasses.dataclass(frozen=True)
class Described:
    """A piece's fields, read from shared memory at each use: registers are what the computing side is short of."""

    desc: Any
    slot: Array

    def __getitem__(self, field: int) -> Array:
        return self.desc[self.slot, field]


def _convert_pieces(k: Kernel, scratch: dict[str, Any]) -> None:
    """The converting warpgroup's walk through the pieces."""
    t = k.tiling
    for name in ("k_free", "v_free"):
        for i in range(t.stages):
            plgpu.barrier_arrive(scratch[name].at[i])
    for i in range(t.q_slots):
        plgpu.barrier_arrive(scratch["q_free"].at[i])

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, ring, _ = carry
        slot = count & (t.q_slots - 1)
        plgpu.barrier_wait(scratch["q_full"].at[slot])
        fields = Described(scratch["desc"], slot)
        lo, hi = fields[CLEAN_LO], fields[CLEAN_HI]

        def step(tile: Array, ring: Array) -> Array:
            span = lo - tile * t.block_kv, hi - tile * t.block_kv
            for name in ("k", "v"):
                convert_tile(k, scratch, name, stage_of(ring, t), ring >= t.stages, span)
            return next_of(ring, t)

        ring = lax.fori_loop(fields[T0], fields[T1], step, ring)
        more = fields[LAST] == 0
        plgpu.barrier_arrive(scratch["q_free"].at[slot])
        return count + 1, ring, more

    lax.while_loop(lambda carry: carry[2], body, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))
    for name in ("k16", "v16"):
        for i in range(scratch[name].shape[0]):
            plgpu.barrier_wait(scratch[f"{name}_free"].at[i])


def _wait_tile(k: Kernel, scratch: dict[str, Any], name: str, ring: Array) -> Array:
    """Wait for a K or V tile that the tensor cores can take; returns its stage."""
    t = k.tiling
    stage = stage_of(ring, t)
    if not k.request.quantized:
        k.steps.wait_full(scratch[f"{name}_full"], stage, ring >= t.stages)
        return stage
    stage = stage if scratch[f"{name}16"].shape[0] == t.stages else jnp.int32(0)
    plgpu.barrier_wait(scratch[f"{name}16_full"].at[stage])
    return stage


def _free_tile(k: Kernel, scratch: dict[str, Any], name: str, stage: Array) -> None:
    plgpu.barrier_arrive(scratch[f"{name}16_free" if k.request.quantized else f"{name}_free"].at[stage])


def _buffer(k: Kernel, scratch: dict[str, Any], name: str) -> Any:
    return scratch[f"{name}16" if k.request.quantized else name]


def _compute_pieces(k: Kernel, refs: dict[str, Any], scratch: dict[str, Any], wg: Array) -> None:
    t = k.tiling
    desc = scratch["desc"]
    for name in ("k", "v"):
        for i in range(_buffer(k, scratch, name).shape[0]):
            _free_tile(k, scratch, name, i)
    for i in range(t.q_slots):
        plgpu.barrier_arrive(scratch["q_free"].at[i])

    # The two warpgroups alternate between tensor cores and softmax: `turn` hands the tensor cores over and waits for
    # them. The second is half a step behind the first in every piece. It gives its first turn of the next piece, and
    # the first its last turn of this one, before the epilogue: neither may hold the other up while it waits for a query
    # tile, which the loading warpgroup cannot fetch until both have left an earlier one.
    give = (lambda: plgpu.barrier_arrive(scratch["turn"])) if t.wgs == 2 else lambda: None
    take = (lambda: plgpu.barrier_wait(scratch["turn"])) if t.wgs == 2 else lambda: None

    def turn() -> None:
        give()
        take()

    pl.when(wg == 1)(give)

    def leave(slot: Array) -> None:
        """Give a query slot back once the copy engine has read the output that was staged in it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(scratch["q_free"].at[slot])

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, ring, _ = carry
        slot = count & (t.q_slots - 1)
        plgpu.barrier_wait(scratch["q_full"].at[slot])
        fields = Described(desc, slot)
        if t.q_slots == 2:
            pl.when(count > 0)(lambda: leave(1 - slot))
        pl.when(wg == 1)(take)
        state = _attend_piece(k, refs, scratch, fields, wg, slot, ring, turn)
        acc, m, l, ring = state
        pl.when((wg == 0) | (fields[LAST] == 0))(give)
        _finish(k, refs, scratch, fields, wg, slot, acc, m, l)
        more = fields[LAST] == 0  # read before the slot is given back
        if t.q_slots == 1:
            leave(slot)
        else:
            pl.when(~more)(lambda: leave(slot))
        pl.when(wg == 0)(take)
        return count + 1, ring, more

    lax.while_loop(lambda carry: carry[2], body, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))


def _rows(k: Kernel, value: float, dtype: Any = jnp.float32) -> Array:
    return plgpu.layout_cast(jnp.full((plan.ROWS,), value, dtype), plgpu.Layout.WGMMA.reduce(1))


def _across(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _attend_piece(
    k: Kernel,
    refs: dict[str, Any],
    scratch: dict[str, Any],
    fields: Described,
    wg: Array,
    slot: Array,
    ring: Array,
    turn: Any,
) -> tuple[Array, Array, Array, Array]:
    t, request = k.tiling, k.request
    shape = (plan.ROWS, t.block_kv)
    scores = functools.partial(_scores, k, refs, fields, wg)
    plain = request.soft_cap is None and not request.alibi and request.scale > 0

    queries = k.steps.q_operand(scratch["q"], slot, wg, k)
    factor = request.scale * LOG2E if plain else 1.0
    if plain and request.k_scale != "none":
        factor = refs["scales"][fields[HEAD], 0] * factor

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        acc, m, l, ring = carry
        stage = _wait_tile(k, scratch, "k", ring)
        s = k.steps.qk(queries, _buffer(k, scratch, "k"), stage, turn, k)
        _free_tile(k, scratch, "k", stage)
        s = scores(s, tile, masked, plain)
        clean_first = masked and not request.quantized
        if clean_first:
            stage = _wait_tile(k, scratch, "v", ring)
            _clean_values(k, scratch, fields, wg, tile, stage)
        m_new = jnp.maximum(m, s.max(axis=1) * factor)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * factor - _across(m_new, shape))
        acc = acc * _across(alpha, acc.shape)
        l = l * alpha + p.sum(axis=1)
        p = p.astype(k.compute_dtype)
        acc, l, m_new, p = lax.optimization_barrier((acc, l, m_new, p))
        if t.wgs == 2:
            plgpu.barrier_arrive(scratch["turn"])
        if not clean_first:
            stage = _wait_tile(k, scratch, "v", ring)
        if t.wgs == 2:
            plgpu.barrier_wait(scratch["turn"])
        acc = k.steps.pv(acc, p, _buffer(k, scratch, "v"), stage, k)
        _free_tile(k, scratch, "v", stage)
        return acc, m_new, l, next_of(ring, t)

    acc = plgpu.layout_cast(jnp.zeros((plan.ROWS, request.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    carry = (acc, _rows(k, LOW), _rows(k, 0.0), ring)
    masked, whole = functools.partial(step, masked=True), functools.partial(step, masked=False)
    t0, f0, f1, t1 = fields[T0], fields[F0], fields[F1], fields[T1]
    if t.wgs == 2:
        # A warpgroup without tokens (decoding beside prefill) leaves the tensor cores to the other.
        idle = fields[TOKENS] <= wg * t.wg_tokens
        skip = functools.partial(_skip_tile, k, scratch, fields, wg, turn)
        ring = lax.fori_loop(t0, jnp.where(idle, t1, t0), skip, ring)
        t0, f0, f1 = (jnp.where(idle, t1, x) for x in (t0, f0, f1))
        carry = (*carry[:3], ring)
    if request.window[0] is not None or request.kv_start:
        carry = lax.fori_loop(t0, f0, masked, carry)
    carry = lax.fori_loop(f0, f1, whole, carry)
    return lax.fori_loop(f1, t1, masked, carry)


def _skip_tile(
    k: Kernel, scratch: dict[str, Any], fields: Described, wg: Array, turn: Any, tile: Array, ring: Array
) -> Array:
    """A KV tile as a warpgroup without tokens sees it: everything that the others wait for, and no work."""
    _free_tile(k, scratch, "k", _wait_tile(k, scratch, "k", ring))
    turn()
    stage = _wait_tile(k, scratch, "v", ring)
    if not k.request.quantized:
        _clean_values(k, scratch, fields, wg, tile, stage)
    turn()
    _free_tile(k, scratch, "v", stage)
    return next_of(ring, k.tiling)


def _scores(
    k: Kernel, refs: dict[str, Any], fields: dict[int, Array], wg: Array, s: Array, tile: Array, masked: bool, plain: bool
) -> Array:
    """Scale (unless `plain`), cap, bias and mask; in units of log2 unless `plain`."""
    t, request = k.tiling, k.request
    if not plain:
        s = s * request.scale
        if request.k_scale != "none":
            s = s * refs["scales"][fields[HEAD], 0]
        if request.soft_cap is not None:
            # The chip's tanh is good to 5e-4 only, too coarse for a cap of 50: by exponentials instead.
            e = jnp.exp2(s * (2 * LOG2E / request.soft_cap))
            s = request.soft_cap * (1.0 - 2.0 / (1.0 + e))
    if masked or request.alibi:
        layout = plgpu.Layout.WGMMA
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout)
        q_pos = _div(row, t.group) + (fields[POS] + wg * t.wg_tokens)
        k_pos = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout) + tile * t.block_kv
        if request.alibi:
            slopes = plgpu.load(refs["slopes"].at[fields[HEAD]], layout=layout.reduce(1), optimized=False)
            s = s - _across(slopes, s.shape) * jnp.abs(q_pos - k_pos).astype(jnp.float32)
    if not plain:
        s = s * LOG2E
    if masked:
        ok = visible(
            q_pos,
            k_pos,
            seq_len=fields[LENGTH],
            causal=request.causal if request.causal is not None else fields[CAUSAL] != 0,
            window=request.window,
            kv_start=fields[START] if request.kv_start else None,
        )
        s = jnp.where(ok, s, -jnp.inf)
    return s


def _clean_values(
    k: Kernel, scratch: dict[str, Any], fields: dict[int, Array], wg: Array, tile: Array, stage: Array
) -> None:
    """Zero the V rows that no query of the sequence sees: 0 x NaN of a stale slot would be NaN.

    The first warpgroup does it and the second, which always comes later in a tile, waits.
    """
    t = k.tiling
    lo, hi = fields[CLEAN_LO] - tile * t.block_kv, fields[CLEAN_HI] - tile * t.block_kv

    @pl.when((lo > 0) | (hi < t.block_kv))
    def _dirty() -> None:
        @pl.when(wg == 0)
        def _zero() -> None:
            k.steps.zero_rows(scratch, stage, lo, hi, k)
            plgpu.commit_smem()
            if t.wgs == 2:
                plgpu.barrier_arrive(scratch["clean"])

        if t.wgs == 2:
            @pl.when(wg == 1)
            def _wait() -> None:
                plgpu.barrier_wait(scratch["clean"])


def _finish(
    k: Kernel,
    refs: dict[str, Any],
    scratch: dict[str, Any],
    fields: Described,
    wg: Array,
    slot: Array,
    acc: Array,
    m: Array,
    l: Array,
) -> None:
    t, request = k.tiling, k.request
    rows = pl.ds(wg * plan.ROWS, plan.ROWS)

    @pl.when(fields[DEST] == WHOLE)
    def _whole() -> None:
        top, total, scaled = m, l, acc
        if request.sinks:
            sink = plgpu.load(refs["sinks"].at[fields[HEAD]], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            top = jnp.maximum(m, sink)
            shrink = jnp.exp2(m - top)
            total = l * shrink + jnp.exp2(sink - top)
            scaled = acc * _across(shrink, acc.shape)
        some = total > 0
        inverse = 1.0 / jnp.where(some, total, 1.0)
        if request.v_scale != "none":
            inverse = inverse * refs["scales"][fields[HEAD], 1]
        out = k.stored(scaled * _across(inverse, acc.shape))
        for c in range(k.cols):
            k.steps.o_put(scratch["q"], slot, wg, c, lax.slice(out, (0, c * t.col), (plan.ROWS, (c + 1) * t.col)), t)
        plgpu.commit_smem()
        _store_rows(k, refs, scratch, fields, wg, slot)
        if request.return_lse:
            lse = jnp.where(some, (top + jnp.log2(jnp.where(some, total, 1.0))) * LN2, -jnp.inf)
            refs["lse"][fields[TILE], fields[HEAD], rows] = lse

    if t.split:
        @pl.when(fields[DEST] != WHOLE)
        def _part() -> None:
            refs["part"][fields[DEST], rows, :] = acc
            refs["part_max"][fields[DEST], rows] = m
            refs["part_sum"][fields[DEST], rows] = l


def _store_rows(
    k: Kernel, refs: dict[str, Any], scratch: dict[str, Any], fields: dict[int, Array], wg: Array, slot: Array
) -> None:
    """Copy the valid tokens of a warpgroup to the output: the rows after them belong to someone else.

    A tile starts at any row, so the copies go through a view that is swizzled but not tiled by 8 rows, and a ragged end
    is written by copies of 1, 2, 4, ... tokens.
    """
    t = k.tiling
    tokens = jnp.clip(fields[TOKENS] - wg * t.wg_tokens, 0, t.wg_tokens)
    first = fields[ROW] + wg * t.wg_tokens

    def copy(offset: Array | int, count: int) -> None:
        for c in range(k.cols):
            src = k.steps.q_tma(scratch["q"], slot, wg, c, t, offset, count)
            dst = refs["out"].at[
                pl.ds(first + offset, count), pl.ds(fields[HEAD] * t.group, t.group), pl.ds(c * t.col, t.col)
            ]
            plgpu.copy_smem_to_gmem(src, dst, commit_group=False)

    pl.when(tokens == t.wg_tokens)(lambda: copy(0, t.wg_tokens))

    @pl.when(tokens < t.wg_tokens)
    def _ragged() -> None:
        count = 1 << max(t.wg_tokens - 1, 1).bit_length() - 1
        while count:
            done = tokens & ~jnp.int32(2 * count - 1)
            pl.when(tokens & count != 0)(functools.partial(copy, done, count))
            count //= 2

    plgpu.commit_smem_to_gmem_group()
