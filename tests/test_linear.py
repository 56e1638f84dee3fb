# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Linear attention: the gated delta rule, states of slots in the engine, what is refused.

Logits, cached decoding, gradients and exports are those of every family (test_families.py,
test_hf_write.py, test_export.py).
"""

import dataclasses
import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from earl_jax.config.file import make_config
from earl_jax.engine.engine import Engine, Policy
from earl_jax.engine.pages import Pool
from earl_jax.engine.relocation import relocate
from earl_jax.envs.text.conversation import Conversation
from earl_jax.models.attention.delta_rule import (
    CHUNK,
    Mixed,
    empty_linear_state,
    mix_cached,
    mix_rows,
)
from earl_jax.models.checkpoints.families.table import text_settings
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_settings import read_settings
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_chunk, forward_rows
from earl_jax.models.engine_parameters import engine_specs
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.parameters import (
    check_tensor_axis,
    is_spec,
    parameter_specs,
    unstack_layers,
)
from earl_jax.models.presets import PRESETS, preset_vocab_size
from earl_jax.models.projection import is_adapted, merged
from earl_jax.models.quantization import dequantize, is_quantized, quantize
from earl_jax.run.build import build_run
from earl_jax.serving.serve_flags import check_against_model, parse_flags
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.caches import empty_cache
from tests.support.environments import Talker
from tests.support.episodes import (
    LINEAR,
    GrowPool,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    forgetful_renderer,
    open_service,
    tasks,
    weights,
)
from tests.support.references import (
    REFERENCE,
    assert_equal_trees,
    checkpoint,
    loaded,
    reference,
)
from tests.support.scores import gaps

HEADS, GROUPS, KEY, VALUE, TAPS = 2, 2, 4, 3, 3


def inputs(rows: int, length: int, seed: int = 0, decay: float = 0.3) -> Mixed:
    rng = np.random.default_rng(seed)

    def draw(*shape: int, change=lambda drawn: drawn) -> jax.Array:
        return jnp.asarray(change(rng.normal(size=shape)), jnp.float32)

    return Mixed(
        query=draw(rows, length, HEADS, KEY),
        key=draw(rows, length, HEADS, KEY),
        value=draw(rows, length, HEADS, GROUPS, VALUE),
        decay=draw(rows, length, HEADS, GROUPS, change=lambda drawn: -decay * np.abs(drawn)),
        rate=draw(rows, length, HEADS, GROUPS, change=lambda drawn: 1 / (1 + np.exp(-drawn))),
        taps=(draw(HEADS, KEY, TAPS), draw(HEADS, KEY, TAPS), draw(HEADS, GROUPS, VALUE, TAPS)),
    )


def recurrent(mixed: Mixed, starts_BT) -> jax.Array:
    """Token by token (arXiv 2412.06464, eq. 10), from zeros where a segment starts."""

    def step(carry, token):
        before, state = carry
        (query, key, value, decay, rate), start = token
        before = [jnp.where(start.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in before]
        state = jnp.where(start[:, None, None, None, None], 0, state)
        windows = [
            jnp.concatenate([old, x[:, None]], axis=1)
            for old, x in zip(before, (query, key, value), strict=True)
        ]
        query, key, value = (
            jax.nn.silu(jnp.einsum("BI...,...I->B...", window, taps))
            for window, taps in zip(windows, mixed.taps, strict=True)
        )
        query, key = (x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (query, key))
        state = jnp.exp(decay)[..., None, None] * state
        error = value - jnp.einsum("BKH,BKGHO->BKGO", key, state)
        state += jnp.einsum("BKH,BKGO->BKGHO", key, rate[..., None] * error)
        out = jnp.einsum("BKH,BKGHO->BKGO", query * KEY**-0.5, state)
        return ([window[:, 1:] for window in windows], state), out

    rows = len(starts_BT)
    empty = empty_linear_state(rows, HEADS, GROUPS, KEY, VALUE, TAPS, jnp.float32)
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (mixed[:5], jnp.asarray(starts_BT)))
    _, out = jax.lax.scan(step, (list(empty.inputs), empty.matrix), tokens)
    return out.swapaxes(0, 1)


LENGTH = 2 * CHUNK + 20
# Starts of segments: within chunks, at the begin of one, one token behind another; and none.
SEGMENTS = ((3, 4, 50, CHUNK, CHUNK + 1), (2 * CHUNK + 7,), ())


WHOLE, CACHED = jax.jit(mix_rows), jax.jit(mix_cached)


def starts() -> np.ndarray:
    found = np.zeros((len(SEGMENTS), LENGTH), bool)
    for row, places in enumerate(SEGMENTS):
        found[row, [0, *places]] = True
    return found


def test_chunks_are_the_recurrence_and_begin_anew_with_segments():
    mixed = inputs(len(SEGMENTS), LENGTH)
    ids = np.cumsum(starts(), axis=1)
    whole = WHOLE(mixed, ids)
    np.testing.assert_allclose(whole, jax.jit(recurrent)(mixed, starts()), atol=3e-6)
    # The begin of the last row's neighbours is no matter to it.
    alone = jax.tree.map(lambda x: x[2:], mixed[:5])
    np.testing.assert_allclose(WHOLE(Mixed(*alone, mixed.taps), ids[2:]), whole[2:], atol=1e-6)


def test_gradients_of_chunks_are_those_of_the_recurrence():
    mixed, ids = inputs(len(SEGMENTS), LENGTH), np.cumsum(starts(), axis=1)
    weigh = jnp.asarray(np.random.default_rng(1).normal(size=(*ids.shape, HEADS, GROUPS, VALUE)))

    def total(mix):
        return jax.jit(jax.grad(lambda mixed: jnp.sum(mix(mixed) * weigh)))(mixed)

    found = total(lambda mixed: mix_rows(mixed, ids))
    expected = total(lambda mixed: recurrent(mixed, starts()))

    def check(left, right):
        assert np.isfinite(left).all()
        np.testing.assert_allclose(left, right, atol=2e-5 * float(np.max(np.abs(right))))

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("decay", [0.0, 100.0])
def test_equal_keys_and_full_rates_are_stable(decay):
    """Each token takes back what the last one wrote: what a key has is the last value.

    Powers of the inner products would be up to 10**18; and exponents as small as -100 to the chunk.
    """
    mixed = inputs(1, LENGTH, decay=decay)
    mixed = mixed._replace(
        query=np.ones_like(mixed.query),
        key=np.ones_like(mixed.key),
        rate=np.ones_like(mixed.rate),
        taps=jax.tree.map(
            lambda taps: np.tile(np.float32([0, 0, 1]), (*taps.shape[:-1], 1)), mixed.taps
        ),
    )
    out = WHOLE(mixed, np.zeros((1, LENGTH), np.int32))
    value = np.asarray(mixed.value)
    np.testing.assert_allclose(out, value / (1 + np.exp(-value)) * KEY**-0.5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_states_of_slots_go_on_where_they_were(seed):
    """Random parts of three slots' tokens, in tiles or a row a slot; one slot is used again.

    Every result is that of the whole sequence of its slot.
    """
    rng, slots, width = np.random.default_rng(seed), 3, 5
    most = 100
    # Slices are of arrays of NumPy: JAX would compile one for each number of tokens.
    mixed = jax.device_get(inputs(slots, most, seed))
    whole = np.asarray(WHOLE(mixed, np.zeros((slots, most), np.int32)))
    state = empty_linear_state(slots, HEADS, GROUPS, KEY, VALUE, TAPS, jnp.float32)
    # Whatever a slot had before it begins counts for nothing.
    state = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), state)
    done = np.zeros(slots, np.int32)
    for number in range(14):
        if number == 7:
            done[1] = 0
        if number % 2:
            rows = np.arange(slots)
            counts = np.minimum(rng.integers(0, width + 1, slots), most - done)
            begin = done.copy()
        else:
            # Up to two tiles of a slot, the first of which may be short, and one of none.
            rows = np.array([0, 0, 1, 2, 2, 2], np.int32)
            counts = np.minimum(rng.integers(1, width + 1, 6), 3)
            counts[rng.integers(6)] = 0
            begin = np.array(
                [done[r] + counts[:i][rows[:i] == r].sum() for i, r in enumerate(rows)]
            )
        places = np.minimum(begin[:, None] + np.arange(width), most - 1)
        part = Mixed(*(x[rows[:, None], places] for x in mixed[:5]), mixed.taps)
        # What is behind a row's tokens is no matter.
        out, state = CACHED(
            part,
            state,
            jnp.asarray(begin, jnp.int32),
            jnp.asarray(counts, jnp.int32),
            None if number % 2 else jnp.asarray(rows, jnp.int32),
        )
        out = np.asarray(out)
        for row, slot in enumerate(rows):
            np.testing.assert_allclose(
                out[row, : counts[row]], whole[slot, places[row, : counts[row]]], atol=1e-5
            )
        np.add.at(done, rows, counts)


def test_segments_of_a_packed_row_score_as_rows_of_their_own():
    """The segments have 20, 1 and 19 tokens, with padding behind."""
    name = "qwen3_5"
    model, layout = checkpoint(name).model, make_layout(MeshShape())
    tokens = reference(name)["tokens"][:1]
    segments = np.repeat([1, 2, 3, 0], [20, 1, 19, 8])[None]

    @jax.jit
    def states(params, tokens, segments):
        return forward_rows(model, layout, params, tokens, segments)

    packed = np.asarray(states(loaded(name), tokens, segments))
    for number in (1, 2, 3):
        own = tokens[segments == number]
        alone = np.zeros((1, 20), np.int32)
        alone[0, : len(own)] = own
        is_real = (np.arange(20) < len(own)).astype(np.int32)[None]
        expected = np.asarray(states(loaded(name), alone, is_real))[0, : len(own)]
        np.testing.assert_allclose(packed[0, segments[0] == number], expected, atol=3e-5)


@pytest.mark.slow
def test_gradients_are_the_same_with_remat():
    name, layout = "qwen3_5", make_layout(MeshShape())
    tokens = reference(name)["tokens"]

    def gradients(remat):
        def total(params):
            model, ones = checkpoint(name).model, jnp.ones_like(tokens)
            return jnp.sum(forward_rows(model, layout, params, tokens, ones, remat=remat) ** 2)

        return jax.jit(jax.grad(total))(loaded(name))["layers"]

    plain = gradients("none")
    for again in (gradients("dots"), gradients("full")):
        for path, leaf in plain.items():
            bound = 1e-4 * float(np.max(np.abs(leaf))) + 1e-6
            np.testing.assert_allclose(again[path], leaf, atol=bound, err_msg=path)


# Adapters and int8.


def test_adapters_score_as_the_merged_model():
    """Beside every projection, each of which has a gradient."""
    name, layout, lora = "qwen3_5", make_layout(MeshShape()), LoraConfig(rank=2)
    given, tokens = checkpoint(name), reference(name)["tokens"][:, :20]
    specs = adapter_specs(parameter_specs(given.model, given.vocab_size), lora)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda spec: 0.1 * rng.normal(size=spec.shape).astype(np.float32), specs, is_leaf=is_spec
    )

    def states(params):
        return forward_rows(given.model, layout, params, tokens, jnp.ones_like(tokens))

    @jax.jit
    def adapted(adapters):
        def total(adapters):
            found = states(adapt(loaded(name), adapters, lora))
            return jnp.sum(jnp.sin(found)), found

        return jax.grad(total, has_aux=True)(adapters)

    policy = adapt(loaded(name), adapters, lora)
    merge = functools.partial(jax.tree.map, merged, is_leaf=is_adapted)
    whole = jax.jit(lambda policy: states(merge(policy)))(policy)
    gradients, found = adapted(adapters)
    np.testing.assert_allclose(found, whole, atol=1e-4)
    assert {f"linear_{each}" for each in ("query", "key", "value", "gate", "out")} < set(
        gradients["layers"]
    )
    jax.tree_util.tree_map_with_path(_assert_trained, gradients)


def _assert_trained(path, gradient):
    assert np.all(np.isfinite(gradient)) and np.max(np.abs(gradient)) > 1e-4, path


def in_int8(model: ModelConfig, params):
    """The engine's parameters, every matrix that can be as int8."""
    specs = engine_specs(model, len(params["embed"]), "int8")

    def converted(spec, leaf):
        return quantize(leaf, spec.axes, spec.inputs) if is_quantized(spec) else leaf

    convert = functools.partial(jax.tree.map, converted, specs, is_leaf=is_quantized)
    return jax.jit(convert)(params)


