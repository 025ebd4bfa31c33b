"""The portable kernel's plan: the static shape of its tiles, and in the graph the tile that each program takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import tuned
from pallas_kernels.request import AttentionRequest
from pallas_kernels.tile_plan import (
    CAUSAL,
    CONTEXT,
    COUNT,
    END,
    FIRST,
    POSITION,
    ROW,
    SEQ,
    SEQ_LEN,
    START,
    WHOLE,
    WHOLE_END,
    compute_dtype,
)
from pallas_kernels.tuned import Tile

MAX_HEADS = 64  # query heads a tile; more of one KV head go to several tiles
MIN_ROWS = 16  # the smallest operand of a matrix instruction
NARROW_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The static shape of one kernel's tiles."""

    tile: Tile
    heads: int  # query heads a tile
    tokens: int  # queries a tile
    head_blocks: int  # programs beside each other: KV heads x blocks of their query heads


def geometries(
    r: AttentionRequest, arch: str | None, tiles: tuple[Tile | None, Tile | None] = (None, None)
) -> tuple[Geometry, Geometry | None]:
    """The narrow tiles, and the wide ones unless narrow tiles alone serve the batch; `tiles` override the sizes."""
    heads = min(r.group_size, MAX_HEADS)
    blocks = r.num_kv_heads * -(-r.group_size // heads)
    least = max(MIN_ROWS, power(heads))
    if r.batch_invariant:  # nothing here may depend on the batch
        rows = max(least, NARROW_ROWS)
    else:
        usual = min(-(-r.num_tokens // r.num_seqs), r.max_query_len)
        rows = min(max(least, power(usual * heads)), max(least, NARROW_ROWS))
    tokens = rows // heads if r.batch_invariant else min(rows // heads, r.max_query_len)
    narrow = Geometry(tiles[0] or choose_tile(r, arch, rows), heads, tokens, blocks)
    longest = r.num_tokens if r.batch_invariant else r.max_query_len
    if min(longest, r.num_tokens) <= narrow.tokens:
        return narrow, None
    tile = tiles[1] or choose_tile(r, arch, None)
    tile = dataclasses.replace(tile, rows=max(tile.rows, least))
    return narrow, Geometry(tile, heads, tile.rows // heads, blocks)


def choose_tile(r: AttentionRequest, arch: str | None, rows: int | None) -> Tile:
    """The tile of a narrow kernel of so many rows, or of the wide kernel (None)."""
    if _unlike_measured(r):
        return heuristic(r, arch, rows)
    fixed = {} if rows is None else {"rows": rows}
    fields = tuned.lookup(arch, "triton", work_of(rows), r, **fixed)
    return heuristic(r, arch, rows) if fields is None else Tile(**fields)


def work_of(rows: int | None) -> str:
    """The kind of work of a tile, as the tuned tables name it."""
    return "wide" if rows is None else "narrow"


def _busy(r: AttentionRequest) -> bool:
    """Whether the body holds more than one sweep over pages: a second one, or masks by element."""
    return bool(r.new_kv or r.num_ranges or r.tree_size)


def _unlike_measured(r: AttentionRequest) -> bool:
    """Whether the body holds more than the measured ones, which leave no register over.

    A soft cap does, and so do pages whose positions need a true division.
    """
    return _busy(r) or r.soft_cap is not None or r.page_size & (r.page_size - 1) != 0


def heuristic(r: AttentionRequest, arch: str | None, rows: int | None) -> Tile:
    """Tiles for shapes that nobody has measured, by the compilers' reports (docs/codegen.md).

    On AMD two workgroups of four waves fit on a compute unit: up to 256 vector registers and 32 KiB of LDS each, without
    spills. On NVIDIA eight warps share 128 rows, or their accumulators spill; five stages keep two key tiles in flight
    beside the page ids that they depend on, where shared memory has room (sm86 and sm89 have 99 KiB).
    """
    width = power(max(r.head_dim, MIN_ROWS)) * compute_dtype(r).itemsize  # bytes of one row of K
    keys = 32 if width <= 512 else 16
    if arch is not None and arch.startswith("gfx"):
        many = width <= 256 and not (r.v_scale == "token" and compute_dtype(r) == np.float16)  # each row has its range
        return Tile(rows or (128 if many else 64), keys, 4, 2 if width <= 256 else 1)
    if compute_dtype(r).itemsize == 4:  # no matrix instruction is exact: many threads hold the accumulators
        if width > 512:
            return Tile(rows or 64, keys, 16, 1)
        return Tile(rows or 64, keys, 16 if width > 256 else 8, 3 if rows and arch == "sm80" else 2)
    old = tuned.before_hopper(arch)
    if width > 256:
        keys = 16 if r.quantized and _busy(r) else keys
        return Tile(rows or 64, keys, 4 if rows and not old else 8, 2)
    if old and (r.num_ranges or r.tree_size):
        return Tile(rows or 64, 32, 8, 2)
    if old and r.quantized:  # the widening holds registers
        return Tile(rows, 32, 4, 3) if rows else Tile(64, 64, 8, 3)
    if rows is not None:
        return Tile(rows, 32 if _busy(r) else 64, 4, 3)
    if _busy(r) or arch in ("sm86", "sm89") or (old and width <= 64):
        return Tile(128, 32, 8, 3)
    return Tile(128, 64, 8, 3 if old and r.alibi else 5)


def power(x: int) -> int:
    return 1 << (x - 1).bit_length()


class Item(NamedTuple):
    """What one program works on: scalars of its tile, and the vectors that say which rows it has."""

    seq: Array
    first: Array  # keys [first, end)
    end: Array
    whole: Array  # keys [whole, whole_end) are seen by every row
    whole_end: Array
    context: Array  # keys before the sequence's queries
    seq_len: Array
    start: Array  # row of the sequence's first query
    causal: bool | Array
    kv_head: Array
    q_pos: Array  # int32 [rows]
    live: Array  # bool [rows]
    head: Array  # int32 [rows] query head
    q_row: Array  # int32 [rows] row of q as [T * H, D]


def rows_of(
    r: AttentionRequest, g: Geometry, plan_ref: Any, n: Array, block: Array, row: Array
) -> tuple[Array, Array, Array]:
    """Of tile rows: whether each is in use, its query head, and its row of q as [T * H, D]."""
    per_kv_head = g.head_blocks // r.num_kv_heads
    token, head_in_block = lax.div(row, np.int32(g.heads)), lax.rem(row, np.int32(g.heads))
    head_in_group = lax.rem(block, np.int32(per_kv_head)) * g.heads + head_in_block
    head = lax.div(block, np.int32(per_kv_head)) * r.group_size + head_in_group
    live = (token < plan_ref[n, COUNT]) & (head_in_group < r.group_size)
    return live, head, (plan_ref[n, ROW] + token) * r.num_heads + head


def item_of(r: AttentionRequest, g: Geometry, plan_ref: Any, n: Array, block: Array) -> Item:
    """Read row n of the plan inside a kernel; `block` is the program's block of heads."""
    row = jnp.arange(g.tile.rows)
    live, head, q_row = rows_of(r, g, plan_ref, n, block, row)
    return Item(
        seq=plan_ref[n, SEQ],
        first=plan_ref[n, FIRST],
        end=plan_ref[n, END],
        whole=plan_ref[n, WHOLE],
        whole_end=plan_ref[n, WHOLE_END],
        context=plan_ref[n, CONTEXT],
        seq_len=plan_ref[n, SEQ_LEN],
        start=plan_ref[n, START],
        causal=r.causal if r.causal is not None else plan_ref[n, CAUSAL] != 0,
        kv_head=lax.div(block, np.int32(g.head_blocks // r.num_kv_heads)),
        q_pos=plan_ref[n, POSITION] + lax.div(row, np.int32(g.heads)),
        live=live,
        head=head,
        q_row=q_row,
    )


def columns(r: AttentionRequest) -> tuple[Array, Array | None]:
    """Indices [1, width] along D padded to a power of two, and which of them exist (None: all)."""
    width = power(max(r.head_dim, MIN_ROWS))
    column = jnp.arange(width)[None, :]
    return column, None if width == r.head_dim else column < r.head_dim
