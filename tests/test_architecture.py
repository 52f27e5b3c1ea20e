"""The modules of the two packages keep to the import order that CONTRIBUTING.md states, and stay small."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 600
PUBLIC_OR_DATA = {"_asdict", "_make", "_replace", "_exit", "_ptr"}  # of named tuples and os; an ending of arguments


def _modules() -> dict[str, Path]:
    """The dotted name and the path of every module; a package has its own name."""
    found = {}
    for source_root, package in ((ROOT, "lightning_liger"), (ROOT / "kernels", "liger_ops")):
        for path in sorted((source_root / package).rglob("*.py")):
            name = ".".join(path.relative_to(source_root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _stated_order() -> list[list[str]]:
    """The list under "Import order" in CONTRIBUTING.md, top to bottom; entries on one line are peers."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"\n## Import order\n(.*?)(?=\n## )", text, flags=re.DOTALL)
    assert section is not None
    return [re.findall(r"`([\w.]+)`", line) for line in re.findall(r"^\d+\. (.*)$", section[1], flags=re.MULTILINE)]


ORDER = _stated_order()
LEVELS = {entry: level for level, entries in enumerate(ORDER) for entry in entries}


def entry_of(module: str) -> str:
    """The longest entry of the list that the module is, or lies in; packages themselves only count as such."""
    if module in MODULES and module in LEVELS:
        return module
    entries = [entry for entry in LEVELS if module.startswith(f"{entry}.") and "." in entry]
    return max(entries, key=len, default="")


def imports_of(module: str, source: str) -> Iterator[str]:
    """The modules of this project that ``module`` imports, anywhere in its source, TYPE_CHECKING blocks included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            # ``from package import module`` imports the module, any other name the package.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        yield from (name for name in names if name in MODULES)


GRAPH = {module: set(imports_of(module, path.read_text(encoding="utf-8"))) for module, path in MODULES.items()}


def test_list_names_every_entry_once() -> None:
    listed = [entry for entries in ORDER for entry in entries]
    assert len(listed) == len(set(listed)) > 8
    assert [module for module in MODULES if not entry_of(module)] == []
    assert [entry for entry in listed if entry not in MODULES] == []


def test_imports_point_down_the_list() -> None:
    for module, imported in GRAPH.items():
        own = entry_of(module)
        wrong = [other for other in imported if entry_of(other) != own and LEVELS[entry_of(other)] <= LEVELS[own]]
        assert not wrong, f"{module} is in {own!r}, which must not import {wrong}"


def test_modules_import_each_other_in_no_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_files_are_small() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > MAX_LINES} == {}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_liger_")) and name != "_"


def _own_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module binds: functions, classes, arguments, variables, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__slots__" for each in node.targets):
            yield from (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))


def _used_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a module reads as attributes, imports, or has as strings, as ``getattr`` takes them."""
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        found: list[str] = []
        if node in parts:
            continue
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found = [node.value]
        yield from filter(_is_private, found)


def test_private_names_of_other_packages_are_in_the_table() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES.values()]
    own = {name for tree in trees for name in _own_names(tree)}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Private APIs")[2].partition("\n## ")[0]
    listed = {name for name in re.findall(r"\w+", section) if _is_private(name)}
    used = {name for tree in trees for name in _used_names(tree)} - own - PUBLIC_OR_DATA
    assert sorted(used - listed) == []


def test_no_module_needs_private_names_of_others_to_be_imported() -> None:
    """Those that are used are listed in CONTRIBUTING.md, and imported where they are used."""
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("lightning_liger", "liger_ops")):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                private = [name for name in names if any(map(_is_private, name.split(".")))]
                assert not private, f"line {node.lineno} of {module} imports {private} at module level"
