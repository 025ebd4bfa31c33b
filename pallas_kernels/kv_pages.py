"""Reading a run of keys or values out of the page pool."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


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
    dtype = pool.dtype
    if dtype.itemsize == 1 and dtype != jnp.int8:
        # XLA's CPU backend gathers 8-bit floats by widening the whole pool first, so gather bytes. The barrier ties the
        # reinterpretation to this tile: hoisted out of the loop over tiles, it would be a copy of the pool.
        pool, ids = lax.optimization_barrier((pool, ids))
        pool = lax.bitcast_convert_type(pool, jnp.uint8)
    pages = pool.at[ids].get(mode="promise_in_bounds")
    pages = pages if pages.dtype == dtype else lax.bitcast_convert_type(pages, dtype)
    heads, tokens = (2, 1) if layout == "NHD" else (1, 2)
    pages = pages.transpose(heads, 0, tokens, *range(3, pages.ndim))
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])