def test_int8_matrices_compute_as_the_dequantised_ones():
    name = "qwen3_next"
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    params = in_int8(model, unstack_layers(jax.device_get(loaded(name)), model.num_layers))
    left = {
        key
        for layer in params["layers"]
        for key, leaf in layer.items()
        if not is_quantized(leaf) and leaf.ndim > 1 and not key.endswith(("taps", "norm", "bias"))
    }
    assert left == {"router", "shared_router", "linear_rate", "linear_decay", "linear_log_decay"}
    rows, length = tokens.shape
    counts = jnp.full(rows, length, jnp.int32)
    chunk = jax.jit(functools.partial(forward_chunk, model))
    found, exact = (
        chunk(each, empty_cache(model, rows, length), tokens, counts * 0, counts)[0]
        for each in (
            params,
            jax.tree.map(
                lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf,
                params,
                is_leaf=is_quantized,
            ),
        )
    )
    np.testing.assert_allclose(found, exact, atol=1e-4)
    far = np.abs(jax.nn.log_softmax(found) - jax.nn.log_softmax(reference(name)["logits"][:, -1]))
    assert 1e-4 < far.mean() < 0.1


@pytest.mark.slow
def test_int8_matrices_and_pages_play_near_the_trainer(pool):
    exact = engine(model=LINEAR)
    config = dataclasses.replace(exact.config, weight_dtype="int8", kv_dtype="int8")
    params = in_int8(LINEAR, weights(model=LINEAR))
    rollout = collect(pool, tasks(16), player=Engine(config, exact.layout), params=params)
    check_rows(rollout, 16)
    far = [gap for own in gaps(rollout.trajectories, LINEAR) for _, gap in own]
    assert 1e-5 < np.mean(far) < 2e-2 and max(far) < 0.2


