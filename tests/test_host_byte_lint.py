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
    *("dispatch", "sharding", "train", "engine", "rollout", "models"),
    *("launch", "placement", "serving"),
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
SHARDS = {"addressable_shards", "addressable_data", "global_shards"}
READERS = {"asarray", "array", "stack", "concatenate", "copy", "ascontiguousarray", "bytes"}


def findings(source: str) -> list[str]:
    """Returns the offences of a module, as "line: what"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            of_numpy = ast.unparse(node.func).split(".")[0] in ("np", "numpy", "bytes")
            inside = {
                getattr(part, "attr", "")
                for given in node.args
                for part in ast.walk(given)
                if not (isinstance(given, ast.Call) and "device_get" in ast.unparse(given.func))
            }
            if name in FORBIDDEN or of_numpy and name in READERS and inside & (SHARDS | {"data"}):
                found.append(f"{node.lineno}: {name}")
            found += [f"{node.lineno}: {k.arg}" for k in node.keywords if k.arg in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: {n}" for n in names if n.split(".")[-1] in FORBIDDEN]
    return found


@pytest.mark.parametrize("folder", DATA_PATH)
def test_reads_on_the_data_path_are_seen_by_the_counter(folder):
    wrong = {
        str(path.relative_to(PACKAGE)): offences
        for path in sorted((PACKAGE / folder).rglob("*.py"))
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
        "memoryview(array)",
        "np.from_dlpack(array)",
        "from jax.dlpack import from_dlpack",
        "jax.pure_callback(f, shape, x)",
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
