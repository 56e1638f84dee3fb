# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Hardware by its data sheets, and bytes per device: by hand, as placed, and as JAX saves."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks
from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.rows import make_rows
from earl_jax.models.attention.kernels import Kernel
from earl_jax.models.attention.rows import BLOCK_SIZE
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import parameter_shapes, parameter_specs
from earl_jax.models.presets import PRESETS
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import (
    cache_token_bytes,
    device_bytes,
    kept_bytes,
    kept_width,
    page_bytes,
    parts_of,
    rollout_footprint,
    state_bytes,
    train_footprint,
    trainer_bytes,
)
from earl_jax.selector.hardware import hardware_of, parse_topology
from earl_jax.selector.memory import program_bytes
from earl_jax.selector.sizes import BLOCK_TOKENS, Parameter, Workload
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_abstract_layout, make_layout
from earl_jax.sharding.topology import CHIPS, make_topology
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import state_shapes, state_shardings
from tests.support.shardings import resident_bytes
from tests.support.updates import lowered_update

# Two layers of width 8, 4 heads on 2 key/value heads of size 4, a network of 16, 32 entries.
TINY = ModelConfig(
    num_layers=2, width=8, num_heads=4, num_kv_heads=2, head_size=4, ffn_size=16, windows=(6, 0)
)

# Of a layer: two norms of 8, queries and outputs of 8 x 16, keys and values of 8 x 8, three
# matrices of 8 x 16.
LAYER = 2 * 8 + 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16
NUMBERS = 2 * LAYER + 8 + 2 * 32 * 8
SIZES = model_sizes(TINY, 32, engine_dtype="float32")
WORK = Workload(
    num_slots=16,
    num_rows=16,
    micro_batches=2,
    remat="full",
    logprob_chunk=4,
    chunk_size=4,
    append_tokens=16,
    appended=1.0,
    page_size=4,
    kv_itemsize=4,
)
D1 = MeshShape()
D4T2 = MeshShape(data=4, tensor=2)
F4T2 = MeshShape(fsdp=4, tensor=2)
H100 = parse_topology("h100:1x8")


# Hardware.


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "memory_gib"),
    [
        ("v5e:16x16", 256, 64, 16),
        ("v5p:4x4x8", 128, 32, 95),
        ("v6e:4x4", 16, 4, 32),
        ("tpu7x:2x4x4", 64, 8, 96),
        ("h100:16x8", 128, 16, 79.6),
        ("h200:1x8", 8, 1, 140.4),
        ("b200:64x8", 512, 64, 179.1),
        ("gb200:18x4", 72, 18, 185),
        ("cpu:8", 8, 1, 2),
        ("cpu:2x4", 8, 2, 2),
    ],
)
def test_a_topology_is_so_many_devices_on_so_many_hosts(name, devices, hosts, memory_gib):
    hardware = parse_topology(name)
    assert (hardware.name, hardware.num_devices, hardware.num_hosts) == (name, devices, hosts)
    assert hardware.memory_bytes / 2**30 == pytest.approx(memory_gib, abs=0.05)
    assert hardware.usable_bytes <= hardware.memory_bytes


def test_every_chip_has_all_facts():
    for chip in CHIPS.values():
        hardware = hardware_of(make_topology(chip.example))
        assert hardware.host_memory_bytes > hardware.memory_bytes
        assert hardware.link_bytes_per_s > hardware.network_bytes_per_s
    # One of the two axes of a v5e's torus, both ways: half of its four links of 50 GB/s.
    assert parse_topology("v5e:4x4").link_bytes_per_s == 100e9


@pytest.mark.parametrize("name", ["v9:4x4", "tpu", "", "H900:1x8"])
def test_an_unknown_topology_is_answered_with_those_known(name):
    with pytest.raises(ValueError, match="'v5e:4x4', .*'b200:1x8', .*, or 'cpu:8'"):
        parse_topology(name)


