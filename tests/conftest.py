"""Options of the test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--whole-table",
        action="store_true",
        help="run every case of the table where an implementation's class names a `subset` for the usual run",
    )


def pytest_collection_modifyitems(config, items):
    """Deselect the cases outside of their class's `subset`."""
    if config.getoption("--whole-table"):
        return
    kept, left = [], []
    for item in items:
        subset = getattr(item.cls, "subset", None)
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        (left if subset and case is not None and case.name not in subset else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
