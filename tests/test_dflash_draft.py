"""The draft model against a dense float64 one, in every window convention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import gather_pages
from jattn.dflash import draft, rows
from jattn.models.decoder import DecoderConfig
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = pytest.mark.xdist_group("dflash_draft")

B, PAGE, W = 4, 4, 6
CONTEXT = (11, 3, 16)  # longer and shorter than the window, and a full page
TARGET = tiny.config("qwen3")


def seen(config, layer, q, k, anchor):
    """The conventions in words, once more."""
    end, w = anchor + B, config.window
    if not (config.sliding and config.sliding[layer]):
        return k <= q if config.causal else k < end
    return {
        "causal": q - w < k <= q,
        "anchored": anchor - w <= k < end,
        "anchored_causal": anchor - w <= k <= q,
        "bidirectional": q - w < k < end,
        "symmetric": q - w < k < q + w,
    }[config.convention]


@functools.partial(jax.jit, static_argnames="config")
def run(config, params, target, tapped, tokens):
    """Append three contexts, then draft three blocks; every slot starts as NaN."""
    params = draft.prepare(params)
    table = jnp.asarray([[5, 2, 9, 3, -1], [7, 1, -1, -1, -1], [4, 11, 6, 8, 10]])
    cache = draft.create_cache(config, 12, PAGE)
    cache = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), cache)
    lens = jnp.asarray(CONTEXT)
    context = rows.pack(jnp.zeros_like(lens), lens, 32)
    cache = draft.append_context(params, config, cache, tapped, context.position, rows.slots(context, table, PAGE))
    r = rows.pack(lens, jnp.full_like(lens, B), 3 * B)
    meta = rows.metadata(r, table, PAGE, causal=True, max_query_len=B)
    hidden, cache = draft.draft_block(params, config, target, cache, tokens, r.position, meta)
    pages = [gather_pages(cache.k, table + 12 * i, lens) for i in range(config.decoder.num_layers)]
    return hidden, jnp.stack(pages)


def inputs(config):
    rng = np.random.default_rng(0)
    tapped = rng.normal(size=(32, len(config.taps), TARGET.hidden_size)).astype(np.float32)
    tapped[sum(CONTEXT) :] = np.nan  # padding
    tokens = np.full(3 * B, config.mask_id, np.int32)
    tokens[::B] = [7, 50, 99]
    return tapped, tokens


CASES = {
    "full": {},
    "all causal": {"causal": True},
    **{name: {"sliding": (True, False), "window": W, "convention": name} for name in draft.CONVENTIONS},
    "symmetric": {"sliding": (True, True), "window": 3, "convention": "symmetric"},  # shorter than the block
}


@pytest.fixture(scope="module")
def results():
    return {}


@pytest.mark.parametrize("case", CASES)
def test_block_and_context_equal_the_dense_draft(case, results):
    config = tiny_drafts.config(block_size=B, **CASES[case])
    params, target = tiny_drafts.params(tiny_drafts.config()), tiny.params(TARGET)
    tapped, tokens = inputs(config)
    hidden, pages = run(config, params, target, tapped, tokens)
    results[case] = np.asarray(hidden)
    at = 0
    for s, n in enumerate(CONTEXT):
        sees = lambda layer, q, k, n=n: seen(config, layer, q, k, n)  # noqa: E731
        block = slice(s * B, (s + 1) * B)
        want, context = tiny_drafts.dense(params, config, target["embed"], tapped[at : at + n], tokens[block], sees)
        np.testing.assert_allclose(hidden[block], want, rtol=0, atol=3e-5)
        for i, (k, _) in enumerate(context):
            np.testing.assert_allclose(pages[i, s, :n], k, rtol=0, atol=1e-5)
        at += n


def test_the_conventions_differ(results):
    """B < W < context: no two of them see the same."""
    for case in CASES.keys() - results.keys():  # run alone, or on another worker than the tests above
        config = tiny_drafts.config(block_size=B, **CASES[case])
        params, target = tiny_drafts.params(tiny_drafts.config()), tiny.params(TARGET)
        results[case] = np.asarray(run(config, params, target, *inputs(config))[0])
    names = list(CASES)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert np.abs(results[a][:B] - results[b][:B]).max() > 1e-3, (a, b)


def test_default_taps():
    want = {
        (36, 5): (1, 9, 17, 25, 33),
        (48, 5): (1, 12, 23, 34, 45),
        (32, 5): (1, 8, 15, 22, 29),
        (28, 5): (1, 7, 13, 19, 25),
        (64, 5): (1, 16, 31, 46, 61),
        (40, 8): (1, 6, 11, 16, 22, 27, 32, 37),
        (30, 3): (1, 14, 27),
        (30, 1): (15,),
        (4, 2): (1, 1),
    }
    assert {key: draft.default_taps(*key) for key in want} == want
    with pytest.raises(ValueError, match="num_target_layers: got 3, expected at least 4"):
        draft.default_taps(3, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"taps": (0, 2)}, r"taps: got \(0, 2\), expected layers of the target in \[0, 2\)"),
        ({"taps": ()}, "taps: got"),
        ({"mask_id": -1}, "mask_id: got -1, expected an id in"),
        ({"mask_id": 10**6}, "mask_id: got 1000000"),
        ({"block_size": 1}, "block_size: got 1, expected at least 2"),
        ({"sliding": (True,), "window": 8}, r"sliding: got \(True,\), expected 2 flags"),
        ({"sliding": (True, True)}, "window: got None"),
        ({"sliding": (True, True), "window": 8, "convention": "x"}, "convention: got 'x'"),
        ({"sliding": (True, True), "window": 8, "convention": "bidirectional"}, "window: got 8, .* block of 16"),
    ],
)
def test_bad_configs(changes, text):
    with pytest.raises(ValueError, match=text):
        tiny_drafts.config(**changes)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "vocab_size"])
def test_a_draft_for_another_target(name):
    other: DecoderConfig = tiny.config(**{name: getattr(TARGET, name) + 2})
    with pytest.raises(ValueError, match="take the draft that was trained for this model"):
        draft.check_fits(tiny_drafts.config(), other)
