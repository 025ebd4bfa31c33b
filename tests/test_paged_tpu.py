"""The TPU kernel without a TPU: interpreted with race detection and poisoned memory, lowered, and its plan counted.

The usual run takes a subset of the table; `python -m pytest tests/test_paged_tpu.py --whole-table` takes all of it.
"""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import paged_tpu, tile_plan, tpu_copies, tpu_plan, tpu_steps, tuned
from pallas_kernels.request import AttentionRequest, make_request
from tests import batches, oracle, tpu_interpreter
from tests.cases import CASES, Case, build
from tests.paged_attention_body import PagedAttentionTests, assert_close, check_against_oracle

CHIP_KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "7x": "TPU7x"}


@pytest.fixture(autouse=True)
def detectors(monkeypatch):
    """The simulated chip, on which no test may race."""
    found = tpu_interpreter.simulate(monkeypatch)
    yield found
    assert not any(detector.races_found for detector in found)


def refusals() -> dict[str, str]:
    """Case name -> part of the reason, for the cases that the kernel lacks."""
    found = {}
    for case in CASES:
        if case.dtype == "float16":
            found[case.name] = "q_dtype=float16"
        elif case.kv_dtype == "float8_e4m3fnuz":
            found[case.name] = "kv_dtype=float8_e4m3fnuz"
        elif "token" in (case.scales if isinstance(case.scales, tuple) else (case.scales,)):
            found[case.name] = "each token and head"
    return found


class TestPagedTpu(PagedAttentionTests):
    """Refuses float16 and scales for each token; everything else runs."""

    implementation = "tpu"
    refuses = MappingProxyType(refusals())
    subset = frozenset(
        {
            "noncausal+window_both+soft_cap+sinks+fp8_head_scales+kv_start+hnd+bfloat16",
            "causal_by_sequence+window_both+soft_cap+sinks+alibi+new_kv+ranges+tree+kv_start",
            "tree+fp8_token_scales+new_kv+hnd+batch_invariant+sinks+window_left",
            "noncausal+fp8_scalar_scales+new_kv+float16+batch_invariant+pages_of_12",
            "heads_14_over_2",
            "fp8_fnuz",
            "all_padding",
            "page_size_128",
            "head_dim_80",
            "int8_head_scales_hnd",
            "new_kv+hnd",
            "new_kv+pages_of_12",
            "fp8_head_scales+new_kv",
            "window_both+ranges",
            "tree+kv_start",
            "sinks+without_lse",
            "decodes_of_odd_lengths",
            "prefill_noncausal",
            "decodes_among_prefills",
        }
    )


# ---------------------------------------------------------------------------------------------------- beside the table


def requested(case: Case, **changes) -> tuple[AttentionRequest, dict, dict]:
    """A case's request, its arrays and its static options."""
    arrays, static = batches.split(build(dataclasses.replace(case, **changes)))
    return make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)[0], arrays, static


def items_of(request: AttentionRequest, arrays: dict, static: dict, tiling: tpu_plan.Tiling) -> tpu_plan.Items:
    """The list of items of a call."""
    arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
    return jax.jit(lambda a: tpu_plan.items(request, make_request(**a, **static)[1], tiling))(arrays)


LEVELS = Case("levels", (1, 3, 9, 20), (40, 17, 300, 5), page_size=8, causal="each", window=(60, 2), sinks="finite")


def test_items_of_every_level_agree_with_the_oracle_and_other_lengths_do_not_retrace():
    other = dataclasses.replace(LEVELS, query_lens=(17, 1, 2, 13), context_lens=(50, 200, 0, 9))
    request, arrays, static = requested(LEVELS)
    tiling = dataclasses.replace(tpu_plan.choose_tiling(request, "v6e"), levels=(1, 4, 16), pages=4)
    traces = []

    @tpu_interpreter.quick_jit
    def run(arrays):
        traces.append(None)
        return paged_tpu.attend(*make_request(**arrays, **static), interpret=tpu_interpreter.SIMULATED, tiling=tiling)

    check_against_oracle(LEVELS, build(LEVELS), run(arrays))
    batch = build(other)
    for name in ("k_cache", "v_cache"):  # as many pages and columns as the first batch
        batch[name] = np.resize(batch[name], arrays[name].shape)
    table = np.zeros_like(arrays["block_table"])
    columns = min(table.shape[1], batch["block_table"].shape[1])
    table[:, :columns] = np.minimum(batch["block_table"][:, :columns], len(batch["k_cache"]) - 1)
    batch["block_table"] = table
    check_against_oracle(other, batch, run(batches.split(batch)[0]))
    assert len(traces) == 1


