"""The work plan: which piece of which sequence each program takes, computed in the graph from traced lengths."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Sequences(NamedTuple):
    """Lengths made safe: whatever the input, they describe rows and keys that exist."""

    start: Array  # int32 [S] first row of q
    query_len: Array  # int32 [S]
    seq_len: Array  # int32 [S]

    @property
    def context_len(self) -> Array:
        """Position of the first query."""
        return self.seq_len - self.query_len


def row_starts(query_start_loc: Array, num_tokens: int) -> Array:
    """Where sequences begin and end in q, made safe; int32 [S+1].

    The first begins at row 0, an entry past the end of q counts as the end, and one below an earlier entry as that one:
    no row has two sequences, and those past the last have none.
    """
    index = jnp.arange(query_start_loc.shape[0])
    starts = jnp.where(index > 0, jnp.clip(query_start_loc, 0, num_tokens), 0)
    if len(index) > 2048:
        return lax.cummax(starts)
    # The running maximum as one reduction, which XLA fuses with what makes `starts`; a scan takes several kernels.
    return jnp.where(index <= index[:, None], starts, 0).max(1)


def sequences(query_start_loc: Array, seq_lens: Array, num_tokens: int, max_kv_len: int, new_kv: bool) -> Sequences:
    """Clip lengths into the arrays' bounds, so that bad traced input gives a defined result and no stray read.

    A sequence with more queries than keys has its queries at the last positions all the same, the first ones before 0.

    Args:
      query_start_loc: int32 [S+1].
      seq_lens: int32 [S].
      num_tokens: T.
      max_kv_len: tokens that a row of the block table can name.
      new_kv: this step's tokens come from beside the cache, so the table need only cover the context.
    """
    starts = row_starts(query_start_loc, num_tokens)
    query_len = starts[1:] - starts[:-1]
    return Sequences(starts[:-1], query_len, existing_keys(seq_lens, query_len, max_kv_len, new_kv))


def existing_keys(seq_lens: Array, query_len: Array, max_kv_len: int, new_kv: bool) -> Array:
    """Lengths clipped to the keys that table and new K/V can hold; arguments as of `sequences`."""
    return jnp.clip(seq_lens, 0, max_kv_len + (query_len if new_kv else 0))


class QueryTiles(NamedTuple):
    """Tiles of up to `tile` queries, each within one sequence; entries at or past `num_tiles` are unused."""

    seq: Array  # int32 [N]
    offset: Array  # int32 [N] first query of the tile, counted within its sequence
    num_tiles: Array  # int32 []


def query_tiles(query_len: Array, num_tokens: int, tile: int, most: int | None = None) -> QueryTiles:
    """Cut every sequence's queries into tiles.

    Args:
      query_len: int32 [S].
      num_tokens: T, no less than the sum of `query_len`.
      tile: queries a tile.
      most: N, where the caller knows a bound on the number of tiles; else min(T, T // tile + S), which bounds it for any
        lengths.
    """
    num_seqs = query_len.shape[0]
    ends = jnp.cumsum(-(-query_len // tile))
    count = min(num_tokens, num_tokens // tile + num_seqs) if most is None else most
    index = jnp.arange(count, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), num_seqs - 1)
    seq = seq.astype(jnp.int32)
    before = ends[seq] - -(-query_len[seq] // tile)
    return QueryTiles(seq, (index - before) * tile, ends[-1])


def with_padding_rows(seqs: Sequences, num_tokens: int) -> Sequences:
    """One more sequence, without keys: the rows past the last.

    A kernel that takes it as tiles like any other writes every row of its output, so that nothing need be cleared.
    """
    end = seqs.start[-1:] + seqs.query_len[-1:]
    return Sequences(
        jnp.concatenate([seqs.start, end]),
        jnp.concatenate([seqs.query_len, num_tokens - end]),
        jnp.concatenate([seqs.seq_len, jnp.zeros(1, jnp.int32)]),
    )


class KeySplits(NamedTuple):
    """Pieces of the tiles' key ranges, tile by tile; unused pieces have first = end = 0."""

    tile: Array  # int32 [M]
    first: Array  # int32 [M]
    end: Array  # int32 [M]
    before: Array  # int32 [N] index of each tile's first piece
    pieces: Array  # int32 [N] of each tile


def split_keys(
    first: Array, end: Array, block: int, target: int, least: int = 1, fixed: int | None = None
) -> KeySplits:
    """Cut key ranges [first, end), one a tile, at multiples of `block`, into about `target` pieces of equal size.

    Args:
      first: int32 [N].
      end: int32 [N].
      block: keys a block.
      target: pieces wanted in all; M = N + target bounds their number for any lengths.
      least: blocks that a piece has at least, unless its tile has fewer.
      fixed: cut every tile into this many pieces instead, so that the cut hangs on nothing but its own range.
    """
    low = first // block
    blocks = jnp.where(end > first, -(-end // block) - low, 0)
    if fixed is None:
        size = jnp.maximum(least, -(-blocks.sum() // target))
        room = first.shape[0] + target
    else:
        size = jnp.maximum(least, -(-blocks // fixed))
        room = first.shape[0] * fixed
    size = -(-blocks // jnp.maximum(1, -(-blocks // size)))  # even pieces within a tile
    count = -(-blocks // jnp.maximum(1, size))
    ends = jnp.cumsum(count)
    index = jnp.arange(room, dtype=jnp.int32)
    tile = jnp.searchsorted(ends, index, side="right", method="compare_all")
    used = tile < first.shape[0]
    tile = jnp.minimum(tile, first.shape[0] - 1).astype(jnp.int32)
    piece = low[tile] + (index - ends[tile] + count[tile]) * size[tile]
    piece_first = jnp.maximum(piece * block, first[tile])
    piece_end = jnp.minimum((piece + size[tile]) * block, end[tile])
    before = ends - count
    return KeySplits(tile, jnp.where(used, piece_first, 0), jnp.where(used, piece_end, 0), before, count)
