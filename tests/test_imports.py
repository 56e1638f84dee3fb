# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The import arrows of the house: stages share records, not each other."""

import ast
import re
from pathlib import Path

import pytest

import earl_jax

PACKAGE = Path(earl_jax.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parent

# Folders and top-level modules, lowest level first: each imports from lower levels only.
LEVELS = (
    ("settings", "trajectory", "http"),
    ("sharding", "envs", "telemetry"),
    ("launch", "models"),
    ("algorithms", "engine", "dispatch", "selector"),
    ("train", "rollout"),
    ("serving", "config"),
    ("placement",),
    ("run",),
    ("loop",),
    ("loop_async",),
    ("training", "preflight", "profiling"),
    ("main", "evaluate", "serve", "plan", "bench", "view"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# Stages share records, not each other; but serving is a client of the rollouts' scheduler.
COMMANDS = ("main", "evaluate", "serve", "plan", "bench", "view")
# Beside launch/: orbax is told which process reads, and a program runs where it has a device.
OF_PROCESSES = {"train/checkpoint.py", "sharding/exchange.py"}
STAGES = {"dispatch", "rollout", "serving", "train"}
CLIENTS = {("serving", "rollout")}
JETSTREAM_GATE = "earl_jax/serving/_jetstream.py"
ARRAY_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}


def imported_names(source: str, path: str, *, for_types: bool = True) -> set[str]:
    """Full dotted names of all that is imported, inside functions too; `from a import b` is a.b.

    Those for type checkers alone are left out unless `for_types`.
    """
    package = path.removesuffix(".py").split("/")[:-1]
    names, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*here, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def offences(source: str, path: str) -> list[str]:
    """Returns the forbidden imports of this module, at `path` from the repository's root."""
    names = imported_names(source, path)
    parts = [part.removesuffix(".py") for part in path.split("/")[1:]]
    part = parts[0]
    found = []
    for name in sorted(names):
        words = name.split(".")
        is_private = words[:2] == ["jax", "_src"]
        if words[0] in ("torch", "tensorflow") or is_private:
            found.append(f"{path} imports {name}")
        if words[0] == "jetstream" and path != JETSTREAM_GATE:
            found.append(f"{path} imports {name}; only {JETSTREAM_GATE} may")
        if part == "envs" and words[0] in ARRAY_LIBRARIES:
            found.append(f"{path} imports {name}; environments run without JAX")
        if words[0] == "earl_jax" and len(words) > 1 and part != words[1]:
            if {part, words[1]} <= STAGES and (part, words[1]) not in CLIENTS:
                found.append(f"{path} imports {name}; stages share records, not each other")
            elif LEVEL.get(words[1], 99) >= LEVEL.get(part, 99):
                found.append(f"{path} imports {name}, which is not on a lower level")
            elif part == "envs" and words[1] not in ("settings", "http"):
                found.append(f"{path} imports {name}; environments need settings and http alone")
    return found


def test_arrows():
    found = []
    for module in MODULES:
        found += offences(module.read_text(), str(module.relative_to(PACKAGE.parent)))
    assert found == []


def test_every_folder_and_module_has_a_level():
    names = {module.relative_to(PACKAGE).parts[0].removesuffix(".py") for module in MODULES}
    assert names - {"__init__"} == LEVEL.keys()
    modules = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 10


def test_commands_are_flags_and_an_exit_status():
    lines = {name: len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in COMMANDS}
    assert max(lines.values()) <= 85, lines


def test_launch_alone_knows_of_several_processes():
    """The others ask a `Cluster`."""
    words = re.compile(r"jax\.process_(index|count)|jax\.distributed\.|multihost_utils")
    found = {
        module.relative_to(PACKAGE).as_posix()
        for module in MODULES
        if words.search(module.read_text()) and module.relative_to(PACKAGE).parts[0] != "launch"
    }
    assert found == OF_PROCESSES


def test_no_circle_of_imports():
    graph = {}
    for module in MODULES:
        path = "earl_jax/" + str(module.relative_to(PACKAGE))
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        graph[name] = imported_names(module.read_text(), path, for_types=False)
    done: set[str] = set()

    def visit(name: str, stack: tuple[str, ...]) -> None:
        assert name not in stack, f"a circle: {' -> '.join((*stack[stack.index(name) :], name))}"
        if name in done:
            return
        for other in graph[name]:
            target = other if other in graph else other.rpartition(".")[0]
            if target in graph and target != name:
                visit(target, (*stack, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_no_test_file_imports_another():
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        # Few may import one, and are parsed: in another's text is code for a process, say.
        if re.search(r"^\s*(from|import)\s(.*\b|[^\n]*\([^)]*\b)test_", source, re.MULTILINE):
            names = imported_names(source, f"tests/{path.relative_to(TESTS)}")
            modules = [name.removeprefix("tests.") for name in names]
            assert not [name for name in modules if name.startswith("test_")], path


def test_the_jetstream_gate_is_used():
    gate = (PACKAGE.parent / JETSTREAM_GATE).read_text()
    assert any(name.startswith("jetstream.") for name in imported_names(gate, JETSTREAM_GATE))


@pytest.mark.parametrize(
    "path, source, expected",
    [
        (
            "earl_jax/trajectory.py",
            "from earl_jax.dispatch.weights import publish",
            "earl_jax.dispatch.weights",
        ),
        ("earl_jax/sharding/layout.py", "from ..train import step", "earl_jax.train.step"),
        ("earl_jax/train/step.py", "from earl_jax import rollout", "earl_jax.rollout"),
        ("earl_jax/rollout/service.py", "from ..serving import driver", "earl_jax.serving.driver"),
        ("earl_jax/envs/text/chat.py", "def f():\n    import jax.numpy as jnp", "jax.numpy"),
        (
            "earl_jax/envs/registry.py",
            "from earl_jax.trajectory import Turn",
            "earl_jax.trajectory",
        ),
        ("earl_jax/engine/engine.py", "from jetstream.engine import engine_api", "jetstream"),
        ("earl_jax/loop.py", "import importlib\nimportlib.import_module('jetstream')", "jetstream"),
        ("earl_jax/run/build.py", "from jax import _src", "jax._src"),
        ("earl_jax/models/hf.py", "if True:\n    import torch.nn", "torch.nn"),
        ("earl_jax/main.py", "import tensorflow as tf", "tensorflow"),
    ],
)
def test_the_checker_catches(path, source, expected):
    assert len(offences(source, path)) == 1
    assert expected in offences(source, path)[0]


@pytest.mark.parametrize(
    "path, source",
    [
        ("earl_jax/loop.py", "from earl_jax.train.step import TrainState\nimport jax"),
        ("earl_jax/train/step.py", "from . import optimizer\nfrom ..models import decoder"),
        ("earl_jax/serving/_jetstream.py", "from jetstream.core.proto import jetstream_pb2"),
        ("earl_jax/serving/driver.py", "from earl_jax.rollout.service import RolloutService"),
        ("earl_jax/envs/games/openspiel.py", "import pyspiel\nnote = 'import jax'"),
    ],
)
def test_the_checker_lets_pass(path, source):
    assert offences(source, path) == []
