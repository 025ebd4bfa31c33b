"""Paged attention in plain float64 NumPy, dense for each sequence: what the call means, with nothing from the packages.

The arguments are those of `jattn.paged_attention`, as NumPy arrays. Only memory that some query sees is ever read, so
that poisoned arguments have the same answer as clean ones.
"""

from __future__ import annotations

import numpy as np

F64 = np.float64


def mask(
    s,
    *,
    seq_lens,
    query_start_loc,
    causal=True,
    window=(None, None),
    bidirectional_ranges=None,
    tree_mask=None,
    kv_start=None,
    **_,
):
    """Bool [query_len, seq_len] of sequence `s`: which query sees which key."""
    query_len = int(query_start_loc[s + 1] - query_start_loc[s])
    seq_len = int(seq_lens[s])
    p = np.arange(query_len)[:, None] + seq_len - query_len  # absolute position of each query
    k = np.arange(seq_len)[None, :]
    causal = bool(causal if np.ndim(causal) == 0 else causal[s])
    ok = (k <= p) | (not causal)
    if tree_mask is not None:
        size = tree_mask.shape[1]
        square_start = seq_len - min(query_len, size)
        row, column = np.clip(p - square_start, 0, size - 1), np.clip(k - square_start, 0, size - 1)
        ok = np.where((p >= square_start) & (k >= square_start), tree_mask[s][row, column], ok)
    left, right = window
    if left is not None:
        ok = ok & (k - p >= -left)
    if right is not None:
        ok = ok & (k - p <= right)
    for a, b in [] if bidirectional_ranges is None else bidirectional_ranges[s]:
        ok = ok | ((a <= p) & (p < b) & (a <= k) & (k < b))
    return ok if kv_start is None else ok & (k >= kv_start[s])


def attention(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    *,
    scale=None,
    causal=True,
    window=(None, None),
    soft_cap=None,
    sinks=None,
    alibi_slopes=None,
    k_scale=None,
    v_scale=None,
    new_k=None,
    new_v=None,
    bidirectional_ranges=None,
    tree_mask=None,
    kv_start=None,
    layout="NHD",
    max_query_len=None,
    batch_invariant=False,
    return_lse=False,
    implementation=None,
):
    """Return (out [T, H, D], lse [T, H]) in float64, whatever `return_lse` says."""
    q, seq_lens, query_start_loc = np.asarray(q), np.asarray(seq_lens), np.asarray(query_start_loc)
    num_tokens, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = np.zeros(q.shape, F64), np.full((num_tokens, num_heads), -np.inf)
    for s, seq_len in enumerate(seq_lens):
        rows = slice(query_start_loc[s], query_start_loc[s + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        see = mask(
            s,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            causal=causal,
            window=window,
            bidirectional_ranges=bidirectional_ranges,
            tree_mask=tree_mask,
            kv_start=kv_start,
        )
        seen = np.flatnonzero(see.any(0))
        if seen.size == 0:
            lse[rows] = -np.inf if sinks is None else np.asarray(sinks, F64)
            continue
        first_new = seq_len if new_k is None else seq_len - query_len
        keys, values = [], []
        for k in seen:
            if k < first_new:
                keys.append(_cached(k_cache, k_scale, block_table[s], layout, k))
                values.append(_cached(v_cache, v_scale, block_table[s], layout, k))
            else:
                keys.append(np.asarray(new_k)[rows.start + k - first_new].astype(F64))
                values.append(np.asarray(new_v)[rows.start + k - first_new].astype(F64))
        kv_head = np.arange(num_heads) // (num_heads // keys[0].shape[0])
        k, v = np.stack(keys)[:, kv_head], np.stack(values)[:, kv_head]  # [seen, H, D]
        x = scale * np.einsum("qhd,khd->hqk", q[rows].astype(F64), k)
        if soft_cap is not None:
            x = soft_cap * np.tanh(x / soft_cap)
        if alibi_slopes is not None:
            distance = np.abs(np.arange(seq_len - query_len, seq_len)[:, None] - seen)
            x = x - np.asarray(alibi_slopes, F64)[:, None, None] * distance
        x = np.where(see[:, seen], x, -np.inf)
        if sinks is not None:  # one more logit, whose value is zero
            x = np.concatenate([x, np.broadcast_to(np.asarray(sinks, F64)[:, None, None], (*x.shape[:2], 1))], -1)
            v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
        peak = x.max(-1, keepdims=True)
        peak = np.where(np.isfinite(peak), peak, 0.0)
        weights = np.exp(x - peak)
        total = weights.sum(-1, keepdims=True)
        out[rows] = np.einsum("hqk,khd->qhd", weights / np.where(total > 0, total, 1.0), v)
        with np.errstate(divide="ignore"):
            lse[rows] = (np.log(total) + peak)[..., 0].T
    return out, lse


def _cached(cache, scale, pages, layout, position):
    """The true K or V [KVH, D] at a position, read from the pool."""
    page_size = cache.shape[1 if layout == "NHD" else 2]
    page, offset = int(pages[position // page_size]), position % page_size
    at = (page, offset) if layout == "NHD" else (page, slice(None), offset)
    assert 0 <= page < cache.shape[0], f"a visible key at position {position} lies on page {page}"
    stored = np.asarray(cache)[at].astype(F64)
    if scale is None:
        return stored
    scale = np.asarray(scale)
    if scale.ndim == 3:
        scale = scale[at]
    return stored * (scale.astype(F64)[:, None] if scale.ndim else scale.astype(F64))
