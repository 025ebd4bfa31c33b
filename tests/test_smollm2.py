"""SmolLM2-135M-Instruct, the real model at hand; left out where its wheel is not installed (see conftest.py)."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import demo, models
from jattn.generate import Generator, Sampling
from jattn.speculate_command import shipped_draft
from jattn.stream import OrderedPrinter

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

QUESTION = "What is the capital of France?"
NEW = 24


@pytest.fixture(scope="module")
def model():
    return models.load(models.default_model())


@pytest.fixture(scope="module")
def prompts(model):
    chat = model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    rest = ("Once upon a time", "Paged attention keeps the keys and values of a sequence in pages, " * 6)
    return [chat, *map(model.tokenizer.encode, rest)]


def complete(model, prompts, sampling=None):
    generator = Generator(
        model.params, model.config, num_slots=3, step_tokens=64, num_pages=32, max_len=256, keep_logits=True
    )
    for prompt in prompts:
        generator.submit(prompt, sampling or Sampling(NEW))
    return generator.run()


@pytest.fixture(scope="module")
def batched(model, prompts):
    return complete(model, prompts)


def test_config(model):
    c = model.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert (c.vocab_size, c.eos_ids, c.rope_layout, c.qk_norm) == (49152, (2,), "interleaved", False)


def test_tokenizer(model):
    text = "Hello world 12345 it's  è日本 <|im_end|>\n\n  x"
    tokens = model.tokenizer.encode(text)
    pieces = [model.tokenizer.tokenizer.decode([t], skip_special_tokens=False) for t in tokens]
    assert pieces[:8] == ["Hello", " world", " ", "1", "2", "3", "4", "5"] and 2 in tokens
    assert model.tokenizer.tokenizer.decode(tokens, skip_special_tokens=False) == text
    chat = model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    assert model.tokenizer.tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_answer_names_paris(model, batched):
    out = io.StringIO()
    printer = OrderedPrinter(model.tokenizer, [""], out)
    for token in batched[0].tokens:
        printer.push(0, token)
    printer.finish(0)
    assert out.getvalue() == "The capital of France is Paris.\n" and batched[0].reason == "stop"


def test_batched_equals_alone(model, prompts, batched):
    for prompt, completion in zip(prompts, batched, strict=True):
        assert complete(model, [prompt])[0].tokens == completion.tokens


def test_batched_equals_the_dense_forward_token_by_token(model, batched):
    """The dense forward is causal: if it agrees on each token given those before, it writes the same text."""
    for completion in batched:
        assert demo.worst_difference(model, completion) <= 1e-3
        tokens, first = completion.prompt + completion.tokens, len(completion.prompt) - 1
        dense = np.asarray(
            models.dense_forward(model.params, model.config, jnp.asarray(tokens + [0] * (-len(tokens) % 128)))
        )
        assert dense[first : first + len(completion.tokens)].argmax(-1).tolist() == completion.tokens


def test_draws_do_not_hang_on_the_batch(model, prompts):
    sampling = Sampling(8, temperature=0.8, seed=11)
    together = complete(model, prompts[:2], sampling)
    assert [c.tokens for c in together] == [complete(model, [p], sampling)[0].tokens for p in prompts[:2]]


def test_it_reads_english_and_better_than_with_the_other_rotation(model):
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the"
        " engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
    )
    tokens = model.tokenizer.encode(text)
    padded = jnp.asarray(tokens + [0] * (-len(tokens) % 128))

    def loss(config):
        logits = models.dense_forward(model.params, config, padded)[: len(tokens) - 1]
        return -float(jax.nn.log_softmax(logits)[jnp.arange(len(logits)), jnp.asarray(tokens[1:])].mean())

    right, wrong = loss(model.config), loss(dataclasses.replace(model.config, rope_layout="half"))
    assert right < 2.0 and wrong > right + 0.5


def test_the_demo(model, capsys):
    assert demo.run(models.default_model(), max_tokens=8) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out and "decode tokens/s" in out and "within 0.001" in out
    table = out.split("Speculation:", 1)[1]
    proposers = {"plain", "ngram", "repeat"} | ({"draft"} if shipped_draft(model) else set())
    assert ("No draft is shipped" in out) is ("draft" not in proposers)
    rows = [line.replace("│", "|").split("|")[1:-1] for line in table.splitlines() if " yes " in line]
    assert {row[0].strip() for row in rows} == proposers and "NO" not in table
    assert "draft" not in proposers or "draft, drawn" in table
