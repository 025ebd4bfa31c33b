"""The engines' cache layouts as views of the pools that the kernels take, and writes into them, as pure functions.

| layout | logical shape | where one element lies |
|---|---|---|
| packed | [P, KVH, page, 2D] | K at [page, head, offset, dim], V at [page, head, offset, D + dim] |
| ROCm | [2, P, page, KVH, D], raw memory | K at [page, head, dim // x, offset, dim % x], V at [page, head, dim, offset] |
| pools | K and V apart, [P, KVH, page, D] or [P, page, KVH, D] | as the shape says |

Here x is 16 bytes' worth of elements. Attention through a packed or ROCm cache makes the pools first: slices of the packed
array, a transposed copy of the ROCm one, of the whole pool. `KVPools` has no such cost: where no other program shares
the memory, keep the cache as pools.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num

from pallas_kernels.kv_write import slot_index, stored_rows, write_kv
from pallas_kernels.request import Layout, describe, expect


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPools:
    """Keys and values apart, as the kernels take them."""

    k: Num[Array, "P KVH page D"] | Num[Array, "P page KVH D"]
    v: Num[Array, "P KVH page D"] | Num[Array, "P page KVH D"]
    layout: Layout = dataclasses.field(default="HND", metadata={"static": True})


KVCacheArray = Num[Array, "..."] | KVPools


def packed_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """K and V of a token side by side in the last axis."""
    return num_blocks, num_kv_heads, block_size, 2 * head_size


def rocm_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """All K before all V."""
    return 2, num_blocks, block_size, num_kv_heads, head_size


def split_packed(kv: Num[Array, "P KVH page 2D"]) -> KVPools:
    """The pools of a packed cache.

    Raises:
      ValueError: the shape is none of a packed cache.
    """
    expect(kv.ndim == 4 and kv.shape[3] % 2 == 0, "kv_cache", describe(kv), "[P, KVH, page, 2D]")
    head_size = kv.shape[3] // 2
    return KVPools(kv[..., :head_size], kv[..., head_size:])


def join_packed(pools: KVPools) -> Num[Array, "P KVH page 2D"]:
    """The packed cache of pools."""
    hnd = _heads_first(pools)
    return jnp.concatenate([hnd.k, hnd.v], -1)


def rocm_views(
    kv: Num[Array, "2 P page KVH D"],
) -> tuple[Num[Array, "P KVH D/x page x"], Num[Array, "P KVH D page"]]:
    """K and V as the ROCm kernels address them: the same memory under other shapes, nothing moves.

    Raises:
      ValueError: the shape is none of a ROCm cache.
    """
    expect(kv.ndim == 5 and kv.shape[0] == 2, "kv_cache", describe(kv), "[2, P, page, KVH, D]")
    _, num_blocks, block_size, num_kv_heads, head_size = kv.shape
    x = elements_of_16_bytes(kv)
    expect(head_size % x == 0, "kv_cache", describe(kv), f"a D that is a multiple of {x}")
    k = kv[0].reshape(num_blocks, num_kv_heads, head_size // x, block_size, x)
    return k, kv[1].reshape(num_blocks, num_kv_heads, head_size, block_size)


def split_rocm(kv: Num[Array, "2 P page KVH D"]) -> KVPools:
    """The pools of a ROCm cache: a transposed copy of all of it."""
    k, v = rocm_views(kv)
    num_blocks, num_kv_heads, head_size, block_size = v.shape
    k = k.transpose(0, 1, 3, 2, 4).reshape(num_blocks, num_kv_heads, block_size, head_size)
    return KVPools(k, v.swapaxes(2, 3))


def join_rocm(pools: KVPools) -> Num[Array, "2 P page KVH D"]:
    """The ROCm cache of pools."""
    hnd = _heads_first(pools)
    num_blocks, num_kv_heads, block_size, head_size = hnd.k.shape
    x = elements_of_16_bytes(hnd.k)
    expect(head_size % x == 0, "k", describe(hnd.k), f"a D that is a multiple of {x}")
    k = hnd.k.reshape(num_blocks, num_kv_heads, block_size, head_size // x, x).swapaxes(2, 3)
    raw = (num_blocks, block_size, num_kv_heads, head_size)
    return jnp.stack([k.reshape(raw), hnd.v.swapaxes(2, 3).reshape(raw)])


def write_packed(
    kv: Num[Array, "P KVH page 2D"],
    k: Float[Array, "N KVH D"],
    v: Float[Array, "N KVH D"],
    slot_mapping: Int[Array, " T"],
    k_scale: Any = None,
    v_scale: Any = None,
) -> Num[Array, "P KVH page 2D"]:
    """`write_kv` into a packed cache, in place where it is donated."""
    expect(kv.ndim == 4 and kv.shape[3] % 2 == 0, "kv_cache", describe(kv), "[P, KVH, page, 2D]")
    num_blocks, num_kv_heads, block_size, width = kv.shape
    page, offset = slot_index(slot_mapping, num_blocks, block_size)
    shape = (page.shape[0], num_kv_heads, width // 2)
    rows = [stored_rows(n, x, s, kv.dtype, shape) for n, x, s in (("k", k, k_scale), ("v", v, v_scale))]
    return kv.at[page, :, offset].set(jnp.concatenate(rows, -1), mode="drop")


def write_rocm(
    kv: Num[Array, "2 P page KVH D"],
    k: Float[Array, "N KVH D"],
    v: Float[Array, "N KVH D"],
    slot_mapping: Int[Array, " T"],
    k_scale: Any = None,
    v_scale: Any = None,
) -> Num[Array, "2 P page KVH D"]:
    """`write_kv` into a ROCm cache, whatever its page size (no custom kernel that knows two of them only)."""
    k_view, v_view = rocm_views(kv)
    num_blocks, num_kv_heads, head_size, block_size = v_view.shape
    page, offset = slot_index(slot_mapping, num_blocks, block_size)
    shape = (page.shape[0], num_kv_heads, head_size)
    x = k_view.shape[4]
    k_rows = stored_rows("k", k, k_scale, kv.dtype, shape).reshape(*shape[:2], head_size // x, x)
    v_rows = stored_rows("v", v, v_scale, kv.dtype, shape)
    k_view = k_view.at[page, :, :, offset].set(k_rows, mode="drop")
    v_view = v_view.at[page, :, :, offset].set(v_rows, mode="drop")
    return jnp.stack([k_view.reshape(kv.shape[1:]), v_view.reshape(kv.shape[1:])])


def write_pools(
    pools: KVPools, k: Array, v: Array, slot_mapping: Array, k_scale: Any = None, v_scale: Any = None
) -> KVPools:
    """`write_kv` into pools."""
    new = write_kv(pools.k, pools.v, k, v, slot_mapping, layout=pools.layout, k_scale=k_scale, v_scale=v_scale)
    return KVPools(*new, pools.layout)


def elements_of_16_bytes(x: Any) -> int:
    """How many elements the ROCm kernels load at a time."""
    return 16 // jnp.dtype(x.dtype).itemsize


def _heads_first(pools: KVPools) -> KVPools:
    if pools.layout == "HND":
        return pools
    return KVPools(pools.k.swapaxes(1, 2), pools.v.swapaxes(1, 2))
