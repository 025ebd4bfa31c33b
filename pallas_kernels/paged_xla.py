"""Paged attention in plain JAX: the specification of the call, and the CPU path.

Blockwise: a loop over query tiles, in it a loop over key tiles of whole pages, so that no array of size T x KV length
and no gathered copy of a sequence's keys ever exists. Lengths, tables and flags may all be traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kv_pages, masks, online_softmax
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.work_plan import Sequences, query_tiles, sequences

# Query and key tiles that ran fastest on a two-core AVX-512 host: large enough to keep XLA's matrix product busy,
# small enough that a tile of logits (H x rows x keys x 4 bytes) stays near the cache.
WIDE_ROWS, NARROW_ROWS = 256, 16
LOGITS_ROWS = 8192  # rows x heads of a wide tile
KEYS, KEYS_OF_NARROW, TOGETHER = 256, 128, 4  # the narrow ones go four at a time where all of them are seen


def why_not(request: AttentionRequest, device: str | None = None) -> tuple[str, ...]:
    """Nothing: this path answers every valid request."""
    del request, device
    return ()


class Tile(NamedTuple):
    """One query tile: scalars of its sequence and the rows that it computes."""

    seq: Array  # index of the sequence
    seq_len: Array
    context_len: Array
    start: Array  # first row of the sequence in q
    position: Array  # int32 [rows] query positions
    live: Array  # bool [rows] rows that belong to the tile
    first: Array  # position of the first live row
    last: Array  # position of the last live row


class Source(NamedTuple):
    """Where keys come from: [begin, end) of positions, and a function that brings K, V and scales of some key tiles."""

    begin: Array
    end: Array
    origin: Array | int  # position of key 0 of tile 0
    keys: int  # tokens a tile
    together: int  # tiles that are taken at once where all of their keys are seen
    fetch: Callable[[Array, int], tuple[Array, Array, Array | None, Array | None]]  # (first tile, number of tiles)


def attend(request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array | None]:
    """Attention of every query over the pages of its sequence; see `jattn.paged_attention` for the meaning."""
    r, ops = request, operands
    if r.num_tokens == 0 or r.num_seqs == 0:
        lse = jnp.full((r.num_tokens, r.num_heads), -jnp.inf, jnp.float32)
        return jnp.zeros_like(ops.q), lse if r.return_lse else None
    wide, narrow = _tile_rows(r)
    if wide > r.num_tokens:  # tiles of one size whatever the batch; make room for one
        ops = dataclasses.replace(ops, q=jnp.pad(ops.q, ((0, wide - r.num_tokens), (0, 0), (0, 0))))
    total = ops.q.shape[0]
    seqs = sequences(ops.query_start_loc, ops.seq_lens, r.num_tokens, r.max_pages * r.page_size, r.new_kv)
    tiles = query_tiles(seqs.query_len, r.num_tokens, wide)

    def one_tile(n: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        seq, offset = tiles.seq[n], tiles.offset[n]
        rows = seqs.query_len[seq] - offset

        def compute(size: int) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
            return lambda res: _run_tile(r, ops, seqs, seq, offset, size, res)

        if narrow == wide:
            return compute(wide)(results)
        return lax.cond(rows <= narrow, compute(narrow), compute(wide), results)

    results = (jnp.zeros_like(ops.q), jnp.full((total, r.num_heads), -jnp.inf, jnp.float32))
    out, lse = lax.fori_loop(0, tiles.num_tiles, one_tile, results)
    out, lse = out[: r.num_tokens], lse[: r.num_tokens]
    return out, lse if r.return_lse else None


def _tile_rows(r: AttentionRequest) -> tuple[int, int]:
    """Rows of a wide and of a narrow tile; equal where one size serves."""
    if r.batch_invariant:  # nothing here may depend on the batch
        return WIDE_ROWS, NARROW_ROWS
    wide = min(WIDE_ROWS, max(NARROW_ROWS, LOGITS_ROWS // r.num_heads), r.max_query_len, r.num_tokens)
    return wide, NARROW_ROWS if wide >= 4 * NARROW_ROWS else wide


def _run_tile(
    r: AttentionRequest,
    ops: AttentionOperands,
    seqs: Sequences,
    seq: Array,
    offset: Array,
    rows: int,
    results: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Compute one query tile and write its live rows."""
    row = seqs.start[seq] + offset
    index = offset + jnp.arange(rows)  # counted within the sequence
    context_len, query_len = seqs.context_len[seq], seqs.query_len[seq]
    tile = Tile(
        seq=seq,
        seq_len=seqs.seq_len[seq],
        context_len=context_len,
        start=seqs.start[seq],
        position=context_len + index,
        live=index < query_len,
        first=context_len + offset,
        last=context_len + jnp.minimum(offset + rows, query_len) - 1,
    )
    shape = (rows, r.num_kv_heads, r.group_size, r.head_dim)
    q = ops.q[jnp.minimum(row + jnp.arange(rows), ops.q.shape[0] - 1)]
    q = q.reshape(shape).transpose(1, 2, 0, 3)  # [KVH, G, rows, D]

    state = online_softmax.empty(q.shape[:3], r.head_dim)
    context_end = tile.context_len if r.new_kv else tile.seq_len
    state = _sweep(r, ops, tile, _page_source(r, ops, tile, context_end, rows), q, state)
    if ops.v_scale is not None and r.v_scale != "token":
        v_scale = ops.v_scale if r.v_scale == "scalar" else ops.v_scale[:, None, None, None]
        state = state._replace(values=state.values * v_scale)
    if r.new_kv:
        state = _sweep(r, ops, tile, _new_source(r, ops, tile, rows), q, state)
    sinks = None if ops.sinks is None else ops.sinks.reshape(r.num_kv_heads, r.group_size, 1)
    out, lse = online_softmax.finish(state, sinks)
    out = out.transpose(2, 0, 1, 3).reshape(rows, r.num_heads, r.head_dim).astype(ops.q.dtype)
    lse = lse.transpose(2, 0, 1).reshape(rows, r.num_heads)
    return _write_rows(results[0], out, row, tile.live), _write_rows(results[1], lse, row, tile.live)