# Episodes.

MESH = MeshShape(data=4, tensor=2)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("preempts", [False, True])
def test_episodes_score_as_by_the_trainer(pool, preempts):
    """Slots are used again, prompts are chunked; with six pages they are preempted and read again.

    Preemption to the host and sharing of prompts are asked for, and not done.
    """
    changes = {"pages": 6, "grow": GrowPool(most_pages=6)} if preempts else {}
    given = {"share_prefixes": True, "preemption": "host", "keep_replies": True}
    player = engine(model=LINEAR, mesh=MESH)
    given |= {"player": player, "params": weights(model=LINEAR)}
    rollout = collect(pool, tasks(44), **given, **changes)
    check_rows(rollout, 44)
    stats = rollout.stats
    assert (stats.preempted_episodes > 0, stats.recomputed_tokens > 0) == (preempts, preempts)
    assert stats.shared_tokens == stats.preempted_host_bytes == 0
    assert max(gap for own in gaps(rollout.trajectories, LINEAR) for _, gap in own) < 5e-5


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_weights_change_while_episodes_play(pool, kv):
    """Behind "recompute" every log-prob is of the version's own states."""
    player = engine(model=LINEAR)
    service = open_service(pool, player=player, params=weights(model=LINEAR))
    service.submit(tasks(40))
    found, number = [], 0
    while service.is_busy:
        for finished in service.step():
            found.append(finished.trajectory)
            service.release(finished.row)
        number += 1
        if number == 3:
            policy = Policy(params=player.load_params(weights(1, model=LINEAR)), version=1)
            service.update_weights(policy, kv)
    own = [own for own in gaps(found, LINEAR) if own]
    mixed = [gap for each in own for v, gap in each if v == 1 and each[0][0] == 0]
    assert mixed and (service.stats.recomputed_tokens > 0) == (kv == "recompute")
    if kv == "recompute":
        assert max(gap for each in own for _, gap in each) < 5e-5
    else:
        assert max(gap for each in own for v, gap in each if v == each[0][0] == 0) < 5e-5


