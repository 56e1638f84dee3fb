# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, so that every placement in the tests is real.

Programs are compiled quickly instead of well: a training step in 0.7 s, not 5 s. The tests of whole
runs start processes of their own, which compile as a user's do.
"""

import importlib.metadata
import os
from pathlib import Path

_QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Newer versions do not know it, and end the process at a flag that they do not know.
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["PJRT_NPROC"] = "256"  # see main.start_jax
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_QUICK)).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Linux lets a process have 65,530 mappings. Each compiled program takes some, and XLA ends the
# process with a segmentation fault when there are no more.
MOST_MAPPINGS = 25_000


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of servers and runs wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Lets go of compiled programs when a file's tests are over and there are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
