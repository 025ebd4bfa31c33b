"""Cache layouts: where each element lies, both ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends import kv_layouts
from backends.kv_layouts import KVPools
from tests import engines

P, PAGE, KVH, D = 3, 16, 2, 32
DTYPES = {"float32": 4, "bfloat16": 8, "float16": 8, "float8_e4m3fn": 16, "uint8": 16}


def numbers(shape, dtype):
    """Values that tell most elements apart in any type."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 120, shape), dtype)


@pytest.mark.parametrize(("dtype", "x"), DTYPES.items())
def test_rocm_addresses(dtype, x):
    raw = numbers((2, P, PAGE, KVH, D), dtype)
    assert kv_layouts.elements_of_16_bytes(raw) == x
    k, v = kv_layouts.rocm_views(raw)
    assert k.shape == (P, KVH, D // x, PAGE, x)
    assert v.shape == (P, KVH, D, PAGE)
    pools = kv_layouts.split_rocm(raw)
    flat = np.asarray(raw).reshape(2, P, -1)
    for page, head, offset, dim in np.random.default_rng(1).integers(0, (P, KVH, PAGE, D), (200, 4)):
        in_k = ((head * (D // x) + dim // x) * PAGE + offset) * x + dim % x
        in_v = (head * D + dim) * PAGE + offset
        assert pools.k[page, head, offset, dim] == k[page, head, dim // x, offset, dim % x] == flat[0, page, in_k]
        assert pools.v[page, head, offset, dim] == v[page, head, dim, offset] == flat[1, page, in_v]
    np.testing.assert_array_equal(kv_layouts.join_rocm(pools), raw)


def test_packed_addresses():
    packed = numbers((P, KVH, PAGE, 2 * D), "bfloat16")
    pools = kv_layouts.split_packed(packed)
    np.testing.assert_array_equal(pools.k, packed[..., :D])
    np.testing.assert_array_equal(pools.v, packed[..., D:])
    assert pools.layout == "HND"
    np.testing.assert_array_equal(kv_layouts.join_packed(pools), packed)


def test_joining_nhd_pools():
    pools = KVPools(numbers((P, PAGE, KVH, D), "float32"), numbers((P, PAGE, KVH, D), "float32") + 1, "NHD")
    for join, split in (
        (kv_layouts.join_packed, kv_layouts.split_packed),
        (kv_layouts.join_rocm, kv_layouts.split_rocm),
    ):
        again = split(join(pools))
        np.testing.assert_array_equal(again.k.swapaxes(1, 2), pools.k)
        np.testing.assert_array_equal(again.v.swapaxes(1, 2), pools.v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["rocm", "packed"])
def test_writes_land_at_their_addresses(layout, dtype):
    """Page sizes that the engine's own writers know only in part; negative slots and those past the pool are left out."""
    page_size = 544 if layout == "rocm" else 48
    shapes = {"rocm": (2, P, page_size, KVH, D), "packed": (P, KVH, page_size, 2 * D)}
    write = {"rocm": kv_layouts.write_rocm, "packed": kv_layouts.write_packed}[layout]
    split = {"rocm": kv_layouts.split_rocm, "packed": kv_layouts.split_packed}[layout]
    before = numbers(shapes[layout], dtype)
    slots = np.array([0, -1, page_size * P - 1, page_size + 3, page_size * P, page_size * 2, -page_size], np.int32)
    k, v = (np.random.default_rng(i).integers(1, 9, (len(slots), KVH, D)).astype(np.float32) for i in (2, 3))
    want = split(before)
    for slot, k_row, v_row in zip(slots, k, v, strict=True):
        if 0 <= slot < page_size * P:
            at = (slot // page_size, slice(None), slot % page_size)
            want = KVPools(want.k.at[at].set(k_row.astype(dtype)), want.v.at[at].set(v_row.astype(dtype)))
    got = split(jax.jit(write)(before, k, v, slots))
    np.testing.assert_array_equal(got.k, want.k)
    np.testing.assert_array_equal(got.v, want.v)


def test_scales_divide_and_values_saturate():
    pool = jnp.zeros((P, KVH, PAGE, 2 * D), jnp.float8_e4m3fn)
    k = np.full((1, KVH, D), 10.0, np.float32)
    got = kv_layouts.write_packed(pool, k, k, np.array([5]), 0.5, 0.001)
    pools = kv_layouts.split_packed(got.astype(jnp.float32))
    assert (pools.k[0, :, 5] == 20).all()
    assert (pools.v[0, :, 5] == 448).all()
    with pytest.raises(ValueError, match="k_scale"):
        kv_layouts.write_packed(pool.astype(jnp.bfloat16), k, k, np.array([5]), 0.5)


SHAPES = {
    "ROCM_ATTN": (2, 7, 32, 4, 64),
    "ROCM_AITER_UNIFIED_ATTN": (7, 4, 32, 128),
    "ROCM_AITER_FA": (7, 4, 32, 128),
    "FLASHINFER": (7, 4, 32, 128),
    "JATTN": (2, 7, 32, 4, 64),
}
BLOCK_DIMS = {"ROCM_ATTN": 1, "ROCM_AITER_UNIFIED_ATTN": 0, "ROCM_AITER_FA": 0, "FLASHINFER": 0, "JATTN": 1}


@pytest.mark.parametrize("name", SHAPES)
def test_cache_shapes(name):
    backend = engines.backend(name)
    assert backend.get_kv_cache_shape(7, 32, 4, 64) == SHAPES[name]
    assert backend.get_kv_cache_block_dim(32, 4, 64) == BLOCK_DIMS[name]
    if name.startswith("ROCM"):
        with pytest.raises(ValueError, match="block_size: got 24, expected a multiple of 16"):
            backend.get_kv_cache_shape(7, 24, 4, 64)


def test_nvfp4_keeps_scales_beside_the_values():
    assert engines.backend("FLASHINFER").get_kv_cache_shape(7, 32, 4, 128, "nvfp4") == (7, 8, 32, 72)


def test_stride_orders():
    backend = engines.backend("FLASHINFER")
    assert backend.get_kv_cache_stride_order() == (0, 2, 1, 3)
    assert backend.get_kv_cache_stride_order(True) == (1, 0, 3, 2, 4)
    assert backend.get_kv_cache_stride_order(False, "HND") == (0, 1, 2, 3)
    assert backend.get_kv_cache_stride_order(True, "HND") == (1, 2, 0, 3, 4)
    assert backend.indexes_kv_by_block_stride()
    with pytest.raises(ValueError, match="cache_layout: got 'DHN'"):
        backend.get_kv_cache_stride_order(False, "DHN")
    for name in ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA", "JATTN"):
        assert not engines.backend(name).indexes_kv_by_block_stride()
        with pytest.raises(NotImplementedError):
            engines.backend(name).get_kv_cache_stride_order()


def test_shapes_that_are_no_cache():
    with pytest.raises(ValueError, match=r"kv_cache: got float32\[2, 3\]"):
        kv_layouts.split_packed(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="kv_cache: got"):
        kv_layouts.rocm_views(jnp.zeros((3, 2, 16, 2, 32)))
    with pytest.raises(ValueError, match="a D that is a multiple of 16"):
        kv_layouts.rocm_views(jnp.zeros((2, 2, 16, 2, 24), jnp.float8_e4m3fn))
