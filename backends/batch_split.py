"""Cutting a batch into decodes, extends and prefills, and other rearrangements that engines do before attention.

Functions that return Python numbers look at the lengths, so they work outside `jit` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from backends.metadata import CommonAttentionMetadata
from pallas_kernels.request import expect


class DecodePrefillSplit(NamedTuple):
    """Decodes come first."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class DecodeExtendPrefillSplit(NamedTuple):
    """Decodes come first, then extends, then prefills."""

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    common: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> DecodePrefillSplit:
    """How many requests at the front of the batch are decodes.

    Args:
      common: the batch, decodes first.
      decode_threshold: the longest query of a decode.
      require_uniform: decodes must have one query length among them; requests of length 0 pad a uniform batch.
      treat_short_extends_as_decodes: count a short piece of a prompt as a decode; otherwise `is_prefilling` decides.

    Raises:
      ValueError: the lengths are traced, or `is_prefilling` is wanted and missing.
    """
    query_lens = _concrete_query_lens(common)
    num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
    all_decodes = DecodePrefillSplit(num_reqs, 0, num_tokens, 0)
    if num_reqs == 0:
        return all_decodes
    if query_lens[0] > decode_threshold:
        return DecodePrefillSplit(0, num_reqs, 0, num_tokens)
    prefill = query_lens > decode_threshold
    if require_uniform:
        prefill = query_lens != query_lens[0]
        if np.all(~prefill | (query_lens == 0)):
            prefill[:] = False
    if not treat_short_extends_as_decodes:
        expect(common.is_prefilling is not None, "is_prefilling", None, "bool[S], to tell extends from decodes")
        prefill = prefill | np.asarray(common.is_prefilling)
    if not prefill.any():
        return all_decodes
    first = int(prefill.argmax())
    tokens = int(np.asarray(common.query_start_loc)[first])
    return DecodePrefillSplit(first, num_reqs - first, tokens, num_tokens - tokens)


def split_decodes_prefills_and_extends(
    common: CommonAttentionMetadata, decode_threshold: int = 1
) -> DecodeExtendPrefillSplit:
    """How many requests are decodes, extends (long queries on some context) and prefills (no context), in this order.

    Args:
      common: the batch, in that order.
      decode_threshold: the longest query of a decode.

    Raises:
      ValueError: the lengths are traced.
    """
    query_lens = _concrete_query_lens(common)
    num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
    long = query_lens > decode_threshold
    if not long.any():
        return DecodeExtendPrefillSplit(num_reqs, 0, 0, num_tokens, 0, 0)
    fresh = long & (np.asarray(common.seq_lens) == query_lens)
    decodes = int(long.argmax())
    prefills_from = int(fresh.argmax()) if fresh.any() else num_reqs
    loc = np.asarray(common.query_start_loc)
    decode_tokens = int(loc[decodes])
    extend_tokens = int(loc[prefills_from]) - decode_tokens if prefills_from < num_reqs else num_tokens - decode_tokens
    return DecodeExtendPrefillSplit(
        decodes,
        prefills_from - decodes,
        num_reqs - prefills_from,
        decode_tokens,
        extend_tokens,
        num_tokens - decode_tokens - extend_tokens,
    )


def reorder_batch_to_split_decodes_and_prefills(
    scheduled: Sequence[int], computed: Sequence[int], prompt: Sequence[int], decode_threshold: int = 1
) -> tuple[tuple[int, ...], bool]:
    """The order that brings a batch into regions: decode, short extend, long extend, prefill.

    Requests that already stand in their region do not move, so the order within a region is not kept.

    Args:
      scheduled: tokens of each request in this step.
      computed: tokens before this step.
      prompt: tokens of its prompt.
      decode_threshold: the longest query of a decode.

    Returns:
      (order, moved): `order[i]` is the old index of the request that now stands at i.

    Raises:
      ValueError: the lists differ in length.
    """
    count = len(scheduled)
    expect(len(computed) == count == len(prompt), "computed", f"{len(computed)} and {len(prompt)}", f"{count} entries")
    query, context, whole = (np.asarray(x, np.int64).reshape(-1) for x in (scheduled, computed, prompt))
    short, done = query <= decode_threshold, context >= whole
    region = np.select([context == 0, ~short, ~done], [3, 2, 1], 0)
    order = np.arange(count)
    wrong = np.flatnonzero(region != np.sort(region))
    order[wrong] = wrong[np.argsort(region[wrong], kind="stable")]
    return tuple(order.tolist()), bool(wrong.size)


def make_local_attention_virtual_batches(
    chunk_size: int, common: CommonAttentionMetadata, block_size: int
) -> CommonAttentionMetadata:
    """Chunked-local attention as ordinary attention: every chunk that has queries becomes a request of its own.

    Args:
      chunk_size: queries see keys of their own chunk only.
      common: the batch.
      block_size: tokens a block; divides `chunk_size`.

    Raises:
      ValueError: the sizes do not fit, or the lengths are traced.
    """
    expect(chunk_size > 0 and chunk_size % block_size == 0, "chunk_size", chunk_size, f"a multiple of {block_size}")
    query_lens = _concrete_query_lens(common)
    seq_lens, table = np.asarray(common.seq_lens), np.asarray(common.block_table_tensor)
    pages = chunk_size // block_size
    queries, keys, rows = [], [], []
    for s, (query_len, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        for chunk in range((seq_len - query_len) // chunk_size, -(-seq_len // chunk_size)) if query_len else ():
            start, end = chunk * chunk_size, min((chunk + 1) * chunk_size, seq_len)
            queries.append(end - max(start, seq_len - query_len))
            keys.append(end - start)
            rows.append(table[s, np.minimum(chunk * pages + np.arange(pages), table.shape[1] - 1)])
    flags = common.causal
    if not isinstance(flags, bool):
        expect(False, "causal", "a flag for each request", "one bool: the requests are cut up")
    return CommonAttentionMetadata.make(
        np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        np.asarray(keys, np.int32),
        np.asarray(rows, np.int32).reshape(len(rows), pages),
        common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        causal=flags,
    )


def get_dcp_local_seq_lens(
    seq_lens: Int[Array, " S"], world_size: int, rank: int | None = None, interleave: int = 1
) -> Int[Array, " S"] | Int[Array, "S world_size"]:
    """Tokens of each request on one rank, where runs of `interleave` tokens go round the ranks.

    Args:
      seq_lens: tokens on all ranks; may be traced.
      world_size: ranks.
      rank: which one; None gives all, on a last axis.
      interleave: tokens of a run.
    """
    expect(world_size > 0, "world_size", world_size, "a positive number")
    expect(interleave > 0, "interleave", interleave, "a positive number")
    expect(rank is None or 0 <= rank < world_size, "rank", rank, f"0 to {world_size - 1}")
    lens = jnp.asarray(seq_lens)
    whole_rounds, rest = lens // (interleave * world_size), lens % (interleave * world_size)
    ranks = jnp.arange(world_size) if rank is None else rank
    if rank is None:
        whole_rounds, rest = whole_rounds[:, None], rest[:, None]
    return whole_rounds * interleave + jnp.clip(rest - ranks * interleave, 0, interleave)


def _concrete_query_lens(common: CommonAttentionMetadata) -> np.ndarray:
    expect(common.concrete, "query_start_loc", "a traced array", "known lengths: splitting a batch works outside jit")
    return np.diff(np.asarray(common.query_start_loc))
