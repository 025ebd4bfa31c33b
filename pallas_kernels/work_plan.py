"""The work plan: which piece of which sequence each program takes, computed in the graph from traced lengths."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Sequences(NamedTuple):
    """Lengths made safe: whatever the input, they describe rows and keys that exist."""

    start: Array  # int32 [S] first row of q
    query_len: Array  # int32 [S]
    seq_len: Array  # int32 [S]

    @property
    def context_len(self) -> Array:
        """Position of the first query."""
        return self.seq_len - self.query_len


def sequences(query_start_loc: Array, seq_lens: Array, num_tokens: int, max_kv_len: int, new_kv: bool) -> Sequences:
    """Clip lengths into the arrays' bounds, so that bad traced input gives a defined result and no stray read.

    Args:
      query_start_loc: int32 [S+1].
      seq_lens: int32 [S].
      num_tokens: T.
      max_kv_len: tokens that a row of the block table can name.
      new_kv: this step's tokens come from beside the cache, so the table need only cover the context.
    """
    start = jnp.clip(query_start_loc[:-1], 0, num_tokens)
    query_len = jnp.clip(query_start_loc[1:], start, num_tokens) - start
    limit = max_kv_len + (query_len if new_kv else 0)
    return Sequences(start, query_len, jnp.clip(seq_lens, 0, limit))


class QueryTiles(NamedTuple):
    """Tiles of up to `tile` queries, each within one sequence; entries at or past `num_tiles` are unused."""

    seq: Array  # int32 [N]
    offset: Array  # int32 [N] first query of the tile, counted within its sequence
    num_tiles: Array  # int32 []


def query_tiles(query_len: Array, num_tokens: int, tile: int) -> QueryTiles:
    """Cut every sequence's queries into tiles; N = T // tile + min(S, T) bounds their number for any lengths."""
    num_seqs = query_len.shape[0]
    ends = jnp.cumsum(-(-query_len // tile))
    index = jnp.arange(num_tokens // tile + min(num_seqs, num_tokens), dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_seqs - 1).astype(jnp.int32)
    before = ends[seq] - -(-query_len[seq] // tile)
    return QueryTiles(seq, (index - before) * tile, ends[-1])
