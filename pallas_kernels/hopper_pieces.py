"""What the parts of the Hopper kernel share: its static facts, the description of a piece of work, ring positions.

A piece of work is one query tile of one KV head and a range of KV tiles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import hopper_plan as plan
from pallas_kernels.hopper_steps import Steps
from pallas_kernels.request import AttentionRequest

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
LOW = -1e30  # start of the running maximum: finite, so that a row without keys needs no special case

# Fields of a piece's description in shared memory.
ROW, TOKENS, HEAD, POS, LENGTH, CAUSAL, START, T0, F0, F1, T1, DEST, TILE, LAST, CLEAN_LO, CLEAN_HI = range(16)
FIELDS = 16
FRESH_COLUMN, FRESH_PAGE = 16, 17  # known to the loading side only: the first column of fresh pages, and its page
WHOLE = -1  # DEST of a piece that is a whole tile; otherwise the number of its slot among the partial results


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Static facts of one kernel."""

    request: AttentionRequest
    tiling: plan.Tiling
    steps: Steps

    @property
    def copies(self) -> int:
        """TMA copies of one K or V tile."""
        return self.tiling.block_kv // self.tiling.chunk

    @property
    def cols(self) -> int:
        """Swizzled column blocks of a head."""
        return self.request.head_dim // self.tiling.col

    @property
    def compute_dtype(self) -> Any:
        """What the tensor cores multiply; see `hopper_convert` for an 8-bit cache."""
        return jnp.dtype(jnp.float16) if self.request.quantized else self.request.q_dtype

    @property
    def kv_col(self) -> int:
        """Columns of one swizzled tile of K and V as they are loaded."""
        if not self.request.quantized:
            return self.tiling.col
        return next(c for c in (128, 64, 32) if self.request.head_dim % c == 0)

    def stored(self, out: Array) -> Array:
        """The output in q's dtype, with its bits in the dtype of the query buffer, in which it is staged."""
        out = out.astype(self.request.q_dtype)
        return out if out.dtype == self.compute_dtype else lax.bitcast_convert_type(out, self.compute_dtype)

    def page_of(self, refs: Any, fields: Any, s: Array, copy: Any, tile: Array) -> Array:
        """The page of copy `copy` of a KV tile; past the last page of the sequence, that page again."""
        t, request = self.tiling, self.request
        last = div(jnp.maximum(fields[LENGTH] - 1, 0), request.page_size)
        column = jnp.minimum(div(tile * t.block_kv + copy * t.chunk, request.page_size), last)
        in_table = jnp.minimum(column, request.max_pages - 1) if request.new_kv else column
        page = refs["block_table"][jnp.minimum(s, request.num_seqs - 1), in_table]
        page = jnp.clip(page, 0, request.num_pages - 1)
        if request.new_kv:  # fresh pages are numbered after the pool's
            page = jnp.where(column < fields[FRESH_COLUMN], page, fields[FRESH_PAGE] + column - fields[FRESH_COLUMN])
        return page

    def sources(self, refs: Any, name: str, page: Array) -> list[tuple[Any, Array, Array]]:
        """Where a page may lie: (pool, its number there, whether it is there)."""
        pages = self.request.num_pages
        if not self.request.new_kv:
            return [(refs[name], page, jnp.bool_(True))]
        fresh = jnp.clip(page - pages, 0, refs[f"new_{name}"].shape[0] - 1)
        return [
            (refs[name], jnp.minimum(page, pages - 1), page < pages),
            (refs[f"new_{name}"], fresh, page >= pages),
        ]

    def offset_of(self, copy: Any, tile: Array) -> Array:
        """The first row of copy `copy` inside its page."""
        t, request = self.tiling, self.request
        if request.page_size == t.chunk:
            return jnp.int32(0)
        position = tile * t.block_kv + copy * t.chunk
        return position - div(position, request.page_size) * request.page_size

    def copies_in_use(self, fields: Any, tile: Array) -> Array:
        """Copies of a KV tile that hold a key of the sequence; the others are left out, their rows masked and zeroed."""
        t = self.tiling
        return jnp.clip(div(fields[LENGTH] - tile * t.block_kv + (t.chunk - 1), t.chunk), 1, self.copies)

    def head_of(self, fields: Any) -> Array:
        """The KV head of a piece."""
        return fields[HEAD]


@dataclasses.dataclass(frozen=True)
class Described:
    """A piece's fields, read from shared memory at each use: registers are what the computing side is short of."""

    desc: Any
    slot: Array

    def __getitem__(self, field: int) -> Array:
        return self.desc[self.slot, field]


def stage_of(ring: Array, t: plan.Tiling) -> Array:
    """The stage of a ring position; positions run through two rounds, so that they tell a barrier's phase as well."""
    return jnp.where(ring >= t.stages, ring - t.stages, ring)


def next_of(ring: Array, t: plan.Tiling) -> Array:
    """The ring position after this one."""
    return jnp.where(ring + 1 == 2 * t.stages, 0, ring + 1)


def wide_of(ring: Array, t: plan.Tiling, stages: int) -> Array:
    """The stage of a widened tile, of `stages`, one or two: two rounds are even, so its turns go on from end to start."""
    if stages == t.stages:
        return stage_of(ring, t)
    return jnp.int32(0) if stages == 1 else lax.bitwise_and(ring, jnp.int32(1))


def div(a: Array, b: int) -> Array:
    """Division of non-negative integers; a shift where it can be."""
    if b & (b - 1) == 0:
        return lax.shift_right_logical(a, jnp.int32(b.bit_length() - 1))
    return lax.div(a, jnp.int32(b))
