"""Backends by name: vLLM's names of 2026-08, this project's own, and a user's."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any, cast

from backends.contract import AttentionBackend

# Of the engine, without a class here. A name stays known, so that priorities and messages can speak of it.
_NOT_PROVIDED = "vllm:"


class _ByName(enum.EnumMeta):
    def __getitem__(cls, name: str) -> Any:
        if name not in cls.__members__:
            known = ", ".join(cls.__members__)
            raise ValueError(f"attention backend: got {name!r}, expected one of {known}")
        return super().__getitem__(name)


class _Registered(enum.Enum, metaclass=_ByName):
    """Members map to the path of a class; `register_backend` may put another one in its place."""

    def is_overridden(self) -> bool:
        """Whether a user's class stands for this name."""
        return self in _overrides

    def clear_override(self) -> None:
        """Forget the user's class."""
        if _overrides.pop(self, None) is not None:
            _count_change()

    def is_provided(self) -> bool:
        """Whether there is a class for this name."""
        return self.is_overridden() or not (self.value == "" or self.value.startswith(_NOT_PROVIDED))

    def get_path(self) -> str:
        """Dotted path of the class.

        Raises:
          ValueError: there is none.
        """
        if self in _overrides:
            return _overrides[self][0]
        if self.value == "":
            raise ValueError(f"{self.name} has no class: register one first, with register_backend({self})")
        if not self.is_provided():
            raise ValueError(f"{self.name} is a backend of vLLM that jattn does not provide")
        return self.value

    def get_class(self) -> type[AttentionBackend]:
        """The class itself.

        Raises:
          ValueError: there is none.
        """
        path = self.get_path()
        if self in _overrides and _overrides[self][1] is not None:
            return cast(type[AttentionBackend], _overrides[self][1])
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


class AttentionBackendEnum(_Registered):
    """Attention backends."""

    ROCM_ATTN = "backends.rocm_attn.RocmAttentionBackend"
    ROCM_AITER_UNIFIED_ATTN = "backends.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
    ROCM_AITER_FA = "backends.rocm_aiter_fa.AiterFlashAttentionBackend"
    FLASHINFER = "backends.flashinfer.FlashInferBackend"
    JATTN = "backends.jattn_backend.JattnBackend"
    CUSTOM = ""
    FLASH_ATTN = "vllm:FLASH_ATTN"
    FLASH_ATTN_DIFFKV = "vllm:FLASH_ATTN_DIFFKV"
    TRITON_ATTN = "vllm:TRITON_ATTN"
    TRITON_ATTN_DIFFKV = "vllm:TRITON_ATTN_DIFFKV"
    FLEX_ATTENTION = "vllm:FLEX_ATTENTION"
    HPC_ATTN = "vllm:HPC_ATTN"
    CPU_ATTN = "vllm:CPU_ATTN"
    TURBOQUANT = "vllm:TURBOQUANT"
    NO_ATTENTION = "vllm:NO_ATTENTION"
    TORCH_SDPA = "vllm:TORCH_SDPA"
    TRITON_MLA = "vllm:TRITON_MLA"
    FLASHMLA = "vllm:FLASHMLA"
    FLASHMLA_SPARSE = "vllm:FLASHMLA_SPARSE"
    FLASH_ATTN_MLA = "vllm:FLASH_ATTN_MLA"
    FLASH_ATTN_MLA_SPARSE = "vllm:FLASH_ATTN_MLA_SPARSE"
    FLASHINFER_MLA = "vllm:FLASHINFER_MLA"
    FLASHINFER_MLA_SPARSE = "vllm:FLASHINFER_MLA_SPARSE"
    FLASHINFER_MLA_SPARSE_SM120 = "vllm:FLASHINFER_MLA_SPARSE_SM120"
    CUTLASS_MLA = "vllm:CUTLASS_MLA"
    TOKENSPEED_MLA = "vllm:TOKENSPEED_MLA"
    ROCM_AITER_MLA = "vllm:ROCM_AITER_MLA"
    ROCM_AITER_MLA_SPARSE = "vllm:ROCM_AITER_MLA_SPARSE"
    ROCM_AITER_TRITON_MLA = "vllm:ROCM_AITER_TRITON_MLA"
    CPU_MLA = "vllm:CPU_MLA"
    XPU_MLA_SPARSE = "vllm:XPU_MLA_SPARSE"


class MambaAttentionBackendEnum(_Registered):
    """State-space layers; jattn has none of them."""

    CUSTOM = ""
    MAMBA1 = "vllm:MAMBA1"
    MAMBA2 = "vllm:MAMBA2"
    SHORT_CONV = "vllm:SHORT_CONV"
    LINEAR = "vllm:LINEAR"
    GDN_ATTN = "vllm:GDN_ATTN"


# The path and, where a class was given rather than a path, the class.
_overrides: dict[_Registered, tuple[str, type | None]] = {}
_changes = [0]


def _count_change() -> None:
    _changes[0] += 1


def generation() -> int:
    """How often the registry has changed: part of the key of every cached selection."""
    return _changes[0]


def register_backend(
    backend: _Registered, path: str | type | None = None, is_mamba: bool = False
) -> Callable[[type], type]:
    """Put a user's class in the place of a name; `CUSTOM` is the name without one.

        @register_backend(AttentionBackendEnum.CUSTOM)
        class MyBackend(AttentionBackend): ...

    Args:
      backend: the member.
      path: "package.module.Class", or the class; None: the class that the result decorates.
      is_mamba: whether the member is one of `MambaAttentionBackendEnum`.

    Raises:
      ValueError: the member is of the other enum.
    """
    kind = MambaAttentionBackendEnum if is_mamba else AttentionBackendEnum
    if not isinstance(backend, kind):
        raise ValueError(f"backend: got {backend!r}, expected a member of {kind.__name__} (is_mamba={is_mamba})")

    def put(cls: type) -> type:
        _overrides[backend] = (f"{cls.__module__}.{cls.__qualname__}", cls)
        _count_change()
        return cls

    if isinstance(path, str):
        _overrides[backend] = (path, None)
        _count_change()
    elif path is not None:
        put(path)
    return put
