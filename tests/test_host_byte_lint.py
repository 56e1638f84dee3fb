# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""No code on the data path reads arrays past the host-byte counter (telemetry/host_bytes.py).

The counter sees reads of whole arrays. On CPU numpy takes a single-device array, such as a shard's
`.data`, through its buffer and the counter sees nothing; nor does it see memoryviews, dlpack,
callbacks from compiled code, or copies to host memory. These are forbidden here by their source
text, function by function. A jax array that arrives as a parameter is not recognized.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import earl_jax

PACKAGE = Path(earl_jax.__file__).parent
DATA_PATH = ("dispatch", "sharding", "train", "rollout", "models", "weights.py")

# (file, function or "*", reason).
ALLOWED = [
    ("engine/host_pages.py", "*", "preemption to host memory; preempted_host_bytes counts it"),
    ("engine/step_tokens.py", "convert_to_numpy", "a decode step's tokens are for the host"),
    ("engine/step_tokens.py", "num_tokens", "a decode step's tokens are for the host"),
    ("engine/step_tokens.py", "get_result_at_slot", "a decode step's tokens are for the host"),
    ("models/blocks.py", "drain", "exports write parameters to files"),
    ("train/offload.py", "to_memory", "host memory as storage for the optimizer's moments"),
    ("train/backup.py", "to_devices", "restores shards to the memory that they were in"),
    ("train/backup.py", "_to_host", "host memory as storage for the backup"),
]

# Attributes and functions that hand out single-device arrays of an array.
SHARDS = {"addressable_shards", "addressable_data", "global_shards", "_arrays", "data"}
# Attributes of an array that hold none of its values.
ABOUT = {"shape", "dtype", "nbytes", "size", "ndim", "index", "device", "sharding", "itemsize"}
NUMPY = {"np", "numpy", "onp"}
READERS = {"memoryview", "bytes", "bytearray"}
CALLBACKS = {"pure_callback", "io_callback", "host_callback"}
COPIES = {"copy_to_host_async", "with_memory_kind", "__array__"}


def findings(source: str) -> list[tuple[str, int, str]]:
    """Returns (function, line, what) for everything that may read an array past the counter."""
    found: list[tuple[str, int, str]] = []
    for function, body in _functions(ast.parse(source)):
        shards = _names_of_shards(body)
        found += [
            (function, getattr(node, "lineno", 0), what)
            for node in body
            if (what := _offence(node, shards))
        ]
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Each function's name and nodes; those of functions within it belong to it. Then the rest."""
    inside: set[int] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = list(ast.walk(node))
            inside |= {id(each) for each in nodes}
            yield node.name, nodes
        else:
            waiting += ast.iter_child_nodes(node)
    yield "", [node for node in ast.walk(tree) if id(node) not in inside]


def _names_of_shards(body: list[ast.AST]) -> set[str]:
    """Names in a function that are given shards, their arrays, or what is made of these."""
    names: set[str] = set()
    while True:
        before = len(names)
        for node in body:
            if isinstance(node, ast.Assign) and _has_shard(node.value, names):
                names |= {name for target in node.targets for name in _bound(target)}
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                if node.value is not None and _has_shard(node.value, names):
                    names |= set(_bound(node.target))
            elif isinstance(node, ast.For | ast.comprehension) and _has_shard(node.iter, names):
                names |= set(_bound(node.target))
        if len(names) == before:
            return names


