# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Kernels, rounds and updates on the GPU of this machine, beside its own limits and the planner's.

    python -m benchmarks.chip [--only=TEXT]

Runs on one GPU, with random weights: matrix products and copies (what the chip reaches), attention
kernels (their distance from the reference, their time), rounds of decode steps and of chunks, and
whole updates. Each row of the tables of chip.md is measured in a process of its own. `--only` takes
those whose row contains TEXT. On a CPU, which is for tests, sizes must be small.
"""

import collections
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compile import print_each
from benchmarks.plan import BURST, GIB, PAGE, VOCAB_SIZES, sizes_of
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules, append_tokens_for
from earl_jax.engine.engine import Engine
from earl_jax.engine.round_inputs import RoundInputs, idle_inputs
from earl_jax.launch.start import start_jax
from earl_jax.models.attention import kernels, paged_triton
from earl_jax.models.attention.rows import Positions, attention
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import LayerCache
from earl_jax.models.presets import PRESETS
from earl_jax.selector.footprint import train_footprint
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.roofline import decode_s, train_parts
from earl_jax.selector.sizes import Workload
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import ROLLOUT_ROWS, TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.trajectory import TrajectoryBatch

TOPOLOGY = "h100:1x1"
REPEATS = 5
# Of a profile, those with the most time.
KERNELS = 40
Times = list[float]


class Point(NamedTuple):
    """A row: what is measured, of which model, on so many rows of so many tokens."""

    kind: str
    model: str = ""
    rows: int = 0
    length: int = 0
    setting: str = ""

    def __str__(self) -> str:
        size = f"{self.rows} x {self.length:,}" if self.rows else ""
        return " | ".join((self.kind, self.model, size, self.setting))


POINTS = (
    Point("products, bf16"),
    Point("copy"),
    *(
        Point("update", "llama3.2-1b", 4, 8192, setting)
        for setting in ("none", "dots", "offload", "full", "full, documents of 1,024")
    ),
    Point("update", "llama3.2-1b", 1, 32768, "full"),
    Point("update", "llama3.2-1b", 1, 32768, "dots"),
    Point("kernels of an update", "llama3.2-1b", 4, 8192, "dots"),
    Point("kernels of an update", "llama3.2-1b", 1, 32768, "dots"),
    *(
        Point("paged attention", "qwen2.5-7b", rows, length, setting)
        for rows, length, setting in (
            (128, 4096, ""),
            (32, 16384, ""),
            (16, 32768, ""),
            (1, 32768, ""),
            (128, 4096, "int8"),
            (32, 752, ""),
            (32, 512, "one row of 8,192"),
            (128, 4096, "half idle"),
            (8, 4096, "chunks of 512"),
        )
    ),
    *(
        Point("paged attention", model, rows, length, setting)
        for model, rows, length, setting in (
            ("deepseek-v2-lite", 128, 4096, ""),
            ("deepseek-v2-lite", 1, 32768, ""),
            ("deepseek-v3", 128, 4096, ""),
            ("deepseek-v2-lite", 8, 4096, "chunks of 512"),
        )
    ),
    *(
        Point("attention of rows", "llama3.2-1b", 1, length, setting)
        for length, documents in ((8192, ""), (8192, "documents of 1,024"), (32768, ""))
        for setting in (documents, f"triton, {documents}" if documents else "triton")
    ),
    *(
        Point("decode round", "qwen2.5-7b", rows, length, setting)
        for rows, length, setting in (
            (1, 4096, ""),
            (32, 4096, ""),
            (128, 4096, ""),
            (256, 2048, ""),
            (16, 32768, ""),
            (128, 4096, "int8 weights and cache"),
        )
    ),
    Point("append round", "qwen2.5-7b", 8, 4096, "chunks of 512"),
    Point("append round", "qwen2.5-7b", 32, 4096, "chunks of 20"),
)


def seconds_of(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Returns the median seconds of calls, each waited for, after one that is not timed."""
    jax.block_until_ready(run())
    times: Times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