@pytest.mark.parametrize("name", ["cpu:", "cpu:0", "cpu:2x", "cpu:1x2x4", "cpu:²"])
def test_virtual_devices_are_given_by_their_number(name):
    with pytest.raises(ValueError, match="by their number, as in 'cpu:8'"):
        parse_topology(name)


@pytest.mark.parametrize(
    ("topology", "gigabytes"),
    [
        ("v5e:16x16", 192),
        ("v5e:1x1", 48),
        ("v5p:4x4x8", 448),
        ("v6e:4x4", 720),
        ("v6e:1x2", 360),
        ("gb300:18x4", 960),
        ("h100:16x8", 2000),
        ("h200:1x4", 1000),
        ("b200:1x8", 2000),
    ],
)
def test_a_host_has_memory_by_its_number_of_devices(topology, gigabytes):
    assert parse_topology(topology).host_memory_bytes == gigabytes * 10**9


# Bytes.


def test_parameters_are_cut_as_the_rules_say():
    assert parts_of("LDF", F4T2) == 8
    assert parts_of("LD", F4T2) == 4
    assert parts_of("LH", F4T2) == 1
    assert parts_of("LEDF", MeshShape(fsdp=2, expert=4, tensor=3)) == 24
    assert device_bytes(SIZES.trained, D1) == device_bytes(SIZES.engine, D1) == 4 * NUMBERS
    # Each over tensor; norms have no axis that is cut there.
    assert device_bytes(SIZES.engine, MeshShape(tensor=2)) == 4 * (NUMBERS + 5 * 8) // 2


def test_a_token_of_context_has_a_key_and_a_value_in_every_layer():
    assert cache_token_bytes(SIZES, WORK, D1) == 2 * 2 * 2 * 4 * 4
    assert cache_token_bytes(SIZES, WORK, D4T2) == 2 * 2 * 2 * 4 * 4 // 2
    # A page has four of them, of one of its two groups of layers.
    assert page_bytes(SIZES, WORK, D1) == 4 * 64
    # In int8 with a scale of 4 bytes for each head.
    eight = dataclasses.replace(WORK, kv_itemsize=1)
    assert cache_token_bytes(SIZES, eight, D1) == 2 * 2 * 2 * (4 + 4)


def test_base_of_adapters_in_the_compute_type_is_not_copied():
    """128 numbers in fp32 have a copy in bf16, those in bf16 none."""
    base = Parameter("up", (2, 8, 8), "LDF", 4)
    sizes = dataclasses.replace(SIZES, compute_bytes=2, frozen=(base,))
    wide = train_footprint(sizes, WORK, D1, 12, "gpu")
    sizes = dataclasses.replace(sizes, frozen=(base._replace(itemsize=2),))
    narrow = train_footprint(sizes, WORK, D1, 12, "gpu")
    assert wide.weights - narrow.weights == 128 * 2
    assert wide.activations - narrow.activations == 128 * 2


# The first of two layers is dense; heads read rows of 6 + 2 numbers.
LATENT = {
    "num_kv_heads": 4,
    "windows": (),
    "latent_size": 6,
    "query_latent_size": 10,
    "rope_size": 2,
    "value_size": 3,
    "num_dense_layers": 1,
    "shared_ffn_size": 24,
    "router_scores": "sigmoid",
    "router_correction": True,
}


# The second of two layers attends.
STATES = {
    "windows": (),
    "attention_every": 2,
    "linear_value_heads": 4,
    "linear_key_size": 6,
    "linear_value_size": 3,
    "attention_gate": True,
    "shared_ffn_size": 24,
    "shared_ffn_gate": True,
}


