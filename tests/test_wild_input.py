"""Input that is further off than a caller's usual slip: it ends in a defined result or a ValueError, never in neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from pallas_kernels import kv_write
from tests import batches, oracle

ARRAYS = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")
I32 = np.iinfo(np.int32)


def good(**options):
    return batches.draw(np.random.default_rng(0), (1, 5), (8, 7), **options)


def test_contradictory_traced_lengths_and_starts_end():
    b = good()
    new = jnp.ones((6, 2, 8))

    @jax.jit
    def call(seq_lens, kv_start):
        arrays = {**{name: b[name] for name in ARRAYS}, "seq_lens": seq_lens}
        return jattn.paged_attention(**arrays, kv_start=kv_start, new_k=new, new_v=new)

    for lens, start in (([9, 2], I32.max), ([0, 0], I32.max), ([I32.max, I32.min], I32.min)):
        out = call(jnp.array(lens, jnp.int32), jnp.array([0, start], jnp.int32))
        assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize(
    "slots",
    [np.array([2**32 + 5, -1, 16]), np.array([-(2**32) + 5, 2**40, 1000]), np.array([-1, -2, -128], np.int8)],
    ids=["beyond_int32", "far_below", "int8"],
)
def test_wild_slots_write_nothing(slots):
    empty = jnp.zeros((4, 4, 2, 8))
    rows = np.ones((3, 2, 8), np.float32)
    k, v = jattn.write_kv(empty, empty, rows, rows, slots)
    assert not np.asarray(k).any() and not np.asarray(v).any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_write_of_a_tpu_is_that_of_a_cpu(layout):
    rng = np.random.default_rng(2)
    cache = jnp.asarray(rng.standard_normal((4, 4, 3, 8) if layout == "NHD" else (4, 3, 4, 8)))
    rows = jnp.asarray(rng.standard_normal((6, 3, 8)))
    where = kv_write.slot_index(np.array([5, -1, 16, 0, 15, -(2**31)], np.int32), 4, 4)
    want = np.asarray(jattn.write_kv(cache, cache, rows, rows, np.array([5, -1, 16, 0, 15]), layout=layout)[0])
    np.testing.assert_array_equal(np.asarray(kv_write.put_by_head(layout, cache, rows, *where)), want)
    assert (want != np.asarray(cache)).any(-1).sum() == 3 * 3


def test_narrow_slot_types_reach_large_pages():
    empty = jnp.zeros((2, 1024, 2, 8))
    rows = np.ones((3, 2, 8), np.float32)
    k, _ = jattn.write_kv(empty, empty, rows, rows, np.array([255, 5, 100], np.uint8))
    assert sorted(set(np.nonzero(np.asarray(k))[1].tolist())) == [5, 100, 255]


def test_64_bit_lengths_and_pages_do_not_wrap():
    b = {name: good()[name] for name in ARRAYS}
    with pytest.raises(ValueError, match="block_table"):
        jattn.paged_attention(**{**b, "seq_lens": b["seq_lens"].astype(np.int64) + 2**33})
    with pytest.raises(ValueError, match="block_table"):
        jattn.paged_attention(**{**b, "block_table": b["block_table"].astype(np.int64) + 2**32})
    wide = {name: b[name].astype(np.int64) for name in ("block_table", "seq_lens", "query_start_loc")}
    want = oracle.attention(**b)[0]
    np.testing.assert_allclose(np.asarray(jattn.paged_attention(**{**b, **wide})), want, atol=5e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 1e39},
        {"scale": 1e39},
        {"scale": 10**400},
        {"sinks": "x"},
        {"causal": None},
        {"causal": "yes"},
        {"implementation": ["xla"]},
        {"return_lse": "no"},
        {"batch_invariant": 1},
        {"q": None},
        {"k_cache": [[1, 2], [3]]},
        {"seq_lens": [1.5, 2.0]},
    ],
    ids=str,
)
def test_values_that_are_no_such_thing_are_named(options):
    b = {name: good()[name] for name in ARRAYS}
    with pytest.raises(ValueError, match=next(iter(options))):
        jattn.paged_attention(**{**b, **options})


def test_the_lse_is_float32_with_64_bit_types_on():
    b = {name: good()[name] for name in ARRAYS}
    with jax.enable_x64(True):
        out, lse = jattn.paged_attention(**b, return_lse=True)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)


def test_large_values_behind_token_scales_survive_float16():
    b = {name: good(head_dim=32, dtype="float16", kv_dtype="int8")[name] for name in ARRAYS}
    b["k_cache"] = b["v_cache"] = np.where(np.arange(4)[None, :, None, None] == 0, 127, np.ones_like(b["k_cache"]))
    b["q"] = np.zeros_like(b["q"])  # every key counts alike: the mean fits, its largest term does not
    by_token = jattn.paged_attention(**b, v_scale=jnp.full(b["k_cache"].shape[:3], 1000.0))
    by_head = jattn.paged_attention(**b, v_scale=jnp.full((2,), 1000.0))
    assert np.isfinite(np.asarray(by_head)).all()
    np.testing.assert_allclose(np.asarray(by_token, np.float32), np.asarray(by_head, np.float32), rtol=2e-3)


def test_a_refused_allocation_leaves_nothing_behind():
    pages = jattn.PageAllocator(4, 4)
    with pytest.raises(ValueError, match="num_tokens"):
        pages.allocate("a", 2.5)
    pages.allocate("a", 6)
    shared = pages.fork("a", "b")
    with pytest.raises(ValueError, match="num_tokens"):
        pages.extend("b", 2.5)
    assert pages.pages("b") == shared and pages.num_free == 2


@pytest.mark.parametrize(
    ("words", "build"),
    [
        ("pages", lambda: jattn.AttentionMetadata.from_lengths([1], [3], [[2**30]], page_size=4)),
        ("query_lens", lambda: jattn.AttentionMetadata.from_lengths([1.5], [3], [[1]], page_size=4)),
        ("page_size", lambda: jattn.AttentionMetadata.from_lengths([1], [3], [[1]], page_size=None)),
        ("causal", lambda: jattn.AttentionMetadata.from_lengths([1], [3], [[1]], page_size=4, causal=["False"])),
        ("tree_mask", lambda: jattn.AttentionMetadata.make([0, 1], [3], [[1]], [0], tree_mask=np.ones((7, 2), int))),
        ("k_scale", lambda: jattn.KVCache.create(2, 4, 2, 8, jnp.float32, k_scale=1.0)),
        ("k_scale", lambda: jattn.KVCache.create(2, 4, 2, 8, jnp.int8, k_scale=np.ones(5))),
        ("dtype", lambda: jattn.KVCache.create(2, 4, 2, 8, "foo")),
        ("num_pages", lambda: jattn.KVCache.create(2.0, 4, 2, 8)),
        ("outs", lambda: jattn.merge_states([], [])),
        ("outs", lambda: jattn.merge_states(None, None)),
    ],
)
def test_constructors_name_what_does_not_fit(words, build):
    with pytest.raises(ValueError, match=words):
        build()
