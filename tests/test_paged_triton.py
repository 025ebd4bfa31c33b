"""The portable GPU kernel: interpreted on a CPU, compiled where a GPU is present.

The usual run takes a subset of the table; `python -m pytest tests/test_paged_triton.py --whole-table` takes all of it.
"""

from __future__ import annotations

import functools
import re
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from bench import codegen
from pallas_kernels import dispatch, paged_triton, triton_plan
from pallas_kernels.request import make_request
from pallas_kernels.work_plan import split_keys
from tests import batches, oracle, triton_interpreter
from tests.cases import Case, build
from tests.paged_attention_body import PagedAttentionTests, assert_close, assert_lse_close, assert_same_bits


@pytest.fixture(autouse=True)
def _interpreted_on_a_cpu(monkeypatch):
    triton_interpreter.simulate(monkeypatch)


class TestPagedTriton(PagedAttentionTests):
    """Head sizes beyond 256 are refused; everything else runs."""

    implementation = "triton"
    refuses = MappingProxyType({"head_dim_512": "head_dim=512"})
    subset = frozenset(
        {
            "noncausal+window_both+soft_cap+sinks+fp8_head_scales+kv_start+hnd+bfloat16",
            "causal_by_sequence+window_left+alibi+int8_token_scales+new_kv+ranges+kv_start",
            "causal_by_sequence+window_both+soft_cap+sinks+alibi+new_kv+ranges+tree+kv_start",
            "tree+fp8_token_scales+new_kv+hnd+batch_invariant+sinks+window_left",
            "noncausal+fp8_scalar_scales+new_kv+float16+batch_invariant+pages_of_12",
            "page_size_1",
            "page_size_128",
            "page_size_784",
            "head_dim_80",
            "head_dim_512",
            "heads_17_over_1",
            "float16_over_float8_e5m2",
            "fp8_fnuz",
            "decodes_of_odd_lengths",
            "prefill_noncausal",
            "first_sequences_padding",
            "sinks_some_absent",
        }
    )


def call(batch, **options):
    arrays, static = batches.split(batch)
    static |= options | {"return_lse": True}
    run = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static, implementation="triton"))
    return run(arrays)


