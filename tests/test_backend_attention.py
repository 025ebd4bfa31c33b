"""Each backend's `forward` on the kernels against the float64 oracle, with NaN wherever no query may look."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from backends.platforms import Cuda
from tests import engines
from tests.engines import CONTEXTS, NAMES, NON_CAUSAL, QUERIES, READS_BACK, fp8_case, fp8_oracle, run


@pytest.fixture(scope="module")
def prefix_case():
    """All query lengths on all contexts in one batch: single tokens, then extends, then prefills."""
    lengths = [1, 2, 16, 17, 63, 64, 65, 99, 128, 129, 300]
    pairs = list(itertools.product(lengths, [0, 1, 15, 16, 17, 1000]))
    pairs.sort(key=lambda pair: (pair[0] > 1, pair[0] > 1 and pair[1] == 0))
    queries, contexts = zip(*pairs, strict=True)
    case = engines.draw(0, queries, contexts, num_heads=2, num_kv_heads=1, causal=False)
    return case, engines.expected(case)[0]


@pytest.mark.parametrize("name", NON_CAUSAL)
def test_non_causal_prefix_attention(name, prefix_case):
    case, want = prefix_case
    engines.close(run(name, case, causal=False, attend=jax.jit), want)


@pytest.fixture(scope="module")
def mixed_case():
    return engines.draw(1, QUERIES, CONTEXTS)


@pytest.mark.parametrize("name", NAMES)
def test_causal(name, mixed_case):
    engines.close(run(name, mixed_case, attend=jax.jit), engines.expected(mixed_case)[0])


@pytest.mark.parametrize("name", NON_CAUSAL)
def test_fp8_non_causal(name):
    """The DFlash drafter on an RTX 4090: FLASHINFER with 8-bit KV and no causality, and the others."""
    case, layer = fp8_case(causal=False)
    dense = READS_BACK[name]
    want = fp8_oracle(case, layer, ml_dtypes.float8_e5m2, 10**9 if dense is None else dense)
    builder = engines.make_builder(name, case, Cuda((8, 9)) if name == "FLASHINFER" else None)
    got = run(
        name,
        case,
        causal=False,
        attend=jax.jit,
        layer=layer,
        builder=builder,
        dtype=jnp.float8_e5m2,
        kv_cache_dtype="fp8_e5m2",
    )
    engines.close(got, want)


@pytest.mark.parametrize("name", ["ROCM_ATTN", "FLASHINFER"])
def test_bfloat16_non_causal(name):
    """The type that drafters run in; the tolerance is that of the engine's own tests."""
    case = engines.draw(3, QUERIES, CONTEXTS, dtype="bfloat16", causal=False)
    out = run(name, case, causal=False, attend=jax.jit)
    assert out.dtype == jnp.bfloat16
    engines.close(out, engines.expected(case)[0], atol=1e-2)
