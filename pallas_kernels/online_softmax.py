"""The online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867): one pass over key tiles, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class SoftmaxState(NamedTuple):
    """Of each row: the running maximum, the sum of exponentials below it, and their weighted sum of values."""

    peak: Array  # float32 [..., rows]
    total: Array  # float32 [..., rows]
    values: Array  # float32 [..., rows, D]


def empty(rows: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """The state before any key."""
    f32 = jnp.float32  # also where 64-bit types are on
    return SoftmaxState(jnp.full(rows, -jnp.inf, f32), jnp.zeros(rows, f32), jnp.zeros((*rows, head_dim), f32))


def update(
    state: SoftmaxState,
    logits: Array,
    weigh: Callable[[Array], Array],
    exp: Callable[[Array], Array] = jnp.exp,
) -> SoftmaxState:
    """Take in one tile of keys.

    Args:
      state: what the rows have seen.
      logits: float32 [..., rows, keys]; -inf where a key is hidden.
      weigh: maps probabilities [..., rows, keys] to their sum of values [..., rows, D].
      exp: the exponential in the base that the logits are in; `jnp.exp2` for logits times log2(e), whose peak is then
        in that unit too.
    """
    peak = jnp.maximum(state.peak, logits.max(-1))
    # -inf - -inf is NaN: rows that have seen nothing measure from 0, where every exponential is 0.
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    shrink = exp(state.peak - base)
    p = exp(logits - base[..., None])
    return SoftmaxState(peak, state.total * shrink + p.sum(-1), state.values * shrink[..., None] + weigh(p))


def merge(state: SoftmaxState, parts: SoftmaxState, exp: Callable[[Array], Array] = jnp.exp) -> SoftmaxState:
    """Take in states of the same rows over other keys, stacked on a leading axis; empty ones are neutral."""
    peak = jnp.maximum(state.peak, parts.peak.max(0))
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    shrink, weight = exp(state.peak - base), exp(parts.peak - base[None])
    values = state.values * shrink[..., None] + (parts.values * weight[..., None]).sum(0)
    return SoftmaxState(peak, state.total * shrink + (parts.total * weight).sum(0), values)


def finish(state: SoftmaxState, sinks: Array | None = None) -> tuple[Array, Array]:
    """(out, natural-log LSE); rows without a visible key give 0 and -inf, or the sink as their LSE.

    Args:
      state: after the last tile.
      sinks: raw logits that broadcast against the rows, each counted once in the denominator.
    """
    peak, total = state.peak, state.total
    if sinks is not None:
        peak = jnp.maximum(state.peak, sinks)
        base = jnp.where(peak == -jnp.inf, 0.0, peak)
        shrink = jnp.exp(state.peak - base)
        total = total * shrink + jnp.exp(sinks - base)
        state = state._replace(values=state.values * shrink[..., None])
    some = total > 0
    # total is NaN where a visible input is: let it through instead of hiding it as an empty row.
    some = some | jnp.isnan(total)
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, jnp.where(peak == -jnp.inf, 0.0, peak) + jnp.log(safe), -jnp.inf)
    return jnp.where(some[..., None], state.values / safe[..., None], 0.0), lse
