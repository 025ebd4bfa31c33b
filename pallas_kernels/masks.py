"""The one mask rule: whether a query position sees a key position.

Every kernel, the XLA path and every backend decide visibility with `visible`, and skip key tiles with `key_span`. Both
are elementwise over broadcasting integer arrays, so that they also run inside a Pallas kernel body.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

FAR = 1 << 30  # a distance that no window reaches; positions stay below it, so sums do not overflow int32


def visible(
    q_pos: ArrayLike,
    k_pos: ArrayLike,
    *,
    seq_len: ArrayLike,
    causal: bool | ArrayLike,
    window: tuple[int | None, int | None] = (None, None),
    kv_start: ArrayLike | None = None,
    same_range: ArrayLike | None = None,
    tree: tuple[ArrayLike, ArrayLike] | None = None,
) -> Array:
    """True where the query at `q_pos` sees the key at `k_pos`; all positions count from the sequence's first token.

    Args:
      q_pos: query positions.
      k_pos: key positions, broadcast against `q_pos`.
      seq_len: keys at or past it are never seen.
      causal: static or an array; where true, keys after the query are hidden.
      window: (left, right) tokens besides the query itself; None is unlimited.
      kv_start: keys before it are never seen.
      same_range: true where query and key lie inside one bidirectional range; overrides causality and window.
      tree: (square_start, bit): where query and key both lie at or past `square_start`, `bit` replaces causality.
    """
    left, right = window
    distance = jnp.asarray(k_pos) - q_pos
    if causal is False:
        ok = None
    else:
        ok = distance <= 0 if causal is True else (distance <= 0) | ~jnp.asarray(causal)
    if tree is not None:
        square_start, bit = tree
        in_square = (jnp.asarray(q_pos) >= square_start) & (jnp.asarray(k_pos) >= square_start)
        # As logic, not as a select, for Mosaic TPU has none between masks (jax 0.12.0.1).
        inside = ~in_square | jnp.asarray(bit)
        ok = inside if ok is None else inside & (in_square | ok)
    if left is not None:
        ok = _and(ok, distance >= -left)
    if right is not None:
        ok = _and(ok, distance <= right)
    if same_range is not None and ok is not None:
        ok = ok | same_range
    ok = _and(ok, jnp.asarray(k_pos) < seq_len)
    return ok if kv_start is None else ok & (jnp.asarray(k_pos) >= kv_start)


def _and(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def key_span(
    q_first: ArrayLike,
    q_last: ArrayLike,
    *,
    seq_len: ArrayLike,
    causal: bool | ArrayLike,
    window: tuple[int | None, int | None] = (None, None),
    kv_start: ArrayLike | None = None,
    ranges: tuple[ArrayLike, ArrayLike] | None = None,
    square_start: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """The smallest [first, end) that holds every key that a query in [q_first, q_last] may see.

    Args:
      q_first: first query position of a tile.
      q_last: last query position of the tile (inclusive).
      seq_len: as in `visible`.
      causal: as in `visible`.
      window: as in `visible`.
      kv_start: as in `visible`.
      ranges: (begin, end) of the bidirectional ranges, on a last axis of their own.
      square_start: first position of the tree square: a tile that reaches it sees up to `seq_len`.
    """
    left, right = window
    q_first, q_last = jnp.asarray(q_first), jnp.asarray(q_last)
    first = jnp.zeros_like(q_first) if left is None else q_first - left
    reach = q_last + FAR if causal is False else jnp.where(causal, q_last, q_last + FAR)
    if square_start is not None:
        reach = jnp.where(q_last >= square_start, q_last + FAR, reach)
    if right is not None:
        reach = jnp.minimum(reach, q_last + right)
    end = reach + 1
    if ranges is not None:
        begin, stop = jnp.asarray(ranges[0]), jnp.asarray(ranges[1])
        touched = (begin <= q_last[..., None]) & (stop > q_first[..., None]) & (begin < stop)
        first = jnp.minimum(first, jnp.where(touched, begin, FAR).min(-1))
        end = jnp.maximum(end, jnp.where(touched, stop, 0).max(-1))
    first = jnp.maximum(first, 0 if kv_start is None else kv_start)
    return jnp.clip(first, 0, FAR), jnp.minimum(end, seq_len)


def common_span(
    q_first: ArrayLike,
    q_last: ArrayLike,
    *,
    seq_len: ArrayLike,
    causal: bool | ArrayLike,
    window: tuple[int | None, int | None] = (None, None),
    kv_start: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """The largest [first, end) whose keys every query in [q_first, q_last] sees; empty where end <= first.

    Key tiles inside it need no mask. Arguments as in `key_span`.
    """
    left, right = window
    q_first, q_last = jnp.asarray(q_first), jnp.asarray(q_last)
    first = jnp.zeros_like(q_last) if left is None else q_last - left
    reach = q_first + FAR if causal is False else jnp.where(causal, q_first, q_first + FAR)
    if right is not None:
        reach = jnp.minimum(reach, q_first + right)
    first = jnp.maximum(first, 0 if kv_start is None else kv_start)
    return jnp.maximum(first, 0), jnp.minimum(reach + 1, seq_len)


def in_same_range(q_pos: Array, k_pos: Array, begin: Array, end: Array) -> Array:
    """True where some range [begin[r], end[r]) holds both positions; `q_pos` and `k_pos` broadcast, r is the last axis."""
    q, k = q_pos[..., None], k_pos[..., None]
    return in_range(q, k, begin, end).any(-1)


def in_range(q_pos: ArrayLike, k_pos: ArrayLike, begin: ArrayLike, end: ArrayLike) -> Array:
    """True where the range [begin, end) holds both positions; elementwise."""
    q, k = jnp.asarray(q_pos), jnp.asarray(k_pos)
    return (q >= begin) & (q < end) & (k >= begin) & (k < end)
