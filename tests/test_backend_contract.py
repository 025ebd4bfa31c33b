"""The contract: the order of reasons, defaults, the table's rows that are no axes of the grid, bad configurations."""

from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from backends import contract, jattn_backend
from backends.contract import AttentionBackend, AttentionCGSupport, AttentionConfig, AttentionType, MultipleOf
from backends.platforms import Cpu, Cuda, Rocm, Tpu, parse_platform, platform_of
from tests import engines
from tests.engines import NAMES


class Small(AttentionBackend):
    """The example of the specification."""

    @staticmethod
    def get_impl_cls():
        return object

    @classmethod
    def get_supported_head_sizes(cls):
        return 64, 128

    @classmethod
    def get_supported_kernel_block_sizes(cls, platform=None):
        return (16,)

    @classmethod
    def supports_compute_capability(cls, capability, platform=None):
        return capability >= (8, 0)


def test_six_reasons_in_their_order():
    config = AttentionConfig(
        80, "float32", block_size=8, has_sink=True, attn_type=AttentionType.ENCODER, use_non_causal=True
    )
    assert Small.validate_configuration(config, Cuda()) == [
        "head_size 80 not supported",
        "dtype float32 not supported",
        "block_size 8 not supported",
        "attention sinks not supported",
        "attention type encoder not supported",
        "non-causal attention not supported",
    ]


def test_every_reason_in_its_order():
    class Worst(Small):
        @classmethod
        def supports_kv_connector(cls):
            return False

        @classmethod
        def is_ssm(cls):
            return True

        @classmethod
        def supports_combination(cls, config, platform=None):
            return "a reason of its own"

    config = AttentionConfig(
        head_size=80,
        dtype=jnp.float32,
        kv_cache_dtype="fp8",
        block_size=8,
        use_mla=True,
        has_sink=True,
        use_sparse=True,
        use_mm_prefix=True,
        use_per_head_quant_scales=True,
        attn_type="encoder_decoder",
        has_sliding_window=True,
        use_non_causal=True,
        use_batch_invariant=True,
        use_kv_connector=True,
        use_pcp=True,
        use_adaptive_verification=True,
        use_per_request_causal=True,
    )
    assert Worst.validate_configuration(config, Cuda((7, 5))) == [
        "head_size 80 not supported",
        "dtype float32 not supported",
        "kv_cache_dtype fp8 not supported",
        "block_size 8 not supported",
        "partial multimodal-token full attention not supported",
        "MLA not supported",
        "attention sinks not supported",
        "sparse attention not supported",
        "per-head quant scales not supported",
        "compute capability 7.5 not supported",
        "attention type encoder_decoder not supported",
        "sliding window not supported",
        "non-causal attention not supported",
        "batch invariance not supported",
        "KV connector not supported",
        "PCP not supported",
        "device/CPU query lens mismatch not supported, which adaptive verification needs",
        "a reason of its own",
        "per-request causal flags not supported",
    ]


def test_a_backend_for_mla_refuses_the_rest():
    class Latent(Small):
        @classmethod
        def is_mla(cls):
            return True

        @classmethod
        def is_sparse(cls):
            return True

    config = AttentionConfig(64, "float16")
    assert Latent.validate_configuration(config) == ["non-MLA not supported", "non-sparse attention not supported"]


def test_nothing_speaks_against_the_plain_case():
    assert Small.validate_configuration(AttentionConfig(64, "float16", None, 16), Cuda()) == []
    assert Small.validate_configuration(AttentionConfig(64, "float16")) == []


def test_defaults():
    assert AttentionBackend.supported_dtypes == ("float16", "bfloat16")
    assert AttentionBackend.supported_kv_cache_dtypes == ("auto", "float16", "bfloat16")
    assert AttentionBackend.forward_includes_kv_cache_update
    assert list(AttentionBackend.get_supported_kernel_block_sizes()) == [MultipleOf(1)]
    assert AttentionBackend.supports_kv_connector()
    assert AttentionBackend.supports_device_cpu_query_lens_mismatch()
    assert AttentionBackend.get_required_kv_cache_layout() is None
    assert AttentionBackend.supports_combination(AttentionConfig(64, "float16")) is None
    assert AttentionBackend.full_cls_name() == ("backends.contract", "AttentionBackend")
    assert [t.value for t in AttentionType] == ["decoder", "encoder", "encoder_only", "encoder_decoder"]
    assert [(c.name, c.value) for c in AttentionCGSupport] == [
        ("NEVER", 0),
        ("UNIFORM_SINGLE_TOKEN_DECODE", 1),
        ("UNIFORM_BATCH", 2),
        ("ALWAYS", 3),
    ]


def test_a_block_is_as_good_as_its_parts():
    """Any listed size that divides it is enough; a listed size need not be equal."""
    fa = engines.backend("ROCM_AITER_FA")
    accepted = [b for b in (None, 0, 8, 16, 24, 32, 48, 544, 784, 1056) if fa.supports_block_size(b)]
    assert accepted == [None, 0, 16, 32, 48, 544, 784, 1056]
    assert fa.supports_kv_cache_dtype(None)
    assert Small.get_preferred_block_size(24) == 16
    assert Small.get_preferred_block_size(48) == 48
    assert engines.backend("ROCM_AITER_UNIFIED_ATTN").get_preferred_block_size(16) == 64
    assert engines.backend("ROCM_ATTN").get_preferred_block_size(544) == 544


