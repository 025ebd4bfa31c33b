"""The Hopper kernel's steps in a form that the GPU interpreter runs: plain products, one view of the query buffer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper_steps import ROWS, Steps


class InterpreterSteps(Steps):
    """See `pallas_kernels.hopper_steps`."""

    def q_scratch(self, t: Any, cols: int, dtype: Any) -> Any:
        return plgpu.SMEM((t.q_slots, t.wgs, cols, t.alloc_rows // t.group, t.group, t.col), dtype)

    def q_tma(self, q: Any, slot: Any, wg: Any, c: int, t: Any, offset: Any = 0, count: int | None = None) -> Any:
        return q.at[slot, wg, c, pl.ds(offset, t.wg_tokens if count is None else count)]

    def o_put(self, q: Any, slot: Any, wg: Any, c: int, value: Any, t: Any) -> None:
        value = jnp.pad(value, ((0, t.alloc_rows - ROWS), (0, 0)))
        q[slot, wg, c] = value.reshape(t.alloc_rows // t.group, t.group, t.col)

    def q_operand(self, q: Any, slot: Any, wg: Any, k: Any) -> Any:
        return [q[slot, wg, c].reshape(k.tiling.alloc_rows, k.tiling.col)[:ROWS] for c in range(k.cols)]

    def qk(self, q: Any, keys: Any, ring: Any, between: Any, k: Any) -> Any:
        t = k.tiling
        scores = jnp.zeros((ROWS, t.block_kv), jnp.float32)
        for c in range(k.cols):
            right = keys[ring, :, pl.ds(c * t.col, t.col)]
            scores += jnp.dot(q[c].astype(jnp.float32), right.astype(jnp.float32).T)
        between()
        return scores

    def pv(self, acc: Any, p: Any, values: Any, ring: Any, k: Any) -> Any:
        return acc + jnp.dot(p.astype(jnp.float32), values[ring].astype(jnp.float32))
