"""What the TPU kernel computes of one item: its mask, its logits, and its softmax over one key tile after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from pallas_kernels.tpu_plan import PAGE, SUBLANES, staged

Heads = Callable[[Array], Array]  # KV head -> its keys or values [keys, D]


def begin(k: Kernel, n: Array, tokens: int) -> None:
    """Pack the queries of item n by KV head, row = token * G + head of the group, and clear its softmax states."""
    m, rows = k.m, tokens * k.r.group_size

    def head(h: Array, _: None) -> None:
        packed = m["q_in"][n & 1, :tokens, h].reshape(rows, k.r.head_dim)
        m["q"][h, :rows] = packed.astype(m["q"].dtype)

    lax.fori_loop(0, k.r.num_kv_heads, head, None)
    for name, value in (("peak", -jnp.inf), ("total", 0.0), ("values", 0.0)):
        ref = m[name].at[:, :rows]
        ref[...] = jnp.full(ref.shape, value, jnp.float32)


def take_in(k: Kernel, n: Array, j: Array, buffer: Array, tokens: int) -> None:
    """Take in key tile j of item n, which lies in `buffer`."""
    r, t = k.r, k.t
    if not r.new_kv:
        first = (k.field(n, PAGE) + j * t.pages) * r.page_size
        _tile(k, n, buffer, tokens, first, k.field(n, FIRST), k.field(n, END), False)
        return
    page_tiles, context = k.page_tiles(n), k.field(n, CONTEXT)

    @pl.when(j < page_tiles)
    def _() -> None:
        first = (k.field(n, PAGE) + j * t.pages) * r.page_size
        _tile(k, n, buffer, tokens, first, k.field(n, FIRST), jnp.minimum(k.field(n, END), context), False)

    @pl.when(j >= page_tiles)
    def _() -> None:
        least = jnp.maximum(k.field(n, FIRST), context)
        first = least + (j - page_tiles) * t.new_keys
        _tile(k, n, buffer, tokens, first, least, k.field(n, END), True)


def _tile(k: Kernel, n: Array, buffer: Array, tokens: int, first: Array, least: Array, end: Array, new: bool) -> None:
    """Take in a buffer of keys from position `first` on, of which [least, end) are there and may be seen."""
    size = k.t.new_keys if new else k.t.pages * k.r.page_size
    whole = (first >= jnp.maximum(least, k.field(n, WHOLE))) & (first + size <= jnp.minimum(end, k.field(n, WHOLE_END)))

    @pl.when(whole)
    def _() -> None:
        _heads(k, n, tokens, first, size, *_operands(k, buffer, size, None, new), None, new)

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        seen, keep = _mask(k, n, tokens, first, size, least, end)
        _heads(k, n, tokens, first, size, *_operands(k, buffer, size, keep, new), seen, new)


# ---------------------------------------------------------------------------------------------------------- operands


def _operands(k: Kernel, buffer: Array, size: int, keep: Array | None, new: bool) -> tuple[Heads, Heads]:
    """K and V of each head in the products' dtype; V is zero where `keep` is false, for 0 x NaN is NaN."""
    m, r = k.m, k.r
    if not new and not staged(r):
        return lambda h: _page_head(k, "k", buffer, h, size), lambda h: _keep(_page_head(k, "v", buffer, h, size), keep)
    names = ("new_k", "new_v") if new else ("k", "v")
    for name, which in zip(names, (None, keep), strict=True):
        if new or r.layout == "NHD":
            _split_heads(k, name, buffer, size, which)
        else:
            _widen_heads(k, name, buffer, size, which)
    return lambda h: m[f"{names[0]}_heads"][h], lambda h: m[f"{names[1]}_heads"][h]


