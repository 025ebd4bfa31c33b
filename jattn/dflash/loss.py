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


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def cost_and_right(
    target: Params,
    mine: Float[Array, "A N E"],
    theirs: Float[Array, "A N E"],
    label: Int[Array, "A N"],
    weight: Float[Array, "A N"],
    soft: float,
    focus: float,
    chunk: int,
) -> tuple[Float[Array, ""], Bool[Array, "A N"]]:
    """Mean cross-entropy of the draft's rows, and which of them have the label on top. Only `mine` has a gradient.

    Args:
      target: whose head is used.
      mine: the draft's rows, those of a block side by side.
      theirs: the target's rows that predict the same positions.
      label: the text's tokens there.
      weight: of each row.
      soft: share of the loss against the target's distribution instead of the label.
      focus: share of a row's weight that it loses if a row before it in its block is wrong: such a row would be
        thrown away whatever it holds.
      chunk: rows of logits at once.
    """
    cost, right, _ = _in_chunks(target, mine, theirs, label, weight, soft, focus, chunk, slope=False)
    return cost, right


def _in_chunks(
    target: Params,
    mine: Array,
    theirs: Array,
    label: Array,
    weight: Array,
    soft: float,
    focus: float,
    chunk: int,
    *,
    slope: bool,
) -> tuple[Array, Array, Array]:
    parts, blocks = (mine, theirs, label, weight), len(mine)
    size = min(max(chunk // mine.shape[1], 1), blocks)
    padded = [jnp.pad(x, ((0, -blocks % size), *((0, 0),) * (x.ndim - 1))) for x in parts]
    chunks = tuple(x.reshape(-1, size, *x.shape[1:]) for x in padded)
    cost, weight, right, slopes = lax.map(functools.partial(_chunk, target, soft, focus, slope), chunks)
    total = jnp.maximum(weight.sum(), 1e-6)
    right, slopes = (x.reshape(len(x) * size, *x.shape[2:])[:blocks] for x in (right, slopes))
    return cost.sum() / total, right, slopes / total.astype(slopes.dtype)


def _chunk(target: Params, soft: float, focus: float, slope: bool, part: tuple[Array, ...]) -> tuple[Array, ...]:
    mine, theirs, label, weight = part
    logits_of = lambda x: draft.logits(target, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)  # noqa: E731
    logits = logits_of(mine)
    log_p = jax.nn.log_softmax(logits)
    cost = -(1 - soft) * jnp.take_along_axis(log_p, label[..., None], -1)[..., 0]
    want = (1 - soft) * (jnp.arange(logits.shape[-1]) == label[..., None])
    if soft:
        given = jax.nn.softmax(logits_of(theirs))
        cost -= soft * (given * log_p).sum(-1)
        want += soft * given
    right = logits.argmax(-1) == label
    before = jnp.cumprod(right, 1)[:, :-1]
    weight = weight * (1 - focus * jnp.pad(1 - before, ((0, 0), (1, 0))))
    cost, total = (cost * weight).sum(), weight.sum()
    if not slope:
        return cost, total, right, jnp.zeros((*mine.shape[:-1], 0), mine.dtype)
    head = decoder.head_table(target)
    change = ((jnp.exp(log_p) - want) * weight[..., None]).astype(head.dtype)
    back = jnp.einsum("anv,ve->ane", change, head, precision=decoder.precision(change))
    return cost, total, right, back.astype(mine.dtype)


def _forward(
    target: Params, mine: Array, theirs: Array, label: Array, weight: Array, soft: float, focus: float, chunk: int
) -> tuple[Any, Array]:
    cost, right, slope = _in_chunks(target, mine, theirs, label, weight, soft, focus, chunk, slope=True)
    return (cost, right), slope


def _backward(soft: float, focus: float, chunk: int, slope: Array, given: tuple[Array, Any]) -> tuple[Any, ...]:
    return None, (slope * given[0]).astype(slope.dtype), None, None, None


cost_and_right.defvjp(_forward, _backward)
