"""What the TPU kernel computes of one item: its mask, its logits, and its softmax over one key tile after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import masks, online_softmax
from pallas_kernels.online_softmax import SoftmaxState
from pallas_kernels.tile_plan import (
    CAUSAL,
    CONTEXT,
    COUNT,
    END,
    FIRST,
    POSITION,
    REAL,
    SEQ,
    SEQ_LEN,
    WHOLE,
    WHOLE_END,
)
from pallas_kernels.tpu_copies import Kernel
from pallas_kernels.tpu_plan import PAGE, SUBLANES, pages_of_whole_tiles, staged

BLOCK_ROWS = 256  # rows of one matrix product: enough to hide the loading of its right side, few enough for short code
PACKED_ROWS = 16  # rows of bfloat16 in a tile of registers
SPLIT_KEYS = 128  # keys that are split by head in one step, for short code

Heads = Callable[[Array], Array]  # KV head -> its keys or values [keys, D]


class Source(NamedTuple):
    """A key tile in VMEM: `size` keys from position `first` on, of which [least, end) are there and may be seen."""

    keys: Heads
    values: Heads
    first: Array
    size: int
    least: Array
    end: Array
    new: bool  # from beside the cache


class Rows(NamedTuple):
    """A block of an item's rows; row = token * G + head of the group."""

    start: Array | int
    size: int

    def of(self, ref: Any) -> Any:
        """The block of a ref whose first axis is rows."""
        return ref.at[pl.ds(self.start, self.size)]


def by_level(k: Kernel, n: Array, act: Callable[[int], None]) -> None:
    """Run `act(tokens)` for the smallest level that holds item n's queries."""
    least, queries = 0, k.field(n, COUNT)
    for tokens in k.t.levels:
        pl.when((queries > least) & (queries <= tokens))(functools.partial(act, tokens))
        least = tokens


