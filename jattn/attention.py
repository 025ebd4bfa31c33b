"""The public call."""

from __future__ import annotations

from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int, Num

from jattn import checks
from jattn.cache import KVCache
from jattn.metadata import AttentionMetadata
from pallas_kernels import dispatch
from pallas_kernels.request import make_request


def paged_attention(
    q: Float[Array, "T H D"],
    k_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    v_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    block_table: Int[Array, "S max_pages"],
    seq_lens: Int[Array, " S"],
    query_start_loc: Int[Array, " S+1"],
    *,
    scale: float | None = None,
    causal: bool | Bool[Array, " S"] = True,
    window: tuple[int | None, int | None] = (None, None),
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    new_k: Float[Array, "T KVH D"] | None = None,
    new_v: Float[Array, "T KVH D"] | None = None,
    bidirectional_ranges: Int[Array, "S R 2"] | None = None,
    tree_mask: Bool[Array, "S Q Q"] | None = None,
    kv_start: Int[Array, " S"] | None = None,
    layout: str = "NHD",
    max_query_len: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of ragged queries over a paged KV cache.

    Query `i` of sequence `s` is row `query_start_loc[s] + i` of `q` and stands at position
    `seq_lens[s] - query_len + i`; key `p` of the sequence lies in page `block_table[s, p // page_size]`. Everything
    that is an array may be traced: other lengths, tables, flags or scales do not retrace. The call is for inference: its
    loops have traced bounds, so JAX refuses to differentiate it in reverse.

    Args:
      q: query rows of all sequences, one after the other. Rows at or past `query_start_loc[-1]` are padding.
      k_cache: the pool of key pages; the same type as `q`, another float type, or 8-bit.
      v_cache: the pool of value pages, of the same shape and type.
      block_table: page ids; entries that no visible key needs may hold anything.
      seq_lens: tokens of each sequence in the cache, this step's queries included. 0: padding.
      query_start_loc: prefix sums of the query lengths, from 0.
      scale: factor of the logits; D**-0.5 by default.
      causal: whether queries see only keys up to themselves; one flag, or one for each sequence.
      window: (left, right) tokens that a query sees besides itself, by absolute distance; None is unlimited.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2, arXiv:2408.00118).
      sinks: raw logits counted once in each row's denominator, without a value (gpt-oss, arXiv:2309.17453).
      alibi_slopes: adds `-slope * |query position - key position|` (arXiv:2108.12409).
      k_scale: true keys are `k_cache * k_scale`; a scalar, [KVH], or for each token and head the cache's shape without
        D. Quantised caches only.
      v_scale: likewise for values.
      new_k: this step's keys, taken from here instead of the cache and never quantised (prefix attention); the block
        table then need only cover the context.
      new_v: this step's values; goes with `new_k`.
      bidirectional_ranges: [begin, end) positions; a query and a key inside one range see each other whatever
        causality and window say. Empty ranges are unused.
      tree_mask: `tree_mask[s, i, j]` says whether query i sees query j's key, in place of causality, among the last Q
        queries of the sequence (all of them, if fewer); everything before them is visible to them.
      kv_start: first visible position of each sequence; positions still count from the first token.
      layout: "NHD" [P, page_size, KVH, D] or "HND" [P, KVH, page_size, D].
      max_query_len: a hint for tile sizes: the longest query length in the batch. Never truncates.
      batch_invariant: the same bits for a sequence whatever else is in the batch.
      return_lse: also return the log-sum-exp.
      implementation: None takes the first that can run the request on the platform; or "xla" and the other names of
        `pallas_kernels.dispatch.IMPLEMENTATIONS`. A named one is never swapped for another.

    Returns:
      out [T, H, D] in q's dtype; with `return_lse` also the natural-log LSE, float32 [T, H]. Padding rows give exactly 0
      and -inf; rows with no visible key give 0 and -inf, or their sink. Softmax and sums are float32.

    Raises:
      ValueError: an argument does not fit; also lengths and tables that contradict each other, if they are concrete.
        For traced ones see `jattn.debug_checks`.
      NotImplementedError: the implementation lacks something that the call asks for; the text says what.
    """
    request, operands = make_request(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        new_k=new_k,
        new_v=new_v,
        bidirectional_ranges=bidirectional_ranges,
        tree_mask=tree_mask,
        kv_start=kv_start,
        layout=layout,
        max_query_len=max_query_len,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    checks.check_lengths(request, operands, hint=max_query_len)
    out, lse = dispatch.attend(request, operands, implementation)
    return (out, lse) if return_lse else out


def attend(
    q: Float[Array, "T H D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    new_k: Float[Array, "T KVH D"] | None = None,
    new_v: Float[Array, "T KVH D"] | None = None,
    **options: Any,
) -> Any:
    """`paged_attention` through a cache object and a metadata pytree.

    Args:
      q: query rows.
      cache: pages, scales and layout.
      metadata: lengths, table, flags and masks.
      new_k: as in `paged_attention`.
      new_v: as in `paged_attention`.
      **options: the remaining keyword arguments of `paged_attention` (scale, window, soft_cap, sinks, alibi_slopes,
        batch_invariant, return_lse, implementation).

    Returns:
      As `paged_attention`.
    """
    return paged_attention(
        q,
        cache.k,
        cache.v,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        causal=metadata.causal,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        new_k=new_k,
        new_v=new_v,
        bidirectional_ranges=metadata.bidirectional_ranges,
        tree_mask=metadata.tree_mask,
        kv_start=metadata.kv_start,
        layout=cache.layout,
        max_query_len=metadata.max_query_len,
        **options,
    )
