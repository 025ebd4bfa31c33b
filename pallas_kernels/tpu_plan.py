"""The TPU kernel's plan: what is known of each chip, the static sizes of its tiles, and in the graph its list of items."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import tuned
from pallas_kernels.request import AttentionOperands, AttentionRequest, Layout
from pallas_kernels.tile_plan import CONTEXT, END, FIELDS, FIRST, WHOLE_END, compute_dtype, plan
from pallas_kernels.tuned import Tile
from pallas_kernels.work_plan import query_tiles, sequences, with_padding_rows

MIB = 1 << 20
LANES, SUBLANES = 128, 8  # of a 32-bit vector register
TABLE_CHUNK = LANES  # page ids that one copy of the table brings
FEW_ROWS, MID_ROWS, WIDE_ROWS, KEYS = 16, 64, 512, 512  # aims of the heuristic, for chips that nobody has measured
INVARIANT_TOKENS = 32  # queries a tile under batch_invariant, whatever the batch


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core's memories, and what the kernel may use of them."""

    vmem: int
    budget: int  # bytes of VMEM for buffers and the values that the compiler spills
    smem: int = MIB


# By the names of `tuned/<chip>.json`; an unknown chip is taken for the smallest.
CHIPS = {
    "v4": Chip(16 * MIB, 12 * MIB),
    "v5e": Chip(128 * MIB, 64 * MIB),
    "v5p": Chip(64 * MIB, 48 * MIB),
    "v6e": Chip(128 * MIB, 64 * MIB),
    "7x": Chip(64 * MIB, 48 * MIB),
}
_CHIP_OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}

# Columns of an item beyond those of `tile_plan`.
PAGE, PAGE_END, TILES = 13, 14, 15  # its table columns [PAGE, PAGE_END), and its key tiles of both kinds
assert max(PAGE, PAGE_END, TILES) < FIELDS


def chip_of(kind: str) -> str | None:
    """The name in `CHIPS` of a jax device kind, "v4" (the smallest) for a TPU of another name.

    None if it is no TPU, or v2 or v3, for which Mosaic does not compile the kernel's copies.
    """
    if kind in _CHIP_OF_KIND:
        return _CHIP_OF_KIND[kind]
    return "v4" if kind.startswith("TPU") and not kind.startswith(("TPU v2", "TPU v3")) else None


def present_chip() -> str | None:
    """The TPU that this trace is for: of the present abstract mesh, or of this host; None without one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return chip_of(abstract.device_kind)
    try:
        return chip_of(jax.devices("tpu")[0].device_kind)
    except RuntimeError:
        return None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static sizes of the kernel's tiles."""

    levels: tuple[int, ...]  # queries that an item may have, ascending powers of two: one body for each
    pages: int  # a key tile
    new_keys: int  # a tile of keys beside the cache; 0 without them
    vmem_limit: int

    @property
    def tokens(self) -> int:
        """Most queries of an item."""
        return self.levels[-1]


def choose_tiling(r: AttentionRequest, chip: str | None) -> Tiling:
    """Measured sizes where there are some, else the heuristic's, as far as the chip's memory allows."""
    few = r.max_query_len * r.group_size <= MID_ROWS and not r.batch_invariant
    work = "narrow" if few else "wide"
    measured = tuned.lookup(chip, "tpu", work, r)
    return tiling_of(r, Tile(**measured) if measured else Tile(WIDE_ROWS, KEYS), chip)


def tiling_of(r: AttentionRequest, tile: Tile, chip: str | None) -> Tiling:
    """Tiles of so many rows of queries and so many keys, or the largest smaller ones that fit into the chip's memory."""
    r, facts = as_stored(r), CHIPS[chip or "v4"]
    best = None
    for tiling in _tilings(r, tile, facts):
        best = tiling
        if vmem_bytes(r, tiling) <= facts.budget:
            break
    assert best is not None
    return best


