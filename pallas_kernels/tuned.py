"""Tile sizes by device: measured ones from `tuned/<arch>.json`, the nearest of them, or a kernel's own heuristic."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jax

from pallas_kernels.request import AttentionRequest

_log = logging.getLogger(__name__)

FIRST_SM = 80  # XLA: "Triton support is only enabled for Ampere GPUs (compute capability 8.0) and up"

# Parts of device names, first match wins; a device that is present says its architecture itself.
_ARCH_OF_NAME = {
    "MI300": "gfx942",
    "MI325": "gfx942",
    "MI350": "gfx950",
    "MI355": "gfx950",
    "B100": "sm100",
    "B200": "sm100",
    "H100": "sm90",
    "H200": "sm90",
    "GH200": "sm90",
    "A100": "sm80",
    "A800": "sm80",
    "L4": "sm89",  # L4, L40, L40S
    "RTX 40": "sm89",
    "6000 Ada": "sm89",
    "A10": "sm86",
    "A40": "sm86",
    "A6000": "sm86",
    "RTX 30": "sm86",
}
CORES = {"gfx942": 304, "gfx950": 256, "sm80": 108, "sm86": 84, "sm89": 142, "sm90": 132, "sm100": 148}


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of a kernel's inner step."""

    rows: int  # query rows: tokens x heads of one KV head
    keys: int
    num_warps: int = 0  # 0 where the hardware has no such thing
    num_stages: int = 0


def gpu_arch() -> str | None:
    """The GPU that this trace is for, e.g. "gfx942" or "sm80"; None on a host without one.

    An abstract device of the present mesh comes first, so that a host can lower for a device that it lacks.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and (arch := _arch(abstract.device_kind)):
        return arch
    for platform in ("cuda", "rocm"):
        try:
            device = jax.devices(platform)[0]
        except RuntimeError:
            continue
        capability = str(getattr(device, "compute_capability", ""))
        return _arch(capability) or f"sm{capability.replace('.', '')}"
    return None


def _arch(name: str) -> str | None:
    if name.startswith("gfx"):
        return name.split(":")[0]
    return next((arch for part, arch in _ARCH_OF_NAME.items() if part in name), None)


def is_hopper(arch: str | None) -> bool:
    """Whether it has Hopper's warp-group matrix instructions, which neither older nor newer chips have."""
    return arch == "sm90"


def before_hopper(arch: str | None) -> bool:
    """Whether it is an NVIDIA architecture without warp-group matrix instructions."""
    return up_to_hopper(arch) and not is_hopper(arch)


def up_to_hopper(arch: str | None) -> bool:
    """Whether Triton's code can be trusted on an NVIDIA architecture: XLA takes none before, B200 has known miscompiles."""
    return arch is not None and arch.startswith("sm") and FIRST_SM <= int(arch[2:]) <= 90


def lookup(arch: str | None, kernel: str, work: str, request: AttentionRequest, **fixed: Any) -> dict[str, Any] | None:
    """The fields of the measured tile of the exact shape, else of the nearest one; None if there is none, with one message.

    Args:
      arch: as `gpu_arch` says it.
      kernel: "hopper", "triton".
      work: kind of work in the kernel's own words.
      request: its dtypes and padded head size must match; its heads and page size may be near.
      fixed: fields that the tile must have, e.g. `rows=64`.
    """
    fields = nearest(_table(arch or "none"), kernel, work, request, **fixed)
    if fields is None:
        say_once(f"no tuned {kernel} tile for {work} on {arch}: using its heuristic")
    return fields


def nearest(
    entries: Sequence[dict[str, Any]], kernel: str, work: str, request: AttentionRequest, **fixed: Any
) -> dict[str, Any] | None:
    """`lookup` in some other table."""
    near = [
        (_distance(entry, request), index, entry["tile"])
        for index, entry in enumerate(entries)
        if (entry["kernel"], entry["work"]) == (kernel, work)
        and (entry["q"], entry["kv"]) == (request.q_dtype.name, request.kv_dtype.name)
        and _power(entry["head_dim"]) == _power(request.head_dim)
        and fixed.items() <= entry["tile"].items()
    ]
    return min(near)[2] if near else None


def shape_key(request: AttentionRequest) -> dict[str, Any]:
    """What an entry says of the shape that it was measured on."""
    r = request
    key = {"q": r.q_dtype.name, "kv": r.kv_dtype.name, "heads": r.num_heads, "kv_heads": r.num_kv_heads}
    return key | {"head_dim": r.head_dim, "page_size": r.page_size}


def _distance(entry: dict[str, Any], r: AttentionRequest) -> tuple[int, int, int]:
    group = entry["heads"] // entry["kv_heads"]
    return abs(entry["head_dim"] - r.head_dim), abs(group - r.group_size), abs(entry["page_size"] - r.page_size)


def _power(x: int) -> int:
    return 1 << (x - 1).bit_length()


@functools.cache
def _table(arch: str) -> tuple[dict[str, Any], ...]:
    path = resources.files("pallas_kernels") / "tuned" / f"{arch}.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else ()


@functools.cache
def say_once(text: str) -> None:
    """Log a message the first time it comes."""
    _log.info(text)