def _keep(x: Array, keep: Array | None) -> Array:
    if keep is None:
        return x
    # Masks have the shape of 32-bit registers; selecting 16-bit values would need another one.
    return jnp.where(keep, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _page_head(k: Kernel, name: str, buffer: Array, h: Array, size: int) -> Array:
    """A head of the HND pages in a buffer."""
    return k.m[name][buffer, :, h].reshape(size, k.r.head_dim)


def _widen_heads(k: Kernel, name: str, buffer: Array, size: int, keep: Array | None) -> None:
    """Widen the HND pages in a buffer, head by head."""
    target = k.m[f"{name}_heads"]

    def head(h: Array, _: None) -> None:
        target[h] = _keep(_widen(_page_head(k, name, buffer, h, size), target.dtype), keep)

    lax.fori_loop(0, k.r.num_kv_heads, head, None)


def _split_heads(k: Kernel, name: str, buffer: Array, size: int, keep: Array | None) -> None:
    """Split a buffer of tokens by head: 8 heads at a time, since an index inside a register's tile must be static."""
    source, target, heads = k.m[name], k.m[f"{name}_heads"], k.r.num_kv_heads

    def split(x: Any, base: Array | int, count: int) -> None:
        for h in range(count):
            one = x[..., h, :].reshape(size, k.r.head_dim)
            target[base + h] = _keep(_widen(one, target.dtype), keep)

    if heads <= SUBLANES or heads % SUBLANES:
        for h in range(heads):
            one = source[buffer, ..., h, :].reshape(size, k.r.head_dim)
            target[h] = _keep(_widen(one, target.dtype), keep)
        return

    def group(i: Array, _: None) -> None:
        base = pl.multiple_of(i * SUBLANES, SUBLANES)
        split(source[buffer, ..., pl.ds(base, SUBLANES), :], base, SUBLANES)

    lax.fori_loop(0, heads // SUBLANES, group, None)


def _widen(x: Array, to: np.dtype) -> Array:
    """Stored values in a float dtype, exactly."""
    if x.dtype == to:
        return x
    return x.astype(jnp.float32).astype(to)


# -------------------------------------------------------------------------------------------------------------- mask


def _row_tokens(k: Kernel, tokens: int) -> Array:
    """The query that each row belongs to, counted within the item; int32 [rows, 1]."""
    row, group = lax.broadcasted_iota(jnp.int32, (tokens * k.r.group_size, 1), 0), k.r.group_size
    if group & (group - 1) == 0:
        return row >> (group.bit_length() - 1)
    # Vectors have no integer division; rows are few enough for float32 to be exact.
    return ((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)


def _mask(k: Kernel, n: Array, tokens: int, first: Array, size: int, least: Array, end: Array) -> tuple[Any, Array]:
    """The mask rule on a tile: a buffer of 1.0 and 0.0 [rows, keys], and the keys that some row sees [keys, 1]."""
    r, rows = k.r, tokens * k.r.group_size
    token = _row_tokens(k, tokens)
    q = k.field(n, POSITION) + token
    key = first + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    causal = r.causal if r.causal is not None else jnp.full((rows, 1), k.field(n, CAUSAL)) != 0
    visible = masks.visible(
        q,
        key,
        seq_len=end,
        causal=causal,
        window=r.window,
        kv_start=least,
        same_range=_same_range(k, n, q, key) if r.num_ranges else None,
        tree=_tree(k, n, q, key) if r.tree_size else None,
    )
    seen = k.m["seen"].at[:rows, :size]
    seen[...] = jnp.broadcast_to(jnp.where(visible, 1.0, 0.0), (rows, size))
    if not (r.num_ranges or r.tree_size):  # then every key in [least, end) is seen by some row
        column = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return seen, (column >= least) & (column < end)
    live = jnp.where(token < k.field(n, COUNT), 1.0, 0.0)
    by_key = (((0,), (0,)), ((), ()))
    votes = lax.dot_general(seen[...] * live, jnp.ones((rows, 1), jnp.float32), by_key)  # of 0s and 1s: exact
    return seen, votes > 0.5


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


def _heads(
    k: Kernel,
    n: Array,
    tokens: int,
    first: Array,
    size: int,
    keys: Heads,
    values: Heads,
    seen: Any,
    new: bool,
) -> None:
    """One step of the online softmax for every KV head."""
    r, m, rows = k.r, k.m, tokens * k.r.group_size

    def head(h: Array, _: None) -> None:
        factor: Any = r.scale
        if not new and r.k_scale != "none":
            factor = factor * m["k_scale"][h]
        logits = _dot(m["q"][h, :rows], keys(h), transposed=True) * factor
        if r.soft_cap is not None:
            logits = r.soft_cap * jnp.tanh(logits * (1.0 / r.soft_cap))
        if r.alibi:
            q = k.field(n, POSITION) + _row_tokens(k, tokens)
            distance = q - first - lax.broadcasted_iota(jnp.int32, (1, size), 1)
            logits -= _by_row(k, "slopes", h, tokens) * jnp.abs(distance).astype(jnp.float32)
        if seen is not None:
            logits = jnp.where(seen[...] > 0.0, logits, -jnp.inf)
        v = values(h)

        def weigh(p: Array) -> Array:
            weighed = _dot(p.astype(v.dtype), v)
            return weighed * m["v_scale"][h] if not new and r.v_scale != "none" else weighed

        state = online_softmax.update(_state(k, h, rows), logits, weigh)
        m["peak"][h, :rows] = state.peak[:, None]
        m["total"][h, :rows] = state.total[:, None]
        m["values"][h, :rows] = state.values

    lax.fori_loop(0, r.num_kv_heads, head, None)


def _state(k: Kernel, h: Array, rows: int) -> SoftmaxState:
    m = k.m
    return SoftmaxState(m["peak"][h, :rows][:, 0], m["total"][h, :rows][:, 0], m["values"][h, :rows])


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    # float32 means float32: a default-precision product would round its operands to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _by_row(k: Kernel, name: str, h: Array, tokens: int) -> Array:
    """A value of each query head, spread over the rows of KV head h; float32 [rows, 1]."""
    group = k.r.group_size
    row = lax.broadcasted_iota(jnp.int32, (tokens * group, 1), 0)
    in_group = row - _row_tokens(k, tokens) * group
    spread = jnp.full(row.shape, k.m[name][h * group])
    for g in range(1, group):
        spread = jnp.where(in_group == g, k.m[name][h * group + g], spread)
    return spread


def finish(k: Kernel, n: Array, tokens: int) -> None:
    """Divide by the denominators and lay the results out by token."""
    r, m, rows, slot = k.r, k.m, tokens * k.r.group_size, n & 1

    def head(h: Array, _: None) -> None:
        sinks = _by_row(k, "sinks", h, tokens)[:, 0] if r.sinks else None
        out, lse = online_softmax.finish(_state(k, h, rows), sinks)
        m["out"][slot, :tokens, h] = out.reshape(tokens, r.group_size, r.head_dim).astype(m["out"].dtype)
        if r.return_lse:
            # Padding rows have no sink either.
            m["lse"][slot, h, :rows] = jnp.where(k.field(n, REAL) != 0, lse, -jnp.inf)

    lax.fori_loop(0, r.num_kv_heads, head, None)
