"""JATTN: this project's own backend, which can do what the kernels of the platform can."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from backends.builder import AttentionMetadataBuilder
from backends.contract import UNQUANTIZED_CACHE_DTYPES, AttentionBackend, AttentionConfig, AttentionType, Platform
from backends.impl import ENCODERS, AttentionImpl, Batch
from backends.kv_layouts import KVPools, write_pools
from backends.metadata import CommonAttentionMetadata, metadata_pytree
from backends.rocm_attn import KV_DTYPES
from pallas_kernels import dispatch
from pallas_kernels.request import QUERY_DTYPES, AttentionRequest, expect

ATTN_TYPES = tuple(AttentionType)


@metadata_pytree("num_actual_tokens", "max_query_len", "max_seq_len")
@dataclasses.dataclass(frozen=True)
class JattnMetadata:
    """One step's batch; `causal` may be a flag for each request."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Int[Array, " S+1"]
    max_seq_len: int
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_blocks"]
    slot_mapping: Int[Array, " T"]
    causal: bool | Bool[Array, " S"] = True
    mm_prefix_range: Int[Array, "S R 2"] | None = None


@dataclasses.dataclass(frozen=True)
class JattnMetadataBuilder(AttentionMetadataBuilder):
    """Copies the common fields."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> JattnMetadata:
        """See the base class."""
        common = common_attn_metadata
        seq_lens, causal = common.seq_lens, common.causal
        if self.spec.attn_type == AttentionType.ENCODER_DECODER:
            expect(common.encoder_seq_lens is not None, "encoder_seq_lens", None, "int[S]: the keys of cross-attention")
            assert common.encoder_seq_lens is not None
            seq_lens, causal = common.encoder_seq_lens, False
        return JattnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
            mm_prefix_range=common.mm_prefix_ranges,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class JattnImpl(AttentionImpl):
    """Everything from the cache; a window is two-sided where causality does not cut it."""

    backend_name: ClassVar[str] = "JATTN"
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = ATTN_TYPES
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    metadata_cls: ClassVar[type] = JattnMetadata
    can_return_lse_for_decode: ClassVar[bool] = True
    takes_q_scale: ClassVar[bool] = True
    per_head_scales: ClassVar[bool] = True

    def batch(self, metadata: JattnMetadata) -> Batch:
        """The common fields."""
        m = metadata
        return Batch(m.query_start_loc, m.seq_lens, m.block_table, m.causal, m.max_query_len, (), m.mm_prefix_range)

    def split_cache(self, kv_cache: Array) -> KVPools:
        """K pool and V pool, NHD."""
        expect(kv_cache.ndim == 5 and kv_cache.shape[0] == 2, "kv_cache", kv_cache.shape, "[2, P, page, KVH, D]")
        return KVPools(kv_cache[0], kv_cache[1], "NHD")

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: object, v_scale: object) -> Array:
        """Into both pools."""
        pools = write_pools(self.split_cache(kv_cache), k, v, slots, k_scale, v_scale)
        return kv_cache.at[0].set(pools.k).at[1].set(pools.v)

    def fused_output_quant_supported(self) -> bool:
        """8-bit floats with one static scale."""
        return True


class JattnBackend(AttentionBackend):
    """Whatever `pallas_kernels.dispatch` finds a kernel for."""

    engine_name = "JATTN"
    impl_cls = JattnImpl
    metadata_cls = JattnMetadata
    builder_cls = JattnMetadataBuilder
    supported_dtypes: ClassVar[tuple[str, ...]] = QUERY_DTYPES
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = ATTN_TYPES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The K pool and the V pool, NHD. Keep them as `KVPools` instead, and nothing is ever copied."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_sink(cls, platform: Platform | None = None) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
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
    def supports_per_request_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, where `supports_combination` finds a kernel that has it."""
        return True

    @classmethod
    def supports_combination(cls, config: AttentionConfig, platform: Platform | None = None) -> str | None:
        """The kernels' own reasons, where none of the platform's can run the configuration."""
        if config.dtype not in QUERY_DTYPES or not cls.supports_kv_cache_dtype(config.kv_cache_dtype):
            return None  # said already
        return _why_no_kernel(config, platform)


@functools.cache
def _why_no_kernel(config: AttentionConfig, platform: Platform | None) -> str | None:
    name = "cpu" if platform is None else platform.name
    try:
        dispatch.first_without_reasons(typical_request(config, platform), name)
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def typical_request(config: AttentionConfig, platform: Platform | None = None) -> AttentionRequest:
    """A call such as the configuration's layer makes; what it leaves open is filled with ordinary numbers."""
    fp8 = "float8_e4m3fn" if platform is None else platform.fp8_dtype
    quantized = config.kv_cache_dtype is not None and config.kv_cache_dtype not in UNQUANTIZED_CACHE_DTYPES
    stored = {"float16": "float16", "bfloat16": "bfloat16", "fp8": fp8, "fp8_e4m3": fp8, "fp8_e5m2": "float8_e5m2"}
    scales = ("head" if config.use_per_head_quant_scales else "scalar") if quantized else "none"
    num_heads = config.num_heads or 8
    return AttentionRequest(
        num_tokens=64,
        num_seqs=4,
        num_heads=num_heads,
        num_kv_heads=config.num_kv_heads or num_heads,
        head_dim=config.head_size,
        num_pages=64,
        page_size=config.block_size or 16,
        max_pages=16,
        q_dtype=np.dtype(config.dtype),
        kv_dtype=np.dtype(stored.get(config.kv_cache_dtype or "auto", config.dtype)),
        scale=config.head_size**-0.5,
        causal=None if config.use_per_request_causal else not config.use_non_causal,
        window=(127, None if not config.use_non_causal else 127) if config.has_sliding_window else (None, None),
        sinks=config.has_sink,
        k_scale=scales,  # type: ignore[arg-type]
        v_scale=scales,  # type: ignore[arg-type]
        new_kv=config.attn_type in ENCODERS,
        num_ranges=1 if config.use_mm_prefix else 0,
        max_query_len=16,
        batch_invariant=config.use_batch_invariant,
    )
