"""Selection: priorities by platform, explicit choices, the registry, explanations, and the drafters' stories."""

from __future__ import annotations

import argparse
import dataclasses
import warnings

import pytest

import jattn
from backends import registry, selector
from backends.contract import AttentionBackend, AttentionConfig, AttentionType
from backends.platforms import Cpu, Cuda, Rocm, Tpu
from backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend
from jattn import explain as explain_function
from jattn.selection import add_arguments, run
from tests import engines

DRAFTER = AttentionConfig(128, "bfloat16", use_non_causal=True)
TARGET = AttentionConfig(128, "bfloat16")
COMMON_CUDA = ("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "JATTN")
MLA = AttentionConfig(576, "bfloat16", use_mla=True)
SM100_MLA = ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
AITER = Rocm(use_aiter=True)
ROCM_END = ("TRITON_ATTN", "TURBOQUANT", "JATTN")


def config(**options):
    return AttentionConfig(**({"head_size": 128, "dtype": "bfloat16"} | options))


PRIORITIES = [
    (Cuda((10, 0)), TARGET, ("FLASHINFER", "FLASH_ATTN", *COMMON_CUDA)),
    (Cuda((10, 3)), DRAFTER, ("FLASH_ATTN", "FLASHINFER", *COMMON_CUDA)),
    (Cuda((9, 0)), TARGET, ("FLASH_ATTN", "FLASHINFER", *COMMON_CUDA)),
    (Cuda((8, 9)), DRAFTER, ("FLASH_ATTN", "FLASHINFER", *COMMON_CUDA)),
    (Cuda((12, 0)), TARGET, ("FLASH_ATTN", "FLASHINFER", *COMMON_CUDA)),
    (Cuda((10, 0)), MLA, (*SM100_MLA, "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "JATTN")),
    (
        Cuda((10, 0)),
        config(use_mla=True, num_heads=16),
        (*SM100_MLA, "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", "JATTN"),
    ),
    (
        Cuda((10, 0)),
        config(use_mla=True, kv_cache_dtype="fp8", num_heads=128),
        (*SM100_MLA, "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", "JATTN"),
    ),
    (Cuda((12, 0)), MLA, ("TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120", "JATTN")),
    (
        Cuda((9, 0)),
        MLA,
        (
            "FLASH_ATTN_MLA",
            "FLASHMLA",
            "FLASHINFER_MLA",
            "TRITON_MLA",
            "FLASH_ATTN_MLA_SPARSE",
            "FLASHMLA_SPARSE",
            "JATTN",
        ),
    ),
    (Rocm(), TARGET, ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (AITER, TARGET, ("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (Rocm(use_aiter=True, use_aiter_mha=False), TARGET, ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (Rocm("gfx90a", use_aiter=True), TARGET, ("ROCM_ATTN", *ROCM_END)),
    (Rocm(use_aiter=True, aiter_found=False), TARGET, ("ROCM_ATTN", *ROCM_END)),
    (Rocm("gfx1201"), TARGET, ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (Rocm("gfx1201", use_aiter=True), TARGET, ("ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", *ROCM_END)),
    (AITER, config(use_kv_connector=True), ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (AITER, config(is_encoder_decoder_model=True), ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (AITER, config(attn_type="encoder_decoder"), ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", *ROCM_END)),
    (Rocm(), config(use_sparse=True), ("ROCM_AITER_MLA_SPARSE", "JATTN")),
    (Rocm(), MLA, ("TRITON_MLA", "JATTN")),
    (AITER, MLA, ("ROCM_AITER_MLA", "TRITON_MLA", "ROCM_AITER_TRITON_MLA", "JATTN")),
    (Rocm(use_aiter=True, use_aiter_mla=False), MLA, ("TRITON_MLA", "JATTN")),
    (Cpu(), TARGET, ("CPU_ATTN", "JATTN")),
    (Cpu(), MLA, ("CPU_MLA", "JATTN")),
    (Tpu(), TARGET, ("FLASH_ATTN", "JATTN")),
    (Tpu(), MLA, ("FLASH_ATTN_MLA", "JATTN")),
]


@pytest.mark.parametrize(("platform", "asked", "want"), PRIORITIES)
def test_priorities(platform, asked, want):
    assert platform.priorities(asked) == want
    for name in want:
        AttentionBackendEnum[name]


CHOICES = [
    ("sm100", TARGET, "FLASHINFER"),
    ("sm90", TARGET, "FLASHINFER"),
    ("sm75", TARGET, "JATTN"),
    ("sm90", config(dtype="float32", head_size=16), "JATTN"),
    ("gfx942", config(head_size=32, dtype="float16", block_size=16), "ROCM_ATTN"),
    (AITER, config(dtype="float16", block_size=16), "ROCM_ATTN"),
    (Rocm(use_aiter=True, use_aiter_mha=False), config(dtype="float16", block_size=16), "ROCM_ATTN"),
    ("gfx942", config(dtype="float32", head_size=16), "JATTN"),
    ("gfx942", config(has_sink=True), "ROCM_AITER_UNIFIED_ATTN"),
    (AITER, config(has_sink=True), "ROCM_AITER_FA"),
    (AITER, config(use_kv_connector=True), "ROCM_AITER_FA"),
    ("gfx942", config(use_kv_connector=True), "JATTN"),
    ("gfx942", config(attn_type="encoder_decoder"), "ROCM_AITER_UNIFIED_ATTN"),
    ("gfx1201", TARGET, "ROCM_ATTN"),
    (Rocm("gfx1201", use_aiter=True), TARGET, "ROCM_AITER_UNIFIED_ATTN"),
    (Rocm("gfx1201", use_aiter=True), DRAFTER, "ROCM_ATTN"),
    ("cpu", TARGET, "JATTN"),
    ("tpu", DRAFTER, "JATTN"),
    ("sm90", config(use_per_head_quant_scales=True, kv_cache_dtype="fp8"), "JATTN"),
    ("sm90", config(use_batch_invariant=True), "JATTN"),
    ("sm90", config(use_non_causal=True, use_per_request_causal=True), "JATTN"),
]


@pytest.mark.parametrize(("platform", "asked", "want"), CHOICES)
def test_automatic_choice(platform, asked, want):
    chosen = jattn.select_backend(asked, platform=platform)
    assert chosen is AttentionBackendEnum[want].get_class()
    assert jattn.select_backend(asked, platform=platform, requested="Auto") is chosen
    assert jattn.explain(asked, platform=platform).chosen == want
    if asked.use_non_causal:
        assert chosen.supports_non_causal()


def test_a_drafter_on_each_backend():
    """DFlash needs non-causal attention: three of the four engines' backends run it."""
    where = {"ROCM_ATTN": "gfx942", "ROCM_AITER_FA": "gfx942", "FLASHINFER": "sm89", "JATTN": "tpu"}
    for name, platform in where.items():
        assert jattn.select_backend(DRAFTER, platform=platform, requested=name) is engines.backend(name)
    with pytest.raises(ValueError, match=r"ROCM_AITER_UNIFIED_ATTN is not valid.*non-causal attention not supported"):
        jattn.select_backend(DRAFTER, platform="gfx942", requested="ROCM_AITER_UNIFIED_ATTN")
    fp8 = config(use_non_causal=True, kv_cache_dtype="fp8")  # an RTX 4090
    assert jattn.select_backend(fp8, platform="sm89", requested="FLASHINFER") is engines.backend("FLASHINFER")


def test_target_and_drafter_choose_independently():
    target, drafter = config(has_sink=True), config(has_sink=True, use_non_causal=True)
    for _ in range(2):
        assert jattn.select_backend(target, platform="gfx942").get_name() == "ROCM_AITER_UNIFIED_ATTN"
        assert jattn.select_backend(drafter, platform="gfx942").get_name() == "JATTN"
        assert jattn.select_backend(drafter, platform=AITER) is engines.backend("ROCM_AITER_FA")


def test_selection_is_cached_by_the_whole_configuration(monkeypatch):
    count, asked = [], engines.backend("ROCM_AITER_FA")
    answer = asked.validate_configuration
    monkeypatch.setattr(asked, "validate_configuration", lambda *args: count.append(args) or answer(*args))
    selector._cached_explain.cache_clear()
    selector._cached_get_attn_backend.cache_clear()
    for _ in range(5):
        jattn.select_backend(TARGET, platform="gfx942")
        jattn.explain(TARGET, platform="gfx942")
    assert len(count) == 1
    jattn.select_backend(DRAFTER, platform="gfx942")
    assert len(count) == 2


@pytest.mark.parametrize("platform", ["gfx942", "gfx950", AITER, "gfx1201"])
def test_cross_attention_never_reaches_aiter_fa(platform):
    asked = config(attn_type=AttentionType.ENCODER_DECODER)
    assert jattn.select_backend(asked, platform=platform) is not engines.backend("ROCM_AITER_FA")
    with pytest.raises(ValueError, match="attention type encoder_decoder not supported"):
        jattn.select_backend(asked, platform=platform, requested="ROCM_AITER_FA")


@pytest.mark.parametrize("name", ["ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA", "JATTN"])
def test_explicit_choices_are_honoured_on_rocm(name):
    asked = config(dtype="float16", block_size=16)
    assert jattn.select_backend(asked, platform="gfx942", requested=name) is engines.backend(name)
    member = AttentionBackendEnum[name]
    assert jattn.select_backend(asked, platform="gfx942", requested=member) is engines.backend(name)


def test_explicit_choices_do_not_fall_back():
    with pytest.raises(
        ValueError, match=r"(?s)Selected backend ROCM_AITER_FA.*\['head_size 80.*', 'compute capability"
    ):
        jattn.select_backend(config(head_size=80), platform="gfx908", requested="ROCM_AITER_FA")
    with pytest.raises(ValueError, match=r"FLASHINFER.*per-head quant scales"):
        asked = config(use_per_head_quant_scales=True, kv_cache_dtype="fp8")
        jattn.select_backend(asked, platform="sm90", requested="FLASHINFER")
    with pytest.raises(ValueError, match="FLASH_ATTN is a backend of vLLM that jattn does not provide"):
        jattn.select_backend(TARGET, platform="sm90", requested="FLASH_ATTN")


def test_an_unknown_name_lists_all():
    with pytest.raises(
        ValueError, match=r"attention backend: got 'PALLAS', expected one of ROCM_ATTN, .*JATTN.*XPU_MLA"
    ):
        jattn.select_backend(TARGET, platform="sm90", requested="PALLAS")
    with pytest.raises(ValueError, match="requested: got 3"):
        jattn.select_backend(TARGET, platform="sm90", requested=3)


def test_no_valid_backend_names_every_one_with_all_reasons():
    with pytest.raises(ValueError, match=r"No valid attention backend found for 12\.0 with AttentionConfig") as error:
        jattn.select_backend(config(use_mla=True, use_pcp=True), platform="sm120")
    text = str(error.value)
    listed = [text.index(name) for name in ("TRITON_MLA: [", "FLASHINFER_MLA_SPARSE_SM120: [", "JATTN: [")]
    assert listed == sorted(listed)
    assert text.endswith("JATTN: [MLA not supported, PCP not supported]}")
    with pytest.raises(ValueError, match=r"No valid attention backend.*ROCM_AITER_MLA_SPARSE"):
        jattn.select_backend(config(use_sparse=True), platform="gfx942")
    with pytest.raises(NotImplementedError, match="sparse"):
        jattn.select_backend(config(use_sparse=True), platform="cpu")


def test_a_backend_lost_to_the_block_size_alone_is_named():
    selector._cached_get_attn_backend.cache_clear()
    with pytest.warns(UserWarning, match="ROCM_ATTN comes before JATTN here, but does not take block_size=8"):
        jattn.select_backend(config(block_size=8), platform="gfx90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jattn.select_backend(config(block_size=8, head_size=16), platform="gfx90a")


KINDS = [
    (TARGET, "full_attention"),
    (config(has_sink=True), "full_attention"),
    (config(has_sliding_window=True), "sliding_window"),
    (MLA, "mla_attention"),
    (config(use_mla=True, has_sliding_window=True), "sliding_window_mla"),
    (config(attn_type="encoder_only"), "encoder_only_attention"),
    (config(attn_type="encoder_decoder"), "cross_attention"),
    (config(attn_type="encoder"), "full_attention"),
]


@pytest.mark.parametrize(("asked", "kind"), KINDS)
def test_kinds(asked, kind):
    assert selector.get_attn_spec_kind(asked) == kind


def test_a_backend_for_each_kind():
    per_kind = {"sliding_window": "JATTN"}
    choose = selector.get_attn_backend
    assert choose(config(has_sliding_window=True), "gfx942", "ROCM_ATTN", per_kind).get_name() == "JATTN"
    assert choose(TARGET, "gfx942", "ROCM_ATTN", per_kind).get_name() == "ROCM_ATTN"
    with pytest.raises(ValueError, match="backend_per_kind: got 'windowed', expected one of full_attention"):
        choose(TARGET, "gfx942", None, {"windowed": "JATTN"})


def test_the_registry():
    assert AttentionBackendEnum["ROCM_ATTN"].get_path() == "backends.rocm_attn.RocmAttentionBackend"
    assert engines.backend("FLASHINFER").__name__ == "FlashInferBackend"
    assert engines.backend("ROCM_AITER_FA").__name__ == "AiterFlashAttentionBackend"
    assert not AttentionBackendEnum["TRITON_ATTN"].is_provided()
    with pytest.raises(ValueError, match="one of CUSTOM, MAMBA1"):
        MambaAttentionBackendEnum["MAMBA3"]
    assert len(AttentionBackendEnum) == len({m.value for m in AttentionBackendEnum}), "no aliases"


def test_custom_backends():
    with pytest.raises(ValueError, match="CUSTOM has no class: register one first"):
        jattn.select_backend(TARGET, platform="sm90", requested="CUSTOM")
    assert AttentionBackendEnum.CUSTOM.name not in [row.backend for row in jattn.explain(TARGET, platform="cpu").rows]
    try:

        @register_backend(AttentionBackendEnum.CUSTOM)
        class Mine(AttentionBackend):
            pass

        assert AttentionBackendEnum.CUSTOM.is_overridden()
        assert jattn.select_backend(TARGET, platform="sm90", requested="CUSTOM") is Mine
        assert jattn.explain(TARGET, platform="cpu").rows[-1].backend == "CUSTOM"
        register_backend(AttentionBackendEnum.FLASH_ATTN, "backends.jattn_backend.JattnBackend")
        assert jattn.select_backend(TARGET, platform="sm90") is engines.backend("JATTN")
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        AttentionBackendEnum.FLASH_ATTN.clear_override()
    with pytest.raises(ValueError, match="CUSTOM has no class"):
        jattn.select_backend(TARGET, platform="sm90", requested="CUSTOM")
    with pytest.raises(ValueError, match="expected a member of MambaAttentionBackendEnum"):
        register_backend(AttentionBackendEnum.CUSTOM, "a.B", is_mamba=True)
    assert not registry._overrides


def test_explain_is_data():
    explanation = jattn.explain(config(head_size=80, use_non_causal=True), platform="gfx942")
    rows = {row.backend: row for row in explanation.rows}
    assert [row.backend for row in explanation.rows][:3] == ["ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN"]
    assert rows["ROCM_ATTN"].verdict == "chosen"
    assert rows["JATTN"].verdict == "valid"
    assert rows["ROCM_AITER_UNIFIED_ATTN"].reasons == ("non-causal attention not supported",)
    assert rows["TRITON_ATTN"].reasons == ("not provided by jattn",)
    assert rows["FLASHINFER"].reasons == ("head_size 80 not supported", "compute capability gfx942 not supported")
    assert explanation == jattn.explain(config(head_size=80, use_non_causal=True), platform="gfx942")
    by_name = jattn.explain(DRAFTER, platform="gfx942", requested="ROCM_AITER_UNIFIED_ATTN")
    assert by_name.chosen is None
    assert {row.backend: row.verdict for row in by_name.rows}["ROCM_ATTN"] == "by name"


def test_explain_prints_a_table():
    asked = config(use_non_causal=True, kv_cache_dtype="fp8", has_sink=True, use_mm_prefix=True, use_kv_connector=True)
    lines = str(jattn.explain(asked, platform="sm90")).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "attention backends on cuda 9.0"
    assert "kv_cache_dtype=fp8" in lines[1]
    at = next(i for i, line in enumerate(lines) if line.startswith("FLASHINFER "))
    assert lines[at].split() == ["FLASHINFER", "refused", "partial", "multimodal-token", "full", "attention", "not"]
    assert lines[at + 1].split() == ["supported"]
    assert lines[at + 2].split() == ["attention", "sinks", "not", "supported"]
    assert any(line.split() == ["JATTN", "chosen"] for line in lines)


def test_the_command(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--platform", "sm89", "--non-causal", "--kv-cache-dtype", "fp8"])) == 0
    assert capsys.readouterr().out.splitlines()[0] == "attention backends on cuda 8.9"
    assert run(parser.parse_args(["--backend", "ROCM_AITER_UNIFIED_ATTN", "--non-causal", "--platform", "gfx942"])) == 1
    assert "non-causal attention not supported" in capsys.readouterr().out
    assert run(parser.parse_args(["--mla"])) == 1
    assert run(parser.parse_args(["--sparse"])) == 1
    assert "sparse attention not supported" in capsys.readouterr().out
    flags = {f.name for f in dataclasses.fields(AttentionConfig) if f.type == "bool"}
    assert flags <= set(vars(parser.parse_args([]))), "every question can be asked"
    assert max(map(len, parser.format_help().splitlines())) <= 100
    assert explain_function is jattn.explain
