"""The oracle against cases small enough to do by hand."""

import numpy as np
import pytest

from tests import batches, oracle


def visible_counts(query_lens, context_lens, **options):
    """Keys that each query sees, over all sequences."""
    batch = batches.draw(np.random.default_rng(0), query_lens, context_lens) | options
    return [n for s in range(len(query_lens)) for n in oracle.mask(s, **batch).sum(1)]


def one_key_head(logits, values):
    """A sequence of one decode query whose raw logits and one-dimensional values are given; pages of one token."""
    count = len(logits)
    cache = np.zeros((count + 1, 1, 1, 1))
    k_cache, v_cache = cache.copy(), cache.copy()
    pages = np.arange(count, 0, -1)
    k_cache[pages, 0, 0, 0], v_cache[pages, 0, 0, 0] = logits, values
    return {
        "q": np.ones((1, 1, 1)),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": pages[None],
        "seq_lens": np.array([count]),
        "query_start_loc": np.array([0, 1]),
    }


def test_softmax_by_hand():
    out, lse = oracle.attention(**one_key_head([0.0, np.log(3.0)], [1.0, 5.0]))
    assert out.item() == pytest.approx((1 + 3 * 5) / 4)
    assert lse.item() == pytest.approx(np.log(4.0))


def test_a_sink_counts_once_and_has_no_value():
    out, lse = oracle.attention(**one_key_head([0.0, np.log(3.0)], [1.0, 5.0]), sinks=np.array([np.log(4.0)]))
    assert out.item() == pytest.approx((1 + 3 * 5) / 8)
    assert lse.item() == pytest.approx(np.log(8.0))


def test_scale_comes_before_soft_cap_and_soft_cap_before_alibi():
    batch = one_key_head([3.0, 1.0], [1.0, 0.0])
    out, _ = oracle.attention(**batch, scale=2.0, soft_cap=0.5, alibi_slopes=np.array([0.25]))
    x0, x1 = 0.5 * np.tanh(6 / 0.5) - 0.25, 0.5 * np.tanh(2 / 0.5)
    assert out.item() == pytest.approx(np.exp(x0) / (np.exp(x0) + np.exp(x1)))


def test_stored_values_are_multiplied_by_their_scale():
    batch = one_key_head([1.0, 2.0], [1.0, 5.0])
    out, lse = oracle.attention(**batch, k_scale=np.float32(0.0), v_scale=np.array([10.0]))
    assert out.item() == pytest.approx(30.0)
    assert lse.item() == pytest.approx(np.log(2.0))


def test_a_row_that_sees_nothing_is_zero_and_its_lse_is_the_sink():
    batch = one_key_head([1.0, 2.0], [1.0, 5.0]) | {"kv_start": np.array([2])}
    out, lse = oracle.attention(**batch)
    assert (out.item(), lse.item()) == (0.0, -np.inf)
    out, lse = oracle.attention(**batch, sinks=np.array([0.5]))
    assert (out.item(), lse.item()) == (0.0, 0.5)


def test_new_tokens_come_from_beside_the_cache():
    batch = one_key_head([0.0, 7.0], [1.0, 7.0])
    out, _ = oracle.attention(**batch, new_k=np.full((1, 1, 1), np.log(3.0)), new_v=np.full((1, 1, 1), 5.0))
    assert out.item() == pytest.approx((1 + 3 * 5) / 4)


@pytest.mark.parametrize("keys", [1, 2, 16])
def test_a_window_of_w_keys_holds_the_query_and_w_minus_one_before_it(keys):
    counts = visible_counts([4, 1], [30, 1], window=(keys - 1, None))
    assert counts == [keys] * 4 + [min(keys, 2)]


def test_visible_counts_of_each_mask():
    assert visible_counts([3, 1], [2, 4]) == [3, 4, 5, 5]
    assert visible_counts([3, 1], [2, 4], causal=False) == [5, 5, 5, 5]
    assert visible_counts([3, 3], [2, 2], causal=np.array([True, False])) == [3, 4, 5, 5, 5, 5]
    assert visible_counts([4], [3], causal=False, window=(1, 1)) == [3, 3, 3, 2]
    assert visible_counts([4], [3], causal=False, window=(1, None)) == [5, 4, 3, 2]
    assert visible_counts([4], [3], kv_start=np.array([4])) == [0, 1, 2, 3]


def test_a_range_overrides_causality_and_window_but_not_kv_start():
    ranges = np.array([[[2, 6], [5, 5]]])
    assert visible_counts([5], [2], bidirectional_ranges=ranges) == [6, 6, 6, 6, 7]
    assert visible_counts([5], [2], bidirectional_ranges=ranges, window=(0, 0)) == [4, 4, 4, 4, 1]
    assert visible_counts([5], [2], bidirectional_ranges=ranges, kv_start=np.array([4])) == [2, 2, 2, 2, 3]


def test_a_tree_replaces_causality_in_the_trailing_square_only():
    tree = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    assert visible_counts([3], [4], tree_mask=tree) == [5, 6, 6]
    assert visible_counts([5], [2], tree_mask=tree) == [3, 4, 5, 6, 6]  # two queries before the square are causal
    assert visible_counts([2], [4], tree_mask=tree) == [5, 6]  # a short sequence has a square of its own length
    assert visible_counts([3], [4], tree_mask=tree, window=(1, None)) == [2, 2, 1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", ["scalar", "head", "token"])
def test_layouts_pages_and_heads_match_a_contiguous_softmax(layout, scales):
    rng = np.random.default_rng(1)
    batch = batches.draw(rng, [3, 2], [6, 0], kv_dtype="int8", layout=layout, scales=scales)
    out, lse = oracle.attention(**batch, causal=False)
    seq_len, rows = 9, slice(0, 3)
    dense = []
    for name in ("k", "v"):
        cache, scale = batch[f"{name}_cache"].astype(float), batch[f"{name}_scale"]
        if scales == "token":
            scale = scale[..., None]
        elif scales == "head":
            scale = scale[:, None] if layout == "NHD" else scale[:, None, None]
        pool = cache * scale
        pool = pool if layout == "NHD" else pool.transpose(0, 2, 1, 3)
        dense.append(np.repeat(pool[batch["block_table"][0]].reshape(-1, 2, 8)[:seq_len], 2, axis=1))
    x = np.einsum("qhd,khd->qhk", batch["q"][rows].astype(float), dense[0]) / np.sqrt(8)
    np.testing.assert_allclose(lse[rows], np.log(np.exp(x).sum(-1)), rtol=1e-12)
    weights = np.exp(x - lse[rows][..., None])
    np.testing.assert_allclose(out[rows], np.einsum("qhk,khd->qhd", weights, dense[1]), rtol=1e-12, atol=1e-12)


def test_poison_changes_no_answer_and_reaches_all_unseen_slots():
    rng = np.random.default_rng(2)
    batch = batches.draw(rng, [3, 0, 2], [6, 4, 0], padding_tokens=2) | {"window": (2, None)}
    dirty = batches.poison(rng, batch)
    assert np.isfinite(dirty["k_cache"]).all((1, 2, 3)).sum() == 1  # of the pages only one is seen in full
    assert np.isfinite(dirty["v_cache"]).all((2, 3)).sum() == 5 + 2
    for clean, poisoned in zip(oracle.attention(**batch), oracle.attention(**dirty), strict=True):
        np.testing.assert_array_equal(clean, poisoned)
