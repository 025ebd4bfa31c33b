"""Bugs that other engines have had in paged attention, each as a test of what the call does instead.

The comments name the report; `vllm#` is vllm-project/vllm, `sglang#` sgl-project/sglang.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import batches, oracle
from tests.paged_attention_body import assert_close, assert_lse_close, assert_same_bits


def check(batch, dtype="float32"):
    """Compare one call, eager and with LSE, with the oracle; return its output and LSE."""
    out, lse = jattn.paged_attention(**batch, return_lse=True)
    want, want_lse = oracle.attention(**batch)
    assert_close(np.asarray(out).astype(np.float64), want, dtype)
    assert_lse_close(np.asarray(lse), want_lse, dtype)
    return np.asarray(out), np.asarray(lse)


def count_keys(query_lens, context_lens, **options):
    """Keys that each query sees: with a query of zeros every logit is 0, so LSE is the log of their number."""
    batch = batches.draw(np.random.default_rng(0), query_lens, context_lens)
    batch["q"] = np.zeros_like(batch["q"])
    _, lse = jattn.paged_attention(**batch, **options, return_lse=True)
    counts = np.exp(np.asarray(lse, np.float64))
    np.testing.assert_allclose(counts, np.rint(counts[:, :1]) * np.ones(lse.shape[1]), rtol=1e-5)
    return np.rint(counts[:, 0]).astype(int).tolist()


# vllm#40176 (review): padded lanes of the last key tile scored 0 instead of -inf and diluted the output.
@pytest.mark.parametrize("query_len", [5, 17, 65, 99])
def test_noncausal_queries_are_not_diluted_by_the_rest_of_a_tile(query_len):
    batch = batches.draw(np.random.default_rng(1), (query_len,), (3,), page_size=16)
    batch["v_cache"] = batch["v_cache"] + np.float32(50)
    out = np.asarray(jattn.paged_attention(**batch, causal=False))
    np.testing.assert_allclose(out, oracle.attention(**batch, causal=False)[0], atol=50 * 5e-6)
    assert out.min() > 46  # an average of values about 50


# vllm#50017: only the last tile is masked; it has to be the right one. vllm#57432: 133 keys padded to 256 all counted.
def test_lengths_at_and_about_whole_tiles():
    context_lens = [n + d for n in (31, 63, 127, 255, 511) for d in (-1, 0, 1)] + [132, 255]
    for causal in (True, False):
        check(batches.draw(np.random.default_rng(2), [1] * len(context_lens), context_lens) | {"causal": causal})


# vllm#4405: the context loop ignored the window, and a tile without a visible key gave -inf - -inf = NaN.
def test_a_window_hides_context_in_a_chunk_after_long_context():
    check(batches.draw(np.random.default_rng(3), (20,), (200,)) | {"window": (15, None)})
    assert count_keys((20,), (200,), window=(15, None)) == [16] * 20


# vllm#3385: W or W + 1 keys; a window of W tokens that count the query itself is (W - 1, ...) here.
@pytest.mark.parametrize("keys", [1, 2, 16])
def test_a_window_holds_exactly_as_many_keys_as_it_says(keys):
    assert count_keys((4, 1), (30, 40), window=(keys - 1, None)) == [keys] * 5
    assert count_keys((4,), (30,), window=(keys - 1, 0), causal=False) == [keys] * 4


# Under a noncausal window vLLM's prefix kernel leaves the future open, others close it at W: here each side is named.
def test_a_noncausal_window_has_the_right_side_that_it_names():
    assert count_keys((6,), (10,), window=(3, None), causal=False) == [9, 8, 7, 6, 5, 4]
    assert count_keys((6,), (10,), window=(3, 1), causal=False) == [5, 5, 5, 5, 5, 4]
    assert count_keys((6,), (10,), window=(None, 2), causal=False) == [13, 14, 15, 16, 16, 16]


# Triton unified kernel: V was zeroed by the distance to the block's first query, while the weight still counted.
def test_the_right_edge_of_a_noncausal_window_counts_for_every_row_of_a_block():
    batch = batches.draw(np.random.default_rng(4), (24,), (50,)) | {"causal": False, "window": (7, 7)}
    batch["v_cache"] = np.ones_like(batch["v_cache"])
    out, _ = check(batch)
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


# Triton unified kernel: after a first tile without a visible key, logits far below 0 all vanished, and 0/0 was NaN.
@pytest.mark.parametrize("level", [-1e4, -200.0, -95.0, 95.0, 1e4])
def test_logits_of_any_level_after_tiles_that_are_hidden(level):
    # The queries cross key 64, 128, 512 and 1024, at one of which a tile ends: for the later ones all before it is hidden.
    contexts = (44, 108, 492, 1004)
    batch = batches.draw(np.random.default_rng(5), (40,) * 4, contexts, num_heads=1, num_kv_heads=1)
    batch["q"] = np.full_like(batch["q"], level / 8)
    batch["k_cache"] = np.ones_like(batch["k_cache"])
    out, lse = jattn.paged_attention(**batch, scale=1.0, window=(9, None), return_lse=True)
    want, _ = oracle.attention(**batch, scale=1.0, window=(9, None))
    np.testing.assert_allclose(np.asarray(out), want, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), level + np.log(10), rtol=1e-6)


# vllm#17574: a schedule built without the window. sglang#35209: a verify block with one window for all its queries,
# seen where block < window < context.
@pytest.mark.parametrize("query_lens", [(1, 1), (8, 8)])
def test_every_query_has_its_own_window_over_a_long_context(query_lens):
    check(batches.draw(np.random.default_rng(6), query_lens, (700, 90), page_size=16) | {"window": (31, None)})


# vllm#47217: a span may be longer than the window; here the range wins over the window, whole.
def test_a_range_longer_than_the_window_is_seen_whole():
    ranges = np.array([[[4, 30]]], np.int32)
    assert count_keys((20,), (10,), window=(3, None), bidirectional_ranges=ranges) == [26] * 20
    # A range of one token is no special case: it holds that token, which sees itself anyway.
    assert count_keys((2,), (10,), window=(3, None), bidirectional_ranges=np.array([[[10, 11]]], np.int32)) == [4, 4]


# vllm#6373: the K layout was hard-coded for 16-bit caches. vllm#46148: 8-bit cache and 16-bit query.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8", None])
def test_caches_of_every_width(dtype, kv_dtype):
    scales = kv_dtype and "head"
    batch = batches.draw(np.random.default_rng(7), (5, 1), (9, 30), dtype=dtype, kv_dtype=kv_dtype, scales=scales)
    check(batch, dtype)


# vllm#41559, #42692, #43081: noncausal attention over an 8-bit cache was refused, then ran with the wrong cache dtype.
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_noncausal_over_a_quantised_cache(kv_dtype):
    batch = batches.draw(np.random.default_rng(8), (16, 16), (40, 7), kv_dtype=kv_dtype, scales="token")
    check(batch | {"causal": False})


# vllm#22370: sinks, or none, compiled into one program.
def test_sinks_and_none_in_one_process():
    batch = batches.draw(np.random.default_rng(9), (5, 1), (9, 30))
    sinks = np.array([0.0, 3.0, -np.inf, 40.0], np.float32)
    plain, _ = check(batch)
    check(batch | {"sinks": sinks})
    again, _ = check(batch)
    assert_same_bits(again, plain)


# Sinks are raw logits: neither scaled nor capped, one for each query head, counted once however long the context is.
def test_a_sink_is_neither_scaled_nor_capped_nor_counted_again():
    batch = batches.draw(np.random.default_rng(10), (1, 7), (1500, 0), page_size=16)
    check(batch | {"sinks": np.array([-1.0, 2.0, 5.0, 9.0], np.float32), "scale": 0.01, "soft_cap": 1.0})


# vllm#23692, #50427: 32-bit offsets of pages wrapped beyond 2^31 elements. The pool is of zeros that nobody touches.
def test_pages_beyond_two_to_the_31_elements():
    page, per_page = 40_000, 16 * 8 * 512  # 2.6e9 elements
    pool = np.zeros((page + 1) * per_page + 64, np.int8)
    pool = pool[-pool.ctypes.data % 64 :][: (page + 1) * per_page].reshape(page + 1, 16, 8, 512)
    pool[page, :3] = 3
    pool[page, 1] = -3
    cache = jnp.from_dlpack(pool)
    assert cache.unsafe_buffer_pointer() == pool.ctypes.data
    out, lse = jattn.paged_attention(
        np.ones((1, 8, 512), np.float32),
        cache,
        cache,
        np.array([[page]], np.int32),
        np.array([3], np.int32),
        np.array([0, 1], np.int32),
        scale=1 / (3 * 512),
        return_lse=True,
    )
    weight = 2 * np.e / (2 * np.e + 1 / np.e)
    np.testing.assert_allclose(np.asarray(lse), np.log(2 * np.e + 1 / np.e), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(out), 3 * weight - 3 * (1 - weight), rtol=1e-5)


# vllm#48257: a table without a spare column; tiles went past its row. Also vllm#54296.
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_table_of_exact_width(layout):
    batch = batches.draw(
        np.random.default_rng(11), (99, 1), (29, 127), page_size=32, layout=layout, spare_columns=0, spare_pages=0
    )
    assert batch["block_table"].shape == (2, 4)
    check(batch)


# vllm#35923: page sizes 784, 1056 and 2096, which are multiples of 16 and no powers of two.
@pytest.mark.parametrize("page_size", [544, 784, 1056, 2096])
def test_hybrid_page_sizes(page_size):
    check(batches.draw(np.random.default_rng(12), (3, 1), (page_size - 1, 2 * page_size), page_size=page_size))


# vllm#32149: a custom scale was dropped.
def test_a_custom_scale_is_used():
    batch = batches.draw(np.random.default_rng(13), (5, 1), (9, 30))
    out, _ = check(batch | {"scale": 1.5})
    assert np.abs(out - check(batch)[0]).max() > 0.1


# vllm#46548: the last head at the end of the buffer, head size 64, heads 32 over 8. vllm#40737: one KV head.
@pytest.mark.parametrize("kv_heads", [8, 1])
def test_the_last_head_of_the_last_page(kv_heads):
    batch = batches.draw(
        np.random.default_rng(14), (1,), (15,), num_heads=32, num_kv_heads=kv_heads, head_dim=64, page_size=16
    )
    for name in ("k_cache", "v_cache"):
        batch[name] = batch[name][: batch["block_table"][0, 0] + 1]
    check(batch)


# vllm#39444: a dummy run left NaN in page 0, which table padding points to. vllm#30887: evicted pages of a window.
@pytest.mark.parametrize("window", [(None, None), (6, None)])
def test_nan_in_page_0_and_in_evicted_pages_stays_there(window):
    batch = batches.draw(np.random.default_rng(15), (5, 1), (9, 70)) | {"window": window}
    clean, _ = check(batch)
    dirty = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in batch.items()}
    for name in ("k_cache", "v_cache"):
        dirty[name][0] = np.nan
    if window[0] is not None:
        dirty["block_table"][1, : (70 - 6) // 4] = 0
    assert_same_bits(jattn.paged_attention(**dirty), clean)


# dflash: rows of rejected drafts lie after seq_len in the same page; they are garbage until they are overwritten.
def test_rejected_rows_after_the_end_are_not_seen():
    batch = batches.draw(np.random.default_rng(16), (4, 4), (5, 8)) | {"causal": False}
    clean, _ = check(batch)
    dirty = batches.poison(np.random.default_rng(0), batch)
    assert_same_bits(jattn.paged_attention(**dirty), clean)


# vllm#49294: sequences without context among others. vLLM's decode kernel stored rows of sequences without queries.
def test_sequences_without_context_or_without_queries_among_others():
    batch = batches.draw(np.random.default_rng(17), (3, 0, 1, 0, 2), (0, 9, 0, 0, 50))
    check(batch)
    check(batch | {"sinks": np.array([1.0, -1.0, 0.0, 2.0], np.float32)})


# vllm#28840: LSE in base 2 merged as base e.
def test_lse_is_a_natural_logarithm_and_merges_parts():
    assert count_keys((1, 1), (0, 99)) == [1, 100]
    batch = batches.draw(np.random.default_rng(24), (1, 1), (50, 99))
    whole, lse = check(batch)
    cut = np.array([20, 100], np.int32)  # nothing is left of the second sequence's second part
    parts = [batch | {"seq_lens": cut}, batch | {"kv_start": cut}]
    outs, lses = zip(*(jattn.paged_attention(**part, return_lse=True) for part in parts), strict=True)
    out, merged_lse = jattn.merge_states(outs, lses)
    assert_close(np.asarray(out), whole, "float32")
    assert_lse_close(np.asarray(merged_lse), lse, "float32")


# vllm#46659: the flags of mixed sequences, without a window, were all taken from one.
@pytest.mark.parametrize("flags", [[True, False, False], [False, True, False], [True, True, False]])
def test_causal_and_noncausal_sequences_in_one_call(flags):
    assert count_keys((3, 2, 4), (2, 0, 5), causal=np.array(flags)) == [
        n
        for causal, (q, c) in zip(flags, [(3, 2), (2, 0), (4, 5)], strict=True)
        for n in (range(c + 1, c + q + 1) if causal else [c + q] * q)
    ]


# local-inference-lab/vllm#85: seq_len and the sequence's index swapped in a mask. Lengths differ from every index.
def test_lengths_belong_to_their_own_sequence():
    assert count_keys((1, 2, 1, 2), (90, 7, 33, 5), causal=False) == [91, 9, 9, 34, 7, 7]


# vllm#53002: a draft planned with its target's head counts. Models of several GQA ratios over the same lengths.
def test_two_gqa_ratios_over_the_same_lengths():
    for heads, kv_heads in ((8, 2), (6, 6), (5, 1)):
        check(batches.draw(np.random.default_rng(18), (4, 4), (9, 30), num_heads=heads, num_kv_heads=kv_heads))


# FlexAttention, SpecForge: a row that sees nothing gave the mean of V, or NaN.
def test_rows_that_see_nothing_are_zero():
    batch = batches.draw(np.random.default_rng(19), (4, 1), (9, 30)) | {"kv_start": np.array([11, 31], np.int32)}
    out, lse = check(batch)
    assert not out[[0, 1, 4]].any()
    assert np.isneginf(lse[[0, 1, 4]]).all()
    assert np.abs(out[[2, 3]]).min() > 0
    tree = np.zeros((2, 2, 2), bool)  # no ancestor, not even itself, and no context within the window
    out, _ = check(batch | {"tree_mask": tree, "window": (0, None), "kv_start": None})
    assert not out[[2, 3, 4]].any()


# vLLM's causal bound is that of the tile; without causality the first tile of queries has to see all later keys.
def test_the_first_of_many_noncausal_queries_sees_the_last_key():
    query_len = 300
    assert count_keys((query_len,), (5,), causal=False) == [query_len + 5] * query_len


# vLLM's alibi kernels ignore the window, refuse noncausal calls and shift LSE: here the bias goes by distance.
def test_alibi_with_window_sinks_and_without_causality():
    batch = batches.draw(np.random.default_rng(20), (9, 1), (9, 30))
    slopes = np.array([0.5, 0.25, 0.125, -0.125], np.float32)
    for options in ({}, {"causal": False}, {"window": (5, 5), "causal": False}, {"sinks": np.ones(4, np.float32)}):
        check(batch | {"alibi_slopes": slopes} | options)


# DFlash: three drafts of four tokens at context 5, 8 and 11 over pages of 4 in scattered tables; then verified.
@pytest.mark.parametrize("causal", [False, True])
def test_the_worked_draft_and_verify_example(causal):
    rng = np.random.default_rng(21)
    batch = batches.draw(rng, (4, 4, 4), (5, 8, 11))
    batch["block_table"] = np.array([[7, 2, 9, 0], [4, 1, 8, 0], [3, 6, 5, 10]], np.int32)
    for name in ("k_cache", "v_cache"):
        batch[name] = batches.normal(rng, (11, 4, 2, 8), np.float32)
    np.testing.assert_array_equal(batch["seq_lens"], [9, 12, 15])
    clean, _ = check(batch | {"causal": causal})
    free = [0, *(9 * 4 + np.arange(1, 4)), 10 * 4 + 3]  # page 0, and what lies behind the last drafted tokens
    for name in ("k_cache", "v_cache"):
        slots = batch[name].reshape(44, 2, 8)
        slots[free] = np.nan
    assert_same_bits(jattn.paged_attention(**batch, causal=causal), clean)


# vllm#39930: a draft's need of noncausal attention changed the target's calls.
def test_causal_and_noncausal_calls_leave_no_state_behind():
    batch = batches.draw(np.random.default_rng(22), (5, 1), (9, 30))
    first, _ = check(batch)
    other, _ = check(batch | {"causal": False})
    assert np.abs(other - first).max() > 0.01
    assert_same_bits(jattn.paged_attention(**batch), first)


# vllm#40176: new tokens come unquantised from beside the cache, and the scales apply to the context alone.
@pytest.mark.parametrize("causal", [True, False])
def test_scales_apply_to_the_cache_and_not_to_new_tokens(causal):
    rng = np.random.default_rng(23)
    batch = batches.draw(rng, (5, 1), (9, 30), kv_dtype="float8_e4m3fn", scales="head") | {"causal": causal}
    batch |= {name: batches.normal(rng, (6, 2, 8), np.float32) for name in ("new_k", "new_v")}
    check(batch)
    dirty = batches.poison(rng, batch)
    assert_same_bits(jattn.paged_attention(**dirty), jax.jit(lambda: jattn.paged_attention(**batch))())
