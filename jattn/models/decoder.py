"""One decoder for Llama, SmolLM2, Qwen2 and Qwen3, as pure functions over a pytree of stacked weights.

V vocabulary, E hidden size, F intermediate size, L layers; the rest as in the package docstring. Weights lie as in
checkpoints, [out, in]. The layers' weights are stacked on a leading axis L, and `forward` scans over it. All layers share
one page pool: layer `i` of `P` pages a layer owns pages `[i * P, (i + 1) * P)`, so the scan carries the pool and writes it
in place where a cache for each layer would be sliced and copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jattn.attention import attend
from jattn.cache import KVCache
from jattn.metadata import AttentionMetadata
from pallas_kernels.request import describe, expect

Params = dict[str, Any]  # {"embed", "norm", ["head"], "layers": {name: [L, ...]}}; or "layers" of `unstack`
Attention = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The static side of a model; hashable."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # not hidden_size / num_heads in general
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None  # [D/2]: each rotary frequency is divided by its factor
    rope_layout: Literal["half", "interleaved"] = "half"
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the sizes against each other."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            expect(getattr(self, field) > 0, field, getattr(self, field), "a positive number")
        heads = f"{self.num_heads} heads over {self.num_kv_heads} KV heads"
        expect(self.num_heads % self.num_kv_heads == 0, "num_heads", heads, "a multiple of the KV heads")
        expect(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "a positive even number")
        expect(self.rope_layout in ("half", "interleaved"), "rope_layout", self.rope_layout, "'half' or 'interleaved'")
        if self.rope_factors is not None:
            given = len(self.rope_factors)
            expect(given == self.head_dim // 2, "rope_factors", f"{given} factors", f"{self.head_dim // 2}, D / 2")


def llama3_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> tuple[float, ...]:
    """Llama 3.1's divisors of the rotary frequencies: none for short waves, `factor` for long ones, a ramp between.

    Args:
      head_dim: D.
      theta: base of the frequencies.
      factor: divisor of the longest waves.
      low: waves longer than `original / low` are divided in full.
      high: waves shorter than `original / high` are kept.
      original: context length of the first training.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequency / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return tuple(float(x) for x in 1 / (keep + (1 - keep) / factor))


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, those of a layer as "layers.name" and without the layer axis."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden_size,),
        "q": (q, c.hidden_size),
        "k": (kv, c.hidden_size),
        "v": (kv, c.hidden_size),
        "o": (c.hidden_size, q),
        "mlp_norm": (c.hidden_size,),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    if c.attention_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.output_bias:
        layer["o_bias"] = (c.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    return shapes | {f"layers.{name}": shape for name, shape in layer.items()}


def make_params(config: DecoderConfig, weight: Callable[[str, tuple[int, ...]], Any], dtype: Any) -> Params:
    """The parameter pytree from a function of a weight's name (as in `weight_shapes`) and full, stacked shape."""
    params: Params = {"layers": {}}
    for name, shape in weight_shapes(config).items():
        where, _, leaf = name.rpartition(".")
        if where:
            shape = (config.num_layers, *shape)
        (params["layers"] if where else params)[leaf] = jnp.asarray(weight(name, shape), dtype)
    return params


def unstack(params: Params) -> Params:
    """The same weights, each layer's in arrays of their own, which `forward` takes as well.

    On a GPU, XLA copies a layer's weights out of the stack before it multiplies with them: a decode step then moves three
    times the bytes (seen in what XLA 0.11 and 0.12 compile for an H200). Programs are longer to compile without the stack.
    """
    stacked = params["layers"]
    if not isinstance(stacked, dict):
        return params
    count = len(next(iter(stacked.values())))
    return params | {"layers": [{name: w[i] for name, w in stacked.items()} for i in range(count)]}


def init_params(config: DecoderConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: norms near 1, the rest of variance 1 / in."""
    keys = iter(jax.random.split(key, len(weight_shapes(config))))

    def weight(name: str, shape: tuple[int, ...]) -> Array:
        noise = jax.random.normal(next(keys), shape)
        if name.endswith("norm"):
            return 1 + 0.1 * noise
        return 0.1 * noise if name.endswith("_bias") else noise * shape[-1] ** -0.5

    return make_params(config, weight, dtype)


def create_cache(
    config: DecoderConfig, num_pages: int, page_size: int, dtype: Any = jnp.float32, **options: Any
) -> KVCache:
    """The pool of all layers: `num_pages` pages for each.

    Args:
      config: the model.
      num_pages: pages a layer; page ids in `forward`'s metadata count these.
      page_size: tokens a page.
      dtype: as in `KVCache.create`.
      **options: layout, k_scale and v_scale of `KVCache.create`.
    """
    expect(num_pages > 0, "num_pages", num_pages, "a positive number of pages")
    total = config.num_layers * num_pages
    return KVCache.create(total, page_size, config.num_kv_heads, config.head_dim, dtype, **options)


def embed(params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
    """Rows of the embedding table."""
    return params["embed"][tokens]


def head_table(params: Params) -> Float[Array, "V E"]:
    """The head's weights: the embedding where they are tied."""
    return params["head"] if "head" in params else params["embed"]


def head(params: Params, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
    """Logits in float32 of rows that passed the last norm; give only the rows that you need."""
    weight = head_table(params)
    return jnp.einsum("re,ve->rv", hidden, weight, precision=precision(hidden), preferred_element_type=jnp.float32)


def rotary(config: DecoderConfig, positions: Int[Array, " T"]) -> tuple[Float[Array, "T D/2"], Float[Array, "T D/2"]]:
    """Cosine and sine of the rotary angles, float32."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope_factors is not None:
        frequency = frequency / np.asarray(config.rope_factors)
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequency, jnp.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(config: DecoderConfig, x: Float[Array, "T N D"], cos_sin: tuple[Array, Array]) -> Float[Array, "T N D"]:
    """Rotate the pairs of each head: (i, i + D/2) in the half layout, (2i, 2i + 1) in the interleaved one."""
    cos, sin = (a[:, None, :] for a in cos_sin)
    wide = x.astype(jnp.float32)
    if config.rope_layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return turned.astype(x.dtype)


def rms_norm(x: Float[Array, "... N"], weight: Float[Array, " N"], eps: float) -> Float[Array, "... N"]:
    """RMSNorm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def precision(x: Array) -> lax.Precision | None:
    """float32 means float32: accelerators round the operands of a default-precision product."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def linear(x: Float[Array, "T in"], weight: Float[Array, "out in"], bias: Array | None = None) -> Float[Array, "T out"]:
    """`x @ weight.T + bias`."""
    y = jnp.einsum("ti,oi->to", x, weight, precision=precision(x))
    return y if bias is None else y + bias


def project_kv(
    weights: Params, config: DecoderConfig, x: Float[Array, "T E"], cos_sin: tuple[Array, Array]
) -> tuple[Float[Array, "T KVH D"], Float[Array, "T KVH D"]]:
    """Keys, as they go to the cache (normed and rotated), and values of one layer."""
    shape = (x.shape[0], config.num_kv_heads, config.head_dim)
    k = linear(x, weights["k"], weights.get("k_bias")).reshape(shape)
    v = linear(x, weights["v"], weights.get("v_bias")).reshape(shape)
    if config.qk_norm:
        k = rms_norm(k, weights["k_norm"], config.rms_norm_eps)
    return rotate(config, k, cos_sin), v


def layer(
    weights: Params,
    config: DecoderConfig,
    x: Float[Array, "T E"],
    cos_sin: tuple[Array, Array],
    attention: Attention,
) -> Float[Array, "T E"]:
    """One layer on the residual stream.

    Args:
      weights: this layer's, without the layer axis.
      config: the model.
      x: residual stream.
      cos_sin: from `rotary`.
      attention: from q [T, H, D], k and v [T, KVH, D] to [T, H, D].
    """
    rows = x.shape[0]
    y = rms_norm(x, weights["attn_norm"], config.rms_norm_eps)
    q = linear(y, weights["q"], weights.get("q_bias")).reshape(rows, config.num_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.rms_norm_eps)
    k, v = project_kv(weights, config, y, cos_sin)
    out = attention(rotate(config, q, cos_sin), k, v).reshape(rows, -1)
    x = x + linear(out, weights["o"], weights.get("o_bias"))
    y = rms_norm(x, weights["mlp_norm"], config.rms_norm_eps)
    return x + linear(jax.nn.silu(linear(y, weights["gate"])) * linear(y, weights["up"]), weights["down"])


def of_layer(metadata: AttentionMetadata, index: Any, pages: int, page_size: int) -> AttentionMetadata:
    """Metadata of one layer of a shared pool with `pages` pages a layer; ids outside a layer's pages become -1."""
    table, slots = metadata.block_table, metadata.slot_mapping
    size = pages * page_size
    return metadata.replace(
        block_table=jnp.where((table >= 0) & (table < pages), table + index * pages, -1),
        slot_mapping=jnp.where((slots >= 0) & (slots < size), slots + index * size, -1),
    )


def forward(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    taps: Sequence[int] = (),
    **options: Any,
) -> tuple[Float[Array, "T E"], KVCache, Float[Array, "T taps E"]]:
    """All layers over one ragged step: writes this step's keys and values, then attends.

    Args:
      params: the weights.
      config: the model.
      tokens: one row for each query; padding rows hold any valid id.
      positions: position of each row in its sequence.
      cache: of `create_cache`; donate it.
      metadata: the step's lengths and pages, page ids counted within a layer.
      taps: layers whose output, the residual stream after that layer and before any norm, is returned too.
      **options: of `jattn.attend` (implementation, batch_invariant, ...).

    Returns:
      (hidden, cache, tapped): rows after the last norm, ready for `head`; the cache; tapped rows in the order of `taps`.

    Raises:
      ValueError: the cache is not one for this model, or a tap is no layer of it.
    """
    pages, rest = divmod(cache.num_pages, config.num_layers)
    expect(rest == 0, "cache", describe(cache.k), f"a multiple of {config.num_layers} pages: see create_cache")
    expect(all(0 <= t < config.num_layers for t in taps), "taps", tuple(taps), f"layers in [0, {config.num_layers})")
    cos_sin = rotary(config, positions)
    tap_ids = jnp.asarray(tuple(taps), jnp.int32)

    def one_layer(carry: tuple[Array, KVCache, Array], scanned: tuple[Any, Params]) -> tuple[Any, None]:
        x, cache, tapped = carry
        index, weights = scanned
        here = of_layer(metadata, index, pages, cache.page_size)

        def attention(q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = cache.write(k, v, here.slot_mapping)
            return attend(q, cache, here, **options)

        x = layer(weights, config, x, cos_sin, attention)
        if taps:
            tapped = jnp.where((tap_ids == index)[None, :, None], x[:, None], tapped)
        return (x, cache, tapped), None

    x = embed(params, tokens)
    tapped = jnp.zeros((x.shape[0], len(taps), x.shape[1]), x.dtype)
    if isinstance(params["layers"], dict):
        layers = (jnp.arange(config.num_layers), params["layers"])
        (x, cache, tapped), _ = lax.scan(one_layer, (x, cache, tapped), layers)
    else:
        for numbered in enumerate(params["layers"]):
            (x, cache, tapped), _ = one_layer((x, cache, tapped), numbered)
    return rms_norm(x, params["norm"], config.rms_norm_eps), cache, tapped
