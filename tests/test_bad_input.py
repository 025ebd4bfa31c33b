"""Bad input gets an error that names the argument, what came and what was expected; nothing is read out of bounds."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jattn
from tests import batches, oracle

QUANTIZED = {"k_cache": jnp.zeros((8, 4, 2, 8), jnp.int8), "v_cache": jnp.zeros((8, 4, 2, 8), jnp.int8)}


def good(**changes):
    """A call that works: T 7, H 4, KVH 2, D 8, 8 pages of 4, S 3, a table of 4 columns; then with changes."""
    batch = batches.draw(np.random.default_rng(0), (1, 4, 2), (6, 5, 0), spare_pages=1)
    return batch | changes


BAD = {  # case: (changes, what the text has to say)
    "q_rank": ({"q": np.zeros((7, 32), np.float32)}, ["q", "float32[7, 32]", "[T, H, D]"]),
    "q_dtype": ({"q": np.zeros((7, 4, 8), np.int32)}, ["q", "int32[7, 4, 8]", "bfloat16"]),
    "q_float8": ({"q": jnp.zeros((7, 4, 8), jnp.float8_e4m3fn)}, ["q", "float8_e4m3fn", "bfloat16"]),
    "q_no_heads": ({"q": np.zeros((7, 0, 8), np.float32)}, ["q", "float32[7, 0, 8]", "at least one"]),
    "heads_not_a_multiple": ({"q": np.zeros((7, 5, 8), np.float32)}, ["q", "5", "2", "multiple"]),
    "fewer_heads_than_kv_heads": ({"q": np.zeros((7, 1, 8), np.float32)}, ["q", "1", "2", "multiple"]),
    "head_dim": ({"q": np.zeros((7, 4, 16), np.float32)}, ["k_cache", "float32[8, 4, 2, 8]", "16"]),
    "k_cache_rank": ({"k_cache": np.zeros((8, 4, 16), np.float32)}, ["k_cache", "float32[8, 4, 16]", "page_size"]),
    "k_cache_dtype": ({"k_cache": np.zeros((8, 4, 2, 8), np.uint8)}, ["k_cache", "uint8", "int8"]),
    "v_cache_shape": ({"v_cache": np.zeros((8, 4, 1, 8), np.float32)}, ["v_cache", "[8, 4, 1, 8]", "[8, 4, 2, 8]"]),
    "v_cache_dtype": ({"v_cache": np.zeros((8, 4, 2, 8), np.float16)}, ["v_cache", "float16", "float32"]),
    "page_size_0": ({"k_cache": np.zeros((8, 0, 2, 8), np.float32)}, ["k_cache", "[8, 0, 2, 8]", "page_size"]),
    "no_pages": ({"k_cache": np.zeros((0, 4, 2, 8), np.float32)}, ["k_cache", "[0, 4, 2, 8]"]),
    "layout": ({"layout": "NDH"}, ["layout", "'NDH'", "'NHD'", "'HND'"]),
    "implementation": ({"implementation": "cuda"}, ["implementation", "'cuda'", "'xla'"]),
    "block_table_rank": ({"block_table": np.zeros(12, np.int32)}, ["block_table", "int32[12]", "[S, max_pages]"]),
    "block_table_dtype": ({"block_table": np.zeros((3, 4), np.float32)}, ["block_table", "float32", "int32"]),
    "block_table_no_columns": ({"block_table": np.zeros((3, 0), np.int32)}, ["block_table", "[3, 0]", "column"]),
    "seq_lens_shape": ({"seq_lens": np.array([7, 9], np.int32)}, ["seq_lens", "int32[2]", "3"]),
    "seq_lens_dtype": ({"seq_lens": np.array([7.0, 9.0, 2.0])}, ["seq_lens", "float", "int32"]),
    "query_start_loc_shape": ({"query_start_loc": np.array([0, 1, 5])}, ["query_start_loc", "[3]", "4"]),
    "query_start_loc_dtype": ({"query_start_loc": np.array([0.0, 1.0, 5.0, 7.0])}, ["query_start_loc", "int32"]),
    "causal_shape": ({"causal": np.ones(2, bool)}, ["causal", "bool[2]", "bool[3]"]),
    "causal_dtype": ({"causal": np.ones(3, np.int32)}, ["causal", "int32[3]", "bool"]),
    "window_int": ({"window": 8}, ["window", "8", "(left, right)"]),
    "window_negative": ({"window": (-1, -1)}, ["window", "(-1, -1)", ">= 0"]),
    "window_float": ({"window": (2.5, None)}, ["window", "2.5", "None"]),
    "window_triple": ({"window": (1, 2, 3)}, ["window", "(1, 2, 3)", "(left, right)"]),
    "scale_nan": ({"scale": float("nan")}, ["scale", "nan", "finite"]),
    "scale_array": ({"scale": np.ones(4, np.float32)}, ["scale", "float32[4]", "number"]),
    "soft_cap_0": ({"soft_cap": 0.0}, ["soft_cap", "0.0", "positive"]),
    "soft_cap_negative": ({"soft_cap": -30.0}, ["soft_cap", "-30.0", "positive"]),
    "sinks_length": ({"sinks": np.zeros(2, np.float32)}, ["sinks", "float32[2]", "4"]),
    "sinks_dtype": ({"sinks": np.zeros(4, np.int32)}, ["sinks", "int32[4]", "float"]),
    "alibi_length": ({"alibi_slopes": np.zeros(8, np.float32)}, ["alibi_slopes", "float32[8]", "4"]),
    "k_scale_unquantised": ({"k_scale": 0.5}, ["k_scale", "float32[8, 4, 2, 8]", "quantised"]),
    "v_scale_unquantised": ({"v_scale": 0.5}, ["v_scale", "float32[8, 4, 2, 8]", "quantised"]),
    "k_scale_shape": (QUANTIZED | {"k_scale": np.ones(4, np.float32)}, ["k_scale", "float32[4]", "[8, 4, 2]"]),
    "v_scale_order": (QUANTIZED | {"v_scale": np.ones((8, 2, 4), np.float32)}, ["v_scale", "[8, 2, 4]", "[8, 4, 2]"]),
    "k_scale_dtype": (QUANTIZED | {"k_scale": np.ones(2, np.int32)}, ["k_scale", "int32[2]", "float32"]),
    "new_k_alone": ({"new_k": np.zeros((7, 2, 8), np.float32)}, ["new_v", "None", "both"]),
    "new_kv_shape": (
        {"new_k": np.zeros((7, 2, 8), np.float32), "new_v": np.zeros((7, 4, 8), np.float32)},
        ["new_v", "float32[7, 4, 8]", "[7, 2, 8]"],
    ),
    "new_kv_dtype": (
        {"new_k": np.zeros((7, 2, 8), np.float16), "new_v": np.zeros((7, 2, 8), np.float16)},
        ["new_k", "float16[7, 2, 8]", "float32"],
    ),
    "ranges_shape": (
        {"bidirectional_ranges": np.zeros((3, 2), np.int32)},
        ["bidirectional_ranges", "int32[3, 2]", "[S, R, 2]"],
    ),
    "ranges_seqs": (
        {"bidirectional_ranges": np.zeros((2, 1, 2), np.int32)},
        ["bidirectional_ranges", "int32[2, 1, 2]", "int32[3, R, 2]"],
    ),
    "tree_not_square": ({"tree_mask": np.zeros((3, 2, 4), bool)}, ["tree_mask", "bool[3, 2, 4]", "bool[S, Q, Q]"]),
    "tree_dtype": ({"tree_mask": np.zeros((3, 2, 2), np.float32)}, ["tree_mask", "float32[3, 2, 2]", "bool"]),
    "kv_start_shape": ({"kv_start": np.zeros(4, np.int32)}, ["kv_start", "int32[4]", "3"]),
    "max_query_len_0": ({"max_query_len": 0}, ["max_query_len", "0", "positive"]),
    "max_query_len_float": ({"max_query_len": 4.0}, ["max_query_len", "4.0", "positive int"]),
}

BAD_VALUES = {  # values of arrays: refused where they are concrete
    "table_too_narrow": ({"seq_lens": np.array([7, 20, 2], np.int32)}, ["block_table", "16", "20"]),
    "not_monotonic": (
        {"query_start_loc": np.array([0, 5, 1, 7], np.int32)},
        ["query_start_loc", "5", "1", "never decrease"],
    ),
    "not_from_zero": ({"query_start_loc": np.array([1, 2, 5, 7], np.int32)}, ["query_start_loc", "1", "0"]),
    "past_the_end_of_q": ({"query_start_loc": np.array([0, 1, 5, 8], np.int32)}, ["query_start_loc", "8", "7"]),
    "seq_len_below_query_len": ({"seq_lens": np.array([7, 3, 2], np.int32)}, ["seq_lens", "3", "4"]),
    "negative_seq_len": ({"seq_lens": np.array([7, 9, -2], np.int32)}, ["seq_lens", "-2"]),
    "no_such_page": ({"block_table": np.full((3, 4), 8, np.int32)}, ["block_table", "6", "[0, 8)"]),
    "negative_page": ({"block_table": np.full((3, 4), -1, np.int32)}, ["block_table", "6", "[0, 8)"]),
    "hint_too_small": ({"max_query_len": 3}, ["max_query_len", "3", "4"]),
}


def says(words):
    """A pattern that finds every word, in any order, in a text of any number of lines."""
    return "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)


def test_the_good_call_is_good():
    assert jattn.paged_attention(**good()).shape == (7, 4, 8)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=says(words)):
        jattn.paged_attention(**good(**changes))


@pytest.mark.parametrize("name", BAD)
def test_shapes_and_options_are_checked_under_jit_too(name):
    changes, words = BAD[name]
    arrays, static = batches.split(
        {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in good(**changes).items()}
    )
    with pytest.raises(ValueError, match=says(words)):
        jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))(arrays)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_concrete_values_are_checked(name):
    changes, words = BAD_VALUES[name]
    with pytest.raises(ValueError, match=says(words)):
        jattn.paged_attention(**good(**changes))


@pytest.mark.parametrize("name", BAD_VALUES)
def test_traced_values_are_checked_on_request(name):
    changes, words = BAD_VALUES[name]
    arrays, static = batches.split(good(**changes))
    call = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))
    out = np.asarray(call(arrays))  # without checks the result is defined
    assert np.isfinite(out).all()
    with jattn.debug_checks():
        error, _ = checkify.checkify(call)(arrays)
    with pytest.raises(ValueError, match=says(words)):
        error.throw()
    np.testing.assert_array_equal(np.asarray(call(arrays)), out)


def test_checks_of_traced_values_let_good_ones_pass():
    arrays, static = batches.split(good())
    with jattn.debug_checks():
        error, out = checkify.checkify(jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static)))(arrays)
    error.throw()
    np.testing.assert_allclose(np.asarray(out), oracle.attention(**good())[0], atol=5e-6)


@pytest.mark.parametrize("lengths", [[-5, 9, 2], [7, -(2**31), 2], [2**31 - 1, 9, 2]])
def test_a_traced_nonsense_length_touches_no_other_sequence(lengths):
    batch = good(max_query_len=4)
    arrays, static = batches.split(batch | {"seq_lens": np.array(lengths, np.int32)})
    out = np.asarray(jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))(arrays))
    assert np.isfinite(out).all()
    want, _ = oracle.attention(**batch)
    for s in np.flatnonzero(np.array(lengths) == batch["seq_lens"]):
        rows = slice(*batch["query_start_loc"][s : s + 2])
        np.testing.assert_allclose(out[rows], want[rows], atol=5e-6)


@pytest.mark.parametrize("page", [-1, 8, 10_000, 2**31 - 1, -(2**31)])
def test_a_visible_key_on_a_page_that_is_none_reads_nothing_out_of_bounds(page):
    batch = good()
    batch["block_table"] = batch["block_table"].copy()
    batch["block_table"][1, 0] = page
    arrays, static = batches.split(batch)
    out = np.asarray(jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static))(arrays))
    assert np.isfinite(out).all()
    want, _ = oracle.attention(**good())
    np.testing.assert_allclose(out[[0, 5, 6]], want[[0, 5, 6]], atol=5e-6)


def test_a_hint_that_is_too_small_never_truncates():
    batch = batches.draw(np.random.default_rng(1), (1, 70, 200), (6, 5, 0))
    arrays, static = batches.split(batch)
    out = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static, max_query_len=1))(arrays)
    np.testing.assert_allclose(np.asarray(out), oracle.attention(**batch)[0], atol=5e-6)
