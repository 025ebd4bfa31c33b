"""The Markov head: the chain along a block, what training sees of it, and that the text stays the plain one."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jattn.dflash import draft, markov, train
from jattn.dflash.checkpoint import load_draft, save_draft
from jattn.dflash.proposers import DFlash
from jattn.dflash.speculate import Speculator
from jattn.dflash.train import Recipe
from jattn.dflash.train_draft import Plan
from jattn.generate import Sampling, generate
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = [pytest.mark.xdist_group("dflash_markov"), pytest.mark.slow]

TARGET = tiny.config("qwen3", num_layers=2, vocab_size=64, max_position_embeddings=64, eos_ids=())
STACK = dataclasses.replace(tiny_drafts.config().decoder, vocab_size=64)
CONFIG = tiny_drafts.config(decoder=STACK, block_size=5, markov_rank=6)
SHAPES = draft.weight_shapes(CONFIG)


def weights(size=3.0):
    """A draft whose head says something."""
    rng = np.random.default_rng(8)
    made = {n: jnp.asarray(rng.normal(size=SHAPES[n]) * size, jnp.float32) for n in SHAPES if n.startswith("markov")}
    return draft.init_params(CONFIG, jax.random.key(4)) | made


TABLES = tuple(np.asarray(tiny.params(TARGET)[name], float) for name in ("embed", "head"))


def changed_logits(w, row, token):
    """The logits of one row after a token, in float64."""

    def normed(x):
        return x / np.sqrt((x**2).mean() + 1e-6)

    inner = np.asarray(w["markov_before"], float) @ normed(TABLES[0][token]) + np.asarray(
        w["markov_row"], float
    ) @ normed(row)
    return TABLES[1] @ (row + np.asarray(w["markov_out"], float) @ (inner / (1 + np.exp(-inner))))


@pytest.mark.parametrize("count", [16, 64])
def test_the_chain_follows_its_own_choices(monkeypatch, count):
    """Every row's token is the best of its candidates, given the token that was chosen before it."""
    monkeypatch.setattr(markov, "CANDIDATES", count)
    rng, w, target = np.random.default_rng(0), weights(), tiny.params(TARGET)
    hidden = rng.normal(size=(3, 4, TARGET.hidden_size))
    noise, scale, anchor = rng.gumbel(size=(3, 4, 64)), np.array([1.0, 2.5, 0.7]), np.array([5, 63, 0])
    scores = scale[:, None, None] * (hidden @ TABLES[1].T) + noise
    top = [x.reshape(3, 4, -1) for x in markov.top(jnp.asarray(scores, jnp.float32).reshape(12, 64))]
    rows, factor = (jnp.asarray(x, jnp.float32) for x in (hidden, scale))
    came = markov.choose(w, target, rows, *top, jnp.asarray(anchor), factor)
    other = 0
    for s in range(3):
        before = anchor[s]
        for j in range(4):
            likely = np.argsort(-scores[s, j])[:count]
            given = scale[s] * changed_logits(w, hidden[s, j], before) + noise[s, j]
            before = likely[given[likely].argmax()]
            assert came[s, j] == before, (s, j)
            other += before != scores[s, j].argmax()
    assert other > 4  # the head matters here