@functools.cache
def copy_bytes_per_s() -> float:
    """Returns the bytes per second, read and written, of the fastest of some copies of 2 GiB."""
    array = jax.random.bits(jax.random.key(0), (2**29,), jnp.uint32)
    shorts = jax.lax.bitcast_convert_type(array, jnp.uint16)
    flip = jax.jit(lambda array: array ^ 1)
    copies = (lambda: flip(shorts), lambda: flip(array), lambda: jnp.copy(array))
    return 2 * array.nbytes / min(map(seconds_of, copies))


@functools.cache
def product_flops_per_s() -> float:
    """Returns the operations per second of products of 8,192 x 8,192 in bf16."""
    size = 8192
    # Products of products are as large as their factors.
    array = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / 90
    multiply = jax.jit(lambda array: jax.lax.fori_loop(0, 20, lambda _, x: x @ array, array))
    return 20 * 2 * size**3 / seconds_of(lambda: multiply(array))


def model_of(name: str) -> ModelConfig:
    """Returns a preset that computes in bf16."""
    return dataclasses.replace(PRESETS[name], compute_dtype="bfloat16")


def vocab_size(point: Point) -> int:
    """Returns the entries of the model's embedding."""
    return VOCAB_SIZES[point.model.split("-")[0]]


def distance(found: Any, expected: Any) -> float:
    """Returns the norm of the difference over that of the reference, over all arrays of a tree."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    pairs = [[np.asarray(one, np.float64) for one in pair] for pair in pairs]
    above = sum(float(np.sum((left - right) ** 2)) for left, right in pairs)
    return (above / sum(float(np.sum(right**2)) for _, right in pairs)) ** 0.5


def paged(point: Point) -> dict[str, Any]:
    """Times the kernel over pages in one layer; its distance is from fp32 over the same numbers."""
    model, keys = model_of(point.model), jax.random.split(jax.random.key(1), 4)
    queries = 512 if "chunks" in point.setting else 1
    lengths = np.full(point.rows, point.length - queries)
    if "one row" in point.setting:
        lengths[0] = 8192 - queries
    latent = model.latent_size
    heads, size = (1, model.cached_size) if latent else (model.num_kv_heads, model.head_size)
    pages = -(-(lengths.max() + queries) // PAGE)
    number = point.rows * pages
    table = np.random.default_rng(0).permutation(number).reshape(point.rows, pages)
    shape = (point.rows, queries, heads, model.num_heads // heads, size)
    query = jax.random.normal(keys[0], shape, jnp.bfloat16)
    layer = LayerCache(
        key=jax.random.normal(keys[1], (number, heads, size, PAGE), jnp.bfloat16),
        value=None
        if latent
        else jax.random.normal(keys[2], (number, heads, PAGE, size), jnp.bfloat16),
    )
    if "int8" in point.setting:
        scales = jax.random.uniform(keys[3], (2, number, heads, PAGE), minval=0.005, maxval=0.015)
        whole = [jnp.round(side.astype(jnp.float32) * 40) for side in (layer.key, layer.value)]
        whole = [jnp.clip(side, -127, 127).astype(jnp.int8) for side in whole]
        layer = LayerCache(key=whole[0], value=whole[1], key_scale=scales[0], value_scale=scales[1])
    cached, counts = jnp.asarray(lengths, jnp.int32), jnp.full(point.rows, queries, jnp.int32)
    if "half idle" in point.setting:
        counts = counts.at[::2].set(0)
    inputs = (query, layer, jnp.asarray(table, jnp.int32), cached, counts)
    interpret = jax.default_backend() == "cpu"
    settings = {"scale": size**-0.5, "value_size": latent, "interpret": interpret}
    attend = jax.jit(functools.partial(paged_triton.attend, **settings))
    out = attend(*inputs)
    active = np.flatnonzero(counts)
    rows = sorted({0, 1 % point.rows, point.rows - 1} & {*active.tolist()})
    expected = [_attend_fp32(query, layer, latent, table, row, int(lengths[row])) for row in rows]
    read = int(np.sum(lengths[active] + queries)) * model.cached_size * layer.key.dtype.itemsize
    # Each call's queries depend on the one before, so that none is left out.
    missing = [(0, 0)] * 4 + [(0, size - out.shape[-1])]

    @jax.jit
    def many(query: Any, *others: Any) -> Any:
        def call(_: Any, query: Any) -> Any:
            return query + jnp.pad(attend(query, *others), missing)

        return jax.lax.fori_loop(0, 20, call, query)

    times = seconds_of(lambda: many(*inputs)) / 20
    return {
        "s": times,
        "of_copy": read / times / copy_bytes_per_s(),
        "distance": distance([out[row] for row in rows], expected),
    }


def _attend_fp32(
    query: jax.Array, layer: LayerCache, latent: int, table: np.ndarray, row: int, cached: int
) -> np.ndarray:
    """Returns a row's attention over its own pages in fp32, computed from the gathered pages.

    Without values they are the first `latent` numbers of keys.
    """
    key = np.asarray(layer.key[table[row]], np.float32)
    value = key[:, :, :latent].swapaxes(2, 3)
    if layer.value is not None:
        value = np.asarray(layer.value[table[row]], np.float32)
    if layer.key_scale is not None and layer.value_scale is not None:
        key = key * np.asarray(layer.key_scale[table[row]])[:, :, None, :]
        value = value * np.asarray(layer.value_scale[table[row]])[:, :, :, None]
    key_KHS = key.transpose(1, 2, 0, 3).reshape(key.shape[1], key.shape[2], -1)
    value_KSH = value.transpose(1, 0, 2, 3).reshape(value.shape[1], -1, value.shape[3])
    query_TKGH = np.asarray(query[row], np.float32)
    scores = np.einsum("TKGH,KHS->KGTS", query_TKGH, key_KHS) * query_TKGH.shape[-1] ** -0.5
    position_T = cached + np.arange(len(query_TKGH))
    scores = np.where(np.arange(scores.shape[-1]) <= position_T[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("KGTS,KSH->TKGH", weights, value_KSH)


def segments_of(point: Point) -> np.ndarray:
    """Returns the segment ids i32[rows, length] of a point's rows: one, or documents of 1,024."""
    width = 1024 if "documents" in point.setting else point.length
    row = 1 + np.arange(point.length) // width
    return np.broadcast_to(row, (point.rows, point.length)).astype(np.int32)


