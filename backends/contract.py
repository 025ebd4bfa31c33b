"""What a serving engine's attention backend promises: the question (`AttentionConfig`) and the promises' base class.

Names, defaults and the order of reasons are those of vLLM's `vllm/v1/attention/backend.py` as of 2026-08. Answers are
plain Python over the arguments: none of them looks at a device or at the environment.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import ml_dtypes  # noqa: F401  # gives NumPy the names bfloat16 and float8_*
import numpy as np

from pallas_kernels.request import expect

CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
)
UNQUANTIZED_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class AttentionType(enum.StrEnum):
    """Whose keys the queries see."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.IntEnum):
    """For which batches an engine may capture a CUDA graph; the least of several layers' levels holds for all."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # all query lengths equal
    ALWAYS = 3


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    """In a list of block sizes: every multiple of `base`."""

    base: int


class DeviceCapability(NamedTuple):
    """A compute capability; on ROCm the digits of the gfx number."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclasses.dataclass(frozen=True)
class Platform:
    """A device and the switches that an engine would read from its environment, all of them explicit.

    Subclasses are in `backends.platforms`.
    """

    name: ClassVar[str] = ""  # as jax names the lowering platform

    @property
    def capability(self) -> DeviceCapability | None:
        """The device's capability; None where there is no such number."""
        return None

    @property
    def device(self) -> str:
        """The device in a few letters, for messages."""
        return self.name

    @property
    def fp8_dtype(self) -> str:
        """The type that "fp8" and "fp8_e4m3" mean here."""
        return "float8_e4m3fn"

    def priorities(self, config: AttentionConfig) -> tuple[str, ...]:
        """Names of the backends to try, best first."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What one attention layer asks of a backend.

    The first sixteen fields are vLLM's `AttentionSelectorConfig`; the others are this project's.
    """

    head_size: int
    dtype: str  # or anything that NumPy takes for a dtype; kept as its name
    kv_cache_dtype: str | None = "auto"
    block_size: int | None = None  # only where the user chose one
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_per_request_causal: bool = False  # causal and non-causal requests in one batch
    is_encoder_decoder_model: bool = False
    num_heads: int | None = None
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        """Normalise names and refuse fields that do not fit or contradict each other."""
        try:
            name = None if self.dtype is None else np.dtype(self.dtype).name  # NumPy takes None for float64
        except TypeError:
            name = None
        expect(name is not None, "dtype", repr(self.dtype), "a dtype, such as 'bfloat16'")
        object.__setattr__(self, "dtype", name)
        types = [t.value for t in AttentionType]
        expect(self.attn_type in types, "attn_type", repr(self.attn_type), f"one of {', '.join(types)}")
        object.__setattr__(self, "attn_type", AttentionType(self.attn_type))
        known = self.kv_cache_dtype is None or self.kv_cache_dtype in CACHE_DTYPES
        expect(known, "kv_cache_dtype", repr(self.kv_cache_dtype), f"None or one of {', '.join(CACHE_DTYPES)}")
        expect(_positive(self.head_size), "head_size", repr(self.head_size), "a positive int")
        for name in ("block_size", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            expect(value is None or _positive(value), name, repr(value), "None or a positive int")
        for field in dataclasses.fields(self):
            if field.type == "bool":
                value = getattr(self, field.name)
                expect(isinstance(value, bool), field.name, repr(value), "a bool")
        self._expect_consistent()

    def _expect_consistent(self) -> None:
        if self.num_kv_heads is not None:
            fits = self.num_heads is not None and self.num_heads % self.num_kv_heads == 0
            came = f"{self.num_kv_heads} beside num_heads={self.num_heads}"
            expect(fits, "num_kv_heads", came, "a divisor of num_heads")
        if self.use_per_head_quant_scales:
            came = f"True beside kv_cache_dtype={self.kv_cache_dtype!r}"
            quantized = self.kv_cache_dtype not in ("float16", "bfloat16")
            expect(quantized, "use_per_head_quant_scales", came, "a quantised cache, if there are scales")
        if self.use_per_request_causal:
            came = "True beside use_non_causal=False"
            expect(self.use_non_causal, "use_per_request_causal", came, "use_non_causal=True: some requests are")
        if self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            came = f"True beside attn_type={self.attn_type.value!r}"
            expect(not self.use_kv_connector, "use_kv_connector", came, "False: encoders keep no KV cache")

    @property
    def group_size(self) -> int | None:
        """Query heads a KV head, where both numbers are known."""
        return None if self.num_heads is None or self.num_kv_heads is None else self.num_heads // self.num_kv_heads


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class AttentionBackend:
    """The promises of one backend. Subclasses override what differs; every member is static or a classmethod."""

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = UNQUANTIZED_CACHE_DTYPES
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    forward_includes_kv_cache_update: ClassVar[bool] = True
    # What the accessors below say; each subclass has its own.
    engine_name: ClassVar[str]
    impl_cls: ClassVar[type]
    metadata_cls: ClassVar[type]
    builder_cls: ClassVar[type]

    @classmethod
    def get_name(cls) -> str:
        """The name by which the engine's metadata refers to the backend."""
        return cls.engine_name

    @classmethod
    def get_impl_cls(cls) -> type:
        """The arithmetic."""
        return cls.impl_cls

    @classmethod
    def get_metadata_cls(cls) -> type:
        """What `forward` takes as metadata."""
        return cls.metadata_cls

    @classmethod
    def get_builder_cls(cls) -> type:
        """What makes it from `CommonAttentionMetadata`."""
        return cls.builder_cls

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Logical shape of a layer's cache."""
        raise NotImplementedError

    @classmethod
    def get_kv_cache_block_dim(
        cls, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> int:
        """Which axis of that shape counts blocks."""
        sentinel = 1234567
        return cls.get_kv_cache_shape(sentinel, block_size, num_kv_heads, head_size, cache_dtype_str).index(sentinel)

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False, cache_layout: str = "NHD"
    ) -> tuple[int, ...]:
        """Order of the logical axes in memory.

        Raises:
          NotImplementedError: memory follows the logical shape.
        """
        raise NotImplementedError("the cache lies in memory as its logical shape says")

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Whether a layered cache keeps all layers of one block together."""
        try:
            layered = cls.get_kv_cache_stride_order(include_num_layers_dimension=True)
            single = cls.get_kv_cache_stride_order()
        except NotImplementedError:
            return False
        return len(layered) == len(single) + 1 and layered[0] != 0

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_kernel_block_sizes(cls, platform: Platform | None = None) -> Sequence[int | MultipleOf]:
        """Block sizes that the kernels take."""
        return (MultipleOf(1),)

    @classmethod
    def get_supported_kernel_block_sizes_for_config(
        cls, config: AttentionConfig, platform: Platform | None = None
    ) -> Sequence[int | MultipleOf]:
        """The same, where it hangs on the model too."""
        return cls.get_supported_kernel_block_sizes(platform)

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """Head sizes; empty: any."""
        return ()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the list of head sizes holds it."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: Any) -> bool:
        """Whether queries may have this type."""
        return np.dtype(dtype).name in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None, platform: Platform | None = None) -> bool:
        """Whether the cache may have this type."""
        known = cls.supported_kv_cache_dtypes
        return kv_cache_dtype is None or not known or kv_cache_dtype in known

    @classmethod
    def supports_block_size(cls, block_size: int | None, platform: Platform | None = None) -> bool:
        """Whether any listed size divides it: one block of the engine may be several of the kernel."""
        return _divides(cls.get_supported_kernel_block_sizes(platform), block_size)

    @classmethod
    def get_preferred_block_size(cls, default: int, platform: Platform | None = None) -> int:
        """`default` where it is supported, else the least listed size."""
        if cls.supports_block_size(default, platform):
            return default
        return min(map(_base, cls.get_supported_kernel_block_sizes(platform)))

    @classmethod
    def is_mla(cls) -> bool:
        """Whether it computes multi-head latent attention."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Whether it attends to chosen keys only."""
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether it is a state-space layer."""
        return False

    @classmethod
    def supports_sink(cls, platform: Platform | None = None) -> bool:
        """Whether a logit without a value may join each row's denominator."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Whether ALiBi may use square roots of distances."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether ranges of multimodal tokens may see each other fully."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether each KV head may have its own scale."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a layer may have a window."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether queries of the paged decoder path may see each other both ways; ENCODER_ONLY is another matter."""
        return False

    @classmethod
    def supports_per_request_causal(cls) -> bool:
        """Whether causal and non-causal requests may share a batch."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a request's bits can be made independent of its batch."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether blocks may be moved to and from other processes."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether query lengths on the device may differ from those that the host planned with."""
        return not cls.is_ssm()

    @classmethod
    def supports_pcp(cls) -> bool:
        """Whether prefill context parallelism works."""
        return bool(getattr(cls.get_impl_cls(), "supports_pcp", False))

    @classmethod
    def supports_dcp(cls) -> bool:
        """Whether decode context parallelism works."""
        return bool(getattr(cls.get_impl_cls(), "can_return_lse_for_decode", False))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether it computes this kind of attention."""
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability, platform: Platform | None = None) -> bool:
        """Whether the engine's kernels exist for the device."""
        return True

    @classmethod
    def supports_combination(cls, config: AttentionConfig, platform: Platform | None = None) -> str | None:
        """What speaks against the combination although each part is fine; None: nothing."""
        return None

    @classmethod
    def get_required_kv_cache_layout(cls, platform: Platform | None = None) -> str | None:
        """The layout that it insists on, "NHD" or "HND"; None: either."""
        return None

    @classmethod
    def validate_configuration(cls, config: AttentionConfig, platform: Platform | None = None) -> list[str]:
        """Every reason why the backend cannot run a configuration, in vLLM's order; empty: it can.

        Args:
          config: what the layer asks.
          platform: where it would run. None leaves the device out: its capability is not checked, and what only some
            devices have counts as missing.
        """
        c = config
        reasons = [
            (cls.supports_head_size(c.head_size), f"head_size {c.head_size} not supported"),
            (cls.supports_dtype(c.dtype), f"dtype {c.dtype} not supported"),
            (
                cls.supports_kv_cache_dtype(c.kv_cache_dtype, platform),
                f"kv_cache_dtype {c.kv_cache_dtype} not supported",
            ),
            (
                _divides(cls.get_supported_kernel_block_sizes_for_config(c, platform), c.block_size),
                f"block_size {c.block_size} not supported",
            ),
            (
                not c.use_mm_prefix or cls.supports_mm_prefix(),
                "partial multimodal-token full attention not supported",
            ),
            (c.use_mla == cls.is_mla(), f"{'MLA' if c.use_mla else 'non-MLA'} not supported"),
            (not c.has_sink or cls.supports_sink(platform), "attention sinks not supported"),
            (c.use_sparse == cls.is_sparse(), f"{'sparse' if c.use_sparse else 'non-sparse'} attention not supported"),
            (
                not c.use_per_head_quant_scales or cls.supports_per_head_quant_scales(),
                "per-head quant scales not supported",
            ),
            (
                platform is None or cls._runs_on(platform),
                f"compute capability {platform.device if platform else None} not supported",
            ),
            (cls.supports_attn_type(c.attn_type), f"attention type {c.attn_type.value} not supported"),
            (not c.has_sliding_window or cls.supports_sliding_window(), "sliding window not supported"),
            (not c.use_non_causal or cls.supports_non_causal(), "non-causal attention not supported"),
            (not c.use_batch_invariant or cls.supports_batch_invariance(), "batch invariance not supported"),
            (not c.use_kv_connector or cls.supports_kv_connector(), "KV connector not supported"),
            (not c.use_pcp or cls.supports_pcp(), "PCP not supported"),
            (
                not c.use_adaptive_verification or cls.supports_device_cpu_query_lens_mismatch(),
                "device/CPU query lens mismatch not supported, which adaptive verification needs",
            ),
        ]
        found = [reason for ok, reason in reasons if not ok]
        combination = cls.supports_combination(c, platform)
        if combination is not None:
            found.append(combination)
        if c.use_per_request_causal and not cls.supports_per_request_causal():
            found.append("per-request causal flags not supported")
        return found

    @classmethod
    def _runs_on(cls, platform: Platform) -> bool:
        capability = platform.capability or DeviceCapability(0, 0)
        return cls.supports_compute_capability(capability, platform)


def _base(size: int | MultipleOf) -> int:
    return size.base if isinstance(size, MultipleOf) else size


def _divides(sizes: Sequence[int | MultipleOf], block_size: int | None) -> bool:
    return block_size is None or not sizes or any(block_size % _base(size) == 0 for size in sizes)
