"""The same decoder without cache, pages or shared code: what the paged one is checked against."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jattn.models.decoder import DecoderConfig, Params


@functools.partial(jax.jit, static_argnames="config")
def dense_forward(params: Params, config: DecoderConfig, tokens: Int[Array, " N"]) -> Float[Array, "N V"]:
    """Logits of every position of one sequence by plain causal softmax attention, in float32.

    Args:
      params: the weights; any dtype, computed with in float32.
      config: the model.
      tokens: one sequence. Being causal, it may be padded at its end with any tokens.
    """
    c = config
    n, dim = tokens.shape[0], c.head_dim
    group = c.num_heads // c.num_kv_heads
    matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def norm(x: Array, weight: Array) -> Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    factors = jnp.asarray(c.rope_factors or (1.0,) * (dim // 2))
    pair = jnp.arange(dim // 2)
    angle = jnp.arange(n)[:, None] * (jnp.exp(-math.log(c.rope_theta) * 2 * pair / dim) / factors)
    turn = lax.complex(jnp.cos(angle), jnp.sin(angle))
    first, second = (pair, pair + dim // 2) if c.rope_layout == "half" else (2 * pair, 2 * pair + 1)

    def rope(x: Array) -> Array:  # [heads, N, D]
        turned = lax.complex(x[..., first], x[..., second]) * turn
        return x.at[..., first].set(turned.real).at[..., second].set(turned.imag)

    def one_layer(x: Array, w: Params) -> tuple[Array, None]:
        w = jax.tree.map(lambda value: value.astype(jnp.float32), w)
        y = norm(x, w["attn_norm"])

        def heads(name: str) -> Array:
            z = matmul(y, w[name].T) + w.get(f"{name}_bias", 0.0)
            z = z.reshape(n, -1, dim).swapaxes(0, 1)
            return norm(z, w[f"{name}_norm"]) if f"{name}_norm" in w else z

        q, k, v = rope(heads("q")), rope(heads("k")), heads("v")
        k, v = jnp.repeat(k, group, 0), jnp.repeat(v, group, 0)
        logits = matmul(q, k.swapaxes(1, 2)) / math.sqrt(dim)
        weights = jax.nn.softmax(jnp.where(jnp.tri(n, dtype=bool), logits, -jnp.inf), -1)
        out = matmul(weights, v).swapaxes(0, 1).reshape(n, -1)
        x = x + matmul(out, w["o"].T) + w.get("o_bias", 0.0)
        y = norm(x, w["mlp_norm"])
        gate = matmul(y, w["gate"].T)
        return x + matmul(gate * jax.nn.sigmoid(gate) * matmul(y, w["up"].T), w["down"].T), None

    x, _ = lax.scan(one_layer, params["embed"][tokens].astype(jnp.float32), params["layers"])
    x = norm(x, params["norm"].astype(jnp.float32))
    last = params["embed"] if c.tie_word_embeddings else params["head"]
    return matmul(x, last.astype(jnp.float32).T)