def rows_attention(point: Point) -> dict[str, Any]:
    """Times the kernel for training rows, forward and with its gradient, in one layer."""
    model, layout = model_of(point.model), make_layout(MeshShape(), row_axes=TRAINING_ROWS)
    asked = "triton" if "triton" in point.setting else "auto"
    choice = kernels.choose_kernel(asked, layout, model, point.length)
    heads, size = model.num_kv_heads, model.head_size
    shape = (point.rows, point.length, heads, model.num_heads // heads, size)
    keys = jax.random.split(jax.random.key(1), 4)
    query = jax.random.normal(keys[0], shape, jnp.bfloat16)
    sides = (point.rows, heads, point.length, size)
    key, value = (jax.random.normal(one, sides, jnp.bfloat16) for one in keys[1:3])
    weight = jax.random.normal(keys[3], shape, jnp.bfloat16)
    segments = jnp.asarray(segments_of(point))

    def attend(query: Any, key: Any, value: Any, kernel: kernels.Kernel = choice.kernel) -> Any:
        inputs = (query, key, value, segments)
        return kernels.attend_rows(kernel, layout, *inputs, scale=size**-0.5)

    def reference(query: Any, key: Any, value: Any) -> Any:
        order = jnp.broadcast_to(jnp.arange(point.length), segments.shape)
        positions = Positions(order=order, segment=segments)
        wide = (side.astype(jnp.float32) for side in (query, key, value))
        return attention(*wide, positions, positions, scale=size**-0.5)

    def gradient(function: Any) -> Any:
        def total(*inputs: Any) -> Any:
            return jnp.sum(function(*inputs).astype(jnp.float32) * weight.astype(jnp.float32))

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))

    inputs, forward, backward = (query, key, value), jax.jit(attend), gradient(attend)
    width = int(segments.max())
    # Two products, of which half of the scores count in each of the `width` documents.
    flops = 2 * point.rows * model.num_heads * size * point.length**2 / width
    forward_s = seconds_of(lambda: forward(*inputs))
    found: dict[str, Any] = {"kernel": choice.kernel, "s": forward_s}
    found["both_s"] = seconds_of(lambda: backward(*inputs))
    found["forward_of_products"] = flops / forward_s / product_flops_per_s()
    found["both_of_products"] = 3.5 * flops / found["both_s"] / product_flops_per_s()
    if point.length <= 8192:
        found["distance"] = distance(forward(*inputs), jax.jit(reference)(*inputs))
        found["gradient"] = distance(backward(*inputs), gradient(reference)(*inputs))
    return found