@pytest.mark.parametrize("size", [9, 64, 1023, 1025, 5000])
def test_candidates_are_the_best_tokens(size):
    """Wherever they lie: side by side, in the last tokens of a vocabulary that spans do not divide, below zero."""
    rng = np.random.default_rng(size)
    scores = rng.normal(size=(6, size)).astype(np.float32)
    scores[1, -9:] += 50
    scores[2] -= 1000
    scores[3, : size // 2] = -np.inf
    scores[4] = np.arange(size)
    scores[5, :-1] = -np.inf
    value, token = (np.asarray(x) for x in jax.jit(markov.top)(scores))
    want = np.sort(scores, 1)[:, ::-1][:, : min(16, size)]
    np.testing.assert_array_equal(value, want)
    alive = np.isfinite(want)
    np.testing.assert_array_equal(np.take_along_axis(scores, token, 1)[alive], want[alive])
    assert token.max() < size
    assert all(len(set(t[a])) == a.sum() for t, a in zip(token, alive, strict=True))


def test_training_sees_the_change_that_the_loop_makes():
    rng, w, target = np.random.default_rng(1), weights(), tiny.params(TARGET)
    rows, before = rng.normal(size=(7, TARGET.hidden_size)), rng.integers(0, 64, 7)
    change = markov.change(w, jnp.asarray(rows, jnp.float32), target["embed"][before])
    want = [changed_logits(w, *pair) for pair in zip(rows, before, strict=True)]
    np.testing.assert_allclose((rows + np.asarray(change, float)) @ TABLES[1].T, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("alone", [0.5, 1.0])
def test_blocks_with_and_without_it_are_trained(alone):
    """The head learns from the blocks that use it, at first as if it were not there."""
    target, w = tiny.params(TARGET), draft.init_params(CONFIG, jax.random.key(4))
    tokens = jnp.asarray(np.random.default_rng(2).integers(2, 64, (2, 24)))
    example, key = (tokens, jnp.ones_like(tokens, bool)), jax.random.key(0)
    recipe = Recipe(anchors=8, alone=alone)

    def loss(w, config=CONFIG):
        return train.loss_and_right(w, config, target, TARGET, recipe, example, key)[0]

    value, slope = jax.jit(jax.value_and_grad(loss))(w)
    plain = {name: x for name, x in w.items() if not name.startswith("markov")}
    np.testing.assert_allclose(value, loss(plain, dataclasses.replace(CONFIG, markov_rank=0)), rtol=1e-6)
    assert bool(jnp.any(slope["markov_out"] != 0)) == (alone < 1)
    said = jax.jit(loss)(weights())
    assert (abs(float(said - value)) > 1e-3) == (alone < 1)


def test_the_text_is_the_plain_one():
    """Greedy and drawn, whatever the head says; and it changes what is drafted."""
    target, rng = tiny.params(TARGET), np.random.default_rng(3)
    prompts = [rng.integers(2, 64, n).tolist() for n in (3, 9, 1, 6)]
    samplings = [Sampling(20, heat, seed=5) for heat in (0.0, 1.0)]
    want = [generate(target, TARGET, prompts, s, num_slots=4, max_len=40) for s in samplings]
    kept = []
    for config in (CONFIG, dataclasses.replace(CONFIG, markov_rank=0)):
        sizes = {"num_slots": 4, "max_len": 40, "block_size": 5, "page_size": 4}
        one = Speculator(target, TARGET, DFlash(config), weights(), **sizes)
        for sampling, plain in zip(samplings, want, strict=True):
            assert [c.tokens for c in one.run(prompts, sampling)] == [c.tokens for c in plain]
        kept.append(one.stats.accepted.tolist())
    assert kept[0] != kept[1]


def test_the_head_alone_is_trained():
    """The draft beside it keeps its bits, and the loss falls."""
    target, recipe = tiny.params(TARGET), Recipe(anchors=8, batch=4, only_markov=True, soft=0.0)
    tokens = jnp.asarray(np.random.default_rng(6).integers(2, 64, (4, 1)) * 7 ** np.arange(12) % 62 + 2, jnp.int32)
    trained, kept = train.divide(draft.init_params(CONFIG, jax.random.key(4)), recipe)
    assert sorted(trained) == ["markov_before", "markov_out", "markov_row"] and "fc" in kept
    state = train.make_optimizer(recipe).init(trained)
    step, losses = train.make_step(CONFIG, TARGET, recipe, jnp.float32), []
    for i in range(40):
        many = (tokens, jnp.ones_like(tokens, bool), jnp.int32(i), jnp.float32(0.02))
        trained, state, loss, _ = step(trained, state, kept, target, *many)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0], losses
    with pytest.raises(ValueError, match="only_markov"):
        Plan(recipe=recipe, markov_rank=8).check()


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_it_is_kept_in_the_file(tmp_path, dtype):
    folder = save_draft(tmp_path / "draft", CONFIG, weights(), dtype)
    came, params = load_draft(folder, TARGET)
    assert came == CONFIG
    if dtype == np.float32:
        chex.assert_trees_all_equal(params, weights())
    step = np.abs(weights()["markov_out"]).max(1, keepdims=True) / 127
    assert (np.abs(params["markov_out"] - weights()["markov_out"]) <= 0.501 * step).all()
    plain = {name: x for name, x in weights().items() if not name.startswith("markov")}
    other = dataclasses.replace(CONFIG, markov_rank=0)
    alone = load_draft(save_draft(tmp_path / "alone", other, plain, ml_dtypes.bfloat16), TARGET)
    assert alone[0] == other and sorted(alone[1]) == sorted(plain)
