"""The body of the Hopper kernel: one loading warpgroup, one or two computing ones, all in a persistent program.

With an 8-bit cache one or two others convert in between. They talk through barriers alone; see the modules of each.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper_computing import compute_pieces
from pallas_kernels.hopper_convert import convert_pieces
from pallas_kernels.hopper_loading import load_pieces
from pallas_kernels.hopper_pieces import Kernel


def run_warpgroups(k: Kernel, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
    """What each warpgroup of each program does."""
    wgs = k.tiling.wgs
    wg = lax.axis_index("wg")
    several = k.tiling.warpgroups > 2  # with two, each thread has all the registers it can use

    @pl.when(wg < wgs)
    def _compute() -> None:
        if several:
            plgpu.set_max_registers(k.tiling.registers[0], action="increase")
        compute_pieces(k, refs, scratch, wg)

    @pl.when(wg == wgs)
    def _load() -> None:
        if several:
            plgpu.set_max_registers(k.tiling.registers[1], action="decrease")
        load_pieces(k, refs, scratch)

    shares = {0: (), 1: (("k", "v"),), 2: (("k",), ("v",))}[k.tiling.convert]
    for i, names in enumerate(shares):

        @pl.when(wg == wgs + 1 + i)
        def _convert(names: tuple[str, ...] = names) -> None:
            plgpu.set_max_registers(k.tiling.registers[2], action="decrease")
            convert_pieces(k, scratch, names)
