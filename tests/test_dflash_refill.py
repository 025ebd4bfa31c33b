"""A request that is done makes room for the next one at once, and nobody's text depends on who was there before."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dflash.proposers import DFlash, NGram
from jattn.dflash.speculate import Speculator
from jattn.generate import Sampling
from tests import tiny_drafts
from tests import tiny_models as tiny
from tests.test_dflash_loop import CONFIG, GREEDY, MAX_LEN, NEW, make, owned, plain, poisoned, prompts, texts

pytestmark = pytest.mark.xdist_group("dflash_refill")  # they share compiled programs

MIXED = (Sampling(33), Sampling(2, 0.7, 9), Sampling(12), Sampling(1), Sampling(20, 1.0, 2), Sampling(7, stop=(5,)))
PROPOSERS = {
    "dflash": (DFlash(tiny_drafts.config(block_size=8)), tiny_drafts.params(tiny_drafts.config())),
    "ngram": (NGram(), None),
}


def two_slots(name, **options):
    return make(*PROPOSERS[name], num_slots=2, **options)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("num_pages", [None, 20])  # 20: room for one of the longest and one short one
def test_more_requests_than_slots(name, num_pages):
    """Other prompts, lengths, temperatures and stop tokens follow each other in a slot."""
    speculator = two_slots(name, num_pages=num_pages)
    for samplings in (MIXED, MIXED[::-1]):
        assert texts(speculator.run(prompts(), samplings)) == plain(*samplings)
    stats = speculator.stats
    assert stats.tokens == sum(len(t) - 1 for order in (MIXED, MIXED[::-1]) for t in plain(*order))
    assert stats.offered.shape == stats.accepted.shape == (7,) and (stats.accepted <= stats.offered).all()
    assert stats.cycles <= stats.tokens and stats.tau >= 1


def test_short_requests_do_not_wait_for_a_long_one():
    """Decoding plainly, a pass is a token for both slots: 32 of the long text, during which five short ones take turns."""
    speculator = Speculator(tiny.params(CONFIG), CONFIG, num_slots=2, step_tokens=16, max_len=MAX_LEN, page_size=4)
    samplings = (Sampling(33), *[Sampling(6)] * 5)
    assert texts(speculator.run(prompts(), samplings)) == plain(*samplings)
    assert speculator.stats.passes == 32  # batches of two would take 32 + 5 + 5
    assert speculator.stats.cycles == speculator.stats.tokens == 32 + 5 * 5


def test_in_order_and_every_token_once():
    started, got = [], {}
    for n, completion, new in two_slots("dflash").stream(prompts(), MIXED, cycles=2):
        if n not in got:
            started.append(n)
        got.setdefault(n, []).extend(new)
        assert completion.tokens == got[n]
    assert started == list(range(6))
    assert [got[n] for n in range(6)] == plain(*MIXED)


def test_a_stream_that_is_left_leaves_nothing_behind():
    speculator = two_slots("dflash")
    for _ in itertools.islice(speculator.stream(prompts(), GREEDY, cycles=1), 5):
        pass
    assert texts(speculator.run(prompts(), MIXED)) == plain(*MIXED)


def test_what_those_before_left_is_not_read(monkeypatch):
    """NaN in everything but the running texts, before every call of a program."""
    speculator, call, calls = two_slots("dflash", num_pages=44), Speculator._call, []

    def poisoning(self, program, requests, state, *limits):
        calls.append(program)

        def change(pool):
            return jnp.where(owned(requests, state, 4, pool)[..., None, None], pool, jnp.nan)

        return call(self, program, requests, poisoned(state, change), *limits)

    speculator.compile()
    monkeypatch.setattr(Speculator, "_call", poisoning)
    assert texts(speculator.run(prompts(), MIXED)) == plain(*MIXED)
    assert len(calls) > 6


def test_one_call_of_each_program_for_each_change():
    """Two slots, then one after another: 1 + 2 changes of who runs, and the end."""
    speculator = two_slots("ngram")
    speculator.run(prompts()[:4], [Sampling(NEW), Sampling(3), Sampling(3), Sampling(3)])
    assert speculator.stats.calls == 2 + 2 * 3
    assert np.isfinite(speculator.stats.rate)


def test_as_many_cycles_as_an_int32_has():
    got = {n: completion.tokens for n, completion, _ in two_slots("ngram").stream(prompts(), MIXED, cycles=2**31 - 1)}
    assert [got[n] for n in range(6)] == plain(*MIXED)
