"""FLASHINFER: decodes and prefills apart while causal, one prefill of all requests while not."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from backends.batch_split import DecodePrefillSplit, get_dcp_local_seq_lens, split_decodes_and_prefills
from backends.builder import AttentionMetadataBuilder, LayerSpec, one_flag, uniform_window
from backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionConfig,
    DeviceCapability,
    MultipleOf,
    Platform,
)
from backends.impl import AttentionImpl, Batch, Phase
from backends.kv_layouts import KVPools, packed_shape, split_packed, write_packed
from backends.metadata import CommonAttentionMetadata, metadata_pytree
from backends.platforms import Cuda
from backends.rocm_attn import KV_DTYPES
from backends.trtllm import TrtllmSwitches, query_dtypes, use_trtllm_attention
from pallas_kernels.request import expect

NVFP4 = ("nvfp4", "nvfp4_4over6")
_STATIC = (
    "num_actual_tokens",
    "q_data_type_prefill",
    "q_data_type_decode",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "max_query_len",
    "max_seq_len",
    "use_trtllm",
    "decode_threshold",
    "use_cascade",
    "dcp_world_size",
)


@metadata_pytree(*_STATIC)
@dataclasses.dataclass(frozen=True)
class FlashInferMetadata:
    """One step's batch: decodes, prefills. Built causal under `jit`, the counts are None: one call answers all."""

    num_actual_tokens: int
    slot_mapping: Int[Array, " T"]
    q_data_type_prefill: str
    q_data_type_decode: str
    num_decodes: int | None
    num_decode_tokens: int | None
    num_prefills: int | None
    num_prefill_tokens: int | None
    causal: bool
    query_start_loc: Int[Array, " S+1"]
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_blocks"]
    max_query_len: int
    max_seq_len: int
    paged_kv_indptr: Int[Array, " S+1"]  # pages of each request as prefix sums
    paged_kv_last_page_len: Int[Array, " S"]  # tokens on its last page; 0 where it has none
    use_trtllm: TrtllmSwitches = TrtllmSwitches()  # noqa: RUF009  # a tuple
    decode_threshold: int = 1
    use_cascade: bool = False
    dcp_world_size: int = 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The runs of requests that are answered apart."""
        if self.num_decodes is None or self.num_prefills is None:
            return ()
        assert self.num_decode_tokens is not None and self.num_prefill_tokens is not None
        longest_decode = min(self.decode_threshold, self.max_query_len)
        return (
            Phase(0, self.num_decodes, 0, self.num_decode_tokens, longest_decode),
            Phase(
                self.num_decodes, self.num_prefills, self.num_decode_tokens, self.num_prefill_tokens, self.max_query_len
            ),
        )


@functools.cache
def warn_once_about_non_causal_trtllm() -> None:
    """Say once in a process that non-causal batches do not use TRTLLM decoding."""
    warnings.warn(
        "FLASHINFER answers non-causal batches (a drafter's) with its own prefill kernels; TRTLLM decoding stays in use"
        " for causal batches (the target's).",
        stacklevel=3,
    )


@dataclasses.dataclass(frozen=True)
class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Cuts causal batches into decodes of one length and prefills; takes non-causal ones whole.

    Causal and non-causal builds may alternate: nothing is kept between them.

    Raises:
      ValueError: NVFP4 or large blocks where TRTLLM kernels are not usable for both phases.
      NotImplementedError: windows on SM90, or sinks, which the engine's kernels lack there.
    """

    disable_q_quantization: bool = False

    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the layers against the platform."""
        spec, cuda = self.spec, self._cuda
        both = cuda is not None and cuda.trtllm_prefill and cuda.trtllm_decode
        if spec.kv_cache_dtype in NVFP4:
            expect(
                both, "kv_cache_dtype", spec.kv_cache_dtype, "a platform with TRTLLM kernels for both phases (SM100)"
            )
        if spec.block_size > 64:
            grouped = both and spec.num_heads > spec.num_kv_heads
            expect(
                grouped, "block_size", spec.block_size, "at most 64, without TRTLLM kernels on SM100 and grouped heads"
            )
        windowed = any(w is not None and w > 0 for w in spec.layer_windows)
        if windowed and cuda is not None and cuda.compute_capability.major == 9:
            raise NotImplementedError("FLASHINFER does not support sliding windows on SM90")
        if spec.has_sinks and not FlashInferBackend.supports_sink(self.platform):
            raise NotImplementedError("FLASHINFER does not support attention sinks on this platform")

    @property
    def _cuda(self) -> Cuda | None:
        return self.platform if isinstance(self.platform, Cuda) else None

    @property
    def trtllm_decode(self) -> bool:
        """Whether TRTLLM or XQA kernels can decode these layers."""
        usable = self._cuda is not None and self._cuda.trtllm_decode
        return usable and self.spec.num_heads % self.spec.num_kv_heads == 0

    def _spec_as_decode(self) -> bool:
        return self.trtllm_decode and self._cuda is not None and self._cuda.compute_capability.major in (10, 12)

    def get_cudagraph_support(self) -> AttentionCGSupport:
        """By the kernels that decode."""
        major = 0 if self._cuda is None else self._cuda.compute_capability.major
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if major == 9 or (major == 12 and self.spec.dcp_world_size > 1) or not self.trtllm_decode:
            return single
        return AttentionCGSupport.UNIFORM_BATCH if major == 12 or not self.spec.use_non_causal else single

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """See the base class.

        Raises:
          ValueError: layers differ in window or soft cap, and not all phases go to TRTLLM kernels.
          NotImplementedError: non-causal with DCP or with NVFP4; flags of each request; multimodal ranges.
        """
        common, spec = common_attn_metadata, self.spec
        causal = one_flag("FLASHINFER", common.causal)
        if not causal:
            self._check_non_causal()
        if common.mm_prefix_ranges is not None:
            raise NotImplementedError("FLASHINFER does not support mm_prefix_ranges")
        threshold = self.reorder_batch_threshold or 1
        split: DecodePrefillSplit | None = None
        if not causal:
            split = DecodePrefillSplit(0, common.num_reqs, 0, common.num_actual_tokens)
        elif common.concrete:
            split = split_decodes_and_prefills(common, threshold, require_uniform=True)
        dtypes = query_dtypes(spec.kv_cache_dtype, spec.dtype, self._cuda, self.disable_q_quantization)
        switches = TrtllmSwitches()
        if causal and split is not None:
            switches = self._switches(split, dtypes[0])
        if not switches.all:
            _check_one_plan(spec)
        indptr, last_page_len = paged_kv_lengths(self._local_seq_lens(common, split), spec.block_size)
        counts = (None,) * 4 if split is None else (split[0], split[2], split[1], split[3])
        return FlashInferMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            q_data_type_prefill=dtypes[0],
            q_data_type_decode=dtypes[1],
            num_decodes=counts[0],
            num_decode_tokens=counts[1],
            num_prefills=counts[2],
            num_prefill_tokens=counts[3],
            causal=causal,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            paged_kv_indptr=indptr,
            paged_kv_last_page_len=last_page_len,
            use_trtllm=switches,
            decode_threshold=threshold,
            use_cascade=common_prefix_len > 0,
            dcp_world_size=spec.dcp_world_size,
        )

    def _check_non_causal(self) -> None:
        if self.spec.dcp_world_size > 1:
            raise NotImplementedError("FLASHINFER does not support non-causal prefill with DCP")
        if self.spec.kv_cache_dtype in NVFP4:
            raise NotImplementedError("FLASHINFER does not support non-causal prefill with an NVFP4 KV cache")
        if self.trtllm_decode:
            warn_once_about_non_causal_trtllm()

    def _switches(self, split: DecodePrefillSplit, prefill_dtype: str) -> TrtllmSwitches:
        spec, cuda = self.spec, self._cuda
        prefill = use_trtllm_attention(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            num_tokens=split.num_prefill_tokens,
            kv_cache_dtype=spec.kv_cache_dtype,
            query_dtype=prefill_dtype,
            is_prefill=True,
            platform=cuda,
            force=True if spec.block_size >= 128 else (cuda.use_trtllm_attention if cuda else None),
            has_sinks=spec.has_sinks,
            has_spec=(self.reorder_batch_threshold or 1) > 1,
            dcp_world_size=spec.dcp_world_size,
        )
        decode = self.trtllm_decode and spec.dcp_world_size == 1
        everything = (split.num_prefills == 0 or prefill) and (split.num_decodes == 0 or decode)
        return TrtllmSwitches(prefill, decode, everything)

    def _local_seq_lens(self, common: CommonAttentionMetadata, split: DecodePrefillSplit | None) -> Array:
        """Keys of each request in this rank's cache that the plan counts."""
        spec = self.spec
        if spec.dcp_world_size == 1:
            return common.seq_lens
        # Prefills take their new tokens from beside the cache: only their context is shared out.
        lens, context = common.seq_lens, common.compute_num_computed_tokens()
        if split is None:
            lens = jnp.where(common.naive_query_lens() > (self.reorder_batch_threshold or 1), context, lens)
        else:
            lens = jnp.where(jnp.arange(common.num_reqs) >= split.num_decodes, context, lens)
        return get_dcp_local_seq_lens(lens, spec.dcp_world_size, spec.dcp_rank, spec.dcp_interleave)


