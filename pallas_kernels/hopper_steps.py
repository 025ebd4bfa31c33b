"""The steps of the Hopper kernel that the GPU interpreter cannot run, in a form for the device and one for tests.

On the device the accumulators stay in registers (`run_state`), P is wgmma's A operand from registers, and the query
buffer is seen in two ways: in 8-row tiles by wgmma, untiled by the copies, because a tiled copy that starts at a row
which is no multiple of 8 moves wrong rows. The interpreter has none of the three; there the two products are plain ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64


def _page(request: Any, ref: Any, page: Array, offset: Array, chunk: int, head: Array) -> Any:
    rows = pl.ds(offset, chunk)
    return ref.at[page, rows, head] if request.layout == "NHD" else ref.at[page, head, rows]


class Steps:
    """The device's form."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def q_scratch(self, t: Any, cols: int, dtype: Any) -> Any:
        """Query (and output) tiles: slot, warpgroup, column block."""
        tiled = (plgpu.TilingTransform((8, t.col)), plgpu.SwizzleTransform(2 * t.col))
        lead = (t.q_slots, t.wgs, cols)
        return plgpu.RefUnion(
            plgpu.SMEM((*lead, t.alloc_rows, t.col), dtype, transforms=tiled),
            plgpu.SMEM((*lead, t.alloc_rows // t.group, t.group, t.col), dtype, transforms=tiled[1:]),
        )

    def q_tma(self, q: Any, slot: Array, wg: Any, c: int, t: Any, offset: Any = 0, count: int | None = None) -> Any:
        """The untiled view, [tokens, group, col]."""
        return q[1].at[slot, wg, c, pl.ds(offset, t.wg_tokens if count is None else count)]

    def o_put(self, q: Any, slot: Array, wg: Any, c: int, value: Array, t: Any) -> None:
        """Stage a column block of the output."""
        q[0].at[slot, wg, c, pl.ds(0, ROWS)][...] = value

    def q_operand(self, q: Any, slot: Array, wg: Any, k: Any) -> Any:
        """What `qk` takes as queries."""
        blocks = [q[0].at[slot, wg, c, pl.ds(0, ROWS)] for c in range(k.cols)]
        if k.tiling.q_in_registers:
            return [plgpu.load(block, layout=plgpu.Layout.WGMMA) for block in blocks]
        return blocks

    def qk(self, q: Any, keys: Any, ring: Array, between: Any, k: Any) -> Array:
        """Scores [64, block_kv]; `between` runs beside the tensor cores."""
        t = k.tiling

        def run(acc: Any) -> Array:
            for c in range(k.cols):
                right = keys.at[ring, :, pl.ds(c * t.col, t.col)].transpose((1, 0))
                plgpu.wgmma(acc, q[c], right)
            between()
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, t.block_kv), jnp.float32))

    def pv(self, acc: Array, p: Array, values: Any, ring: Array, k: Any) -> Array:
        """Acc + p @ values."""
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values.at[ring]))(plgpu.ACC.init(acc))

    def take_ticket(self, refs: Any, scratch: Any, count: Array, t: Any) -> Array:
        """The program's next place in the queue; here fixed, round after round."""
        return (count + 1) * t.programs + lax.axis_index("program")

    def full_barriers(self, k: Any) -> Any:
        """Barriers of the stages of K or V: a tile has landed."""
        return plgpu.Barrier(num_arrivals=k.copies, num_barriers=k.tiling.stages)

    def init_full(self, full: Any) -> None:
        """Set them up, where Pallas has not done so."""

    def wait_full(self, full: Any, stage: Array, phase: Array) -> None:
        """Wait for a tile."""
        plgpu.barrier_wait(full.at[stage])

    def find_pages(self, refs: Any, fields: Any, s: Array, tile: Array, k: Any) -> tuple[Array, ...]:
        """The pages of a KV tile."""
        return tuple(k.page_of(refs, fields, s, i, tile) for i in range(k.copies))

    def load_pages(
        self, refs: Any, scratch: Any, name: str, stage: Array, pages: Any, fields: Any, tile: Array, k: Any
    ) -> None:
        """Copy one page after another into the K or V tile `name`."""
        chunk = k.tiling.chunk
        used = k.copies_in_use(fields, tile)
        full = scratch[f"{name}_full"].at[stage]

        def copy(i: int, pool: Any, page: Array) -> None:
            src = _page(k.request, pool, page, k.offset_of(i, tile), chunk, k.head_of(fields))
            plgpu.copy_gmem_to_smem(src, scratch[name].at[stage, pl.ds(i * chunk, chunk)], full)

        for i, page in enumerate(pages):
            for pool, number, here in k.sources(refs, name, page):
                pl.when((i < used) & here)(functools.partial(copy, i, pool, number))
            pl.when(i >= used)(lambda: plgpu.barrier_arrive(full))

    def zero_rows(self, scratch: Any, ring: Array, lo: Array, hi: Array, k: Any) -> None:
        """Zero the rows of a V tile outside [lo, hi)."""
        t = k.tiling
        values = scratch["v"]
        for r in range(0, t.block_kv, ROWS):
            for c in range(k.cols):
                at = values.at[ring, pl.ds(r, ROWS), pl.ds(c * t.col, t.col)]
                x = plgpu.load(at, layout=plgpu.Layout.WGMMA, optimized=False)
                row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA) + r
                at[...] = jnp.where((row >= lo) & (row < hi), x, jnp.zeros_like(x))
