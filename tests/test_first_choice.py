"""Which implementation a call takes on which device, by lowering it for devices that the host lacks."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jattn
from pallas_kernels import tpu_plan, tuned
from tests import batches


def lowered(kind, platform, page_size=16):
    """StableHLO of a call without a named implementation, for a device that this host lacks."""
    batch, static = batches.split(
        batches.draw(np.random.default_rng(0), (3, 1), (6, 20), head_dim=128, page_size=page_size, dtype="bfloat16")
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))):
        traced = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static)).trace(batch)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("kind", "platform", "page_size", "kernel"),
    [
        ("gfx942", "rocm", 16, "triton"),
        ("gfx950", "rocm", 16, "triton"),
        ("NVIDIA A100-SXM4-80GB", "cuda", 16, "triton"),
        ("NVIDIA H200", "cuda", 16, "mosaic_gpu"),
        ("NVIDIA H200", "cuda", 4, "triton"),  # pages too small for the Hopper kernel's copies
        ("NVIDIA B200", "cuda", 16, None),
        ("TPU v5 lite", "tpu", 16, "tpu_custom_call"),
        ("TPU v6 lite", "tpu", 4, "tpu_custom_call"),
        ("TPU7x", "tpu", 16, "tpu_custom_call"),
        ("cpu", "cpu", 16, None),
    ],
)
def test_the_first_choice_on_each_device(kind, platform, page_size, kernel):
    text = lowered(kind, platform, page_size)
    assert {name for name in ("triton", "mosaic_gpu", "tpu_custom_call") if name in text} == (
        {kernel} if kernel else set()
    )


def test_without_a_gpu_or_a_tpu_nothing_is_traced_for_one(monkeypatch):
    def none(platform=None):
        raise RuntimeError(f"no {platform} here")

    monkeypatch.setattr(tuned.jax, "devices", none)
    assert tuned.gpu_arch() is None
    assert tpu_plan.present_chip() is None
    batch = batches.draw(np.random.default_rng(0), (3, 1), (6, 20))
    assert "pallas_call" not in str(jax.make_jaxpr(lambda: jattn.paged_attention(**batch))())