def paged_kv_lengths(seq_lens: Int[Array, " S"], block_size: int) -> tuple[Int[Array, " S+1"], Int[Array, " S"]]:
    """Prefix sums of the requests' pages, and the tokens on each last page."""
    pages = -(-seq_lens // block_size)
    last = seq_lens % block_size
    last = jnp.where((last == 0) & (seq_lens != 0), block_size, last)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(pages)])
    return indptr.astype(jnp.int32), last.astype(jnp.int32)


def _check_one_plan(spec: LayerSpec) -> None:
    uniform_window(spec)
    caps = {cap or None for cap in spec.layer_soft_caps}
    came = ", ".join(map(str, spec.layer_soft_caps))
    expect(len(caps) <= 1, "layer_soft_caps", came, "one soft cap for all layers of a group")


@dataclasses.dataclass(frozen=True, eq=False)
class FlashInferImpl(AttentionImpl):
    """Everything from the cache, rounded as it holds it."""

    backend_name: ClassVar[str] = "FLASHINFER"
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = KV_DTYPES
    metadata_cls: ClassVar[type] = FlashInferMetadata
    can_return_lse_for_decode: ClassVar[bool] = True
    takes_q_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.kv_cache_dtype in NVFP4:
            raise NotImplementedError(
                f"FLASHINFER with kv_cache_dtype={self.kv_cache_dtype!r}: jattn has no NVFP4 cache"
            )
        super().__post_init__()

    @property
    def supports_quant_query_input(self) -> bool:
        """On the SM100 family, with a quantised cache."""
        return self.quantized and isinstance(self.platform, Cuda) and self.platform.trtllm_prefill

    def window(self, causal: bool) -> tuple[int | None, int | None]:
        """The engine plans with a left side alone."""
        return (self.window_size - 1 if self.window_size > 0 else None), None

    def batch(self, metadata: FlashInferMetadata) -> Batch:
        """The common fields, and the phases where they are known."""
        m = metadata
        if m.dcp_world_size > 1:
            raise NotImplementedError(
                "FLASHINFER with DCP: one rank's keys are part of the answer only;"
                " see jattn.sharding.context_parallel_attention"
            )
        return Batch(m.query_start_loc, m.seq_lens, m.block_table, m.causal, m.max_query_len, m.phases)

    def split_cache(self, kv_cache: Array) -> KVPools:
        """See `kv_layouts.split_packed`."""
        return split_packed(kv_cache)

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: object, v_scale: object) -> Array:
        """See `kv_layouts.write_packed`."""
        return write_packed(kv_cache, k, v, slots, k_scale, v_scale)

    def fused_output_quant_supported(self) -> bool:
        """On the SM100 family, from a quantised cache."""
        return self.quantized and isinstance(self.platform, Cuda) and self.platform.trtllm_prefill


