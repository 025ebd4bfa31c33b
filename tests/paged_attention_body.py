"""The test body that every implementation of paged attention subclasses."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import pytest

import jattn
from tests import batches, oracle
from tests.cases import CASES, Case, build

# float32: of the largest difference, in units of max(1, RMS of V); the others: of the norm of the whole.
TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-3, "float16": 1e-3}
LSE_TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-3, "float16": 1e-3}  # in units of max(1, |LSE|)


class PagedAttentionTests:
    """Compares `jattn.paged_attention` with the oracle on the table of cases; subclass it as `Test...`."""

    implementation: str
    refuses: Mapping[str, str] = {}  # case name -> part of the reason that the refusal has to give

    def adapt(self, case: Case) -> Case:
        """The case in a size that this implementation can run; as it is by default."""
        return case

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_the_oracle_and_never_looks_at_unseen_memory(self, case):
        case = self.adapt(case)
        clean = build(case)
        arrays, static = batches.split(clean)
        call = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **static, implementation=self.implementation))
        if case.name in self.refuses:
            with pytest.raises(NotImplementedError, match=self.refuses[case.name]):
                call(arrays)
            return
        result = call(arrays)
        check_against_oracle(case, clean, result)
        dirty, _ = batches.split(batches.poison(np.random.default_rng(0), clean))
        for got, poisoned in zip(jax.tree.leaves(result), jax.tree.leaves(call(dirty)), strict=True):
            assert_same_bits(poisoned, got)


def check_against_oracle(case: Case, batch: dict, result) -> None:
    """Compare a call's result, whose shape hangs on `return_lse`, with the oracle."""
    want, want_lse = oracle.attention(**batch)
    out, lse = result if case.return_lse else (result, None)
    assert out.dtype == batch["q"].dtype
    got = np.asarray(out).astype(np.float64)
    assert got.shape == want.shape
    assert_close(got, want, case.dtype)
    nothing = ~np.isfinite(want_lse) | ~np.abs(want).any(-1)
    np.testing.assert_array_equal(got[nothing], 0.0)
    if lse is not None:
        assert lse.dtype == np.float32
        assert_lse_close(np.asarray(lse), want_lse, case.dtype)


def assert_close(got, want, dtype):
    """Compare outputs within the house's tolerance for q's dtype."""
    assert np.isfinite(got).all()
    if dtype == "float32":
        assert np.abs(got - want).max(initial=0.0) <= TOLERANCE[dtype]
    else:
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)


def assert_lse_close(got, want, dtype):
    """Compare LSE: -inf in the same places, the rest within tolerance."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    alive = np.isfinite(want)
    error = np.abs(got[alive] - want[alive]) / np.maximum(1, np.abs(want[alive]))
    assert error.max(initial=0.0) <= LSE_TOLERANCE[dtype]


def assert_same_bits(got, want):
    """Bitwise equality; the text says in how many elements they differ."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    bits = np.dtype(f"u{got.dtype.itemsize}")
    different = got.view(bits) != want.view(bits)
    assert not different.any(), f"{different.sum()} of {different.size} differ, first at {np.argwhere(different)[0]}"
