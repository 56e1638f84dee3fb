# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Every family's update and round as the compilers of real chips make them, where those are.

They are not in the lock's default: run these by hand behind a change of kernels, engine or trainer.

    uv run --python=3.12 --extra=tpu-topology --extra=gpu-topology --extra=tokamax \
        pytest -n0 -m slow tests/test_compile.py tests/test_kernels.py

The same at real sizes: benchmarks/compile.py.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.hlo import read_program
from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.models.attention import paged_tpu, paged_triton
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.engine_parameters import engine_shapes, engine_specs
from earl_jax.models.kv_cache import LayerCache
from earl_jax.models.presets import PRESETS
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from earl_jax.sharding.topology import make_topology
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import state_shapes, state_shardings
from tests.support.caches import empty_cache
from tests.support.compiled_publish import times_the_plan
from tests.support.compilers import need_compiler
from tests.support.hlo import COLLECTIVE
from tests.support.updates import lowered_update

MAX_TOKENS, SLOTS, VOCAB = 4096, 32, 1024
CHUNK, BURST = 16, 8
SMALL = {"num_layers": 2, "width": 256, "num_heads": 8, "num_kv_heads": 4, "head_size": 128}
SMALL |= {"ffn_size": 512, "compute_dtype": "bfloat16"}
FAMILIES = {
    name: dataclasses.replace(
        PRESETS[name], **SMALL, windows=(128, 0)[: len(PRESETS[name].windows)]
    )
    for name in ("qwen2.5-7b", "qwen3-8b", "llama3.1-8b", "mistral-7b", "gemma3-12b")
}
# As many experts as a burst has tokens: where XLA places arrays it takes those of the same numbers
# for one, and what counts a burst's tokens must not be cut over `expert`.
FAMILIES["qwen3-30b-a3b"] = dataclasses.replace(
    PRESETS["qwen3-30b-a3b"], **SMALL, num_experts=BURST, experts_per_token=2, expert_ffn_size=128
)
LATENTS = dataclasses.replace(
    PRESETS["deepseek-v2-lite"], **SMALL | {"num_kv_heads": 8, "head_size": 192}, num_experts=0
)
KIND = r"\b(all-reduce|all-gather)(?:-start)?\("
BOTH = [pytest.param(n, marks=need_compiler(n)) for n in ("v5e:2x4", "h100:1x8")]
# Each of two hosts with four TPUs reads the outputs of all slots, which are gathered once a round.
OF_OUTPUTS = {"v5e:2x4": {"all-gather": 1}, "h100:1x8": {}}


def cut(family: str, **axes: int) -> MeshShape:
    """Eight devices, over which everything that a token's layers hold is cut in four."""
    sizes = {"expert": 2, "tensor": 2} if FAMILIES[family].num_experts else {"tensor": 4}
    return MeshShape(**axes, **sizes)


every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def compiled_round(family: str, name: str, shape: MeshShape, draft: int = 0):
    ngram = 3 if draft else 0
    config = EngineConfig(
        model=LATENTS if family == "latents" else FAMILIES[family],
        vocab_size=VOCAB,
        num_slots=SLOTS,
        num_rows=SLOTS,
        chunk_size=CHUNK,
        page_size=128,
        rules=SlotRules(burst=BURST, end_of_turn_ids=(0,), ngram=ngram, draft=draft),
        seed=0,
    )
    layout = make_layout(shape, make_topology(name).devices())
    engine = Engine(config, layout)
    # Kernels ask it which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):  # pyright: ignore
        lowered = engine.lower_play(MAX_TOKENS)
    before = jax.config.jax_optimization_level
    if layout.platform == "tpu":
        # At full effort, minutes.
        jax.config.update("jax_optimization_level", "O1")
    try:
        return lowered.compile()
    finally:
        jax.config.update("jax_optimization_level", before)