SWAPPED = [  # where XLA's layout of the pool is that of the other view
    Case("one_head", num_heads=3, num_kv_heads=1, dtype="bfloat16"),
    Case("five_heads", num_heads=5, num_kv_heads=5, page_size=8, dtype="float32", kv_dtype="int8"),
    Case("pages_of_12", layout="HND", page_size=12, dtype="bfloat16"),
]
SWAPPED = [dataclasses.replace(x, query_lens=(1, 5), context_lens=(40, 3), head_dim=128) for x in SWAPPED]


@pytest.mark.parametrize("case", SWAPPED, ids=lambda case: case.name)
def test_a_pool_is_taken_as_xla_stores_it(case):
    request, _, static = requested(case)
    assert tpu_plan.as_stored(request).layout == ("NHD" if case.layout == "HND" else "HND")
    poisoned, _ = batches.split(batches.poison(np.random.default_rng(0), build(case)))
    check_against_oracle(case, build(case), tpu_interpreter.attend(poisoned, static))


@pytest.mark.parametrize(
    ("kv_heads", "page_size", "head_dim", "layout", "kv_dtype"),
    [
        (2, 16, 128, "NHD", None),
        (1, 16, 64, "NHD", None),  # lanes would be padded: pages lie along them
        (4, 16, 128, "NHD", "int8"),
        (40, 16, 128, "NHD", None),
        (5, 12, 128, "NHD", None),  # pages lie along the sublanes
        (5, 16, 128, "HND", None),
        (8, 4, 128, "HND", None),
    ],
)
def test_other_pools_are_taken_as_they_are(kv_heads, page_size, head_dim, layout, kv_dtype):
    case = Case("other", num_heads=kv_heads, num_kv_heads=kv_heads, page_size=page_size, head_dim=head_dim)
    case = dataclasses.replace(case, layout=layout, dtype="bfloat16", kv_dtype=kv_dtype)
    assert tpu_plan.as_stored(requested(case)[0]).layout == layout


def test_a_tree_hides_keys_inside_of_its_square_which_may_be_nan():
    case = Case("tree", (6, 4), (6, 9), padding_tokens=0, page_size=4, causal=False, tree_size=6)
    request, _, static = requested(case)
    batch = build(case)
    batch["tree_mask"][:, :, 2] = False  # a key amid others that no query sees, only rows past a short square
    poisoned, _ = batches.split(batches.poison(np.random.default_rng(0), batch))
    assert poisoned["tree_mask"][1, 4:, 2].all()
    tiling = dataclasses.replace(tpu_plan.choose_tiling(request, "v6e"), pages=1)
    assert tiling.levels[0] > 4  # rows that no query of the second sequence fills
    check_against_oracle(case, batch, tpu_interpreter.attend(poisoned, static, tiling=tiling))


def test_one_buffer_instead_of_two_is_a_race_that_is_seen(monkeypatch, detectors):
    keys, take_in = tpu_copies.keys, tpu_steps.take_in
    monkeypatch.setattr(tpu_copies, "keys", lambda k, n, j, buffer, act: keys(k, n, j, 0 * buffer, act))
    monkeypatch.setattr(tpu_steps, "take_in", lambda k, n, j, buffer: take_in(k, n, j, 0 * buffer))
    request, arrays, static = requested(Case("racy", (2,), (9,), padding_tokens=0, page_size=4))
    tiling = dataclasses.replace(tpu_plan.choose_tiling(request, "v6e"), pages=1)
    stopped = False
    try:
        jax.block_until_ready(tpu_interpreter.attend(arrays, static, tiling=tiling))
    except jax.errors.JaxRuntimeError as error:  # jax 0.12 stops at the first race
        stopped = "RACE DETECTED" in str(error)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert stopped or any(detector.races_found for detector in detectors)
    detectors.clear()


