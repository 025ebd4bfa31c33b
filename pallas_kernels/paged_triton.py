"""Paged attention in Pallas Triton: AMD MI300/MI350, and NVIDIA GPUs before Hopper.

One body for prefill, chunks, drafts and decode. A program takes one tile: some queries of one sequence times the query
heads of one KV head (GQA packed into the tile's rows), and a range of keys. Sequences with few queries go through
`narrow` tiles, whose key ranges are split until they fill the chip and merged by their softmax states; the others
through `wide` tiles, which write their result themselves. Which tile a program takes is planned in the graph.

Everything that depends on Pallas Triton is in this file: it is deprecated upstream (jax commit c486c9d985).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import masks, online_softmax, tuned
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.tile_plan import END, FIRST, REAL, compute_dtype, plan
from pallas_kernels.triton_plan import Geometry, Item, columns, geometries, item_of, rows_of
from pallas_kernels.tuned import Tile
from pallas_kernels.work_plan import QueryTiles, Sequences, query_tiles, sequences, split_keys, with_padding_rows

MAX_HEAD_DIM = 256
PROGRAMS_A_CORE = 4  # resident narrow programs that hide each other's memory latency
FIXED_SPLITS = 8  # pieces of a narrow tile's keys under batch_invariant
MERGE_ROWS, MERGE_PARTS = 4, 8
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
Tiles = tuple[Tile | None, Tile | None]


def why_not(request: AttentionRequest, device: str | None = None) -> tuple[str, ...]:
    """What this kernel lacks for the request on a GPU architecture; None: on those that it is for."""
    r, reasons = request, []
    if device is not None and device.startswith("sm") and int(device[2:]) < tuned.FIRST_SM:
        reasons.append(f"{device}: XLA compiles Triton kernels for sm{tuned.FIRST_SM} and later alone")
    if r.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim={r.head_dim}: a tile of more than {MAX_HEAD_DIM} does not fit into registers")
    rows = r.num_pages * r.page_size * r.num_kv_heads
    # Pallas Triton counts in 32 bits up to 2^32 bytes, which is 2^31 elements only from two bytes an element on.
    if r.kv_dtype.itemsize == 1 and 2**31 < rows * r.head_dim <= 2**32:
        reasons.append(
            f"a cache of {rows * r.head_dim} one-byte elements: Pallas Triton addresses 2^31 to 2^32 of them with a "
            "signed 32-bit offset; fewer or more work"
        )
    if max(rows, r.num_tokens * r.num_heads) >= 2**31:
        reasons.append(f"{rows} rows of keys, {r.num_tokens * r.num_heads} of queries: each must stay below 2^31")
    return tuple(reasons)


def attend(
    request: AttentionRequest, operands: AttentionOperands, *, interpret: bool = False, tiles: Tiles = (None, None)
) -> tuple[Array, Array | None]:
    """Attention of every query over the pages of its sequence; see `jattn.paged_attention` for the meaning.

    Args:
      request: static options.
      operands: arrays.
      interpret: run the kernel's body as plain JAX operations on any platform: for tests.
      tiles: override the narrow tile, the wide tile.
    """
    r = request
    if r.num_tokens == 0 or r.num_seqs == 0:
        lse = jnp.full((r.num_tokens, r.num_heads), -jnp.inf)
        return jnp.zeros_like(operands.q), lse if r.return_lse else None
    out, lse = _attend(r, operands, tuned.gpu_arch(), interpret, tiles)
    return out, lse if r.return_lse else None


# jit keeps the trace: a model's layers, which have equal requests, trace the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _attend(
    r: AttentionRequest, ops: AttentionOperands, arch: str | None, interpret: bool, sizes: Tiles
) -> tuple[Array, Array]:
    narrow, wide = geometries(r, arch, sizes)
    seqs = sequences(ops.query_start_loc, ops.seq_lens, r.num_tokens, r.max_pages * r.page_size, r.new_kv)
    seqs = with_padding_rows(seqs, r.num_tokens)
    arrays = _arrays(r, ops)
    if wide is None:
        tiles = query_tiles(seqs.query_len, r.num_tokens, narrow.tokens)
        return _narrow(r, ops, narrow, seqs, tiles, arrays, arch, interpret)
    count = min(len(seqs.start), r.num_tokens)
    few = seqs.query_len <= narrow.tokens
    tiles = query_tiles(jnp.where(few, seqs.query_len, 0), r.num_tokens, narrow.tokens, count)
    out, lse = _narrow(r, ops, narrow, seqs, tiles, arrays, arch, interpret)
    count = r.num_tokens // wide.tokens + min(len(seqs.start), r.num_tokens // (narrow.tokens + 1))
    tiles = query_tiles(jnp.where(few, 0, seqs.query_len), r.num_tokens, wide.tokens, count)
    return _wide(r, ops, wide, seqs, tiles, arrays, (out, lse), interpret)


def _arrays(r: AttentionRequest, ops: AttentionOperands) -> dict[str, Array]:
    """The kernel's inputs by name, flattened to rows so that an address is one product."""

    def rows(x: Array) -> Array:
        if x.dtype.itemsize == 1 and x.dtype != jnp.int8:
            x = lax.bitcast_convert_type(x, jnp.int8)  # the lowering has no conversion from some of the 8-bit floats
        return x.reshape(-1, r.head_dim)

    arrays: dict[str, Array | None] = {
        "q": rows(ops.q),
        "k": rows(ops.k_cache),
        "v": rows(ops.v_cache),
        "new_k": None if ops.new_k is None else rows(ops.new_k),
        "new_v": None if ops.new_v is None else rows(ops.new_v),
        "table": ops.block_table.reshape(-1),
        "k_scale": None if ops.k_scale is None else ops.k_scale.reshape(-1),
        "v_scale": None if ops.v_scale is None else ops.v_scale.reshape(-1),
        "sinks": ops.sinks,
        "slopes": ops.alibi_slopes,
        "ranges": None if ops.bidirectional_ranges is None else ops.bidirectional_ranges.reshape(-1),
        "tree": None if ops.tree_mask is None else ops.tree_mask.reshape(-1).astype(jnp.int8),
    }
    return {name: x for name, x in arrays.items() if x is not None}


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: dict[str, Array],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    tile: Tile,
    interpret: bool,
    into: tuple[Array, ...] = (),
) -> tuple[Array, ...]:
    """Launch a kernel over whole arrays; `into` are arrays that its outputs overwrite in place."""
    names = sorted(inputs)

    def body(*refs: Any) -> None:
        given, rest = refs[: len(names)], refs[len(names) + len(into) :]
        kernel(dict(zip(names, given, strict=True)), *rest)

    body.__name__ = kernel.__name__  # profilers show it
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[anywhere] * (len(names) + len(into)),
        out_specs=[anywhere] * len(outputs),
        out_shape=list(outputs),
        input_output_aliases={len(names) + i: i for i in range(len(into))},
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
    )
    return tuple(call(*(inputs[name] for name in names), *into))


