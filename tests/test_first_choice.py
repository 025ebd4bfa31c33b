"""Which implementation a call takes on which device, by lowering it for devices that the host lacks."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jattn
from pallas_kernels import tuned
from tests import batches


def lowered(kind, platform):
    """StableHLO of a call without a named implementation, for a device that this host lacks."""
    batch, static = batches.split(
        batches.draw(np.random.default_rng(0), (3, 1), (6, 20), head_dim=64, dtype="bfloat16")
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))):
        traced = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static)).trace(batch)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("kind", "platform", "kernels"),
    [("gfx942", "rocm", 2), ("gfx950", "rocm", 2), ("NVIDIA A100-SXM4-80GB", "cuda", 2), ("NVIDIA H200", "cuda", 0)],
)
def test_first_choice_on_amd_and_before_hopper(kind, platform, kernels):
    assert lowered(kind, platform).count("__gpu$xla.gpu.triton") == kernels


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks about a host without a GPU")
def test_without_a_gpu_nothing_is_traced_for_one():
    assert tuned.gpu_arch() is None
    batch = batches.draw(np.random.default_rng(0), (3, 1), (6, 20))
    assert "pallas_call" not in str(jax.make_jaxpr(lambda: jattn.paged_attention(**batch))())
