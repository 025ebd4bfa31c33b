"""What each backend means by its arguments, with the float64 oracle in the place of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from backends import impl as impl_module
from backends.contract import AttentionType
from backends.impl import LayerScales
from backends.kv_layouts import KVPools
from backends.platforms import Cuda, Rocm
from tests import engines
from tests.engines import CONTEXTS, NAMES, QUERIES, READS_BACK, fp8_case, fp8_oracle, run


@pytest.fixture(autouse=True)
def _numpy_kernels(monkeypatch):
    monkeypatch.setattr(impl_module.dispatch, "attend", engines.numpy_attend)


@pytest.fixture(scope="module")
def mixed_case():
    return engines.draw(1, QUERIES, CONTEXTS)


@pytest.mark.parametrize("name", ["ROCM_ATTN", "ROCM_AITER_FA"])
def test_new_tokens_come_from_the_arguments(name, mixed_case):
    """Requests of more than a decode do not look at their own tokens in the cache."""
    case, impl = mixed_case, engines.make_impl(name, mixed_case)
    cache = engines.fill_cache(name, impl, case)
    long = np.repeat(np.diff(case.batch["query_start_loc"]) > 1, np.diff(case.batch["query_start_loc"]))
    slots = np.where(np.pad(long, (0, 3)), case.slots, -1)
    nan = np.full_like(case.key, np.nan)
    cache = impl.do_kv_cache_update(LayerScales(), nan, nan, cache, slots)
    metadata = engines.make_builder(name, case).build(0, case.common())
    out = impl.forward(LayerScales(), case.query, case.key, case.value, cache, metadata)
    engines.close(out, engines.expected(case)[0])


@pytest.mark.parametrize("name", NAMES)
def test_without_arguments_everything_comes_from_the_cache(name, mixed_case):
    case, impl = mixed_case, engines.make_impl(name, mixed_case)
    cache = engines.fill_cache(name, impl, case)
    metadata = engines.make_builder(name, case).build(0, case.common())
    out, lse = impl.forward(LayerScales(), case.query, None, None, cache, metadata, return_lse=True)
    want, want_lse = engines.expected(case)
    engines.close(out, want)
    engines.close(lse, want_lse)


# What (left, right) a window of w keys means, causal and not.
WINDOWS = {
    "ROCM_ATTN": ((15, None), (15, None)),
    "ROCM_AITER_UNIFIED_ATTN": ((15, None), None),
    "ROCM_AITER_FA": ((15, None), (15, 15)),
    "FLASHINFER": ((15, None), (15, None)),
    "JATTN": ((15, None), (15, 15)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_window(name, causal):
    window = WINDOWS[name][0 if causal else 1]
    if window is None:
        with pytest.raises(NotImplementedError, match="does not support non-causal"):
            run(name, engines.draw(2, QUERIES, CONTEXTS), causal=causal, sliding_window=16)
        return
    case = engines.draw(2, QUERIES, CONTEXTS, causal=causal, window=window)
    engines.close(run(name, case, causal=causal, sliding_window=16), engines.expected(case)[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_one_token_sees_that_token(name):
    """No engine's off-by-one: exactly w keys, itself included; the pages that the window has left may be gone."""
    case = engines.draw(3, (1, 4, 3), (20, 30, 0), window=(0, None))
    out = run(name, case, sliding_window=1)
    engines.close(out[:8], np.repeat(case.value[:8], 2, axis=1))
    engines.close(out[8:], 0.0)


@pytest.mark.parametrize("window", [None, 0, -1])
def test_no_window(window, mixed_case):
    assert engines.make_impl("ROCM_ATTN", mixed_case, sliding_window=window).window(True) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_soft_cap_scale_and_sinks_hold_in_every_phase(name):
    case = engines.draw(4, QUERIES, CONTEXTS)
    sinks = np.linspace(-1, 1, 4).astype(np.float32)
    out = run(name, case, scale=0.4, logits_soft_cap=2.0, sinks=sinks)
    engines.close(out, engines.expected(case, scale=0.4, soft_cap=2.0, sinks=sinks)[0])


