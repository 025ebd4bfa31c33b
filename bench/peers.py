"""Who is measured, and how each is called and timed. Each peer says why it cannot take a batch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
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


# --- timers ---


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


# --- jattn ---


def jattn_peer(implementation: str | None = None) -> Peer:
    """The project's own call, plan and merge included."""

    def prepare(b: Batch) -> Prepared:
        w = b.workload
        call = jax.jit(
            lambda *args: jattn.paged_attention(
                *args,
                causal=w.causal,
                window=w.window,
                max_query_len=max(w.query_lens),
                implementation=implementation,
            )
        )
        args = (b.q, b.k_cache, b.v_cache, b.block_table, b.seq_lens, b.query_start_loc)
        on_gpu = jax.default_backend() == "gpu"
        run = functools.partial(call, *args) if on_gpu else (lambda: call(*args).block_until_ready())
        return Prepared(run, lambda: call(*args), cupti_times if on_gpu else host_times)

    name = "jattn" if implementation is None else f"jattn-{implementation}"
    return Peer(name, ("gpu",) if implementation == "triton" else ("cpu", "gpu"), None, prepare)


# --- peers in JAX ---


def _dense_or_refuse(b: Batch) -> tuple[Any, Any, Any]:
    dense = b.dense()
    if dense is None:
        raise CannotRun("dense: needs requests of one length")
    if b.workload.window != (None, None):
        raise CannotRun("dense: measured without a window only")
    query_len, context = b.workload.requests[0]
    if b.workload.causal and query_len > 1 and context > 0:
        raise CannotRun("dense: its causal mask aligns queries with the first keys")
    if b.k_cache.dtype != b.q.dtype:
        raise CannotRun("dense: needs K and V in q's dtype")
    return dense


def _jax_nn(implementation: str | None) -> Callable[[Batch], Prepared]:
    def prepare(b: Batch) -> Prepared:
        q, k, v = _dense_or_refuse(b)
        causal = b.workload.causal and b.workload.requests[0][0] > 1
        call = jax.jit(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
        )
        on_gpu = jax.default_backend() == "gpu"
        run = functools.partial(call, q, k, v) if on_gpu else (lambda: call(q, k, v).block_until_ready())
        return Prepared(run, lambda: call(q, k, v).reshape(b.q.shape), cupti_times if on_gpu else host_times)

    return prepare


def _jax_paged(b: Batch) -> Prepared:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        w = b.workload
        if max(w.query_lens) > 1:
            raise CannotRun("decode only")
        if w.window != (None, None):
            raise CannotRun("no window")
        k, v = (x.transpose(2, 0, 1, 3) for x in (b.k_cache, b.v_cache))
        q = b.q * jnp.asarray(w.head_dim**-0.5, b.q.dtype)
        call = jax.jit(lambda q, k, v, t, n: paged_attention(q, k, v, t, n, k_splits=16))
        args = (q, k, v, b.block_table, b.seq_lens)
        call(*args)
    return Prepared(functools.partial(call, *args), lambda: call(*args), cupti_times)


# --- peers in torch ---


def _torch(x: Any) -> Any:
    import torch

    if jax.default_backend() == "gpu":
        if x.dtype.itemsize == 1:  # dlpack has no 8-bit floats
            bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
            return torch.from_dlpack(bits).view(getattr(torch, x.dtype.name))
        return torch.from_dlpack(x)
    return torch.tensor(np.asarray(x.astype(jnp.float32))).to(getattr(torch, x.dtype.name))


def _to_jax(x: Any) -> Any:
    return jnp.asarray(x.float().cpu().numpy())


def _torch_sdpa(b: Batch) -> Prepared:
    import torch

    q, k, v = (_torch(x).transpose(1, 2).contiguous() for x in _dense_or_refuse(b))
    causal = b.workload.causal and b.workload.requests[0][0] > 1

    def run() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    timer = graph_times if q.is_cuda else host_times
    return Prepared(run, lambda: _to_jax(run().transpose(1, 2)).reshape(b.q.shape), timer)


def _fa3(b: Batch) -> Prepared:
    import flash_attn_interface

    w = b.workload
    q, k, v, table, lens, loc = map(_torch, (b.q, b.k_cache, b.v_cache, b.block_table, b.seq_lens, b.query_start_loc))
    if k.dtype != q.dtype:
        q = q.to(k.dtype)
    left, right = (-1 if side is None else side for side in w.window)

    def run() -> Any:
        return flash_attn_interface.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lens,
            page_table=table,
            cu_seqlens_q=loc,
            max_seqlen_q=max(w.query_lens),
            softmax_scale=w.head_dim**-0.5,
            causal=w.causal,
            window_size=(left, right),
            num_splits=0,
        )

    return Prepared(run, lambda: _to_jax(run()), graph_times)


def _flashinfer(kind: str) -> Callable[[Batch], Prepared]:
    def prepare(b: Batch) -> Prepared:
        import flashinfer
        import torch

        w = b.workload
        if kind == "decode" and max(w.query_lens) > 1:
            raise CannotRun("decode only")
        if w.window[1] not in (None, 0):
            raise CannotRun("no right window")
        q, k, v = map(_torch, (b.q, b.k_cache, b.v_cache))
        counts = [len(p) for p in b.pages]
        indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        ids = torch.tensor(np.concatenate(b.pages), dtype=torch.int32)
        last = torch.tensor([(n - 1) % b.page_size + 1 for n in w.seq_lens], dtype=torch.int32)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        common = {
            "sm_scale": w.head_dim**-0.5,
            "q_data_type": q.dtype,
            "kv_data_type": k.dtype,
            "window_left": -1 if w.window[0] is None else w.window[0],
        }
        shape = (w.num_heads, w.num_kv_heads, w.head_dim, b.page_size)
        pages = (indptr.cuda(), ids.cuda(), last.cuda())
        if kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *shape, **common)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kind)
            loc = torch.tensor(np.cumsum([0, *w.query_lens]), dtype=torch.int32)
            wrapper.plan(loc, *pages, *shape, causal=w.causal, **common)

        def run() -> Any:
            return wrapper.run(q, (k, v))

        return Prepared(run, lambda: _to_jax(run()), graph_times)

    return prepare


PEERS: dict[str, Peer] = {
    p.name: p
    for p in (
        jattn_peer(),
        jattn_peer("xla"),
        jattn_peer("triton"),
        Peer("fa3", ("gpu",), "flash_attn_interface", _fa3),
        Peer("flashinfer-fa2", ("gpu",), "flashinfer", _flashinfer("fa2")),
        Peer("flashinfer-fa3", ("gpu",), "flashinfer", _flashinfer("fa3")),
        Peer("flashinfer-decode", ("gpu",), "flashinfer", _flashinfer("decode")),
        Peer("cudnn-dense", ("gpu",), None, _jax_nn("cudnn")),
        Peer("jax-paged", ("gpu",), None, _jax_paged),
        Peer("torch-sdpa-dense", ("cpu", "gpu"), "torch", _torch_sdpa),
        Peer("jax.nn-dense", ("cpu",), None, _jax_nn("xla")),
    )
}


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    if len(times) < 4:
        return statistics.median(times), max(times) - min(times)
    low, mid, high = statistics.quantiles(times, n=4)
    return mid, high - low
