"""Training a draft (arXiv:2602.06036, section 4): random anchors, blocks of masks, a loss that decays along the block."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jattn.dflash import draft, markov
from jattn.dflash.draft import DraftConfig
from jattn.dflash.loss import cost_and_right
from jattn.dflash.teacher import taps_of
from jattn.models import decoder
from jattn.models.decoder import DecoderConfig, Params
from pallas_kernels import masks
from pallas_kernels.request import expect

Example = tuple[Array, Array]  # tokens [b, n], and which of them the loss counts [b, n]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a draft is trained; hashable."""

    steps: int = 8000
    batch: int = 16
    anchors: int = 96  # blocks a text and step; more of them share one pass of the target
    learning_rate: float = 5e-3
    warmup: float = 0.04  # share of the steps
    clip: float = 1.0
    weight_decay: float = 0.01
    decay: float = 4.0  # gamma: row j counts exp(-(j - 1) / gamma); 4, 5, 7 for blocks of 8, 10, 16
    focus: float = 0.8  # share of a row's weight that it loses if the draft has a row before it wrong
    soft: float = 0.9  # share of the loss against the target's distribution, not the token that it wrote
    alone: float = 0.25  # share of blocks without a Markov head's change, which gives the candidates; if there is one
    only_markov: bool = False  # leave all but the Markov head as it is: far less work, for one that is added later
    chunk: int = 4096  # rows of logits at once
    seed: int = 0

    def check(self) -> None:
        """Check the values.

        Raises:
          ValueError: one is out of range.
        """
        for name in ("steps", "batch", "anchors", "learning_rate", "decay", "chunk"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        for name in ("soft", "focus", "alone"):
            expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share in [0, 1]")


def draft_hidden(
    params: Params,
    config: DraftConfig,
    target: Params,
    tapped: Float[Array, "b n F E"],
    tokens: Int[Array, "b n"],
    anchors: Int[Array, "b A"],
) -> Float[Array, "b A B E"]:
    """The draft's rows of many blocks at once, as `draft.draft_block` has them one by one.

    A block sees the context strictly before its anchor, and itself, through the mask rule of the kernels.

    Args:
      params: the draft's.
      config: the draft.
      target: whose embedding is used.
      tapped: the target's taps of whole texts.
      tokens: the texts.
      anchors: position of each block's anchor.
    """
    (b, n), a, width, d = tokens.shape, anchors.shape[1], config.block_size, config.decoder
    fused = draft.fuse(params, config, tapped.reshape(b * n, *tapped.shape[2:]))
    at = jnp.tile(jnp.arange(n), b)
    k_context, v_context = draft.context_kv(draft.prepare(params), config, fused, at)  # [b * n, L, KVH, D]
    position = anchors[:, :, None] + jnp.arange(width)  # [b, A, B]
    first = jnp.take_along_axis(tokens, anchors, 1)[:, :, None]
    block = jnp.where(jnp.arange(width) == 0, first, config.mask_id).reshape(-1)
    x = draft.embed_block(params, config, target, block)
    cos_sin = decoder.rotary(d, position.reshape(-1))
    groups = (b, a, width, d.num_kv_heads, d.num_heads // d.num_kv_heads, d.head_dim)

    for index in range(d.num_layers):
        causal, window, start = draft.layer_mask(config, index, anchors[:, :, None, None])
        sees = functools.partial(masks.visible, position[:, :, :, None], causal=causal, window=window, kv_start=start)
        of_context = sees(jnp.arange(n), seq_len=anchors[:, :, None, None])
        of_block = sees(position[:, :, None, :], seq_len=(anchors + width)[:, :, None, None])

        def attention(q: Array, k: Array, v: Array, index: int = index, of: Any = (of_context, of_block)) -> Array:
            q = q.reshape(groups) * d.head_dim**-0.5
            kc, vc = (x[:, index].reshape(b, n, *x.shape[2:]) for x in (k_context, v_context))
            k, v = (x.reshape(b, a, width, *x.shape[1:]) for x in (k, v))
            product = functools.partial(jnp.einsum, precision=decoder.precision(q), preferred_element_type=jnp.float32)
            logits = [product("bajkgd,bnkd->bkgajn", q, kc), product("bajkgd,baikd->bkgaji", q, k)]
            logits = [jnp.where(mask[:, None, None], x, -jnp.inf) for mask, x in zip(of, logits, strict=True)]
            share = jax.nn.softmax(jnp.concatenate(logits, -1), -1).astype(v.dtype)
            out = product("bkgajn,bnkd->bajkgd", share[..., :n], vc)
            out += product("bkgaji,baikd->bajkgd", share[..., n:], v)
            return out.astype(v.dtype).reshape(-1, d.num_heads, d.head_dim)

        weights = jax.tree.map(lambda w, index=index: w[index], params["layers"])
        x = decoder.layer(weights, d, x, cos_sin, attention)
    return decoder.rms_norm(x, params["norm"], d.rms_norm_eps).reshape(b, a, width, -1)


def pick_anchors(key: Array, counted: Bool[Array, "b n"], count: int) -> tuple[Int[Array, "b A"], Bool[Array, "b A"]]:
    """Random counted positions with a counted token after them, and whether there were so many."""
    after = counted & jnp.pad(counted[:, 1:], ((0, 0), (0, 1)))
    order = jnp.where(after, jax.random.uniform(key, counted.shape), 2.0)
    anchors = jnp.argsort(order, 1)[:, :count]
    return anchors.astype(jnp.int32), jnp.take_along_axis(after, anchors, 1)


def loss_and_right(
    params: Params,
    config: DraftConfig,
    target: Params,
    target_config: DecoderConfig,
    recipe: Recipe,
    example: Example,
    key: Array,
) -> tuple[Array, tuple[Array, Array]]:
    """The loss, and by position how many blocks got all rows so far right, and how many have such a row.

    Args:
      params: the draft's, in the type to compute in.
      config: the draft.
      target: the target's, likewise.
      target_config: the target.
      recipe: of the training.
      example: texts and what counts.
      key: for the anchors.
    """
    tokens, counted = example
    n, width = tokens.shape[1], config.block_size
    tapped, hidden = taps_of(target, target_config, tokens, config.taps)
    tapped, hidden = lax.stop_gradient((tapped, hidden))
    anchors, real = pick_anchors(key, counted, recipe.anchors)
    rows = draft_hidden(params, config, target, tapped, tokens, anchors)[:, :, 1:]
    row = jnp.arange(1, width)
    at = anchors[:, :, None] + row  # each row predicts its own position
    inside = jnp.minimum(at, n - 1)
    exists = jnp.cumprod(_rows(counted, inside) & (at < n), 2).astype(bool) & real[:, :, None]
    weight = exists * jnp.exp(-(row - 1) / recipe.decay)
    given = _rows(hidden, inside - 1)  # where the target predicts that position
    if config.markov_rank:
        change = markov.change(params, rows, decoder.embed(target, _rows(tokens, inside - 1)))
        follows = jax.random.uniform(jax.random.fold_in(key, 1), anchors.shape) >= (
            0 if recipe.only_markov else recipe.alone
        )
        rows += jnp.where(follows[:, :, None, None], change, 0)

    parts = [x.reshape(-1, *x.shape[2:]) for x in (rows, given, _rows(tokens, inside), weight)]
    loss, right = cost_and_right(target, *parts, recipe.soft, recipe.focus, recipe.chunk)
    run = jnp.cumprod(right.reshape(exists.shape) & exists, 2)
    return loss, (run.sum((0, 1)), exists.sum((0, 1)))


def _rows(values: Array, at: Int[Array, "b A N"]) -> Array:
    return jax.vmap(lambda value, index: value[index])(values, at)


def rate_at(recipe: Recipe, done: float) -> float:
    """The learning rate when a share of the training is done: a straight warmup, then half a cosine."""
    if done < recipe.warmup:
        return recipe.learning_rate * done / recipe.warmup
    along = (done - recipe.warmup) / (1 - recipe.warmup)
    return recipe.learning_rate * (1 + math.cos(math.pi * min(along, 1.0))) / 2


def make_optimizer(recipe: Recipe) -> Any:
    """Muon (arXiv:2502.16982) for matrices, AdamW for the rest, clipped, at a rate of 1: the step multiplies them."""
    import optax

    decay = recipe.weight_decay
    muon = optax.contrib.muon(
        1.0,
        weight_decay=decay,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_weight_decay=decay,
        consistent_rms=0.2,  # the size of AdamW's changes, whatever the shape
        muon_weight_dimension_numbers=_matrices,
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), muon)


def _matrices(params: Params) -> Any:
    """For Muon: which weights are matrices, [..., out, in]; tables of rows by token are none."""
    import optax

    def axes(path: Any, leaf: Array) -> Any:
        vector = path[-1].key.endswith(("norm", "_bias", "_embedding", "embed", "head"))
        return None if vector else optax.contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(axes, params)


def divide(params: Params, recipe: Recipe) -> tuple[Params, Params]:
    """The weights that a recipe trains, and those that it leaves as they are."""
    if not recipe.only_markov:
        return params, {}
    kept = {name: x for name, x in params.items() if not name.startswith("markov")}
    return {name: x for name, x in params.items() if name not in kept}, kept


def make_step(
    config: DraftConfig, target_config: DecoderConfig, recipe: Recipe, dtype: Any
) -> Callable[..., tuple[Params, Any, Array, Array]]:
    """A jitted step: (params, state, kept, target, tokens, counted, step, rate) to (params, state, loss, run shares).

    `params` and `kept` are the two parts of `divide`.
    """
    import optax

    optimizer = make_optimizer(recipe)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params,
        state: Any,
        kept: Params,
        target: Params,
        tokens: Array,
        counted: Array,
        number: Array,
        rate: Array,
    ) -> tuple[Params, Any, Array, Array]:
        pick, anchor = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), number))
        which = jax.random.randint(pick, (recipe.batch,), 0, tokens.shape[0])

        def loss(params: Params) -> Any:
            narrow = jax.tree.map(lambda x: x.astype(dtype), kept | params)
            example = (tokens[which], counted[which])
            return loss_and_right(narrow, config, target, target_config, recipe, example, anchor)

        (value, (run, exists)), slope = jax.value_and_grad(loss, has_aux=True)(params)
        change, state = optimizer.update(slope, state, params)
        change = jax.tree.map(lambda x: x * rate, change)
        return optax.apply_updates(params, change), state, value, run / jnp.maximum(exists, 1)

    return step


