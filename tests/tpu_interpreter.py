"""The TPU kernel on a CPU: the simulated chip that every test uses, and what is recorded of its races and copies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, paged_tpu
from pallas_kernels.request import make_request

# A copy runs on a clock of its own, drawn from those that the cores leave: with the default number all copies share one,
# which orders them, and a copy into a buffer that is still being read goes unnoticed.
SIMULATED = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", vector_clock_size=64
)
# The simulated chip waits for callbacks most of the time: optimised code would only take longer to make.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def simulate(monkeypatch) -> list[Any]:
    """Let `implementation="tpu"` run on the simulated chip; the list fills with the race detector of each launch."""
    kernel = dispatch.IMPLEMENTATIONS["tpu"]
    kernel = kernel._replace(attend=functools.partial(paged_tpu.attend, interpret=SIMULATED))
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", {**dispatch.IMPLEMENTATIONS, "tpu": kernel})
    detectors, detector = [], interpreter.RaceDetectionState

    def recorded(*args: Any, **options: Any) -> Any:
        detectors.append(detector(*args, **options))
        return detectors[-1]

    monkeypatch.setattr(interpreter, "RaceDetectionState", recorded)
    return detectors


def record_copies(monkeypatch) -> list[tuple[tuple[int, ...], int]]:
    """The list fills with shape and bytes of every copy that the simulated chip makes."""
    copies: list[tuple[tuple[int, ...], int]] = []
    execute_read = interpreter.DMA.execute_read

    def recorded(dma: Any) -> None:
        fresh = dma.data is None
        execute_read(dma)
        if fresh and dma.data is not None:
            copies.append((dma.data.shape, dma.data.nbytes))

    monkeypatch.setattr(interpreter.DMA, "execute_read", recorded)
    return copies


def attend(arrays: dict, static: dict, **options: Any) -> Any:
    """The kernel on the simulated chip; `options` go to `paged_tpu.attend`."""
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    return quick_jit(lambda a: paged_tpu.attend(*make_request(**a, **static), interpret=SIMULATED, **options))(arrays)
