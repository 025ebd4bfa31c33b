"""The loop loses nothing, whatever is drafted, wherever the pages lie and whatever they hold."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import gather_pages
from jattn.dflash import draft, loop
from jattn.dflash.proposers import DFlash, Oracle
from jattn.dflash.speculate import ALL, Speculator, speculate
from jattn.generate import Generator, Sampling
from jattn.metadata import AttentionMetadata
from jattn.models.decoder import create_cache, forward, unstack
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = pytest.mark.xdist_group("dflash_loop")  # they share compiled programs

MAX_LEN, NEW = 72, 33  # NEW - 1, the tokens from blocks, is a multiple of every block size
CONFIG = tiny.config("qwen3", max_position_embeddings=MAX_LEN, eos_ids=())
LENS = (1, 3, 15, 16, 17, 31)  # shorter than a block, and around a page's end
GREEDY, WARM = Sampling(NEW), Sampling(NEW, 1.0, seed=4)


@functools.cache
def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in LENS]


@functools.cache
def plain(*samplings, seed=0):
    """Texts of plain decoding."""
    generator = Generator(tiny.params(CONFIG), CONFIG, num_slots=6, step_tokens=32, page_size=8, max_len=MAX_LEN)
    samplings = samplings if len(samplings) > 1 else samplings * len(LENS)
    for prompt, sampling in zip(prompts(seed), samplings, strict=True):
        generator.submit(prompt, sampling)
    return [c.tokens for c in generator.run()]


def answers(texts, wrong=0.0, size=6):
    """What an oracle knows, a share of it wrong."""
    rng = np.random.default_rng(1)
    known = np.zeros((size, MAX_LEN), np.int32)
    for row, prompt, text in zip(known, prompts(), texts, strict=False):
        row[: len(prompt) + len(text)] = prompt + text
    noise = rng.integers(0, CONFIG.vocab_size, known.shape)
    return jnp.asarray(np.where(rng.random(known.shape) < wrong, noise, known), jnp.int32)


def make(proposer=None, drafting=None, **options):
    options = {"num_slots": 6, "step_tokens": 16, "max_len": MAX_LEN, "block_size": 8, "page_size": 4} | options
    return Speculator(tiny.params(CONFIG), CONFIG, proposer or Oracle(), drafting, **options)


def texts(done):
    return [c.tokens for c in done]


@pytest.mark.parametrize(("block_size", "page_size"), [(8, 4), (8, 1), (2, 16), (16, 128)])
def test_oracle_random_and_all_between(block_size, page_size):
    for sampling in (GREEDY, WARM):
        want, taus = plain(sampling), []
        for wrong in (0.0, 0.3, 1.0):
            speculator = make(drafting=answers(want, wrong), block_size=block_size, page_size=page_size)
            assert texts(speculator.run(prompts(), sampling)) == want
            stats = speculator.stats
            taus.append(stats.tau)
            assert stats.tokens == 6 * (NEW - 1)
            assert stats.cycles == int(stats.offered[0]) if wrong == 0 else stats.cycles >= int(stats.offered[0])
            assert (np.diff(stats.accepted) <= 0).all() and (stats.accepted <= stats.offered).all()
        assert taus[0] == block_size and stats.calls == 4  # two compile, two run
        assert taus[0] > taus[1] > taus[2] >= 1 and taus[2] < 1.1


@pytest.fixture(scope="module")
def drafted():
    """A draft whose mask id stands in the text, and which remembers what it drafted."""
    mask = plain(GREEDY)[5][3]
    config = tiny_drafts.config(mask_id=mask, block_size=8)
    assert any(mask in text for text in plain(GREEDY))
    return Recording(config), tiny_drafts.params(tiny_drafts.config())


@dataclasses.dataclass(frozen=True)
class Recording(DFlash):
    """Keeps its last drafts in its state, and its pages as they were before the last append."""

    def init(self, num_pages, page_size, dtype):
        before, now = (super(Recording, self).init(num_pages, page_size, dtype) for _ in range(2))
        return now, jnp.zeros((6, 7), jnp.int32), before

    def observe(self, params, state, view, tapped, keep):
        return super().observe(params, state[0], view, tapped, keep), state[1], state[0]

    def propose(self, params, state, view, block_size):
        drafts, cache = super().propose(params, state[0], view, block_size)
        return drafts, (cache, drafts, state[2])


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_draft_loses_nothing_and_the_mask_id_is_a_token(drafted, sampling):
    speculator = make(*drafted)
    assert texts(speculator.run(prompts(), sampling)) == plain(sampling)
    pieces = {}
    for n, _, new in make(*drafted).stream(prompts(), sampling, cycles=3):
        pieces.setdefault(n, []).append(new)
    assert [[t for piece in pieces[n] for t in piece] for n in range(6)] == plain(sampling)
    assert all(len(x) > 5 for x in pieces.values())


def lay_out(speculator, sampling=GREEDY, seed=None):
    """A batch on shuffled pages, in pools full of NaN."""
    each = speculator.max_pages
    order = np.arange(speculator.num_pages)
    if seed is not None:
        order = 1 + np.random.default_rng(seed).permutation(speculator.num_pages - 1)
    pages = [order[i * each : (i + 1) * each].tolist() for i in range(6)]
    requests, state = speculator.batch(prompts(), [sampling] * 6, pages)
    if seed is not None:
        state = poisoned(state, lambda pool: jnp.full_like(pool, jnp.nan))
    return requests, state


def poisoned(state, change):
    caches = jax.tree.map(lambda a: change(a) if a.ndim == 4 else a, (state.cache, state.drafter))
    return dataclasses.replace(state, cache=caches[0], drafter=caches[1])


def owned(requests, state, page_size, pool):
    """Mask of a pool's slots that hold the text so far."""
    table, context = np.asarray(requests.table), np.asarray(state.context)
    layers = 2
    mask = np.zeros(pool.shape[:2], bool)
    pages = pool.shape[0] // layers
    for row, n in zip(table, context, strict=True):
        for layer in range(layers):
            for p in range(n):
                mask[layer * pages + row[p // page_size], p % page_size] = True
    return mask


def play(speculator, requests, state, between=lambda state: state):
    """Run cycle by cycle; the texts' tokens and every cycle's live drafts."""
    call = (speculator.params, speculator.drafting, speculator.setting, requests)
    state, drafts = between(loop.prefill(*call, state)), []
    while not bool(state.done.all()):
        live = ~np.asarray(state.done)
        counts = np.clip(np.asarray(requests.total) - 1 - np.asarray(state.context), 0, 8)
        state = loop.decode(*call, state, jnp.int32(1), jnp.int32(6))
        real = live[:, None] & (np.arange(1, 8) < counts[:, None])
        drafts.append(np.where(real, np.asarray(state.drafter[1]), -1))
        state = between(state)
    return np.asarray(state.tokens), drafts


def test_nothing_outside_the_text_is_read(drafted):
    """NaN in page 0, in free pages, in slots never written, and between cycles in every slot past the text."""
    speculator = make(*drafted, num_pages=6 * 18 + 20)
    tokens, drafts = play(speculator, *lay_out(speculator))
    requests, state = lay_out(speculator, seed=7)

    def poison(state):
        def change(pool):
            return jnp.where(owned(requests, state, 4, pool)[..., None, None], pool, jnp.nan)

        return poisoned(state, change)

    again, drafts_again = play(speculator, requests, state, poison)
    np.testing.assert_array_equal(again, tokens)
    assert len(drafts) == len(drafts_again)
    for a, b in zip(drafts, drafts_again, strict=True):
        np.testing.assert_array_equal(a, b)
    for row, prompt, text in zip(tokens, prompts(), plain(GREEDY), strict=True):
        assert row[: len(prompt) + len(text)].tolist() == prompt + text


def test_a_poisoned_neighbour_changes_nothing(drafted):
    speculator = make(*drafted, num_pages=6 * 18 + 20)
    requests, state = lay_out(speculator, seed=3)
    tokens, drafts = play(speculator, requests, lay_out(speculator, seed=3)[1])
    page = int(requests.table[2, 0])

    def poison(state):
        return poisoned(state, lambda pool: pool.at[page].set(jnp.nan))

    again, drafts_again = play(speculator, requests, state, poison)
    others = [0, 1, 3, 4, 5]
    assert (again[2] != tokens[2]).any()
    np.testing.assert_array_equal(again[others], tokens[others])
    for a, b in zip(drafts, drafts_again, strict=False):
        np.testing.assert_array_equal(a[others], b[others])


@functools.partial(jax.jit, static_argnames="taps")
def taps_of(tokens, taps):
    """Taps of six whole texts, without chunks, blocks or shared pages."""
    size, length = tokens.shape
    table = jnp.arange(size)[:, None]
    cache = create_cache(CONFIG, size, length)
    lens = jnp.full(size, length)
    loc = jnp.arange(size + 1) * length
    meta = AttentionMetadata(loc, lens, table, jnp.arange(size * length))
    position = jnp.tile(jnp.arange(length), size)
    return forward(tiny.params(CONFIG), CONFIG, tokens.reshape(-1), position, cache, meta, taps=taps)[2]


def test_the_drafts_context_is_that_of_the_text(drafted):
    """After every cycle: what was appended equals what the taps of the whole text give; rejected rows left nothing."""
    proposer, weights = drafted
    speculator = make(*drafted, num_pages=6 * 18 + 20)
    requests, state = lay_out(speculator, seed=5)
    tokens, _ = play(speculator, *lay_out(speculator, seed=5))
    tapped = taps_of(jnp.asarray(tokens), proposer.taps)
    ready = draft.prepare(weights)
    position = jnp.tile(jnp.arange(MAX_LEN), 6)
    k, v = draft.context_kv(ready, proposer.config, draft.fuse(ready, proposer.config, tapped), position)
    seen = []

    def compare(state):
        cache, seen_now = state.drafter[0], np.asarray(state.context)
        for layer in range(2):
            table = requests.table + layer * speculator.num_pages
            for pool, want in ((cache.k, k), (cache.v, v)):
                have = np.asarray(gather_pages(pool, table, state.context))[:, :MAX_LEN]
                full = np.asarray(want[:, layer]).reshape(6, MAX_LEN, *have.shape[2:])
                full = np.where(np.arange(MAX_LEN)[None, :, None, None] < seen_now[:, None, None, None], full, 0)
                np.testing.assert_allclose(have, full, rtol=0, atol=1e-4)
        for now, before in zip(jax.tree.leaves(cache), jax.tree.leaves(state.drafter[2]), strict=True):
            text = owned(requests, state, 4, now)[..., None, None]
            np.testing.assert_array_equal(np.where(text, 0, now), np.where(text, 0, before))
        seen.append(seen_now)
        return state

    play(speculator, requests, state, compare)
    assert len(seen) > 20


def test_causal_drafting_changes_drafts_and_never_the_text(drafted):
    proposer, weights = drafted
    causal = dataclasses.replace(proposer, config=dataclasses.replace(proposer.config, causal=True))
    came = []
    for p in (proposer, causal):
        speculator = make(p, weights, num_pages=6 * 18 + 20)
        came.append(play(speculator, *lay_out(speculator)))
    np.testing.assert_array_equal(came[0][0], came[1][0])
    assert any((a != b).any() for a, b in zip(came[0][1], came[1][1], strict=False))


def test_layers_apart_as_stacked(drafted):
    proposer, weights = drafted
    apart = Speculator(
        unstack(tiny.params(CONFIG)),
        CONFIG,
        proposer,
        weights,
        num_slots=6,
        step_tokens=16,
        max_len=MAX_LEN,
        page_size=4,
    )
    assert texts(apart.run(prompts(), WARM)) == plain(WARM)


def test_alone_as_in_a_batch():
    want = plain(WARM)
    wrong = answers(want, 0.3)
    together = make(drafting=wrong)
    together.run(prompts(), WARM)
    accepted = np.zeros(7, np.int64)
    for i, prompt in enumerate(prompts()):
        alone = make(drafting=wrong[i : i + 1], num_slots=1)
        assert texts(alone.run([prompt], WARM)) == [want[i]]
        accepted += alone.stats.accepted
    np.testing.assert_array_equal(accepted, together.stats.accepted)


def test_each_request_has_its_own_sampling_and_length():
    """Also: blocks that the length cuts, one token, and the context's end."""
    samplings = (
        Sampling(1),
        Sampling(2, 0.7, 9),
        Sampling(12),
        Sampling(30, 1.3, 2),
        Sampling(500),
        Sampling(500, 1.0),
    )
    want = plain(*samplings)
    assert [len(t) for t in want] == [1, 2, 12, 30, MAX_LEN - 17, MAX_LEN - 31]
    for wrong in (0.0, 0.3):
        done = make(drafting=answers(want, wrong)).run(prompts(), samplings)
        assert texts(done) == want and {c.reason for c in done} == {"length"}


def test_a_stop_token_inside_an_accepted_run():
    whole = plain(GREEDY)
    for at in (0, 1, 5, 8):
        stops = tuple(text[at] for text in whole)
        samplings = [Sampling(NEW, stop=(stop,)) for stop in stops]
        speculator = make(drafting=answers(whole))
        done = speculator.run(prompts(), samplings)
        assert texts(done) == [t[: t.index(stop) + 1] for t, stop in zip(whole, stops, strict=True)]
        assert {c.reason for c in done} == {"stop"}
        assert speculator.stats.tokens == sum(len(c.tokens) - 1 for c in done)


def test_a_finished_request_idles_without_writes():
    whole = plain(GREEDY)
    speculator = make(drafting=answers(whole, 1.0))
    each = speculator.max_pages
    pages = [list(range(i * each, (i + 1) * each)) for i in range(6)]
    samplings = [Sampling(1), *[GREEDY] * 5]
    requests, state = speculator.batch(prompts(), samplings, pages)
    call = (speculator.params, speculator.drafting, speculator.setting, requests)
    state = loop.prefill(*call, state)
    assert state.done.tolist() == [True] + [False] * 5
    before, context = np.asarray(state.cache.k), int(state.context[0])
    mine = np.add.outer(np.arange(2) * speculator.num_pages, np.arange(each)).reshape(-1)
    state = loop.decode(*call, state, jnp.int32(ALL), jnp.int32(6))
    after = np.asarray(state.cache.k)
    np.testing.assert_array_equal(after[mine], before[mine])
    assert (np.delete(after, mine, 0) != np.delete(before, mine, 0)).any()
    assert int(state.context[0]) == context and int(state.cycles[0]) == 0


def test_one_program_whatever_the_lengths():
    whole = plain(GREEDY)
    make(drafting=answers(whole)).run(prompts(), GREEDY)
    programs = (loop.admit, loop.prefill, loop.decode)
    before = [program._cache_size() for program in programs]
    speculator = make(drafting=answers(whole, 0.5))
    speculator.run([p[: 1 + len(p) // 2] for p in prompts()][:4], [Sampling(n, n / 10, n) for n in (3, 9, 20, 30)])
    assert speculator.stats.calls == 2 + 2  # to compile; one of each, no host between
    speculator.run(prompts() + prompts(), GREEDY)  # twice as many as there are slots
    assert [program._cache_size() for program in programs] == before


def test_requests_wait_for_slots_and_pages():
    whole = plain(GREEDY)
    speculator = make(drafting=answers(whole, 1.0), num_pages=40)  # 9, 9, 12, 12, 13 and 16 pages
    assert texts(speculator.run(prompts(), GREEDY)) == whole


BAD = [
    ([], GREEDY, "prompt: got no tokens"),
    ([5] * MAX_LEN, GREEDY, f"prompt: got {MAX_LEN} tokens, expected at most {MAX_LEN - 1} tokens"),
    ([5, 10**6], GREEDY, r"prompt: got the token \[1000000\]"),
    ([5] * 30, GREEDY, "prompt: got 30 tokens and up to 33 more with their blocks, which take 16 pages, .* pool's 15"),
    ([5], Sampling(0), "max_tokens: got 0"),
]


@pytest.mark.parametrize(("prompt", "sampling", "text"), BAD)
def test_what_cannot_run_is_refused_before_anything_is_written(prompt, sampling, text):
    speculator = make(drafting=answers([]), num_pages=15)
    with pytest.raises(ValueError, match=text):
        speculator.run([[5], prompt], [Sampling(2), sampling])
    assert speculator.stats.calls == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 1}, "block_size: got 1, expected at least 2"),
        ({"num_slots": 0}, "num_slots: got 0"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"num_pages": 0}, "num_pages: got 0"),
        ({"max_len": MAX_LEN + 1}, "max_len: got 73"),
    ],
)
def test_bad_sizes(options, text):
    with pytest.raises(ValueError, match=text):
        make(**options)


def test_bad_drafts(drafted):
    proposer, weights = drafted
    with pytest.warns(UserWarning, match="block_size: got 16, but the draft was trained for 8"):
        make(proposer, weights, block_size=16)
    other = tiny_drafts.config(num_target_layers=3)
    with pytest.raises(ValueError, match="draft num_target_layers: got 3, expected 2"):
        make(DFlash(other), weights)
    with pytest.raises(ValueError, match="block_size: got 8, expected 1 without a proposer"):
        speculate(tiny.params(CONFIG), CONFIG, prompts(), block_size=8)
