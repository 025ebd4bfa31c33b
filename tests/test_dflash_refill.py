"""A request that is done makes room for the next one, and its neighbours do not notice."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dflash import loop
from jattn.dflash.proposers import DFlash, NGram, Oracle
from jattn.dflash.speculate import Speculator
from jattn.generate import Generator, Sampling
from jattn.page_allocator import PageAllocator
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = pytest.mark.xdist_group("dflash_loop")  # they share compiled programs

MAX_LEN, SLOTS, BLOCK, PAGE = 72, 3, 8, 4
PAGES = 24  # one request that is long, of up to 18, and a few that are short
CONFIG = tiny.config("qwen3", max_position_embeddings=MAX_LEN, eos_ids=())
LENS, NEWS = (17, 1, 31, 3, 40, 2, 9), (9, 40, 4, 26, 1, 13, 33)  # seven requests: prompts and texts


@dataclasses.dataclass(frozen=True)
class Knows(Oracle):
    """An oracle that knows a request by its seed, wherever it sits."""

    def propose(self, params, state, view, block_size):
        return super().propose(params[view.seed], state, view, block_size)


@functools.cache
def requests(lens=LENS, news=NEWS, heat=0.0):
    """Prompts and samplings; the seed is the request's number."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in lens]
    return prompts, [Sampling(n, heat, seed=i) for i, n in enumerate(news)]


def plain(prompts, samplings):
    """Texts of plain decoding."""
    generator = Generator(tiny.params(CONFIG), CONFIG, num_slots=6, step_tokens=32, page_size=8, max_len=MAX_LEN)
    for prompt, sampling in zip(prompts, samplings, strict=True):
        generator.submit(prompt, sampling)
    return [c.tokens for c in generator.run()]


def answers(prompts, texts, wrong=0.0):
    """What an oracle knows, a share of it wrong; always of eight requests."""
    known = np.zeros((8, MAX_LEN), np.int32)
    for row, prompt, text in zip(known, prompts, texts, strict=False):
        row[: len(prompt) + len(text)] = prompt + text
    rng = np.random.default_rng(1)
    noise = rng.integers(0, CONFIG.vocab_size, known.shape)
    return jnp.asarray(np.where(rng.random(known.shape) < wrong, noise, known), jnp.int32)


def make(proposer, drafting=None):
    sizes = {"num_slots": SLOTS, "num_pages": PAGES, "page_size": PAGE, "block_size": BLOCK, "step_tokens": 16}
    return Speculator(tiny.params(CONFIG), CONFIG, proposer, drafting, max_len=MAX_LEN, **sizes)


def knowing(prompts, texts, wrong=0.0):
    return make(Knows(), answers(prompts, texts, wrong))


def drafting():
    draft = tiny_drafts.config(block_size=BLOCK)
    return make(DFlash(draft), tiny_drafts.params(draft))


def texts(done):
    return [c.tokens for c in done]


@pytest.mark.parametrize("heat", [0.0, 1.0], ids=["greedy", "warm"])
def test_every_text_is_the_plain_one(heat):
    prompts, samplings = requests(heat=heat)
    want = plain(prompts, samplings)
    assert [len(t) for t in want] == list(NEWS)
    for speculator in (knowing(prompts, want, 0.3), make(NGram()), drafting()):
        done = speculator.run(prompts, samplings)
        assert texts(done) == want and {c.reason for c in done} == {"length"}
        assert [c.prompt for c in done] == prompts
        assert speculator.stats.tokens == sum(NEWS) - 7


@pytest.mark.parametrize("heat", [0.0, 1.0], ids=["greedy", "warm"])
def test_a_pool_for_one_and_a_half(heat):
    """Each takes 16 of the 24 pages, so they run one after the other although slots are free."""
    prompts, samplings = requests((31, 30, 29, 28), (33, 33, 33, 33), heat)
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want)
    assert texts(speculator.run(prompts, samplings)) == want
    stats = speculator.stats
    assert stats.passes == stats.cycles == 4 * 4 and stats.prefill_passes == 4 * 2 and stats.calls == 2 + 4 * 2


def test_nobody_is_overtaken():
    """The third needs more pages than are free until the first is done; the fourth and fifth would fit and wait."""
    prompts, samplings = requests((3, 3, 31, 2, 2), (49, 9, 33, 9, 9))
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want)
    first, last = [], []
    for n, completion, _ in speculator.stream(prompts, samplings, cycles=1):
        first += [n] * (n not in first)
        last += [n] * completion.finished
    assert first == [0, 1, 2, 3, 4] and last == [1, 0, 3, 4, 2]


