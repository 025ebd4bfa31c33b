"""Every capability of every backend against a table written down by hand from the engine's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from backends.contract import AttentionConfig
from backends.platforms import parse_platform
from tests import engines

TABLE = json.loads((Path(__file__).parent / "data" / "backend_grid.json").read_text())
AXES, BACKENDS = TABLE["axes"], TABLE["backends"]
PLAIN = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "head_size": 128,
    "block_size": 16,
    "attn_type": "decoder",
    "use_non_causal": False,
    "has_sink": False,
    "has_sliding_window": False,
    "use_mm_prefix": False,
}
RANDOM_CELLS = 2000
# In the order of the contract; "{}" stands for the cell's value.
REASONS = {
    "head_size": "head_size {} not supported",
    "dtype": "dtype {} not supported",
    "kv_cache_dtype": "kv_cache_dtype {} not supported",
    "block_size": "block_size {} not supported",
    "use_mm_prefix": "partial multimodal-token full attention not supported",
    "has_sink": "attention sinks not supported",
    "platform": "compute capability {} not supported",
    "attn_type": "attention type {} not supported",
    "has_sliding_window": "sliding window not supported",
    "use_non_causal": "non-causal attention not supported",
}


def allowed(backend, axis, cell):
    row, value = BACKENDS[backend], cell[axis]
    if row[axis] == "all" or value in row[axis]:
        return True
    if axis == "has_sink":
        return cell["platform"] in row.get("has_sink_where", ())
    if axis == "kv_cache_dtype":
        return cell["platform"] in row.get("kv_cache_dtype_where", {}).get(value, ())
    return False


def expected(backend, cell):
    reasons = []
    for axis, text in REASONS.items():
        if not allowed(backend, axis, cell):
            value = cell[axis]
            if axis == "platform" and value.startswith("sm"):
                value = f"{value[2:-1]}.{value[-1]}"
            reasons.append(text.format(value))
    return reasons


def cells():
    """Every pair of axis values on two plain configurations' remaining axes, and random cells."""
    for one, two in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[one], AXES[two]):
            for platform in ("sm90", "sm100", "gfx942"):
                yield PLAIN | {"platform": platform} | {one: a, two: b}
    rng = np.random.default_rng(0)
    for _ in range(RANDOM_CELLS):
        yield {axis: values[rng.integers(len(values))] for axis, values in AXES.items()}


def test_the_grid_has_several_thousand_cells():
    assert len(list(cells())) * len(BACKENDS) > 10_000
    assert set(REASONS) == set(AXES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grid(backend):
    cls, wrong, verdicts = engines.backend(backend), [], set()
    for cell in cells():
        config = AttentionConfig(**{axis: value for axis, value in cell.items() if axis != "platform"})
        got, want = cls.validate_configuration(config, parse_platform(cell["platform"])), expected(backend, cell)
        verdicts.add(not want)
        if got != want:
            wrong.append((cell, got, want))
    assert not wrong, f"{len(wrong)} cells differ, the first: {wrong[0]}"
    assert verdicts == {True, False}
