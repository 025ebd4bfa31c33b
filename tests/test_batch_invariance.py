"""With batch_invariant=True a sequence's rows are bitwise the same whatever else is in the batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jattn
from tests import batches
from tests.cases import FEATURES, Case, build
from tests.paged_attention_body import assert_same_bits

# Query and context length of the sequence under test; then what comes before and after it in the batch.
QUERY_CONTEXT = {"decode": (1, 330), "chunk": (6, 130), "first_prefill": (11, 0), "long_prefill": (140, 3)}
COMPANY = {
    "alone": ((), ()),
    "decodes": (((1, 40), (1, 600)), ((1, 3),)),
    "prefills": (((150, 0),), ((90, 20), (1, 7))),
    "padding": (((0, 0), (3, 1200)), ((0, 9), (0, 0), (0, 0))),
}
OPTIONS = {
    "causal": {},
    "noncausal_window": {"causal": False, "window": (70, 5)},
    "sinks_fp8": {"sinks": "finite"} | FEATURES["fp8_token_scales"],
    "bfloat16_gqa_5": {"dtype": "bfloat16", "num_heads": 10, "head_dim": 64},
    "new_kv_hnd_capped": {"new_kv": True, "layout": "HND", "soft_cap": 2.0},
    "tree_ranges": {"tree_size": 6, "num_ranges": 2, "causal": "each"},
}


def rows_of_one(subject, before, after, options):
    """Output and LSE of the subject among others; all its arrays are drawn alone, and copied into the batch."""
    seqs = (*before, subject, *after)
    case = Case("one", (subject[0],), (subject[1],), padding_tokens=0, batch_invariant=True, **options)
    alone = build(case)
    batch = build(
        Case(
            "others",
            tuple(q for q, _ in seqs),
            tuple(c for _, c in seqs),
            padding_tokens=2 * len(after),
            batch_invariant=True,
            **options,
        )
    )
    s, pages = len(before), -(-sum(subject) // case.page_size)
    start = batch["query_start_loc"][s]
    rows = slice(start, start + subject[0])
    for name in ("q", "new_k", "new_v"):
        if name in batch:
            batch[name][rows] = alone[name]
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name in batch:
            batch[name][batch["block_table"][s, :pages]] = alone[name][alone["block_table"][0, :pages]]
    for name in ("causal", "bidirectional_ranges", "tree_mask"):
        if isinstance(batch.get(name), np.ndarray):
            batch[name][s] = alone[name][0]
    if "sinks" in batch:
        batch["sinks"] = alone["sinks"]
    arrays, static = batches.split(batch)
    out, lse = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))(arrays)
    return np.asarray(out)[rows], np.asarray(lse)[rows]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("subject", QUERY_CONTEXT)
def test_rows_do_not_depend_on_their_company(subject, options):
    results = {
        name: rows_of_one(QUERY_CONTEXT[subject], before, after, OPTIONS[options])
        for name, (before, after) in COMPANY.items()
    }
    for name in COMPANY:
        for got, alone in zip(results[name], results["alone"], strict=True):
            assert_same_bits(got, alone)


def test_the_hint_changes_nothing():
    batch = build(Case("hint", (1, 6, 20), (330, 40, 0), padding_tokens=0, batch_invariant=True))
    want = jattn.paged_attention(**batch)
    for hint in (20, 27, 500):
        for got, expected in zip(jattn.paged_attention(**batch | {"max_query_len": hint}), want, strict=True):
            assert_same_bits(got, expected)


def test_where_the_pages_lie_changes_nothing():
    case = Case("pages", (1, 6, 20), (330, 40, 0), padding_tokens=0, batch_invariant=True)
    batch = build(case)
    order = np.random.default_rng(0).permutation(len(batch["k_cache"]))
    moved = batch | {name: batch[name][np.argsort(order)] for name in ("k_cache", "v_cache")}
    moved["block_table"] = order[batch["block_table"]].astype(np.int32)
    for got, want in zip(jattn.paged_attention(**moved), jattn.paged_attention(**batch), strict=True):
        assert_same_bits(got, want)
