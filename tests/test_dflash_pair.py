"""A really trained pair: drafts are kept in runs of every length, and still the text is the plain one."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dflash import draft, loop, rows
from jattn.dflash.checkpoint import load_draft
from jattn.dflash.proposers import DFlash, NGram
from jattn.dflash.speculate import Speculator
from jattn.generate import Sampling, generate
from jattn.models import load_any

pytestmark = pytest.mark.xdist_group("dflash_pair")  # they share compiled programs

FOLDER = Path(__file__).parent / "data" / "byte_pair"
BLOCK, MAX_LEN, NEW = 8, 96, 64
# Beginnings of sentences that the pair was not trained on, shorter than a block and longer than a page.
BEGINNINGS = (
    "the",
    "count 7 9 1",
    "near the sea, the tall sailor ",
    "spell horse: h o",
    "at noon, the green cat",
    "the old clock ",
)
HEAT = {"greedy": 0.0, "drawn": 1.0}


@functools.cache
def pair():
    model = load_any.load(FOLDER / "target")
    return model, *load_draft(FOLDER / "draft", model.config)


@functools.cache
def prompts():
    return [pair()[0].tokenizer.encode(text) for text in BEGINNINGS]


@functools.cache
def plain(kind):
    model = pair()[0]
    sampling = Sampling(NEW, HEAT[kind], seed=2)
    done = generate(model.params, model.config, prompts(), sampling, num_slots=6, step_tokens=64, max_len=MAX_LEN)
    return [c.tokens for c in done]


def run(kind, causal=False, proposer=None, **options):
    """Texts and counts."""
    model, config, params = pair()
    own = DFlash(dataclasses.replace(config, causal=causal))
    options = {"num_slots": 6, "max_len": MAX_LEN, "block_size": BLOCK} | options
    drafting = params if proposer is None else None
    speculator = Speculator(model.params, model.config, proposer or own, drafting, **options)
    done = speculator.run(prompts(), Sampling(NEW, HEAT[kind], seed=2))
    return [c.tokens for c in done], speculator.stats


def test_it_writes_its_language():
    model = pair()[0]
    texts = [model.tokenizer.decode(t) for t in plain("greedy")]
    assert texts[1].startswith("1 13 15 17") and texts[3].startswith(" r s e. "), texts
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) < 2e6


@pytest.mark.parametrize("kind", HEAT)
def test_many_drafts_are_kept_and_the_text_is_the_plain_one(kind):
    came, stats = run(kind)
    assert came == plain(kind)
    assert 2 < stats.tau < 6, stats.tau
    assert (np.diff(stats.accepted) <= 0).all() and stats.accepted[-1] > 0  # every length of run occurs
    _, control = run(kind, proposer=NGram())
    assert stats.tau > 1.3 * control.tau, (stats.tau, control.tau)


@pytest.mark.parametrize("kind", HEAT)
def test_causal_drafting_keeps_other_rows_and_never_changes_the_text(kind, record_property):
    """The flag is not load-bearing for the text, and it does reach the kernel."""
    came, stats = run(kind)
    causal, other = run(kind, causal=True)
    assert causal == came == plain(kind)
    record_property("tau", stats.tau)
    record_property("tau_causal", other.tau)
    print(f"{kind}: tau {stats.tau:.3f} non-causal, {other.tau:.3f} causal")
    assert other.accepted.tolist() != stats.accepted.tolist()


def test_causal_drafting_changes_the_drafts_logits():
    model, config, params = pair()
    text = jnp.asarray(prompts()[2])
    n, size = len(text), 32

    @functools.partial(jax.jit, static_argnames="causal")
    def logits(causal):
        c, ready = dataclasses.replace(config, causal=causal), draft.prepare(params)
        tapped = jnp.ones((n, len(c.taps), model.config.hidden_size))
        cache, table = draft.create_cache(c, 2, size), jnp.asarray([[1, 0]])
        context = rows.pack(jnp.zeros(1, jnp.int32), jnp.asarray([n]), n)
        cache = draft.append_context(ready, c, cache, tapped, context.position, rows.slots(context, table, size))
        r = rows.pack(jnp.asarray([n]), jnp.asarray([BLOCK]), BLOCK)
        meta = rows.metadata(r, table, size, causal=True, max_query_len=BLOCK)
        tokens = jnp.where(r.offset == 0, text[-1], c.mask_id)
        hidden, _ = draft.draft_block(ready, c, model.params, cache, tokens, r.position, meta)
        return draft.logits(model.params, hidden)

    apart = jnp.abs(logits(False) - logits(True)).max(1)
    assert apart[:-1].min() > 0.01 and apart[-1] < 1e-4  # the last row sees the whole block either way, in one layer


def test_alone_and_on_other_pages():
    """Batch 1 and another page size: the same texts from the same number of blocks."""
    came, stats = run("greedy")
    again, alone = run("greedy", num_slots=1, page_size=4)
    assert again == came and alone.cycles == stats.cycles
    np.testing.assert_array_equal(alone.accepted, stats.accepted)


def test_the_first_block_is_as_good_as_later_ones():
    """The prompt's own taps are in the draft's context before the first block."""
    model, config, params = pair()
    speculator = Speculator(
        model.params, model.config, DFlash(config), params, num_slots=6, max_len=MAX_LEN, block_size=BLOCK
    )
    pages = [list(range(i * 6, (i + 1) * 6)) for i in range(6)]
    requests, state = speculator.batch(prompts(), [Sampling(NEW)] * 6, pages)
    call = (speculator.params, speculator.drafting, speculator.setting, requests)
    state = loop.prefill(*call, state)
    state = loop.decode(*call, state, jnp.int32(1), jnp.int32(6))
    first = np.asarray(state.context) - [len(p) for p in prompts()]
    assert first.mean() > 2, first
