"""docs/differences-from-vllm.md and docs/backends.md: each difference has its test, and the table is the classes'."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from backends import docs
from backends import impl as impl_module
from backends.contract import AttentionConfig
from backends.impl import LayerScales
from backends.platforms import Cuda, parse_platform
from tests import engines
from tests.engines import CONTEXTS, QUERIES, fp8_case, fp8_oracle, run

DOCS = Path(__file__).parent.parent / "docs"

TESTS = {
    "window-off-by-one": "test_backend_meaning.test_a_window_of_one_token_sees_that_token",
    "window-non-causal": "test_backend_meaning.test_window",
    "window-cross-attention": "test_backend_meaning.test_cross_attention",
    "window-evicted-pages": "test_backend_meaning.test_window",
    "soft-cap-dropped": "test_backend_meaning.test_soft_cap_scale_and_sinks_hold_in_every_phase",
    "soft-cap-prefill": "test_backend_meaning.test_soft_cap_scale_and_sinks_hold_in_every_phase",
    "alibi-window": "test_backend_meaning.test_alibi_with_a_window",
    "alibi-shift": "test_backend_differences.test_alibi_counts_from_the_query",
    "alibi-unused": "test_backend_meaning.test_alibi_with_a_window",
    "decode-alibi-sinks": "test_backend_meaning.test_non_causal_decodes_of_several_tokens_keep_alibi_and_sinks",
    "extend-causal": "test_backend_attention.test_non_causal_prefix_attention",
    "extend-sinks": "test_backend_meaning.test_soft_cap_scale_and_sinks_hold_in_every_phase",
    "drafting-uniform": "test_backend_builders.test_builds_are_pure_and_may_alternate",
    "sinks-undeclared": "test_backend_meaning.test_non_causal_decodes_of_several_tokens_keep_alibi_and_sinks",
    "short-max-query-len": "test_backend_differences.test_max_query_len_never_truncates",
    "empty-requests": "test_backend_attention.test_causal",
    "padding-rows": "test_backend_attention.test_causal",
    "page-sizes-written": "test_backend_layouts.test_writes_land_at_their_addresses",
    "capture-in-place": "test_backend_builders.test_a_capture_run_leaves_its_argument_alone",
    "pure-builds": "test_backend_builders.test_builds_are_pure_and_may_alternate",
    "queries-unrounded": "test_backend_differences.test_queries_are_not_rounded",
    "xqa-non-causal": "test_backend_builders.test_flashinfer_takes_non_causal_batches_as_prefills",
    "dcp-pages": "test_backend_builders.test_flashinfer_counts_pages_of_one_rank",
    "dcp-forward": "test_backend_builders.test_flashinfer_counts_pages_of_one_rank",
    "nvfp4": "test_backend_meaning.test_other_arguments_that_do_not_fit",
    "log-lines": "test_backend_builders.test_use_trtllm_attention",
    "shared-prefix": "test_backend_builders.test_a_shared_prefix_changes_nothing",
    "result-rounding": "test_backend_differences.test_results_are_rounded_to_the_querys_type_first",
    "causal-per-request": "test_backend_contract.test_every_reason_in_its_order",
    "jattn-last": "test_backend_selector.test_automatic_choice",
    "not-provided": "test_backend_selector.test_explain_is_data",
    "explicit-elsewhere": "test_backend_differences.test_explicit_choices_on_cpu_and_tpu",
    "explicit-turboquant": "test_backend_differences.test_turboquant_does_not_fall_through",
    "not-cuda": "test_backend_grid.test_grid",
    "aiter-devices": "test_backend_selector.test_priorities",
    "environment": "test_backend_selector.test_priorities",
    "layout-global": "test_backend_contract.test_flashinfer_by_platform",
    "xpu": "test_backend_differences.test_there_is_no_xpu",
}


def rows():
    lines = (DOCS / "differences-from-vllm.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[2:]


def test_every_difference_has_a_test():
    ids = [row[0] for row in rows()]
    assert ids == list(TESTS)
    assert {len(row) for row in rows()} == {4}
    for place in TESTS.values():
        module, name = place.split(".")
        assert inspect.isfunction(getattr(importlib.import_module(f"tests.{module}"), name)), place


def test_the_table_of_capabilities_is_current():
    text = (DOCS / "backends.md").read_text()
    assert text == docs.page(), "run: python -m backends.docs docs/backends.md"


def test_the_table_follows_the_classes(monkeypatch, tmp_path):
    monkeypatch.setattr(engines.backend("FLASHINFER"), "supports_non_causal", classmethod(lambda cls: False))
    docs.main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() != (DOCS / "backends.md").read_text()


@pytest.fixture
def _numpy_kernels(monkeypatch):
    monkeypatch.setattr(impl_module.dispatch, "attend", engines.numpy_attend)


@pytest.mark.usefixtures("_numpy_kernels")
def test_alibi_counts_from_the_query():
    """A sink tells a shifted bias from a relative one, and so does the LSE."""
    case = engines.draw(4, QUERIES, CONTEXTS)
    slopes, sinks = np.float32([0.5, 0.3, 0.2, 0.1]), np.float32([0.5, -0.5, 1.0, 0.0])
    out = run("ROCM_AITER_UNIFIED_ATTN", case, alibi_slopes=slopes, sinks=sinks)
    engines.close(out, engines.expected(case, alibi_slopes=slopes, sinks=sinks)[0])


def test_max_query_len_never_truncates():
    case = engines.draw(5, (1, 40), (5, 9), num_heads=2)
    out = run("ROCM_ATTN", case, common=case.common(max_query_len=3))
    engines.close(out, engines.expected(case)[0])


@pytest.mark.usefixtures("_numpy_kernels")
def test_queries_are_not_rounded():
    case, layer = fp8_case()
    builder = engines.make_builder("FLASHINFER", case, Cuda((10, 0)), kv_cache_dtype="fp8")
    assert builder.build(0, case.common()).q_data_type_prefill == "float8_e4m3fn"
    out = run("FLASHINFER", case, layer=layer, builder=builder, dtype=jnp.float8_e4m3fn, kv_cache_dtype="fp8")
    engines.close(out, fp8_oracle(case, layer, ml_dtypes.float8_e4m3fn, 10**9))


@pytest.mark.usefixtures("_numpy_kernels")
def test_results_are_rounded_to_the_querys_type_first():
    case = engines.draw(6, (3,), (20,), dtype="bfloat16")
    impl, scale = engines.make_impl("ROCM_ATTN", case), np.float32(0.01)
    cache = engines.fill_cache("ROCM_ATTN", impl, case)
    arguments = (LayerScales(), case.query, case.key, case.value, cache)
    metadata = engines.make_builder("ROCM_ATTN", case).build(0, case.common())
    plain = impl.forward(*arguments, metadata)
    assert plain.dtype == jnp.bfloat16
    twice = np.clip(np.asarray(plain, np.float32) / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(impl.forward(*arguments, metadata, output_scale=scale), twice)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_explicit_choices_on_cpu_and_tpu(platform):
    config = AttentionConfig(128, "bfloat16", use_non_causal=True)
    chosen = jattn.select_backend(config, platform=platform, requested="ROCM_ATTN")
    assert chosen is engines.backend("ROCM_ATTN")
    with pytest.raises(ValueError, match="non-causal"):
        jattn.select_backend(config, platform=platform, requested="ROCM_AITER_UNIFIED_ATTN")


def test_turboquant_does_not_fall_through():
    config = AttentionConfig(128, "bfloat16", "turboquant_k8v4")
    with pytest.raises(ValueError, match=r"Selected backend ROCM_ATTN .*kv_cache_dtype turboquant_k8v4 not supported"):
        jattn.select_backend(config, platform="gfx942", requested="ROCM_ATTN")


def test_there_is_no_xpu():
    with pytest.raises(ValueError, match="platform: got 'xpu'"):
        parse_platform("xpu")
