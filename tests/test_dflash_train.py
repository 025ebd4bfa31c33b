"""Training: the same blocks as the paged draft's, the right mask, a loss that falls, and training that resumes."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import AttentionMetadata
from jattn.dflash import draft, rows, teacher, train, train_draft
from jattn.dflash.loss import cost_and_right
from jattn.dflash.train import Recipe
from jattn.generate import Sampling, generate
from jattn.models.decoder import create_cache, forward
from jattn.models.loaded import LoadedModel
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = [pytest.mark.xdist_group("dflash_train"), pytest.mark.slow]

TARGET = tiny.config("qwen3", num_layers=2, vocab_size=64, max_position_embeddings=64, eos_ids=())
STACK = tiny_drafts.config().decoder
LENGTH = 24


def config(**changes):
    import dataclasses

    stack = dataclasses.replace(STACK, vocab_size=64)
    return tiny_drafts.config(decoder=stack, block_size=4, **changes)


@functools.cache
def texts():
    """Two texts, their taps from the paged forward, and its rows."""
    tokens = np.random.default_rng(0).integers(2, 64, (2, LENGTH)).astype(np.int32)
    meta = AttentionMetadata.from_lengths([LENGTH] * 2, [LENGTH] * 2, [[0], [1]], page_size=LENGTH)
    at = jnp.tile(jnp.arange(LENGTH), 2)
    cache = create_cache(TARGET, 2, LENGTH)
    hidden, _, tapped = forward(
        tiny.params(TARGET), TARGET, jnp.asarray(tokens).reshape(-1), at, cache, meta, taps=(1, 0)
    )
    return tokens, tapped.reshape(2, LENGTH, 2, -1), hidden.reshape(2, LENGTH, -1)


def test_the_dense_teacher_is_the_paged_target():
    tokens, tapped, hidden = texts()
    mine, rows_ = teacher.taps_of(tiny.params(TARGET), TARGET, jnp.asarray(tokens), (1, 0))
    np.testing.assert_allclose(mine, tapped, rtol=0, atol=3e-5)
    np.testing.assert_allclose(rows_, hidden, rtol=0, atol=3e-5)


@pytest.mark.parametrize("changes", [{}, {"sliding": (True, False), "window": 5, "convention": "anchored"}])
def test_training_blocks_are_those_of_the_paged_draft(changes):
    """Every block of every text, anchors closer than a block too, against one paged draft each."""
    c, (tokens, tapped, _) = config(**changes), texts()
    target, weights = tiny.params(TARGET), tiny_drafts.params(config())
    anchors = jnp.asarray([[1, 2, 9, 20], [0, 5, 6, 13]])
    came = jax.jit(train.draft_hidden, static_argnums=1)(weights, c, target, tapped, jnp.asarray(tokens), anchors)
    ready, table = draft.prepare(weights), jnp.arange(8)[:, None]
    flat = anchors.reshape(-1)
    cache = draft.create_cache(c, 8, LENGTH + 4)
    context = rows.pack(jnp.zeros_like(flat), flat, 8 * LENGTH)
    text = jnp.repeat(tapped, 4, 0)[context.seq, context.position]
    cache = draft.append_context(ready, c, cache, text, context.position, rows.slots(context, table, LENGTH + 4))
    r = rows.pack(flat, jnp.full(8, 4), 32)
    meta = rows.metadata(r, table, LENGTH + 4, causal=True, max_query_len=4)
    first = jnp.take_along_axis(jnp.asarray(tokens), anchors, 1).reshape(-1)
    block = jnp.where(r.offset == 0, first[r.seq], c.mask_id)
    want, _ = draft.draft_block(ready, c, target, cache, block, r.position, meta)
    np.testing.assert_allclose(came.reshape(32, -1), want, rtol=0, atol=5e-5)


def test_the_loss_counts_only_what_it_should():
    c, (tokens, _, _) = config(), texts()
    target, weights = tiny.params(TARGET), tiny_drafts.params(config())
    counted = np.zeros((2, LENGTH), bool)
    counted[0, 5:9] = True  # anchors 5, 6, 7 with 3, 2, 1 rows
    recipe = Recipe(anchors=6, batch=2, chunk=7)
    measure = jax.jit(train.loss_and_right, static_argnums=(1, 3, 4))
    loss, (run, exists) = measure(
        weights, c, target, TARGET, recipe, (jnp.asarray(tokens), jnp.asarray(counted)), jax.random.key(0)
    )
    assert exists.tolist() == [3, 2, 1] and np.isfinite(loss) and (np.diff(run) <= 0).all()
    changed = tokens.copy()
    changed[0, 9:] = 3
    changed[1] = 3
    again, _ = measure(
        weights, c, target, TARGET, recipe, (jnp.asarray(changed), jnp.asarray(counted)), jax.random.key(0)
    )
    np.testing.assert_allclose(again, loss, rtol=1e-5)
    none, _ = measure(
        weights, c, target, TARGET, recipe, (jnp.asarray(tokens), jnp.asarray(counted) & False), jax.random.key(0)
    )
    assert none == 0


@pytest.mark.parametrize(("soft", "focus"), [(0.0, 0.0), (0.4, 0.0), (0.4, 0.8), (1.0, 1.0)])
def test_the_losss_own_gradient(soft, focus):
    """In chunks, with its gradient beside it, as the plain formula gives by differentiation."""
    rng = np.random.default_rng(2)
    target, blocks, n = tiny.params(TARGET), 11, 3
    mine, theirs = (jnp.asarray(rng.normal(size=(blocks, n, TARGET.hidden_size)), jnp.float32) for _ in range(2))
    logits_of = jax.vmap(lambda x: draft.logits(target, x))
    likely = np.asarray(logits_of(mine).argmax(-1))
    label = np.where(rng.random((blocks, n)) < 0.6, likely, rng.integers(0, 64, (blocks, n)))
    weight = jnp.asarray(rng.random((blocks, n)), jnp.float32)
    before = np.cumprod(np.pad(label == likely, ((0, 0), (1, 0)), constant_values=True), 1)[:, :n]
    share = weight * np.where(before, 1, 1 - focus)
    assert 0 < before[:, 1:].mean() < 1

    def plain(mine):
        log_p = jax.nn.log_softmax(logits_of(mine))
        hard = jnp.take_along_axis(log_p, label[..., None], -1)[..., 0]
        given = (jax.nn.softmax(logits_of(theirs)) * log_p).sum(-1)
        return -(((1 - soft) * hard + soft * given) * share).sum() / share.sum()

    def mine_in_chunks(mine):
        return cost_and_right(target, mine, theirs, jnp.asarray(label), weight, soft, focus, 4 * n)

    (cost, right), slope = jax.value_and_grad(mine_in_chunks, has_aux=True)(mine)
    want, want_slope = jax.value_and_grad(plain)(mine)
    np.testing.assert_allclose([cost, mine_in_chunks(mine)[0]], [want, want], rtol=1e-5)
    np.testing.assert_allclose(slope, want_slope, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(right, label == likely)


def test_the_rate_rises_and_falls():
    recipe = Recipe(learning_rate=2.0, warmup=0.1)
    rates = [train.rate_at(recipe, x) for x in (0.0, 0.05, 0.1, 0.55, 1.0, 1.1)]
    np.testing.assert_allclose(rates, [0, 1, 2, 1, 0, 0], atol=1e-12)


def test_it_learns_and_resumes(tmp_path):
    """Texts that count upwards: learnt in some steps; stopped half way and resumed, the same bits."""
    c, target = config(), tiny.params(TARGET)
    tokens = jnp.asarray((np.arange(LENGTH) + np.arange(16)[:, None]) % 60 + 2, jnp.int32)
    counted = jnp.ones(tokens.shape, bool)
    recipe = Recipe(steps=120, batch=8, anchors=16, learning_rate=8e-3, soft=0.0)
    step = train.make_step(c, TARGET, recipe, jnp.float32)

    def start():
        params = draft.init_params(c, jax.random.key(0))
        return params, train.make_optimizer(recipe).init(params)

    params, state = start()
    losses = []
    for i in range(120):
        rate = train.rate_at(recipe, i / 120)
        params, state, loss, share = step(params, state, {}, target, tokens, counted, jnp.int32(i), jnp.float32(rate))
        losses.append(float(loss))
        if i == 59:
            train.save_progress(tmp_path / "p.npz", params, state, 60)
    assert losses[0] > 3.5 and losses[-1] < 1 and share.min() > 0.6, (losses[0], losses[-1], share)
    again, state, first, _ = train.load_progress(tmp_path / "p.npz", *start())
    for i in range(first, 120):
        rate = train.rate_at(recipe, i / 120)
        again, state, *_ = step(again, state, {}, target, tokens, counted, jnp.int32(i), jnp.float32(rate))
    chex.assert_trees_all_equal(again, params)
    lost, kept = train.evaluate(
        params, c, target, TARGET, recipe, (np.asarray(tokens[:5]), np.ones((5, LENGTH), bool)), jnp.float32
    )
    assert lost < 1 and 1 + kept.sum() > 3
    with pytest.raises(ValueError, match="of a draft of other sizes"):
        train.load_progress(tmp_path / "p.npz", {"a": params["fc"]}, ())


def test_training_ends_in_time_and_the_rate_with_it(tmp_path, monkeypatch):
    """By a clock that the test turns: the rate falls to nothing at the limit, over a stop and a resumption."""
    clock, rates = [100.0], []
    plan = train_draft.Plan(minutes=1.0, save_every=10**6, recipe=Recipe(steps=10**6, warmup=0.1, learning_rate=1.0))

    def make_step(*_):
        def step(params, state, kept, target, tokens, counted, number, rate):
            clock[0] += 1.0
            rates.append(float(rate))
            return params, state, jnp.float32(0), None

        return step

    monkeypatch.setattr(train_draft.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(train, "make_step", make_step)
    monkeypatch.setattr(train, "evaluate", lambda *_: (0.0, np.zeros(3)))
    model = LoadedModel("tiny", TARGET, tiny.params(TARGET), None)

    def training():
        c = config()
        return train_draft._Training(model, tiny.params(TARGET), c, plan, tmp_path, (None, None), jnp.float32)

    first = training()
    for _ in zip(range(20), first._losses((0, 0)), strict=False):
        pass
    first.save()
    assert (first.steps, first.seconds) == (20, 19)  # the first step compiles and is not counted
    rates.clear()
    report = training().run((0, 0))
    assert report["steps"] == 20 + 42 and report["seconds"] == 60
    want = [train.rate_at(plan.recipe, (19 + max(i - 1, 0)) / 60) for i in range(42)]
    np.testing.assert_allclose(rates, want, rtol=1e-6)
    assert rates[-1] < 0.01 < 0.5 < rates[0]
    assert train.load_progress(tmp_path / "progress.npz", first.params, first.state)[2:] == (62, 60.0)


def test_the_teacher_writes_what_generation_does():
    """Greedy and drawn answers; questions that end are followed by the header, and their answers found."""
    params = tiny.params(TARGET)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    grid = np.full((4, 40), -1, np.int32)
    for i in range(2):
        grid[2 * i : 2 * i + 2, : len(prompts[i])] = prompts[i]
    heat = jnp.asarray([0.0, 1.0] * 2)
    answering = np.ones(4, bool)
    out = teacher.write(params, TARGET, jnp.asarray(grid), jnp.asarray(answering), heat, jnp.full(4, 3), turn=(0, 1))
    for i, prompt in enumerate(prompts):
        for j, warmth in enumerate((0.0, 1.0)):
            want = generate(params, TARGET, [prompt], Sampling(40 - len(prompt), warmth, 3, stop=(0,)), max_len=64)[0]
            text = prompt + want.tokens
            assert out[2 * i + j, : len(text)].tolist() == text
    turn = (int(out[1, 6]), 60, 61, 62)  # a token of the drawn text, now the end of a question
    again = np.asarray(
        teacher.write(params, TARGET, jnp.asarray(grid[:1]), jnp.asarray([False]), heat[:1], jnp.full(1, 3), turn=turn)
    )
    ends = int(np.flatnonzero(again[0, 3:] == turn[0])[0]) + 3
    assert again[0, ends : ends + 4].tolist() == list(turn)
    mask = teacher.answers_in(again, np.asarray([3]), np.asarray([False]), turn)[0]
    assert not mask[: ends + 4].any() and mask[ends + 4]
    text = np.asarray([[5, 6, 0, 1, 7, 8, 0, 9]])
    assert teacher.answers_in(text, np.asarray([1]), np.asarray([False]), (0, 1))[0].tolist() == [False] * 4 + [
        True
    ] * 3 + [False]
    assert (
        teacher.answers_in(text, np.asarray([1]), np.asarray([True]), (0, 1))[0].tolist()
        == [False, True, True] + [False] * 5
    )