def test_tokens_sampled_behind_a_stop_are_in_no_state(pool):
    """With a burst of four as with one, where nothing is discarded."""

    def tell(burst: int):
        return collect(
            pool,
            tasks(12),
            lambda task: Talker(task.args["seed"]),
            params=weights(ends_turns=False, model=LINEAR),
            player=engine(burst=burst, model=LINEAR),
            burst=burst,
            max_tokens=96,
            max_turn_tokens=16,
            stop_strings=("12", "34", "5", "0"),
        )

    one, four = tell(1), tell(4)
    assert one.stats.recomputed_tokens == 0 == one.stats.discarded_tokens
    assert four.stats.discarded_tokens > 12 and four.stats.recomputed_tokens > 0
    assert_same_episodes(one.trajectories, four.trajectories)
    check_rows(four, 12)


def test_states_move_to_another_mesh_with_their_slots(pool):
    """Nothing is read again."""
    player, there = engine(model=LINEAR), engine(model=LINEAR, mesh=MESH)
    service = open_service(pool, player=player, params=weights(model=LINEAR))
    service.submit(tasks(24))
    found = []
    for number in itertools.count():
        if not service.is_busy:
            break
        for finished in service.step():
            found.append(finished.trajectory)
            service.release(finished.row)
        if number == 2:
            pages = 2 * service.session.pool.pages
            service.move(relocate(service.session, there, 32, Pool(4, pages)))
    assert service.stats.recomputed_tokens == 0 and len(found) == 24
    assert max(gap for own in gaps(found, LINEAR) for _, gap in own) < 5e-5


