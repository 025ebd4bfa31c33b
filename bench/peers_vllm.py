"""vLLM's two portable Triton kernels as peers; they are measured where `vllm` can be imported."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.peer import CannotRun, Prepared, as_jax, as_torch, paged_tensors, window_sides
from bench.timers import graph_times
from bench.workloads import Batch

SEGMENTS = 16  # of the keys of a decode, as vLLM's backend has it
PACK = 8  # elements of 16 bits side by side in a page of `context_attention_fwd`


def _common(b: Batch) -> tuple[Any, ...]:
    if b.k_cache.dtype != b.q.dtype:
        raise CannotRun("measured on caches of q's dtype")
    return paged_tensors(b)


def unified(b: Batch) -> Prepared:
    """`unified_attention`, with split keys for decoding."""
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    w = b.workload
    q, k, v, table, lens, loc = _common(b)
    longest = max(w.query_lens)
    rows = len(w.requests) if longest == 1 else 1
    out = torch.empty_like(q)
    parts = torch.empty(rows, w.num_heads, SEGMENTS, w.head_dim, dtype=torch.float32, device=q.device)
    tops, sums = (torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))

    def run() -> Any:
        unified_attention(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=loc,
            max_seqlen_q=longest,
            seqused_k=lens,
            max_seqlen_k=max(w.seq_lens),
            softmax_scale=w.head_dim**-0.5,
            causal=w.causal,
            window_size=window_sides(b),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=128 // w.num_kv_heads,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=parts,
            softmax_segm_max=tops,
            softmax_segm_expsum=sums,
        )
        return out

    return Prepared(run, lambda: as_jax(run()), graph_times)


def prefix_prefill(b: Batch) -> Prepared:
    """`context_attention_fwd`: the context in pages of ROCM_ATTN's layout, the new tokens beside them."""
    import torch
    from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd

    w = b.workload
    if max(w.query_lens) == 1:
        raise CannotRun("not for decoding")
    if w.window != (None, None):
        raise CannotRun("measured without a window")
    q, k, v, table, lens, loc = _common(b)
    pages, size, heads, dim = k.shape
    k_pages = k.view(pages, size, heads, dim // PACK, PACK).permute(0, 2, 3, 1, 4).contiguous()
    v_pages = v.permute(0, 2, 3, 1).contiguous()
    slots = [
        b.pages[s][np.arange(end - n, end) // size] * size + np.arange(end - n, end) % size
        for s, (n, end) in enumerate(zip(w.query_lens, w.seq_lens, strict=True))
    ]
    new = as_torch(jnp.asarray(np.concatenate(slots), jnp.int32)).long()
    k_new, v_new = (x.reshape(-1, heads, dim)[new].contiguous() for x in (k, v))
    out, one = torch.empty_like(q), torch.ones(1, device=q.device)

    def run() -> Any:
        context_attention_fwd(
            q,
            k_new,
            v_new,
            out,
            "auto",
            k_pages,
            v_pages,
            table,
            loc,
            lens,
            max(w.seq_lens),
            max(w.query_lens),
            one,
            one,
            sm_scale=w.head_dim**-0.5,
            causal=w.causal,
        )
        return out

    return Prepared(run, lambda: as_jax(run()), graph_times)
