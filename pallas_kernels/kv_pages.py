"""Reading a run of keys or values out of the page pool."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def page_ids(block_table: Array, seq: Array, first: Array, count: int, num_pages: int) -> Array:
    """Ids of `count` table entries of one sequence from column `first`; every id names a page that exists.

    Columns past the table's width and ids outside the pool (padding may be anything) are clamped; the caller's mask hides
    what they bring.
    """
    columns = jnp.clip(first + jnp.arange(count), 0, block_table.shape[1] - 1)
    return jnp.clip(block_table[seq, columns], 0, num_pages - 1)


def gather_heads_first(pool: Array, ids: Array, layout: str) -> Array:
    """Pages `ids` as one run of tokens, KV heads first: [KVH, len(ids) * page_size, ...].

    Works on caches [P, ., ., D] and on pools of scales [P, ., .] alike.
    """
    pages = pool.at[ids].get(mode="promise_in_bounds")
    heads, tokens = (2, 1) if layout == "NHD" else (1, 2)
    pages = pages.transpose(heads, 0, tokens, *range(3, pages.ndim))
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])
