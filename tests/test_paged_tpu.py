"""The TPU kernel without a TPU: interpreted with race detection and poisoned memory, lowered, and its plan counted.

The usual run takes a subset of the table; `python -m pytest tests/test_paged_tpu.py --whole-table` takes all of it.
"""

from __future__ import annotations

from types import MappingProxyType

import pytest

from tests import tpu_interpreter
from tests.cases import CASES
from tests.paged_attention_body import PagedAttentionTests

CHIP_KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "7x": "TPU7x"}


@pytest.fixture(autouse=True)
def _simulated_without_races(monkeypatch):
    detectors = tpu_interpreter.simulate(monkeypatch)
    yield
    assert not any(detector.races_found for detector in detectors)


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
            "page_size_256",
            "head_dim_80",
            "heads_14_over_2",
            "fp8_fnuz",
            "first_sequences_padding",
        }
    )