def collectives(
    family: str, name: str, shape: MeshShape, draft: int = 0
) -> collections.Counter[str]:
    lines = compiled_round(family, name, shape, draft).as_text().splitlines()
    kinds = [re.search(KIND, line.split(" = ", 1)[1]) for line in lines if COLLECTIVE.search(line)]
    return collections.Counter(kind[1] if kind else "other" for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_without_a_tensor_axis_a_round_has_no_collective(name):
    assert collectives("qwen3-8b", name, MeshShape(data=8)) == OF_OUTPUTS[name]


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("name", BOTH)
def test_with_a_tensor_axis_a_round_has_those_of_its_layers_and_its_logits(family, name):
    """As on CPU (test_engine.py), for tiles, but their last layer, and for the loop over tokens."""
    counts = collectives(family, name, cut(family, data=2))
    num_layers = FAMILIES[family].num_layers
    own = collections.Counter({"all-reduce": 4 * num_layers, "all-gather": 1})
    assert counts == own + collections.Counter(OF_OUTPUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [cut("qwen3-8b", data=2), MeshShape(data=4, context=2)], ids=str)
@pytest.mark.parametrize("name", BOTH[1:])
def test_on_gpus_every_layer_of_a_round_reads_its_pages_with_our_kernel(name, shape):
    """In the pass of tiles, but its last layer, and in that of the loop over tokens.

    On a device's own heads, and on its part of the pages. The loop reads pages in splits, which a
    second kernel adds up.
    """
    text = compiled_round("qwen3-8b", name, shape, 0).as_text()
    calls = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"', text)
    assert len(calls) == 3 * FAMILIES["qwen3-8b"].num_layers - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH[1:])
