"""Which implementation answers a request, and why not the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax import Array

from pallas_kernels import paged_hopper, paged_tpu, paged_triton, paged_xla, tpu_plan, tuned
from pallas_kernels.request import AttentionOperands, AttentionRequest

Result = tuple[Array, Array | None]  # out [T, H, D] in q's dtype; LSE float32 [T, H], or None where not asked for


class Implementation(NamedTuple):
    """One kernel family: where it may be chosen unasked, what it lacks, and the call itself."""

    name: str
    platforms: tuple[str, ...]  # jax lowering platforms on which it may be the first choice; empty: all
    why_not: Callable[[AttentionRequest, str | None], tuple[str, ...]]  # the device's name, None: some unknown one
    attend: Callable[[AttentionRequest, AttentionOperands], Result]
    cuda: Callable[[str | None], bool] = lambda arch: True  # of "cuda", the architectures it is for


# In order of preference.
_ALL = (
    Implementation("hopper", ("cuda",), paged_hopper.why_not, paged_hopper.attend, tuned.is_hopper),
    Implementation("triton", ("rocm", "cuda"), paged_triton.why_not, paged_triton.attend, tuned.up_to_hopper),
    Implementation("tpu", ("tpu",), paged_tpu.why_not, paged_tpu.attend),
    Implementation("xla", (), paged_xla.why_not, paged_xla.attend),
)
IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType({i.name: i for i in _ALL})


def attend(request: AttentionRequest, operands: AttentionOperands, implementation: str | None = None) -> Result:
    """Run the named implementation, or with none named the first on each platform that has no reasons against it.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation, or every one, lacks what the request asks for.
    """
    if implementation is not None and not (isinstance(implementation, str) and implementation in IMPLEMENTATIONS):
        known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"implementation: got {implementation!r}, expected None or one of {known}")
    with jax.enable_x64(
        False
    ):  # kernels and plans count in 32 bits, also where the caller's program has 64-bit types on
        return _attend(request, implementation, operands)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that equal calls outside of jit compile once
def _attend(request: AttentionRequest, implementation: str | None, operands: AttentionOperands) -> Result:
    if implementation is not None:
        chosen = IMPLEMENTATIONS[implementation]
        device = next((d for p in chosen.platforms if (d := _device(p))), None)
        if reasons := chosen.why_not(request, device):
            raise NotImplementedError(f"implementation {implementation!r} cannot run this call: {'; '.join(reasons)}")
        return chosen.attend(request, operands)
    default = first_without_reasons(request, "cpu")
    devices = {p: _device(p) for p in ("cuda", "rocm", "tpu")}
    reachable = {p: device for p, device in devices.items() if _may_lower(p, device)}
    platforms = {p: first_without_reasons(request, p, device) for p, device in reachable.items()}
    special = {p: i for p, i in platforms.items() if i.name != default.name}
    if not special:
        return default.attend(request, operands)
    branches = {p: (lambda ops, i=i: i.attend(request, ops)) for p, i in special.items()}
    return jax.lax.platform_dependent(operands, default=lambda ops: default.attend(request, ops), **branches)


def first_without_reasons(request: AttentionRequest, platform: str, device: str | None = None) -> Implementation:
    """The implementation that a call without a named one takes on a platform.

    Args:
      request: what is asked for.
      platform: a jax lowering platform.
      device: the GPU's architecture, as `tuned.gpu_arch` says it, or the TPU's, as `tpu_plan.present_chip` does; None is
        some unknown one. No device is asked here.

    Raises:
      NotImplementedError: none can run the request; the text lists each with its reasons.
    """
    refused = []
    for candidate in IMPLEMENTATIONS.values():
        if not _suits(candidate, platform, device):
            continue
        reasons = candidate.why_not(request, device)
        if not reasons:
            return candidate
        refused.append(f"{candidate.name}: {'; '.join(reasons)}")
    raise NotImplementedError(f"no implementation on {platform} can run this call. {' | '.join(refused)}")


def _suits(candidate: Implementation, platform: str, arch: str | None) -> bool:
    """Whether it may be the first choice on a platform, and there on the GPU that is present or lowered for."""
    if candidate.platforms and platform not in candidate.platforms:
        return False
    return platform != "cuda" or candidate.cuda(arch)


def _device(platform: str) -> str | None:
    """The device of a platform that this trace is for; None where there is none."""
    return tpu_plan.present_chip() if platform == "tpu" else tuned.gpu_arch()


def _may_lower(platform: str, device: str | None) -> bool:
    """Whether this trace can end on a platform: its kernels lower only where a device, real or abstract, is known."""
    return device is not None and device.startswith({"cuda": "sm", "rocm": "gfx"}.get(platform, ""))