@pytest.mark.parametrize("name", NAMES)
def test_alibi_with_a_window(name):
    case = engines.draw(5, QUERIES, CONTEXTS, window=(15, None))
    slopes = (0.7 ** np.arange(1, 5)).astype(np.float32)
    out = run(name, case, alibi_slopes=slopes, sliding_window=16)
    engines.close(out, engines.expected(case, alibi_slopes=slopes)[0])


@pytest.mark.parametrize("name", ["ROCM_AITER_FA", "FLASHINFER", "JATTN"])
def test_non_causal_decodes_of_several_tokens_keep_alibi_and_sinks(name):
    case = engines.draw(6, (3, 3), (20, 5), causal=False)
    slopes, sinks = np.float32([0.5, 0.3, 0.2, 0.1]), np.float32([0.5, -0.5, 1.0, 0.0])
    options = {"num_speculative_tokens": 2}
    out = run(
        name,
        case,
        causal=False,
        builder=engines.make_builder(name, case, **options),
        alibi_slopes=slopes,
        sinks=sinks,
    )
    engines.close(out, engines.expected(case, alibi_slopes=slopes, sinks=sinks)[0])


def test_rocm_attn_refuses_alibi_without_causality_and_with_sinks(mixed_case):
    ones = np.ones(4, np.float32)
    with pytest.raises(NotImplementedError, match=r"ROCM_ATTN.*ALiBi with causal=False"):
        run("ROCM_ATTN", mixed_case, causal=False, alibi_slopes=ones)
    with pytest.raises(NotImplementedError, match=r"ROCM_ATTN.*ALiBi with sinks"):
        run("ROCM_ATTN", mixed_case, alibi_slopes=ones, sinks=ones)