def test_a_new_sample_begins_with_no_state(pool):
    """A template that forgets makes a sample of every turn: none knows of the turns before."""
    episodes = collect(
        pool,
        tasks(16),
        player=engine(model=LINEAR),
        params=weights(model=LINEAR),
        max_tokens=96,
        new_conversation=lambda: Conversation(forgetful_renderer(), history="fork"),
    ).trajectories
    assert any(turn.forks for episode in episodes for turn in episode.turns)
    samples = []
    for episode in episodes:
        begins = [i for i, turn in enumerate(episode.turns) if i == 0 or turn.forks]
        for first, end in zip(begins, [*begins[1:], None], strict=True):
            samples.append(dataclasses.replace(episode, turns=episode.turns[first:end]))
    assert max(gap for own in gaps(samples, LINEAR) for _, gap in own) < 5e-5


def test_drafts_and_context_are_refused():
    made = engine(model=LINEAR)
    with pytest.raises(ValueError, match="context=2, .* not cut over context; use data"):
        Engine(made.config, make_layout(MeshShape(context=2)))
    given = ["model.preset=qwen3-next-80b-a3b", "rollout.preemption_host_gib=1"]
    with pytest.raises(ValueError, match="preemption_host_gib = 1.0 has no effect .* read again"):
        make_config({}, given)
    for flag, words in (
        ("--keep_replies", "--keep_replies has no effect on this model, .* states"),
        ("--num_draft_tokens=2", "num_draft_tokens=2, .* states do not go back"),
    ):
        with pytest.raises(ValueError, match=words):
            flags = parse_flags(["--model=x", flag])
            check_against_model(flags, MeshShape(), "x", LINEAR, 64, None)
    assert "are cut over context; use data" in str(check_tensor_axis(LINEAR, 64, 1, 1, 1, 2))
    small = {"preset": "qwen3.5-0.8b", "num_layers": 4, "width": 32, "ffn_size": 64}
    problem = build_run(make_config({"model": small}, [])).problem
    assert "are cut over context" in str(problem.rollout_obstacle(MeshShape(data=4, context=2)))
    assert problem.rollout_obstacle(MeshShape(data=4, tensor=2)) is None
    assert all(mesh.context == 1 for mesh in problem.meshes("rollout", 2**17))
    assert check_tensor_axis(LINEAR, 64, 2, 2) is None
    odd = dataclasses.replace(LINEAR, num_heads=3, num_kv_heads=3, width=36, ffn_size=36)
    assert check_tensor_axis(odd, 66, 3, 3) == "model.linear_key_heads = 2 does not divide by 3"