def engine_of(point: Point) -> Engine:
    """Returns the engine of a point, whose slots have all their pages."""
    is_int8 = "int8" in point.setting
    config = EngineConfig(
        model=model_of(point.model),
        vocab_size=vocab_size(point),
        num_slots=point.rows,
        num_rows=point.rows,
        chunk_size=512 if "chunks" in point.setting else 16,
        page_size=PAGE,
        rules=SlotRules(burst=BURST, end_of_turn_ids=(), truncates=False),
        seed=0,
        weight_dtype="int8" if is_int8 else "compute",
        kv_dtype="int8" if is_int8 else "compute",
    )
    return Engine(config, make_layout(MeshShape(), row_axes=ROLLOUT_ROWS))


def filled(engine: Engine, max_tokens: int) -> tuple[Any, Any]:
    """Returns random weights, and a state with random pages."""
    params = jax.tree.map(_random, engine.parameter_shapes, engine.parameter_shardings)
    state = engine.empty_state(max_tokens)
    jax.tree.map(lambda leaf: leaf.delete(), state.cache.pools)
    shapes = engine.state_shapes(max_tokens).cache.pools
    layers = jax.tree.map(_random, shapes, engine.state_shardings.cache.pools)
    cache = dataclasses.replace(state.cache, pools=layers)
    return params, dataclasses.replace(state, cache=cache)


def _random(shape: Any, where: Any) -> jax.Array:
    return _maker(shape.shape, shape.dtype, where)()


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, where: Any) -> Callable[[], jax.Array]:
    """Returns the program that makes a random array."""

    @functools.partial(jax.jit, out_shardings=where)
    def make() -> jax.Array:
        key = jax.random.key(len(shape))
        if dtype == jnp.int8:
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return jax.random.normal(key, shape, dtype) * 0.02

    return make


def play(engine: Engine, params: Any, state: Any, inputs: RoundInputs) -> tuple[Any, Times]:
    """Plays two rounds that are not timed and REPEATS that are. Returns a state and the seconds."""
    times = []
    for _ in range(2 + REPEATS):
        start_s = time.perf_counter()
        state, outputs = engine.play(params, state, inputs)
        times.append(time.perf_counter() - start_s)
        assert outputs.tokens is not None
    return state, times[2:]


def decode_round(point: Point) -> dict[str, Any]:
    """Times rounds of BURST decode steps on slots whose contexts are nearly full."""
    engine = engine_of(point)
    params, state = filled(engine, point.length)
    slots = np.arange(point.rows, dtype=np.int32)
    begin = point.length - (2 + REPEATS) * BURST
    place = functools.partial(jax.device_put, device=engine.row_sharding)
    state = dataclasses.replace(
        state,
        cached=place(np.full_like(slots, begin)),
        pending=place(1 + slots),
        active=place(slots >= 0),
        row=place(slots),
    )
    inputs = idle_inputs(point.rows, 16, 0, Sampling(), 0)
    read = {**params, "embed": []}, state.cache.pools
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
    state, times = play(engine, params, state, inputs)
    step_s = statistics.median(times) / BURST
    is_int8 = "int8" in point.setting
    sizes = sizes_of(point.model, "int8" if is_int8 else "compute")
    work = dataclasses.replace(workload(point, "none"), kv_itemsize=1 if is_int8 else 2)
    planned = decode_s(
        parse_topology(TOPOLOGY), sizes, work, MeshShape(), point.rows, point.length
    ).total
    return {
        "s": step_s,
        "tokens_s": point.rows / step_s,
        "of_copy": size / step_s / copy_bytes_per_s(),
        "planned_s": planned,
        "peak_gib": peak_bytes() / GIB,
    }