def test_vmap_over_everything():
    cases = [Case(name, (1, 3), (20, 4), padding_tokens=0) for name in ("a", "b")]
    drawn = [build(case) for case in cases]
    arrays = jax.tree.map(lambda *xs: np.stack(xs), *(batches.split(batch)[0] for batch in drawn))
    _, static = batches.split(drawn[0])
    run = jax.vmap(lambda a: paged_tpu.attend(*make_request(**a, **static), interpret=tpu_interpreter.SIMULATED))
    for got, batch in zip(tpu_interpreter.quick_jit(run)(arrays)[0], drawn, strict=True):
        assert_close(np.asarray(got).astype(np.float64), oracle.attention(**batch)[0], "float32")


# ------------------------------------------------------------------------------------------------------------ traffic


def fewest_bytes(case: Case, request: AttentionRequest, tokens: int) -> int:
    """K and V bytes of each page of which a query tile sees a key, once a tile; by the oracle's mask."""
    batch, pages = build(case), 0
    for s, query_len in enumerate(case.query_lens):
        seen = np.asarray(oracle.mask(s, **batch))
        for offset in range(0, query_len, tokens):
            keys = np.flatnonzero(seen[offset : offset + tokens].any(0))
            pages += len(np.unique(keys // case.page_size))
    heads, dim, itemsize = request.num_kv_heads, request.head_dim, request.kv_dtype.itemsize
    return 2 * pages * case.page_size * heads * dim * itemsize


SCALED = {
    "D1": Case("D1", (1,) * 4, (511,) * 4, padding_tokens=0),
    "F1": Case("F1", (16,) * 2, (256,) * 2, padding_tokens=0, causal=False),
    "M1": Case("M1", (64, 64, *(1,) * 6), (64, 64, *(127,) * 6), padding_tokens=0),
    "window": Case("window", (1, 40), (500, 300), padding_tokens=0, window=(100, 10), causal="each", kv_start=True),
}


@pytest.mark.parametrize("name", SCALED)
def test_each_visible_page_is_copied_once_a_query_tile(name, monkeypatch):
    case = dataclasses.replace(SCALED[name], dtype="bfloat16", return_lse=False)
    request, arrays, static = requested(case)
    tiling = dataclasses.replace(tpu_plan.choose_tiling(request, "v6e"), pages=4)
    tiling = dataclasses.replace(tiling, levels=(min(tiling.tokens, 16),))
    copies = tpu_interpreter.record_copies(monkeypatch)
    jax.block_until_ready(tpu_interpreter.attend(arrays, static, tiling=tiling))
    page = (case.page_size, case.num_kv_heads, case.head_dim)
    made = sum(size for shape, size in copies if shape == page)
    items = items_of(request, arrays, static, tiling)
    assert made == tpu_plan.copied_bytes(request, items.fields)
    assert made <= 1.05 * fewest_bytes(case, request, tiling.tokens)


# ---------------------------------------------------------------------------------------------- plan, reasons, lowering


@pytest.mark.parametrize(
    ("page_size", "heads", "dim", "dtypes"),
    [(36, 10, 512, ("bfloat16", "int8")), (12, 5, 256, ("float32", "bfloat16"))],
)
def test_widened_keys_begin_at_whole_tiles_however_small_the_tile_of_keys(page_size, heads, dim, dtypes):
    """A store that begins inside a tile of registers is not compiled for 7x."""
    q_dtype, kv_dtype = (np.dtype(name) for name in dtypes)
    pool = jax.ShapeDtypeStruct((64, heads, page_size, dim), kv_dtype)
    small = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 64), (8,), (9,))]

    def tiling(q, k, v, table, lens, starts, new):
        request, _ = make_request(q, k, v, table, lens, starts, layout="HND", new_k=new, new_v=new)
        found.append(tpu_plan.choose_tiling(request, "7x"))
        return q

    found: list[tpu_plan.Tiling] = []
    q, new = (jax.ShapeDtypeStruct((64, n, dim), q_dtype) for n in (4 * heads, heads))
    jax.eval_shape(tiling, q, pool, pool, *small, new)
    rows = 32 // q_dtype.itemsize
    least = tpu_plan.pages_of_whole_tiles(page_size, q_dtype)
    assert found[0].pages <= least or found[0].pages * page_size % rows == 0


