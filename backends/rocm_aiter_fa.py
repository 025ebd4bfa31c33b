"""ROCM_AITER_FA: decodes, extends and prefills, each with a kernel of its own. Its name in the engine is FLASH_ATTN."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from jax import Array
from jaxtyping import Bool, Int

from backends.batch_split import split_decodes_prefills_and_extends
from backends.builder import AttentionMetadataBuilder, one_flag, uniform_window
from backends.contract import AttentionBackend, AttentionCGSupport, DeviceCapability, MultipleOf, Platform
from backends.impl import AttentionImpl, Batch, Phase
from backends.kv_layouts import KVPools, packed_shape, split_packed, write_packed
from backends.metadata import CommonAttentionMetadata, metadata_pytree
from backends.platforms import Rocm
from backends.rocm_attn import KV_DTYPES, expect_multiple_of_16

_STATIC = (
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "decode_threshold",
    "num_decodes",
    "num_decode_tokens",
    "num_extends",
    "num_extend_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "use_cascade",
    "common_prefix_len",
)


@metadata_pytree(*_STATIC)
@dataclasses.dataclass(frozen=True)
class AiterFlashAttentionMetadata:
    """One step's batch: decodes, extends, prefills. Built under `jit`, the counts are None: one call answers all."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Int[Array, " S+1"]
    max_seq_len: int
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_blocks"]
    slot_mapping: Int[Array, " T"]
    decode_threshold: int = 1
    num_decodes: int | None = None
    num_decode_tokens: int | None = None
    num_extends: int | None = None
    num_extend_tokens: int | None = None
    num_prefills: int | None = None
    num_prefill_tokens: int | None = None
    use_cascade: bool = False
    common_prefix_len: int = 0
    causal: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The runs of requests that are answered apart: decodes; extends and prefills, which one call can answer."""
        if self.num_decodes is None or self.num_extends is None or self.num_prefills is None:
            return ()
        assert self.num_decode_tokens is not None and self.num_extend_tokens is not None
        assert self.num_prefill_tokens is not None
        num_long = self.num_extends + self.num_prefills
        num_long_tokens = self.num_extend_tokens + self.num_prefill_tokens
        longest_decode = min(self.decode_threshold, self.max_query_len)
        return (
            Phase(0, self.num_decodes, 0, self.num_decode_tokens, longest_decode, from_cache=True),
            Phase(self.num_decodes, num_long, self.num_decode_tokens, num_long_tokens, self.max_query_len),
        )


@dataclasses.dataclass(frozen=True)
class AiterFlashAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Cuts the batch by query length and context.

    Raises:
      ValueError: the layers have several windows; the engine gathers keys for one.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    spec_as_decode: ClassVar[bool] = True
    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the layers."""
        windowed = tuple(w for w in self.spec.layer_windows if w is not None and w > 0)
        uniform_window(dataclasses.replace(self.spec, layer_windows=windowed))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AiterFlashAttentionMetadata:
        """See the base class.

        Raises:
          NotImplementedError: each request has a causal flag of its own, or there are multimodal ranges.
        """
        common = common_attn_metadata
        if common.mm_prefix_ranges is not None:
            raise NotImplementedError("ROCM_AITER_FA does not support mm_prefix_ranges")
        threshold = self.reorder_batch_threshold or 1
        metadata = AiterFlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            decode_threshold=threshold,
            use_cascade=common_prefix_len > 0,
            common_prefix_len=common_prefix_len,
            causal=one_flag("ROCM_AITER_FA", common.causal),
        )
        if not common.concrete:
            return metadata
        return dataclasses.replace(metadata, **split_decodes_prefills_and_extends(common, threshold)._asdict())


@dataclasses.dataclass(frozen=True, eq=False)
class AiterFlashAttentionImpl(AttentionImpl):
    """Decodes read the cache; extends and prefills take the new tokens from the arguments, unquantised."""

    backend_name: ClassVar[str] = "ROCM_AITER_FA"
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    metadata_cls: ClassVar[type] = AiterFlashAttentionMetadata

    def _why_not_attn_type(self) -> str:
        return (
            "only decoder. Its prefill uses the decoder's query_start_loc as cu_seqlens_k, with causal=True; both are"
            " wrong for encoders and for cross-attention"
        )

    def batch(self, metadata: AiterFlashAttentionMetadata) -> Batch:
        """The common fields, and the phases where they are known."""
        m = metadata
        return Batch(m.query_start_loc, m.seq_lens, m.block_table, m.causal, m.max_query_len, m.phases)

    def dense_queries(self, query_lens: Array, metadata: AiterFlashAttentionMetadata) -> Bool[Array, " S"] | None:
        """All that is longer than a decode."""
        if metadata.max_query_len <= metadata.decode_threshold:
            return None
        return query_lens > metadata.decode_threshold

    def split_cache(self, kv_cache: Array) -> KVPools:
        """See `kv_layouts.split_packed`."""
        return split_packed(kv_cache)

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: Any, v_scale: Any) -> Array:
        """See `kv_layouts.write_packed`."""
        return write_packed(kv_cache, k, v, slots, k_scale, v_scale)


class AiterFlashAttentionBackend(AttentionBackend):
    """Decoder only, causal and not, on CDNA 3 and later."""

    engine_name = "FLASH_ATTN"  # Not its registry name: the engine calls it as it calls FlashAttention.
    impl_cls = AiterFlashAttentionImpl
    metadata_cls = AiterFlashAttentionMetadata
    builder_cls = AiterFlashAttentionMetadataBuilder
    supported_kv_cache_dtypes = KV_DTYPES
    forward_includes_kv_cache_update = False

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
    def get_supported_kernel_block_sizes(cls, platform: Platform | None = None) -> Sequence[int | MultipleOf]:
        """Two sizes, and what they divide."""
        return 16, 32

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """A list."""
        return 64, 128, 256

    @classmethod
    def supports_sink(cls, platform: Platform | None = None) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """One for all layers."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability, platform: Platform | None = None) -> bool:
        """By the generation of CDNA; the number says nothing."""
        return isinstance(platform, Rocm) and platform.cdna > 2
