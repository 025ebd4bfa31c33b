"""A small random draft, and the same draft written out in float64 without pages."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jattn.dflash import draft
from jattn.dflash.draft import DraftConfig
from tests import tiny_models as tiny


def config(**changes) -> DraftConfig:
    """A draft of two layers for `tiny.config()`, whose heads are not the target's."""
    stack = tiny.config("qwen3", num_heads=4, num_kv_heads=1, head_dim=8, rope_theta=5000.0, eos_ids=())
    return DraftConfig(**{"decoder": stack, "taps": (1, 0), "mask_id": 1, "num_target_layers": 2} | changes)


@functools.cache
def params(c: DraftConfig, seed: int = 3):
    """Random float32 weights."""
    return draft.init_params(c, jax.random.key(seed))


def norm(x, weight, eps=1e-6):
    """RMSNorm."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions, theta):
    """Half-split rotation of [T, N, D]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def dense(weights, c: DraftConfig, embed, tapped, tokens, sees):
    """The block's rows after the last norm, and the context's keys and values.

    Args:
      weights: the draft's.
      c: the draft.
      embed: the target's table.
      tapped: [C, F, E] taps of the context, in the order of `c.taps`.
      tokens: the block.
      sees: from layer, query position and key position to whether it is seen.
    """
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    d, n = c.decoder, len(tapped)
    at = np.arange(n, n + len(tokens))
    fused = norm(np.asarray(tapped, np.float64).reshape(n, -1) @ w["fc"].T, w["hidden_norm"])
    x = np.asarray(embed, np.float64)[np.asarray(tokens)]
    context = []
    for i in range(d.num_layers):
        layer = {name: value[i] for name, value in w["layers"].items()}

        def kv(rows, positions, layer=layer):
            k, v = ((rows @ layer[name].T).reshape(len(rows), d.num_kv_heads, d.head_dim) for name in "kv")
            return rope(norm(k, layer["k_norm"]), positions, d.rope_theta), v

        context.append(kv(fused, np.arange(n)))
        y = norm(x, layer["attn_norm"])
        q = rope(norm((y @ layer["q"].T).reshape(len(at), -1, d.head_dim), layer["q_norm"]), at, d.rope_theta)
        k, v = (np.concatenate(pair) for pair in zip(context[-1], kv(y, at), strict=True))
        k, v = (np.repeat(a, d.num_heads // d.num_kv_heads, 1) for a in (k, v))
        logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d.head_dim)
        mask = np.array([[sees(i, p, s) for s in range(n + len(at))] for p in at])
        logits = np.where(mask, logits, -np.inf)
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", share, v).reshape(len(at), -1) @ layer["o"].T
        y = norm(x, layer["mlp_norm"])
        gate = y @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T
    return norm(x, w["norm"]), context
