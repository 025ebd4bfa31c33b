"""The devices, what an engine would read from its environment there, and which backends it would try, in order.

Priorities are those of vLLM of 2026-08, with this project's own backend as the last entry everywhere.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

from backends.contract import AttentionConfig, AttentionType, DeviceCapability, Platform
from pallas_kernels.request import expect

OWN = "JATTN"


@dataclasses.dataclass(frozen=True)
class Cuda(Platform):
    """An NVIDIA GPU.

    `use_trtllm_attention` is the engine's option of that name (None: decide by the batch); `trtllm_available` says
    whether its kernels can be fetched.
    """

    compute_capability: DeviceCapability = DeviceCapability(9, 0)  # noqa: RUF009  # a tuple
    use_trtllm_attention: bool | None = None
    trtllm_available: bool = True

    name: ClassVar[str] = "cuda"

    def __post_init__(self) -> None:
        """Take a plain pair, too."""
        object.__setattr__(self, "compute_capability", DeviceCapability(*self.compute_capability))

    @property
    def capability(self) -> DeviceCapability:
        """The compute capability."""
        return self.compute_capability

    @property
    def device(self) -> str:
        """The compute capability as text."""
        return str(self.compute_capability)

    @property
    def trtllm_prefill(self) -> bool:
        """Whether TRTLLM kernels can prefill: the SM100 family alone."""
        return self._trtllm and self.compute_capability.major == 10

    @property
    def trtllm_decode(self) -> bool:
        """Whether TRTLLM or XQA kernels can decode: SM90, SM100 and SM12x."""
        return self._trtllm and self.compute_capability.major in (9, 10, 12)

    @property
    def xqa_decode(self) -> bool:
        """Whether decoding has an XQA kernel of its own: SM12x."""
        return self._trtllm and self.compute_capability.major == 12

    @property
    def _trtllm(self) -> bool:
        return self.trtllm_available and self.use_trtllm_attention is not False

    def priorities(self, config: AttentionConfig) -> tuple[str, ...]:
        """By capability, MLA, causality, and for sparse MLA by the cache and the heads."""
        major = self.compute_capability.major
        if config.use_mla:
            return (*_cuda_mla(major, config), OWN)
        first = ("FLASH_ATTN", "FLASHINFER")
        if major == 10 and not config.use_non_causal:
            first = ("FLASHINFER", "FLASH_ATTN")
        return (*first, "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", OWN)


def _cuda_mla(major: int, config: AttentionConfig) -> tuple[str, ...]:
    if major == 12:
        return ("TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120")
    if major != 10:
        older = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
        return (*older, "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
    quantized = config.kv_cache_dtype not in (None, "auto", "float16", "bfloat16")
    few_heads = config.num_heads is not None and config.num_heads <= 16
    sparse = ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
    dense = ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    return (*dense, *(sparse if quantized or few_heads else sparse[::-1]))


_CDNA = {"gfx908": 1, "gfx90a": 2, "gfx940": 3, "gfx941": 3, "gfx942": 3, "gfx950": 4}


@dataclasses.dataclass(frozen=True)
class Rocm(Platform):
    """An AMD GPU.

    The switches stand for `VLLM_ROCM_USE_AITER`, `VLLM_ROCM_USE_AITER_MHA` and `VLLM_ROCM_USE_AITER_MLA`;
    `aiter_found` says whether the aiter library is installed.
    """

    arch: str = "gfx942"
    use_aiter: bool = False
    use_aiter_mha: bool = True
    use_aiter_mla: bool = True
    aiter_found: bool = True

    name: ClassVar[str] = "rocm"

    def __post_init__(self) -> None:
        """Refuse what is not the name of an architecture."""
        ok = re.fullmatch(r"gfx[0-9]{2,3}[0-9a-f]", self.arch) is not None
        expect(ok, "arch", repr(self.arch), "an AMD architecture such as 'gfx942'")

    @property
    def capability(self) -> DeviceCapability:
        """The digits of the gfx number: gfx942 is 9.4."""
        return DeviceCapability(int(self.arch[3:-2]), int(self.arch[-2], 16))

    @property
    def device(self) -> str:
        """The architecture."""
        return self.arch

    @property
    def fp8_dtype(self) -> str:
        """CDNA 3 has its own format."""
        return "float8_e4m3fnuz" if self.arch.startswith("gfx94") else "float8_e4m3fn"

    @property
    def cdna(self) -> int:
        """The generation of CDNA; 0 for other GPUs."""
        return _CDNA.get(self.arch, 0)

    @property
    def rdna4(self) -> bool:
        """Whether the GPU is of the RDNA 4 generation."""
        return self.arch.startswith("gfx12")

    def priorities(self, config: AttentionConfig) -> tuple[str, ...]:
        """By sparsity, MLA, the KV connector and the aiter switches."""
        if config.use_sparse:
            return ("ROCM_AITER_MLA_SPARSE", OWN)
        if config.use_mla:
            aiter = self.use_aiter and self.use_aiter_mla and self.aiter_found
            return (*(("ROCM_AITER_MLA", "TRITON_MLA", "ROCM_AITER_TRITON_MLA") if aiter else ("TRITON_MLA",)), OWN)
        names = [] if config.use_kv_connector else ["ROCM_ATTN"]
        if self.use_aiter and self.use_aiter_mha and self.aiter_found and self.cdna > 2:
            names.append("ROCM_AITER_FA")
        if self.aiter_found and self.rdna4 and self.use_aiter:
            names.insert(0, "ROCM_AITER_UNIFIED_ATTN")
        elif self.aiter_found and (self.cdna > 2 or self.rdna4):
            names.append("ROCM_AITER_UNIFIED_ATTN")
        # Its cache keeps all keys before all values; that does not go together with an encoder's cache.
        if config.is_encoder_decoder_model or config.attn_type is AttentionType.ENCODER_DECODER:
            names = [name for name in names if name != "ROCM_ATTN"]
        return (*names, "TRITON_ATTN", "TURBOQUANT", OWN)


@dataclasses.dataclass(frozen=True)
class Cpu(Platform):
    """A host's processor."""

    name: ClassVar[str] = "cpu"

    def priorities(self, config: AttentionConfig) -> tuple[str, ...]:
        """One engine backend for each kind."""
        if config.use_sparse:
            raise NotImplementedError("sparse attention has no backend on cpu")
        return ("CPU_MLA" if config.use_mla else "CPU_ATTN", OWN)


