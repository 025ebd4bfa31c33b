"""Positions, slots and acceptance on worked examples."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jattn.dflash import rows
from jattn.dflash.loop import accept
from jattn.dflash.proposers import NGram, Repeat, View

TABLE = jnp.asarray([[7, 2, 9, -1, -1], [4, 1, 8, 12, -1], [3, 6, 5, 10, 11]])
CONTEXT = jnp.asarray([5, 8, 11])
FULL = jnp.asarray([4, 4, 4])


def test_the_draft_block():
    r = rows.pack(CONTEXT, FULL, 12)
    meta = rows.metadata(r, TABLE, 4, causal=False, max_query_len=4)
    assert meta.query_start_loc.tolist() == [0, 4, 8, 12] and meta.seq_lens.tolist() == [9, 12, 15]
    assert r.position.tolist() == [5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14]
    assert meta.slot_mapping.tolist() == [9, 10, 11, 36, 32, 33, 34, 35, 23, 40, 41, 42]


def test_acceptance_and_the_next_context():
    block = jnp.asarray([[9, 1, 2, 3], [9, 4, 5, 6], [9, 7, 8, 9]])
    drawn = jnp.asarray([[0, 2, 3, 1], [4, 5, 6, 7], [7, 1, 9, 2]])  # right after a miss counts for nothing
    kept, stopped = accept(block, drawn, FULL, jnp.zeros((3, 4), bool))
    assert kept.tolist() == [1, 4, 2] and not stopped.any()
    r = rows.pack(CONTEXT, FULL, 12)
    slots = rows.slots(r, TABLE, 4, r.offset < kept[r.seq])
    assert slots.tolist() == [9, -1, -1, -1, 32, 33, 34, 35, 23, 40, -1, -1]
    following = rows.pack(CONTEXT + kept, FULL, 12)
    meta = rows.metadata(following, TABLE, 4, causal=False, max_query_len=4)
    assert meta.seq_lens.tolist() == [10, 16, 17]
    assert meta.slot_mapping.tolist() == [10, 11, 36, 37, 48, 49, 50, 51, 41, 42, 43, 44]


def test_two_of_four_rejected():
    table = jnp.asarray([[0, 0, 7, 8, 9]])
    r = rows.pack(jnp.asarray([10]), jnp.asarray([4]), 4)
    assert rows.slots(r, table, 4, r.offset < 2).tolist() == [30, 31, -1, -1]
    assert rows.slots(rows.pack(jnp.asarray([12]), jnp.asarray([3]), 4), table, 4).tolist() == [32, 33, 34, -1]
    assert rows.slots(r, jnp.full((1, 5), -1), 4).tolist() == [-1] * 4
    assert rows.slots(rows.pack(jnp.asarray([18]), jnp.asarray([4]), 4), table, 4).tolist() == [38, 39, -1, -1]


def test_idle_and_short_requests_take_fewer_rows():
    r = rows.pack(jnp.asarray([5, 3, 8]), jnp.asarray([2, 0, 3]), 8)
    assert r.seq.tolist()[:5] == [0, 0, 2, 2, 2] and r.position.tolist() == [5, 6, 8, 9, 10, 0, 0, 0]
    assert r.live.tolist() == [True] * 5 + [False] * 3
    meta = rows.metadata(r, TABLE, 4, causal=True, max_query_len=4)
    assert meta.seq_lens.tolist() == [7, 0, 11] and meta.slot_mapping.tolist()[5:] == [-1] * 3
    came = rows.by_sequence(r, jnp.arange(8), 3)
    assert came[0, :2].tolist() == [0, 1] and came[2].tolist() == [2, 3, 4]


def test_a_stop_cuts_the_accepted_run():
    block = jnp.asarray([[9, 4, 5, 6]] * 3)
    drawn = jnp.asarray([[4, 5, 6, 7], [4, 5, 6, 7], [4, 1, 5, 7]])
    ends = drawn == 5
    kept, stopped = accept(block, drawn, jnp.asarray([4, 4, 4]), ends)
    assert kept.tolist() == [2, 2, 2] and stopped.tolist() == [True, True, False]  # the third's lies past the miss
    kept, stopped = accept(block, drawn, jnp.asarray([1, 3, 0]), jnp.zeros_like(ends))
    assert kept.tolist() == [1, 3, 0] and not stopped.any()


def view(*texts):
    tokens = np.zeros((len(texts), 16), np.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = text
    context = jnp.asarray([len(text) - 1 for text in texts])
    counts = jnp.full(len(texts), 4)
    r = rows.pack(context, counts, 4 * len(texts))
    return View(jnp.asarray(tokens), context, r, jnp.zeros((len(texts), 1), jnp.int32), context, jnp.zeros(len(texts)))


def test_lookup_takes_the_latest_of_the_longest_matches():
    texts = ([1, 2, 3, 9, 8, 2, 3, 7, 5, 1, 2, 3], [1, 2, 5, 2, 6, 2], [4], [5, 6, 5, 6], [7, 7], [1, 2, 3])
    drafts, _ = NGram().propose(None, (), view(*texts), 4)
    assert drafts.tolist() == [[9, 8, 2], [6, 2, 6], [4, 4, 4], [5, 6, 5], [7, 7, 7], [3, 3, 3]]
    assert Repeat().propose(None, (), view(*texts), 4)[0].tolist()[0] == [3, 3, 3]