@pytest.mark.parametrize(
    "family", ["dense", "mixture", "latents", "states", "adapters", "int8", "networks"]
)
def test_resident_bytes_are_those_of_placed_shapes(family):
    """On every mesh of eight devices, exactly."""
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
    has_experts = family in ("mixture", "latents", "states")
    model = dataclasses.replace(TINY, **(mixture if has_experts else {}))
    model = dataclasses.replace(model, **(LATENT if family == "latents" else {}))
    model = dataclasses.replace(model, **(STATES if family == "states" else {}))
    train = TrainConfig()
    if family == "adapters":
        train = dataclasses.replace(train, lora=dataclasses.replace(train.lora, rank=2))
    weight_dtype = "int8" if family == "int8" else "compute"
    networks = Networks(reference=family == "networks", critic=family == "networks")
    sizes = model_sizes(
        model, 32, engine_dtype="float32", weight_dtype=weight_dtype, train=train, networks=networks
    )
    meshes = [MeshShape(data=8), D4T2, F4T2, MeshShape(data=2, fsdp=2, tensor=2)]
    meshes += [MeshShape(data=2, fsdp=2, expert=2)] if has_experts else []
    meshes += [MeshShape(data=2, context=2, tensor=2)] if family != "states" else []
    for mesh in meshes:
        layout = make_abstract_layout(mesh, row_axes=TRAINING_ROWS)
        found = resident_bytes(
            state_shapes(model, train, 32, networks),
            state_shardings(model, train, 32, layout, networks),
        )
        # Counters, of updates and of each network's Adam.
        assert sum(trainer_bytes(sizes, mesh)) == found - (2 + networks.critic) * 4
        if mesh.fsdp > 1:
            continue
        engine = Engine(_engine_config(model, weight_dtype), make_abstract_layout(mesh))
        parameters = resident_bytes(engine.parameter_shapes, engine.parameter_shardings)
        cache = engine.state_shapes(12).cache.pools
        pages = resident_bytes(cache, engine.state_shardings.cache.pools)
        # Three pages of each row and group hold 12 tokens.
        groups = 1 if family in ("latents", "states") else 2
        number = 16 // mesh.data * groups * 3
        planned = rollout_footprint(sizes, WORK, mesh, 12, "cpu")
        assert (planned.weights, planned.cache) == (parameters, 0)
        assert number * page_bytes(sizes, WORK, mesh) == pages
        states, placed = engine.state_shapes(12).cache, engine.state_shardings.cache
        of_slots = resident_bytes(states.states, placed.states)
        assert of_slots == 16 // mesh.data * state_bytes(sizes, mesh)


