# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""No code on the data path reads arrays past the host-byte counter (telemetry/host_bytes.py).

The counter sees reads of whole arrays. It does not see a shard's `.data` that numpy takes through
its buffer on CPU, nor memoryviews, dlpack, callbacks of compiled code, or copies to host memory.
"""

import ast
from pathlib import Path

import pytest

import earl_jax

PACKAGE = Path(earl_jax.__file__).parent
DATA_PATH = (
    *("algorithms", "dispatch", "sharding", "train", "engine", "rollout", "models"),
    *("launch", "placement", "serving", "loop.py", "loop_async.py", "trajectory.py"),
)
ALLOWED = {
    "engine/host_pages.py": "preemption to host memory; preempted_host_bytes counts it",
    "launch/messages.py": "plain data of the hosts comes back from all processes",
    "models/blocks.py": "exports write parameters to files",
    "train/checkpoint.py": "checkpoints are written from where the arrays are",
    "train/saved_state.py": "checkpoints are written from where the arrays are",
    "train/offload.py": "host memory as storage for the optimizer's moments",
    "train/inspection.py": "a batch for a person to look at, of a run that ends",
    "train/backup.py": "host memory as storage for the backup",
}
FORBIDDEN = {
    *("pure_callback", "io_callback", "host_callback", "memoryview", "__array__"),
    *("copy_to_host_async", "with_memory_kind", "memory_kind"),
    *("from_dlpack", "to_dlpack", "__dlpack__", "dlpack"),
}
SHARDS = {"addressable_shards", "addressable_data", "global_shards", "data"}


def findings(source: str) -> list[str]:
    """Returns the offences of a module, as "line: what"."""
    found, nodes = [], list(ast.walk(ast.parse(source)))
    # Names that a shard's data, or shards, are given.
    bound = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _parts(node.value, ast.Attribute) & SHARDS
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            *owners, name = ast.unparse(node.func).split(".")
            is_host = bool({"np", "numpy"} & {*owners}) or name == "bytes"
            of_shards = any(
                _parts(given, ast.Attribute) & SHARDS or _parts(given, ast.Name) & bound
                for given in node.args
            )
            if name in FORBIDDEN or owners[-1:] == ["debug"] or is_host and of_shards:
                found.append(f"{node.lineno}: {name}")
            found += [f"{node.lineno}: {k.arg}" for k in node.keywords if k.arg in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: {n}" for n in names if n.split(".")[-1] in FORBIDDEN]
    return found


def _parts(value: ast.expr, kind: type) -> set[str]:
    """Returns the attributes, or names, in an expression; none where `device_get` reads it."""
    if isinstance(value, ast.Call) and "device_get" in ast.unparse(value.func):
        return set()
    parts = (part for part in ast.walk(value) if isinstance(part, kind))
    return {getattr(part, "attr", getattr(part, "id", "")) for part in parts}


@pytest.mark.parametrize("folder", DATA_PATH)
def test_reads_on_the_data_path_are_seen_by_the_counter(folder):
    wrong = {
        str(path.relative_to(PACKAGE)): offences
        for path in sorted((PACKAGE / folder).rglob("*.py")) or [PACKAGE / folder]
        if (offences := findings(path.read_text()))
    }
    assert wrong.keys() <= ALLOWED.keys(), (
        f"{wrong} passes by the host-byte counter: use jax.device_get of the array, or name the "
        "file and the reason in ALLOWED"
    )


@pytest.mark.parametrize(
    "source",
    [
        "np.asarray(array.addressable_shards[0].data)",
        "np.stack([s.data for s in array.addressable_shards])",
        "np.asarray(array.addressable_data(0))",
        "bytes(shard.data)",
        "np.sum(shard.data)",
        "np.save(file, shard.data)",
        "values = shard.data; np.asarray(values)",
        "memoryview(array)",
        "np.from_dlpack(array)",
        "from jax.dlpack import from_dlpack",
        "jax.pure_callback(f, shape, x)",
        "jax.debug.callback(f, x)",
        "jax.debug.print('{}', x)",
        "array.copy_to_host_async()",
        "jax.device_put(x, SingleDeviceSharding(d, memory_kind='pinned_host'))",
    ],
)
def test_the_lint_finds_what_it_forbids(source):
    assert findings(source)


@pytest.mark.parametrize(
    "source", ["jax.device_get(array)", "np.asarray(jax.device_get(shard.data))", "np.asarray(x)"]
)
def test_the_lint_lets_pass(source):
    assert not findings(source)
