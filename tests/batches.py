"""Ragged batches drawn from a NumPy generator, and poison for all memory that no query may see.

A batch is a dict of the arguments of `jattn.paged_attention` by name: arrays are NumPy arrays, the rest is static.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests import oracle

I32 = np.iinfo(np.int32)


def dtype_of(name):
    """The NumPy dtype of a name, 8-bit floats and bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def draw(
    rng,
    query_lens,
    context_lens,
    *,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    page_size=4,
    dtype="float32",
    kv_dtype=None,
    layout="NHD",
    scales=None,
    padding_tokens=0,
    spare_pages=2,
    spare_columns=1,
):
    """Draw q and caches of O(1) over shuffled pages; page 0 and `spare_pages` more belong to nobody.

    Args:
      rng: a NumPy generator.
      query_lens: queries of each sequence.
      context_lens: keys of each sequence before its queries.
      num_heads: H.
      num_kv_heads: KVH.
      head_dim: D.
      page_size: tokens a page.
      dtype: of q.
      kv_dtype: of the caches; None is `dtype`.
      layout: "NHD" or "HND".
      scales: None, "scalar", "head" or "token"; or a pair, for K and for V.
      padding_tokens: rows of q beyond the last sequence.
      spare_pages: pages that nobody owns, besides page 0.
      spare_columns: columns of the block table that no sequence needs.
    """
    query_lens, context_lens = np.asarray(query_lens, np.int32), np.asarray(context_lens, np.int32)
    seq_lens = (query_lens + context_lens).astype(np.int32)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    pages_of = -(-seq_lens // page_size)
    num_pages = 1 + int(pages_of.sum()) + spare_pages
    free = list(rng.permutation(np.arange(1, num_pages)))
    block_table = np.zeros((len(seq_lens), max(1, int(pages_of.max(initial=0)) + spare_columns)), np.int32)
    for s, count in enumerate(pages_of):
        block_table[s, :count] = [free.pop() for _ in range(count)]
    dtype = dtype_of(dtype)
    kv_dtype = dtype if kv_dtype is None else dtype_of(kv_dtype)
    batch = {"q": normal(rng, (int(query_lens.sum()) + padding_tokens, num_heads, head_dim), dtype)}
    axes = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    k_kind, v_kind = scales if isinstance(scales, tuple) else (scales, scales)
    for name, kind in (("k", k_kind), ("v", v_kind)):
        cache, scale = stored_and_scale(rng, (num_pages, *axes, head_dim), layout, kv_dtype, kind)
        batch[f"{name}_cache"] = cache
        if scale is not None:
            batch[f"{name}_scale"] = scale
    batch |= {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc, "layout": layout}
    return batch


def normal(rng, shape, dtype):
    """Standard normal values in a dtype."""
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def stored_and_scale(rng, shape, layout, dtype, kind):
    """A cache whose true values are standard normal, and its scale (None where `kind` is None)."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind is None:
        return values.astype(dtype), None
    step = np.float32(1 / 32 if dtype == np.int8 else 0.3)
    scale_shape = {"scalar": (), "head": (shape[2 if layout == "NHD" else 1],), "token": shape[:3]}[kind]
    scale = np.asarray(step * rng.uniform(0.5, 1.5, scale_shape), np.float32)
    over_heads = scale
    if kind == "head":
        over_heads = scale[:, None] if layout == "NHD" else scale[:, None, None]
    elif kind == "token":
        over_heads = scale[..., None]
    stored = values / over_heads
    return (np.clip(np.rint(stored), -127, 127) if dtype == np.int8 else stored).astype(dtype), scale


def split(batch):
    """The arrays and the static options of a batch, as two dicts."""
    arrays = {name: x for name, x in batch.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in batch.items() if name not in arrays}


def as_taken(batch):
    """The batch without contradictions that a call takes a contradictory one for, if its values are traced."""
    num_tokens = len(batch["q"])
    pages, page_size = len(batch["k_cache"]), batch["k_cache"].shape[1 if batch["layout"] == "NHD" else 2]
    starts = np.maximum.accumulate(np.clip(np.r_[0, batch["query_start_loc"][1:]], 0, num_tokens))
    most = batch["block_table"].shape[1] * page_size + (np.diff(starts) if "new_k" in batch else 0)
    return batch | {
        "query_start_loc": starts,
        "seq_lens": np.clip(batch["seq_lens"], 0, most),
        "block_table": np.clip(batch["block_table"], 0, pages - 1),
    }


def poison(rng, batch):
    """A copy of a batch with NaN, Inf or nonsense wherever no query may look."""
    batch = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in batch.items()}
    q, block_table = batch["q"], batch["block_table"]
    seq_lens, query_start_loc = batch["seq_lens"], batch["query_start_loc"]
    hnd = batch["layout"] == "HND"
    num_pages, page_size = batch["k_cache"].shape[0], batch["k_cache"].shape[2 if hnd else 1]
    seen_slots = np.zeros((num_pages, page_size), bool)
    seen_columns = np.zeros(block_table.shape, bool)
    seen_rows = np.zeros(len(q), bool)  # rows of new_k and new_v
    live_rows = np.zeros(len(q), bool)
    for s, seq_len in enumerate(seq_lens):
        start, stop = query_start_loc[s], query_start_loc[s + 1]
        live_rows[start:stop] = seq_len > 0
        positions = np.flatnonzero(oracle.mask(s, **batch).any(0))
        if batch.get("new_k") is not None:
            fresh = positions[positions >= seq_len - (stop - start)]
            seen_rows[start + fresh - (seq_len - (stop - start))] = True
            positions = positions[positions < seq_len - (stop - start)]
        column, offset = positions // page_size, positions % page_size
        seen_columns[s, column] = True
        seen_slots[block_table[s, column], offset] = True

    for name in ("k_cache", "v_cache"):
        by_slot = batch[name].swapaxes(1, 2) if hnd else batch[name]
        by_slot[~seen_slots] = _garbage(rng, by_slot[~seen_slots].shape, batch[name].dtype)
    for name in ("k_scale", "v_scale"):
        if np.ndim(batch.get(name)) == 3:
            by_slot = batch[name].swapaxes(1, 2) if hnd else batch[name]
            by_slot[~seen_slots] = _garbage(rng, by_slot[~seen_slots].shape, np.float32)
    for name in ("new_k", "new_v"):
        if batch.get(name) is not None:
            batch[name][~seen_rows] = _garbage(rng, batch[name][~seen_rows].shape, batch[name].dtype)
    q[~live_rows] = _garbage(rng, q[~live_rows].shape, q.dtype)
    anywhere = [-1, 0, 1, num_pages - 1, num_pages, num_pages + 1000, I32.min, I32.max]
    block_table[~seen_columns] = rng.choice(anywhere, block_table[~seen_columns].shape)
    _poison_masks(rng, batch)
    return batch


def _poison_masks(rng, batch):
    """Nonsense in the mask arguments of sequences that are padding, and in tree bits past a short square."""
    query_lens = np.diff(batch["query_start_loc"])
    dead = (query_lens == 0) | (batch["seq_lens"] == 0)
    for name in ("bidirectional_ranges", "kv_start"):
        if batch.get(name) is not None:
            batch[name][dead] = rng.choice([I32.min, -1, 0, 5, I32.max], batch[name][dead].shape)
    if np.ndim(batch.get("causal")) == 1:
        batch["causal"][dead] = ~batch["causal"][dead]
    if batch.get("tree_mask") is not None:
        for bits, query_len in zip(batch["tree_mask"], query_lens, strict=True):
            bits[query_len:] ^= True
            bits[:query_len, query_len:] ^= True


def _garbage(rng, shape, dtype):
    """NaN and both infinities, as far as the dtype has them; an 8-bit integer has only its extremes."""
    if dtype == np.int8:
        return rng.choice(np.array([-128, 127], np.int8), shape)
    return rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), shape).astype(dtype)