def test_on_gpus_every_layer_of_a_round_reads_latents_with_our_kernel(name):
    """On a device's own heads of queries and its part of the pages; no pool is copied."""
    text = compiled_round("latents", name, MeshShape(data=2, context=2, tensor=2)).as_text()
    calls = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"', text)
    assert len(calls) == 3 * LATENTS.num_layers - 1
    pool = rf"bf16\[{SLOTS * MAX_TOKENS // 128 // 2},1,576,64\]"
    assert re.search(pool, text) and not re.search(pool + r"\S* (copy|transpose)\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH[:1])
def test_on_tpus_every_layer_of_a_round_reads_its_pages_with_our_kernel(name):
    """In the pass of tiles, but its last layer, and in that of the loop over tokens.

    No pool is copied.
    """
    text = compiled_round("qwen3-8b", name, MeshShape(data=8)).as_text()
    calls = re.findall(r'custom_call_target="tpu_custom_call"', text)
    assert len(calls) == 2 * FAMILIES["qwen3-8b"].num_layers - 1
    pool = rf"bf16\[{SLOTS * MAX_TOKENS // 128 // 8},4,128,128\]"
    assert re.search(pool, text) and not re.search(pool + r"\S* (copy|transpose)\(", text)


def ran_by(program, name: str):
    """The instructions of a computation and of those that it runs; a fusion is one instruction."""
    for each in program.computations[name].values():
        yield each
        if each.work in ("while", "conditional", "call", "async"):
            for called in each.called:
                yield from ran_by(program, called)


def decode_loop(text: str) -> list:
    """The instructions of a round's loop over tokens, in which slots may truncate."""
    program = read_program(text)
    loops = [each for each in program.instructions if each.kind == "while"]
    bodies = [list(ran_by(program, name)) for loop in loops for name in loop.called]
    (found,) = [body for body in bodies if any(each.kind == "conditional" for each in body)]
    return found


def matrices_in(instructions, model) -> list[str]:
    """The names of those that write an array as large as a matrix of the weights, in any order."""
    specs = engine_specs(model, VOCAB, "compute")
    shapes = jax.tree.leaves(engine_shapes(specs, model.compute_dtype))
    matrices = {tuple(sorted(leaf.shape)) for leaf in shapes if leaf.ndim > 1}
    names = "parameter get-tuple-element tuple bitcast while conditional opt-barrier".split()
    return [
        each.name
        for each in instructions
        if each.kind not in names
        and any(a.in_memory and tuple(sorted(a.shape)) in matrices for a in each.results)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_no_step_of_a_round_copies_or_transposes_a_weight(name):
    """On TPUs matrices are copied into another order in front of the loop, once a round."""
    text = compiled_round("qwen3-8b", name, MeshShape(data=8)).as_text()
    assert not matrices_in(decode_loop(text), FAMILIES["qwen3-8b"])


def shapes_on(device):
    sharding = SingleDeviceSharding(device)
    return lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def pages_of(shape, kv_dtype: str, num_pages: int, heads: int, size: int):
    """The keys and values of pages of 128 tokens."""
    pool = num_pages, heads
    scale = shape(jnp.float32, *pool, 128) if kv_dtype == "int8" else None
    key, value = shape(kv_dtype, *pool, size, 128), shape(kv_dtype, *pool, 128, size)
    return LayerCache(key=key, value=value, key_scale=scale, value_scale=scale)


def compiled_on(device, attend, query, layer, table):
    """`attend` of rows with this table of pages, and with numbers of cached and new tokens."""
    numbers = shapes_on(device)(jnp.int32, table.shape[0])
    with jax.default_device(device):
        return jax.jit(attend).lower(query, layer, table, numbers, numbers).compile()


V5E_AND_V6E = [pytest.param(n, marks=need_compiler(n)) for n in ("v5e:2x2", "v6e:2x2")]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
# A token, drafts, and a chunk; windows and caps; heads of 128 and 256.
@pytest.mark.parametrize(
    ("length", "heads", "group", "size", "window", "softcap"),
    [(1, 4, 7, 128, None, 0.0), (5, 8, 2, 256, 1024, 50.0), (512, 4, 7, 128, None, 0.0)],
)
@pytest.mark.parametrize("name", V5E_AND_V6E)
def test_the_kernel_over_pages_compiles_for_tpus(
    name, length, heads, group, size, window, softcap, kv_dtype
):
    device = make_topology(name).devices()[0]
    rows, pages = 8, 32
    shape = shapes_on(device)
    layer = pages_of(shape, kv_dtype, rows * pages, heads, size)

    def attend(query, layer, table, cached, counts):
        sizes = paged_tpu.shape_of(length, group, 128)
        works = paged_tpu.plan_works(sizes, table, cached, counts, 128, window)
        return paged_tpu.attend(
            query, layer, works, counts, scale=0.1, softcap=softcap, window=window
        )

    query = shape(jnp.bfloat16, rows, length, heads, group, size)
    compiled = compiled_on(device, attend, query, layer, shape(jnp.int32, rows, pages))
    assert "tpu_custom_call" in compiled.as_text()
    # Queries and results in the kernel's order, and the list; no pages, and no scores.
    queries = rows * max(16, length * group) * heads * size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * queries + 2**21


@pytest.mark.slow
@need_compiler("h100:1x1")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
# A token behind 32 pages, and a chunk behind 512: 65,536 tokens; windows and caps.
@pytest.mark.parametrize(
    ("length", "pages", "window", "softcap"),
    [(1, 32, None, 0.0), (1, 32, 1024, 50.0), (512, 512, None, 0.0), (512, 512, 1024, 50.0)],
)
def test_the_kernel_over_pages_compiles_for_gpus(length, pages, window, softcap, kv_dtype):
    device = make_topology("h100:1x1").devices()[0]
    rows, heads, group, size = 8, 4, 7, 128
    shape = shapes_on(device)
    layer = pages_of(shape, kv_dtype, rows * pages, heads, size)
    query = shape(jnp.bfloat16, rows, length, heads, group, size)
    attend = functools.partial(paged_triton.attend, scale=0.1, window=window, softcap=softcap)
    compiled = compiled_on(device, attend, query, layer, shape(jnp.int32, rows, pages))
    assert re.search(r'custom_call_target="__gpu\$xla\.gpu\.triton"', compiled.as_text())
    # Queries once more, and sums of each split and of all, in fp32; no pages, and no scores.
    splits = 4 + 1 if length == 1 else 1
    queries = rows * heads * max(16, length * group) * size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < (3 + 2 * splits) * queries + 2**21


@pytest.mark.slow
@need_compiler("h100:1x1")
# A token of 16 and of 128 heads of queries, drafts, and a chunk.
@pytest.mark.parametrize(("length", "heads"), [(1, 16), (1, 128), (5, 16), (512, 16)])
def test_the_kernel_over_pages_of_latents_compiles_for_gpus(length, heads):
    device = make_topology("h100:1x1").devices()[0]
    rows, pages, (latent, rope) = 8, 32, (512, 64)
    shape = shapes_on(device)
    layer = LayerCache(key=shape(jnp.bfloat16, rows * pages, 1, latent + rope, 128), value=None)
    query = shape(jnp.bfloat16, rows, length, 1, heads, latent + rope)
    attend = functools.partial(paged_triton.attend, scale=0.1, value_size=latent)
    compiled = compiled_on(device, attend, query, layer, shape(jnp.int32, rows, pages))
    assert re.search(r'custom_call_target="__gpu\$xla\.gpu\.triton"', compiled.as_text())
    # Queries once more, and sums of each split and of all, in fp32; no pages, and no scores.
    splits = 4 + 1 if length <= 8 and heads == 16 else 1
    queries = rows * max(16, length * heads) * (latent + rope) * 2
    assert compiled.memory_analysis().temp_size_in_bytes < (3 + 2 * splits) * queries + 2**21


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_round_that_guesses_tokens_has_the_same_collectives(name):
    counts = collectives("qwen3-8b", name, cut("qwen3-8b", data=2), draft=4)
    assert counts == collectives("qwen3-8b", name, cut("qwen3-8b", data=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_with_an_expert_axis_alone_a_round_adds_up_its_experts_and_no_more(name):
    """Attention, the embedding and the head are whole on every device of a row shard."""
    counts = collectives("qwen3-30b-a3b", name, MeshShape(data=2, expert=4))
    own = collections.Counter({"all-reduce": 2 * FAMILIES["qwen3-30b-a3b"].num_layers - 1})
    assert counts == own + collections.Counter(OF_OUTPUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("draft", [0, 4])
@pytest.mark.parametrize("name", BOTH)
def test_a_round_holds_the_cache_once(name, draft):
    analysis = compiled_round("qwen3-8b", name, MeshShape(data=8), draft).memory_analysis()
    model = FAMILIES["qwen3-8b"]
    layers = jax.eval_shape(lambda: empty_cache(model, SLOTS // 8, MAX_TOKENS)).pools
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    assert analysis.alias_size_in_bytes > cache
    assert analysis.temp_size_in_bytes < cache / 2


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("name", BOTH)
def test_an_update_compiles_and_each_device_holds_its_part_of_the_state(family, name):
    devices = make_topology(name).devices()
    layout = make_layout(cut(family, fsdp=2), devices, row_axes=TRAINING_ROWS)
    assert_an_update_compiles(family, layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3-12b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("name", BOTH)
def test_an_update_on_rows_that_are_cut_compiles(family, name):
    devices = make_topology(name).devices()
    layout = make_layout(cut(family, context=2), devices, row_axes=TRAINING_ROWS)
    assert_an_update_compiles(family, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "most"), [("qwen2.5-7b", 1.02), ("qwen3-30b-a3b", 1.15)])
@pytest.mark.parametrize("name", BOTH)
def test_publishing_sends_what_engines_lack_in_their_type_and_hardly_more(family, most, name):
    """From fsdp alone: parts change their axis and are gathered; none goes whole, none as fp32.

    An expert changes its axis twice, where once would do with other collectives than there are.
    """
    devices = make_topology(name).devices()
    source = make_layout(MeshShape(fsdp=8), devices, row_axes=TRAINING_ROWS)
    target = make_layout(cut(family, data=2), devices)
    assert 0.999 < times_the_plan(FAMILIES[family], VOCAB, source, target) < most


# By how much of the inputs a program of this platform is smaller.
TPU_AND_GPU = [("v5e:2x4", 0.7), ("h100:1x8", 0.9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [pytest.param(*c, marks=need_compiler(c[0])) for c in TPU_AND_GPU]
)
def test_layers_inputs_leave_the_device_for_its_host(name, least):
    """A row of 4,096 tokens has inputs of 32 layers in 64 MiB, of which a TPU gains 49."""
    model = dataclasses.replace(FAMILIES["qwen3-8b"], num_layers=32)
    layout = make_layout(MeshShape(fsdp=8), make_topology(name).devices(), row_axes=TRAINING_ROWS)
    full, offload = (
        lowered_update(model, TrainConfig(remat=remat), layout, VOCAB, (8, 4096))
        .compile()
        .memory_analysis()
        for remat in ("full", "offload")
    )
    kept = 32 * 4096 * model.width * 2
    assert full.host_temp_size_in_bytes == 0
    assert offload.host_temp_size_in_bytes == pytest.approx(kept, rel=0.05)
    assert full.temp_size_in_bytes - offload.temp_size_in_bytes > least * kept


def assert_an_update_compiles(family: str, layout: Layout) -> None:
    """For these devices, on TPUs with splash attention; each holds its part of the state, once."""
    model, config = FAMILIES[family], TrainConfig(remat="full")
    with jax.default_device(layout.mesh.devices.flat[0]):  # pyright: ignore
        chosen = choose_kernel("auto", layout, model, 1000).kernel
        assert layout.platform != "tpu" or chosen == "splash"
    shapes = state_shapes(model, config, VOCAB)
    shardings = state_shardings(model, config, VOCAB, layout)
    lowered = lowered_update(model, config, layout, VOCAB, (4, 1000))
    analysis = lowered.compile().memory_analysis()
    parts = jax.tree.map(
        lambda shape, where: 4 * math.prod(where.shard_shape(shape.shape)), shapes, shardings
    )
    # Arrays are padded to tiles, the batch is some KiB, and the state is donated.
    assert sum(jax.tree.leaves(parts)) <= analysis.argument_size_in_bytes
    assert analysis.argument_size_in_bytes < 1.1 * sum(jax.tree.leaves(parts)) + 2**18
    assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < 2**16