def test_the_list_of_items_covers_every_row_once_and_every_visible_key():
    case = dataclasses.replace(LEVELS, query_lens=(1, 3, 0, 40), padding_tokens=7, new_kv=True)
    request, arrays, static = requested(case)
    tiling = dataclasses.replace(tpu_plan.choose_tiling(request, "v6e"), levels=(4, 16))
    found = items_of(request, arrays, static, tiling)
    count, busy = (int(x) for x in found.totals)
    fields = np.asarray(found.fields)
    rows = np.zeros(request.num_tokens, int)
    for item in fields[:count]:
        rows[item[tile_plan.ROW] : item[tile_plan.ROW] + item[tile_plan.COUNT]] += 1
    np.testing.assert_array_equal(rows, 1)
    assert (fields[:busy, tpu_plan.TILES] > 0).all()
    assert (fields[busy:, tpu_plan.TILES] == 0).all()
    for item in fields[:busy]:
        seq = item[tile_plan.SEQ]
        first = item[tile_plan.POSITION] - item[tile_plan.CONTEXT]
        seen = np.asarray(oracle.mask(seq, **build(case)))[first : first + item[tile_plan.COUNT]]
        keys = np.flatnonzero(seen.any(0))
        assert item[tile_plan.FIRST] <= keys.min()
        assert keys.max() < item[tile_plan.END]
        in_pages = keys[keys < item[tile_plan.CONTEXT]] // request.page_size
        assert set(in_pages) <= set(range(item[tpu_plan.PAGE], item[tpu_plan.PAGE_END]))


@pytest.mark.parametrize("chip", tpu_plan.CHIPS)
def test_tiles_stay_within_the_memory_of_the_chip(chip):
    for head_dim, kv_heads, page_size in ((64, 1, 16), (128, 8, 256), (256, 8, 16), (512, 32, 128), (128, 128, 64)):
        case = Case("big", head_dim=head_dim, num_kv_heads=2, num_heads=4, dtype="bfloat16")
        request = dataclasses.replace(
            requested(case)[0], num_kv_heads=kv_heads, num_heads=4 * kv_heads, page_size=page_size, max_query_len=4096
        )
        tiling = tpu_plan.choose_tiling(request, chip)
        fits = tpu_plan.vmem_bytes(request, tiling) <= tpu_plan.CHIPS[chip].budget
        assert fits or tiling.tokens == tiling.pages == 1


def test_batch_invariant_tiles_do_not_depend_on_the_batch():
    options = {"batch_invariant": True, "new_kv": True, "head_dim": 64}
    alone = requested(Case("alone", (6,), (900,), **options))[0]
    company = requested(Case("company", (1, 6, 70), (40, 900, 3), max_query_len=70, **options))[0]
    assert tpu_plan.choose_tiling(alone, "v6e") == tpu_plan.choose_tiling(company, "v6e")
    assert len(tpu_plan.choose_tiling(alone, "v6e").levels) == 1


def test_a_measured_tile_comes_before_the_heuristic(monkeypatch):
    entry = {"kernel": "tpu", "work": "narrow", "q": "float32", "kv": "float32", "heads": 4, "kv_heads": 2}
    entry |= {"head_dim": 8, "page_size": 16, "tile": {"rows": 16, "keys": 64}}
    monkeypatch.setattr(tuned, "_table", lambda arch: (entry,) if arch == "v6e" else ())
    request = requested(Case("tuned"))[0]
    assert tpu_plan.choose_tiling(request, "v6e").pages == 4
    assert tpu_plan.choose_tiling(request, "v6e").tokens == 8
    assert tpu_plan.choose_tiling(request, "v5e").pages == 32


