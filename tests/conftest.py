# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, so that every placement in the tests is real.

Programs are compiled quickly instead of well: a training step in 0.7 s, not 5 s. The processes that
tests start do the same, but for the installed program of test_install.py.
"""

import fnmatch
import gc
import importlib.metadata
import os
import shutil
import signal
import sys
from pathlib import Path

# The tests start some hundred processes, each of which would compile 1,800 modules of Python (3 to
# 6 s) where the user keeps Python from leaving bytecode beside them.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    bytecode = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(bytecode))
    sys.dont_write_bytecode = False

# A shell's job in the background ignores Ctrl-C, and so would the processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # A module a program, not one for each core: a third less of the processor's time.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Newer versions do not know it, and end the process at a flag that they do not know.
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["PJRT_NPROC"] = "256"  # see launch.start.start_jax
# Else the folder of compiled programs would be a part of the keys by which they are found.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_QUICK)).strip()

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.support")

from tests.support import PROGRAMS, link_programs, python_path  # noqa: E402
from tests.support.children import sitecustomize  # noqa: E402, F401

os.environ["PYTHONPATH"] = python_path()
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Linux lets a process have 65,530 mappings. Each compiled program takes some, and XLA ends the
# process with a segmentation fault when there are no more.
MOST_MAPPINGS = 25_000
MOST_KEPT_BYTES = 2**30
LONGEST = (
    "test_distributed.py",
    "test_runs.py",
    "test_split_runs.py",
    "test_faults.py",
    "test_apart.py",
    "test_default_run.py",
    "test_going_on.py",
    "test_install.py",
    "test_launch_scripts.py",
    "test_collect.py",
    "test_soak.py",
    "test_serve.py",
    "test_serve_models.py",
    "test_train.py",
    "test_engine.py",
    "test_growing.py",
    "test_precision.py",
    "test_runs_lora.py",
)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of servers and runs wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


def _leave_out_objects() -> None:
    """Leaves the objects that there are out of later garbage collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves modules and tests out of garbage collections, of which tracing causes many."""
    _leave_out_objects()


@pytest.fixture(scope="module")
def few_objects():
    """For tests that collect garbage: without the objects that a worker has by then."""
    _leave_out_objects()
    yield
    _leave_out_objects()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases of `slow_except`, and puts the files that take longest first.

    None of those files is then left to a single worker at the end.
    """
    for item in items:
        mark = item.get_closest_marker("slow_except")
        if mark and not any(fnmatch.fnmatchcase(item.callspec.id, quick) for quick in mark.args):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else 99)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the newest programs of earlier runs, before there are workers."""
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    if hasattr(config, "workerinput"):
        return
    left = MOST_KEPT_BYTES
    for path in sorted(PROGRAMS.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
        left -= path.stat().st_size
        if left < 0:
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A user's cache folder ($XDG_CACHE_HOME) for a file's runs: measurements and programs."""
    folder = tmp_path_factory.mktemp("cache")
    link_programs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True, scope="module")
def programs():
    """The runs of a file share their programs."""
    from tests.support.programs import sharing_programs

    with sharing_programs():
        yield


@pytest.fixture(scope="module")
def pool():
    """Two workers that run environments."""
    from earl_jax.envs.pool import EnvironmentPool

    pool = EnvironmentPool(2, timeout_s=60.0)
    yield pool
    pool.close()


@pytest.fixture
def checkpoints(tmp_path):
    """The checkpoints of a run, of which it keeps two."""
    from earl_jax.train.checkpoint import Checkpoints

    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


@pytest.fixture
def copied(tmp_path):
    """A checkpoint in one file, to be damaged."""
    from tests.support.references import CHECKPOINT

    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Lets go of compiled programs when a file's tests are over and there are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