# Rows of the table that are no axes of the grid.
ROWS = {
    "ROCM_ATTN": ("ROCM_ATTN", False, False, True, False, False, False, AttentionCGSupport.ALWAYS),
    "ROCM_AITER_UNIFIED_ATTN": (
        "ROCM_AITER_UNIFIED_ATTN",
        False,
        False,
        True,
        False,
        False,
        True,
        AttentionCGSupport.ALWAYS,
    ),
    "ROCM_AITER_FA": ("FLASH_ATTN", True, False, True, False, False, False, AttentionCGSupport.UNIFORM_BATCH),
    "FLASHINFER": (
        "FLASHINFER",
        True,
        False,
        False,
        False,
        True,
        False,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    ),
    "JATTN": ("JATTN", True, True, True, True, True, False, AttentionCGSupport.NEVER),
}


@pytest.mark.parametrize("name", ROWS)
def test_other_rows(name):
    backend, case = engines.backend(name), engines.draw(0, (1,), (3,))
    got = (
        backend.get_name(),
        backend.supports_kv_connector(),
        backend.supports_batch_invariance(),
        backend.supports_device_cpu_query_lens_mismatch(),
        backend.supports_per_head_quant_scales(),
        backend.supports_dcp(),
        engines.make_impl(name, case).supports_quant_query_input,
        engines.make_builder(name, case).get_cudagraph_support(),
    )
    assert got == ROWS[name]
    assert not backend.forward_includes_kv_cache_update
    assert not (backend.is_mla() or backend.is_sparse() or backend.is_ssm() or backend.supports_pcp())
    assert not backend.supports_alibi_sqrt()
    assert backend.get_impl_cls().lse_base_on_e
    assert backend.get_builder_cls()
    assert backend.supports_per_request_causal() == (name == "JATTN")


def test_unified_is_rocm_attn_with_non_causal_turned_off_again():
    child, parent = engines.backend("ROCM_AITER_UNIFIED_ATTN"), engines.backend("ROCM_ATTN")
    assert issubclass(child, parent)
    assert (parent.supports_non_causal(), child.supports_non_causal()) == (True, False)
    assert child.get_metadata_cls() is parent.get_metadata_cls()
    assert issubclass(child.get_impl_cls(), parent.get_impl_cls())
    assert not child.supports_kv_connector()


@pytest.mark.parametrize("attn_type", list(AttentionType))
@pytest.mark.parametrize("name", NAMES)
def test_the_impl_takes_what_the_contract_says(name, attn_type):
    case, backend = engines.draw(0, (1,), (3,)), engines.backend(name)
    if backend.supports_attn_type(attn_type):
        assert engines.make_impl(name, case, attn_type=attn_type).attn_type is attn_type
    else:
        with pytest.raises(NotImplementedError, match=f"{name} does not support attn_type='{attn_type.value}'"):
            engines.make_impl(name, case, attn_type=attn_type)


def test_why_aiter_fa_takes_decoders_only():
    case = engines.draw(0, (1,), (3,))
    with pytest.raises(NotImplementedError, match=r"query_start_loc as cu_seqlens_k.*causal=True.*cross-attention"):
        engines.make_impl("ROCM_AITER_FA", case, attn_type=AttentionType.ENCODER_DECODER)


def test_flashinfer_quantises_queries_on_sm100():
    case = engines.draw(0, (1,), (3,))
    for options, want in (
        ({"kv_cache_dtype": "fp8", "platform": Cuda((10, 0))}, True),
        ({"kv_cache_dtype": "fp8", "platform": Cuda((9, 0))}, False),
        ({"platform": Cuda((10, 0))}, False),
    ):
        assert engines.make_impl("FLASHINFER", case, **options).supports_quant_query_input == want


def test_flashinfer_by_platform():
    flashinfer = engines.backend("FLASHINFER")
    assert flashinfer.get_required_kv_cache_layout(Cuda((10, 0))) == "HND"
    assert flashinfer.get_required_kv_cache_layout(Cuda((9, 0))) is None
    for platform in (
        Cuda((10, 0), use_trtllm_attention=False),
        Cuda((12, 0), use_trtllm_attention=False),
        Cuda((10, 0), trtllm_available=False),
        Cuda((9, 0)),
        None,
    ):
        assert not flashinfer.supports_sink(platform)
        assert not flashinfer.supports_kv_cache_dtype("nvfp4", platform)
    sizes = flashinfer.get_supported_kernel_block_sizes_for_config
    grouped = AttentionConfig(128, "bfloat16", num_heads=8, num_kv_heads=2)
    assert sizes(grouped, Cuda((10, 0))) == (16, 32, 64, 128, 256, 512, 1024)
    assert sizes(grouped, Cuda((9, 0))) == (16, 32, 64)
    assert sizes(AttentionConfig(128, "bfloat16", num_heads=8, num_kv_heads=8), Cuda((10, 0))) == (16, 32, 64)


