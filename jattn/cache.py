"""The paged KV cache: writing this step's keys and values, reading them back, and merging partial results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Num

from pallas_kernels.kv_write import write_kv
from pallas_kernels.merge import merge_states
from pallas_kernels.request import QUANTIZED_DTYPES, QUERY_DTYPES, Layout, as_array, describe, expect

__all__ = ["KVCache", "gather_pages", "merge_states", "write_kv"]


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
            ok = isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0
            expect(ok, name, repr(size), "a positive int")
        expect(layout in ("NHD", "HND"), "layout", repr(layout), "'NHD' or 'HND'")
        known = QUERY_DTYPES + QUANTIZED_DTYPES
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
        expect(name in known, "dtype", name, f"one of {', '.join(known)}")
        inner = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        # Two arrays, not one twice: donation refuses to give the same buffer away two times.
        k, v = (jnp.zeros((num_pages, *inner, head_dim), dtype) for _ in range(2))
        scales = []
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            array = None if scale is None else as_array(name, scale).astype(jnp.float32)
            if array is not None:
                eight_bits = np.dtype(dtype).name in QUANTIZED_DTYPES
                expect(eight_bits, name, f"a scale beside dtype {np.dtype(dtype).name}", "none, or an 8-bit dtype")
                fits = array.shape in ((), (num_kv_heads,), (num_pages, *inner))
                expect(fits, name, describe(array), f"a scalar, [{num_kv_heads}] or {[num_pages, *inner]}")
            scales.append(array)
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
