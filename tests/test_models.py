"""The decoder through pages against the dense forward, on small random models."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.models import decoder
from tests import tiny_models as tiny

PAGE_SIZE, NUM_PAGES = 4, 24
FACTORS = tuple(float(x) for x in np.linspace(1, 8, 8))
CONFIGS = {
    "llama": tiny.config(),
    "interleaved": tiny.config(rope_layout="interleaved"),
    "tied": tiny.config(tie_word_embeddings=True),
    "qwen2": tiny.config("qwen2"),
    "qwen3": tiny.config("qwen3", rope_theta=1e6),
    "all biases, scaled RoPE": tiny.config(attention_bias=True, output_bias=True, rope_factors=FACTORS),
    "one head": tiny.config(num_heads=1, num_kv_heads=1, head_dim=8),
}
# Query lengths of three sequences, step by step: prefill, chunks beside decode rows, pauses, several rows at once.
STEPS = ((7, 3, 0), (5, 1, 4), (1, 1, 1), (0, 6, 2), (3, 0, 1))
ROWS = 16


@functools.partial(jax.jit, static_argnames=("config", "taps"), donate_argnames="cache")
def paged(params, config, tokens, positions, cache, metadata, taps=()):
    hidden, cache, tapped = models.forward(params, config, tokens, positions, cache, metadata, taps=taps)
    return models.head(params, hidden), cache, tapped


def draw(seed=0):
    """Three sequences of random tokens, as long as all steps together."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, len(tiny.words()), n) for n in np.sum(STEPS, 0)]


def ragged_steps(texts, num_pages=NUM_PAGES):
    """The steps' input: rows of (sequence, position), tokens, positions and metadata."""
    allocator, done = jattn.PageAllocator(num_pages, PAGE_SIZE), [0, 0, 0]
    for s in range(3):
        allocator.allocate(s)
    for query_lens in STEPS:
        for s, n in enumerate(query_lens):
            allocator.extend(s, n)
        done = [d + n for d, n in zip(done, query_lens, strict=True)]
        rows = [(s, done[s] - n + i) for s, n in enumerate(query_lens) for i in range(n)]
        tokens, positions = np.zeros((2, ROWS), np.int32)
        tokens[: len(rows)] = [texts[s][p] for s, p in rows]
        positions[: len(rows)] = [p for _, p in rows]
        metadata = jattn.AttentionMetadata.from_lengths(
            query_lens,
            done,
            [allocator.pages(s) for s in range(3)],
            page_size=PAGE_SIZE,
            num_tokens=ROWS,
            num_seqs=4,
            max_pages=8,
        )
        yield rows, jnp.asarray(tokens), jnp.asarray(positions), metadata


def worst(config, params, cache, *, dtype=jnp.float32):
    """Largest difference between any row of any step and the dense forward."""
    texts = draw()
    dense = [np.asarray(models.dense_forward(params, config, jnp.asarray(np.pad(t, (0, 20 - len(t)))))) for t in texts]
    biggest = 0.0
    for rows, tokens, positions, metadata in ragged_steps(texts):
        logits, cache, _ = paged(params, config, tokens, positions, cache, metadata)
        assert logits.dtype == jnp.float32
        for row, (s, p) in enumerate(rows):
            biggest = max(biggest, float(np.abs(np.asarray(logits[row]) - dense[s][p]).max()))
    return biggest


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_steps_equal_the_dense_forward(name):
    config = CONFIGS[name]
    cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE)
    assert worst(config, tiny.params(config), cache) <= 2e-5


def test_nan_in_free_pages_and_layouts_change_nothing():
    config = CONFIGS["llama"]
    cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE, layout="HND")
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    assert worst(config, tiny.params(config), cache) <= 2e-5


def test_bfloat16():
    config = CONFIGS["qwen3"]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params(config))
    cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE, jnp.bfloat16)
    assert worst(config, params, cache) <= 0.15  # of logits of about 3, over two layers