def test_passes_of_one_long_among_short():
    """The long one takes 6 blocks; beside it each of the other two slots serves 3 short ones of 2 blocks."""
    blocks = [6, 2, 2, 2, 2, 2, 2]
    prompts, samplings = requests((3,) * 7, tuple(1 + BLOCK * n for n in blocks))
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want)
    assert texts(speculator.run(prompts, samplings)) == want
    stats = speculator.stats
    assert (stats.passes, stats.prefill_passes) == (6, 3) and stats.calls == 2 + 3 * 2
    assert stats.passes < sum(max(blocks[i : i + SLOTS]) for i in range(0, 7, SLOTS)) == 10
    assert stats.cycles == sum(blocks) and stats.tokens == BLOCK * sum(blocks) and stats.tau == BLOCK
    np.testing.assert_array_equal(stats.offered, [sum(blocks)] * (BLOCK - 1))
    np.testing.assert_array_equal(stats.accepted, stats.offered)
    assert stats.seconds > 0 and stats.prefill_seconds > 0


def test_a_stop_token_inside_a_run_makes_room():
    prompts, samplings = requests((3, 3, 3, 3), (17, 17, 17, 9))
    want = plain(prompts, samplings)
    at = next(i for i in range(3, BLOCK) if want[0][i] not in want[0][:i])
    samplings = [dataclasses.replace(samplings[0], stop=(want[0][at],)), *samplings[1:]]
    speculator = knowing(prompts, want)
    done = speculator.run(prompts, samplings)
    assert texts(done) == [want[0][: at + 1], *want[1:]]
    assert [c.reason for c in done] == ["stop", "length", "length", "length"]
    assert speculator.stats.passes == 2  # the fourth runs in the second, beside the others' second blocks
    assert speculator.stats.tokens == at + 16 + 16 + 8


def test_those_who_end_with_their_prompt_make_room():
    prompts, samplings = requests((3, 5, 17, 2, 4, 1, 6), (1,) * 7)
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want)
    assert texts(speculator.run(prompts, samplings)) == want
    stats = speculator.stats
    assert (stats.passes, stats.cycles, stats.tokens, stats.seconds) == (0, 0, 0, 0) and stats.calls == 2 + 3
    assert stats.prefill_passes == 2 + 1 + 1 and stats.prefill_seconds > 0


@pytest.mark.parametrize("cycles", [1, 3, 2**31 - 1])
def test_a_stream_has_every_token_once_and_in_order(cycles):
    prompts, samplings = requests()
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want, 0.3)
    pieces, ended = {n: [] for n in range(7)}, []
    for n, completion, new in speculator.stream(prompts, samplings, cycles=cycles):
        assert n not in ended and new
        pieces[n] += new
        assert completion.tokens == pieces[n] and completion.prompt == prompts[n]
        ended += [n] * completion.finished
    assert [pieces[n] for n in range(7)] == want and sorted(ended) == list(range(7))
    whole = knowing(prompts, want, 0.3)
    whole.run(prompts, samplings)
    assert (whole.stats.cycles, whole.stats.tokens) == (speculator.stats.cycles, speculator.stats.tokens)
    np.testing.assert_array_equal(whole.stats.accepted, speculator.stats.accepted)


def test_a_stream_that_is_closed_leaves_nothing_behind():
    prompts, samplings = requests((3,) * 7, tuple(1 + BLOCK * n for n in (6, 2, 2, 2, 2, 2, 2)))
    want = plain(prompts, samplings)
    speculator = knowing(prompts, want)
    for looks in (1, 5, 9):
        events = speculator.stream(prompts, samplings, cycles=1)
        for _ in range(looks):
            next(events)
        events.close()
        assert speculator.stats.tokens == BLOCK * speculator.stats.cycles
    assert texts(speculator.run(prompts, samplings)) == want
    assert speculator.stats.tau == BLOCK
    with pytest.raises(ValueError, match="cycles: got 0"):
        next(speculator.stream(prompts, samplings, cycles=0))