@pytest.mark.parametrize(
    "case",
    [
        Case("long_row", (1, 3), (8 * 140, 30), page_size=8, causal=False),  # more ids than one copy brings
        Case("new_int8", (2, 5), (70, 0), page_size=16, new_kv=True, kv_dtype="int8", scales="head"),
    ],
    ids=lambda case: case.name,
)
def test_long_rows_of_the_table_and_new_keys_beside_int8_pages(case):
    request, arrays, static = requested(case)
    call = tpu_interpreter.quick_jit(
        lambda arrays: paged_tpu.attend(*make_request(**arrays, **static), interpret=tpu_interpreter.SIMULATED)
    )
    assert request.max_pages > tpu_plan.TABLE_CHUNK or request.new_kv
    check_against_oracle(case, build(case), call(arrays))


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("page_size", [8, 12, 48, 256])
def test_a_tile_of_new_keys_fills_whole_registers(num_tokens, page_size):  # fewer lanes do not compile
    request = requested(Case("new", (num_tokens,), (40,), page_size=page_size, new_kv=True, dtype="bfloat16"))[0]
    for chip in CHIP_KINDS:
        tiling = tpu_plan.choose_tiling(request, chip)
        assert tiling.new_keys % tpu_plan.LANES == 0 and tiling.new_keys > 0


def test_old_chips_and_other_devices_are_not_taken_for_a_known_one():
    kinds = ("TPU v3", "TPU v2", "cpu", "NVIDIA H200", "TPU v6 lite", "TPU8i")
    assert [tpu_plan.chip_of(kind) for kind in kinds] == [None, None, None, None, "v6e", "v4"]


def test_refusals_say_why():
    request = requested(Case("refused", dtype="bfloat16", head_dim=128))[0]
    assert paged_tpu.why_not(request) == ()
    changed = functools.partial(dataclasses.replace, request)
    (reason,) = paged_tpu.why_not(changed(max_pages=200_000))
    assert "SMEM" in reason
    (reason,) = paged_tpu.why_not(changed(page_size=1024, num_kv_heads=64, num_heads=64))
    assert "VMEM" in reason
    assert len(paged_tpu.why_not(changed(q_dtype=np.dtype("float16"), k_scale="token"))) == 2


@pytest.mark.parametrize("chip", CHIP_KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_dtype": "float8_e4m3fn", "scales": "head", "layout": "HND"},
        {"new_kv": True, "tree_size": 4, "num_ranges": 2, "alibi": True, "head_dim": 80, "causal": "each"},
    ],
    ids=["plain", "fp8", "all"],
)
def test_lowers_for_a_tpu_without_one(chip, changes):
    lower(chip, changes)


def test_a_host_without_a_tpu_refuses_the_kernel_by_its_name():
    arrays, static = batches.split(build(Case("no_tpu")))
    with pytest.raises(NotImplementedError, match=r"implementation: got 'tpu'.*use_abstract_mesh"):
        jax.jit(lambda arrays: paged_tpu.attend(*make_request(**arrays, **static)))(arrays)


@pytest.mark.parametrize("over", [lambda call: call, jax.vmap], ids=["plain", "vmap"])
def test_lowers_where_64_bit_types_are_on(over):
    with jax.enable_x64(True):
        lower("v6e", {}, over)


def lower(chip, changes, over=lambda call: call):
    case = Case("lowered", **{"dtype": "bfloat16", "head_dim": 128} | changes)
    arrays, static = batches.split(build(case))

    def call(arrays):
        return paged_tpu.attend(*make_request(**arrays, **static))

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(CHIP_KINDS[chip], 1, "tpu"))):
        assert tpu_plan.present_chip() == chip
        stacked = arrays if over is not jax.vmap else {n: np.stack([x, x]) for n, x in arrays.items()}
        text = jax.jit(over(call)).trace(stacked).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