@pytest.mark.parametrize("name", ["ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "JATTN"])
def test_multimodal_ranges(name, mixed_case):
    case = mixed_case
    ranges = np.zeros((7, 1, 2), np.int32)
    ranges[4], ranges[5] = (25, 40), (3, 20)
    out = run(name, case, common=case.common(mm_prefix_ranges=ranges))
    engines.close(out, engines.expected(case, bidirectional_ranges=ranges)[0])


@pytest.mark.parametrize("name", NAMES)
def test_fp8_rounds_the_keys_that_the_engine_rounds(name):
    case, layer = fp8_case()
    dense = READS_BACK[name]
    want = fp8_oracle(case, layer, ml_dtypes.float8_e4m3fn, 10**9 if dense is None else dense)
    other = fp8_oracle(case, layer, ml_dtypes.float8_e4m3fn, 1 if dense is None else 10**9)
    got = run(name, case, layer=layer, dtype=jnp.float8_e4m3fn, kv_cache_dtype="fp8")
    engines.close(got, want)
    assert np.abs(want - other).max() > 1e-3, "the case could not tell"


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_same_cache(name):
    """Engines keep 8-bit caches as uint8."""
    case, layer = fp8_case()
    impl = engines.make_impl(name, case, kv_cache_dtype="fp8")
    typed = engines.fill_cache(name, impl, case, layer, jnp.float8_e4m3fn)
    shape, nan = typed.shape, jnp.full((), jnp.nan, jnp.float8_e4m3fn).view(jnp.uint8)
    empty = jnp.full(shape, nan, jnp.uint8)
    as_bytes = impl.do_kv_cache_update(layer, case.all_keys, case.all_values, empty, case.all_slots)
    assert as_bytes.dtype == jnp.uint8
    np.testing.assert_array_equal(as_bytes, np.asarray(typed).view(np.uint8))
    metadata = engines.make_builder(name, case).build(0, case.common())
    outs = [impl.forward(layer, case.query, case.key, case.value, cache, metadata) for cache in (typed, as_bytes)]
    np.testing.assert_array_equal(*outs)
    plain = engines.make_impl(name, case)
    with pytest.raises(ValueError, match=r"kv_cache: got uint8.*'auto'"):
        plain.forward(layer, case.query, case.key, case.value, as_bytes, metadata)


@pytest.mark.parametrize("name", NAMES)
def test_decodes_alone_are_one_call_over_the_cache(name, monkeypatch):
    """No kernel has to know of new tokens beside the cache in order to decode."""
    requests = []

    def attend(request, operands, implementation=None):
        requests.append(request)
        return engines.numpy_attend(request, operands)

    monkeypatch.setattr(impl_module.dispatch, "attend", attend)
    case = engines.draw(10, (1, 1, 1), (0, 30, 17), padding_tokens=0)
    engines.close(run(name, case), engines.expected(case)[0])
    assert [(r.num_tokens, r.new_kv, r.max_query_len) for r in requests] == [(3, False, 1)]
    requests.clear()
    layer, impl = LayerScales(), engines.make_impl(name, case)
    traced = jax.jit(engines.make_builder(name, case).build, static_argnums=0)(0, case.common())
    impl.forward(layer, case.query, case.key, case.value, engines.fill_cache(name, impl, case), traced)
    assert [r.new_kv for r in requests] == [False]
    if name == "ROCM_AITER_FA":  # cuts the decodes off
        requests.clear()
        run(name, engines.draw(11, (1, 1, 6), (9, 30, 17), padding_tokens=0))
        assert [(r.num_tokens, r.new_kv) for r in requests] == [(2, False), (6, True)]


def test_gfx942_has_its_own_8_bit_format():
    case, layer = fp8_case()
    layer = LayerScales(k_scale=np.float32(0.05), v_scale=np.float32(0.05))
    got = run("ROCM_ATTN", case, layer=layer, dtype=jnp.float8_e4m3fnuz, kv_cache_dtype="fp8", platform=Rocm("gfx942"))
    engines.close(got, fp8_oracle(case, layer, ml_dtypes.float8_e4m3fnuz, 1))


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_an_unquantised_cache_count_as_one(name, mixed_case):
    layer = LayerScales(q_scale=0.7, k_scale=np.float32(3.0), v_scale=np.float32(5.0))
    engines.close(run(name, mixed_case, layer=layer), engines.expected(mixed_case)[0])


def test_per_head_scales():
    case, _ = fp8_case()
    layer = LayerScales(k_scale=np.float32([0.02, 0.03]), v_scale=np.float32([0.05, 0.03]))
    stored = {}
    for name in ("k", "v"):
        scale = getattr(layer, f"{name}_scale")
        with np.errstate(invalid="ignore"):
            scaled = np.clip(case.batch[f"{name}_cache"] / scale[:, None], -448, 448)
        stored |= {f"{name}_cache": scaled.astype(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale}
    got = run("JATTN", case, layer=layer, dtype=jnp.float8_e4m3fn, kv_cache_dtype="fp8")
    engines.close(got, engines.expected(case, **stored)[0])
    with pytest.raises(NotImplementedError, match=r"FLASHINFER.*k_scale of shape \[2\]"):
        run("FLASHINFER", case, layer=layer, dtype=jnp.float8_e4m3fn, kv_cache_dtype="fp8")


@pytest.mark.parametrize("name", NAMES)
def test_8_bit_queries(name, mixed_case):
    """ROCM_ATTN and ROCM_AITER_FA take them with a scale of 1 alone."""
    case = mixed_case
    impl, builder = engines.make_impl(name, case), engines.make_builder(name, case)
    cache, metadata = engines.fill_cache(name, impl, case), builder.build(0, case.common())
    query = (case.query / 2).astype(ml_dtypes.float8_e4m3fn)

    def attend(scale):
        layer = LayerScales(q_scale=scale)
        return impl.forward(layer, query, case.key, case.value, cache, metadata, output_dtype=jnp.float32)

    def want(scale):
        return engines.expected(case, q=query.astype(np.float32) * np.float32(scale))[0]

    engines.close(attend(1.0), want(1.0))
    if name in ("ROCM_ATTN", "ROCM_AITER_FA"):
        with pytest.raises(NotImplementedError, match=r"8-bit queries with q_scale=2\.0"):
            attend(2.0)
    else:
        engines.close(attend(2.0), want(2.0))


@pytest.mark.parametrize("name", NAMES)
def test_quantised_results(name, mixed_case):
    case = mixed_case
    impl, builder = engines.make_impl(name, case), engines.make_builder(name, case)
    cache, metadata = engines.fill_cache(name, impl, case), builder.build(0, case.common())
    arguments = (LayerScales(), case.query, case.key, case.value, cache, metadata)
    with pytest.raises(NotImplementedError, match="output_block_scale"):
        impl.forward(*arguments, output_block_scale=np.ones(1))
    if name in ("ROCM_AITER_FA", "FLASHINFER"):
        with pytest.raises(NotImplementedError, match="output_scale"):
            impl.forward(*arguments, output_scale=0.1)
        return
    out = impl.forward(*arguments, output_scale=0.01)
    assert out.dtype == jnp.float8_e4m3fn
    engines.close(out.astype(jnp.float32) * 0.01, engines.expected(case)[0], atol=0.2)


def test_flashinfer_quantises_results_on_sm100(mixed_case):
    case = mixed_case
    impl = engines.make_impl("FLASHINFER", case, kv_cache_dtype="fp8", platform=Cuda((10, 0)))
    assert impl.fused_output_quant_supported()
    assert not engines.make_impl("FLASHINFER", case, platform=Cuda((10, 0))).fused_output_quant_supported()
    assert not engines.make_impl("FLASHINFER", case, kv_cache_dtype="fp8").fused_output_quant_supported()


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("name", ["ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "JATTN"])
def test_encoders_see_both_ways_and_write_nothing(name, attn_type):
    case = engines.draw(8, (5, 33, 1, 0), (0, 0, 0, 0), causal=False, window=(7, 7))
    impl = engines.make_impl(name, case, attn_type=attn_type, sliding_window=8, scale=0.5)
    assert impl.do_kv_cache_update(LayerScales(), case.key, case.value, None, case.slots) is None
    metadata = engines.make_builder(name, case).build(0, case.common())
    out = impl.forward(LayerScales(), case.query, case.key, case.value, None, metadata)
    engines.close(out, engines.expected(case, scale=0.5)[0])


@pytest.mark.parametrize("name", ["ROCM_AITER_UNIFIED_ATTN", "JATTN"])
def test_cross_attention(name):
    """Queries of the decoder over all of an encoder's keys, of which there may be fewer than queries."""
    rng = np.random.default_rng(9)
    encoder = engines.draw(9, (20, 3), (0, 0), causal=False, padding_tokens=0)
    impl = engines.make_impl(name, encoder, attn_type="encoder_decoder")
    cache = engines.fill_cache(name, impl, encoder)
    query = rng.standard_normal((7, 4, 32)).astype(np.float32)
    common = encoder.common(causal=True, encoder_seq_lens=np.int32([20, 3]))
    common = common.replace(query_start_loc=jnp.int32([0, 1, 7]), seq_lens=jnp.int32([8, 6]))
    builder = engines.make_builder(name, encoder, attn_type=AttentionType.ENCODER_DECODER)
    out = impl.forward(LayerScales(), query, None, None, cache, builder.build(0, common))
    want = np.zeros(out.shape)
    for rows, keys in ((slice(0, 1), slice(0, 20)), (slice(1, 7), slice(20, 23))):
        k, v = (np.repeat(x[keys].astype(np.float64), 2, 1) for x in (encoder.all_keys, encoder.all_values))
        logits = np.einsum("qhd,khd->hqk", query[rows], k) * 32**-0.5
        weights = np.exp(logits)
        want[rows] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    engines.close(out, want)
    with pytest.raises(NotImplementedError, match="sliding window in cross-attention"):
        engines.make_impl(name, encoder, attn_type="encoder_decoder", sliding_window=4)


@pytest.mark.parametrize("name", NAMES)
def test_pools_instead_of_the_engines_array(name, mixed_case):
    """The layout that costs no copy gives the same."""
    case, impl = mixed_case, engines.make_impl(name, mixed_case)
    metadata = engines.make_builder(name, case).build(0, case.common())
    array = engines.fill_cache(name, impl, case)
    shape = case.batch["k_cache"].shape
    for layout, order in (("NHD", (0, 1, 2, 3)), ("HND", (0, 2, 1, 3))):
        empty = jnp.full(shape, jnp.nan, jnp.float32).transpose(order)
        pools = KVPools(empty, empty, layout)
        pools = impl.do_kv_cache_update(LayerScales(), case.all_keys, case.all_values, pools, case.all_slots)
        outs = [impl.forward(LayerScales(), case.query, case.key, case.value, c, metadata) for c in (pools, array)]
        engines.close(outs[0], outs[1], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_profiling_run_gives_zeros(name, mixed_case):
    case, impl = mixed_case, engines.make_impl(name, mixed_case)
    out = impl.forward(LayerScales(), case.query, case.key, case.value, None, None)
    np.testing.assert_array_equal(out, np.zeros(case.query.shape))


def test_layers_that_share_a_cache_write_nothing(mixed_case):
    impl = engines.make_impl("FLASHINFER", mixed_case, kv_sharing_target_layer_name="layers.0")
    cache = jnp.zeros((2, 2, 16, 64))
    assert impl.do_kv_cache_update(LayerScales(), mixed_case.key, mixed_case.value, cache, mixed_case.slots) is cache


def test_per_request_causal_flags(mixed_case):
    case = mixed_case
    flags = np.array([True, False, False, True, False, True, True])
    out = run("JATTN", case, common=case.common(causal=flags), sliding_window=16)
    engines.close(out, engines.expected(case, causal=flags, window=(15, 15))[0])


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"JATTN"}))
def test_an_engine_with_one_flag_refuses_several(name, mixed_case):
    flags = np.array([True, False, False, True, False, True, True])
    with pytest.raises(NotImplementedError, match=f"{name} does not support per-request causal flags"):
        engines.make_builder(name, mixed_case).build(0, mixed_case.common(causal=flags))


def test_unified_refuses_non_causal_in_the_impl(mixed_case):
    with pytest.raises(NotImplementedError, match=r"(?s)ROCM_AITER_UNIFIED_ATTN.*non-causal.*ROCM_ATTN.*FLASHINFER"):
        run("ROCM_AITER_UNIFIED_ATTN", mixed_case, causal=False)


@pytest.mark.parametrize("name", NAMES)
def test_metadata_of_another_backend(name, mixed_case):
    other = "JATTN" if name != "JATTN" else "FLASHINFER"
    wrong = engines.make_builder(other, mixed_case).build(0, mixed_case.common())
    right = engines.backend(name).get_metadata_cls().__name__
    impl = engines.make_impl(name, mixed_case)
    with pytest.raises(ValueError, match=f"attn_metadata: got {type(wrong).__name__}, expected {right}"):
        impl.forward(LayerScales(), mixed_case.query, None, None, None, wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("argument", ["sinks", "alibi_slopes"])
def test_numbers_for_the_wrong_number_of_heads(name, argument, mixed_case):
    with pytest.raises(ValueError, match=rf"{argument}: got float32\[3\].*num_heads=4"):
        engines.make_impl(name, mixed_case, **{argument: np.zeros(3, np.float32)})


def test_other_arguments_that_do_not_fit(mixed_case):
    case, impl = mixed_case, engines.make_impl("JATTN", mixed_case)
    metadata = engines.make_builder("JATTN", case).build(0, case.common())
    with pytest.raises(ValueError, match="query: got float32"):
        impl.forward(LayerScales(), case.query[:, :3], None, None, None, metadata)
    with pytest.raises(ValueError, match="kv_cache: got None"):
        impl.forward(LayerScales(), case.query, None, None, None, metadata)
    with pytest.raises(ValueError, match="kv_cache: got float32"):
        engines.make_impl("FLASHINFER", case).split_cache(jnp.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="num_kv_heads: got 3 beside num_heads=4"):
        engines.backend("JATTN").get_impl_cls()(4, 32, 1.0, 3)
    with pytest.raises(ValueError, match="attn_type: got 'cross'"):
        engines.make_impl("JATTN", case, attn_type="cross")
    with pytest.raises(NotImplementedError, match=r"FLASHINFER.*'nvfp4'.*jattn has no NVFP4 cache"):
        engines.make_impl("FLASHINFER", case, kv_cache_dtype="nvfp4")
    for kv_cache_dtype in ("int8_per_token_head", "fp8_ds_mla"):
        with pytest.raises(NotImplementedError, match=f"ROCM_ATTN does not support kv_cache_dtype='{kv_cache_dtype}'"):
            engines.make_impl("ROCM_ATTN", case, kv_cache_dtype=kv_cache_dtype)
    for attn_type in ("encoder", "encoder_only"):
        with pytest.raises(NotImplementedError, match="kv_cache_dtype='fp8' with an encoder"):
            engines.make_impl("ROCM_ATTN", case, attn_type=attn_type, kv_cache_dtype="fp8")
