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
        """The next place that no program has taken: one atomic addition a tile, if there are more tiles than programs."""
        if "counter" not in refs:
            return super().take_ticket(refs, scratch, count, t)

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

    def find_pages(self, refs: Any, fields: Any, s: Array, tile: Array, k: Any) -> tuple[Array, ...]:
        """The pages that the calling warp copies: of a tile's copies, warp w takes w, w + 4, ..."""
        return tuple(k.page_of(refs, fields, s, copy, tile) for copy in _copies_of_warp(k))

    def load_pages(
        self, refs: Any, scratch: Any, name: str, stage: Array, pages: Any, fields: Any, tile: Array, k: Any
    ) -> None:
        t, request = k.tiling, k.request
        chunk, itemsize = t.chunk, request.kv_dtype.itemsize
        tiling = (8, k.kv_col)
        transforms = (plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(k.kv_col * itemsize))
        size = chunk * request.head_dim * itemsize
        pools: list[Any] = []
        flat: list[Any] = []
        for copy, page in zip(_copies_of_warp(k), pages, strict=True):
            sources = k.sources(refs, name, page)
            pools = [pool for pool, _, _ in sources]
            for _, number, here in sources:
                flat += [jnp.where(here, copy, k.copies), copy, number, k.offset_of(copy, tile)]
        types = (
            [plgpu.RefType()] * len(pools),
            plgpu.RefType(transforms),
            plgpu.RefType(),
            *[SCALAR] * (3 + len(flat)),
        )

        @plgpu.inline_mgpu(arg_types=types)
        def issue(ctx: Any, pools: Any, buffer: Any, full: Any, stage: Any, head: Any, used: Any, *flat: Any) -> None:
            i32 = ir.IntegerType.get_signless(32)
            barrier = _barrier(full, _value(stage))
            one = nvvm.elect_sync()
            first = arith.cmpi(arith.CmpIPredicate.eq, _warp(), utils.c(0, i32))
            total = arith.muli(_value(used), utils.c(size, i32))
            nvvm.mbarrier_arrive_expect_tx(barrier.get_ptr(), total, predicate=arith.andi(one, first))
            for i in range(len(flat) // 4):
                rank, copy, page, offset = flat[4 * i : 4 * i + 4]
                rows = utils.ds(_index(offset), chunk)
                place = (
                    (_index(page), rows, _index(head))
                    if request.layout == "NHD"
                    else (_index(page), _index(head), rows)
                )
                inside = arith.cmpi(arith.CmpIPredicate.slt, _value(rank), _value(used))
                to = arith.muli(_index(copy), utils.c(chunk // 8, ir.IndexType.get()))
                ctx.async_copy(
                    src_ref=pools[i % len(pools)],
                    dst_ref=utils.memref_slice(buffer, (utils.ds(to, chunk // 8),)),
                    gmem_slice=place,
                    gmem_transform=(mgpu.TileTransform(tiling),),
                    swizzle=transforms[1].swizzle,
                    barrier=barrier,
                    arrive=False,
                    predicate=arith.andi(one, inside),
                )

        full = scratch[f"{name}_full"]
        issue(pools, scratch[name].at[stage], full, stage, k.head_of(fields), k.copies_in_use(fields, tile), *flat)


def _warp() -> Any:
    """Index of the calling warp in its warpgroup."""
    return arith.andi(utils.warp_idx(), utils.c(3, ir.IntegerType.get_signless(32)))


def _copies_of_warp(k: Any) -> list[Array]:
    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR))
    def warp(ctx: Any) -> Any:
        return mgpu.FragmentedArray.splat(_warp(), shape=(), is_signed=True)

    return [warp() + 4 * i for i in range(-(-k.copies // 4))]