def append_round(point: Point) -> dict[str, Any]:
    """Times rounds that append a chunk to each slot, and decode nothing."""
    chunk = int(point.setting.split()[-1])
    engine = engine_of(point)
    params, state = filled(engine, point.length)
    inputs = idle_inputs(point.rows, 512, 0, Sampling(), 0)
    inputs.chunk[:] = np.random.default_rng(0).integers(1, 1000, inputs.chunk.shape)
    inputs.count[:] = chunk
    state, times = play(engine, params, state, inputs)
    seconds, tokens = statistics.median(times), point.rows * chunk
    products = 2 * tokens * parameters_of(point.model)
    return {
        "s": seconds,
        "tokens_s": tokens / seconds,
        "of_products": products / seconds / product_flops_per_s(),
    }


def parameters_of(name: str) -> int:
    """Returns the parameters of a preset's matrices in its layers."""
    model = PRESETS[name]
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size
    return model.num_layers * model.width * (heads + 3 * model.ffn_size)


def workload(point: Point, remat: Remat) -> Workload:
    """Returns the planner's record of a point."""
    return Workload(
        num_slots=point.rows,
        num_rows=point.rows,
        micro_batches=point.rows,
        remat=remat,
        logprob_chunk=512,
        chunk_size=16,
        append_tokens=append_tokens_for("gpu", PRESETS[point.model]),
        appended=0.0,
        page_size=PAGE,
        kv_itemsize=2,
        in_place_contexts=(1,),
    )


def learner_of(point: Point) -> tuple[Learner, TrainPlan]:
    """Returns the learner of a point by the clipped loss, and its plan: a row a micro-batch."""
    learner = Learner(
        model_of(point.model),
        TrainConfig(),
        ALGORITHMS["grpo"],
        vocab_size=vocab_size(point),
        temperature=1.0,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
    )
    remat: Any = point.setting.split(",")[0]
    return learner, TrainPlan(MeshShape(), point.rows, remat)


def update(point: Point) -> dict[str, Any]:
    """Times updates with AdamW and fp32 masters."""
    learner, plan = learner_of(point)
    state, batch = learner.first_state(plan.mesh), batch_of(point, learner.layout(plan.mesh))
    controls, times, losses = np.array([1e-6, 0.0], np.float32), [], []
    for _ in range(2 + REPEATS):
        start_s = time.perf_counter()
        state, metrics = learner.update(plan, state, batch, controls)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start_s)
    seconds, tokens = statistics.median(times[2:]), point.rows * point.length
    model, attended = model_of(point.model), point.length // int(batch.segment_ids.max())
    flops = 6 * tokens * (parameters_of(point.model) + model.width * learner.vocab_size)
    flops += 6 * tokens * model.num_layers * model.num_heads * model.head_size * attended
    sizes, work = sizes_of(point.model), workload(point, plan.remat)
    planned = train_parts(parse_topology(TOPOLOGY), sizes, work, plan.mesh, point.length).total
    footprint = train_footprint(sizes, work, plan.mesh, point.length, "gpu").total
    return {
        "s": seconds,
        "tokens_s": tokens / seconds,
        "of_products": flops / seconds / product_flops_per_s(),
        "planned_s": planned,
        "peak_gib": peak_bytes() / GIB,
        "planned_gib": footprint / GIB,
        "losses": losses,
    }


