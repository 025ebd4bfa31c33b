"""With batch_invariant=True a sequence's rows are bitwise the same whatever else is in the batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jattn
from tests import batches
from tests.cases import FEATURES, Case, build
from tests.paged_attention_body import assert_same_bits

# Query and context length of the sequences under test, by name, and of their company, by number.
SUBJECTS = {"decode": (1, 330), "chunk": (6, 130), "first_prefill": (11, 0), "long_prefill": (140, 3)}
COMPANIES = [
    [(0, 9), "decode", (1, 40), "chunk", "first_prefill", (90, 20), "long_prefill"],
    ["long_prefill", (150, 0), "first_prefill", (1, 600), (0, 0), "chunk", (3, 1200), "decode"],
]
OPTIONS = {  # and who of the subjects is also run alone
    "causal": ("decode", {}),
    "noncausal_window": ("chunk", {"causal": False, "window": (70, 5)}),
    "sinks_fp8": ("decode", {"sinks": "finite"} | FEATURES["fp8_token_scales"]),
    "bfloat16_gqa_5": ("first_prefill", {"dtype": "bfloat16", "num_heads": 10, "head_dim": 64}),
    "new_kv_hnd_capped": ("long_prefill", {"new_kv": True, "layout": "HND", "soft_cap": 2.0}),
    "tree_ranges": ("chunk", {"tree_size": 6, "num_ranges": 2, "causal": "each"}),
}


def run(batch):
    """Output and LSE, as NumPy arrays."""
    arrays, static = batches.split(batch)
    return jax.tree.map(np.asarray, jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))(arrays))


def subject(name, options):
    """A batch of one sequence; the same arrays each time."""
    return build(Case(name, *((n,) for n in SUBJECTS[name]), padding_tokens=0, batch_invariant=True, **options))


def rows_in_company(company, options):
    """Output and LSE of each subject in one batch, into which the subjects' arrays are copied."""
    lengths = [SUBJECTS.get(member, member) if isinstance(member, str) else member for member in company]
    query_lens, context_lens = (tuple(column) for column in zip(*lengths, strict=True))
    case = Case("company", query_lens, context_lens, padding_tokens=len(company) % 3, batch_invariant=True, **options)
    batch, rows = build(case), {}
    batch |= {name: x for name, x in subject("decode", options).items() if name == "sinks"}
    for s, member in enumerate(company):
        if not isinstance(member, str):
            continue
        alone = subject(member, options)
        rows[member] = slice(*batch["query_start_loc"][s : s + 2])
        pages = -(-sum(SUBJECTS[member]) // case.page_size)
        for name in alone.keys() & {"q", "new_k", "new_v"}:
            batch[name][rows[member]] = alone[name]
        for name in alone.keys() & {"k_cache", "v_cache", "k_scale", "v_scale"}:
            batch[name][batch["block_table"][s, :pages]] = alone[name][alone["block_table"][0, :pages]]
        for name in alone.keys() & {"causal", "bidirectional_ranges", "tree_mask"}:
            if isinstance(alone[name], np.ndarray):
                batch[name][s] = alone[name][0]
    out, lse = run(batch)
    return {name: (out[r], lse[r]) for name, r in rows.items()}


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_do_not_depend_on_their_company(options):
    single, options = OPTIONS[options]
    first, second = (rows_in_company(company, options) for company in COMPANIES)
    for name in SUBJECTS:
        for got, want in zip(first[name], second[name], strict=True):
            assert_same_bits(got, want)
    alone = subject(single, options) | {n: x for n, x in subject("decode", options).items() if n == "sinks"}
    for got, want in zip(run(alone), first[single], strict=True):
        assert_same_bits(got, want)


def test_the_hint_changes_nothing():
    batch = build(Case("hint", (1, 6, 20), (330, 40, 0), padding_tokens=0, batch_invariant=True))
    want = run(batch)
    for hint in (20, 500):
        for got, expected in zip(run(batch | {"max_query_len": hint}), want, strict=True):
            assert_same_bits(got, expected)


def test_where_the_pages_lie_changes_nothing():
    batch = build(Case("pages", (1, 6, 20), (330, 40, 0), padding_tokens=0, batch_invariant=True))
    order = np.random.default_rng(0).permutation(len(batch["k_cache"]))
    moved = batch | {name: batch[name][np.argsort(order)] for name in ("k_cache", "v_cache")}
    moved["block_table"] = order[batch["block_table"]].astype(np.int32)
    for got, want in zip(run(moved), run(batch), strict=True):
        assert_same_bits(got, want)
