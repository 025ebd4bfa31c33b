"""The TPU kernel's copies between HBM and its buffers; a copy is described twice, once to start it and once to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.request import AttentionRequest
from pallas_kernels.tile_plan import CONTEXT, COUNT, END, FIELDS, FIRST, ROW, SEQ, START
from pallas_kernels.tpu_plan import PAGE, PAGE_END, TABLE_CHUNK, Tiling, table_chunks

Act = Callable[[Any], None]


def start(copy: Any) -> None:
    """Begin a copy."""
    copy.start()


def wait(copy: Any) -> None:
    """Wait for a copy of the same size and semaphore."""
    copy.wait()


class Kernel(NamedTuple):
    """What every part of the kernel's body needs: the static options and sizes, and all refs by name."""

    r: AttentionRequest
    t: Tiling
    m: dict[str, Any]

    def field(self, n: Array, column: int) -> Array:
        """A scalar of item n."""
        return self.m["items"][n * FIELDS + column]

    def page_tiles(self, n: Array) -> Array:
        """Key tiles of item n that lie in pages; those beside the cache come after them."""
        pages = self.field(n, PAGE_END) - self.field(n, PAGE)
        return lax.div(pages + (self.t.pages - 1), np.int32(self.t.pages))


def _ladder(count: Array, most: int, act: Callable[[Array, int], None]) -> None:
    """Cover [0, count) by pieces of static sizes, which are powers of two up to `most`."""
    size = 1 << (most.bit_length() - 1)
    while size:
        offset = count & np.int32(-2 * size)
        pl.when((count & np.int32(size)) != 0)(lambda offset=offset, size=size: act(offset, size))
        size //= 2


def queries(k: Kernel, n: Array, act: Act) -> None:
    """The rows of q of item n."""
    m, slot, row = k.m, n & 1, k.field(n, ROW)

    def piece(offset: Array, size: int) -> None:
        target = m["q_in"].at[slot, pl.ds(offset, size)]
        act(pltpu.make_async_copy(m["q_hbm"].at[pl.ds(row + offset, size)], target, m["q_sem"].at[slot]))

    _ladder(k.field(n, COUNT), k.t.tokens, piece)


def results(k: Kernel, n: Array, act: Act) -> None:
    """The rows of the output that item n owns, and its LSE."""
    m, slot, row = k.m, n & 1, k.field(n, ROW)

    def piece(offset: Array, size: int) -> None:
        source = m["out"].at[slot, pl.ds(offset, size)]
        act(pltpu.make_async_copy(source, m["out_hbm"].at[pl.ds(row + offset, size)], m["out_sem"].at[slot]))

    _ladder(k.field(n, COUNT), k.t.tokens, piece)
    if k.r.return_lse:
        act(pltpu.make_async_copy(m["lse"].at[slot], m["lse_hbm"].at[n], m["out_sem"].at[slot]))


def table_row(k: Kernel, n: Array, act: Act) -> None:
    """The part of the page table that item n needs: the table lives in HBM, since SMEM holds only short ones."""
    m, slot = k.m, n & 1
    row = k.field(n, SEQ) * table_chunks(k.r)
    first = lax.div(k.field(n, PAGE), np.int32(TABLE_CHUNK))
    end = lax.div(k.field(n, PAGE_END) + (TABLE_CHUNK - 1), np.int32(TABLE_CHUNK))

    def chunk(c: Array, _: None) -> None:
        target = m["table"].at[slot, c]
        act(pltpu.make_async_copy(m["table_hbm"].at[row + c], target, m["table_sem"].at[slot]))

    lax.fori_loop(first, end, chunk, None)


def tree_mask(k: Kernel, n: Array) -> None:
    """The tree mask of item n's sequence."""
    pltpu.sync_copy(k.m["tree_hbm"].at[k.field(n, SEQ)], k.m["tree"])


def keys(k: Kernel, n: Array, j: Array, buffer: Array, act: Act) -> None:
    """Key tile j of item n into buffer 0 or 1: its pages whole, for NHD pages can be split by head only in VMEM."""
    m, page_tiles = k.m, k.page_tiles(n)
    first = k.field(n, PAGE) + j * k.t.pages
    count = jnp.clip(k.field(n, PAGE_END) - first, 0, k.t.pages)

    def page(i: Array, _: None) -> None:
        column = first + i
        chunk, lane = lax.div(column, np.int32(TABLE_CHUNK)), lax.rem(column, np.int32(TABLE_CHUNK))
        # A table that traced lengths contradict must not lead astray.
        page_id = jnp.clip(m["table"][n & 1, chunk, 0, lane], 0, k.r.num_pages - 1)
        for name in ("k", "v"):
            target = m[name].at[buffer]
            target = target.at[pl.ds(i * k.r.page_size, k.r.page_size)] if k.r.layout == "NHD" else target.at[i]
            act(pltpu.make_async_copy(m[f"{name}_hbm"].at[page_id], target, m["kv_sem"].at[buffer]))

    lax.fori_loop(0, count, page, None)
    if k.r.new_kv:
        pl.when(j >= page_tiles)(lambda: _new_keys(k, n, j - page_tiles, buffer, act))


def _new_keys(k: Kernel, n: Array, j: Array, buffer: Array, act: Act) -> None:
    """Tile j of the keys beside the cache that item n may see."""
    m = k.m
    position = jnp.maximum(k.field(n, FIRST), k.field(n, CONTEXT)) + j * k.t.new_keys
    row = k.field(n, START) + position - k.field(n, CONTEXT)

    def piece(offset: Array, size: int) -> None:
        for name in ("new_k", "new_v"):
            source, target = m[f"{name}_hbm"].at[pl.ds(row + offset, size)], m[name].at[buffer, pl.ds(offset, size)]
            act(pltpu.make_async_copy(source, target, m["kv_sem"].at[buffer]))

    _ladder(jnp.clip(k.field(n, END) - position, 0, k.t.new_keys), k.t.new_keys, piece)