class FlashInferBackend(AttentionBackend):
    """Decoder only, causal and not, on CUDA."""

    engine_name = "FLASHINFER"
    impl_cls = FlashInferImpl
    metadata_cls = FlashInferMetadata
    builder_cls = FlashInferMetadataBuilder
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """K and V side by side; NVFP4: as heads of their own, with a scale byte for each 16 values."""
        if cache_dtype_str in NVFP4:
            return num_blocks, 2 * num_kv_heads, block_size, head_size // 2 + head_size // 16
        return packed_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False, cache_layout: str = "NHD"
    ) -> tuple[int, ...]:
        """By layout.

        Raises:
          ValueError: the layout is unknown.
        """
        orders = {
            ("NHD", False): (0, 2, 1, 3),
            ("NHD", True): (1, 0, 3, 2, 4),
            ("HND", False): (0, 1, 2, 3),
            ("HND", True): (1, 2, 0, 3, 4),
        }
        expect(cache_layout in ("NHD", "HND"), "cache_layout", repr(cache_layout), "'NHD' or 'HND'")
        return orders[cache_layout, include_num_layers_dimension]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None, platform: Platform | None = None) -> bool:
        """NVFP4 where TRTLLM kernels do both phases."""
        if kv_cache_dtype in NVFP4:
            return isinstance(platform, Cuda) and platform.trtllm_prefill and platform.trtllm_decode
        return kv_cache_dtype is None or kv_cache_dtype in KV_DTYPES

    @classmethod
    def get_supported_kernel_block_sizes(cls, platform: Platform | None = None) -> Sequence[int | MultipleOf]:
        """Three sizes, and what they divide."""
        return 16, 32, 64

    @classmethod
    def get_supported_kernel_block_sizes_for_config(
        cls, config: AttentionConfig, platform: Platform | None = None
    ) -> Sequence[int | MultipleOf]:
        """Larger ones too for TRTLLM kernels on SM100 and grouped heads."""
        sizes = cls.get_supported_kernel_block_sizes(platform)
        both = isinstance(platform, Cuda) and platform.trtllm_prefill and platform.trtllm_decode
        return (*sizes, 128, 256, 512, 1024) if both and (config.group_size or 1) > 1 else sizes

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """A list."""
        return 64, 128, 256, 512

    @classmethod
    def supports_sink(cls, platform: Platform | None = None) -> bool:
        """Where TRTLLM (SM100) or XQA (SM12x) kernels may be used."""
        return isinstance(platform, Cuda) and (platform.trtllm_prefill or platform.xqa_decode)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes; the builder refuses it on SM90."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: it plans from the host's query lengths."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability, platform: Platform | None = None) -> bool:
        """8.0 to 12.1; only CUDA devices have such a number."""
        return (platform is None or isinstance(platform, Cuda)) and (8, 0) <= tuple(capability) <= (12, 1)

    @classmethod
    def get_required_kv_cache_layout(cls, platform: Platform | None = None) -> str | None:
        """HND on the SM100 family."""
        return "HND" if isinstance(platform, Cuda) and platform.compute_capability.major == 10 else None