def test_layers_keep_to_their_own_pages():
    config, texts = CONFIGS["llama"], draw()
    size = NUM_PAGES * PAGE_SIZE

    def pools(wild):
        cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE)
        for _, tokens, positions, metadata in ragged_steps(texts):
            metadata = metadata.replace(slot_mapping=metadata.slot_mapping.at[-3:].set(jnp.asarray(wild)))
            _, cache, _ = paged(tiny.params(config), config, tokens, positions, cache, metadata)
        return np.asarray(cache.k)

    clean = pools([-1, -1, -1])
    used = clean.reshape(config.num_layers, size, -1).any(-1)
    assert used.sum(-1).tolist() == [sum(map(len, texts))] * 2
    np.testing.assert_array_equal(used[0], used[1])
    np.testing.assert_array_equal(pools([-5, size, 10**6]), clean)  # outside a layer's pages: written nowhere


def test_taps_are_the_residual_stream_after_a_layer():
    """Cutting the model after a layer and skipping its last norm gives the tap."""
    config = tiny.config(num_layers=4)
    params = tiny.params(config)
    _, tokens, positions, metadata = next(iter(ragged_steps(draw())))
    cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE)
    _, _, tapped = paged(params, config, tokens, positions, cache, metadata, taps=(3, 1, 1))
    assert tapped.shape == (ROWS, 3, config.hidden_size)
    np.testing.assert_array_equal(tapped[:, 1], tapped[:, 2])
    for column, last in ((0, 3), (1, 1)):
        short = tiny.config(num_layers=last + 1)
        cut = params | {"layers": jax.tree.map(lambda x, n=last + 1: x[:n], params["layers"])}
        cache = models.create_cache(short, NUM_PAGES, PAGE_SIZE)
        hidden, _, _ = jax.jit(models.forward, static_argnums=1)(cut, short, tokens, positions, cache, metadata)
        normed = decoder.rms_norm(tapped[:, column], params["norm"], config.rms_norm_eps)
        np.testing.assert_allclose(normed, hidden, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"taps: got \(4,\), expected layers in \[0, 4\)"):
        models.forward(params, config, tokens, positions, cache, metadata, taps=(4,))


def test_a_cache_of_another_model_is_refused():
    config = tiny.config()
    _, tokens, positions, metadata = next(iter(ragged_steps(draw())))
    cache = jattn.KVCache.create(NUM_PAGES + 1, PAGE_SIZE, 2, 16, jnp.float32)
    with pytest.raises(ValueError, match=r"cache: got .* a multiple of 2 pages"):
        models.forward(tiny.params(config), config, tokens, positions, cache, metadata)


def test_one_program_for_all_steps():
    chex.clear_trace_counter()
    config = tiny.config()
    cache = models.create_cache(config, NUM_PAGES, PAGE_SIZE)
    once = jax.jit(chex.assert_max_traces(paged.__wrapped__, n=1), static_argnames=("config", "taps"))
    for _, tokens, positions, metadata in ragged_steps(draw()):
        _, cache, _ = once(tiny.params(config), config, tokens, positions, cache, metadata)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_cache_is_written_in_place(dtype):
    config = tiny.config()
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.params(config))
    _, tokens, positions, metadata = next(iter(ragged_steps(draw())))
    cache = models.create_cache(config, 5000, PAGE_SIZE, dtype)
    compiled = paged.lower(params, config, tokens, positions, cache, metadata).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.k.nbytes + cache.v.nbytes
    assert memory.temp_size_in_bytes < cache.k.nbytes / 10
    _, after, _ = paged(params, config, tokens, positions, cache, metadata)
    assert cache.k.is_deleted() and not after.k.is_deleted()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_kv_heads": 4}, "num_heads: got 6 heads over 4 KV heads"),
        ({"head_dim": 15}, "head_dim: got 15"),
        ({"num_layers": 0}, "num_layers: got 0"),
        ({"rope_layout": "neox"}, "rope_layout: got neox, expected 'half' or 'interleaved'"),
        ({"rope_factors": (1.0,)}, "rope_factors: got 1 factors, expected 8"),
    ],
)
def test_bad_config(changes, text):
    with pytest.raises(ValueError, match=text):
        tiny.config(**changes)
