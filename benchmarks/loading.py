# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory of writing and of loading a checkpoint much larger than it, on 8 virtual devices.

    uv run python benchmarks/loading.py [--num_layers=16] [--replicated_layers=2]

A model with random weights is made on a mesh and exported (bf16, in files of 256 MiB); then each
mesh loads it in a process of its own. Nothing is kept. Prints a Markdown table. Before it is
measured, each process does the same with a model of one narrow layer: what that takes, most of it
XLA's code and compiler, is `fixed`.

On CPU the arrays of the devices are memory of the process too, so they are taken off:

- `numpy`: the most bytes that Python and numpy held at once, counted by tracemalloc, which is told
  of every allocation of theirs and of none of XLA's.
- `host`: the most that the process held (anonymous memory and mapped files) beyond what it held
  before and beyond the arrays on the devices, sampled every 2 ms. XLA's own needs are in it.
- `file`: the most that was mapped of files, sampled; part of `host`.
- `peak`: the kernel's high-water mark (VmHWM) less what was held before and the arrays at the end.
"""

import argparse
import json
import math
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
VOCAB_SIZE, WIDTH = 32_768, 2_048
SHARD_BYTES = 256 * 2**20
SHARDED = ("fsdp=8", "tensor=2,fsdp=4", "data=2,fsdp=4")
MIB = 2**20


def main() -> None:
    """Writes, loads on every mesh, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_layers", type=int, default=16, help="16 are 2.5 GB in bf16")
    parser.add_argument("--replicated_layers", type=int, default=2, help="the same for data=8")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        _child(flags.num_layers, *flags.child)
        return
    print("| MiB | mesh | checkpoint | largest tensor | arrays | fixed |", end="")
    print(" numpy | host | file | peak | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    # data=8 holds eight copies in fp32: of the whole checkpoint they would be 40 GB.
    jobs = ((flags.num_layers, "fsdp=8", SHARDED), (flags.replicated_layers, "data=8", ("data=8",)))
    for num_layers, saved_from, meshes in jobs:
        with tempfile.TemporaryDirectory() as folder:
            _measured(num_layers, "save", saved_from, folder)
            for mesh in meshes:
                _measured(num_layers, "load", mesh, folder)


def _measured(num_layers: int, what: str, mesh: str, folder: str) -> None:
    line = [sys.executable, __file__, f"--num_layers={num_layers}", "--child", what, mesh, folder]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    files = Path(folder, "checkpoint").glob("*.safetensors")
    sizes = [sum(file.stat().st_size for file in files), VOCAB_SIZE * WIDTH * 2]
    sizes += [found[key] for key in ("arrays", "fixed", "numpy", "host", "file", "peak")]
    cells = [what, mesh, *(f"{size / MIB:,.0f}" for size in sizes), f"{found['seconds']:.0f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def _child(num_layers: int, what: str, mesh: str, folder: str) -> None:
    from earl_jax.main import start_jax

    start_jax("cpu", 8)
    import jax

    from earl_jax.models.hf_read import load_parameters, open_checkpoint
    from earl_jax.sharding.layout import MeshShape, make_layout

    layout = make_layout(MeshShape.parse(mesh))
    small, large = Path(folder) / "small", Path(folder) / "checkpoint"
    before = _status()["VmRSS"]
    if what == "load":
        jax.block_until_ready(load_parameters(open_checkpoint(small), layout))
        fixed = _status()["VmRSS"] - before
        found = _memory_of(lambda: load_parameters(open_checkpoint(large), layout))
    else:
        _export(1, 64, layout, small)()
        fixed = _status()["VmRSS"] - before
        found = _memory_of(_export(num_layers, WIDTH, layout, large))
    print(json.dumps(found | {"fixed": fixed}))


def _export(num_layers: int, width: int, layout: Any, folder: Path) -> Callable[[], None]:
    """Makes a model; the call writes it."""
    import jax

    from earl_jax.envs.tokenizer import MIN_VOCAB_SIZE, build_tokenizer
    from earl_jax.models.config import ModelConfig
    from earl_jax.models.hf_write import save_checkpoint
    from earl_jax.models.parameters import init_parameters, parameter_shardings, parameter_specs

    model = ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        ffn_size=4 * width,
        tie_embeddings=False,
    )
    specs = parameter_specs(model, VOCAB_SIZE)
    shardings = parameter_shardings(specs, layout)
    init = jax.jit(lambda key: init_parameters(specs, key), out_shardings=shardings)
    params = jax.block_until_ready(init(jax.random.key(0)))
    return lambda: save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=VOCAB_SIZE,
        tokenizer=build_tokenizer(["a b"], MIN_VOCAB_SIZE),
        dtype="bfloat16",
        max_positions=2048,
        max_shard_bytes=SHARD_BYTES,
    )


def _memory_of(work: Callable[[], Any]) -> dict[str, float]:
    """What `work` needs beyond what is there before it and the arrays that it makes."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, arrays_before = _status(), _array_bytes()
    samples, done = [(0, 0)], threading.Event()

    def sample() -> None:
        arrays = 0
        while not done.wait(0.002):
            # Arrays only ever come; one that is donated is counted nowhere for a moment.
            arrays, now = max(arrays, _array_bytes() - arrays_before), _status()
            held = now["VmRSS"] - before["VmRSS"] - arrays
            samples.append((held, now["RssFile"] - before["RssFile"]))

    sampler = threading.Thread(target=sample)
    tracemalloc.start()
    sampler.start()
    start = time.perf_counter()
    made = work()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    peak = _status()["VmHWM"] - before["VmRSS"] - (_array_bytes() - arrays_before)
    found = {
        "numpy": tracemalloc.get_traced_memory()[1],
        "host": max(held for held, _ in samples),
        "file": max(mapped for _, mapped in samples),
        "peak": peak,
        "arrays": _array_bytes(),
        "seconds": seconds,
    }
    del made
    return found


def _status() -> dict[str, int]:
    """The memory of this process, in bytes, by the kernel's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    words = [line.split() for line in lines]
    return {line[0][:-1]: int(line[1]) * 1024 for line in words if line[-1] == "kB"}


def _array_bytes() -> int:
    """Bytes of the arrays that are spread over the devices; pieces on one device count as host."""
    import jax

    total = 0
    for array in jax.live_arrays():
        if len(array.sharding.device_set) > 1 and not array.is_deleted():
            shard = array.sharding.shard_shape(array.shape)
            total += len(array.sharding.device_set) * array.dtype.itemsize * math.prod(shard)
    return total


if __name__ == "__main__":
    main()
