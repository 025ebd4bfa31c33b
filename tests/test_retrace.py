"""One program for any lengths, tables, flags and scales; and the call inside JAX's transformations."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import batches, oracle
from tests.paged_attention_body import assert_close

MIXES = [  # query and context lengths: three times 12 tokens in 4 sequences, of other kinds
    ((1, 1, 9, 1), (40, 3, 0, 17)),
    ((12, 0, 0, 0), (36, 0, 0, 0)),
    ((2, 3, 0, 4), (0, 44, 5, 44)),
]


@pytest.fixture(autouse=True)
def _fresh_trace_counter():
    chex.clear_trace_counter()  # it counts by the function's name, also across tests


def draw(rng, query_lens, context_lens, **options):
    """A batch of 12 tokens in pages of 4, in shapes that do not hang on the lengths."""
    pages = [-(-(q + c) // 4) for q, c in zip(query_lens, context_lens, strict=True)]
    return batches.draw(
        rng,
        query_lens,
        context_lens,
        padding_tokens=12 - sum(query_lens),
        spare_pages=48 - sum(pages),
        spare_columns=12 - max(pages),
        **options,
    )


def once(fn):
    """Jit `fn`; a second trace of it fails."""
    return jax.jit(chex.assert_max_traces(fn, n=1))


@pytest.mark.parametrize("scales", ["scalar", "head", "token"])
def test_no_retrace_when_lengths_tables_flags_and_scales_change(scales):
    call = once(lambda arrays: jattn.paged_attention(**arrays, window=(20, 2)))
    rng = np.random.default_rng(0)
    for query_lens, context_lens in MIXES:
        batch = draw(rng, query_lens, context_lens, kv_dtype="int8", scales=scales)
        batch |= {"causal": rng.random(4) < 0.5, "kv_start": rng.integers(0, 9, 4).astype(np.int32)}
        batch |= {"bidirectional_ranges": rng.integers(0, 20, (4, 2, 2)).astype(np.int32)}
        batch |= {"tree_mask": rng.random((4, 3, 3)) < 0.5}
        want, _ = oracle.attention(**batch, window=(20, 2))
        assert_close(np.asarray(call(batches.split(batch)[0])), want, "float32")


def test_no_recompilation_outside_of_jit_either():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    rng = np.random.default_rng(1)
    for mix in MIXES:
        before = len(compiled)
        batch = draw(rng, *mix)
        assert_close(np.asarray(jattn.paged_attention(**batch)), oracle.attention(**batch)[0], "float32")
        assert (len(compiled) > before) == (mix is MIXES[0])


def layers_of(rng, count=3):
    """A batch whose q and caches have a leading axis of layers, and each layer's answer."""
    batch = draw(rng, *MIXES[0])
    for name in ("q", "k_cache", "v_cache"):
        batch[name] = batches.normal(rng, (count, *batch[name].shape), np.float32)
    stacked = ("q", "k_cache", "v_cache")
    wants = [oracle.attention(**batch | {name: batch[name][i] for name in stacked})[0] for i in range(count)]
    return batch, stacked, np.stack(wants)


def test_vmap_over_the_layers_caches():
    batch, stacked, want = layers_of(np.random.default_rng(2))
    arrays, static = batches.split(batch)
    axes = {name: 0 if name in stacked else None for name in arrays}
    call = jax.vmap(lambda arrays: jattn.paged_attention(**arrays, **static), in_axes=(axes,))
    assert_close(np.asarray(jax.jit(call)(arrays)), want, "float32")


def test_vmap_over_everything():
    rng = np.random.default_rng(3)
    drawn = [draw(rng, *mix) | {"causal": rng.random(4) < 0.5} for mix in MIXES]
    arrays = jax.tree.map(lambda *xs: np.stack(xs), *(batches.split(batch)[0] for batch in drawn))
    out = jax.jit(jax.vmap(lambda arrays: jattn.paged_attention(**arrays)))(arrays)
    assert_close(np.asarray(out), np.stack([oracle.attention(**batch)[0] for batch in drawn]), "float32")


def test_scan_over_layers():
    batch, stacked, want = layers_of(np.random.default_rng(4))
    arrays, static = batches.split(batch)
    shared = {name: x for name, x in arrays.items() if name not in stacked}

    def layer(count, per_layer):
        return count + 1, jattn.paged_attention(**shared, **per_layer, **static)

    count, out = once(lambda xs: jax.lax.scan(layer, 0, xs))({name: arrays[name] for name in stacked})
    assert count == len(want)
    assert_close(np.asarray(out), want, "float32")


def test_while_loop_over_growing_lengths():
    rng = np.random.default_rng(5)
    batch = batches.draw(rng, (1, 1, 1), (2, 30, 9), spare_columns=2)
    arrays, static = batches.split(batch)
    batch["block_table"][:] = rng.permutation(np.arange(1, 31)).reshape(3, 10)
    arrays |= {name: batches.normal(rng, (31, 4, 2, 8), np.float32) for name in ("k_cache", "v_cache")}
    steps = 7

    def step(state):
        i, seq_lens, outs = state
        out = jattn.paged_attention(**arrays | {"seq_lens": seq_lens}, **static)
        return i + 1, seq_lens + 1, outs.at[i].set(out)

    def run(seq_lens):
        state = (0, seq_lens, jnp.zeros((steps, *arrays["q"].shape)))
        return jax.lax.while_loop(lambda state: state[0] < steps, step, state)[2]

    outs = once(run)(arrays["seq_lens"])
    for i, out in enumerate(outs):
        want, _ = oracle.attention(**arrays | {"seq_lens": arrays["seq_lens"] + i}, **static)
        assert_close(np.asarray(out), want, "float32")


def test_a_closed_over_batch_under_jit_is_the_same_as_an_eager_call():
    batch = draw(np.random.default_rng(6), *MIXES[2])
    eager = jattn.paged_attention(**batch)
    np.testing.assert_array_equal(jax.jit(functools.partial(jattn.paged_attention, **batch))(), eager)
