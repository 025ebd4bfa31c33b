"""ROCM_ATTN: prefix attention with the new tokens' keys and values beside the cache.

Differences from the engine are in docs/differences-from-vllm.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from backends.builder import AttentionMetadataBuilder, one_flag
from backends.contract import AttentionBackend, AttentionCGSupport, AttentionType, MultipleOf, Platform
from backends.impl import ENCODERS, AttentionImpl, Batch
from backends.kv_layouts import KVPools, rocm_shape, split_rocm, write_rocm
from backends.metadata import CommonAttentionMetadata, metadata_pytree
from pallas_kernels.request import expect

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
ATTN_TYPES = (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@metadata_pytree("num_actual_tokens", "max_query_len", "max_seq_len", "use_cascade", "common_prefix_len")
@dataclasses.dataclass(frozen=True)
class RocmAttentionMetadata:
    """One step's batch, as ROCM_ATTN and ROCM_AITER_UNIFIED_ATTN take it."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Int[Array, " S+1"]
    max_seq_len: int
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_blocks"]
    slot_mapping: Int[Array, " T"]
    use_cascade: bool = False
    common_prefix_len: int = 0
    cu_prefix_query_lens: Int[Array, " 2"] | None = None
    prefix_kv_lens: Int[Array, " 1"] | None = None
    suffix_kv_lens: Int[Array, " S"] | None = None
    scheduler_metadata: Any = None
    prefix_scheduler_metadata: Any = None
    causal: bool = True
    mm_prefix_range: Int[Array, "S R 2"] | None = None


@dataclasses.dataclass(frozen=True)
class RocmAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Copies the common fields; `causal` verbatim."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    backend_name: ClassVar[str] = "ROCM_ATTN"

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RocmAttentionMetadata:
        """See the base class.

        Raises:
          NotImplementedError: each request has a causal flag of its own.
        """
        common = common_attn_metadata
        causal = one_flag(self.backend_name, common.causal)
        seq_lens = common.seq_lens
        if self.spec.attn_type == AttentionType.ENCODER_DECODER:
            expect(common.encoder_seq_lens is not None, "encoder_seq_lens", None, "int[S]: the keys of cross-attention")
            assert common.encoder_seq_lens is not None
            seq_lens, causal = common.encoder_seq_lens, False
        cascade = common_prefix_len > 0
        return RocmAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            use_cascade=cascade,
            common_prefix_len=common_prefix_len,
            cu_prefix_query_lens=jnp.asarray([0, common.num_actual_tokens], jnp.int32) if cascade else None,
            prefix_kv_lens=jnp.asarray([common_prefix_len], jnp.int32) if cascade else None,
            suffix_kv_lens=seq_lens - common_prefix_len if cascade else None,
            causal=causal,
            mm_prefix_range=common.mm_prefix_ranges,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> RocmAttentionMetadata:
        """The metadata of a capture run: no queries, one key for each request. The argument stays as it is."""
        common = common_attn_metadata
        return self.build(
            0,
            common.replace(
                query_start_loc=jnp.zeros_like(common.query_start_loc), seq_lens=jnp.ones_like(common.seq_lens)
            ),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RocmAttentionImpl(AttentionImpl):
    """Context from the cache, new tokens from the arguments, unquantised; single-token requests from the cache alone."""

    backend_name: ClassVar[str] = "ROCM_ATTN"
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = ATTN_TYPES
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    metadata_cls: ClassVar[type] = RocmAttentionMetadata

    def _why_not_attn_type(self) -> str:
        return (
            "its prefill takes the keys passed in for new tokens beside the cached ones, so cross-attention would count"
            " them twice"
        )

    def window(self, causal: bool) -> tuple[int | None, int | None]:
        """One-sided: without causality a decoder's future is visible at any distance. Encoders: both sides."""
        if self.window_size == 0:
            return None, None
        left = self.window_size - 1
        return left, left if self.attn_type in ENCODERS else None

    def check_call(self, batch: Batch) -> None:
        """ALiBi has a kernel of its own in the engine: causal, without sinks."""
        if self.alibi_slopes is not None and self.attn_type not in ENCODERS:
            if not batch.causal:
                self._refuse("ALiBi with causal=False")
            if self.sinks is not None:
                self._refuse("ALiBi with sinks")

    def batch(self, metadata: RocmAttentionMetadata) -> Batch:
        """The common fields."""
        m = metadata
        return Batch(m.query_start_loc, m.seq_lens, m.block_table, m.causal, m.max_query_len, (), m.mm_prefix_range)

    def dense_queries(self, query_lens: Array, metadata: RocmAttentionMetadata) -> Bool[Array, " S"] | None:
        """All but single tokens, which the decode kernel answers."""
        return None if metadata.max_query_len <= 1 else query_lens > 1

    def split_cache(self, kv_cache: Array) -> KVPools:
        """See `kv_layouts.split_rocm`."""
        return split_rocm(kv_cache)

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: Any, v_scale: Any) -> Array:
        """See `kv_layouts.write_rocm`."""
        return write_rocm(kv_cache, k, v, slots, k_scale, v_scale)

    def fused_output_quant_supported(self) -> bool:
        """8-bit floats with one static scale."""
        return True


class RocmAttentionBackend(AttentionBackend):
    """Decoder and encoders, causal and not."""

    engine_name = "ROCM_ATTN"
    impl_cls = RocmAttentionImpl
    metadata_cls = RocmAttentionMetadata
    builder_cls = RocmAttentionMetadataBuilder
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = ATTN_TYPES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """All K before all V.

        Raises:
          ValueError: the block size is no multiple of 16.
        """
        expect_multiple_of_16(block_size)
        return rocm_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_supported_kernel_block_sizes(cls, platform: Platform | None = None) -> Sequence[int | MultipleOf]:
        """Multiples of 16."""
        return (MultipleOf(16),)

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """A list."""
        return 32, 64, 80, 96, 128, 160, 192, 224, 256

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: a block's K and V lie apart."""
        return False


def expect_multiple_of_16(block_size: int) -> None:
    """Refuse other block sizes."""
    expect(block_size > 0 and block_size % 16 == 0, "block_size", block_size, "a multiple of 16")