def kernels_of_update(point: Point) -> dict[str, Any]:
    """Profiles one update; its kernels with the most time, in milliseconds, and their calls."""
    learner, plan = learner_of(point)
    state, batch = learner.first_state(plan.mesh), batch_of(point, learner.layout(plan.mesh))
    controls = np.array([1e-6, 0.0], np.float32)
    for _ in range(2):
        state, _ = learner.update(plan, state, batch, controls)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start_s = time.perf_counter()
            jax.block_until_ready(learner.update(plan, state, batch, controls))
            seconds = time.perf_counter() - start_s
        [path] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    spent, calls = collections.Counter[str](), collections.Counter[str]()
    for plane in data.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                spent[event.name] += event.duration_ns / 1e6
                calls[event.name] += 1
    most = [(name, ms, calls[name]) for name, ms in spent.most_common(KERNELS)]
    return {"s": seconds, "kernels": most}


def peak_bytes() -> int:
    """Returns the most bytes of the device that this process has had in use, 0 on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def batch_of(point: Point, layout: Any) -> TrajectoryBatch:
    """Returns random rows, of which each document is an episode with a prompt of one token."""
    rng, segments = np.random.default_rng(0), segments_of(point)
    first = np.diff(segments, axis=1, prepend=0) > 0
    batch = TrajectoryBatch(
        tokens=rng.integers(1, 100, segments.shape).astype(np.int32),
        segment_ids=segments,  # pyright: ignore[reportArgumentType]
        turn_ids=np.where(first, 0, 1).astype(np.int32),  # pyright: ignore[reportArgumentType]
        logprobs=np.full(segments.shape, -11.8, np.float32),
        versions=np.zeros_like(segments),  # pyright: ignore[reportArgumentType]
        advantages=rng.normal(size=segments.shape).astype(np.float32),
    )
    return jax.device_put(batch, layout.activations("NS"))


def measure(point: Point) -> dict[str, Any]:
    """Measures a point in this process."""
    start_jax("auto", 1)
    functions: dict[str, Callable[[Point], dict[str, Any]]] = {
        "paged attention": paged,
        "attention of rows": rows_attention,
        "decode round": decode_round,
        "append round": append_round,
        "update": update,
        "kernels of an update": kernels_of_update,
    }
    if point.kind == "copy":
        return {"bytes_s": copy_bytes_per_s()}
    if point.kind.startswith("products"):
        return {"flops_s": product_flops_per_s()}
    return functions[point.kind](point)


_CELLS: dict[str, Callable[[Any], str]] = {
    "bytes_s": lambda one: f"{one / 1e12:.2f} TB/s",
    "flops_s": lambda one: f"{one / 1e12:.0f} TFLOP/s",
    "kernel": str,
    "s": lambda one: f"{1e3 * one:.2f} ms",
    "planned_s": lambda one: f"planned {1e3 * one:.2f} ms",
    "both_s": lambda one: f"with its gradient {1e3 * one:.2f} ms",
    "tokens_s": lambda one: f"{one:,.0f} tokens/s",
    "of_copy": lambda one: f"{one:.0%} of a copy's rate",
    "of_products": lambda one: f"{one:.0%} of products' rate",
    "forward_of_products": lambda one: f"forward {one:.0%} of products' rate",
    "both_of_products": lambda one: f"both {one:.0%}",
    "peak_gib": lambda one: f"{one:.1f} GiB",
    "planned_gib": lambda one: f"planned {one:.1f} GiB",
    "distance": lambda one: f"off by {one:.1e}",
    "gradient": lambda one: f"gradient off by {one:.1e}",
    "kernels": lambda most: "; ".join(f"{name} {ms:.1f} ms in {n}" for name, ms, n in most),
    "losses": lambda losses: " ".join(f"{loss:.5f}" for loss in losses[:3]),
}


def _cells(found: dict[str, Any]) -> Sequence[str]:
    return [", ".join(show(found[name]) for name, show in _CELLS.items() if name in found)]


def main() -> None:
    """Measures the points one after the other and prints the table."""
    header = "| what | model | rows | setting | found |"
    print_each("benchmarks.chip", __doc__ or "", header, POINTS, measure, _cells)


if __name__ == "__main__":
    main()
