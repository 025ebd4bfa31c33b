"""The target as a teacher, densely and in batches: its taps over whole texts, and texts that it writes itself.

Training has no ragged batches, so it needs no pages: texts of one length side by side, plain attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jattn.generate import sample
from jattn.models import decoder
from jattn.models.decoder import DecoderConfig, Params
from jattn.models.tokenizer import TextTokenizer


def taps_of(
    params: Params, config: DecoderConfig, tokens: Int[Array, "b n"], taps: Sequence[int]
) -> tuple[Float[Array, "b n F E"], Float[Array, "b n E"]]:
    """Tapped layers' outputs, and the rows after the last norm.

    Args:
      params: the target's weights.
      config: the target.
      tokens: texts side by side; causal, so what comes after a text's end does not matter.
      taps: as in `decoder.forward`.
    """
    b, n = tokens.shape
    cos_sin = decoder.rotary(config, jnp.tile(jnp.arange(n), b))
    tap_ids = jnp.asarray(tuple(taps), jnp.int32)

    def attention(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.reshape(b, n, *x.shape[1:]) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b * n, *q.shape[2:])

    def one_layer(carry: tuple[Array, Array], scanned: tuple[Array, Params]) -> tuple[Any, None]:
        x, tapped = carry
        index, weights = scanned
        x = decoder.layer(weights, config, x, cos_sin, attention)
        return (x, jnp.where((tap_ids == index)[None, :, None], x[:, None], tapped)), None

    x = decoder.embed(params, tokens.reshape(-1))
    tapped = jnp.zeros((b * n, len(taps), x.shape[1]), x.dtype)
    (x, tapped), _ = lax.scan(one_layer, (x, tapped), (jnp.arange(config.num_layers), params["layers"]))
    hidden = decoder.rms_norm(x, params["norm"], config.rms_norm_eps)
    return tapped.reshape(b, n, len(taps), -1), hidden.reshape(b, n, -1)


@functools.partial(jax.jit, static_argnames=("config", "turn"))
def write(
    params: Params,
    config: DecoderConfig,
    prompts: Int[Array, "b n"],
    answering: Bool[Array, " b"],
    temperature: Float[Array, " b"],
    seed: Int[Array, " b"],
    turn: tuple[int, ...],
) -> Int[Array, "b n"]:
    """Let the model write: first, where it is its turn to ask, a user's question, then the answer.

    Args:
      params: the weights.
      config: the model.
      prompts: how each text begins, then -1.
      answering: the beginning already ends with the header of an answer.
      temperature: of answers; questions are drawn at 1.
      seed: of each text.
      turn: tokens from the end of a question to the header of the answer; the first ends a text, too.
    """
    b, n = prompts.shape
    header = jnp.asarray(turn)
    # Heads before tokens: the products below then take a layer's slice as it lies.
    shape = (config.num_layers, b, config.num_kv_heads, n, config.head_dim)
    dtype = params["embed"].dtype
    pools = (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        t, tokens, since, ended, pools = carry
        cos_sin = decoder.rotary(config, jnp.full(b, t))

        def one_layer(carry: tuple[Array, Any], scanned: tuple[Array, Params]) -> tuple[Any, None]:
            x, (keys, values) = carry
            index, weights = scanned

            def attention(q: Array, k: Array, v: Array) -> Array:
                nonlocal keys, values
                at = (index, 0, 0, t, 0)
                keys = lax.dynamic_update_slice(keys, k[None, :, :, None], at)
                values = lax.dynamic_update_slice(values, v[None, :, :, None], at)
                k, v = (lax.dynamic_index_in_dim(pool, index, 0, False) for pool in (keys, values))
                groups = q.reshape(b, config.num_kv_heads, -1, config.head_dim)
                product = functools.partial(
                    jnp.einsum, precision=decoder.precision(q), preferred_element_type=jnp.float32
                )
                logits = product("bkgd,bknd->bkgn", groups, k) * config.head_dim**-0.5
                share = jax.nn.softmax(jnp.where(jnp.arange(n) <= t, logits, -jnp.inf)).astype(v.dtype)
                return product("bkgn,bknd->bkgd", share, v).astype(q.dtype).reshape(q.shape)

            x = decoder.layer(weights, config, x, cos_sin, attention)
            return (x, (keys, values)), None

        x = decoder.embed(params, tokens[:, t])
        (x, pools), _ = lax.scan(one_layer, (x, pools), (jnp.arange(config.num_layers), params["layers"]))
        logits = decoder.head(params, decoder.rms_norm(x, params["norm"], config.rms_norm_eps))
        warmth = jnp.where(since >= len(turn), temperature, 1.0)
        drawn = sample(logits, warmth, seed, jnp.full(b, t + 1))
        forced = (since > 0) & (since < len(turn))  # inside the header
        drawn = jnp.where(forced, header[jnp.minimum(since, len(turn) - 1)], drawn)
        given = prompts[:, t + 1]
        free = given < 0
        ended = ended | (free & (since >= len(turn)) & (drawn == header[0]))
        since = jnp.where(free & ((since > 0) | (drawn == header[0])), since + 1, since)
        tokens = tokens.at[:, t + 1].set(jnp.where(free, drawn, given))
        return t + 1, tokens, since, ended, pools

    def going(carry: tuple[Any, ...]) -> Array:
        return (carry[0] < n - 1) & ~carry[3].all()

    since = jnp.where(answering, len(turn), 0)
    start = (jnp.int32(0), jnp.maximum(prompts, 0), since, jnp.zeros(b, bool), pools)
    return lax.while_loop(going, step, start)[1]


def chat_format(tokenizer: TextTokenizer) -> tuple[list[int], tuple[int, ...]]:
    """The tokens around a user's question: those before it, and those up to where the assistant answers."""
    a, b = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Why?", "Go on, tell me"))
    same = next(i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
    back = next(i for i, pair in enumerate(zip(a[::-1], b[::-1], strict=False)) if pair[0] != pair[1])
    return a[:same], tuple(a[len(a) - back :])


def answers_in(
    tokens: Int[np.ndarray, "b n"],
    prompt_len: Int[np.ndarray, " b"],
    answering: Bool[np.ndarray, " b"],
    turn: Sequence[int],
) -> Bool[np.ndarray, "b n"]:
    """Which tokens are an answer, its end token included.

    Args:
      tokens: of `write`.
      prompt_len: tokens that were given.
      answering: as in `write`.
      turn: as in `write`.
    """
    mask = np.zeros(tokens.shape, bool)
    for row, text, begin, direct in zip(mask, tokens, prompt_len, answering, strict=True):
        ends = begin + np.flatnonzero(text[begin:] == turn[0])
        if not direct:
            if not len(ends):
                continue  # the question has no end
            begin, ends = ends[0] + len(turn), ends[1:]
        row[begin : ends[0] + 1 if len(ends) else None] = True
    return mask
