"""Paged attention on TPUs with Pallas Mosaic TPU: prefill, chunk, verify, draft and decode in one kernel.

This module says what the kernel can run, and imports the kernel itself only when it is called.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import tpu_plan
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.tpu_plan import CHIPS, Tiling

DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")


def why_not(request: AttentionRequest, device: str | None = None) -> tuple[str, ...]:
    """What this kernel lacks for the request, on a chip of `tpu_plan.CHIPS`; None: on each that it is compiled for."""
    r, reasons = request, []
    if r.q_dtype.name not in DTYPES:
        reasons.append(f"q_dtype={r.q_dtype.name}: TPU vector units know {' and '.join(DTYPES)} alone")
    if r.kv_dtype.name not in KV_DTYPES:
        reasons.append(f"kv_dtype={r.kv_dtype.name}: the TPU compiler converts from {', '.join(KV_DTYPES)} alone")
    if "token" in (r.k_scale, r.v_scale):
        reasons.append("k_scale, v_scale: no scales for each token and head, only traced scalars or one a KV head")
    if not reasons:
        chip = device or "7x"  # of v5e, v6e and 7x the one with the least VMEM
        tiling = tpu_plan.choose_tiling(r, chip)
        facts = CHIPS[chip]
        need = tpu_plan.vmem_bytes(tpu_plan.as_stored(r), tiling)
        if need > facts.budget:
            reasons.append(f"the smallest tile takes {need} bytes of VMEM, of which {chip} gives {facts.budget}")
        need = tpu_plan.smem_bytes(r, tiling)
        if need > facts.smem * 7 // 8:
            reasons.append(f"the plan and two rows of the page table take {need} bytes of SMEM, which has {facts.smem}")
    return tuple(reasons)


def attend(
    request: AttentionRequest,
    operands: AttentionOperands,
    *,
    interpret: Any = False,
    tiling: Tiling | None = None,
) -> tuple[Array, Array | None]:
    """Attention of every query over the pages of its sequence; see `jattn.paged_attention` for the meaning.

    Args:
      request: static options.
      operands: arrays.
      interpret: `pltpu.InterpretParams` simulates a TPU on any platform: for tests.
      tiling: sizes of the tiles; None chooses them.

    Raises:
      NotImplementedError: there is no TPU, neither present nor in the abstract mesh, and nothing simulates one.
    """
    chip = tpu_plan.present_chip()
    if chip is None and not interpret:
        raise NotImplementedError(
            "implementation: got 'tpu' on a host without a TPU (v4 or newer), expected one, or an abstract mesh of TPUs "
            "(jax.sharding.use_abstract_mesh) to compile for"
        )
    r = tpu_plan.as_stored(request)
    if r.num_tokens == 0 or r.num_seqs == 0:
        lse = jnp.full((r.num_tokens, r.num_heads), -jnp.inf, jnp.float32)
        return jnp.zeros_like(operands.q), lse if r.return_lse else None
    if r.layout != request.layout:
        k_cache, v_cache = (x.swapaxes(1, 2) for x in (operands.k_cache, operands.v_cache))
        operands = dataclasses.replace(operands, k_cache=k_cache, v_cache=v_cache)
    from pallas_kernels import tpu_call  # Mosaic TPU takes a third of a second to import

    return tpu_call.attend(r, operands, tiling or tpu_plan.choose_tiling(r, chip), interpret)
