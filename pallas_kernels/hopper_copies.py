"""Page copies that share one arrival: the device's way to load a KV tile of many small pages.

`plgpu.copy_gmem_to_smem` makes every thread of the warpgroup arrive at the barrier for every copy, 1,024 arrivals for a
tile of eight pages, and issues all copies from one thread. Here one thread announces the whole tile and the four warps
issue the copies side by side. Pallas hands no barriers to inlined code, so these are set up and awaited here as well.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from pallas_kernels.hopper_steps import Steps

utils = mgpu.utils
SCALAR = plgpu.Layout.WG_SPLAT(())
SHARED = 3  # the address space of shared memory


def _value(x: Any) -> Any:
    return x.registers.item()


def _barrier(ref: Any, stage: Any) -> Any:
    """The 8-byte barrier `stage` in an int32 array of shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    return utils.BarrierRef(utils.memref_ptr(ref), utils.c(0, i32), None, 64)[stage]


def _index(x: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), _value(x))


class FewArrivals(Steps):
    """See the module."""

    def take_ticket(self, refs: Any, scratch: Any, count: Array, t: Any) -> Array:
        """The next place that no program has taken: one atomic addition a tile."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR)
        )
        def take(ctx: Any, counter: Any, ticket: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)
            zero = utils.c(0, ir.IndexType.get())
            one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
            utils.warpgroup_barrier()  # everyone has read the previous ticket
            with utils.when(one):
                old = llvm.atomicrmw(
                    llvm.AtomicBinOp.add, utils.memref_ptr(counter), utils.c(1, i32), llvm.AtomicOrdering.monotonic
                )
                memref.store(old, ticket, [zero])
            utils.warpgroup_barrier()
            value = memref.load(ticket, [zero])
            return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)

        return take(refs["counter"], scratch["ticket"]) + t.programs

    def full_barriers(self, k: Any) -> Any:
        return plgpu.SMEM((2 * k.tiling.stages,), jnp.int32)

    def init_full(self, full: Any) -> None:
        stages = full.shape[0] // 2

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def init(ctx: Any, ref: Any) -> None:
            i32 = ir.IntegerType.get_signless(32)
            one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
            for i in range(stages):
                barrier = _barrier(ref, i)
                nvvm.mbarrier_init(barrier.get_ptr(), utils.c(1, i32), predicate=one)
            # The copy engine and the other warpgroups, which wait for this one's next arrival, see the barriers.
            nvvm.fence_mbarrier_init()
            utils.warpgroup_barrier()

        init(full)

    def wait_full(self, full: Any, stage: Array, phase: Array) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
        def wait(ctx: Any, ref: Any, stage: Any, phase: Any) -> None:
            i1 = ir.IntegerType.get_signless(1)
            _barrier(ref, _value(stage)).wait_parity(arith.trunci(i1, _value(phase)))

        wait(full, stage, phase.astype(jnp.int32))

    def load_pages(self, ref: Any, tile: Any, stage: Array, full: Any, sources: Any, head: Array, k: Any) -> None:
        t, request = k.tiling, k.request
        chunk = t.chunk
        tiling = (8, tile.shape[-1] // (request.head_dim // t.col))
        transforms = (plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(_swizzle(ref.dtype, tiling[1])))
        total = t.block_kv * request.head_dim * jnp.dtype(ref.dtype).itemsize

        flat = [x for source in sources for x in source]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), plgpu.RefType(), *[SCALAR] * (2 + len(flat))))
        def issue(ctx: Any, ref: Any, tile: Any, full: Any, stage: Any, head: Any, *flat: Any) -> None:
            i32 = ir.IntegerType.get_signless(32)
            barrier = _barrier(full, _value(stage))
            one = nvvm.elect_sync()
            warp = arith.andi(utils.warp_idx(), utils.c(3, i32))

            def mine(w: int) -> Any:
                return arith.andi(one, arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(w, i32)))

            nvvm.mbarrier_arrive_expect_tx(barrier.get_ptr(), utils.c(total, i32), predicate=mine(0))
            for i in range(len(flat) // 2):
                page, rows = _index(flat[2 * i]), utils.ds(_index(flat[2 * i + 1]), chunk)
                place = (page, rows, _index(head)) if request.layout == "NHD" else (page, _index(head), rows)
                ctx.async_copy(
                    src_ref=ref,
                    dst_ref=utils.memref_slice(tile, (slice(i * chunk // 8, (i + 1) * chunk // 8),)),
                    gmem_slice=place,
                    gmem_transform=(mgpu.TileTransform(tiling),),
                    swizzle=transforms[1].swizzle,
                    barrier=barrier,
                    arrive=False,
                    predicate=mine(i % 4),
                )

        issue(ref, tile.at[stage], full, stage, head, *flat)


def _swizzle(dtype: Any, columns: int) -> int:
    return columns * jnp.dtype(dtype).itemsize
