"""Continuous batching on small random models."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import generate, models
from jattn.generate import Completion, Generator, Sampling
from tests import tiny_models as tiny

pytestmark = pytest.mark.xdist_group("generate")  # they share compiled programs

CONFIG = tiny.config("qwen3", max_position_embeddings=64, eos_ids=())
OPTIONS = {"num_slots": 3, "step_tokens": 8, "page_size": 4}


def prompts(*lengths, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in lengths]


def make(**changes) -> Generator:
    return Generator(tiny.params(CONFIG), CONFIG, **OPTIONS | {"num_pages": 48} | changes)


def run(requests, sampling, **changes) -> list[Completion]:
    generator = make(**changes)
    for n, prompt in enumerate(requests):
        generator.submit(prompt, sampling[n] if isinstance(sampling, list) else sampling)
    return generator.run()


def greedy(prompt, count):
    """Token by token with the dense forward."""
    tokens = list(prompt)
    for _ in range(count):
        row = models.dense_forward(tiny.params(CONFIG), CONFIG, jnp.asarray(tokens + [0] * (64 - len(tokens))))
        tokens.append(int(row[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_batched_equals_alone_equals_dense():
    requests = prompts(1, 19, 7, 8, 30)  # more than slots, and longer than a step
    together = run(requests, Sampling(12))
    for prompt, completion in zip(requests, together, strict=True):
        assert completion.tokens == run([prompt], Sampling(12))[0].tokens == greedy(prompt, 12)
        assert completion.reason == "length"


@pytest.mark.parametrize("changes", [{"page_size": 1}, {"page_size": 64}, {"step_tokens": 64}, {"num_slots": 1}])
def test_shapes_do_not_change_the_text(changes):
    requests = prompts(5, 17)
    came = [c.tokens for c in run(requests, Sampling(8), num_pages=None, **changes)]
    assert came == [c.tokens for c in run(requests, Sampling(8))]


def test_kept_logits_are_those_of_the_dense_forward():
    for completion in run(prompts(9, 21), Sampling(6), keep_logits=True):
        tokens, first = completion.prompt + completion.tokens, len(completion.prompt) - 1
        dense = models.dense_forward(tiny.params(CONFIG), CONFIG, jnp.asarray(tokens))[first : first + 6]
        np.testing.assert_allclose(np.stack(completion.logits), dense, rtol=0, atol=2e-5)


def test_draws_hang_on_seed_and_position_alone():
    requests = prompts(4, 13, 6)
    sampling = [Sampling(10, temperature=1.0, seed=seed) for seed in (5, 6, 5)]
    together = [c.tokens for c in run(requests, sampling)]
    backwards = [c.tokens for c in run(requests[::-1], sampling[::-1])][::-1]
    alone = [run([p], s)[0].tokens for p, s in zip(requests, sampling, strict=True)]
    assert together == backwards == alone
    assert together[0] != run([requests[0]], Sampling(10, temperature=1.0, seed=7))[0].tokens
    assert together[0] != run([requests[0]], Sampling(10))[0].tokens


def test_greedy_and_drawn_requests_share_a_batch():
    requests = prompts(6, 6)
    mixed = run(requests, [Sampling(8), Sampling(8, temperature=0.7)])
    assert mixed[0].tokens == run([requests[0]], Sampling(8))[0].tokens


def test_draws_have_the_right_frequencies():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    n = 20000
    rows = jnp.broadcast_to(logits, (n, 4))
    at = jnp.arange(n, dtype=jnp.int32)
    for seed, temperature in ((0, 1.0), (1, 2.0)):
        drawn = generate.sample(rows, jnp.full(n, temperature), jnp.full(n, seed, jnp.int32), at)
        share = np.bincount(np.asarray(drawn), minlength=4) / n
        np.testing.assert_allclose(share, jax.nn.softmax(logits / temperature), atol=0.015)


def test_two_programs_whatever_the_lengths(monkeypatch):
    chex.clear_trace_counter()
    counted = jax.jit(
        chex.assert_max_traces(generate.step.__wrapped__, n=2),
        static_argnames=("config", "implementation"),
        donate_argnames="cache",
    )
    monkeypatch.setattr(generate, "step", counted)
    generator = make()
    for prompt in prompts(3, 40, 9, 1, 22):
        generator.submit(prompt, Sampling(15, temperature=0.5 * (len(prompt) % 2)))
    generator.run()
    assert counted._cache_size() == 2


def test_a_stop_token_ends_the_text():
    (prompt,) = prompts(5)
    whole = run([prompt], Sampling(10))[0].tokens
    stop = whole[4]
    came = run([prompt], Sampling(10, stop=(stop,)))[0]
    assert came.tokens == whole[: whole.index(stop) + 1] and came.reason == "stop"


def test_the_context_ends_the_text():
    (prompt,) = prompts(60)
    came = run([prompt], Sampling(100))[0]
    assert len(came.tokens) == 4 and came.reason == "length"
    assert len(run(prompts(63), Sampling(100))[0].tokens) == 1


def test_requests_wait_for_pages():
    generator = make(num_pages=8)
    for prompt in prompts(20, 20, 5):  # 6, 6 and 2 pages
        generator.submit(prompt, Sampling(4))
    generator.step()
    assert [c.reason for c in generator.completions] == ["running", "waiting", "waiting"]  # nobody overtakes
    done = generator.run()
    assert [len(c.tokens) for c in done] == [4, 4, 4]
    assert [c.tokens for c in done] == [c.tokens for c in run(prompts(20, 20, 5), Sampling(4))]
    stats = generator.stats
    assert (stats.pages, stats.pages_used) == (8, 0) and stats.pages_peak == 8
    assert stats.prefill_tokens == 45 and stats.steps == 13


def test_requests_may_come_while_others_run():
    first, second = prompts(10, 12)
    generator = make()
    generator.submit(first, Sampling(12))
    for _ in range(5):
        generator.step()
    generator.submit(second, Sampling(12))
    came = [c.tokens for c in generator.run()]
    assert came == [run([p], Sampling(12))[0].tokens for p in (first, second)]


def test_tokens_come_as_they_are_drawn():
    seen = {0: [], 1: []}
    generator = make()
    for prompt in prompts(3, 25):
        generator.submit(prompt, Sampling(5))
    done = generator.run(lambda request, token: seen[request].append(token))
    assert [seen[0], seen[1]] == [c.tokens for c in done]


@pytest.mark.parametrize(
    ("prompt", "sampling", "text"),
    [
        ([], Sampling(), "prompt: got no tokens, expected at least one"),
        ([5] * 64, Sampling(), "prompt: got 64 tokens, expected at most 63 .*context of 64; shorten it"),
        (
            [5] * 40,
            Sampling(24),
            "prompt: got 40 tokens and up to 24 more, which take 16 pages, expected .* 8; shorten",
        ),
        ([5, 10**6], Sampling(), r"prompt: got the token \[1000000\], expected ids in"),
        ([-1], Sampling(), r"prompt: got the token \[-1\]"),
        ([5], Sampling(0), "max_tokens: got 0"),
        ([5], Sampling(temperature=-1.0), "temperature: got -1.0"),
        ([5], Sampling(temperature=float("nan")), "temperature: got nan"),
        ([5], Sampling(seed=-1), "seed: got -1"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(prompt, sampling, text):
    generator = make(num_pages=8)
    before = np.asarray(generator.cache.k)
    with pytest.raises(ValueError, match=text):
        generator.submit(prompt, sampling)
    assert not generator.busy and generator.completions == []
    np.testing.assert_array_equal(generator.cache.k, before)
    generator.submit([5], Sampling(2))
    assert len(generator.run()[0].tokens) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_slots": 0}, "num_slots: got 0"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"num_pages": 0}, "num_pages: got 0"),
        ({"step_tokens": 3}, "step_tokens: got 3, expected more than the 3 slots"),
        ({"max_len": 65}, r"max_len: got 65, expected a length in \[1, 64\]"),
    ],
)
def test_bad_sizes(changes, text):
    with pytest.raises(ValueError, match=text):
        make(**changes)


def test_text_stream_never_splits_a_character():
    tokenizer = models.TextTokenizer(tiny.tokenizer())
    text = "the è 日本 🙂 in\ufffd. é"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)
    stream = models.TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == text
    assert [piece for piece in pieces if "\ufffd" in piece] == ["\ufffd."]  # the one that the text has
    cut = models.TextStream(tokenizer)
    assert "".join(cut.push(t) for t in tokenizer.encode("a🙂")[:-1]) == "a"
    assert cut.finish() == "\ufffd"


def test_generate_completes_prompts_at_once():
    done = generate.generate(tiny.params(CONFIG), CONFIG, prompts(3, 9), Sampling(4), **OPTIONS)
    assert [c.tokens for c in done] == [c.tokens for c in run(prompts(3, 9), Sampling(4))]
