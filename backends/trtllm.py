"""When the engine's FLASHINFER backend hands a phase to TRTLLM or XQA kernels, as a pure function."""

from __future__ import annotations

from typing import NamedTuple

from backends.platforms import Cuda
from pallas_kernels.request import expect

AUTO_DECODE_TOKENS = 256


class TrtllmSwitches(NamedTuple):
    """Which phases of a batch TRTLLM kernels answer; all of them off without causality."""

    prefill: bool = False
    decode: bool = False
    all: bool = False


def use_trtllm_attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    num_tokens: int,
    kv_cache_dtype: str,
    query_dtype: str,
    is_prefill: bool,
    platform: Cuda | None,
    force: bool | None = None,
    has_sinks: bool = False,
    has_spec: bool = False,
    dcp_world_size: int = 1,
) -> bool:
    """Whether a phase goes to TRTLLM kernels.

    Args:
      num_heads: query heads.
      num_kv_heads: KV heads.
      num_tokens: query tokens of the phase.
      kv_cache_dtype: of the cache.
      query_dtype: of the queries as the kernel gets them.
      is_prefill: which phase.
      platform: None has no such kernels.
      force: the user's wish; None leaves it to the batch.
      has_sinks: attention sinks.
      has_spec: the decodes carry drafted tokens.
      dcp_world_size: ranks of decode context parallelism.
    """
    expect(num_kv_heads > 0, "num_kv_heads", num_kv_heads, "a positive number")
    available = platform is not None and (platform.trtllm_prefill if is_prefill else platform.trtllm_decode)
    if force is False or dcp_world_size > 1 or not available or num_heads % num_kv_heads:
        return False
    assert platform is not None
    if (has_spec and not is_prefill) or query_dtype.startswith("float8") or has_sinks or force:
        return True
    if is_prefill:
        return kv_cache_dtype == "auto"
    if kv_cache_dtype.startswith("fp8") and platform.compute_capability.major in (9, 12):
        return True
    return num_tokens <= AUTO_DECODE_TOKENS and kv_cache_dtype == "auto"


def query_dtypes(
    kv_cache_dtype: str, dtype: str, platform: Cuda | None, disable_q_quantization: bool = False
) -> tuple[str, str]:
    """The types (prefill, decode) that the engine gives its queries; fixed when the builder is made.

    Args:
      kv_cache_dtype: of the cache.
      dtype: the model's.
      platform: None has no 8-bit queries.
      disable_q_quantization: keep the model's type.
    """
    major = 0 if platform is None else platform.compute_capability.major
    if disable_q_quantization or kv_cache_dtype in ("auto", "float16", "bfloat16"):
        return dtype, dtype
    if kv_cache_dtype.startswith("nvfp4"):
        return "float8_e4m3fn", "float8_e4m3fn"
    fp8 = "float8_e5m2" if kv_cache_dtype == "fp8_e5m2" else "float8_e4m3fn"
    return (fp8 if major in (9, 10) else dtype), (fp8 if major == 10 else dtype)
