"""A step's new keys and values as pages of their own, so that the kernel has one way to load a page.

A sequence's new rows start anywhere in a page, and copies into swizzled tiles must not start off an 8-row boundary. So
each sequence gets fresh pages from the one on in which its first new key lies: that page's older rows are taken from the
cache, the rest from the new arrays. It costs a copy of the new rows, a few per cent of a prefill.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.work_plan import existing_keys


def num_fresh(request: AttentionRequest) -> int:
    """An upper bound on the fresh pages."""
    return -(-request.num_tokens // request.page_size) + 2 * request.num_seqs


def fresh_counts(seq_len: Array, q_len: Array, page_size: int) -> Array:
    """Fresh pages of each sequence."""
    first = jnp.maximum(seq_len - q_len, 0) // page_size
    return jnp.where((q_len > 0) & (seq_len > 0), (seq_len - 1) // page_size - first + 1, 0)


def fresh_pages(request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """K and V pages in the cache's layout; those of a sequence follow one another, sequences in order."""
    ps = request.page_size
    starts = jnp.clip(operands.query_start_loc, 0, request.num_tokens).at[0].set(0)
    q_len = jnp.maximum(starts[1:] - starts[:-1], 0)
    seq_lens = existing_keys(operands.seq_lens, q_len, request.max_pages * ps, new_kv=True)
    counts = fresh_counts(seq_lens, q_len, ps)
    ends = jnp.cumsum(counts)
    page = jnp.arange(num_fresh(request))
    s = jnp.minimum(jnp.searchsorted(ends, page, side="right"), request.num_seqs - 1)
    context = seq_lens - q_len  # below 0 where there are more queries than keys, which are then those of the last ones
    column = jnp.maximum(context, 0)[s] // ps + page - (ends - counts)[s]
    position = column[:, None] * ps + jnp.arange(ps)  # [pages, ps]
    old = position < context[s][:, None]
    inside = (page < ends[-1])[:, None] & (position < seq_lens[s][:, None])
    cached = operands.block_table[s, jnp.clip(column, 0, request.max_pages - 1)]
    cached = jnp.clip(cached, 0, request.num_pages - 1)
    row = jnp.clip(starts[s][:, None] + position - context[s][:, None], 0, request.num_tokens - 1)

    def build(cache: Array, new: Array | None) -> Array:
        assert new is not None
        # Only the page in which the new keys begin has old rows: one page a sequence is read from the cache.
        before = cache[cached]
        fresh = new[row]  # [pages, ps, KVH, D]
        old_, inside_ = old[..., None, None], inside[..., None, None]
        if request.layout == "HND":
            fresh, old_, inside_ = (x.swapaxes(1, 2) for x in (fresh, old_, inside_))
        return jnp.where(inside_, jnp.where(old_, before, fresh.astype(cache.dtype)), 0)

    return build(operands.k_cache, operands.new_k), build(operands.v_cache, operands.new_v)