def test_one_long_sequence_is_split_and_merged():
    batch = batches.draw(np.random.default_rng(0), (1,), (3000,), page_size=16, dtype="bfloat16")
    request, _ = make_request(**batch)
    narrow, wide = triton_plan.geometries(request, "sm90")
    assert wide is None
    ends = jnp.array([3001, 0], jnp.int32)
    splits = split_keys(0 * ends, ends, narrow.tile.keys, 50, 256 // narrow.tile.keys)
    assert splits.pieces.tolist() == [-(-3001 // 256), 0]
    out, lse = call(batch)
    want, want_lse = oracle.attention(**batch)
    assert_close(np.asarray(out).astype(np.float64), want, "bfloat16")
    assert_lse_close(np.asarray(lse), want_lse, "bfloat16")


@pytest.mark.parametrize("query_len", [5, 99])  # vllm#40176 (review): lanes past the end diluted the output
def test_noncausal_queries_are_not_diluted_by_the_rest_of_a_tile(query_len):
    batch = batches.draw(np.random.default_rng(1), (query_len,), (3,), page_size=16)
    batch["v_cache"] = batch["v_cache"] + np.float32(50)
    out, _ = call(batch, causal=False)
    np.testing.assert_allclose(np.asarray(out), oracle.attention(**batch, causal=False)[0], atol=50 * 5e-6)


def test_one_program_for_other_lengths():
    case = Case("lengths", (1, 6, 20), (330, 40, 0), padding_tokens=5, page_size=16)
    batch = build(case)
    other = build(Case("other", (20, 1, 6), (13, 300, 8), padding_tokens=5, page_size=16))
    pages = max(len(batch["k_cache"]), len(other["k_cache"]))
    width = max(batch["block_table"].shape[1], other["block_table"].shape[1])
    for b in (batch, other):
        for name in ("k_cache", "v_cache"):
            b[name] = np.pad(b[name], ((0, pages - len(b[name])), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
        b["block_table"] = np.pad(b["block_table"], ((0, 0), (0, width - b["block_table"].shape[1])))
    _, static = batches.split(batch)
    traces = []

    @jax.jit
    def run(arrays):
        traces.append(1)
        return jattn.paged_attention(**arrays, **static, implementation="triton")

    for b in (batch, other):
        out, _ = run(batches.split(b)[0])
        assert_close(np.asarray(out).astype(np.float64), oracle.attention(**b)[0], "float32")
    assert len(traces) == 1


def test_batch_invariant_rows_do_not_depend_on_their_company():
    subject = Case("subject", (6,), (900,), padding_tokens=0, page_size=16, batch_invariant=True)
    alone = build(subject)
    company = Case("company", (1, 6, 70), (40, 900, 2000), padding_tokens=2, page_size=16, batch_invariant=True)
    batch = build(company)
    pages = -(-906 // 16)
    for name in ("k_cache", "v_cache"):
        batch[name][batch["block_table"][1, :pages]] = alone[name][alone["block_table"][0, :pages]]
    batch["q"][1:7] = alone["q"]
    for got, want in zip(call(batch), call(alone), strict=True):
        assert_same_bits(np.asarray(got)[1:7], want)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"])
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
def test_every_8_bit_value_is_widened_exactly(dtype, to):
    stored = np.arange(256, dtype=np.uint8).view(batches.dtype_of(dtype))
    want = stored.astype(np.float32)
    got = paged_triton._widen(jnp.asarray(stored.view(np.int8)), dtype, batches.dtype_of(to))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want)


def test_groups_larger_than_a_tile():
    batch = build(Case("group", (2, 1), (30, 9), num_heads=130, num_kv_heads=2))
    out, lse = call(batch)
    want, want_lse = oracle.attention(**batch)
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


def test_small_token_scales_keep_float16s_accuracy():
    """Scales of about 2e-5, with which p would leave float16's range."""
    case = Case("small", (3,), (200,), dtype="float16", kv_dtype="int8", scales=("token", "token"), head_dim=64)
    batch = build(case)
    batch["v_scale"] = batch["v_scale"] * np.float32(3e-3)
    out, _ = call(batch)
    assert_close(out, oracle.attention(**batch)[0], "float16")


@pytest.mark.parametrize("factor", [1e5, 1e9, -1e5])
def test_a_later_tokens_scale_changes_no_earlier_row(factor):
    """float16's products with token scales have a range of their own in each row."""
    case = Case("later", (3,), (20,), dtype="float16", kv_dtype="int8", scales=("token", "token"), head_dim=64)
    batch = build(case)
    before = np.asarray(call(batch)[0])
    page, slot = batch["block_table"][0, 1], 22 % 16  # of the last key, which only the last row sees
    batch["v_scale"][page, slot] *= factor
    batch["v_cache"][page, slot] = 0
    out = np.asarray(call(batch)[0])
    np.testing.assert_array_equal(out[:2], before[:2])


def test_negative_token_scales_in_float16():
    batch = build(Case("minus", (3,), (20,), dtype="float16", kv_dtype="int8", scales=("token", "token"), head_dim=64))
    batch["v_scale"] = -batch["v_scale"]
    assert_close(call(batch)[0], oracle.attention(**batch)[0], "float16")


@pytest.mark.parametrize("soft_cap", [50.0, 1e5, 1e7, 1e29, 3e38])
def test_large_soft_caps_change_nothing(soft_cap):
    batch = build(Case("cap", (3,), (40,), dtype="bfloat16", soft_cap=soft_cap))
    assert_close(call(batch)[0], oracle.attention(**batch)[0], "bfloat16")


def test_64_bit_types_in_the_callers_program():
    batch = build(Case("wide", (3, 1), (40, 70), new_kv=True, num_ranges=2))
    with jax.enable_x64(True):
        out, lse = call(batch)
    want, want_lse = oracle.attention(**batch)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


def test_gpus_before_ampere_take_another():
    request, _ = make_request(**batches.draw(np.random.default_rng(0), (1,), (30,)))
    assert dispatch.first_without_reasons(request, "cuda", "sm80").name == "triton"
    assert dispatch.first_without_reasons(request, "cuda", "sm75").name == "xla"
    (reason,) = paged_triton.why_not(request, "sm75")
    assert "sm75" in reason and "sm80" in reason


def test_refusals_say_why():
    cache = jax.ShapeDtypeStruct((40_000, 16, 8, 512), jnp.int8)
    arrays = [jax.ShapeDtypeStruct(*x) for x in (((1, 8, 512), jnp.bfloat16), ((1, 9), jnp.int32), ((1,), jnp.int32))]
    q, table, lens = arrays
    start = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = []
    jax.eval_shape(lambda *x: found.append(make_request(*x)[0]), q, cache, cache, table, lens, start)
    first, second = paged_triton.why_not(found[0])
    assert "head_dim=512" in first
    assert "signed 32-bit offset" in second
    with pytest.raises(NotImplementedError, match=r"triton.*head_dim=512"):
        jax.eval_shape(
            functools.partial(jattn.paged_attention, implementation="triton"), q, cache, cache, table, lens, start
        )


def key_addresses(pages: int) -> tuple[list[str], int]:
    """Widths of the offsets of the rows of K and V in a decode, and how many of them are multiplied by D in 64 bits."""
    shapes = {"q": ((4, 8, 128), "bfloat16")} | dict.fromkeys(("k_cache", "v_cache"), ((pages, 16, 2, 128), "bfloat16"))
    shapes |= {"block_table": ((4, 64), "int32"), "seq_lens": ((4,), "int32"), "query_start_loc": ((5,), "int32")}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
    launches = codegen.lower_call(lambda x: paged_triton.attend(*make_request(**x, max_query_len=1)), arrays, "sm90")
    text = next(text for name, text, *_ in launches if name == "paged_narrow")
    offsets = re.findall(r"tt\.addptr .*: tensor<64x128x!tt\.ptr<bf16>>, tensor<64x128x(i\d+)>", text)
    return offsets, len(re.findall(r"arith\.constant 128 : i64", text))


def test_a_pool_past_2_to_31_elements_is_addressed_in_64_bits():
    narrow, wide = key_addresses(4096), key_addresses(2**31 // (16 * 2 * 128) + 1)
    assert narrow == (["i32"] * 4, 0)  # K and V, with a mask and without
    assert wide == (["i64"] * 4, 4)  # the row is widened before it is multiplied, not the product after


def test_vmap_over_everything():
    cases = [Case(name, (1, 6, 9), (30, 4, 0), padding_tokens=0, page_size=16) for name in ("a", "b")]
    drawn = [build(case) for case in cases]
    arrays = jax.tree.map(lambda *xs: np.stack(xs), *(batches.split(batch)[0] for batch in drawn))
    _, static = batches.split(drawn[0])
    run = jax.vmap(lambda arrays: jattn.paged_attention(**arrays, **static, implementation="triton"))
    for got, batch in zip(jax.jit(run)(arrays)[0], drawn, strict=True):
        assert_close(np.asarray(got).astype(np.float64), oracle.attention(**batch)[0], "float32")


@pytest.mark.parametrize("scales", [None, "token"])
def test_a_draft_token_that_no_query_of_a_tree_sees_may_be_nan(scales):
    kv_dtype = scales and "float8_e4m3fn"
    batch = batches.draw(
        np.random.default_rng(2), (6, 4), (40, 9), page_size=16, dtype="bfloat16", kv_dtype=kv_dtype, scales=scales
    )
    batch["tree_mask"] = np.tril(np.ones((2, 6, 6), bool))
    batch["tree_mask"][:, :, 2] = False  # rejected beforehand, yet amid keys that are seen
    clean = call(batch)
    dirty = call(batches.poison(np.random.default_rng(0), batch))
    for got, want in zip(dirty, clean, strict=True):
        assert_same_bits(got, want)
    assert_close(np.asarray(clean[0]).astype(np.float64), oracle.attention(**batch)[0], "bfloat16")
