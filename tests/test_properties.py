"""Hypothesis draws ragged batches, tables, masks and flags; poisoned ones have to match the oracle.

Shapes and static options come from a few buckets, so that few programs are compiled however many batches are drawn.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from tests import batches, oracle
from tests.paged_attention_body import assert_close, assert_lse_close

NUM_TOKENS, NUM_SEQS, NUM_RANGES, TREE_SIZE = 24, 4, 2, 5
OPTIONS = {
    "plain": {},
    "per_sequence": {"causal": "drawn"},
    "noncausal_window": {"causal": False, "window": (5, 2), "sinks": "drawn"},
    "masks": {"causal": "drawn", "window": (11, 4), "ranges": "drawn", "tree": "drawn", "kv_start": "drawn"},
    "new_kv_ranges": {"new_kv": "drawn", "ranges": "drawn", "kv_start": "drawn", "alibi": "drawn"},
    "tree_capped": {"tree": "drawn", "new_kv": "drawn", "soft_cap": 1.25, "batch_invariant": True},
}
SHAPES = {"small_pages": (3, 40), "large_pages": (32, 6)}  # page_size and width of the block table


@st.composite
def lengths(draw, page_size, max_pages):
    """Query and context lengths of NUM_SEQS sequences that fit the bucket; any may be padding."""
    left, query_lens, context_lens = NUM_TOKENS, [], []
    for _ in range(NUM_SEQS):
        query_len = draw(st.integers(0, left))
        left -= query_len
        query_lens.append(query_len)
        context_lens.append(draw(st.integers(0, page_size * max_pages - query_len)))
    return query_lens, context_lens


def draw_batch(rng, query_lens, context_lens, page_size, max_pages, options):
    """A batch in the shape of its bucket, with the drawn arrays that the options name."""
    pages_of = [-(-(q + c) // page_size) for q, c in zip(query_lens, context_lens, strict=True)]
    batch = batches.draw(
        rng,
        query_lens,
        context_lens,
        page_size=page_size,
        padding_tokens=NUM_TOKENS - sum(query_lens),
        spare_pages=NUM_SEQS * max_pages - sum(pages_of),
        spare_columns=max_pages - max(pages_of),
    )
    seq_lens, shape = batch["seq_lens"], (NUM_TOKENS, 2, 8)
    drawn = {
        "causal": lambda: {"causal": rng.random(NUM_SEQS) < 0.5},
        "sinks": lambda: {"sinks": rng.standard_normal(4).astype(np.float32)},
        "alibi": lambda: {"alibi_slopes": rng.random(4).astype(np.float32)},
        "ranges": lambda: {
            "bidirectional_ranges": rng.integers(0, seq_lens[:, None, None] + 3, (NUM_SEQS, NUM_RANGES, 2), np.int32)
        },
        "tree": lambda: {"tree_mask": rng.random((NUM_SEQS, TREE_SIZE, TREE_SIZE)) < 0.5},
        "kv_start": lambda: {"kv_start": rng.integers(-2, seq_lens + 3, dtype=np.int32)},
        "new_kv": lambda: {name: batches.normal(rng, shape, np.float32) for name in ("new_k", "new_v")},
    }
    batch |= {name: value for name, value in options.items() if value != "drawn"}
    for name, value in options.items():
        if value == "drawn":
            batch |= drawn[name]()
    return batch | {"return_lse": True}


@functools.cache
def compiled(options_name, page_size):
    """One compiled program for each bucket."""
    static = {name: value for name, value in OPTIONS[options_name].items() if value != "drawn"}
    return jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static, layout="NHD", return_lse=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data())
def test_any_ragged_batch_matches_the_oracle(options, shape, data):
    page_size, max_pages = SHAPES[shape]
    query_lens, context_lens = data.draw(lengths(page_size, max_pages))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch = draw_batch(rng, query_lens, context_lens, page_size, max_pages, OPTIONS[options])
    batch = batches.poison(rng, batch)
    out, lse = compiled(options, page_size)(batches.split(batch)[0])
    want, want_lse = oracle.attention(**batch)
    assert_close(np.asarray(out).astype(float), want, "float32")
    assert_lse_close(np.asarray(lse), want_lse, "float32")
