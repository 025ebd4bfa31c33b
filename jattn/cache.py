"""The paged KV cache: writing this step's keys and values, reading them back, and merging partial results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Num

from pallas_kernels.quantization import store_as
from pallas_kernels.request import QUANTIZED_DTYPES, QUERY_DTYPES, Layout, describe, expect


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Page pools of one layer's keys and values, with the scales of quantised ones."""

    k: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"]
    v: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"]
    k_scale: Float[Array, ...] | None = None
    v_scale: Float[Array, ...] | None = None
    layout: Layout = dataclasses.field(default="NHD", metadata={"static": True})

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        *,
        layout: Layout = "NHD",
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> KVCache:
        """An empty cache of zeros.

        Args:
          num_pages: P.
          page_size: tokens a page.
          num_kv_heads: KVH.
          head_dim: D.
          dtype: a float type, or float8_e4m3fn, float8_e5m2, int8.
          layout: "NHD" or "HND".
          k_scale: for a quantised cache, scalar or [KVH].
          v_scale: likewise.

        Raises:
          ValueError: a size is not positive, or dtype or layout is unknown.
        """
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            expect(size > 0, name, size, "a positive number")
        expect(layout in ("NHD", "HND"), "layout", repr(layout), "'NHD' or 'HND'")
        known = QUERY_DTYPES + QUANTIZED_DTYPES
        expect(np.dtype(dtype).name in known, "dtype", np.dtype(dtype).name, f"one of {', '.join(known)}")
        inner = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        # Two arrays, not one twice: donation refuses to give the same buffer away two times.
        k, v = (jnp.zeros((num_pages, *inner, head_dim), dtype) for _ in range(2))
        scales = [None if s is None else jnp.asarray(s, jnp.float32) for s in (k_scale, v_scale)]
        return cls(k, v, scales[0], scales[1], layout)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.k.shape[0]

    def write(self, k: Array, v: Array, slot_mapping: Array) -> KVCache:
        """`write_kv` on this cache, with its own scales (scalar or a head's)."""
        new_k, new_v = write_kv(
            self.k,
            self.v,
            k,
            v,
            slot_mapping,
            layout=self.layout,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return dataclasses.replace(self, k=new_k, v=new_v)


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
    k_cache, v_cache, slots = jnp.asarray(k_cache), jnp.asarray(v_cache), jnp.asarray(slot_mapping)
    expect(k_cache.ndim == 4, "k_cache", describe(k_cache), "[P, page_size, KVH, D] or [P, KVH, page_size, D]")
    expect(min(k_cache.shape) > 0, "k_cache", describe(k_cache), "no empty axis")
    same = v_cache.shape == k_cache.shape and v_cache.dtype == k_cache.dtype
    expect(same, "v_cache", describe(v_cache), f"shape and dtype of k_cache, {describe(k_cache)}")
    ok = slots.ndim == 1 and jnp.issubdtype(slots.dtype, jnp.integer)
    expect(ok, "slot_mapping", describe(slots), "int32[T]")
    num_pages, a, b, head_dim = k_cache.shape
    page_size, num_kv_heads = (a, b) if layout == "NHD" else (b, a)
    count = slots.shape[0]
    # Out of bounds is dropped by the scatter; a negative index would count from the end.
    page = jnp.where(slots < 0, num_pages, slots // page_size)
    offset = slots % page_size

    def write(name: str, cache: Array, rows: Any, scale: Any) -> Array:
        rows = jnp.asarray(rows)
        fits = rows.ndim == 3 and rows.shape[1:] == (num_kv_heads, head_dim) and rows.shape[0] >= count
        expect(fits, name, describe(rows), f"[at least T = {count}, KVH = {num_kv_heads}, D = {head_dim}]")
        rows = rows[:count]
        if scale is not None:
            quantized = cache.dtype.name in QUANTIZED_DTYPES
            expect(quantized, f"{name}_scale", f"a scale beside {describe(cache)}", "none, or a quantised cache")
            scale = jnp.asarray(scale, jnp.float32)
            shapes = ((), (num_kv_heads,), (count, num_kv_heads))
            expect(scale.shape in shapes, f"{name}_scale", describe(scale), f"a shape of {list(map(list, shapes))}")
            rows = rows.astype(jnp.float32) / (scale if scale.ndim == 0 else scale[..., None])
        rows = store_as(rows, cache.dtype)
        if layout == "NHD":
            return cache.at[page, offset].set(rows, mode="drop")
        return cache.at[page, :, offset].set(rows, mode="drop")

    return write("k", k_cache, k, k_scale), write("v", v_cache, v, v_scale)


def gather_pages(
    cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    block_table: Int[Array, "S max_pages"],
    seq_lens: Int[Array, " S"],
    *,
    layout: str = "NHD",
) -> Num[Array, "S max_pages*page_size KVH D"]:
    """Each sequence's tokens side by side, zeros past its length: for looking at a cache, not for attention.

    Args:
      cache: a pool of pages.
      block_table: page ids.
      seq_lens: tokens of each sequence.
      layout: "NHD" or "HND".
    """
    expect(layout in ("NHD", "HND"), "layout", repr(layout), "'NHD' or 'HND'")
    pages = jnp.asarray(cache)[jnp.clip(jnp.asarray(block_table), 0, cache.shape[0] - 1)]
    pages = pages if layout == "NHD" else pages.swapaxes(2, 3)
    tokens = pages.reshape(pages.shape[0], -1, *pages.shape[3:])
    live = jnp.arange(tokens.shape[1]) < jnp.asarray(seq_lens)[:, None]
    return jnp.where(live[:, :, None, None], tokens, jnp.zeros((), tokens.dtype))


def merge_states(
    outs: Float[Array, "N T H D"] | list[Float[Array, "T H D"]],
    lses: Float[Array, "N T H"] | list[Float[Array, "T H"]],
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """The result over all keys from results over disjoint parts of them.

    Args:
      outs: N partial outputs.
      lses: their natural-log LSEs. -inf (or +inf, which some kernels return) marks a part without keys: it is neutral,
        whatever its output holds.

    Returns:
      (out, lse): out in the outputs' dtype, 0 where every part is empty; LSE float32.

    Raises:
      ValueError: the shapes do not fit each other.
    """
    out, lse = jnp.stack(list(outs)), jnp.stack(list(lses)).astype(jnp.float32)
    expect(out.ndim == 4, "outs", describe(out), "N partial outputs [T, H, D]")
    expect(lse.shape == out.shape[:3], "lses", describe(lse), f"an LSE for each row, {list(out.shape[:3])}")
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    peak = lse.max(0)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp(lse - base)
    total = weight.sum(0)
    # A part without keys may hold anything, NaN too.
    parts = jnp.where(weight[..., None] == 0, 0.0, out.astype(jnp.float32) * weight[..., None])
    merged = parts.sum(0) / jnp.where(total == 0, 1.0, total)[..., None]
    return merged.astype(out.dtype), jnp.where(total == 0, -jnp.inf, base + jnp.log(total))
