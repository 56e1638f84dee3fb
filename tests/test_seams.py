# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The seams between the parts: who catches a lack of memory, who knows of games, who has a page."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "earl_jax"
# Files that catch errors of the devices, and what they do with them.
CATCHERS = {
    "selector/memory.py": "notes on a lack of memory that it came in a move, and raises it again",
    "placement/placement.py": "the one that remembers a lack of memory",
    "placement/rollouts.py": "hands one to the other processes, and so to `Placement.attempt`",
    "placement/compile_ahead.py": "what is not compiled ahead is compiled when it is used",
    "run/live_service.py": "keeps it until the rollout can raise it",
    "serving/server.py": "names the flags of a server that does not start",
    "preflight/kernels.py": "reports a kernel that does not run",
    "sharding/topology.py": "a compiler that is not installed",
    "telemetry/timing.py": "whoever waits for the array raises it",
}
ASK = {
    *("selector/memory.py", "placement/placement.py"),
    # It raises it again, so that the files of a checkpoint do not count as damaged.
    "train/checkpoint.py",
    "serving/server.py",
}
# Files that do something else where memory is short, of which no plan has to be remembered.
GO_ON = {
    "selector/memory.py": "the function",
    "placement/stages.py": "XLA's bytes of a program that does not compile are not known",
    "placement/planner.py": "the same in exact mode",
    "train/checkpoint.py": "an array has no fingerprint, and is not checked",
    "train/saved_state.py": "a checkpoint is written from the arrays and not from a copy",
}
# Metrics of games are an environment's.
OF_GAMES = {"win", "wins", "won", "win_rate", "illegal"}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def catches(tree: ast.AST) -> bool:
    """Returns True where an error of the devices is caught."""
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    return any("JaxRuntimeError" in ast.unparse(each.type) for each in handlers if each.type)


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yields the names, arguments, attributes and strings of a module, whole."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "value"):
            if isinstance(word := getattr(node, field, None), str):
                yield word.lower()


def only_children(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Returns the classes that one other class, and no more, is made of, by "file: name".

    A Protocol is implemented, and an error is raised itself.
    """
    places, children = {}, defaultdict(list)
    for path, tree in trees.items():
        module = "earl_jax." + path.removesuffix(".py").replace("/", ".")
        names = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names |= {each.name: f"{module}.{each.name}" for each in classes}
        for each in classes:
            bases = [ast.unparse(base).split("[")[0] for base in each.bases]
            if not any(base == "Protocol" or "Error" in base for base in bases):
                places[names[each.name]] = f"{path}: {each.name}"
            for base in bases:
                children[names.get(base, base)].append(each.name)
    return {place: children[name][0] for name, place in places.items() if len(children[name]) == 1}


def test_errors_of_devices_are_caught_where_it_is_said_why(trees):
    assert {path for path, tree in trees.items() if catches(tree)} == CATCHERS.keys()
    asks = {path for path in trees if "is_out_of_memory(" in (PACKAGE / path).read_text()}
    assert asks == ASK
    goes_on = {path for path in trees if "unless_out_of_memory(" in (PACKAGE / path).read_text()}
    assert goes_on == GO_ON.keys()


def test_no_class_is_the_first_half_of_one_other(trees):
    assert only_children(trees) == {}


def test_base_with_one_child_is_found():
    first = ast.parse("class Half:\n    pass\nclass Open(Protocol):\n    pass")
    second = ast.parse("from earl_jax.a import Half, Open\nclass Whole(Half, Open):\n    pass")
    assert only_children({"a.py": first, "b.py": second}) == {"a.py: Half": "Whole"}
    third = ast.parse("from earl_jax.a import Half\nclass Other(Half):\n    pass")
    assert only_children({"a.py": first, "b.py": second, "c.py": third}) == {}


def test_metrics_of_games_are_named_by_environments_alone(trees):
    found = {path for path, tree in trees.items() if OF_GAMES & set(words_of(tree))}
    assert found and all(path.startswith("envs/") for path in found)


def test_every_benchmark_is_named_on_a_page_and_every_page_names_its_command():
    folder = ROOT / "benchmarks"
    pages = {path: path.read_text() for path in folder.glob("*.md")}
    command = re.compile(r"python -m (benchmarks|earl_jax)\.\w+")
    assert [path.name for path, text in pages.items() if not command.search(text)] == []
    text = "\n".join([*pages.values(), *(p.read_text() for p in (ROOT / "docs").rglob("*.md"))])
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    unknown = []
    for script in [*folder.glob("*.py"), *(path.parent for path in folder.glob("*/__main__.py"))]:
        name = script.stem
        imports = re.compile(rf"from benchmarks(\.{name}\b| import (.*\b)?{name}\b)")
        is_part = any(imports.search(s) for path, s in sources.items() if path != script)
        if not (is_part or re.search(rf"\bbenchmarks[./]{name}\b", text)):
            unknown.append(name)
    assert unknown == ["__init__"]