def _write_rows(into: Array, rows: Array, at: Array, live: Array) -> Array:
    """Write the live rows at `at` and after; a slice near the end starts earlier, and its rows are moved to fit."""
    count = rows.shape[0]
    start = jnp.minimum(at, into.shape[0] - count)
    source = jnp.arange(count) - (at - start)
    live = (live[source] & (source >= 0)).reshape(-1, *[1] * (rows.ndim - 1))
    old = lax.dynamic_slice_in_dim(into, start, count)
    return lax.dynamic_update_slice_in_dim(into, jnp.where(live, rows[source], old), start, 0)


def _page_source(r: AttentionRequest, ops: AttentionOperands, tile: Tile, end: Array, rows: int) -> Source:
    keys, together = (KEYS, 1) if rows > NARROW_ROWS else (KEYS_OF_NARROW, TOGETHER)
    pages = max(1, keys // r.page_size)
    together = max(1, min(together, keys * together // (pages * r.page_size)))
    if not r.batch_invariant:
        pages = min(pages, r.max_pages)
        together = min(together, -(-r.max_pages // pages))

    def fetch(j: Array, count: int) -> tuple[Array, Array, Array | None, Array | None]:
        ids = kv_pages.page_ids(ops.block_table, tile.seq, j * pages, count * pages, r.num_pages)

        def run(pool: Array) -> Array:
            return kv_pages.gather_heads_first(pool, ids, r.layout)

        k_scale: Array | None = None
        if ops.k_scale is not None:
            k_scale = run(ops.k_scale) if r.k_scale == "token" else jnp.broadcast_to(ops.k_scale, (r.num_kv_heads,))
            k_scale = k_scale.reshape(r.num_kv_heads, -1)
        v_scale = run(ops.v_scale) if ops.v_scale is not None and r.v_scale == "token" else None
        return run(ops.k_cache), run(ops.v_cache), k_scale, v_scale

    return Source(jnp.int32(0), end, 0, pages * r.page_size, together, fetch)


def _new_source(r: AttentionRequest, ops: AttentionOperands, tile: Tile, rows: int) -> Source:
    assert ops.new_k is not None and ops.new_v is not None
    new_k, new_v = ops.new_k, ops.new_v
    keys = KEYS if r.batch_invariant else min(KEYS, r.num_tokens)

    def fetch(j: Array, count: int) -> tuple[Array, Array, None, None]:
        index = jnp.clip(tile.start + j * keys + jnp.arange(count * keys), 0, r.num_tokens - 1)
        return new_k[index].swapaxes(0, 1), new_v[index].swapaxes(0, 1), None, None

    # With more queries than keys the first queries stand before position 0, where there are no keys.
    return Source(jnp.maximum(tile.context_len, 0), tile.seq_len, tile.context_len, keys, 1, fetch)


def _sweep(
    r: AttentionRequest, ops: AttentionOperands, tile: Tile, source: Source, q: Array, state: SoftmaxState
) -> SoftmaxState:
    """Run the tile over every key tile that one of its rows may see; only edge tiles pay for the mask."""
    causal = r.causal if r.causal is not None else ops.causal[tile.seq]  # type: ignore[index]
    kv_start = None if ops.kv_start is None else ops.kv_start[tile.seq]
    begin = source.begin if kv_start is None else jnp.maximum(kv_start, source.begin)
    ranges = square_start = None
    if ops.bidirectional_ranges is not None:
        pairs = ops.bidirectional_ranges[tile.seq]
        ranges = (pairs[:, 0], pairs[:, 1])
    if ops.tree_mask is not None:
        square_start = tile.seq_len - jnp.minimum(tile.seq_len - tile.context_len, r.tree_size)
    first, end = masks.key_span(
        tile.first,
        tile.last,
        seq_len=source.end,
        causal=causal,
        window=r.window,
        kv_start=begin,
        ranges=ranges,
        square_start=square_start,
    )

    def mask(k_pos: Array) -> Array:
        q_pos, k = tile.position[:, None], k_pos[None, :]
        same_range = None if ranges is None else masks.in_same_range(q_pos, k, *ranges)
        tree = None
        if square_start is not None:
            tree = (square_start, _tree_bits(ops, tile.seq, q_pos - square_start, k - square_start))
        seen = masks.visible(
            q_pos,
            k,
            seq_len=source.end,
            causal=causal,
            window=r.window,
            kv_start=begin,
            same_range=same_range,
            tree=tree,
        )
        return seen & tile.live[:, None]

    def step(j: Array, state: SoftmaxState, count: int, masked: bool) -> SoftmaxState:
        k_pos = source.origin + j * source.keys + jnp.arange(count * source.keys)
        k, v, k_scale, v_scale = source.fetch(j, count)
        seen = mask(k_pos) if masked else None
        logits = _logits(r, ops, q, k, k_scale, tile.position, k_pos)
        if seen is not None:
            logits = jnp.where(seen, logits, -jnp.inf)
        if v_scale is not None:
            # bfloat16 has float32's range; what float16 cannot hold stays float32.
            dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
            v = (v.astype(jnp.float32) * v_scale[..., None]).astype(dtype)
        if seen is not None:  # a hidden value may be NaN, and 0 x NaN is NaN
            v = jnp.where(seen.any(0)[:, None], v, jnp.zeros((), v.dtype))
        return online_softmax.update(state, logits, lambda p: _weigh(p, q, v))

    lo = (first - source.origin) // source.keys
    hi = -(-(end - source.origin) // source.keys)
    if ranges is not None or square_start is not None:
        return lax.fori_loop(lo, hi, lambda j, s: step(j, s, 1, True), state)
    # Between `inner` and `reach` every live row sees every key: whole runs of `together` tiles need no mask.
    left, right = r.window
    inner = begin if left is None else jnp.maximum(begin, tile.last - left)
    reach = source.end if causal is False else jnp.where(causal, jnp.minimum(tile.first + 1, source.end), source.end)
    reach = reach if right is None else jnp.minimum(reach, tile.first + right + 1)
    run = source.keys * source.together
    first_run, end_run = -(-(inner - source.origin) // run), (reach - source.origin) // run
    some = first_run < end_run
    state = lax.fori_loop(first_run, end_run, lambda n, s: step(n * source.together, s, source.together, False), state)
    before = jnp.where(some, first_run * source.together, hi) - lo
    after = jnp.where(some, end_run * source.together, hi)
    edge = lambda n: jnp.where(n < before, lo + n, after + n - before)  # noqa: E731
    return lax.fori_loop(0, before + hi - after, lambda n, s: step(edge(n), s, 1, True), state)


def _tree_bits(ops: AttentionOperands, seq: Array, row: Array, column: Array) -> Array:
    assert ops.tree_mask is not None
    last = ops.tree_mask.shape[1] - 1
    return ops.tree_mask[seq, jnp.clip(row, 0, last), jnp.clip(column, 0, last)]


def _compute_dtype(q: Array, kv: Array) -> jnp.dtype:
    """Of the matrix products: the wider of both; 8-bit values fit every float type exactly."""
    return q.dtype if kv.dtype.itemsize == 1 else jnp.promote_types(q.dtype, kv.dtype)


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    # float32 means float32: accelerators round the operands of a default-precision product.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _logits(
    r: AttentionRequest, ops: AttentionOperands, q: Array, k: Array, k_scale: Array | None, q_pos: Array, k_pos: Array
) -> Array:
    dtype = _compute_dtype(q, k)
    x = jnp.einsum(
        "hgqd,hkd->hgqk",
        q.astype(dtype),
        k.astype(dtype),
        precision=_precision(dtype),
        preferred_element_type=jnp.float32,
    )
    x = x * r.scale
    if k_scale is not None:
        x = x * k_scale[:, None, None, :]
    if r.soft_cap is not None:
        x = r.soft_cap * jnp.tanh(x / r.soft_cap)
    if ops.alibi_slopes is not None:
        slopes = ops.alibi_slopes.reshape(r.num_kv_heads, r.group_size, 1, 1)
        x = x - slopes * jnp.abs(q_pos[:, None] - k_pos[None, :]).astype(jnp.float32)
    return x


def _weigh(p: Array, q: Array, v: Array) -> Array:
    dtype = _compute_dtype(q, v)
    return jnp.einsum(
        "hgqk,hkd->hgqd",
        p.astype(dtype),
        v.astype(dtype),
        precision=_precision(dtype),
        preferred_element_type=jnp.float32,
    )
