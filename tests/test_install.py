# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An installed package has all it needs, from the one line for pip in the README."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import earl_jax
from tests.support import ROOT, environment_without

MAX_BYTES = 1_000_000_000


def test_requirements_are_those_of_the_lock():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {(package["name"], package.get("version")) for package in lock}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line.partition(" ;")[0] for line in lines if not line.startswith("#")]
    assert {tuple(pin.split("==")) for pin in pins} <= locked
    # All that the project names is there; seqio, which brings TensorFlow, is not.
    (project,) = [package for package in lock if package["name"] == "earl-jax"]
    names = {pin.partition("==")[0] for pin in pins}
    assert {needed["name"] for needed in project["dependencies"]} <= names
    assert not {"tensorflow", "tensorflow-cpu", "seqio"} & names


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment with nothing but what the line in the README installs; needs the registry."""
    folder = tmp_path_factory.mktemp("install") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    before = num_bytes(folder)
    line = ["-m", "pip", "install", "--no-deps", "-r", "requirements.txt", "."]
    done = subprocess.run(
        [folder / "bin" / "python", *line],
        cwd=ROOT,
        # Python compiles what it imports; pip would compile every file. Its cache is the user's.
        env=environment_without("XDG_CACHE_HOME") | {"PIP_NO_COMPILE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert num_bytes(folder) - before <= MAX_BYTES
    return folder


@pytest.fixture(scope="module")
def earl_jax_of(venv, tmp_path_factory):
    """Returns a function that runs the installed command, from a folder that is not the project.

    Its programs are compiled as well as a user's, not quickly as in other tests.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = environment_without("PYTHON", "JAX_", "XLA_", "PJRT_")

    def run(*arguments):
        done = subprocess.run(
            [venv / "bin" / "earl-jax", *arguments],
            cwd=folder,
            env=environment | {"XDG_CACHE_HOME": str(folder / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_line_of_pip_gives_a_program_that_trains(venv, earl_jax_of, tmp_path):
    assert earl_jax_of("--version") == f"earl-jax {earl_jax.__version__}\n"
    site = next((venv / "lib").glob("python*")) / "site-packages"
    assert (site / "earl_jax" / "py.typed").is_file()
    (about,) = site.glob("earl_jax-*.dist-info/METADATA")
    extras = {f"Provides-Extra: {name}" for name in ("cuda12", "cuda13", "tpu", "k8s")}
    assert extras <= {*about.read_text().splitlines()}
    assert (site / "jetstream").is_dir() and not (site / "tensorflow").exists()
    workdir = tmp_path / "run"
    short = ("--config.num_steps=2", "--config.train.sft_steps=0")
    assert "done in " in earl_jax_of("train", *short, f"--workdir={workdir}")
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval" not in line] == [1, 2]
    assert (workdir / "report.html").is_file()
    assert "reward" in earl_jax_of("evaluate", f"--workdir={workdir}", "--games=8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installed_plan_and_bench_know_their_config(earl_jax_of):
    planned = json.loads(earl_jax_of("plan", "--topology=cpu:8", "--json"))
    assert planned["schedule"]
    flags = ["--json", "--repeats=1", "--config.model.num_layers=1"]
    rows = [json.loads(line) for line in earl_jax_of("bench", "dispatch", *flags).splitlines()]
    assert {row["what"] for row in rows} == {"experience", "weights"}
