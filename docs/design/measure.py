# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a checkout: tables of simplification.md and selector.md, a column for each folder given.

    git archive 597e169 --prefix=before/ | tar -x -C /tmp
    uv run python docs/design/measure.py /tmp/before .

Lines are all lines of .py files, and in benchmarks/ and docs/ of .md files too. Import floors are
the modules on the longest chain of imports at module level, circles counted as one. The choice of
meshes is counted in the folders that it has today, so not in a checkout from before them. A word is
counted where it stands alone, in a name, or in its plural, in .py and .md files.
"""

import ast
import collections
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

WORDS = (
    "rung ladder seat lane room places parking rest ahead scene prospect contender joint hear told "
    "keeper orders said stops imitate demonstrations guest"
).split()
FOLDERS = (
    "algorithms config dispatch engine envs http launch models placement preflight profiling "
    "rollout run selector serving settings sharding telemetry train"
).split()
# Files of placement/ that pack rows, play, train and score, and serve no choice of meshes.
NO_CHOICE = "delivery held_out packing parts rollouts updates".split()
# The page that explains the words.
PAGES = ("docs/design/measure.py", "docs/design/simplification.md")
COUNT_KEYS = """
import dataclasses
from earl_jax.config.config import Config

# Free arguments of an environment, an algorithm or a template are one key.
FREE = {"args", "algorithm_args", "template_arguments"}

def count(section):
    return sum(
        count(value) if isinstance(value, dict) and name not in FREE else 1
        for name, value in section.items()
    )

config = Config()
print(count(config.as_dict()) + count(dataclasses.asdict(config.distributed)))
"""


def measure(root: Path) -> dict[str, str]:
    """Returns the figures of a checkout by name."""
    package = root / "earl_jax"
    top_level = sorted(package.glob("*.py"))
    row = {"package": _size([*package.rglob("*.py")]), "- top level": _size(top_level)}
    row |= {f"- {name}/": _size([*(package / name).rglob("*.py")]) for name in FOLDERS}
    for name in ("tests", "benchmarks", "docs"):
        found = [*(root / name).rglob("*.py")]
        found += [*(root / name).rglob("*.md")] if name != "tests" else []
        row[name] = _size(found)
    row["README, bytes"] = f"{(root / 'README.md').stat().st_size:,}"
    row |= _choice(package)
    row["import floors"] = str(floors(dict(_imports(package))))
    row["- of folders"] = str(floors(_by_folder(_imports(package))))
    row["top-level modules"] = str(len([path for path in top_level if path.name != "__init__.py"]))
    row["config keys"] = _config_keys(root)
    counts = words(root)
    row["old words"] = f"{sum(counts.values()):,}"
    return row | {f"- {word}": f"{counts[word]:,}" for word in WORDS}


def _size(files: list[Path]) -> str:
    lines = sum(len(path.read_text().splitlines()) for path in files)
    return f"{lines:,} in {len(files)}" if files else ""


def _choice(package: Path) -> dict[str, str]:
    """Returns the figures of all that serves the choice of meshes ("What it costs")."""
    files = [*(package / "selector").glob("*.py"), package / "plan.py"]
    files += [path for path in (package / "placement").glob("*.py") if path.stem not in NO_CHOICE]
    trees = [ast.parse(path.read_text()) for path in files if path.exists()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {
        "choice of meshes": _size([path for path in files if path.exists()]),
        "- code alone": f"{sum(map(_code_lines, files)):,}",
        "- classes": str(sum(isinstance(node, ast.ClassDef) for node in nodes)),
    }


def _code_lines(path: Path) -> int:
    """Returns the lines of a file without docstrings, comments, imports and blank lines."""
    if not path.exists():
        return 0
    source = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(
        number not in left_out and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def _config_keys(root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_KEYS],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root.resolve())},
    )
    return done.stdout.strip() or "?"


def words(root: Path) -> collections.Counter[str]:
    """Returns how often each of WORDS stands in code, documentation and tests."""
    counts: collections.Counter[str] = collections.Counter()
    for path in [*root.rglob("*.py"), *root.rglob("*.md")]:
        name = path.relative_to(root).as_posix()
        if name in PAGES or name.startswith((".", "runs/", "dist/")):
            continue
        for word in re.findall(r"[A-Z]?[a-z]+", path.read_text()):
            word = word.lower()
            singular = word.removesuffix("s")
            counts[word if word in WORDS else singular if singular in WORDS else ""] += 1
    del counts[""]
    return counts


def _by_folder(imports: Iterable[tuple[str, set[str]]]) -> dict[str, set[str]]:
    """Returns the imports between folders and top-level modules."""
    graph: dict[str, set[str]] = collections.defaultdict(set)
    for module, others in imports:
        own = ".".join(module.split(".")[:2])
        graph[own] |= {".".join(other.split(".")[:2]) for other in others} - {own}
    return dict(graph)


def floors(graph: dict[str, set[str]]) -> int:
    """Returns the number of modules on the longest chain of imports."""
    sys.setrecursionlimit(10_000)
    circle = {module: _reached(graph, module) for module in graph}

    @functools.cache
    def depth(module: str) -> int:
        own = {other for other in circle[module] if module in circle[other]} | {module}
        below = {other for each in own for other in graph[each]} - own
        return 1 + max(map(depth, below), default=0)

    return max(map(depth, graph))


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        for other in graph[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def _imports(package: Path) -> Iterator[tuple[str, set[str]]]:
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    for name, path in names.items():
        found = set()
        for node in _at_module_level(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        yield name, {other for other in found if other in names} - {name, "earl_jax"}


def _at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _at_module_level(node)


def main() -> None:
    """Prints the table."""
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path()]
    rows = [measure(root) for root in roots]
    print("| | " + " | ".join(root.name or "here" for root in roots) + " |")
    print("|---" * (1 + len(roots)) + "|")
    for name in rows[0]:
        print(f"| {name} | " + " | ".join(row[name] for row in rows) + " |")


if __name__ == "__main__":
    main()
