"""Metadata builders: pure, the same attention inside `jit` and outside, and FLASHINFER's decisions."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends import flashinfer, trtllm
from backends import impl as impl_module
from backends.contract import AttentionCGSupport
from backends.impl import LayerScales, Phase
from backends.metadata import CommonAttentionMetadata
from backends.platforms import Cuda
from backends.trtllm import TrtllmSwitches, query_dtypes, use_trtllm_attention
from tests import engines
from tests.engines import CONTEXTS, NAMES, NON_CAUSAL, QUERIES

SM80, SM90, SM100, SM120 = Cuda((8, 0)), Cuda((9, 0)), Cuda((10, 0)), Cuda((12, 0))


@pytest.fixture(scope="module")
def case():
    return engines.draw(1, QUERIES, CONTEXTS)


def frozen(x):
    """A pytree's whole content, for comparison."""
    leaves, structure = jax.tree.flatten(x)
    return structure, [np.asarray(leaf).tolist() for leaf in leaves]


@pytest.fixture
def quiet():
    """FLASHINFER's warning, already given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flashinfer.warn_once_about_non_causal_trtllm()


@pytest.mark.parametrize("name", NAMES)
def test_builds_are_pure_and_may_alternate(name, case, quiet):
    builder = engines.make_builder(name, case, SM100 if name == "FLASHINFER" else None)
    causal, drafting = case.common(), case.common(causal=False)
    before = frozen((causal, drafting))
    first = [frozen(builder.build(0, common)) for common in (causal, drafting)]
    for _ in range(2):
        assert [frozen(builder.build(0, common)) for common in (causal, drafting)] == first
        assert frozen(builder.build_for_drafting(drafting, 1)) == first[1]
    assert first[0] != first[1]
    assert frozen((causal, drafting)) == before


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_a_pytree_with_a_static_flag(name, case):
    metadata = engines.make_builder(name, case).build(0, case.common())
    again = jax.jit(lambda m: jax.tree.map(lambda x: x + 0, m))(metadata)
    assert again.causal is True
    assert frozen(again) == frozen(metadata)


@pytest.mark.parametrize(("name", "causal"), [(name, True) for name in NAMES] + [(name, False) for name in NON_CAUSAL])
def test_a_build_inside_jit_gives_the_same_attention(name, causal, case, monkeypatch):
    """Traced lengths give one ragged call; where the lengths are known the batch is cut. The answers agree."""
    calls = []

    def attend(request, operands, implementation=None):
        calls.append(request.num_seqs)
        return engines.numpy_attend(request, operands)

    monkeypatch.setattr(impl_module.dispatch, "attend", attend)
    builder, impl = engines.make_builder(name, case), engines.make_impl(name, case)
    common, cache = case.common(causal=causal), engines.fill_cache(name, impl, case)
    outs, cuts = [], []
    for build in (builder.build, jax.jit(builder.build, static_argnums=0)):
        calls.clear()
        outs.append(impl.forward(LayerScales(), case.query, case.key, case.value, cache, build(0, common)))
        cuts.append(tuple(calls))
    cut = {("FLASHINFER", True): (2, 5), ("ROCM_AITER_FA", True): (2, 5), ("ROCM_AITER_FA", False): (2, 5)}
    assert cuts == [cut.get((name, causal), (7,)), (7,)]
    engines.close(outs[0], outs[1], atol=1e-6)
    engines.close(outs[0], engines.expected(case, causal=causal)[0])


def test_a_step_inside_jit_compiles_once_for_all_lengths():
    """Write, build and attend in one program, then again for other lengths."""
    cases = [
        engines.draw(seed, q, c, padding_tokens=p)
        for seed, (q, c, p) in enumerate([((1, 6), (9, 4), 1), ((3, 1), (2, 14), 4)])
    ]
    traces = []

    @jax.jit
    def step(arrays, query, key, value, cache):
        traces.append(1)
        common = CommonAttentionMetadata.make(*arrays)
        metadata = engines.make_builder("ROCM_ATTN", cases[0]).build(0, common)
        impl = engines.make_impl("ROCM_ATTN", cases[0])
        cache = impl.do_kv_cache_update(LayerScales(), key, value, cache, metadata.slot_mapping)
        return impl.forward(LayerScales(), query, key, value, cache, metadata)

    for case in cases:
        impl = engines.make_impl("ROCM_ATTN", case)
        cache = engines.fill_cache("ROCM_ATTN", impl, case)
        cache = jnp.pad(cache, ((0, 0), (0, 8 - cache.shape[1]), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
        b = case.batch
        arrays = (b["query_start_loc"], b["seq_lens"], b["block_table"][:, :2], case.slots)
        out = step(arrays, case.query, case.key, case.value, cache)
        engines.close(out, engines.expected(case)[0])
    assert len(traces) == 1


def test_rocm_attn_copies_the_flag_and_knows_of_shared_prefixes(case):
    builder = engines.make_builder("ROCM_ATTN", case)
    metadata = builder.build(0, case.common(causal=False))
    assert metadata.causal is False
    assert not metadata.use_cascade
    assert metadata.cu_prefix_query_lens is None
    assert builder.build(0, case.common()).causal is True
    cascade = builder.build(16, case.common())
    assert cascade.use_cascade
    assert cascade.cu_prefix_query_lens.tolist() == [0, len(case.query)]
    assert cascade.prefix_kv_lens.tolist() == [16]
    np.testing.assert_array_equal(cascade.suffix_kv_lens, case.batch["seq_lens"] - 16)
    assert engines.backend("ROCM_ATTN").get_metadata_cls().__dataclass_fields__["causal"].default is True


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_prefix_changes_nothing(name, monkeypatch):
    monkeypatch.setattr(impl_module.dispatch, "attend", engines.numpy_attend)
    case = engines.draw(3, (1, 4), (20, 33))
    impl, builder = engines.make_impl(name, case), engines.make_builder(name, case)
    cache = engines.fill_cache(name, impl, case)
    metadata = builder.build(16, case.common())
    engines.close(
        impl.forward(LayerScales(), case.query, case.key, case.value, cache, metadata), engines.expected(case)[0]
    )


def test_a_capture_run_leaves_its_argument_alone(case):
    common = case.common()
    captured = engines.make_builder("ROCM_ATTN", case).build_for_cudagraph_capture(common)
    assert captured.query_start_loc.tolist() == [0] * 8
    assert captured.seq_lens.tolist() == [1] * 7
    np.testing.assert_array_equal(common.query_start_loc, case.batch["query_start_loc"])


def test_aiter_fa_cuts_in_three(case):
    metadata = engines.make_builder("ROCM_AITER_FA", case).build(0, case.common())
    counts = (metadata.num_decodes, metadata.num_extends, metadata.num_prefills)
    tokens = (metadata.num_decode_tokens, metadata.num_extend_tokens, metadata.num_prefill_tokens)
    assert (counts, tokens) == ((2, 3, 2), (2, 50, 36))
    assert metadata.phases == (Phase(0, 2, 0, 2, 1, from_cache=True), Phase(2, 5, 2, 86, 40))
    spec = engines.make_builder("ROCM_AITER_FA", case, num_speculative_tokens=4)
    assert spec.reorder_batch_threshold == 5
    assert spec.build(0, case.common()).num_decodes == 4
    twice = engines.make_builder("ROCM_AITER_FA", case, num_speculative_tokens=4, parallel_drafting=True)
    assert twice.reorder_batch_threshold == 9


def test_aiter_fa_knows_one_window(case):
    engines.make_builder("ROCM_AITER_FA", case, layer_windows=(128, None, 128))
    with pytest.raises(ValueError, match="layer_windows: got 128, 64, expected one window"):
        engines.make_builder("ROCM_AITER_FA", case, layer_windows=(128, None, 64))


@pytest.mark.parametrize("name", ["ROCM_AITER_FA", "FLASHINFER"])
def test_backends_without_multimodal_ranges_refuse_them(name, case):
    common = case.common(mm_prefix_ranges=np.zeros((7, 1, 2), np.int32))
    with pytest.raises(NotImplementedError, match=f"{name} does not support mm_prefix_ranges"):
        engines.make_builder(name, case).build(0, common)


def test_cross_attention_needs_the_encoders_lengths(case):
    for name in ("ROCM_AITER_UNIFIED_ATTN", "JATTN"):
        builder = engines.make_builder(name, case, attn_type="encoder_decoder")
        with pytest.raises(ValueError, match="encoder_seq_lens: got None"):
            builder.build(0, case.common())


# FLASHINFER.


def test_flashinfer_cuts_causal_batches_into_uniform_decodes_and_prefills(case):
    metadata = engines.make_builder("FLASHINFER", case).build(0, case.common())
    assert metadata.causal is True
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 5)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (2, 86)


@pytest.mark.parametrize("platform", [None, SM80, SM90, SM100, SM120])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (5, 5), (1, 9)])
def test_flashinfer_takes_non_causal_batches_as_prefills(platform, query_lens, quiet):
    case = engines.draw(0, query_lens, (4,) * len(query_lens), padding_tokens=0)
    metadata = engines.make_builder("FLASHINFER", case, platform).build(0, case.common(causal=False))
    assert metadata.causal is False
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (0, 0)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (len(query_lens), sum(query_lens))
    assert metadata.use_trtllm == TrtllmSwitches(False, False, False)


def test_flashinfer_switches_while_causal(quiet):
    case = engines.draw(0, (1, 1), (4, 4), padding_tokens=0)
    for platform, want in (
        (SM100, (True, True, True)),
        (SM90, (False, True, True)),
        (SM120, (False, True, True)),
        (SM80, (False, False, False)),
        (Cuda((10, 0), use_trtllm_attention=False), (False, False, False)),
    ):
        builder = engines.make_builder("FLASHINFER", case, platform)
        for _ in range(2):  # a drafter's build in between changes nothing
            assert builder.build(0, case.common()).use_trtllm == want
            assert not any(builder.build(0, case.common(causal=False)).use_trtllm)
    dcp = engines.make_builder("FLASHINFER", case, SM100, dcp_world_size=2)
    assert dcp.build(0, case.common()).use_trtllm == (False, False, False)


def test_flashinfer_warns_once_and_only_where_trtllm_would_decode():
    case = engines.draw(0, (1, 1), (4, 4), padding_tokens=0)
    flashinfer.warn_once_about_non_causal_trtllm.cache_clear()
    drafting = case.common(causal=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platform in (None, SM80, Cuda((8, 9)), Cuda((10, 0), trtllm_available=False)):
            engines.make_builder("FLASHINFER", case, platform).build(0, drafting)
        engines.make_builder("FLASHINFER", case, SM100).build(0, case.common())
    with pytest.warns(UserWarning, match="non-causal batches"):
        engines.make_builder("FLASHINFER", case, SM100).build(0, drafting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines.make_builder("FLASHINFER", case, SM90).build(0, drafting)


def test_flashinfer_refuses_dcp_first_then_nvfp4(case):
    drafting = case.common(causal=False)
    both = engines.make_builder("FLASHINFER", case, SM100, dcp_world_size=2, kv_cache_dtype="nvfp4")
    with pytest.raises(NotImplementedError, match="non-causal prefill with DCP"):
        both.build(0, drafting)
    nvfp4 = engines.make_builder("FLASHINFER", case, SM100, kv_cache_dtype="nvfp4")
    with pytest.raises(NotImplementedError, match="non-causal prefill with an NVFP4 KV cache"):
        nvfp4.build(0, drafting)
    assert nvfp4.build(0, case.common()).q_data_type_prefill == "float8_e4m3fn"
    assert both.build(0, case.common()).causal is True


def test_flashinfer_refuses_at_construction(case):
    make = engines.make_builder
    with pytest.raises(ValueError, match="kv_cache_dtype: got nvfp4, expected a platform with TRTLLM"):
        make("FLASHINFER", case, SM90, kv_cache_dtype="nvfp4")
    with pytest.raises(NotImplementedError, match="sliding windows on SM90"):
        make("FLASHINFER", case, SM90, layer_windows=(None, 16))
    make("FLASHINFER", case, SM80, layer_windows=(16, 16))
    with pytest.raises(NotImplementedError, match="sinks on this platform"):
        make("FLASHINFER", case, SM90, has_sinks=True)
    make("FLASHINFER", case, SM120, has_sinks=True)
    large = engines.draw(0, (1,), (3,), page_size=128)
    with pytest.raises(ValueError, match="block_size: got 128, expected at most 64"):
        make("FLASHINFER", large, SM90)
    make("FLASHINFER", large, SM100)
    ungrouped = engines.draw(0, (1,), (3,), page_size=128, num_kv_heads=4)
    with pytest.raises(ValueError, match="block_size: got 128"):
        make("FLASHINFER", ungrouped, SM100)


def test_flashinfer_plans_once_for_all_layers():
    case = engines.draw(0, (1, 1), (4, 4), padding_tokens=0)
    for options, message in (
        ({"layer_windows": (16, None)}, "layer_windows: got 16, None.*sliding windows disabled"),
        ({"layer_soft_caps": (30.0, None)}, "layer_soft_caps: got 30.0, None"),
    ):
        with pytest.raises(ValueError, match=message):
            engines.make_builder("FLASHINFER", case, SM80, **options).build(0, case.common())
        engines.make_builder("FLASHINFER", case, SM100, **options).build(0, case.common())  # TRTLLM in all phases


def test_flashinfer_counts_pages_and_last_pages():
    indptr, last = flashinfer.paged_kv_lengths(jnp.int32([0, 1, 15, 16, 17, 32]), 16)
    assert indptr.tolist() == [0, 0, 1, 2, 3, 5, 7]
    assert last.tolist() == [0, 1, 15, 16, 1, 16]


def test_flashinfer_counts_pages_of_one_rank():
    case = engines.draw(0, (1, 1, 20), (63, 0, 64), padding_tokens=0)
    builder = engines.make_builder("FLASHINFER", case, SM90, dcp_world_size=2, dcp_rank=1)
    metadata = builder.build(0, case.common())
    # Halves of 64, 1 and, the prefill's new tokens apart, 64.
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 2, 4]
    assert metadata.paged_kv_last_page_len.tolist() == [16, 0, 16]
    traced = jax.jit(builder.build, static_argnums=0)(0, case.common())
    assert traced.paged_kv_indptr.tolist() == [0, 2, 2, 4]
    with pytest.raises(NotImplementedError, match=r"DCP.*jattn\.sharding"):
        engines.make_impl("FLASHINFER", case).batch(metadata)


def test_flashinfer_thresholds_and_graphs(case):
    single, uniform = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
    for platform, options, threshold, level in (
        (None, {}, 1, single),
        (SM80, {}, 1, single),
        (SM90, {}, 1, single),
        (SM100, {}, 4, uniform),
        (SM120, {}, 4, uniform),
        (SM100, {"use_non_causal": True}, 4, single),
        (SM120, {"use_non_causal": True}, 4, uniform),
        (SM120, {"dcp_world_size": 2}, 1, single),
        (SM100, {"parallel_drafting": True}, 7, uniform),
    ):
        builder = engines.make_builder("FLASHINFER", case, platform, num_speculative_tokens=3, **options)
        assert (builder.reorder_batch_threshold, builder.get_cudagraph_support()) == (threshold, level)


def test_query_types():
    assert query_dtypes("auto", "bfloat16", SM100) == ("bfloat16", "bfloat16")
    assert query_dtypes("fp8", "bfloat16", SM100) == ("float8_e4m3fn", "float8_e4m3fn")
    assert query_dtypes("fp8", "bfloat16", SM90) == ("float8_e4m3fn", "bfloat16")
    assert query_dtypes("fp8", "bfloat16", SM120) == ("bfloat16", "bfloat16")
    assert query_dtypes("fp8", "float16", Cuda((8, 9))) == ("float16", "float16")
    assert query_dtypes("fp8", "bfloat16", SM100, disable_q_quantization=True) == ("bfloat16", "bfloat16")
    assert query_dtypes("nvfp4", "bfloat16", SM100) == ("float8_e4m3fn", "float8_e4m3fn")


def trt(**options):
    defaults = {
        "num_heads": 64,
        "num_kv_heads": 8,
        "num_tokens": 128,
        "kv_cache_dtype": "auto",
        "query_dtype": "bfloat16",
        "is_prefill": False,
        "platform": SM100,
    }
    return use_trtllm_attention(**(defaults | options))


def test_use_trtllm_attention():
    for heads, kv_heads in ((64, 8), (32, 8), (14, 2), (8, 4), (128, 8)):
        assert trt(num_heads=heads, num_kv_heads=kv_heads)
    assert not trt(num_heads=40, num_kv_heads=6, force=True)
    assert not trt(dcp_world_size=2, force=True)
    assert not trt(platform=SM80, force=True)
    assert not trt(platform=None, force=True)
    assert not trt(platform=SM90, is_prefill=True, force=True)
    assert not trt(force=False, query_dtype="float8_e4m3fn")
    assert [trt(num_tokens=n) for n in (128, 256, 257, 512)] == [True, True, False, False]
    assert trt(num_tokens=512, force=True)
    assert trt(is_prefill=True, num_tokens=512)
    assert not trt(is_prefill=True, kv_cache_dtype="fp8")
    assert trt(is_prefill=True, kv_cache_dtype="fp8", query_dtype="float8_e4m3fn")
    assert trt(num_tokens=512, has_sinks=True)
    assert trt(num_tokens=512, has_spec=True)
    assert not trt(is_prefill=True, has_spec=True, kv_cache_dtype="fp8")
    assert trt(platform=SM90, kv_cache_dtype="fp8", num_tokens=512)
    assert not trt(kv_cache_dtype="fp8", num_tokens=128)
    assert trtllm.AUTO_DECODE_TOKENS == 256
    with pytest.raises(ValueError, match="num_kv_heads: got 0"):
        trt(num_kv_heads=0)