def evaluate(
    params: Params,
    config: DraftConfig,
    target: Params,
    target_config: DecoderConfig,
    recipe: Recipe,
    examples: tuple[np.ndarray, np.ndarray],
    dtype: Any,
) -> tuple[float, np.ndarray]:
    """Loss and acceptance of held-out texts, at random anchors.

    Returns:
      (loss, share): share[j - 1] of the blocks in which the first j rows are the text's tokens. 1 + its sum is close to
      the acceptance length, if the target wrote the texts greedily and the draft is run so.
    """
    tokens, counted = examples
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    recipe = dataclasses.replace(recipe, focus=0.0, alone=0.0)  # every row counts, whatever the draft
    total, runs, exist = 0.0, np.zeros(config.block_size - 1), np.zeros(config.block_size - 1)
    starts = range(0, len(tokens), recipe.batch)
    for i in starts:
        part = (_padded(tokens, i, recipe.batch), _padded(counted, i, recipe.batch))
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), i)
        loss, (run, exists) = _measure(narrow, config, target, target_config, recipe, part, key)
        total, runs, exist = total + float(loss), runs + np.asarray(run), exist + np.asarray(exists)
    return total / len(starts), runs / np.maximum(exist, 1)


_measure = jax.jit(loss_and_right, static_argnames=("config", "target_config", "recipe"))


