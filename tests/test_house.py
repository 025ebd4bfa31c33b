"""The rules of the house that can be read off the source: imports go down, no cycles, no environment, short files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"pallas_kernels": 1, "backends": 2, "jattn": 3}
MAX_LINES = 500


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a file; a package goes by its own name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files(root: Path, folders=FLOORS) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def imports_of(path: Path, root: Path, modules: set[str], *, deferred: bool) -> set[str]:
    """Modules of `modules` that a file imports: at import time alone, or also `deferred` inside functions."""
    name = module_name(path, root)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not deferred:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not deferred:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            found.update(submodules & modules or {base})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def upward_imports(root: Path) -> list[str]:
    """Imports, deferred ones too, from a floor to one above it."""
    files = source_files(root)
    modules = {module_name(path, root) for path in files}
    found = []
    for path in files:
        floor = FLOORS[module_name(path, root).split(".")[0]]
        for target in imports_of(path, root, modules, deferred=True):
            if FLOORS.get(target.split(".")[0], 0) > floor:
                found.append(f"{module_name(path, root)} -> {target}")
    return found


def import_cycle(root: Path) -> list[str]:
    """The modules of one import cycle, or none."""
    files = source_files(root)
    modules = {module_name(path, root) for path in files}
    graph = {module_name(path, root): imports_of(path, root, modules, deferred=False) & modules for path in files}
    done, trail = set(), []

    def visit(name):
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        trail.append(name)
        for target in sorted(graph[name]):
            if cycle := visit(target):
                return cycle
        done.add(trail.pop())
        return []

    for name in sorted(graph):
        if cycle := visit(name):
            return cycle
    return []


def sideways_imports(root: Path) -> list[str]:
    """Imports from one kernel family to another."""
    files = sorted((root / "pallas_kernels").glob("paged_*.py"))
    modules = {module_name(path, root) for path in files}
    return [
        f"{module_name(path, root)} -> {target}"
        for path in files
        for target in imports_of(path, root, modules, deferred=True) & modules - {module_name(path, root)}
    ]


def environment_reads(root: Path) -> list[str]:
    """Lines of the packages that look at the process environment."""
    found = []
    for path in source_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            read = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            name = isinstance(node, ast.ImportFrom) and node.module == "os"
            if read or (name and {alias.name for alias in node.names} & {"environ", "environb", "getenv"}):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def long_files(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {lines} lines"
        for path in source_files(root, (*FLOORS, "tests", "bench"))
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    ]


RULES = [upward_imports, import_cycle, sideways_imports, environment_reads, long_files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    assert rule(ROOT) == []


BROKEN = {
    upward_imports: {"pallas_kernels/a.py": "def f():\n    from backends import b\n", "backends/b.py": ""},
    import_cycle: {
        "jattn/a.py": "from jattn import b\n",
        "jattn/b.py": "from .c import x\n",
        "jattn/c.py": "import jattn.a\n",
    },
    sideways_imports: {
        "pallas_kernels/paged_a.py": "from pallas_kernels.paged_b import x\n",
        "pallas_kernels/paged_b.py": "",
    },
    environment_reads: {"backends/a.py": "import os\nx = os.environ.get('X')\n"},
    long_files: {"tests/a.py": "\n" * (MAX_LINES + 1)},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_seen(rule, tmp_path):
    for name, text in BROKEN[rule].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert rule(tmp_path) != []
