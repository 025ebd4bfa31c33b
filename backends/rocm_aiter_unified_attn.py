"""ROCM_AITER_UNIFIED_ATTN: one causal kernel for decodes and prefills, everything read from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from jax import Array
from jaxtyping import Bool

from backends.contract import AttentionType, Platform
from backends.impl import ENCODERS, NON_CAUSAL_BACKENDS, AttentionImpl, Batch
from backends.kv_layouts import KVPools, packed_shape, split_packed, write_packed
from backends.rocm_attn import (
    RocmAttentionBackend,
    RocmAttentionImpl,
    RocmAttentionMetadataBuilder,
    expect_multiple_of_16,
)

ATTN_TYPES = tuple(AttentionType)


@dataclasses.dataclass(frozen=True)
class RocmAiterUnifiedAttentionMetadataBuilder(RocmAttentionMetadataBuilder):
    """Builds `RocmAttentionMetadata`."""

    backend_name: ClassVar[str] = "ROCM_AITER_UNIFIED_ATTN"


@dataclasses.dataclass(frozen=True, eq=False)
class RocmAiterUnifiedAttentionImpl(RocmAttentionImpl):
    """Causal, and cross-attention; the cache holds every key, rounded as it holds them."""

    backend_name: ClassVar[str] = "ROCM_AITER_UNIFIED_ATTN"
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = ATTN_TYPES
    takes_q_scale: ClassVar[bool] = True

    @property
    def supports_quant_query_input(self) -> bool:
        """Yes."""
        return True

    def window(self, causal: bool) -> tuple[int | None, int | None]:
        """Causal, or both sides for encoders."""
        return AttentionImpl.window(self, causal)

    def check_call(self, batch: Batch) -> None:
        """Refuse a decoder without causality; nothing else that ROCM_ATTN refuses."""
        bidirectional = (*ENCODERS, AttentionType.ENCODER_DECODER)
        if self.attn_type not in bidirectional and not batch.causal:
            raise NotImplementedError(
                f"{self.backend_name} does not support non-causal attention (causal=False): its kernel is causal."
                f" Backends that do: {NON_CAUSAL_BACKENDS}."
            )

    def dense_queries(self, query_lens: Array, metadata: Any) -> Bool[Array, " S"] | None:
        """None: all from the cache."""
        return None

    def split_cache(self, kv_cache: Array) -> KVPools:
        """See `kv_layouts.split_packed`."""
        return split_packed(kv_cache)

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: Any, v_scale: Any) -> Array:
        """See `kv_layouts.write_packed`."""
        return write_packed(kv_cache, k, v, slots, k_scale, v_scale)


class RocmAiterUnifiedAttentionBackend(RocmAttentionBackend):
    """ROCM_ATTN with sinks and cross-attention, and without non-causal attention."""

    engine_name = "ROCM_AITER_UNIFIED_ATTN"
    impl_cls = RocmAiterUnifiedAttentionImpl
    builder_cls = RocmAiterUnifiedAttentionMetadataBuilder
    supported_dtypes = ("float16", "bfloat16")
    supported_attn_types = ATTN_TYPES

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """K and V side by side.

        Raises:
          ValueError: the block size is no multiple of 16.
        """
        expect_multiple_of_16(block_size)
        return packed_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_preferred_block_size(cls, default: int, platform: Platform | None = None) -> int:
        """Blocks of 64."""
        return 64

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """Any; see `supports_head_size`."""
        return ()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """From 32."""
        return head_size >= 32

    @classmethod
    def supports_sink(cls, platform: Platform | None = None) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No, although the class above says yes: the aiter kernel asserts causality."""
        return False