def _engine_config(model, weight_dtype):
    return EngineConfig(
        model=model,
        vocab_size=32,
        weight_dtype=weight_dtype,
        num_slots=16,
        num_rows=16,
        chunk_size=4,
        rules=SlotRules(burst=4, end_of_turn_ids=(0,)),
        seed=0,
        page_size=4,
    )


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    ("num_slots", "num_rows", "num_players"),
    [(16, 16, 1), (16, 16, 8), (16, 16, 2), (9, 16, 1), (6, 12, 1), (16, 15, 1)],
)
def test_spare_rows_are_planned_as_the_engine_allocates_them(
    num_slots, num_rows, num_players, batches
):
    """As the engine's rows, on eight devices with slots that may divide by none of them."""
    work = dataclasses.replace(
        WORK, num_slots=num_slots, num_rows=num_rows, num_players=num_players
    )
    parts = {"num_rows": num_rows, "num_slots": num_slots, "num_devices": 8}
    each = {name: number // num_players for name, number in parts.items()}
    rows = make_rows(**each, batches=batches)
    planned = num_rows * batches + work.spare_rows(MeshShape(tensor=8))
    assert planned == num_players * rows.total


def test_kinds_add_up_and_gradients_are_as_large_as_parameters():
    planned = train_footprint(SIZES, WORK, F4T2, 8, "gpu")
    assert planned.weights == device_bytes(SIZES.trained, F4T2)
    # In fp32 the sum of those of micro-batches, and of one.
    assert planned.gradients == 2 * planned.weights
    assert planned.optimizer == 2 * planned.weights
    assert planned.total == sum(dataclasses.asdict(planned).values())
    assert planned.cache == 0


def test_inputs_in_host_memory_are_those_that_full_remat_keeps_on_the_device():
    full, offload = (dataclasses.replace(WORK, remat=remat) for remat in ("full", "offload"))
    kept = kept_bytes(SIZES, full, D1, 64)
    # A micro-batch's tokens, a number of the stream's width in each layer.
    tokens = WORK.num_rows // WORK.micro_batches * 64
    assert kept == tokens * TINY.num_layers * TINY.width * SIZES.compute_bytes
    assert kept_bytes(SIZES, offload, D1, 64) == kept
    on_device = [train_footprint(SIZES, work, D1, 64, "gpu") for work in (full, offload)]
    assert on_device[0].total - on_device[1].total == kept


def test_a_stream_takes_the_sum_of_gradients_and_a_teacher_its_own_pass():
    work = dataclasses.replace(WORK, micro_batches=1, num_rows=4)
    alone, streamed = (
        train_footprint(SIZES, dataclasses.replace(work, has_stream=each), D1, 8, "gpu")
        for each in (False, True)
    )
    assert streamed.gradients - alone.gradients == 4 * NUMBERS
    # A thousand times as wide: its layers and its head are more than all of an update.
    teacher = dataclasses.replace(TINY, width=8000)
    networks = Networks(reference=True, teacher=(teacher, 32))
    sizes = model_sizes(TINY, 32, engine_dtype="float32", networks=networks)
    alone = model_sizes(teacher, 32, engine_dtype="float32")
    assert sizes.teacher is not None
    assert dataclasses.asdict(sizes.teacher) == dataclasses.asdict(alone)
    found = train_footprint(sizes, work, F4T2, 8, "gpu")
    matrices = 8000 * (2 * 16 + 2 * 8 + 3 * 16) // 2
    assert found.weights > device_bytes(sizes.reference, F4T2) > 2 * 4 * matrices // 4
    # A layer's matrices and norms twice, the head, three times the logits of 4 tokens, and 8 tokens
    # of six streams of its width, two of its heads and four of its network.
    block = 6 * 8000 + 2 * 16 // 2 + 4 * 16 // 2
    numbers = 2 * (matrices + 2 * 8000) + 8000 * 32 // 2 + 3 * 4 * 32 // 2 + 8 * block
    assert found.activations == 4 * numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("networks", "ema_decay"), [(Networks(reference=True), 0.9), (Networks(critic=True), 0.0)]
)
def test_an_update_takes_what_xla_says(networks, ema_decay):
    """Without remat, within the planner's error for fp32; a critic keeps activations too."""
    model = dataclasses.replace(TINY, num_layers=4, width=256, num_heads=4, head_size=64)
    model = dataclasses.replace(model, ffn_size=768, windows=(0,))
    rows, length, vocab_size = 4, 512, 2048
    layout = make_layout(D1, row_axes=TRAINING_ROWS)
    config = TrainConfig(ema_decay=ema_decay)
    lowered = lowered_update(
        model,
        config,
        layout,
        vocab_size,
        (rows, length),
        scored=("values", "returns") if networks.critic else (),
        algorithm=ALGORITHMS["ppo" if networks.critic else "grpo"],
        networks=networks,
    )
    found = program_bytes(lowered.compile())
    sizes = model_sizes(model, vocab_size, engine_dtype="float32", train=config, networks=networks)
    work = dataclasses.replace(
        WORK, num_rows=rows, micro_batches=1, remat="none", logprob_chunk=512
    )
    planned = train_footprint(sizes, work, D1, length, "cpu")
    assert planned.total == pytest.approx(found, rel=0.15)


# Activations that are kept for the backward pass.

VOCAB = 64
SMALL = {"width": 256, "num_heads": 4, "num_kv_heads": 2, "head_size": 128, "ffn_size": 512}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128}
FAMILIES = ["qwen2.5-7b", "qwen3-8b", "gemma3-12b", "qwen3-30b-a3b", "olmo3-7b"]
# Of latent attention, every head of which has a key and a value.
LATENTS = {"num_kv_heads": 4, "latent_size": 64, "rope_size": 32, "value_size": 96}
LATENTS |= {"query_latent_size": 80, "shared_ffn_size": 128, "num_dense_layers": 0}
# In bf16 all that differ in what a layer keeps, and those with arrays of fp32 in both types.
KEPT = [*((remat, preset, "bfloat16") for preset in FAMILIES for remat in ("none", "dots"))]
KEPT += [("none", "gemma3-12b", "float32")]
KEPT += [(remat, "qwen3-30b-a3b", "float32") for remat in ("none", "dots", "full")]