def _tilings(r: AttentionRequest, tile: Tile, facts: Chip) -> Iterator[Tiling]:
    """From the largest tile to the smallest: fewer keys first, down to 128, then fewer queries, then single pages."""
    longest = INVARIANT_TOKENS if r.batch_invariant else r.max_query_len
    tokens = min(_floor_power(max(1, tile.rows // r.group_size)), _power(longest))
    pages = max(1, tile.keys // r.page_size)
    least = pages_of_whole_tiles(r.page_size, compute_dtype(r))
    if r.kv_dtype.itemsize == 1:
        pages = _whole(pages, least)
    # A widened page of no whole tiles begins inside one, wherever the tile of keys does.
    always = r.kv_dtype != compute_dtype(r) and r.page_size % SUBLANES != 0
    while True:
        pages = _whole(pages, least) if always else pages
        # New keys are not in pages, but their tile fills whole registers of lanes like any other.
        new_keys = -(-min(tile.keys, pages * r.page_size) // LANES) * LANES if r.new_kv else 0
        if not r.batch_invariant:
            new_keys = min(new_keys, max(LANES, _power(r.num_tokens)))
        yield Tiling(_levels(r, tokens), pages, new_keys, facts.vmem * 7 // 8)
        if pages > 1 and (pages * r.page_size > LANES or tokens == 1):
            pages = max(1, pages // 2)
        elif tokens > 1:
            tokens //= 2
        else:
            return


def _whole(pages: int, least: int) -> int:
    return pages - pages % least if pages > least else pages


def pages_of_whole_tiles(page_size: int, dtype: np.dtype) -> int:
    """The fewest pages whose keys fill whole tiles of registers: a store that begins inside one is not compiled for 7x."""
    rows = SUBLANES * 4 // dtype.itemsize
    return rows // math.gcd(rows, page_size)


def _levels(r: AttentionRequest, tokens: int) -> tuple[int, ...]:
    if r.batch_invariant:
        return (tokens,)
    few, mid = (_floor_power(max(1, rows // r.group_size)) for rows in (FEW_ROWS, MID_ROWS))
    return (*(level for level in sorted({few, mid}) if 2 * level <= tokens), tokens)


def _power(x: int) -> int:
    return 1 << (max(1, x) - 1).bit_length()


def _floor_power(x: int) -> int:
    return 1 << (x.bit_length() - 1)


def tile_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array in VMEM, whose last two axes are padded to tiles of whole registers."""
    *lead, rows, columns = shape
    packing = 4 // dtype.itemsize
    sublanes = SUBLANES * packing if rows > SUBLANES else max(packing, _power(rows))
    rows, columns = -(-rows // sublanes) * sublanes, -(-columns // LANES) * LANES
    return int(np.prod(lead, dtype=np.int64)) * rows * columns * dtype.itemsize


def as_stored(r: AttentionRequest) -> AttentionRequest:
    """The request in the layout in which XLA holds the pool, for whose view it then has nothing to copy."""
    layout = stored_layout(r.layout, r.page_size, r.num_kv_heads, r.head_dim, r.kv_dtype)
    return r if layout == r.layout else dataclasses.replace(r, layout=layout)


def stored_layout(layout: Layout, page_size: int, num_kv_heads: int, head_dim: int, dtype: np.dtype) -> Layout:
    """The layout of a pool in memory, by XLA's default.

    Where the last axis but one would be padded in memory and the one before it would not, that has them swapped: pages of
    16 tokens and 5 heads lie by head, pages of 8 heads and 12 tokens by token.
    """
    inner, outer = (num_kv_heads, page_size) if layout == "NHD" else (page_size, num_kv_heads)
    if head_dim % LANES or _fills_rows(inner, dtype) or not _fills_rows(outer, dtype):
        return layout
    return "HND" if layout == "NHD" else "NHD"


def _fills_rows(extent: int, dtype: np.dtype) -> bool:
    """Whether an axis along the sublanes is stored without padding: whole registers, or a packed part of one."""
    return extent % SUBLANES == 0 or (_power(extent) == extent and 4 // dtype.itemsize <= extent)


def staged(r: AttentionRequest) -> bool:
    """Whether pages are split by head and widened into a second buffer before their use."""
    return r.layout == "NHD" or r.kv_dtype != compute_dtype(r)


def buffers(r: AttentionRequest, t: Tiling) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shapes and dtypes of the kernel's buffers in VMEM, by name."""
    f32, compute = np.dtype(np.float32), compute_dtype(r)
    group, heads, dim, keys = r.group_size, r.num_kv_heads, r.head_dim, t.pages * r.page_size
    rows = t.tokens * group
    pages = (keys, heads, dim) if r.layout == "NHD" else (t.pages, heads, r.page_size, dim)
    found = {
        "q_in": ((2, t.tokens, heads, group, dim), r.q_dtype),
        "q": ((heads, rows, dim), compute),
        "out": ((2, t.tokens, heads, group, dim), r.q_dtype),
        "k": ((2, *pages), r.kv_dtype),
        "v": ((2, *pages), r.kv_dtype),
        "peak": ((heads, rows, 1), f32),
        "total": ((heads, rows, 1), f32),
        "values": ((heads, rows, dim), f32),
        "seen": ((rows, keys), f32),
    }
    if r.return_lse:
        found["lse"] = ((2, heads, 1, rows), f32)  # the head may be an index only on an axis that is not tiled
    if staged(r):
        found |= dict.fromkeys(("k_heads", "v_heads"), ((heads, keys, dim), compute))
    if r.new_kv:
        found["seen_new"] = ((rows, t.new_keys), f32)
        found |= dict.fromkeys(("new_k", "new_v"), ((2, t.new_keys, heads, dim), r.q_dtype))
        found |= dict.fromkeys(("new_k_heads", "new_v_heads"), ((heads, t.new_keys, dim), compute))
    if r.tree_size:
        found["tree"] = ((r.tree_size, r.tree_size), f32)
    return found


def vmem_bytes(r: AttentionRequest, t: Tiling) -> int:
    """VMEM of all buffers, for a request `as_stored`; of a head's logits, and of what the compiler holds besides."""
    fixed = sum(tile_bytes(shape, dtype) for shape, dtype in buffers(r, t).values())
    shape = (t.tokens * r.group_size, max(t.pages * r.page_size, t.new_keys))
    return fixed + 3 * tile_bytes(shape, np.dtype(np.float32))


def smem_bytes(r: AttentionRequest, t: Tiling) -> int:
    """SMEM of the list of items, two rows of the page table, and the arguments by head, sequence and range."""
    small = r.num_heads * 2 + r.num_kv_heads * 2 + r.num_seqs * r.num_ranges * 2
    return 4 * (max_items(r, t) * FIELDS + 2 * table_chunks(r) * TABLE_CHUNK + small + 1024)


def table_chunks(r: AttentionRequest) -> int:
    """Chunks of a row of the page table."""
    return -(-r.max_pages // TABLE_CHUNK)


def max_items(r: AttentionRequest, t: Tiling) -> int:
    """A bound on the number of items for any lengths; one more sequence stands for padding rows."""
    return min(r.num_tokens, r.num_tokens // t.tokens + r.num_seqs + 1)


class Items(NamedTuple):
    """What the kernel works through, in this order: items with keys, then those whose rows see nothing."""

    fields: Array  # int32 [N, FIELDS]
    totals: Array  # int32 [2]: items, and those of them with keys


def items(r: AttentionRequest, ops: AttentionOperands, t: Tiling) -> Items:
    """List the query tiles of a call with their pages."""
    seqs = sequences(ops.query_start_loc, ops.seq_lens, r.num_tokens, r.max_pages * r.page_size, r.new_kv)
    seqs = with_padding_rows(seqs, r.num_tokens)
    tiles = query_tiles(seqs.query_len, r.num_tokens, t.tokens, max_items(r, t))
    fields = plan(r, ops, seqs, tiles, t.tokens)
    first, end, context = fields[:, FIRST], fields[:, END], fields[:, CONTEXT]
    page_limit = jnp.minimum(end, jnp.maximum(context, 0)) if r.new_kv else end
    some = page_limit > first
    page = jnp.where(some, first // r.page_size, 0)
    page_end = jnp.where(some, -(-page_limit // r.page_size), 0)
    tiles_of = -(-(page_end - page) // t.pages)
    if r.new_kv:
        tiles_of += jnp.where(end > first, -(-jnp.maximum(0, end - jnp.maximum(first, context)) // t.new_keys), 0)
    for column, values in ((PAGE, page), (PAGE_END, page_end), (TILES, tiles_of)):
        fields = fields.at[:, column].set(values)
    if r.tree_size:  # inside the square a bit may hide what causality shows
        square_start = seqs.seq_len[tiles.seq] - jnp.minimum(seqs.query_len[tiles.seq], r.tree_size)
        fields = fields.at[:, WHOLE_END].min(square_start)
    count = jnp.minimum(tiles.num_tiles, fields.shape[0])
    used = jnp.arange(fields.shape[0]) < count
    order = jnp.argsort(jnp.where(used, tiles_of == 0, 2), stable=True)
    return Items(fields[order], jnp.stack([count, (used & (tiles_of > 0)).sum()]).astype(jnp.int32))


def copied_bytes(r: AttentionRequest, fields: Array) -> int:
    """Bytes of K and V pages that the kernel copies for concrete items: each page of an item's range once, whole."""
    page = r.page_size * r.num_kv_heads * r.head_dim * r.kv_dtype.itemsize
    return 2 * page * int((fields[:, PAGE_END] - fields[:, PAGE]).sum())