def test_states_are_cut_by_slots_and_heads_and_pages_are_of_layers_that_attend():
    made = engine(model=LINEAR, mesh=MESH)
    cache = made.empty_state(32).cache
    assert len(cache.pools) == len(cache.states) == 1
    [state] = cache.states
    slots = made.config.num_slots
    assert state.matrix.shape == (slots, 2, 2, 8, 6) and state.matrix.dtype == jnp.float32
    for leaf in jax.tree.leaves(state):
        # Heads are the first axis of matrices, and behind the inputs of the convolution.
        axis = 1 if leaf is state.matrix else 2
        [shape] = {shard.data.shape for shard in leaf.addressable_shards}
        assert (shape[0], shape[axis]) == (slots // 4, 1)


# Settings and checkpoints.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_every": 3}, "attention_every is 3; it must be at least 2 and divide"),
        ({"linear_value_heads": 3}, "linear_value_heads must be a multiple"),
        ({"windows": (4,)}, "windows is .4,.; models with layers of linear attention"),
        ({"rope_size": 3}, "rope_size is 3; rotary embeddings need an even size"),
        ({"conv_size": 1}, "conv_size is 1; it must be at least 2"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(LINEAR, **changes).validate()


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("qwen3_next", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; only \[\]"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "layer_types is .* every n-th"),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 3}, "attention_every is 3"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias is True; only False"),
    ],
)
def test_checkpoints_that_would_be_computed_otherwise_are_refused(tmp_path, name, changed, words):
    settings = json.loads((REFERENCE / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(ValueError, match=words):
        open_checkpoint(tmp_path)


def with_images(name: str, folder) -> None:
    """Writes the checkpoint as the text part of one that reads images, experts in one tensor."""
    shutil.copytree(REFERENCE / name, folder)
    text = json.loads((folder / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "vision_config": {}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    fused = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in range(text["num_hidden_layers"] if len(fused) < len(tensors) else 0):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{stem}{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{stem}gate_up_proj": np.concatenate([gate, up], 1), f"{stem}down_proj": down}
    renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in fused.items()}
    renamed |= {"model.visual.a": np.ones(3, "f4"), "mtp.b": np.ones(3, "f4")}
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_with_images_is_read(tmp_path, name):
    with_images(name, tmp_path / "model")
    given = open_checkpoint(tmp_path / "model")
    assert given.settings["model_type"] == f"{name}_text" and given.has_images
    layout = make_layout(MeshShape(fsdp=2, tensor=2))
    assert_equal_trees(load_parameters(given, layout), loaded(name))


# The keys of a published file that say what the text part computes.
PUBLISHED_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "rope_parameters": {
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
        },
        "tie_word_embeddings": False,
    },
}


def test_the_text_part_of_a_published_config_is_its_preset():
    text = text_settings(PUBLISHED_35B)
    assert text is not None
    name = "qwen3.5-35b-a3b"
    assert read_settings(text) == (PRESETS[name], preset_vocab_size(name))


def test_a_model_from_scratch_has_layers_of_both_kinds():
    model = ModelConfig(num_layers=4, attention_every=4)
    model.validate()
    assert [model.attends(layer) for layer in range(4)] == [False, False, False, True]
    assert model.paged_windows == (0,) and model.num_linear_layers == 3