@dataclasses.dataclass(frozen=True)
class Tpu(Platform):
    """A TPU; `generation` as in v5e, v6e, 7x."""

    generation: str = "v6e"

    name: ClassVar[str] = "tpu"

    def __post_init__(self) -> None:
        """Refuse what is not a generation."""
        ok = re.fullmatch(r"v[2-9][ep]?|v?[7-9]x", self.generation) is not None
        expect(ok, "generation", repr(self.generation), "a TPU generation such as 'v5e', 'v6e' or '7x'")

    @property
    def fp8_dtype(self) -> str:
        """TPU v6e has e5m2 only."""
        return "float8_e5m2" if self.generation == "v6e" else "float8_e4m3fn"

    def priorities(self, config: AttentionConfig) -> tuple[str, ...]:
        """One engine backend for each kind."""
        return ("FLASH_ATTN_MLA" if config.use_mla else "FLASH_ATTN", OWN)


def parse_platform(platform: Platform | str) -> Platform:
    """A platform from its description, or from a short name.

    Args:
      platform: a `Platform`; or "cuda" (SM90), "cuda:8.9", "sm89", "rocm" (gfx942), "gfx950", "cpu", "tpu", "tpu:v5e".

    Raises:
      ValueError: the name is none of these.
    """
    if isinstance(platform, Platform):
        return platform
    text = platform.strip().lower() if isinstance(platform, str) else ""
    plain: dict[str, Platform] = {"cuda": Cuda(), "rocm": Rocm(), "cpu": Cpu(), "tpu": Tpu()}
    if text in plain:
        return plain[text]
    if found := re.fullmatch(r"(?:cuda:|sm)(\d+)\.?(\d)a?", text):
        return Cuda(DeviceCapability(int(found[1]), int(found[2])))
    if found := re.fullmatch(r"(?:rocm:)?(gfx[0-9]{2,3}[0-9a-f])", text):
        return Rocm(found[1])
    if found := re.fullmatch(r"tpu:?(v[2-9][ep]?|v?[7-9]x)", text):
        return Tpu(found[1])
    expected = "a Platform, or 'cuda', 'cuda:9.0', 'sm90', 'rocm', 'gfx942', 'cpu', 'tpu', 'tpu:v6e'"
    raise ValueError(f"platform: got {platform!r}, expected {expected}")


def platform_of(device: Any) -> Platform:
    """The platform of a `jax.Device`, with every switch at the engine's default."""
    kind = getattr(device, "compute_capability", None)
    if device.platform in ("gpu", "cuda", "rocm") and kind is not None:
        return parse_platform(kind if str(kind).startswith("gfx") else f"cuda:{kind}")
    return parse_platform(device.platform)
