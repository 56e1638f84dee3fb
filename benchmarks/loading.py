# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory of writing and of loading a checkpoint much larger than it, on 8 virtual devices.

    uv run python benchmarks/loading.py [--num_layers=16]

A model with random weights is made on a mesh and exported (bf16, in files of 256 MiB); then each
mesh loads it in a process of its own. Nothing is kept. Prints a Markdown table, and fails if `host`
or `peak` is not below `bound`. Before it is measured, each process does the same with a model of
one narrow layer, whose `peak` is `narrow`: most of that is XLA's code and compiler, and the
programs for the large model are compiled anew.

On CPU the arrays of the devices are memory of the process too, so they are taken off:

- `numpy`: the most bytes that Python and numpy held at once, counted by tracemalloc, which is told
  of every allocation of theirs and of none of XLA's.
- `host`: the most that the process held (anonymous memory and mapped files) beyond what it held
  before and beyond the parameters on the devices, sampled every 2 ms. XLA's own needs and the
  blocks on their way are in it. A parameter counts from when its array is asked for.
- `file`: the most that was mapped of files, sampled; part of `host`.
- `peak`: the kernel's high-water mark (VmHWM) less what was held before and the parameters.
- `bound`: twice the largest tensor of the checkpoint, and 128 MiB: XLA's compiler, eight devices'
  blocks of 4 MiB, and what malloc keeps of these for its threads.
