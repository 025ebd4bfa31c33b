"""The loss of drafted rows against a vocabulary, without ever holding all logits.

Rows pass the target's head in chunks. The gradient for a chunk's rows is taken while its logits are there, so that the
backward pass needs no second look at them: three products with the head a row, where recomputing needs five.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jattn.dflash import draft
from jattn.models import decoder
from jattn.models.decoder import Params


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cost_and_right(
    target: Params,
    mine: Float[Array, "R E"],
    theirs: Float[Array, "R E"],
    label: Int[Array, " R"],
    weight: Float[Array, " R"],
    soft: float,
    chunk: int,
) -> tuple[Float[Array, ""], Bool[Array, " R"]]:
    """Weighted cross-entropy of the draft's rows, and which of them have the label on top. Only `mine` has a gradient.

    Args:
      target: whose head is used.
      mine: the draft's rows.
      theirs: the target's rows that predict the same positions.
      label: the text's tokens there.
      weight: of each row.
      soft: share of the loss against the target's distribution instead of the label.
      chunk: rows of logits at once.
    """
    cost, right, _ = _in_chunks(target, mine, theirs, label, weight, soft, chunk, slope=False)
    return cost, right


def _in_chunks(
    target: Params, mine: Array, theirs: Array, label: Array, weight: Array, soft: float, chunk: int, *, slope: bool
) -> tuple[Array, Array, Array]:
    parts = (mine, theirs, label, weight)
    size, rows = min(chunk, len(mine)), len(mine)
    padded = [jnp.pad(x, ((0, -rows % size), *((0, 0),) * (x.ndim - 1))) for x in parts]
    chunks = tuple(x.reshape(-1, size, *x.shape[1:]) for x in padded)
    cost, right, slopes = lax.map(functools.partial(_chunk, target, soft, slope), chunks)
    return cost.sum(), right.reshape(-1)[:rows], slopes.reshape(len(slopes) * size, slopes.shape[2])[:rows]


def _chunk(target: Params, soft: float, slope: bool, part: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    mine, theirs, label, weight = part
    logits = draft.logits(target, mine)
    log_p = jax.nn.log_softmax(logits)
    cost = -(1 - soft) * jnp.take_along_axis(log_p, label[:, None], 1)[:, 0]
    want = (1 - soft) * (jnp.arange(logits.shape[1]) == label[:, None])
    if soft:
        given = jax.nn.softmax(draft.logits(target, theirs))
        cost -= soft * (given * log_p).sum(-1)
        want += soft * given
    right = logits.argmax(-1) == label
    if not slope:
        return (cost * weight).sum(), right, jnp.zeros((len(mine), 0), mine.dtype)
    head = target["head"] if "head" in target else target["embed"]
    change = ((jnp.exp(log_p) - want) * weight[:, None]).astype(head.dtype)
    back = jnp.einsum("rv,ve->re", change, head, precision=decoder.precision(change))
    return (cost * weight).sum(), right, back.astype(mine.dtype)


def _forward(
    target: Params, mine: Array, theirs: Array, label: Array, weight: Array, soft: float, chunk: int
) -> tuple[Any, Array]:
    cost, right, slope = _in_chunks(target, mine, theirs, label, weight, soft, chunk, slope=True)
    return (cost, right), slope


def _backward(soft: float, chunk: int, slope: Array, given: tuple[Array, Any]) -> tuple[Any, ...]:
    return None, (slope * given[0]).astype(slope.dtype), None, None, None


cost_and_right.defvjp(_forward, _backward)