@pytest.mark.slow_except("none-qwen3-8b-bfloat16", "dots-qwen3-8b-bfloat16")
@pytest.mark.parametrize(("remat", "preset", "dtype"), KEPT)
def test_a_layer_keeps_what_jax_saves(preset, dtype, remat):
    """With a kernel, of long rows."""
    assert_it_keeps_what_jax_saves(preset, dtype, "splash", 512, remat)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_layer_keeps_as_much_of_our_own_attention(remat):
    # Jax 0.11 and later saves attention's result once, and not twice.
    more = 0.11 if jax.__version_info__ >= (0, 11) else 0.0
    assert_it_keeps_what_jax_saves("qwen3-8b", "float32", "blockwise", 512, remat, more)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_layer_with_sinks_and_biases_of_experts_keeps_as_much(remat):
    """By our own attention."""
    assert_it_keeps_what_jax_saves("gpt-oss-20b", "bfloat16", "blockwise", 512, remat)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_layer_keeps_as_much_of_our_kernels_for_gpus(remat):
    # Splash keeps its scaled queries too.
    assert_it_keeps_what_jax_saves("qwen3-8b", "bfloat16", "triton", 512, remat, 0.11)


@pytest.mark.slow_except("dots-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_layer_of_latents_keeps_what_jax_saves(remat, dtype):
    """With queries from a latent, and a network beside the experts."""
    assert_it_keeps_what_jax_saves("moonlight-16b-a3b", dtype, "splash", 512, remat)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_weights_of_rows_of_one_block_are_kept(dtype):
    assert BLOCK_TOKENS == BLOCK_SIZE
    assert_it_keeps_what_jax_saves("qwen2.5-7b", dtype, "blockwise", BLOCK_SIZE, "none")


def assert_it_keeps_what_jax_saves(
    preset: str, dtype: str, kernel: Kernel, length: int, remat: Remat, more: float = 0.0
) -> None:
    """Within 2 %: what there is of a head or a token and not of its width is left out.

    By the share `more` it may keep less.
    """
    model = dataclasses.replace(PRESETS[preset], **SMALL, compute_dtype=dtype)
    model = dataclasses.replace(model, **(EXPERTS if model.num_experts else {}))
    model = dataclasses.replace(model, **(LATENTS if model.latent_size else {}))
    sizes = model_sizes(model, VOCAB, engine_dtype=dtype)
    computed = kept_width(sizes, MeshShape(), length, remat) * jnp.dtype(dtype).itemsize
    # Of more rows and more layers, so that neither weights count nor what is there once.
    grown = {
        layers: saved_bytes(model, kernel, layers, 4, length, remat)
        - saved_bytes(model, kernel, layers, 2, length, remat)
        for layers in (6, 12)
    }
    saved = (grown[12] - grown[6]) / (6 * 2 * length)
    assert 0.98 * saved <= computed <= (1.02 + more) * saved


def saved_bytes(
    model: ModelConfig, kernel: Kernel, num_layers: int, num_rows: int, length: int, remat: Remat
) -> int:
    """Returns the bytes saved for the gradient when so many layers see these rows."""
    model = dataclasses.replace(model, num_layers=num_layers)
    layout = make_layout(MeshShape(), jax.devices()[:1])

    def saved(params, tokens, segments):
        def forward(params):
            return forward_rows(model, layout, params, tokens, segments, kernel=kernel, remat=remat)

        return jax.vjp(forward, params)[1]

    rows = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
    shapes = jax.eval_shape(saved, parameter_shapes(parameter_specs(model, VOCAB)), rows, rows)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
