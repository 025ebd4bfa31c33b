"""The smallest batches, and other spellings of the same arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import batches, oracle
from tests.paged_attention_body import assert_same_bits


def batch_of(seed=0, **options):
    return batches.draw(np.random.default_rng(seed), (3, 1), (6, 20), **options)


def test_no_tokens():
    batch = batches.draw(np.random.default_rng(0), (0, 0), (0, 5))
    out, lse = jattn.paged_attention(**batch, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


def test_no_sequences():
    batch = batches.draw(np.random.default_rng(0), (), (), padding_tokens=3)
    out, lse = jattn.paged_attention(**batch, return_lse=True)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


def test_arguments_are_not_changed():
    batch = batch_of()
    before = {name: x.copy() for name, x in batches.split(batch)[0].items()}
    jattn.paged_attention(**batch)
    for name, x in before.items():
        np.testing.assert_array_equal(batch[name], x)


def test_lse_costs_the_output_nothing():
    batch = batch_of()
    assert_same_bits(jattn.paged_attention(**batch, return_lse=True)[0], jattn.paged_attention(**batch))


SPELLINGS = {
    "jax_arrays": lambda b: jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, b),
    "int64_lengths": lambda b: b | {name: b[name].astype(np.int64) for name in ("seq_lens", "query_start_loc")},
    "lists_of_lengths": lambda b: b | {name: b[name].tolist() for name in ("seq_lens", "query_start_loc")},
    "scale_by_hand": lambda b: b | {"scale": 8**-0.5},
    "window_list": lambda b: b | {"window": [None, None]},
    "window_beyond_all": lambda b: b | {"window": (10**6, 10**6)},
    "window_int32_max": lambda b: b | {"window": (2**31 - 1, 2**31 - 1)},
    "window_beyond_int32": lambda b: b | {"causal": True, "window": (2**40, 2**40)},
    "window_right_0": lambda b: b | {"causal": False, "window": (2**31 - 1, 0)},
    "window_numpy": lambda b: b | {"window": (np.int64(500), None)},
    "right_0": lambda b: b | {"causal": False, "window": (None, 0)},
    "causal_numpy": lambda b: b | {"causal": np.True_},
    "causal_each": lambda b: b | {"causal": np.array([True, True])},
    "causal_0d": lambda b: b | {"causal": jnp.array(True)},
    "no_ranges": lambda b: b | {"bidirectional_ranges": np.zeros((2, 0, 2), np.int32)},
    "empty_ranges": lambda b: b | {"bidirectional_ranges": np.full((2, 3, 2), 4, np.int32)},
    "no_tree": lambda b: b | {"tree_mask": np.zeros((2, 0, 0), bool)},
    "causal_tree": lambda b: b | {"tree_mask": np.tril(np.ones((2, 3, 3), bool))},
    "kv_start_0": lambda b: b | {"kv_start": np.zeros(2, np.int32)},
    "absent_sinks": lambda b: b | {"sinks": np.full(4, -np.inf, np.float32)},
    "flat_slopes": lambda b: b | {"alibi_slopes": np.zeros(4, np.float32)},
    "xla": lambda b: b | {"implementation": "xla"},
    "hint": lambda b: b | {"max_query_len": 3},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_words_for_the_same_call(spelling):
    batch = batch_of()
    out = np.asarray(jattn.paged_attention(**SPELLINGS[spelling](batch)))
    np.testing.assert_allclose(out, oracle.attention(**batch)[0], atol=5e-6)


NONCAUSAL = {
    "flag": {"causal": False},
    "flags": {"causal": np.array([False, False])},
    "window_int32_max": {"causal": False, "window": (2**31 - 1, 2**31 - 1)},
    "range_over_all": {"bidirectional_ranges": np.array([[[0, 9]], [[0, 21]]], np.int32)},
    "range_int32": {
        "bidirectional_ranges": np.full((2, 1, 1), 1, np.int32) * np.array([-(2**31), 2**31 - 1], np.int32)
    },
    "range_beats_window": {"window": (0, 0), "bidirectional_ranges": np.array([[[0, 99]], [[-5, 99]]], np.int32)},
    "full_tree": {"tree_mask": np.ones((2, 3, 3), bool)},
    "kv_start_int32_min": {"causal": False, "kv_start": np.full(2, -(2**31), np.int32)},
}


@pytest.mark.parametrize("spelling", NONCAUSAL)
def test_other_words_for_a_noncausal_call(spelling):
    batch = batch_of()
    out = np.asarray(jattn.paged_attention(**batch, **NONCAUSAL[spelling]))
    np.testing.assert_allclose(out, oracle.attention(**batch, causal=False)[0], atol=5e-6)


@pytest.mark.parametrize("scale", [0.25, np.float32(0.25), jnp.float32(0.25)], ids=["float", "numpy", "jax"])
def test_scalar_scales_of_any_kind(scale):
    batch = batch_of(kv_dtype="int8")
    out = np.asarray(jattn.paged_attention(**batch, k_scale=scale, v_scale=scale))
    want, _ = oracle.attention(**batch, k_scale=np.float32(0.25), v_scale=np.float32(0.25))
    np.testing.assert_allclose(out, want, atol=5e-6 * np.sqrt(np.mean(want**2)) + 5e-6)


def test_positional_arguments_come_in_the_documented_order():
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")
    batch = batch_of()
    assert_same_bits(jattn.paged_attention(*(batch[name] for name in names)), jattn.paged_attention(**batch))
    with pytest.raises(TypeError, match="positional"):
        jattn.paged_attention(*(batch[name] for name in names), 0.5)


def test_shapes_are_known_without_running():
    arrays, static = batches.split(batch_of(dtype="bfloat16"))
    out, lse = jax.eval_shape(lambda arrays: jattn.paged_attention(**arrays, **static, return_lse=True), arrays)
    assert (out.shape, out.dtype) == ((4, 4, 8), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 4), jnp.float32)