def test_the_projects_own_backend_asks_the_kernels(monkeypatch):
    jattn, asked = engines.backend("JATTN"), []

    def refuse(request, platform):
        asked.append((request, platform))
        raise NotImplementedError("no kernel here")

    monkeypatch.setattr(jattn_backend.dispatch, "first_without_reasons", refuse)
    config = AttentionConfig(
        72, "float16", "fp8_e5m2", 32, has_sink=True, use_non_causal=True, num_heads=6, num_kv_heads=3
    )
    jattn_backend._why_no_kernel.cache_clear()
    for _ in range(3):
        assert jattn.validate_configuration(config, Rocm("gfx950")) == ["no kernel here"]
    jattn_backend._why_no_kernel.cache_clear()
    ((request, platform),) = asked  # once: the answer is kept
    assert platform == "rocm"
    assert (request.head_dim, request.page_size, request.num_heads, request.num_kv_heads) == (72, 32, 6, 3)
    assert (request.kv_dtype.name, request.k_scale, request.causal, request.sinks) == (
        "float8_e5m2",
        "scalar",
        False,
        True,
    )


BAD_CONFIGS = [
    ({"head_size": 0}, "head_size: got 0, expected a positive int"),
    ({"head_size": 64.0}, "head_size: got 64.0"),
    ({"dtype": "float17"}, "dtype: got 'float17'"),
    ({"dtype": None}, "dtype: got None"),
    ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype: got 'fp7', expected None or one of auto, float16"),
    ({"block_size": 0}, "block_size: got 0"),
    ({"attn_type": "both"}, "attn_type: got 'both', expected one of decoder, encoder"),
    ({"use_mla": 1}, "use_mla: got 1, expected a bool"),
    ({"num_kv_heads": 2}, "num_kv_heads: got 2 beside num_heads=None"),
    ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads: got 3 beside num_heads=8, expected a divisor"),
    (
        {"use_per_head_quant_scales": True, "kv_cache_dtype": "bfloat16"},
        "use_per_head_quant_scales: got True beside kv_cache_dtype='bfloat16'",
    ),
    ({"use_per_request_causal": True}, "use_per_request_causal: got True beside use_non_causal=False"),
    ({"use_kv_connector": True, "attn_type": "encoder_only"}, "use_kv_connector: got True beside attn_type"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**({"head_size": 64, "dtype": "bfloat16"} | fields))


def test_dtypes_go_by_any_name():
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype(jnp.bfloat16)):
        assert AttentionConfig(64, dtype) == AttentionConfig(64, "bfloat16")
        assert engines.backend("FLASHINFER").supports_dtype(dtype)


def test_platforms_by_name():
    assert parse_platform("sm90") == parse_platform("cuda:9.0") == parse_platform("cuda") == Cuda((9, 0))
    assert parse_platform("SM121") == Cuda((12, 1))
    assert parse_platform("sm100a") == Cuda((10, 0))
    assert parse_platform("rocm:gfx950") == parse_platform("gfx950") == Rocm("gfx950")
    assert parse_platform("tpu:v5e") == Tpu("v5e")
    assert parse_platform("cpu") == Cpu()
    assert str(Rocm("gfx942").capability) == "9.4"
    assert (Rocm("gfx90a").cdna, Rocm("gfx942").cdna, Rocm("gfx950").cdna, Rocm("gfx1201").cdna) == (2, 3, 4, 0)
    assert [p.fp8_dtype for p in (Rocm("gfx942"), Rocm("gfx950"), Tpu("v6e"), Tpu("7x"), Cuda())] == [
        "float8_e4m3fnuz",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ]
    for bad in ("gpu", "", None, "gfx9", "tpu:v99", "tpu:nope"):
        with pytest.raises(ValueError, match="platform: got"):
            parse_platform(bad)
    with pytest.raises(ValueError, match="arch: got 'mi300'"):
        Rocm("mi300")
    with pytest.raises(ValueError, match="generation: got 'v99'"):
        Tpu("v99")


def test_platforms_of_devices():
    class Device:
        def __init__(self, platform, capability=None):
            self.platform, self.compute_capability = platform, capability

    assert platform_of(Device("gpu", "9.0")) == Cuda((9, 0))
    assert platform_of(Device("gpu", "gfx942")) == Rocm("gfx942")
    assert platform_of(Device("cpu")) == Cpu()
    assert platform_of(Device("tpu")) == Tpu()


def test_answers_need_no_device():
    """A process that asks every backend, and selects, never starts a backend of jax."""
    program = """
import sys
import jattn
from backends.contract import AttentionConfig
for platform in ("sm90", "gfx942", "cpu", "tpu"):
    config = AttentionConfig(128, "bfloat16", "fp8", 16, use_non_causal=True)
    print(jattn.explain(config, platform=platform).chosen, jattn.select_backend(config, platform=platform).get_name())
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["FLASHINFER"] * 2 + ["ROCM_ATTN"] * 2 + ["JATTN"] * 4


def test_the_list_of_cache_dtypes_is_the_engines():
    assert len(contract.CACHE_DTYPES) == 17
