"""A Markov head: each drafted row corrected by the token right before it, so that a block's rows agree with each other.

The rows of a block are drafted side by side, each from all that may stand before it. If "of course" and "no problem" are
both likely, the best rows one by one are "of problem". DSpark (DeepSeek-AI, 2026; `markov_w1` and `markov_w2` in vLLM and
SGLang) adds logits that depend on the token before. Its tables of vocabulary x rank are larger than all of a small draft;
here they are the target's embedding and head through a low-rank map, and the row itself takes part, as in DSpark's gated
variant. Added to a row before the head:

    change(row, before) = out . silu(before_in . norm(embed(before)) + row_in . norm(row))

Only a few candidates of each row are compared, for every candidate before: the choice along the block is then a lookup,
and the draft stays one pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jattn.models import decoder
from jattn.models.decoder import Params

CANDIDATES = 16  # of each row; XLA's top-k has a kernel of its own up to 16
_SPAN = 64  # tokens of which `top` compares the best first
_EPS = 1e-6


def weight_shapes(hidden_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Shape of every weight; none without a head."""
    if not rank:
        return {}
    inward = (rank, hidden_size)
    return {"markov_before": inward, "markov_row": inward, "markov_out": inward[::-1]}


def _feature(params: Params, rows: Float[Array, "... E"], before: Float[Array, "... E"]) -> Float[Array, "... R"]:
    """What the change is a linear map of; leading axes broadcast."""
    one = jnp.ones(rows.shape[-1], rows.dtype)
    normed = (decoder.rms_norm(x.astype(rows.dtype), one, _EPS) for x in (before, rows))
    weights = (params["markov_before"], params["markov_row"])
    product = functools.partial(jnp.einsum, "...e,re->...r", precision=decoder.precision(rows))
    first, second = (product(x, w) for x, w in zip(normed, weights, strict=True))
    return jax.nn.silu(first + second)


def change(params: Params, rows: Float[Array, "... E"], before: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """What is added to rows, given the embedding of the token before each.

    Args:
      params: the draft's.
      rows: after the draft's last norm.
      before: the target's embedding of the tokens before.
    """
    feature = _feature(params, rows, before)
    return jnp.einsum("...r,er->...e", feature, params["markov_out"], precision=decoder.precision(rows))


def choose(
    params: Params,
    target: Params,
    rows: Float[Array, "S N E"],
    scores: Float[Array, "S N C"],
    candidates: Int[Array, "S N C"],
    anchor: Int[Array, " S"],
    scale: Float[Array, " S"],
) -> Int[Array, "S N"]:
    """One candidate of each row: the best after the one chosen before it.

    Args:
      params: the draft's.
      target: whose embedding and head are used.
      rows: after the draft's last norm.
      scores: of the candidates, without the head's change: logits times `scale`, and noise.
      candidates: tokens.
      anchor: the token before the first row.
      scale: of logits.
    """
    first = jnp.broadcast_to(anchor[:, None, None], (*candidates.shape[:1], 1, candidates.shape[2]))
    before = jnp.concatenate([first, candidates[:, :-1]], 1)
    feature = _feature(params, rows[:, :, None], decoder.embed(target, before))  # [S, N, C, R], by token before
    table = decoder.head_table(target)
    exact = functools.partial(jnp.einsum, precision=decoder.precision(rows))
    ends = exact("sice,er->sicr", table[candidates].astype(rows.dtype), params["markov_out"])
    changed = exact("sibr,sicr->sibc", feature, ends, preferred_element_type=jnp.float32)
    best = (scores[:, :, None] + scale[:, None, None, None] * changed).argmax(-1)  # [S, N, C]: after each before
    at, chosen = jnp.zeros((len(anchor), 1), best.dtype), []
    for row in range(best.shape[1]):
        at = jnp.take_along_axis(best[:, row], at, 1)
        chosen.append(jnp.take_along_axis(candidates[:, row], at, 1))
    return jnp.concatenate(chosen, 1)


def top(scores: Float[Array, "T V"]) -> tuple[Float[Array, "T C"], Int[Array, "T C"]]:
    """The candidates of each row and their scores.

    The best C tokens lie in the C spans with the best tokens. Two short rankings take an H200 a small part of the 170 us
    that XLA's top-k takes over a vocabulary of 49152 for 64 rows.
    """
    rows, size = scores.shape
    count = min(CANDIDATES, size)
    spans = jnp.pad(scores, ((0, 0), (0, -size % _SPAN)), constant_values=-jnp.inf).reshape(rows, -1, _SPAN)
    if spans.shape[1] <= count:
        value, token = lax.top_k(scores, count)
        return value, token.astype(jnp.int32)
    chosen = lax.top_k(spans.max(-1), count)[1]  # [T, C]
    inside = jnp.take_along_axis(spans, chosen[:, :, None], 1).reshape(rows, -1)
    value, at = lax.top_k(inside, count)
    token = jnp.take_along_axis(chosen, at // _SPAN, 1) * _SPAN + at % _SPAN
    return value, jnp.minimum(token, size - 1).astype(jnp.int32)  # padding is among them where too few are finite
