"""The Hopper kernel without the hardware: its body in the interpreter, its plan, what it refuses, and that it lowers."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, hopper_plan, paged_hopper
from pallas_kernels.hopper_loading import split_piece, whole_piece
from pallas_kernels.hopper_pieces import DEST, F0, F1, HEAD, LENGTH, ROW, T0, T1, TOKENS, WHOLE, Kernel
from pallas_kernels.hopper_steps import Steps
from pallas_kernels.masks import common_span, visible
from pallas_kernels.request import AttentionRequest, make_request
from tests import batches
from tests.cases import Case, build
from tests.hopper_interpreter import CASES

ROOT = Path(__file__).parent.parent


# One process for all cases, and not this one: the interpreter needs a larger thread pool than a test process has.
@functools.cache
def interpreted() -> dict[str, dict]:
    """Results of `tests.hopper_interpreter` by case."""
    environment = {n: x for n, x in os.environ.items() if n not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "tests.hopper_interpreter", *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line for line in lines}


@pytest.mark.xdist_group("hopper_interpreter")
@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_agrees_with_the_oracle_amid_poison(name):
    result = interpreted()[name]
    assert result["error"] < 4e-3
    assert result["lse_error"] < 1e-4
    assert result["same_rows_alive"]
    assert result["dead_rows_zero"]
    assert not result["races"]


def request_of(**changes) -> AttentionRequest:
    case = Case("request", dtype="bfloat16", head_dim=128, num_heads=8, **changes)
    arrays, static = batches.split(build(case))
    return make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_ranges": 2}, "bidirectional_ranges"),
        ({"tree_size": 3}, "tree_mask"),
        ({"page_size": 12}, "page_size=12"),
        ({"kv_dtype": "int8", "scales": "head"}, "kv_dtype=int8"),
        ({"kv_dtype": "float8_e4m3fn", "scales": "token"}, "each token and head"),
    ],
)
def test_a_refusal_names_its_reason(changes, reason):
    assert reason in "; ".join(paged_hopper.why_not(request_of(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": "each", "window": (9, 2), "soft_cap": 5.0, "sinks": "finite", "alibi": True},
        {"kv_dtype": "float8_e4m3fn", "scales": "head"},
        {"kv_dtype": "float8_e5m2", "new_kv": True},
    ],
)
def test_what_a_device_has_confirmed_is_not_refused(changes):
    assert paged_hopper.why_not(request_of(**changes)) == ()


def test_a_named_call_that_it_lacks_is_refused_by_dispatch():
    case = Case("tree", dtype="bfloat16", head_dim=64, tree_size=3)
    arrays, static = batches.split(build(case))
    request, operands = make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)
    with pytest.raises(NotImplementedError, match=r"hopper.*tree_mask"):
        dispatch.attend(request, operands, "hopper")


# ------------------------------------------------------------------------------------------------------------ the plan


def plan_of(case: Case, split: bool, programs: int = 5, wgs: int = 2):
    arrays, static = batches.split(build(case))
    request, operands = make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)
    tiling = dataclasses.replace(hopper_plan.choose_tiling(request), split=split, programs=programs, wgs=wgs)
    table = hopper_plan.table(request, operands, tiling)
    columns = hopper_plan.columns(request)
    return Kernel(request, tiling, Steps()), arrays, hopper_plan.Table(table, columns)


PLAN_CASES = [
    Case("plan_mixed", query_lens=(1, 70, 0, 3, 1), context_lens=(900, 300, 50, 0, 10), padding_tokens=5),
    Case("plan_window", query_lens=(40, 1), context_lens=(500, 700), window=(130, 2), causal="each"),
    Case("plan_start", query_lens=(9, 33), context_lens=(400, 700), causal=False, kv_start=True),
]
PLAN_CASES = [dataclasses.replace(case, dtype="bfloat16", head_dim=64) for case in PLAN_CASES]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("new_kv", [True, False])
@pytest.mark.parametrize("case", PLAN_CASES, ids=lambda case: case.name)
def test_the_table_is_the_same_by_pairs_and_by_sums(case, new_kv, split, monkeypatch):
    case = dataclasses.replace(case, new_kv=new_kv, query_lens=case.query_lens * 9, context_lens=case.context_lens * 9)
    tables = []
    for columns in (0, 1 << 20):
        monkeypatch.setattr(hopper_plan, "FEW_KERNELS", columns)
        k, arrays, table = plan_of(case, split)
        tables.append(np.asarray(table.ref).reshape(-1, table.columns))
    np.testing.assert_array_equal(*tables)
    starts = arrays["query_start_loc"]
    np.testing.assert_array_equal(tables[1][hopper_plan.Q_START, : len(starts)], starts)
    tiles = -(-np.diff(starts) // k.tiling.q_tile)
    np.testing.assert_array_equal(tables[1][hopper_plan.TILES_BEFORE, : len(starts)], np.cumsum([0, *tiles]))


def test_few_whole_tiles_need_no_queue():
    case = Case("few", query_lens=(1,) * 5, context_lens=(90,) * 5, dtype="bfloat16", head_dim=64)
    for programs, needed in ((132, False), (12, True)):
        k, _, _ = plan_of(dataclasses.replace(case, max_query_len=1), split=False, programs=programs)
        assert hopper_plan.queued(k.request, k.tiling) is needed


def seen_by_pieces(k: Kernel, pieces: list[dict[int, int]]) -> np.ndarray:
    """How often each (row, KV head, KV tile) is attended to."""
    tiles = -(-k.request.max_pages * k.request.page_size // k.tiling.block_kv) + 1
    count = np.zeros((k.request.num_tokens, k.request.num_kv_heads, tiles), int)
    for f in pieces:
        count[f[ROW] : f[ROW] + max(f[TOKENS], 0), f[HEAD], f[T0] : f[T1]] += 1
    return count


def wanted(k: Kernel, arrays: dict) -> np.ndarray:
    """Which of them hold a key that the row sees."""
    tiles = -(-k.request.max_pages * k.request.page_size // k.tiling.block_kv) + 1
    need = np.zeros((k.request.num_tokens, tiles), bool)
    starts, lens = arrays["query_start_loc"], arrays["seq_lens"]
    for s, seq_len in enumerate(lens):
        n = starts[s + 1] - starts[s]
        q_pos, k_pos = np.arange(seq_len - n, seq_len)[:, None], np.arange(tiles * k.tiling.block_kv)[None]
        causal = k.request.causal if k.request.causal is not None else bool(arrays["causal"][s])
        start = int(arrays["kv_start"][s]) if "kv_start" in arrays else None
        ok = visible(q_pos, k_pos, seq_len=int(seq_len), causal=causal, window=k.request.window, kv_start=start)
        ok = np.broadcast_to(ok, (n, k_pos.size)).reshape(n, tiles, k.tiling.block_kv)
        need[starts[s] : starts[s + 1]] = ok.any(-1)
    return need


def plain(fields) -> dict[int, int]:
    return {f: int(x) for f, x in fields.items()}


@pytest.mark.parametrize("case", PLAN_CASES, ids=lambda case: case.name)
def test_whole_tiles_cover_every_visible_key_once_and_every_row(case):
    k, arrays, table = plan_of(case, split=False)
    pieces, cursors = [], (jnp.int32(0), jnp.int32(0))
    for n in range(10_000):
        fields, _, cursors, some = whole_piece(k, table, jnp.int32(n), cursors)
        if not some:
            break
        pieces.append(plain(fields))
    count = seen_by_pieces(k, pieces)
    assert count.max() == 1
    assert (count[:, 0] == 1)[wanted(k, arrays)].all()
    written = np.zeros((k.request.num_tokens, k.request.num_kv_heads), int)
    for f in pieces:
        written[f[ROW] : f[ROW] + f[TOKENS], f[HEAD]] += 1
    np.testing.assert_array_equal(written, 1)


@pytest.mark.parametrize("case", PLAN_CASES, ids=lambda case: case.name)
def test_split_pieces_cover_every_visible_key_once(case, monkeypatch):
    k, arrays, table = plan_of(case, split=True)
    total = int(table[hopper_plan.COST_BEFORE, jnp.int32(k.request.num_seqs + 1)])
    part = int(hopper_plan.share(jnp.int32(total), k.tiling))
    pieces, slots = [], []
    for program in range(k.tiling.programs):
        monkeypatch.setattr(jax.lax, "axis_index", lambda _, program=program: jnp.int32(program))
        position, s = jnp.int32(program * part), jnp.int32(0)
        while int(position) < min(program * part + part, total):
            fields, s, position, _ = split_piece(k, table, position, s)
            pieces.append(plain(fields))
            slots += [] if pieces[-1][DEST] == WHOLE else [pieces[-1][DEST]]
    assert len(set(slots)) == len(slots)
    count = seen_by_pieces(k, pieces)
    assert count.max() == 1
    assert (count[:, 0] == 1)[wanted(k, arrays)].all()
    for f in pieces:  # tiles without a mask hold no key past the end
        assert f[T0] <= f[F0] <= f[F1] <= f[T1]
        assert f[F1] == f[F0] or f[F1] * k.tiling.block_kv <= f[LENGTH]


@pytest.mark.parametrize("window", [(None, None), (7, None), (None, 3), (5, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_common_span_is_what_all_queries_see(window, causal):
    for q_first, q_last, seq_len, start in [(0, 0, 9, 0), (3, 6, 20, 0), (10, 19, 20, 4), (4, 30, 31, 29)]:
        args = {"seq_len": seq_len, "causal": causal, "window": window, "kv_start": start}
        first, end = (int(x) for x in common_span(q_first, q_last, **args))
        ok = visible(np.arange(q_first, q_last + 1)[:, None], np.arange(40)[None], **args)
        by_all = np.flatnonzero(np.asarray(ok).all(0))
        np.testing.assert_array_equal(np.arange(first, max(first, end)), by_all)


def test_short_tiles_are_spread_through_the_queue():
    kinds = [hopper_plan.queue(jnp.int32(n), jnp.int32(7), jnp.int32(3)) for n in range(10)]
    shorts = [bool(short) for short, _ in kinds]
    assert [int(i) for short, i in kinds if short] == [0, 1, 2]
    assert [int(i) for short, i in kinds if not short] == list(range(7))
    assert shorts == [False, False, True] * 3 + [False]


def test_a_decode_batch_is_known_without_a_hint():
    batch = {"query_lens": (1,) * 64, "context_lens": (20,) * 64, "padding_tokens": 0}
    told, untold = (request_of(**batch, max_query_len=hint) for hint in (1, None))
    assert hopper_plan.choose_tiling(told) == hopper_plan.choose_tiling(untold)
    assert hopper_plan.choose_tiling(told).wgs == 1


# ---------------------------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_query_len": 1, "query_lens": (1, 1), "context_lens": (30, 40)},
        {"batch_invariant": True, "num_heads": 6},
        {"kv_dtype": "float8_e4m3fn", "scales": "head"},
        {"new_kv": True, "layout": "HND"},
    ],
    ids=["split", "decode", "whole", "fp8", "new_kv"],
)
def test_lowers_for_cuda_without_a_device(changes):
    case = Case("lower", **{"dtype": "bfloat16", "head_dim": 128} | changes)
    arrays, static = batches.split(build(case))

    def call(arrays):
        request, operands = make_request(**arrays, **static)
        return paged_hopper.attend(request, operands)

    text = jax.jit(call).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
