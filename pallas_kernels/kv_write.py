"""Writing keys and values into the pages that their slots name."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Num

from pallas_kernels.quantization import store_as
from pallas_kernels.request import QUANTIZED_DTYPES, QUERY_DTYPES, Layout, as_array, as_int32, describe, expect
from pallas_kernels.tpu_plan import stored_layout


def write_kv(
    k_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    v_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    k: Float[Array, "N KVH D"],
    v: Float[Array, "N KVH D"],
    slot_mapping: Int[Array, " T"],
    *,
    layout: str = "NHD",
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
) -> tuple[Array, Array]:
    """Write keys and values of T tokens into their slots.

    Donate the caches (`jax.jit(..., donate_argnums=...)`), and the write happens in place.

    Args:
      k_cache: pool of key pages.
      v_cache: pool of value pages.
      k: at least T rows; rows past T are ignored.
      v: likewise.
      slot_mapping: page * page_size + offset of each row; negative or past the pool: the row is not written. If two rows
        name one slot, either may remain.
      layout: "NHD" or "HND".
      k_scale: the cache stores `k / k_scale`; a scalar, [KVH], or [T, KVH] for each token and head. Quantised caches
        only: values saturate, and int8 rounds half away from zero.
      v_scale: likewise.

    Returns:
      The two caches.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    expect(layout in ("NHD", "HND"), "layout", repr(layout), "'NHD' or 'HND'")
    k_cache, v_cache = as_array("k_cache", k_cache), as_array("v_cache", v_cache)
    expect(k_cache.ndim == 4, "k_cache", describe(k_cache), "[P, page_size, KVH, D] or [P, KVH, page_size, D]")
    expect(min(k_cache.shape) > 0, "k_cache", describe(k_cache), "no empty axis")
    known = QUERY_DTYPES + QUANTIZED_DTYPES
    expect(k_cache.dtype.name in known, "k_cache", describe(k_cache), f"a dtype of {', '.join(known)}")
    same = v_cache.shape == k_cache.shape and v_cache.dtype == k_cache.dtype
    expect(same, "v_cache", describe(v_cache), f"shape and dtype of k_cache, {describe(k_cache)}")
    num_pages, a, b, head_dim = k_cache.shape
    page_size, num_kv_heads = (a, b) if layout == "NHD" else (b, a)
    page, offset = slot_index(slot_mapping, num_pages, page_size)

    def write(name: str, cache: Array, rows: Any, scale: Any) -> Array:
        stored = stored_rows(name, rows, scale, cache.dtype, (page.shape[0], num_kv_heads, head_dim))
        return _put(layout, cache, stored, page, offset)

    return write("k", k_cache, k, k_scale), write("v", v_cache, v, v_scale)


@functools.partial(jax.jit, static_argnums=0)
def _put(layout: Layout, cache: Array, rows: Array, page: Array, offset: Array) -> Array:
    """Rows [T, KVH, D] in their slots."""
    whole = functools.partial(put_whole, layout)
    num_kv_heads, head_dim = rows.shape[1:]
    page_size = cache.shape[1 if layout == "NHD" else 2]
    if stored_layout(layout, page_size, num_kv_heads, head_dim, cache.dtype) == "NHD":
        return whole(cache, rows, page, offset)
    by_head = functools.partial(put_by_head, layout)
    return lax.platform_dependent(cache, rows, page, offset, tpu=by_head, default=whole)


def put_whole(layout: Layout, cache: Array, rows: Array, page: Array, offset: Array) -> Array:
    """All heads of a token in one window."""
    at: Any = (page, offset) if layout == "NHD" else (page, slice(None), offset)
    return cache.at[at].set(rows, mode="drop")


def put_by_head(layout: Layout, cache: Array, rows: Array, page: Array, offset: Array) -> Array:
    """Each head of a token by an index of its own.

    For windows of all heads XLA on TPUs wants a pool whose heads lie side by side, and copies any other (libtpu 0.0.50). On
    a CPU many small windows take longer.
    """
    page, offset, head = page[:, None], offset[:, None], jnp.arange(rows.shape[1])
    return cache.at[(page, offset, head) if layout == "NHD" else (page, head, offset)].set(rows, mode="drop")


def slot_index(slot_mapping: Int[Array, " T"], num_pages: int, page_size: int) -> tuple[Array, Array]:
    """Page and offset of each slot; a scatter with mode "drop" leaves out those that are negative or past the pool."""
    slots = as_int32("slot_mapping", slot_mapping, "int32[T]")
    expect(slots.ndim == 1, "slot_mapping", describe(slots), "int32[T]")
    # Out of bounds is dropped by the scatter; a negative index would count from the end.
    return jnp.where(slots < 0, num_pages, slots // page_size), slots % page_size


def stored_rows(name: str, rows: Any, scale: Any, dtype: Any, shape: tuple[int, int, int]) -> Num[Array, "T KVH D"]:
    """The first T rows as a cache of `dtype` holds them.

    Args:
      name: of the argument, for messages.
      rows: [at least T, KVH, D].
      scale: None, a scalar, [KVH] or [T, KVH]; divides the rows.
      dtype: of the cache.
      shape: (T, KVH, D).
    """
    rows = as_array(name, rows)
    expect(jnp.issubdtype(rows.dtype, jnp.floating), name, describe(rows), "floats")
    count, num_kv_heads, head_dim = shape
    fits = rows.ndim == 3 and rows.shape[1:] == shape[1:] and rows.shape[0] >= count
    expect(fits, name, describe(rows), f"[at least T = {count}, KVH = {num_kv_heads}, D = {head_dim}]")
    rows = rows[:count]
    if scale is not None:
        dtype = jnp.dtype(dtype)
        expect(dtype.name in QUANTIZED_DTYPES, f"{name}_scale", f"a scale beside {dtype}", "none, or a quantised cache")
        scale = as_array(f"{name}_scale", scale).astype(jnp.float32)
        shapes = ((), (num_kv_heads,), (count, num_kv_heads))
        expect(scale.shape in shapes, f"{name}_scale", describe(scale), f"a shape of {list(map(list, shapes))}")
        rows = rows.astype(jnp.float32) / (scale if scale.ndim == 0 else scale[..., None])
    return store_as(rows, dtype)