def _bound(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _has_shard(node: ast.AST, names: set[str]) -> bool:
    """Returns True if values of a shard are in an expression, not only its shape and such."""
    if isinstance(node, ast.Attribute):
        if node.attr in ABOUT:
            return False
        return node.attr in SHARDS or _has_shard(node.value, names)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call) and _called(node) in ("device_get", "len"):
        return False
    return any(_has_shard(child, names) for child in ast.iter_child_nodes(node))


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _offence(node: ast.AST, shards: set[str]) -> str:
    """Returns what is wrong with a node; "" for nothing."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
        wrong = [name for name in names if "dlpack" in name or name.split(".")[-1] in CALLBACKS]
        return f"imports {wrong[0]}" if wrong else ""
    if isinstance(node, ast.Attribute):
        if "dlpack" in node.attr or node.attr in COPIES | CALLBACKS:
            return node.attr
        inner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        return f"debug.{node.attr}" if inner == "debug" else ""
    if isinstance(node, ast.keyword):
        return "memory_kind" if node.arg == "memory_kind" else ""
    return _offending_call(node, shards) if isinstance(node, ast.Call) else ""


def _offending_call(node: ast.Call, shards: set[str]) -> str:
    name = _called(node)
    if name == "memoryview" or name in CALLBACKS and isinstance(node.func, ast.Name):
        return name
    of_numpy = isinstance(node.func, ast.Attribute) and _root(node.func) in NUMPY
    if not (of_numpy or name in READERS and isinstance(node.func, ast.Name)):
        return ""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return f"{name} of a shard" if any(_has_shard(each, shards) for each in given) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def modules() -> list[Path]:
    paths = [PACKAGE / part for part in DATA_PATH]
    return sorted(m for p in paths for m in (p.rglob("*.py") if p.is_dir() else [p]))


@pytest.mark.parametrize("module", modules(), ids=lambda m: str(m.relative_to(PACKAGE)))
def test_reads_on_the_data_path_are_seen_by_the_counter(module):
    file = str(module.relative_to(PACKAGE))
    allowed = {function for path, function, _ in ALLOWED if path == file}
    wrong = [
        f"{file}:{line} ({function or 'module'}): {what}"
        for function, line, what in findings(module.read_text())
        if not allowed & {"*", function}
    ]
    assert not wrong, (
        f"{wrong} passes by the host-byte counter: use jax.device_get of the array, or name the "
        "function and the reason in ALLOWED"
    )


@pytest.mark.parametrize("file, function, reason", ALLOWED)
def test_no_exception_is_left_over(file, function, reason):
    found = {name for name, _, _ in findings((PACKAGE / file).read_text())}
    assert reason and (found if function == "*" else function in found)


@pytest.mark.parametrize(
    "source",
    [
        "np.asarray(array.addressable_shards[0].data)",
        "np.array(shard.data, copy=True)",
        "numpy.ascontiguousarray(shard.data[0])",
        "x = np.stack([s.data for s in array.addressable_shards])",
        "for s in array.addressable_shards:\n    d = s.data\n    total = np.sum(d)",
        "parts = [s.data for s in a.addressable_shards]\nlast = parts[-1]\nnp.copy(last)",
        "np.asarray(array.addressable_data(0))",
        "part = array.addressable_data(0)\nnp.asarray(part + 1)",
        "np.asarray(jitted(shard.data))",
        "np.testing.assert_array_equal(x, shard.data)",
        "if (d := shard.data) is not None: np.asarray(d)",
        "bytes(shard.data)",
        "memoryview(array)",
        "array.__array__()",
        "np.from_dlpack(array)",
        "jax.dlpack.to_dlpack(array)",
        "array.__dlpack__()",
        "from jax.dlpack import from_dlpack",
        "from jax.experimental import io_callback",
        "jax.pure_callback(f, shape, x)",
        "jax.experimental.io_callback(f, None, x)",
        "jax.debug.callback(print, x)",
        "jax.debug.print('{}', x)",
        "array.copy_to_host_async()",
        "jax.device_put(x, SingleDeviceSharding(d, memory_kind='pinned_host'))",
        "jax.device_put(x, x.sharding.with_memory_kind('pinned_host'))",
    ],
)
@pytest.mark.parametrize("function", ["", "read"])
def test_the_lint_finds_what_it_forbids(source, function):
    text = source
    if function:
        body = source.replace("\n", "\n        ")
        text = f"class Part:\n    def read(self, array):\n        {body}\n"
    assert {name for name, _, _ in findings(text)} == {function}


@pytest.mark.parametrize(
    "source",
    [
        "jax.device_get(array)",
        "np.asarray(jax.device_get(shard.data))",
        "np.asarray(array)",
        "np.zeros(shard.data.shape, shard.data.dtype)",
        "np.array([len(array.addressable_shards)])",
        "jnp.asarray(shard.data)",
        "parts = [s.data for s in array.addressable_shards]\nfill(parts)",
        "np.array(devices, dtype=object)",
        "def receive(data: memoryview) -> None:\n    np.frombuffer(data, np.int8)",
        "kinds = array.sharding.memory_kind",
        "shape = MeshShape(data=2)\nnp.prod(shape.sizes)",
    ],
)
def test_the_lint_lets_pass(source):
    assert findings(source) == []