def _by_block(k: Kernel, tokens: int, act: Callable[[Rows], None]) -> None:
    """Run `act` for the rows of `tokens` queries, at most about BLOCK_ROWS at a time."""
    group = k.r.group_size
    # A block must begin at whole tiles, which on 7x have 16 rows of bfloat16.
    least = PACKED_ROWS // math.gcd(PACKED_ROWS, group)
    block = min(tokens, max(least, 1 << max(1, BLOCK_ROWS // group).bit_length() >> 1))
    if tokens == block:
        act(Rows(0, tokens * group))
        return
    size = block * group
    rows = lambda i: Rows(pl.multiple_of(i * size, PACKED_ROWS), size)  # noqa: E731
    lax.fori_loop(0, tokens // block, lambda i, _: act(rows(i)), None)


def begin(k: Kernel, n: Array) -> None:
    """Pack the queries of item n by KV head, and clear its softmax states."""
    by_level(k, n, functools.partial(_begin, k, n))


def _begin(k: Kernel, n: Array, tokens: int) -> None:
    m, rows = k.m, tokens * k.r.group_size

    def head(h: Array, _: None) -> None:
        packed = m["q_in"][n & 1, :tokens, h].reshape(rows, k.r.head_dim)
        m["q"][h, :rows] = packed.astype(m["q"].dtype)
        for name, value in (("peak", -jnp.inf), ("total", 0.0), ("values", 0.0)):
            ref = m[name].at[h, :rows]
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    lax.fori_loop(0, k.r.num_kv_heads, head, None)


def take_in(k: Kernel, n: Array, j: Array, buffer: Array) -> None:
    """Take in key tile j of item n, which lies in `buffer`."""
    r, t = k.r, k.t
    page_first = (k.field(n, PAGE) + j * t.pages) * r.page_size
    pages = Source(
        *_page_operands(k, buffer), page_first, t.pages * r.page_size, k.field(n, FIRST), k.field(n, END), False
    )
    if not r.new_kv:
        _split(k, buffer, ("k", "v"))
        _tile(k, n, pages)
        return
    page_tiles, context = k.page_tiles(n), k.field(n, CONTEXT)
    least = jnp.maximum(k.field(n, FIRST), context)
    operands = (lambda h: k.m["new_k_heads"][h]), (lambda h: k.m["new_v_heads"][h])
    fresh = Source(*operands, least + (j - page_tiles) * t.new_keys, t.new_keys, least, k.field(n, END), True)

    @pl.when(j < page_tiles)
    def _() -> None:
        _split(k, buffer, ("k", "v"))
        _tile(k, n, pages._replace(end=jnp.minimum(pages.end, context)))

    @pl.when(j >= page_tiles)
    def _() -> None:
        _split(k, buffer, ("new_k", "new_v"))
        _tile(k, n, fresh)


def _tile(k: Kernel, n: Array, x: Source) -> None:
    """Take in a key tile; only edge tiles pay for the mask."""
    whole = x.first >= jnp.maximum(x.least, k.field(n, WHOLE))
    whole &= x.first + x.size <= jnp.minimum(x.end, k.field(n, WHOLE_END))
    pl.when(whole)(lambda: by_level(k, n, lambda tokens: _heads(k, n, tokens, x, None)))
    pl.when(jnp.logical_not(whole))(
        lambda: by_level(k, n, lambda tokens: _heads(k, n, tokens, x, _mask(k, n, tokens, x)))
    )


# ---------------------------------------------------------------------------------------------------------- operands


def _page_operands(k: Kernel, buffer: Array) -> tuple[Heads, Heads]:
    """K and V of each head in the products' dtype, from the split copy or from the pages themselves."""
    m, keys = k.m, k.t.pages * k.r.page_size
    if staged(k.r):
        return lambda h: m["k_heads"][h], lambda h: m["v_heads"][h]

    def head_of(name: str) -> Heads:
        return lambda h: m[name][buffer, :, h].reshape(keys, k.r.head_dim)

    return head_of("k"), head_of("v")


def _split(k: Kernel, buffer: Array, names: tuple[str, str]) -> None:
    """Copy a buffer of keys and one of values by head, widened, if the products cannot take them as they are."""
    if not staged(k.r) and names == ("k", "v"):
        return
    tokens_first = k.r.layout == "NHD" or names != ("k", "v")
    for name in names:
        (_split_tokens if tokens_first else _widen_pages)(k, name, buffer)


def _widen_pages(k: Kernel, name: str, buffer: Array) -> None:
    """Widen HND pages."""
    source, target, size = k.m[name], k.m[f"{name}_heads"], k.r.page_size
    least = pages_of_whole_tiles(size, target.dtype)
    pages = math.gcd(k.t.pages, max(least, SPLIT_KEYS // size // least * least))
    keys = pages * size

    def step(i: Array, _: None) -> None:
        c, h = lax.div(i, np.int32(k.r.num_kv_heads)), lax.rem(i, np.int32(k.r.num_kv_heads))
        one = source[buffer, pl.ds(c * pages, pages), h].reshape(keys, k.r.head_dim)
        start = pl.multiple_of(c * keys, math.gcd(keys, SPLIT_KEYS)) if pages < k.t.pages else 0
        target[h, pl.ds(start, keys)] = _widen(one, target.dtype)

    lax.fori_loop(0, k.t.pages // pages * k.r.num_kv_heads, step, None)


def _split_tokens(k: Kernel, name: str, buffer: Array) -> None:
    """Split tokens by head: a tile of heads at a time, since an index inside a register's tile must be static."""
    source, target, heads = k.m[name], k.m[f"{name}_heads"], k.r.num_kv_heads
    size = target.shape[1]
    keys = SPLIT_KEYS if size % SPLIT_KEYS == 0 else size
    tile = SUBLANES * 4 // source.dtype.itemsize
    together = tile if heads % tile == 0 else heads
    groups = heads // together

    def step(i: Array, _: None) -> None:
        c, base = lax.div(i, np.int32(groups)), lax.rem(i, np.int32(groups)) * together
        base = pl.multiple_of(base, together) if groups > 1 else 0
        run = pl.ds(pl.multiple_of(c * keys, keys), keys) if size > keys else pl.ds(0, keys)
        for h in range(together):
            if groups > 1:
                one = source[buffer, run, pl.ds(base, together)][:, h]
            else:
                one = source[buffer, run, h]
            target[base + h, run] = _widen(one, target.dtype)

    lax.fori_loop(0, size // keys * groups, step, None)


def _widen(x: Array, to: np.dtype) -> Array:
    """Stored values in a float dtype, exactly."""
    return x if x.dtype == to else x.astype(jnp.float32).astype(to)


def _keep(x: Array, keep: Array) -> Array:
    """Values of the keys that some row sees, and zeros: what nobody sees may be NaN, and 0 x NaN is NaN."""
    # Masks have the shape of 32-bit registers; selecting 16-bit values would need another one.
    return jnp.where(keep, x.astype(jnp.float32), 0.0).astype(x.dtype)


# -------------------------------------------------------------------------------------------------------------- mask


def _row_tokens(k: Kernel, rows: Rows) -> Array:
    """The query that each row belongs to, counted within the item; int32 [rows, 1]."""
    row, group = rows.start + lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0), k.r.group_size
    if group & (group - 1) == 0:
        return row >> (group.bit_length() - 1)
    # Vectors have no integer division; rows are few enough for float32 to be exact.
    return ((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)


def _mask(k: Kernel, n: Array, tokens: int, x: Source) -> Array:
    """Write the mask rule on a tile to its buffer as 1.0 and 0.0; return the keys that some row sees [keys, 1]."""
    seen = k.m["seen_new" if x.new else "seen"]
    _by_block(k, tokens, lambda rows: _mask_rows(k, n, x, rows, rows.of(seen)))
    if not (k.r.num_ranges or k.r.tree_size):  # then every key in [least, end) is seen by some row
        column = x.first + lax.broadcasted_iota(jnp.int32, (x.size, 1), 0)
        return (column >= x.least) & (column < x.end)
    rows = Rows(0, tokens * k.r.group_size)
    live = jnp.where(_row_tokens(k, rows) < k.field(n, COUNT), 1.0, 0.0)
    by_key = (((0,), (0,)), ((), ()))
    # A sum of zeros and ones is 0 in any precision only where all of them are.
    return lax.dot_general(rows.of(seen)[...] * live, jnp.ones((rows.size, 1), jnp.float32), by_key) > 0.5


def _mask_rows(k: Kernel, n: Array, x: Source, rows: Rows, seen: Any) -> None:
    r = k.r
    q = k.field(n, POSITION) + _row_tokens(k, rows)
    key = x.first + lax.broadcasted_iota(jnp.int32, (1, x.size), 1)
    visible = masks.visible(
        q,
        key,
        seq_len=x.end,
        causal=r.causal if r.causal is not None else jnp.full((rows.size, 1), k.field(n, CAUSAL)) != 0,
        window=r.window,
        kv_start=x.least,
        same_range=_same_range(k, n, q, key) if r.num_ranges else None,
        tree=_tree(k, n, q, key) if r.tree_size else None,
    )
    seen[...] = jnp.broadcast_to(jnp.where(visible, 1.0, 0.0), (rows.size, x.size))


def _same_range(k: Kernel, n: Array, q: Array, key: Array) -> Array:
    found = None
    for i in range(k.r.num_ranges):
        at = (k.field(n, SEQ) * k.r.num_ranges + i) * 2
        inside = masks.in_range(q, key, k.m["ranges"][at], k.m["ranges"][at + 1])
        found = inside if found is None else found | inside
    assert found is not None
    return found


def _tree(k: Kernel, n: Array, q: Array, key: Array) -> tuple[Array, Array]:
    """Where the square begins, and its bit for each row and key, brought there by two products with one-hot rows."""
    size = k.r.tree_size
    query_len = k.field(n, SEQ_LEN) - k.field(n, CONTEXT)
    square_start = k.field(n, SEQ_LEN) - jnp.minimum(query_len, size)
    row, column = (jnp.clip(x - square_start, 0, size - 1) for x in (q, key))
    rows = jnp.where(row == lax.broadcasted_iota(jnp.int32, (1, size), 1), 1.0, 0.0)
    columns = jnp.where(lax.broadcasted_iota(jnp.int32, (size, 1), 0) == column, 1.0, 0.0)
    bits = jnp.dot(jnp.dot(rows, k.m["tree"][...]), columns)
    return square_start, bits > 0.5


# ----------------------------------------------------------------------------------------------------------- softmax


def _heads(k: Kernel, n: Array, tokens: int, x: Source, keep: Array | None) -> None:
    """One step of the online softmax for every KV head; `keep` is None where every row sees every key."""

    def head(h: Array, _: None) -> None:
        _by_block(k, tokens, lambda rows: _update(k, n, h, x, rows, keep))

    lax.fori_loop(0, k.r.num_kv_heads, head, None)


def _update(k: Kernel, n: Array, h: Array, x: Source, rows: Rows, keep: Array | None) -> None:
    r, m = k.r, k.m
    factor: Any = r.scale
    if not x.new and r.k_scale != "none":
        factor = factor * m["k_scale"][h]
    logits = _dot(rows.of(m["q"].at[h])[...], x.keys(h), transposed=True) * factor
    if r.soft_cap is not None:
        logits = r.soft_cap * jnp.tanh(logits * (1.0 / r.soft_cap))
    if r.alibi:
        q = k.field(n, POSITION) + _row_tokens(k, rows)
        distance = q - x.first - lax.broadcasted_iota(jnp.int32, (1, x.size), 1)
        logits -= _by_row(k, "slopes", h, rows) * jnp.abs(distance).astype(jnp.float32)
    v = x.values(h)
    if keep is not None:
        logits = jnp.where(rows.of(m["seen_new" if x.new else "seen"])[...] > 0.0, logits, -jnp.inf)
        v = _keep(v, keep)

    def weigh(p: Array) -> Array:
        weighed = _dot(p.astype(v.dtype), v)
        return weighed * m["v_scale"][h] if not x.new and r.v_scale != "none" else weighed

    state = online_softmax.update(_state(k, h, rows), logits, weigh)
    rows.of(m["peak"].at[h])[...] = state.peak[:, None]
    rows.of(m["total"].at[h])[...] = state.total[:, None]
    rows.of(m["values"].at[h])[...] = state.values


def _state(k: Kernel, h: Array, rows: Rows) -> SoftmaxState:
    peak, total, values = (rows.of(k.m[name].at[h])[...] for name in ("peak", "total", "values"))
    return SoftmaxState(peak[:, 0], total[:, 0], values)


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    # float32 means float32: a default-precision product would round its operands to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _by_row(k: Kernel, name: str, h: Array, rows: Rows) -> Array:
    """A value of each query head, spread over the rows of KV head h; float32 [rows, 1]."""
    group = k.r.group_size
    row = rows.start + lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0)
    in_group = row - _row_tokens(k, rows) * group
    spread = jnp.full(row.shape, k.m[name][h * group])
    for g in range(1, group):
        spread = jnp.where(in_group == g, k.m[name][h * group + g], spread)
    return spread


def finish(k: Kernel, n: Array) -> None:
    """Divide by the denominators and lay the results of item n out by token."""
    by_level(k, n, functools.partial(_finish, k, n))


def _finish(k: Kernel, n: Array, tokens: int) -> None:
    r, m, rows, slot = k.r, k.m, Rows(0, tokens * k.r.group_size), n & 1

    def head(h: Array, _: None) -> None:
        sinks = _by_row(k, "sinks", h, rows)[:, 0] if r.sinks else None
        out, lse = online_softmax.finish(_state(k, h, rows), sinks)
        m["out"][slot, :tokens, h] = out.reshape(tokens, r.group_size, r.head_dim).astype(m["out"].dtype)
        if r.return_lse:
            # Padding rows have no sink either.
            m["lse"][slot, h, :, : rows.size] = jnp.where(k.field(n, REAL) != 0, lse, -jnp.inf)[None, :]

    lax.fori_loop(0, r.num_kv_heads, head, None)
