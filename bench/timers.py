"""How calls are timed: on the host, by CUPTI, by the replay of a CUDA graph; in bursts and on end."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def host_times(run: Callable[[], Any], repeats: int) -> list[float]:
    """Wall-clock milliseconds of a call that blocks until it is done."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def cupti_times(run: Callable[..., Any], repeats: int, *args: Any) -> list[float]:
    """Device milliseconds of a jitted or compiled JAX call: the sum over its kernels, read from CUPTI.

    A `functools.partial` of such a call is taken apart: wrapped as it is, the profiler would compile it anew each time.
    """
    from jax.experimental.mosaic.gpu import profiler

    if isinstance(run, functools.partial):
        run, args = run.func, run.args + args
    _, times = profiler.measure(run, iterations=repeats)(*args)
    return [float(t) for t in np.atleast_1d(np.asarray(times, float))]


def graph_times(run: Callable[[], Any], repeats: int) -> list[float]:
    """Device milliseconds of a torch call, captured once and replayed, by events around each replay."""
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


PAUSE_S = 0.3  # before a burst, so that every one starts from the same clock


def burst_times(timer: Callable[[Any, int], list[float]], run: Any, repeats: int) -> list[float]:
    """Milliseconds of a few calls after a pause, at the highest clock."""
    time.sleep(PAUSE_S)
    return timer(run, repeats)


def times_on_end(timer: Callable[[Any, int], list[float]], run: Any, burst_ms: float, for_ms: float) -> list[float]:
    """Milliseconds of the later half of the calls that fill a while: the chip may have slowed down by then."""
    count = min(max(int(for_ms / burst_ms), 20), 2000)
    return timer(run, count)[count // 2 :]


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    if len(times) < 4:
        return statistics.median(times), max(times) - min(times)
    low, mid, high = statistics.quantiles(times, n=4)
    return mid, high - low
