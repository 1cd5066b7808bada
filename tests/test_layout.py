"""The modules import one another in one direction, and private torch names stay in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports from the lines above its own. A package is one entry.
LAYERS = (
    ("imports",),
    ("_torch", "ranks", "source", "units", "plugins", "lobby"),
    ("errors",),
    ("groups", "reductions"),
    ("transport",),
    ("table",),
    ("eager", "graph", "costs"),
    ("functions", "tracing", "scheduling", "simulation"),
    (
        "compat",
        "dist",
        "local",
        "symm_mem",
        "checking",
        "proving",
        "profiling",
        "report",
        "training",
    ),
    ("sharded",),
    ("__init__", "cli"),  # cli: and __main__, which is `python -m fcoll`
)
LAYER = {name: i for i, layer in enumerate(LAYERS) for name in layer}

PACKAGES = [name for name in ("fcoll", "inductor_ext") if (ROOT / name).is_dir()]
PRIVATE = re.compile(
    r"torch\.(_C|_inductor|_dynamo|_functorch|_guards|_subclasses|_higher_order_ops|_export)\b"
    r"|torch\.distributed\.(_\w+|distributed_c10d\b)"
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def entry(path: Path) -> str:
    """The module or package of fcoll that a file is or is in."""
    name = path.relative_to(ROOT / "fcoll").parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """The full names that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        module = ".".join(filter(None, [base, node.module]))
        yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def entries_imported(path: Path) -> set[str]:
    """The modules and packages of fcoll that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(path)):
        for name in imported(node, package_of(path)):
            first, *rest = name.split(".")
            if first == "fcoll":
                found.add(rest[0] if rest and rest[0] in existing() else "__init__")
    return found


@cache
def existing() -> set[str]:
    return {entry(path) for path in files("fcoll")}


@pytest.mark.parametrize("path", files("fcoll"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    name = entry(path)
    assert name in LAYER, f"put {name} into LAYERS, below all that it imports"
    for other in entries_imported(path) - {name}:
        assert LAYER[other] < LAYER[name], f"{name} must not import {other}"


def test_there_are_few_layers_and_few_files_at_the_top():
    assert len(LAYERS) <= 11
    assert len(list((ROOT / "fcoll").glob("*.py"))) <= 14
    assert set(LAYER) == existing(), "LAYERS and the folders differ"


def test_the_readme_lists_what_is_imported_first():
    block = (ROOT / "README.md").read_text().split("```\nfcoll/\n")[1].split("inductor_ext/")[0]
    named = [re.match(r"  ([\w/]+(?: \w+)*?)/?  ", line) for line in block.splitlines()]
    listed = [name for found in named if found for name in re.findall(r"\w+", found[1])]
    places = [LAYER[name] for name in listed]
    assert set(listed) == existing() - {"__init__"} and places == sorted(places)


@pytest.mark.parametrize("path", files("fcoll"), ids=lambda p: str(p.relative_to(ROOT)))
def test_fcoll_does_not_import_inductor_ext(path):
    """Not even in a function; what it does for fcoll is named in plugins.py."""
    for node in ast.walk(tree(path)):
        for name in imported(node, package_of(path)):
            assert name.split(".")[0] != "inductor_ext", name
        if path.name != "plugins.py":
            assert not any(re.match(r"inductor_ext[.:]", text) for text in texts_passed(node))


def test_cpp_imports_no_python():
    """What it asks Python for is handed to it: see fcoll/eager/dispatch.py."""
    for path in (ROOT / "fcoll").rglob("*.cpp"):
        assert "PyImport_" not in path.read_text(), path


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) of all that a file imports from torch, or names as attributes of it."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            full = list(imported(node, package_of(path)))
            yield from ((node.lineno, name) for name in full)
            for alias, name in zip(node.names, full, strict=True):
                if alias.asname or isinstance(node, ast.ImportFrom):
                    aliases[alias.asname or alias.name] = name
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node)):
            first, _, rest = dotted.partition(".")
            yield node.lineno, f"{aliases.get(first, first)}.{rest}"
        for text in texts_passed(node):  # as in sys.modules["torch._guards"]
            if re.fullmatch(r"torch(\.\w+)+", text):
                yield node.lineno, text


def texts_passed(node: ast.AST) -> list[str]:
    """The strings that are arguments of a call, or keys."""
    passed = node.args if isinstance(node, ast.Call) else []
    if isinstance(node, ast.Subscript):
        passed = [node.slice]
    return [str(x.value) for x in passed if isinstance(x, ast.Constant)]


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_private_torch_names_are_in_one_file(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(package)
        if path.name != "_torch.py"
        for line, name in names_in(path)
        if PRIVATE.match(name)
    ]
    assert not found, "move into _torch.py:\n" + "\n".join(found)


def test_a_class_name_has_one_meaning():
    classes: dict[str, list[Path]] = {}
    for path in (path for package in PACKAGES for path in files(package)):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in classes.items() if len(paths) > 1}