"""

import argparse
import ctypes
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WIDTH = 2_048
SHARD_BYTES = 256 * 2**20
SHARDED = ("fsdp=8", "tensor=8", "tensor=2,fsdp=4")
REPLICATED = ("data=2,fsdp=4", "data=8")
MIB = 2**20
FIXED_BYTES = 128 * MIB


def main() -> None:
    """Writes, loads on every mesh, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_layers", type=int, default=16, help="16 are 2.3 GB in bf16")
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        _child(flags.num_layers, flags.vocab_size, *flags.child)
        return
    print("| MiB | mesh | checkpoint | largest tensor | arrays | narrow |", end="")
    print(" numpy | host | file | peak | bound | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    # data=8 holds eight copies in fp32: of the large checkpoint they would be 36 GB.
    small = (1, flags.vocab_size // 2)
    jobs = (((flags.num_layers, flags.vocab_size), SHARDED), (small, REPLICATED))
    within = True
    for size, meshes in jobs:
        with tempfile.TemporaryDirectory() as folder:
            within &= _measured(size, "save", meshes[0], folder)
            for mesh in meshes:
                within &= _measured(size, "load", mesh, folder)
    if not within:
        sys.exit("the host held more than `bound`")


def _measured(size: tuple[int, int], what: str, mesh: str, folder: str) -> bool:
    """Prints a row; whether the host held less than it may."""
    num_layers, vocab_size = size
    line = [sys.executable, __file__, f"--num_layers={num_layers}", f"--vocab_size={vocab_size}"]
    line += ["--child", what, mesh, folder]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    files = Path(folder, "checkpoint").glob("*.safetensors")
    largest = max(vocab_size, 4 * WIDTH) * WIDTH * 2
    bound = 2 * largest + FIXED_BYTES
    sizes = [sum(file.stat().st_size for file in files), largest]
    sizes += [found[key] for key in ("arrays", "narrow", "numpy", "host", "file", "peak")] + [bound]
    cells = [what, mesh, *(f"{size / MIB:,.0f}" for size in sizes), f"{found['seconds']:.0f}"]
    print("| " + " | ".join(cells) + " |", flush=True)
    return max(found["host"], found["peak"]) < bound


def _child(num_layers: int, vocab_size: int, what: str, mesh: str, folder: str) -> None:
    from earl_jax.main import start_jax

    start_jax("cpu", 8)
    import jax

    from earl_jax.models.checkpoints import hf_read
    from earl_jax.sharding.layout import MeshShape, make_layout

    layout = make_layout(MeshShape.parse(mesh))
    small, large, again = (Path(folder) / name for name in ("small", "checkpoint", "again"))
    made: list[int] = []
    fill = hf_read.fill

    def counted_fill(shape: Any, dtype: Any, sharding: Any, *rest: Any) -> Any:
        made.append(_bytes_of(shape, dtype, sharding))
        return fill(shape, dtype, sharding, *rest)

    hf_read.fill = counted_fill

    def load(folder: Path) -> Any:
        return jax.block_until_ready(
            hf_read.load_parameters(hf_read.open_checkpoint(folder), layout)
        )

    if what == "load":
        narrow = _memory_of(lambda: load(small), made)["peak"]
        found = _memory_of(lambda: load(large), made)
        found |= {"arrays": sum(made)} | _python_memory_of(lambda: load(large))
    else:
        params, save = _exporter(1, 64, 1024, layout)
        narrow = _memory_of(lambda: save(small), made)["peak"]
        params, save = _exporter(num_layers, WIDTH, vocab_size, layout)
        found = _memory_of(lambda: save(large), made) | _python_memory_of(lambda: save(again))
        leaves = jax.tree.leaves(params)
        found["arrays"] = sum(_bytes_of(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        shutil.rmtree(again)
    print(json.dumps(found | {"narrow": narrow}))


def _bytes_of(shape: Any, dtype: Any, sharding: Any) -> int:
    """On all devices."""
    import numpy as np

    size = math.prod(sharding.shard_shape(shape)) * np.dtype(dtype).itemsize
    return len(sharding.device_set) * size


def _model(num_layers: int, width: int) -> Any:
    from earl_jax.models.config import ModelConfig

    return ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        ffn_size=4 * width,
        tie_embeddings=False,
    )


def _exporter(
    num_layers: int, width: int, vocab_size: int, layout: Any
) -> tuple[Any, Callable[[Path], None]]:
    """The parameters of a model, and what writes them to a folder."""
    import jax

    from earl_jax.envs.tokenizer import MIN_VOCAB_SIZE, build_tokenizer
    from earl_jax.models.checkpoints.hf_write import save_checkpoint
    from earl_jax.models.parameters import init_parameters, parameter_shardings, parameter_specs

    model = _model(num_layers, width)
    specs = parameter_specs(model, vocab_size)
    shardings = parameter_shardings(specs, layout)
    init = jax.jit(lambda key: init_parameters(specs, key), out_shardings=shardings)
    params = jax.block_until_ready(init(jax.random.key(0)))
    return params, lambda folder: save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=vocab_size,
        tokenizer=build_tokenizer(["a b"], MIN_VOCAB_SIZE),
        dtype="bfloat16",
        max_positions=2048,
        max_shard_bytes=SHARD_BYTES,
    )


def _memory_of(work: Callable[[], Any], made: list[int]) -> dict[str, float]:
    """What `work` needs beyond what is there before it and the arrays that it adds to `made`."""
    made.clear()
    # What was freed and not given back would be taken for free memory later.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, samples, done = _status(), [(0, 0)], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            now = _status()
            held = now["VmRSS"] - before["VmRSS"] - sum(made)
            samples.append((held, now["RssFile"] - before["RssFile"]))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    peak = _status()["VmHWM"] - before["VmRSS"] - sum(made)
    del result
    return {
        "host": max(held for held, _ in samples),
        "file": max(mapped for _, mapped in samples),
        "peak": peak,
        "seconds": seconds,
    }


def _python_memory_of(work: Callable[[], Any]) -> dict[str, int]:
    """The same work once more: tracemalloc's own tables are memory of the process too."""
    tracemalloc.start()
    work()
    return {"numpy": tracemalloc.get_traced_memory()[1]}


def _status() -> dict[str, int]:
    """The memory of this process, in bytes, by the kernel's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    words = [line.split() for line in lines]
    return {line[0][:-1]: int(line[1]) * 1024 for line in words if line[-1] == "kB"}


if __name__ == "__main__":
    main()
