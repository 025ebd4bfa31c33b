"""Batches cut, reordered and rearranged: the golden cases of the engine's own tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends import batch_split
from backends.metadata import CommonAttentionMetadata, compute_mm_prefix_ranges


def common(query_lens, seq_lens=None, *, tokens=None, block_table=None, **options):
    query_lens = np.asarray(query_lens, np.int32)
    total = int(query_lens.sum()) if tokens is None else tokens
    loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens = query_lens if seq_lens is None else np.asarray(seq_lens)
    table = np.zeros((len(query_lens), 1), np.int32) if block_table is None else block_table
    return CommonAttentionMetadata.make(loc, seq_lens, table, np.zeros(total, np.int32), **options)


SPLITS = [
    (1, [1, 1, 1], False, (3, 0, 3, 0)),
    (3, [1, 2, 1, 3, 2, 1, 2], False, (7, 0, 12, 0)),
    (3, [4, 5, 6, 7], False, (0, 4, 0, 22)),
    (4, [2, 1, 3, 4, 5, 6, 7, 8], False, (4, 4, 10, 26)),
    (3, [2, 2, 1, 3, 2, 1, 2], True, (2, 5, 4, 9)),
    (4, [2, 2, 2, 4, 5, 6, 7, 8], True, (3, 5, 6, 30)),
    (4, [2, 1, 2, 4, 5, 6, 7, 8], True, (1, 7, 2, 33)),
    (2, [0, 0], False, (2, 0, 0, 0)),
    (1, [], False, (0, 0, 0, 0)),
]


@pytest.mark.parametrize(("threshold", "query_lens", "uniform", "want"), SPLITS)
def test_split_decodes_and_prefills(threshold, query_lens, uniform, want):
    got = batch_split.split_decodes_and_prefills(common(query_lens), threshold, require_uniform=uniform)
    assert got == want


def test_requests_of_no_tokens_pad_a_uniform_batch():
    batch = common([2, 2, 2, 0], tokens=8)
    assert batch_split.split_decodes_and_prefills(batch, 3, require_uniform=True) == (4, 0, 8, 0)


def test_short_extends_apart():
    batch = common([1, 1], is_prefilling=np.array([False, True]))
    for uniform in (False, True):
        got = batch_split.split_decodes_and_prefills(
            batch, 1, require_uniform=uniform, treat_short_extends_as_decodes=False
        )
        assert got == (1, 1, 1, 1)
    assert batch_split.split_decodes_and_prefills(batch, 1) == (2, 0, 2, 0)
    with pytest.raises(ValueError, match="is_prefilling: got None"):
        batch_split.split_decodes_and_prefills(common([1, 1]), 1, treat_short_extends_as_decodes=False)


EXTENDS = [
    (1, [1, 1, 8, 5, 7], [30, 2, 20, 5, 7], (2, 1, 2, 2, 8, 12)),
    (1, [1, 1], [30, 2], (2, 0, 0, 2, 0, 0)),
    (1, [8, 5], [20, 9], (0, 2, 0, 0, 13, 0)),
    (1, [8, 5], [8, 5], (0, 0, 2, 0, 0, 13)),
    (3, [3, 1, 4], [9, 1, 4], (2, 0, 1, 4, 0, 4)),
    (3, [3, 1, 4, 0], [9, 1, 5, 0], (2, 2, 0, 4, 4, 0)),
]


@pytest.mark.parametrize(("threshold", "query_lens", "seq_lens", "want"), EXTENDS)
def test_split_decodes_prefills_and_extends(threshold, query_lens, seq_lens, want):
    assert batch_split.split_decodes_prefills_and_extends(common(query_lens, seq_lens), threshold) == want


# (scheduled, computed, prompt) of each request.
REORDER = [
    (1, [(100, 100, 100), (1, 10, 10), (200, 200, 200), (1, 20, 20)], [3, 1, 2, 0]),
    (1, [(100, 0, 100), (10, 50, 50), (1, 10, 10)], [2, 1, 0]),
    (
        1,
        [
            (1, 20, 20),
            (1, 50, 50),
            (374, 0, 374),
            (300, 20, 20),
            (1, 20, 20),
            (256, 0, 256),
            (1, 5, 5),
            (27, 0, 27),
            (1, 4, 4),
        ],
        [0, 1, 6, 8, 4, 3, 2, 7, 5],
    ),
    (1, [(100, 0, 100), (1, 0, 1), (50, 100, 100), (1, 10, 10)], [3, 2, 0, 1]),
    (5, [(5, 100, 100), (5, 50, 100), (5, 0, 100), (10, 50, 100)], [0, 1, 3, 2]),
    (1, [(1, 5, 5), (9, 5, 5), (3, 0, 3)], [0, 1, 2]),
    (2, [(9, 5, 20), (2, 5, 20), (2, 20, 20)], [2, 1, 0]),
    (2, [(2, 5, 20), (2, 20, 20)], [1, 0]),
]


@pytest.mark.parametrize(("threshold", "requests", "want"), REORDER)
def test_reorder(threshold, requests, want):
    order, moved = batch_split.reorder_batch_to_split_decodes_and_prefills(*zip(*requests, strict=True), threshold)
    assert list(order) == want
    assert moved == (want != sorted(want))


def test_local_attention_virtual_batches():
    table = np.arange(27, dtype=np.int32).reshape(3, 9)
    local = batch_split.make_local_attention_virtual_batches(4, common([4, 10, 5], [6, 17, 9], block_table=table), 2)
    assert np.diff(local.query_start_loc).tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert local.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    columns = [(0, [0, 1]), (0, [2, 3]), (1, [2, 3]), (1, [4, 5]), (1, [6, 7]), (1, [8, 8]), (2, [2, 3]), (2, [4, 5])]
    assert local.block_table_tensor.tolist() == [[9 * s + c for c in cs] for s, cs in columns]
    assert local.causal is True
    with pytest.raises(ValueError, match="chunk_size: got 3"):
        batch_split.make_local_attention_virtual_batches(3, common([1]), 2)


def test_dcp_local_seq_lens():
    lens = np.array([0, 1, 4, 5, 9, 10])
    every = batch_split.get_dcp_local_seq_lens(lens, 2)
    assert every.tolist() == [[0, 0], [1, 0], [2, 2], [3, 2], [5, 4], [5, 5]]
    assert batch_split.get_dcp_local_seq_lens(lens, 2, rank=1).tolist() == [0, 0, 2, 2, 4, 5]
    assert batch_split.get_dcp_local_seq_lens(np.array([9, 13]), 2, interleave=4).tolist() == [[5, 4], [8, 5]]
    assert jax.jit(lambda x: batch_split.get_dcp_local_seq_lens(x, 3, 2))(lens).tolist() == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_dcp_local_seq_lens_count_tokens_one_by_one(world, interleave):
    lens = np.arange(120)
    owner = (np.arange(120) // interleave) % world
    want = [[int((owner[:n] == rank).sum()) for rank in range(world)] for n in lens]
    assert batch_split.get_dcp_local_seq_lens(lens, world, interleave=interleave).tolist() == want


def test_bad_input():
    with pytest.raises(ValueError, match="rank: got 2, expected 0 to 1"):
        batch_split.get_dcp_local_seq_lens(np.array([1]), 2, rank=2)
    with pytest.raises(ValueError, match="computed: got 1"):
        batch_split.reorder_batch_to_split_decodes_and_prefills([1, 2], [1], [1])
    with pytest.raises(ValueError, match="seq_lens: got"):
        common([1, 1], np.float32([1, 1]))
    with pytest.raises(ValueError, match=r"query_start_loc: got int32\[2\]"):
        CommonAttentionMetadata.make([0, 1], [1, 1], np.zeros((2, 1), int), [0])
    with pytest.raises(ValueError, match=r"causal: got bool\[1\], expected bool\[S\] = bool\[2\]"):
        common([1, 1], causal=np.array([True]))
    with pytest.raises(ValueError, match="num_actual_tokens: got 3"):
        common([1, 1], num_actual_tokens=3)
    traced = jax.make_jaxpr(lambda x: batch_split.split_decodes_and_prefills(common([1]).replace(seq_lens=x))[0] + x)
    with pytest.raises(ValueError, match="query_start_loc: got a traced array"):
        traced(jnp.zeros(1, jnp.int32))


def test_common_metadata_is_a_pytree():
    batch = common([2, 3], [4, 3], causal=np.False_)
    assert batch.causal is False  # not a NumPy bool, which fails identity checks
    again = jax.jit(lambda m: m.replace(seq_lens=m.seq_lens + 1))(batch)
    assert again.causal is False
    assert again.max_query_len == 3
    assert again.seq_lens.tolist() == [5, 4]
    flags = common([2, 3], causal=np.array([True, False]))
    assert jax.jit(lambda m: m)(flags).causal.tolist() == [True, False]
    assert len(jax.tree.leaves(flags)) == len(jax.tree.leaves(batch)) + 1
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(flags)[0]]
    assert paths == [".query_start_loc", ".seq_lens", ".block_table_tensor", ".slot_mapping", ".causal"]


def test_common_metadata_answers():
    batch = common([2, 0, 3], [4, 0, 3], causal=np.array([True, False, False]), positions=np.arange(5))
    assert batch.naive_query_lens().tolist() == [2, 0, 3]
    assert batch.compute_num_computed_tokens().tolist() == [2, 0, 0]
    assert batch.token_to_req_indices().tolist() == [0, 0, 2, 2, 2]
    assert batch.batch_size() == 3
    small = batch.unpadded(2, 1)
    assert (small.num_reqs, small.num_actual_tokens, small.causal.tolist()) == (1, 2, [True])
    assert small.slot_mapping.shape == (2,)
    assert small.positions.tolist() == [0, 1]
    assert batch.num_reqs == 3


def test_multimodal_ranges_of_an_engine_include_their_ends():
    ranges = compute_mm_prefix_ranges({0: [(2, 5), (7, 7)], 2: [(0, 1), (4, 9)]}, 3)
    assert ranges.tolist() == [[[2, 6], [0, 0]], [[0, 0], [0, 0]], [[0, 2], [4, 10]]]
    assert compute_mm_prefix_ranges({0: [(3, 3)]}, 2) is None
    with pytest.raises(ValueError, match="ranges: got request 2"):
        compute_mm_prefix_ranges({2: [(0, 1)]}, 2)
