"""The computing warpgroups: each keeps 64 rows (tokens x the query heads of one KV head) of the output in registers."""

from __future__ import annotations

import functools
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
    HEAD,
    LAST,
    LENGTH,
    LN2,
    LOG2E,
    LOW,
    POS,
    ROW,
    START,
    T0,
    T1,
    TILE,
    TOKENS,
    WHOLE,
    Described,
    Kernel,
    div,
    next_of,
    stage_of,
    wide_of,
)
from pallas_kernels.masks import visible


def _wait_tile(k: Kernel, scratch: dict[str, Any], name: str, ring: Array) -> Array:
    """Wait for a K or V tile that the tensor cores can take; returns its stage."""
    t = k.tiling
    stage = _stage(k, scratch, name, ring)
    if k.request.quantized:
        plgpu.barrier_wait(scratch[f"{name}16_full"].at[stage])
    else:
        k.steps.wait_full(scratch[f"{name}_full"], stage, ring >= t.stages)
    return stage


def _stage(k: Kernel, scratch: dict[str, Any], name: str, ring: Array) -> Array:
    t = k.tiling
    return wide_of(ring, t, scratch[f"{name}16"].shape[0]) if k.request.quantized else stage_of(ring, t)


def _free_tile(k: Kernel, scratch: dict[str, Any], name: str, stage: Array | int) -> None:
    plgpu.barrier_arrive(scratch[f"{name}16_free" if k.request.quantized else f"{name}_free"].at[stage])


def _buffer(k: Kernel, scratch: dict[str, Any], name: str) -> Any:
    return scratch[f"{name}16" if k.request.quantized else name]


def compute_pieces(k: Kernel, refs: dict[str, Any], scratch: dict[str, Any], wg: Array) -> None:
    """A computing warpgroup's walk through the pieces."""
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
        acc, m, den, ring = state
        pl.when((wg == 0) | (fields[LAST] == 0))(give)
        _finish(k, refs, scratch, fields, wg, slot, acc, m, den)
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

    def score(ring: Array) -> Array:
        """The raw scores of a KV tile."""
        stage = _wait_tile(k, scratch, "k", ring)
        s = k.steps.qk(queries, _buffer(k, scratch, "k"), stage, turn, k)
        _free_tile(k, scratch, "k", stage)
        return s

    def weigh(tile: Array, s: Array, sums: tuple[Array, ...], ring: Array, masked: bool) -> tuple[Array, ...]:
        """Scores to probabilities: (output so far, shrunk; maximum; denominator; probabilities)."""
        acc, m, den = sums
        s = scores(s, tile, masked, plain)
        if masked and not request.quantized:
            _clean_values(k, scratch, fields, wg, tile, _wait_tile(k, scratch, "v", ring))
        m_new = jnp.maximum(m, s.max(axis=1) * factor)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * factor - _across(m_new, shape))
        acc = acc * _across(alpha, acc.shape)
        den = den * alpha + p.sum(axis=1)
        p = p.astype(k.compute_dtype)
        return lax.optimization_barrier((acc, m_new, den, p))

    def gather(acc: Array, p: Array, ring: Array, masked: bool) -> Array:
        """The output with a tile's values."""
        if t.wgs == 2:
            plgpu.barrier_arrive(scratch["turn"])
        waited = masked and not request.quantized  # to clean them
        stage = _stage(k, scratch, "v", ring) if waited else _wait_tile(k, scratch, "v", ring)
        if t.wgs == 2:
            plgpu.barrier_wait(scratch["turn"])
        acc = k.steps.pv(acc, p, _buffer(k, scratch, "v"), stage, k)
        _free_tile(k, scratch, "v", stage)
        return acc

    def step(tile: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        *sums, ring = carry
        acc, m, den, p = weigh(tile, score(ring), tuple(sums), ring, masked)
        return gather(acc, p, ring, masked), m, den, next_of(ring, t)

    acc = plgpu.layout_cast(jnp.zeros((plan.ROWS, request.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    carry: tuple[Array, ...] = (acc, _rows(k, LOW), _rows(k, 0.0), ring)
    t0, f0, f1, t1 = fields[T0], fields[F0], fields[F1], fields[T1]
    masked, whole = functools.partial(step, masked=True), functools.partial(step, masked=False)
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
    k: Kernel, refs: dict[str, Any], fields: Described, wg: Array, s: Array, tile: Array, masked: bool, plain: bool
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
        q_pos = div(row, t.group) + (fields[POS] + wg * t.wg_tokens)
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


def _clean_values(k: Kernel, scratch: dict[str, Any], fields: Described, wg: Array, tile: Array, stage: Array) -> None:
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
    den: Array,
) -> None:
    t, request = k.tiling, k.request
    rows = pl.ds(wg * plan.ROWS, plan.ROWS)

    @pl.when(fields[DEST] == WHOLE)
    def _whole() -> None:
        top, total, scaled = m, den, acc
        if request.sinks:
            sink = plgpu.load(refs["sinks"].at[fields[HEAD]], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            top = jnp.maximum(m, sink)
            shrink = jnp.exp2(m - top)
            total = den * shrink + jnp.exp2(sink - top)
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

            @pl.when(fields[TOKENS] > 0)  # an idle program's piece stands for somebody else's tile
            def _lse() -> None:
                lse = jnp.where(some, (top + jnp.log2(jnp.where(some, total, 1.0))) * LN2, -jnp.inf)
                refs["lse"][fields[TILE], fields[HEAD], rows] = lse

    if t.split:

        @pl.when(fields[DEST] != WHOLE)
        def _part() -> None:
            refs["part"][fields[DEST], rows, :] = acc
            refs["part_max"][fields[DEST], rows] = m
            refs["part_sum"][fields[DEST], rows] = den


def _store_rows(
    k: Kernel, refs: dict[str, Any], scratch: dict[str, Any], fields: Described, wg: Array, slot: Array
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
