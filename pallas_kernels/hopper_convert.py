"""The converting warpgroup of an 8-bit cache: K and V tiles from fp8 to float16 on their way to the tensor cores.

wgmma takes both operands in one width, so fp8 keys beside 16-bit queries must be widened in shared memory. float16 holds
every e4m3 and e5m2 value exactly and has a conversion instruction, bfloat16 has none on this chip: queries and P are
float16 as well. One warpgroup does only this, or one does K and another V, so that the computing ones meet wide tiles
as if they had been loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper_pieces import CLEAN_HI, CLEAN_LO, LAST, T0, T1, Described, Kernel, next_of, stage_of, wide_of

ROWS = 64
LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def wide_stages(head_dim: int) -> dict[str, int]:
    """Stages of the wide tiles: K is needed early in a tile, V late; the largest heads leave no room for a second K."""
    return {"k": 2 if head_dim <= 192 else 1, "v": 1}


def wide_scratch(k: Any) -> dict[str, Any]:
    """Buffers and barriers of the wide tiles."""
    t, request = k.tiling, k.request
    tiled = (plgpu.TilingTransform((8, t.col)), plgpu.SwizzleTransform(2 * t.col))
    out: dict[str, Any] = {}
    for name, stages in wide_stages(request.head_dim).items():
        shape = (stages, t.block_kv, request.head_dim)
        out[f"{name}16"] = plgpu.SMEM(shape, k.compute_dtype, transforms=tiled)
        out[f"{name}16_full"] = plgpu.Barrier(num_arrivals=1, num_barriers=stages)
        out[f"{name}16_free"] = plgpu.Barrier(num_arrivals=t.wgs, num_barriers=stages)
    return out


def convert_tile(k: Any, scratch: dict[str, Any], name: str, ring: Array, span: tuple[Array, Array]) -> None:
    """Widen one tile; V rows outside `span` become zero, for 0 x NaN of a stale slot would be NaN."""
    t, request = k.tiling, k.request
    stage, wide = stage_of(ring, t), wide_of(ring, t, wide_stages(request.head_dim)[name])
    k.steps.wait_full(scratch[f"{name}_full"], stage, ring >= t.stages)
    plgpu.barrier_wait(scratch[f"{name}16_free"].at[wide])
    widen = functools.partial(_widen, k, scratch[name].at[stage], scratch[f"{name}16"].at[wide])
    if name == "k":
        widen(None)
    else:  # selecting takes longer than widening, and few tiles have an edge
        edge = (span[0] > 0) | (span[1] < t.block_kv)
        pl.when(edge)(lambda: widen(span))
        pl.when(jnp.logical_not(edge))(lambda: widen(None))
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch[f"{name}16_full"].at[wide])
    plgpu.barrier_arrive(scratch[f"{name}_free"].at[stage])


def _widen(k: Any, narrow: Any, wide: Any, span: tuple[Array, Array] | None) -> None:
    dim = k.request.head_dim
    step = min(dim, k.kv_col)
    for r in range(0, k.tiling.block_kv, ROWS):
        for c in range(0, dim, step):
            x = plgpu.load(narrow.at[pl.ds(r, ROWS), pl.ds(c, step)], layout=LAYOUT, optimized=False)
            x = x.astype(k.compute_dtype)
            if span is not None:
                row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT) + r
                x = jnp.where((row >= span[0]) & (row < span[1]), x, jnp.zeros_like(x))
            for d in range(0, step, k.tiling.col):
                part = lax.slice(x, (0, d), (ROWS, d + k.tiling.col))
                wide.at[pl.ds(r, ROWS), pl.ds(c + d, k.tiling.col)][...] = part


def convert_pieces(k: Kernel, scratch: dict[str, Any], names: tuple[str, ...]) -> None:
    """A converting warpgroup's walk through the pieces, for the tiles of `names` ("k", "v" or both)."""
    t = k.tiling
    for name in names:
        for i in range(t.stages):
            plgpu.barrier_arrive(scratch[f"{name}_free"].at[i])
    for i in range(t.q_slots):
        plgpu.barrier_arrive(scratch["q_free"].at[i])

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, ring, _ = carry
        slot = count & (t.q_slots - 1)
        plgpu.barrier_wait(scratch["q_full"].at[slot])
        fields = Described(scratch["desc"], slot)
        lo, hi = fields[CLEAN_LO], fields[CLEAN_HI]

        def step(tile: Array, ring: Array) -> Array:
            span = lo - tile * t.block_kv, hi - tile * t.block_kv
            for name in names:
                convert_tile(k, scratch, name, ring, span)
            return next_of(ring, t)

        ring = lax.fori_loop(fields[T0], fields[T1], step, ring)
        more = fields[LAST] == 0
        plgpu.barrier_arrive(scratch["q_free"].at[slot])
        return count + 1, ring, more

    lax.while_loop(lambda carry: carry[2], body, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))
    for name in names:
        for i in range(scratch[f"{name}16"].shape[0]):
            plgpu.barrier_wait(scratch[f"{name}16_free"].at[i])
