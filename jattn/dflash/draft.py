"""DFlash's draft model (arXiv:2602.06036): a few decoder layers that fill a block of masks in one non-causal pass.

F taps of the target's residual stream are fused into one vector a token, which gives the keys and values of the context
in all draft layers at once. The block, an anchor token and N = block_size - 1 masks, attends to that context and to itself.
Row j predicts the token at its own position. Embedding and head are the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jattn.attention import attend
from jattn.cache import KVCache
from jattn.dflash import markov
from jattn.metadata import AttentionMetadata
from jattn.models import decoder
from jattn.models.decoder import DecoderConfig, Params
from pallas_kernels.request import expect

Convention = Literal["causal", "anchored", "anchored_causal", "bidirectional", "symmetric"]
CONVENTIONS: tuple[Convention, ...] = ("causal", "anchored", "anchored_causal", "bidirectional", "symmetric")


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The static side of a draft; hashable.

    Engines disagree about the window W (the query itself counts) of a sliding layer, for a query at q, an anchor at A:
    "causal" sees (q - W, q]; "anchored" sees [A - W, end of the block], "anchored_causal" the same up to q;
    "bidirectional" sees (q - W, end of the block]; "symmetric" sees (q - W, q + W).
    """

    decoder: DecoderConfig  # the stack; hidden size and vocabulary are the target's
    taps: tuple[int, ...]  # target layers, in the order of fc's columns
    mask_id: int
    num_target_layers: int
    block_size: int = 16  # as trained
    causal: bool = False  # of layers without a window
    markov_rank: int = 0  # of the head that makes the block's rows agree (`jattn.dflash.markov`); 0: none
    sliding: tuple[bool, ...] = ()  # of each layer; empty: none
    window: int | None = None
    convention: Convention = "causal"

    def __post_init__(self) -> None:
        """Check the values against each other."""
        d, layers = self.decoder, self.num_target_layers
        expect(len(self.taps) > 0, "taps", self.taps, "at least one layer of the target")
        inside = all(0 <= t < layers for t in self.taps)
        expect(inside, "taps", self.taps, f"layers of the target in [0, {layers}); this draft is for another target")
        ok = 0 <= self.mask_id < d.vocab_size
        expect(ok, "mask_id", self.mask_id, f"an id in [0, {d.vocab_size}), a token that texts never use")
        expect(self.markov_rank >= 0, "markov_rank", self.markov_rank, "a rank, or 0 for no Markov head")
        expect(self.block_size >= 2, "block_size", self.block_size, "at least 2: an anchor and one mask")
        expect(self.convention in CONVENTIONS, "convention", repr(self.convention), f"one of {', '.join(CONVENTIONS)}")
        if any(self.sliding):
            expect(len(self.sliding) == d.num_layers, "sliding", self.sliding, f"{d.num_layers} flags, one a layer")
            expect(self.window is not None and self.window > 0, "window", self.window, "a positive number of tokens")
            if self.convention == "bidirectional":
                need = f"at least the block of {self.block_size}: the block itself is never cut"
                expect(self.window is not None and self.window >= self.block_size, "window", self.window, need)


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Layers to tap, evenly from the second to the third from the last.

    Args:
      num_target_layers: of the target; at least 4 if `count` is more than 1.
      count: F.
    """
    expect(count > 0, "count", count, "a positive number of taps")
    if count == 1:
        return (num_target_layers // 2,)
    expect(num_target_layers >= 4, "num_target_layers", num_target_layers, "at least 4; name the taps of a smaller one")
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def check_fits(config: DraftConfig, target: DecoderConfig) -> None:
    """Check that a draft belongs to a target.

    Raises:
      ValueError: it cannot.
    """
    d, then = config.decoder, "take the draft that was trained for this model"
    pairs = (
        ("num_target_layers", config.num_target_layers, target.num_layers, "layers"),
        ("hidden_size", d.hidden_size, target.hidden_size, "features, those of the target"),
        ("vocab_size", d.vocab_size, target.vocab_size, "tokens, those of the target"),
    )
    for name, came, want, what in pairs:
        expect(came == want, f"draft {name}", came, f"{want} {what}; {then}")


def weight_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, those of a layer as "layers.name" and without the layer axis."""
    e = config.decoder.hidden_size
    shapes = decoder.weight_shapes(config.decoder)
    layers = {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    outer = {"fc": (e, len(config.taps) * e), "hidden_norm": (e,), "norm": (e,)}
    return outer | markov.weight_shapes(e, config.markov_rank) | layers


def init_params(config: DraftConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: norms 1, the rest of variance 1 / in, those that write to the residual stream smaller.

    A Markov head changes nothing at first.
    """
    params: Params = {"layers": {}}
    shapes = weight_shapes(config)
    for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        where, _, leaf = name.rpartition(".")
        shape = (config.decoder.num_layers, *shape) if where else shape
        scale = shape[-1] ** -0.5 * (0.5 if leaf in ("o", "down") else 1.0)
        value = jnp.ones(shape) if leaf.endswith("norm") else jax.random.normal(k, shape) * scale
        value = jnp.zeros(shape) if leaf.endswith("_bias") or leaf == "markov_out" else value
        (params["layers"] if where else params)[leaf] = value.astype(dtype)
    return params


def create_cache(config: DraftConfig, num_pages: int, page_size: int, dtype: Any = jnp.float32) -> KVCache:
    """The draft's own pool: `num_pages` pages a layer; its block table may be the target's."""
    return decoder.create_cache(config.decoder, num_pages, page_size, dtype)


def prepare(params: Params) -> Params:
    """Lay the weights of context keys and values side by side, and the layers apart, once and not in every step."""
    layers = params["layers"]
    both = jnp.concatenate([layers["k"], layers["v"]], 1)  # [L, 2 * KVH * D, E]
    ready = params | {"context": both.reshape(-1, both.shape[-1]), "each": decoder.unstack(params)["layers"]}
    if "k_bias" in layers:
        ready["context_bias"] = jnp.concatenate([layers["k_bias"], layers["v_bias"]], 1).reshape(-1)
    return ready


def fuse(params: Params, config: DraftConfig, tapped: Float[Array, "T F E"]) -> Float[Array, "T E"]:
    """One vector a token from the target's taps, in the order of `config.taps`."""
    flat = tapped.reshape(tapped.shape[0], -1).astype(params["fc"].dtype)
    return decoder.rms_norm(decoder.linear(flat, params["fc"]), params["hidden_norm"], config.decoder.rms_norm_eps)


def context_kv(
    params: Params, config: DraftConfig, fused: Float[Array, "T E"], positions: Int[Array, " T"]
) -> tuple[Float[Array, "T L KVH D"], Float[Array, "T L KVH D"]]:
    """Keys, normed and rotated, and values of the context in all layers: one matrix product.

    Args:
      params: of `prepare`.
      config: the draft.
      fused: of `fuse`.
      positions: of the tokens.
    """
    d, rows = config.decoder, fused.shape[0]
    both = decoder.linear(fused, params["context"], params.get("context_bias"))
    both = both.reshape(rows, d.num_layers, 2, d.num_kv_heads, d.head_dim)
    k, v = both[:, :, 0], both[:, :, 1]
    if d.qk_norm:
        k = decoder.rms_norm(k, params["layers"]["k_norm"][:, None], d.rms_norm_eps)
    turned = decoder.rotate(d, k.reshape(rows, -1, d.head_dim), decoder.rotary(d, positions))
    return turned.reshape(k.shape), v


def append_context(
    params: Params,
    config: DraftConfig,
    cache: KVCache,
    tapped: Float[Array, "T F E"],
    positions: Int[Array, " T"],
    slot_mapping: Int[Array, " T"],
) -> KVCache:
    """Write the context's keys and values of newly committed tokens, in all layers.

    Args:
      params: of `prepare`.
      config: the draft.
      cache: of `create_cache`; donate it.
      tapped: the target's taps of these tokens.
      positions: of the tokens.
      slot_mapping: counted within a layer; negative, as for rejected rows: not written.
    """
    size = cache.num_pages // config.decoder.num_layers * cache.page_size
    k, v = context_kv(params, config, fuse(params, config, tapped), positions)
    layer = jnp.arange(config.decoder.num_layers, dtype=jnp.int32) * size
    ok = (slot_mapping >= 0) & (slot_mapping < size)
    slots = jnp.where(ok[:, None], slot_mapping[:, None] + layer, -1)
    return cache.write(k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), slots.reshape(-1))


def layer_mask(
    config: DraftConfig, index: int, anchor: Int[Array, ...]
) -> tuple[bool, tuple[int | None, int | None], Int[Array, ...] | None]:
    """What a layer's queries see: (causal, window, kv_start), in the meaning of `jattn.paged_attention`.

    Args:
      config: the draft.
      index: the layer.
      anchor: position of the anchor, for each sequence or block.
    """
    if not (config.sliding and config.sliding[index]):
        return config.causal, (None, None), None
    w = config.window
    assert w is not None
    if config.convention == "causal":
        return True, (w - 1, None), None
    if config.convention == "bidirectional":
        return False, (w - 1, None), None
    if config.convention == "symmetric":
        return False, (w - 1, w - 1), None
    return config.convention == "anchored_causal", (None, None), jnp.maximum(anchor - w, 0)


def embed_block(params: Params, config: DraftConfig, target: Params, tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
    """Input of the block: the target's embeddings, or a draft's own vector for the mask."""
    x = decoder.embed(target, tokens).astype(params["fc"].dtype)
    if "mask_embedding" in params:
        x = jnp.where((tokens == config.mask_id)[:, None], params["mask_embedding"], x)
    return x


def draft_block(
    params: Params,
    config: DraftConfig,
    target: Params,
    cache: KVCache,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    metadata: AttentionMetadata,
    **options: Any,
) -> tuple[Float[Array, "T E"], KVCache]:
    """All draft layers over the blocks of a batch, whose context is in the cache.

    Args:
      params: of `prepare`.
      config: the draft.
      target: the target's parameters; only the embedding is used.
      cache: the draft's; the block's keys and values go to its slots as scratch. Donate it.
      tokens: anchor and masks of each block.
      positions: of the rows.
      metadata: lengths with the block; its causal flag is not used.
      **options: of `jattn.attend`.

    Returns:
      (hidden, cache): rows after the last norm, ready for the target's head. Row j of a block predicts its own position.
    """
    d, meta = config.decoder, metadata
    pages = cache.num_pages // d.num_layers
    cos_sin = decoder.rotary(d, positions)
    anchor = meta.seq_lens - jnp.diff(meta.query_start_loc)
    x = embed_block(params, config, target, tokens)
    for index, weights in enumerate(params["each"]):
        causal, window, start = layer_mask(config, index, anchor)
        here = decoder.of_layer(meta, index, pages, cache.page_size).replace(causal=causal, kv_start=start)

        def attention(q: Array, k: Array, v: Array, here: Any = here, window: Any = window) -> Array:
            nonlocal cache
            cache = cache.write(k, v, here.slot_mapping)
            return attend(q, cache, here, window=window, **options)

        x = decoder.layer(weights, d, x, cos_sin, attention)
    return decoder.rms_norm(x, params["norm"], d.rms_norm_eps), cache


def logits(target: Params, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
    """The target's head over the draft's rows, float32."""
    return decoder.head(target, hidden.astype(target["embed"].dtype))
