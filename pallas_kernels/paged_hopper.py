"""Paged attention on Hopper (sm90) with Pallas Mosaic GPU: prefill, chunk, verify, draft and decode in one kernel.

This module says what the kernel can run, and imports the kernel itself only when it is called.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from pallas_kernels import hopper_plan as plan
from pallas_kernels.request import AttentionOperands, AttentionRequest

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
HEAD_DIMS = (64, 96, 128, 192, 256)


def why_not(request: AttentionRequest, device: str | None = None) -> tuple[str, ...]:
    """What the kernel lacks for a request."""
    del device  # the same on each
    r = request
    reasons = []
    if r.q_dtype.name not in ("bfloat16", "float16"):
        reasons.append(f"q_dtype={r.q_dtype.name}: only bfloat16 and float16 queries")
    if r.kv_dtype != r.q_dtype and r.kv_dtype.name not in EIGHT_BITS:
        reasons.append(f"kv_dtype={r.kv_dtype.name}: only {', '.join(EIGHT_BITS)} or the dtype of q, {r.q_dtype.name}")
    if "token" in (r.k_scale, r.v_scale):
        reasons.append("k_scale, v_scale: no scales for each token and head")
    if r.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim={r.head_dim}: only {', '.join(map(str, HEAD_DIMS))}")
    if r.page_size % 8:
        reasons.append(f"page_size={r.page_size}: only multiples of 8, the rows of a swizzled tile")
    if r.group_size > plan.ROWS:
        reasons.append(f"{r.group_size} query heads a KV head: at most {plan.ROWS}")
    room = plan.SMEM_BYTES - plan.SMALL_BYTES - plan.kv_bytes(r)
    if r.group_size <= plan.ROWS and plan.query_bytes(r.group_size, 1, r.head_dim) > room:
        reasons.append(
            f"{r.group_size} query heads a KV head of {r.head_dim}: their tile does not fit in shared memory"
        )
    if r.num_ranges:
        reasons.append("bidirectional_ranges are not supported")
    if r.tree_size:
        reasons.append("tree_mask is not supported")
    if r.num_tokens == 0 or r.num_seqs == 0:
        reasons.append(f"nothing to do: {r.num_tokens} query tokens of {r.num_seqs} sequences")
    return tuple(reasons)


def attend(request: AttentionRequest, operands: AttentionOperands, **options: Any) -> tuple[Array, Array | None]:
    """Attention by the Hopper kernel; `why_not(request)` must be empty. For `options` see `hopper_call.attend`."""
    from pallas_kernels import hopper_call  # Mosaic GPU takes most of a second to import

    if reasons := why_not(request):
        raise NotImplementedError("; ".join(reasons))
    return hopper_call.attend(request, operands, **options)