def _padded(array: np.ndarray, at: int, size: int) -> np.ndarray:
    part = array[at : at + size]
    return np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])


def save_progress(path: Path, params: Params, state: Any, step: int, seconds: float = 0.0) -> None:
    """Write what a training needs to go on; a half-written file never takes the place of a whole one."""
    leaves = jax.tree.leaves((params, state))
    half = path.with_suffix(".part.npz")
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(x) for i, x in enumerate(leaves)}
    np.savez(half, step=step, seconds=seconds, **arrays)
    half.replace(path)


def load_progress(path: Path, params: Params, state: Any) -> tuple[Params, Any, int, float]:
    """Read it back, with the steps and seconds behind it; the arguments give the structure.

    Raises:
      ValueError: the file is of another draft.
    """
    leaves, tree = jax.tree.flatten((params, state))
    with np.load(path) as file:
        came = [file[f"leaf{i}"] for i in range(len(file.files) - 2)]
        same = len(came) == len(leaves) and all(a.shape == b.shape for a, b in zip(came, leaves, strict=True))
        expect(same, "output", f"{path} of a draft of other sizes", "the one that you resume; name another --output")
        params, state = jax.tree.unflatten(tree, [jnp.asarray(x) for x in came])
        return params, state, int(file["step"]), float(file["seconds"])
