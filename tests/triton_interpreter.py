"""The portable GPU kernel on a CPU: its body as plain JAX operations, behind the public call."""

from __future__ import annotations

import functools

import jax
import pytest

from pallas_kernels import dispatch, paged_triton

ON_GPU = jax.default_backend() == "gpu"


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret `implementation="triton"` for one test, unless a GPU is present, which then compiles it."""
    if not ON_GPU:
        kernel = dispatch.IMPLEMENTATIONS["triton"]
        kernel = kernel._replace(attend=functools.partial(paged_triton.attend, interpret=True))
        monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", {**dispatch.IMPLEMENTATIONS, "triton": kernel})
