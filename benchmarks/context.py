# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Updates and rounds at 32K and 131K tokens, cut over the `context` axis: bytes and time a device.

    uv run --python=3.12 --all-extras python -m benchmarks.context [--only=TEXT]
    uv run python -m benchmarks.context --time

First: real models compiled for chips that are not here, as benchmarks/compile.py does it: updates
of one row at a time for each row shard, and rounds of the engine (chunks of 2,048 tokens of eight
prompts read, then a burst decoded) with room for eight whole contexts a row shard. With --time:
updates of a tiny model on eight virtual CPU devices, on every way to give them the same number of
tokens. Each prints a Markdown table.
"""

import sys
import time

from benchmarks.compile import Case, print_table

H100 = [
    Case(model=model, topology="h100:1x8", mesh=mesh, stage="train", rows=1, length=length)
    for model in ("llama3.1-8b", "qwen2.5-7b")
    for length in (32_768, 131_072)
    for mesh in ("fsdp=8", "fsdp=4,context=2", "fsdp=2,context=4", "context=8")
    # Four key/value heads and 28 query heads: the other way to cut what a row needs.
] + [
    Case(model="llama3.1-8b", topology="h100:1x8", mesh=mesh, stage="train", rows=1, length=131_072)
    for mesh in ("tensor=8", "context=4,tensor=2")
]
OTHERS = [
    Case(model=model, topology=topology, mesh=mesh, stage="train", rows=1, length=length)
    for model, topology, mesh, length in (
        ("mistral-7b", "h100:1x8", "context=8", 131_072),
        ("gemma3-12b", "h100:2x8", "context=16", 131_072),
        ("qwen3-30b-a3b", "h100:2x8", "context=4,expert=4", 32_768),
        ("llama3.1-8b", "v5p:2x2x2", "context=8", 131_072),
        ("qwen2.5-7b", "v5e:4x4", "context=4,tensor=4", 32_768),
        ("qwen2.5-72b", "h100:16x8", "context=16,tensor=8", 131_072),
    )
]
ROUNDS = [
    Case(
        model=model,
        topology=topology,
        mesh=mesh,
        stage="rollout",
        rows=8,
        length=131_072,
        chunk=2048,
    )
    for model, topology, meshes in (
        ("llama3.1-8b", "h100:1x8", ("tensor=8", "context=2,tensor=4", "context=8")),
        # Four key/value heads: `tensor` alone leaves half of the cache on each device.
        ("qwen2.5-7b", "h100:1x8", ("data=2,tensor=4", "context=2,tensor=4")),
        ("llama3.1-8b", "v5p:2x2x2", ("context=8",)),
    )
    for mesh in meshes
]
CASES = (*H100, *OTHERS, *ROUNDS)

# Of the updates that are timed: rows x length tokens in all, on each of the meshes.
TIMED = ("fsdp=8", "fsdp=4,context=2", "fsdp=2,context=4", "context=8")
TOKENS, REPEATS = 32_768, 3


def print_times() -> None:
    """Seconds of an update of as many tokens a device, the rows of which are longer and longer."""
    from earl_jax.main import start_jax

    start_jax("cpu", 8)
    import jax
    import numpy as np

    from earl_jax.algorithms.algorithms import ALGORITHMS
    from earl_jax.models.config import ModelConfig
    from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
    from earl_jax.train.config import TrainConfig
    from earl_jax.train.step import batch_shapes, init_state, make_train_step

    model = ModelConfig(
        num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_size=16, ffn_size=128
    )
    config = TrainConfig(remat=True)
    print("| mesh | rows | s an update, best of " + f"{REPEATS} |\n|---|---|---|")
    for length in (TOKENS // 8, TOKENS // 4, TOKENS // 2, TOKENS):
        for mesh in TIMED:
            layout = make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)
            rows = TOKENS // length
            if rows % layout.num_row_shards:
                continue
            step = make_train_step(
                model,
                config,
                layout,
                vocab_size=256,
                temperature=1.0,
                algorithm=ALGORITHMS["reinforce"],
            )
            state = init_state(model, config, 256, layout, 0)
            batch = jax.tree.map(
                lambda s: jax.device_put(np.ones(s.shape, s.dtype), s.sharding),
                batch_shapes(rows, length, layout),
            )
            seconds = []
            for _ in range(1 + REPEATS):
                start = time.perf_counter()
                state, metrics = step(state, batch, np.zeros(2, np.float32))
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - start)
            print(f"| {mesh} | {rows} x {length:,} | {min(seconds[1:]):.2f} |", flush=True)


if __name__ == "__main__":
    if "--time" in sys.argv:
        print_times()
    else:
        print_table(CASES, [sys.executable, "-m", "benchmarks.context"], __doc__)