def live_slots(asked, state, pool):
    """Mask of a pool's slots that hold the text of those who run."""
    mask = np.zeros(pool.shape[:2], bool)
    for row, n in zip(np.asarray(asked.table), np.where(state.done, 0, state.context), strict=True):
        for layer in range(2):
            for p in range(n):
                mask[layer * PAGES + row[p // PAGE], p % PAGE] = True
    return mask


def test_pages_of_nobody_are_not_read(monkeypatch):
    """NaN between the calls, in free pages, those of finished requests among them, and past every text."""
    prompts, samplings = requests()
    want, clean, calls = plain(prompts, samplings), drafting(), []
    clean.run(prompts, samplings)

    def poisoned(program):
        def call(params, own, setting, asked, state, *limits):
            def change(pool):
                if pool.ndim != 4:
                    return pool
                return jnp.where(live_slots(asked, state, pool)[..., None, None], pool, jnp.nan)

            free = np.asarray(asked.table)[np.asarray(state.done)]
            calls.append(program is loop_prefill and bool((free >= 0).any()))
            cache, drafter = jax.tree.map(change, (state.cache, state.drafter))
            state = dataclasses.replace(state, cache=cache, drafter=drafter)
            return program(params, own, setting, asked, state, *limits)

        return call

    loop_prefill = loop.prefill
    monkeypatch.setattr(loop, "prefill", poisoned(loop.prefill))
    monkeypatch.setattr(loop, "decode", poisoned(loop.decode))
    speculator = drafting()
    assert texts(speculator.run(prompts, samplings)) == want
    assert len(calls) == speculator.stats.calls > 8 and not any(calls)  # free slots own no page when others enter
    np.testing.assert_array_equal(speculator.stats.accepted, clean.stats.accepted)
    assert speculator.stats.cycles == clean.stats.cycles


def test_a_neighbours_prompt_changes_nothing_of_those_who_run():
    speculator = drafting()
    prompts, samplings = requests((9, 5, 30), (20, 2, 20))
    allocator = PageAllocator(PAGES, PAGE)
    pages = [allocator.allocate(i, n) for i, n in enumerate((32, 8, 52))]
    call = (speculator.params, speculator.drafting, speculator.setting)

    def begin():
        """Two have run a block each: the first runs, the second is done."""
        asked, state = speculator.batch(prompts[:2], samplings[:2], pages[:2])
        state = loop.decode(*call, asked, loop.prefill(*call, asked, state), jnp.int32(1), jnp.int32(SLOTS))
        assert state.done.tolist() == [False, True, True]
        return asked, state

    asked, state = begin()
    alone = loop.decode(*call, asked, state, jnp.int32(2), jnp.int32(SLOTS))
    want = jax.device_get(alone)
    asked, state = begin()
    before = jax.device_get(state)
    asked, _ = speculator.batch(prompts, samplings, pages)
    fresh, rows = np.asarray([False, False, True]), np.zeros((SLOTS, MAX_LEN), np.int32)
    rows[2, :30] = prompts[2]
    tokens, context, done = loop.admit(state.tokens, state.context, state.done, jnp.asarray(fresh), jnp.asarray(rows))
    state = dataclasses.replace(state, tokens=tokens, context=context, done=done)
    assert state.done.tolist() == [False, True, False] and state.context.tolist() == [*before.context[:2], 0]
    state = loop.prefill(*call, asked, state)
    now = jax.device_get(state)
    assert now.passes == before.passes + 2 and now.context[2] == 30
    for name in ("tokens", "context", "done", "cycles", "offered", "accepted"):
        np.testing.assert_array_equal(getattr(now, name)[:2], getattr(before, name)[:2])
    asked_alone, state_alone = speculator.batch(prompts[2:], samplings[2:], pages[2:])
    state_alone = loop.prefill(*call, asked_alone, state_alone)
    assert state_alone.tokens[0, 30] == now.tokens[2, 30]
    theirs = np.concatenate([np.asarray(pages[0] + pages[1]) + layer * PAGES for layer in range(2)])
    pools = lambda s: [x for x in jax.tree.leaves((s.cache, s.drafter)) if x.ndim == 4]  # noqa: E731
    entered = live_slots(asked_alone, state_alone, pools(now)[0])
    for a, b, c in zip(pools(now), pools(before), pools(state_alone), strict=True):
        np.testing.assert_array_equal(a[theirs], b[theirs])
        np.testing.assert_allclose(a[entered], np.asarray(c)[entered], rtol=0, atol=1e-6)
    state = loop.decode(*call, asked, state, jnp.int32(2), jnp.int32(SLOTS))
    n = int(state.context[0])
    assert n == want.context[0]
    np.testing.assert_array_equal(state.tokens[0, : n + 1], want.tokens[0, : n + 1])
    mine = live_slots(asked, dataclasses.replace(state, done=jnp.asarray([False, True, True])), pools(state)[0])
    for a, b in zip(pools(state), pools(want), strict=True):
        np.testing.assert_allclose(np.asarray(a)[mine], np.asarray(b)[mine], rtol=0, atol=1e-6)


@pytest.mark.parametrize("enough", [1, 2, 3, 99])
def test_decode_stops_when_enough_are_done(enough):
    """Requests of 1, 2 and 4 blocks; those who are done already count."""
    prompts, samplings = requests((3, 3, 3), (9, 17, 33))
    speculator = knowing(prompts, plain(prompts, samplings))
    pages = [range(3), range(3, 8), range(8, 17)]
    asked, state = speculator.batch(prompts, samplings, pages)
    call = (speculator.params, speculator.drafting, speculator.setting, asked)
    state = loop.decode(*call, loop.prefill(*call, state), jnp.int32(20), jnp.int32(enough))
    blocks = {1: 1, 2: 2}.get(enough, 4)
    assert state.cycles.tolist() == [1, min(blocks, 2), blocks] and int(state.done.sum()) == min(enough, 3)
    assert int(state.passes) == 1 + blocks
    again = loop.decode(*call, state, jnp.int32(20), jnp.int32(enough))
    assert again.cycles.tolist() == [1, min(blocks, 2), blocks] and int(again.passes) == 1 + blocks
