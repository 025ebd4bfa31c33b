"""What a peer is: something that can take a batch, or says why it cannot."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.workloads import Batch


class CannotRun(Exception):
    """The peer lacks what the batch needs."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A peer ready to run one batch."""

    run: Callable[[], Any]
    output: Callable[[], Any]  # [T, H, D] as something that jnp.asarray takes
    timer: Callable[[Callable[[], Any], int], list[float]]  # -> milliseconds of each repetition


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation under measurement."""

    name: str
    platforms: tuple[str, ...]
    needs: str | None  # module that must be importable
    prepare: Callable[[Batch], Prepared]

    @property
    def installed(self) -> bool:
        """Whether its module can be imported."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def as_torch(x: Any) -> Any:
    """A JAX array as torch sees it; on a GPU the same memory."""
    import torch

    if jax.default_backend() == "gpu":
        if x.dtype.itemsize == 1:  # dlpack has no 8-bit floats
            bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
            return torch.from_dlpack(bits).view(getattr(torch, x.dtype.name))
        return torch.from_dlpack(x)
    return torch.tensor(np.asarray(x.astype(jnp.float32))).to(getattr(torch, x.dtype.name))


def as_jax(x: Any) -> Any:
    """A torch tensor as a float32 JAX array."""
    return jnp.asarray(x.float().cpu().numpy())


def paged_tensors(b: Batch) -> tuple[Any, ...]:
    """(q, k, v, block table, lengths, query starts) of a batch for a peer in torch."""
    return tuple(map(as_torch, (b.q, b.k_cache, b.v_cache, b.block_table, b.seq_lens, b.query_start_loc)))


def window_sides(b: Batch) -> tuple[int, int]:
    """(left, right) as the peers in torch count them: -1 is no limit."""
    left, right = (-1 if side is None else side for side in b.workload.window)
    return left, right
