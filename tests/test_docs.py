# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code does."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from earl_jax.training import train
from tests.support.settings import make_config

ROOT = Path(__file__).parent.parent
MODEL = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
TINY = {
    "num_steps": 1,
    "model": MODEL | {"ffn_size": 16},
    "rollout": {"num_slots": 8, "episodes_per_step": 16, "context_buckets": (48,)},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "eval": {"games": 2, "final_games": 2},
}


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "metrics.md"])
def test_reference_is_what_the_code_says(reference, name):
    """Run docs/reference.py where this fails. The commands are checked by .ci/run."""
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == reference.PAGES[name]().rstrip() + "\n"


@pytest.mark.slow
def test_every_metric_of_a_run_is_in_the_reference(reference, tmp_path):
    train(make_config(TINY), tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    known = {name for topic in reference.METRICS.values() for name in topic}
    assert {name for line in lines for name in line} <= known
    # And each name of the reference stands somewhere in the package.
    source = "\n".join(path.read_text() for path in (ROOT / "earl_jax").rglob("*.py"))
    assert [name for name in known if not re.search(rf"\b{name}\b", source)] == []


def test_pages_name_files_that_exist():
    pages = [ROOT / "README.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    missing = []
    for page in pages:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        folders = "tests|configs|benchmarks|docs|gpu_scripts|tpu_scripts"
        named = re.findall(rf"\b((?:{folders})/[a-z0-9_/]+\.[a-z]+)", text)
        missing += [(page.name, link) for link in links if not (page.parent / link).exists()]
        missing += [(page.name, name) for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_every_page_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    navigation = re.findall(
        r"(\S+\.md)$", (ROOT / "docs/site/mkdocs.yml").read_text(), re.MULTILINE
    )
    assert pages - set(navigation) == set()


def test_docstrings_begin_with_a_verb_or_a_noun_phrase():
    riddle = re.compile(r"(What|Whether|Those|Of|Where|Who|Which|How|When)\b")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for folder in ("earl_jax", "benchmarks", "tests", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
            found += [f"{path.name}: {text:.60}" for text in texts if riddle.match(text)]
    assert found == []


def test_readme_is_one_page():
    assert (ROOT / "README.md").stat().st_size <= 10_000
