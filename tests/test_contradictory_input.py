"""Traced lengths, starts and page ids that contradict each other: every implementation takes them in the same way.

What they are taken as is written in NumPy (`batches.as_taken`), and the oracle says what that means. Memory that nobody
wrote is NaN in the interpreters, so a row that no tile owns would show. For the Hopper kernel see `hopper_interpreter`.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jattn
from tests import batches, oracle, tpu_interpreter, triton_interpreter
from tests.paged_attention_body import assert_close, assert_lse_close

I32 = np.iinfo(np.int32)


@pytest.fixture(autouse=True)
def _interpreted_on_a_cpu(monkeypatch):
    races = tpu_interpreter.simulate(monkeypatch)
    triton_interpreter.simulate(monkeypatch)
    yield
    assert not any(race.races_found for race in races)


def draw(query_lens, context_lens, **options):
    """A batch of T = sum(query_lens) + 2, in which every page may be seen by anyone."""
    return batches.draw(np.random.default_rng(3), query_lens, context_lens, padding_tokens=2, **options)


def check(batch: dict, implementation: str, **static) -> None:
    arrays, options = batches.split(batch)
    options |= static | {"implementation": implementation, "return_lse": True}
    out, lse = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **options))(arrays)
    want, want_lse = oracle.attention(**batches.as_taken(batch), **static)
    assert_close(np.asarray(out).astype(np.float64), want, "float32")
    assert_lse_close(np.asarray(lse), want_lse, "float32")


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton", "tpu"])


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "starts",
    [
        [0, 6, 0, 6, 0, 6],  # more tiles than there are rows, were each sequence to keep its rows
        [5, 2, -3, 9, I32.max, I32.min],  # the first not at 0, then outside of q on both sides
    ],
    ids=["to_and_fro", "outside"],
)
def test_starts_that_decrease_leave_no_row_unwritten(implementation, starts):
    batch = draw((1, 1, 1, 1, 2), (6, 5, 9, 3, 8))
    batch["query_start_loc"] = np.array(starts, np.int32)
    check(batch, implementation, max_query_len=1, sinks=np.array([0.5, -np.inf, 1.0, 0.0], np.float32))


@IMPLEMENTATIONS
def test_lengths_beyond_the_table_below_zero_and_shorter_than_their_queries(implementation):
    batch = draw((1, 2, 5, 4, 1), (6, 5, 9, 3, 8))
    batch["seq_lens"] = np.array([I32.max, -4, 3, 0, I32.min], np.int32)
    check(batch, implementation, causal=np.array([True, False, True, False, True]))


@IMPLEMENTATIONS
def test_page_ids_outside_of_the_pool_name_its_first_or_last_page(implementation):
    batch = draw((1, 2, 3), (6, 5, 9))
    batch["block_table"][:, 0] = [I32.max, -1, I32.min]
    batch["block_table"][2, 1] = len(batch["k_cache"])
    check(batch, implementation)


@IMPLEMENTATIONS
@pytest.mark.parametrize("options", [{}, {"window": (2, 1)}, {"tree_mask": 4}], ids=["plain", "window", "tree"])
def test_more_queries_than_keys_of_which_the_last_are_new(implementation, options):
    batch = draw((5, 3, 4, 2), (0, 6, 0, 3))
    rng = np.random.default_rng(4)
    batch |= {name: batches.normal(rng, (16, 2, 8), np.float32) for name in ("new_k", "new_v")}
    batch["seq_lens"] = np.array([3, 9, 0, I32.max], np.int32)
    if "tree_mask" in options:
        options = {"tree_mask": rng.random((4, 4, 4)) < 0.6}
    check(batch | {"causal": np.array([True, False, True, True])} | options, implementation)
