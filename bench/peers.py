"""Who is measured, and how each is called and timed. Each peer says why it cannot take a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from bench import peers_vllm
from bench.peer import CannotRun, Peer, Prepared, as_jax, as_torch, paged_tensors, window_sides
from bench.timers import cupti_times, graph_times, host_times
from bench.workloads import Batch

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


def _torch_sdpa(b: Batch) -> Prepared:
    import torch

    q, k, v = (as_torch(x).transpose(1, 2).contiguous() for x in _dense_or_refuse(b))
    causal = b.workload.causal and b.workload.requests[0][0] > 1

    def run() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    timer = graph_times if q.is_cuda else host_times
    return Prepared(run, lambda: as_jax(run().transpose(1, 2)).reshape(b.q.shape), timer)


def _fa3(b: Batch) -> Prepared:
    import flash_attn_interface

    w = b.workload
    q, k, v, table, lens, loc = paged_tensors(b)
    if k.dtype != q.dtype:
        q = q.to(k.dtype)

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
            window_size=window_sides(b),
            num_splits=0,
        )

    return Prepared(run, lambda: as_jax(run()), graph_times)


def _flashinfer(kind: str) -> Callable[[Batch], Prepared]:
    def prepare(b: Batch) -> Prepared:
        import flashinfer
        import torch

        w = b.workload
        if kind == "decode" and max(w.query_lens) > 1:
            raise CannotRun("decode only")
        if w.window[1] not in (None, 0):
            raise CannotRun("no right window")
        q, k, v = map(as_torch, (b.q, b.k_cache, b.v_cache))
        counts = [len(p) for p in b.pages]
        indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        ids = torch.tensor(np.concatenate(b.pages), dtype=torch.int32)
        last = torch.tensor([(n - 1) % b.page_size + 1 for n in w.seq_lens], dtype=torch.int32)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        common = {
            "sm_scale": w.head_dim**-0.5,
            "q_data_type": q.dtype,
            "kv_data_type": k.dtype,
            "window_left": window_sides(b)[0],
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

        return Prepared(run, lambda: as_jax(run()), graph_times)

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
        Peer("vllm-unified", ("gpu",), "vllm", peers_vllm.unified),
        Peer("vllm-prefix-prefill", ("gpu",), "vllm", peers_vllm.prefix_prefill),
        Peer("cudnn-dense", ("gpu",), None, _jax_nn("cudnn")),
        Peer("jax-paged", ("gpu",), None, _jax_paged),
        Peer("torch-sdpa-dense", ("cpu", "gpu"), "torch", _torch_sdpa),
        Peer("jax.nn-dense", ("cpu",), None, _jax_nn("xla")),
    )
}