def _results(r: AttentionRequest) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    rows = r.num_tokens * r.num_heads
    return jax.ShapeDtypeStruct((rows, r.head_dim), r.q_dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)


def _shaped(r: AttentionRequest, out: Array, lse: Array) -> tuple[Array, Array]:
    return out.reshape(r.num_tokens, r.num_heads, r.head_dim), lse.reshape(r.num_tokens, r.num_heads)


def _wide(
    r: AttentionRequest,
    ops: AttentionOperands,
    g: Geometry,
    seqs: Sequences,
    tiles: QueryTiles,
    arrays: dict[str, Array],
    into: tuple[Array, Array],
    interpret: bool,
) -> tuple[Array, Array]:
    """Compute the wide tiles' rows of the results `into`; the other rows stay."""
    items = plan(r, ops, seqs, tiles, g.tokens)

    def paged_wide(refs: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:  # [T * H, D], [T * H]
        # The last tiles of a causal prefill have the most keys: start them first.
        n = items.shape[0] - 1 - pl.program_id(0)
        item = item_of(r, g, refs["plan"], n, pl.program_id(1))
        state = _natural(r, _run(r, g, refs, item))
        _write(r, refs, item.head, item.live, refs["plan"][n, REAL], item.q_row, state, out_ref, lse_ref)

    flat = (into[0].reshape(-1, r.head_dim), into[1].reshape(-1))
    grid = (items.shape[0], g.head_blocks)
    return _shaped(r, *_call(paged_wide, grid, arrays | {"plan": items}, _results(r), g.tile, interpret, flat))


def _narrow(
    r: AttentionRequest,
    ops: AttentionOperands,
    g: Geometry,
    seqs: Sequences,
    tiles: QueryTiles,
    arrays: dict[str, Array],
    arch: str | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """Compute the narrow tiles: pieces of their keys side by side, then one merge of the pieces' softmax states."""
    items = plan(r, ops, seqs, tiles, g.tokens)
    target = pl.cdiv(PROGRAMS_A_CORE * tuned.CORES.get(arch or "", 128), g.head_blocks)
    least = max(1, 256 // g.tile.keys)
    fixed = FIXED_SPLITS if r.batch_invariant else None
    splits = split_keys(items[:, FIRST], items[:, END], g.tile.keys, target, least, fixed)
    column = jnp.arange(items.shape[1])  # selects, not updates in place: they fuse into the gather
    pieces = jnp.where(column == FIRST, splits.first[:, None], items[splits.tile])
    pieces = jnp.where(column == END, splits.end[:, None], pieces)
    rows, blocks = g.tile.rows, g.head_blocks

    def paged_narrow(refs: dict[str, Any], values_ref: Any, peak_ref: Any, total_ref: Any) -> None:
        n, block = pl.program_id(0), pl.program_id(1)
        item = item_of(r, g, refs["plan"], n, block)
        state = _run(r, g, refs, item)
        row = (n * blocks + block) * rows + jnp.arange(rows)
        pltriton.store(peak_ref.at[row], state.peak)  # [M * blocks * rows]
        pltriton.store(total_ref.at[row], state.total)
        column, inside = columns(r)
        live = item.live[:, None]
        mask = live if inside is None else live & inside
        pltriton.store(values_ref.at[row[:, None], column], state.values, mask=mask)  # [M * blocks * rows, D]

    count = pieces.shape[0] * blocks * rows
    vector = jax.ShapeDtypeStruct((count,), jnp.float32)
    shapes = (jax.ShapeDtypeStruct((count, r.head_dim), jnp.float32), vector, vector)
    parts = _call(paged_narrow, (pieces.shape[0], blocks), arrays | {"plan": pieces}, shapes, g.tile, interpret)

    def paged_merge(refs: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:  # [T * H, D], [T * H]
        n, block = pl.program_id(0), pl.program_id(1)
        row = pl.program_id(2) * MERGE_ROWS + jnp.arange(MERGE_ROWS)
        live, head, q_row = rows_of(r, g, refs["plan"], n, block, row)
        state = _natural(r, _merge_parts(r, g, refs, n, block, row, live))
        _write(r, refs, head, live, refs["plan"][n, REAL], q_row, state, out_ref, lse_ref)

    inputs = dict(zip(("values", "peak", "total"), parts, strict=True))
    inputs |= {"plan": items, "before": splits.before, "count": splits.pieces}
    inputs |= {"sinks": ops.sinks} if ops.sinks is not None else {}
    grid = (items.shape[0], blocks, pl.cdiv(g.tokens * g.heads, MERGE_ROWS))
    return _shaped(r, *_call(paged_merge, grid, inputs, _results(r), Tile(0, 0, 4, 1), interpret))


# Below: inside the kernel.


def _run(r: AttentionRequest, g: Geometry, refs: dict[str, Any], item: Item) -> SoftmaxState:
    """Sweep the item's keys, in the pages and beside them."""
    column, inside = columns(r)
    live = item.live[:, None]
    mask = live if inside is None else live & inside
    q = pltriton.load(refs["q"].at[item.q_row[:, None], column], mask=mask, other=0).astype(compute_dtype(r))
    state = online_softmax.empty(item.live.shape, column.shape[1])
    page_end = jnp.minimum(item.end, jnp.maximum(item.context, 0)) if r.new_kv else item.end
    state = _sweep(r, g, refs, item, q, item.first, page_end, False, state)
    if r.v_scale in ("scalar", "head"):
        state = state._replace(values=state.values * _scale(r.v_scale, refs["v_scale"], item))
    if r.new_kv:
        begin = jnp.maximum(item.first, item.context)
        state = _sweep(r, g, refs, item, q, begin, item.end, True, state)
    return state


def _scale(kind: str, ref: Any, item: Item) -> Array:
    return ref[0] if kind == "scalar" else ref[item.kv_head]


def _sweep(
    r: AttentionRequest,
    g: Geometry,
    refs: dict[str, Any],
    item: Item,
    q: Array,
    begin: Array,
    end: Array,
    new: bool,
    state: SoftmaxState,
) -> SoftmaxState:
    """Take in the keys [begin, end), in tiles that start at multiples of their size; only edge tiles pay for the mask."""
    keys = np.int32(g.tile.keys)
    step = functools.partial(_step, r, g, refs, item, q, begin, end, new)
    lo = lax.div(begin, keys)
    hi = jnp.where(end > begin, lax.div(end + (keys - 1), keys), lo)
    if r.num_ranges or r.tree_size:
        return lax.fori_loop(lo, hi, lambda j, s: step(j, s, True), state)
    whole_from = jnp.clip(lax.div(jnp.maximum(item.whole, begin) + (keys - 1), keys), lo, hi)
    whole_to = jnp.clip(lax.div(jnp.maximum(jnp.minimum(item.whole_end, end), 0), keys), whole_from, hi)
    state = lax.fori_loop(whole_from, whole_to, lambda j, s: step(j, s, False), state)
    before = whole_from - lo
    edges = before + hi - whole_to

    def edge(n: Array, s: SoftmaxState) -> SoftmaxState:
        return step(jnp.where(n < before, lo + n, whole_to + n - before), s, True)

    return lax.fori_loop(0, edges, edge, state)


def _step(
    r: AttentionRequest,
    g: Geometry,
    refs: dict[str, Any],
    item: Item,
    q: Array,
    begin: Array,
    end: Array,
    new: bool,
    j: Array,
    state: SoftmaxState,
    masked: bool,
) -> SoftmaxState:
    """Take in key tile j."""
    k_pos = j * g.tile.keys + jnp.arange(g.tile.keys)
    # Nothing outside [begin, end) is loaded: it may be NaN, and 0 x NaN is NaN.
    exists = (k_pos >= begin) & (k_pos < end) if masked else None
    row = _new_rows(r, item, k_pos) if new else _page_rows(r, g, refs["table"], item, j, k_pos, exists)
    name = r.q_dtype.name if new else r.kv_dtype.name
    k = _load_rows(r, refs["new_k" if new else "k"], row, exists, name)
    v = _load_rows(r, refs["new_v" if new else "v"], row, exists, name)
    factor: Any = r.scale
    if not new and r.k_scale in ("scalar", "head"):
        factor = factor * _scale(r.k_scale, refs["k_scale"], item)
    elif not new and r.k_scale == "token":
        factor = factor * _load(refs["k_scale"].at[row], exists)[None, :]
    logits = _logits(r, refs, item, _dot(q, k, transposed=True), factor, k_pos)
    some = None
    if masked:
        seen = _seen(r, refs, item, k_pos, begin, end)
        logits = jnp.where(seen, logits, -jnp.inf)
        if r.num_ranges or r.tree_size:  # then keys between the first and last that are seen may be hidden
            some = (seen & item.live[:, None]).astype(jnp.int32).max(0) > 0
            v = jnp.where(some[:, None], v, jnp.zeros_like(v))

    def weigh(p: Array) -> Array:
        if not new and r.v_scale == "token":
            scale = _load(refs["v_scale"].at[row], exists)
            scale = scale if some is None else jnp.where(some, scale, 0.0)
            if v.dtype == jnp.float16:  # p times a small scale would leave its range
                p = p * scale[None, :]  # a row's range is that of the keys that it sees itself
                top = jnp.maximum(jnp.abs(p).max(1), jnp.finfo(jnp.float32).tiny)[:, None]
                return _dot((p / top).astype(v.dtype), v) * top
            p = p * scale[None, :]
        return _dot(p.astype(v.dtype), v)

    return online_softmax.update(state, logits, weigh, _exp(r))


def _exp(r: AttentionRequest) -> Callable[[Array], Array]:
    # Base 2 is the hardware's; float32 keeps the natural base for the last bits of large logits.
    return jnp.exp if compute_dtype(r) == jnp.float32 else jnp.exp2


def _logits(r: AttentionRequest, refs: dict[str, Any], item: Item, x: Array, factor: Any, k_pos: Array) -> Array:
    """Scaled, capped and biased logits, times log2(e) where the exponential is of base 2."""
    unit = 1.0 if compute_dtype(r) == jnp.float32 else LOG2E
    if r.soft_cap is None and not r.alibi:
        return x * (factor * unit)
    x = x * factor
    if r.soft_cap is not None:
        x = r.soft_cap * _tanh(r, x * (1.0 / r.soft_cap))
    if r.alibi:
        slope = _load(refs["slopes"].at[item.head], item.live)[:, None]
        x = x - slope * jnp.abs(item.q_pos[:, None] - k_pos[None, :]).astype(jnp.float32)
    return x * unit


def _tanh(r: AttentionRequest, x: Array) -> Array:
    if compute_dtype(r) == jnp.float32:
        return jnp.tanh(x)
    # 1e-7 off, which 16-bit operands cannot show, but near 0, where a large cap multiplies it: there a series, 2e-6 of x.
    near = x * (1.0 - x * x * (1.0 / 3.0 - x * x * (2.0 / 15.0)))
    return jnp.where(jnp.abs(x) < 0.15, near, 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2.0 * LOG2E))))


def _seen(r: AttentionRequest, refs: dict[str, Any], item: Item, k_pos: Array, begin: Array, end: Array) -> Array:
    """The mask rule on a tile, bool [rows, keys]."""
    q, k = item.q_pos[:, None], k_pos[None, :]
    same_range = tree = None
    if r.num_ranges:
        same_range = q < -masks.FAR
        for i in range(r.num_ranges):
            at = (item.seq * r.num_ranges + i) * 2
            same_range = same_range | masks.in_range(q, k, refs["ranges"][at], refs["ranges"][at + 1])
    if r.tree_size:
        size = r.tree_size
        square_start = item.seq_len - jnp.minimum(item.seq_len - item.context, size)
        row, column = (jnp.clip(x - square_start, 0, size - 1) for x in (q, k))
        tree = (square_start, refs["tree"][(item.seq * size + row) * size + column] != 0)
    return masks.visible(
        q,
        k,
        seq_len=end,
        causal=item.causal,
        window=r.window,
        kv_start=begin,
        same_range=same_range,
        tree=tree,
    )


def _page_rows(
    r: AttentionRequest, g: Geometry, table_ref: Any, item: Item, j: Array, k_pos: Array, exists: Array | None
) -> Array:
    """Rows of the pool, as [rows, D], that hold the keys of tile j."""
    size, keys = r.page_size, g.tile.keys
    base = item.seq * r.max_pages
    if size % keys == 0:  # the tile lies in one page
        page = lax.div(j, np.int32(size // keys))
        page_id = table_ref[base + jnp.minimum(page, r.max_pages - 1)]
        offset = lax.rem(j, np.int32(size // keys)) * keys + jnp.arange(keys)
    else:
        page, offset = lax.div(k_pos, np.int32(size)), lax.rem(k_pos, np.int32(size))
        page_id = _load(table_ref.at[base + jnp.minimum(page, r.max_pages - 1)], exists)
    page_id = jnp.clip(page_id, 0, r.num_pages - 1)  # a table that traced lengths contradict must not lead astray
    if r.layout == "NHD":
        return (page_id * size + offset) * r.num_kv_heads + item.kv_head
    return (page_id * r.num_kv_heads + item.kv_head) * size + offset


def _new_rows(r: AttentionRequest, item: Item, k_pos: Array) -> Array:
    row = jnp.clip(item.start + k_pos - item.context, 0, r.num_tokens - 1)
    return row * r.num_kv_heads + item.kv_head


def _load(ref: Any, mask: Array | None) -> Array:
    return pltriton.load(ref) if mask is None else pltriton.load(ref, mask=mask, other=0)


def _load_rows(r: AttentionRequest, ref: Any, row: Array, exists: Array | None, dtype: str) -> Array:
    """Rows of keys or values in the products' dtype; zeros where they do not exist."""
    column, mask = columns(r)
    if exists is not None:
        mask = exists[:, None] if mask is None else exists[:, None] & mask
    return _widen(_load(ref.at[row[:, None], column], mask), dtype, compute_dtype(r))


def _widen(x: Array, dtype: str, to: np.dtype) -> Array:
    """Stored values in a float dtype, exactly; 8-bit floats come as their bits, by way of float16, which holds them all."""
    if not dtype.startswith("float8"):
        return x.astype(to)
    bits = x.astype(jnp.int16)  # the sign fills the upper half
    if dtype == "float8_e5m2":
        return lax.bitcast_convert_type(bits << 8, jnp.float16).astype(to)
    half = lax.bitcast_convert_type((bits & np.int16(-32768)) | ((bits & 0x7F) << 7), jnp.float16)
    if dtype == "float8_e4m3fnuz":
        return jnp.where(x == -128, jnp.float16(jnp.nan), half * jnp.float16(128)).astype(to)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.float16(jnp.nan), half * jnp.float16(256)).astype(to)


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    # float32 means float32: a default-precision product would round its operands to TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _merge_parts(
    r: AttentionRequest, g: Geometry, refs: dict[str, Any], n: Array, block: Array, row: Array, live: Array
) -> SoftmaxState:
    """The softmax states of a tile's pieces as one."""
    column, inside = columns(r)
    before, count = refs["before"][n], refs["count"][n]

    def step(i: Array, state: SoftmaxState) -> SoftmaxState:
        piece = i * MERGE_PARTS + jnp.arange(MERGE_PARTS)
        at = ((before + piece) * g.head_blocks + block)[:, None] * g.tile.rows + row[None, :]
        mask = (piece < count)[:, None] & live[None, :]
        values_mask = mask[:, :, None] if inside is None else mask[:, :, None] & inside[None]
        parts = SoftmaxState(
            pltriton.load(refs["peak"].at[at], mask=mask, other=-jnp.inf),
            _load(refs["total"].at[at], mask),
            _load(refs["values"].at[at[:, :, None], column[None]], values_mask),
        )
        return online_softmax.merge(state, parts, _exp(r))

    state = online_softmax.empty(row.shape, column.shape[1])
    return lax.fori_loop(0, lax.div(count + (MERGE_PARTS - 1), np.int32(MERGE_PARTS)), step, state)


def _natural(r: AttentionRequest, state: SoftmaxState) -> SoftmaxState:
    return state if compute_dtype(r) == jnp.float32 else state._replace(peak=state.peak * LN2)


def _write(
    r: AttentionRequest,
    refs: dict[str, Any],
    head: Array,
    live: Array,
    real: Array,
    q_row: Array,
    state: SoftmaxState,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    """Finish the softmax and write the rows that the tile owns."""
    sinks = _load(refs["sinks"].at[head], live) if r.sinks else None
    out, lse = online_softmax.finish(state, sinks)
    lse = jnp.where(real != 0, lse, -jnp.inf)  # padding rows have no sink either
    column, inside = columns(r)
    mask = live[:, None] if inside is None else live[:, None] & inside
    pltriton.store(out_ref.at[q_row[:, None], column], out.astype(r.q_dtype), mask=mask)
    pltriton.store(lse_ref.at[q_row], lse, mask=live)
