# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Start of each process of the tests: Python imports it where this folder is in $PYTHONPATH.

Compiled programs are kept by every process of a run, not by its first alone, and from 50 ms on; an
entry is written in one piece, so that workers can share a folder and a process may be killed.
"""

import atexit
import gc
import importlib.util
import os
import sys
import types
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

# Tracing makes so many objects that looking for garbage as often as Python does by itself takes a
# twentieth of the processor's time.
gc.set_threshold(50_000, 10, 10)
# The last collection, as a process ends, takes half a second and frees nothing of use.
atexit.register(gc.freeze)

LEAST_S = 0.05


def put(cache: Any, key: str, value: bytes) -> None:
    """Adds an entry to a folder of compiled programs; nobody sees the half of it."""
    path = Path(cache.path) / f"{key}-cache"
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(value)
    part.replace(path)


def keep_programs(compiler: types.ModuleType) -> None:
    """Changes how JAX keeps compiled programs, in its module `compiler`.

    What is compiled for chips that are not here is not kept: it cannot be loaded again.
    """
    from jax._src import compilation_cache, lru_cache

    get, write = compilation_cache.get_executable_and_time, compiler._cache_write

    def kept_get(key: str, options: Any, backend: Any, *others: Any) -> Any:
        if backend.platform != "cpu":
            return None, None
        return get(key, options, backend, *others)

    def kept_write(key: str, seconds: float, name: str, backend: Any, *others: Any) -> None:
        if backend.platform == "cpu":
            taken_for_s = max(seconds, 1.0) if seconds >= LEAST_S else seconds
            write(key, taken_for_s, name, backend, *others)

    lru_cache.LRUCache.put = put
    compilation_cache.get_executable_and_time = kept_get
    compiler._cache_write = kept_write
    first = types.SimpleNamespace(process_id=0, client=None)
    compiler.distributed = types.SimpleNamespace(global_state=first)


class _Finder(MetaPathFinder):
    """Calls `keep_programs` when JAX's compiler is imported: most processes need no JAX at once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "jax._src.compiler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: types.ModuleType) -> None:
            execute(module)
            keep_programs(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _Finder())
