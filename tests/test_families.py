# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Families: computed as `transformers` computes them, on every mesh.

The folders under tests/reference, with what `transformers` makes of them, are written by
tests/reference/make_reference.py.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.models.checkpoints.families.family import PLAIN
from earl_jax.models.checkpoints.families.table import FAMILIES, family_of
from earl_jax.models.checkpoints.hf_read import load_parameters
from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.models.decoder import forward_chunk, forward_rows
from earl_jax.models.parameters import (
    init_parameters,
    parameter_specs,
    unstack_layers,
)
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import score_batch
from tests.support.caches import empty_cache
from tests.support.forward import next_scores, row_logits
from tests.support.references import (
    KINDS,
    NAMES,
    REFERENCE,
    checkpoint,
    loaded,
    mixed,
    reference,
)
from tests.support.slots import Script, converse

NUM_GREEDY = 64
# Of the references' tokens, where gradients are taken: beyond their windows.
LENGTH = 24


# One of each kind of layers that has a setting of its own.
OWN_SETTINGS = (
    "gemma3",
    "qwen3_moe",
    "olmo3",
    "smollm3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
)


@functools.cache
def make_logits(model: ModelConfig, mesh: MeshShape = MeshShape()):  # noqa: B008
    layout = make_layout(mesh, row_axes=TRAINING_ROWS)
    logits = jax.jit(functools.partial(row_logits, model, layout=layout))
    return lambda params, tokens_BT: np.asarray(logits(params, tokens_BT))


def test_every_family_has_a_reference_tied_and_untied():
    found = {(c.settings["model_type"], c.model.tie_embeddings) for c in map(checkpoint, NAMES)}
    assert found == {(name, tied) for name in FAMILIES for tied in (True, False)}
    assert {checkpoint(name).dtype for name in NAMES} == {"float32", "float16", "bfloat16"}
    size = sum(path.stat().st_size for path in REFERENCE.rglob("*") if path.is_file())
    assert size < 8e6


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_family_states_what_differs_from_plain_layers(family):
    plain = ModelConfig()
    assert all(value != PLAIN.get(field) for field, value in family.layers.items())
    assert set(family.free) <= PLAIN.keys() - family.layers.keys()
    assert all(hasattr(plain, field) for field in family.fixed)
    assert bool(family.window_rope_key) == ("window_rope_theta" in family.free)


def test_a_model_without_settings_has_the_plain_layers_of_llama():
    assert family_of(ModelConfig()) is FAMILIES["llama"]
    assert FAMILIES["llama"].fixed == {field: getattr(ModelConfig(), field) for field in PLAIN}


@pytest.mark.parametrize("name", [*KINDS, "qwen2_tied", "qwen2_window"])
def test_logits_are_those_of_transformers(name):
    logits = make_logits(checkpoint(name).model)(loaded(name), reference(name)["tokens"])
    error = np.max(np.abs(logits - reference(name)["logits"]))
    print(f"{name}: largest error of a logit {error:.1e}")
    assert error <= 1e-4
    # Past the window, and past the length that rotation is stretched from.
    model, length = checkpoint(name).model, logits.shape[1]
    assert length > 2 * max(model.layer_windows)
    scaling, longest = model.rope_scaling, checkpoint(name).settings["max_position_embeddings"]
    linear = scaling.kind == "linear"
    original = longest / scaling.factor if linear else scaling.original_max_position
    assert scaling.factor == 1 or length > original


@functools.cache
def greedy(name: str) -> np.ndarray:
    """Returns the model's greedy tokens behind the reference's prompt, decoded with a cache."""
    model, prompt = checkpoint(name).model, reference(name)["prompt"]
    params = unstack_layers(jax.device_get(loaded(name)), model.num_layers)

    @jax.jit
    def decode(params, cache, prompt_BT):
        def one(carry, _):
            token_B, cached_B, cache = carry
            logits_BV, cache = forward_chunk(
                model, params, cache, token_B[:, None], cached_B, jnp.ones(1, jnp.int32)
            )
            token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
            return (token_B, cached_B + 1, cache), token_B

        count_B = jnp.full(1, prompt_BT.shape[1], jnp.int32)
        logits_BV, cache = forward_chunk(
            model, params, cache, prompt_BT, jnp.zeros(1, jnp.int32), count_B
        )
        first_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        _, rest = jax.lax.scan(one, (first_B, count_B, cache), length=NUM_GREEDY - 1)
        return jnp.concatenate([first_B, rest[:, 0]])

    return np.asarray(decode(params, empty_cache(model, 1, len(prompt) + NUM_GREEDY), prompt[None]))


@pytest.mark.slow_except("gemma3", "qwen3_moe", "gpt_oss")
@pytest.mark.parametrize("name", (*OWN_SETTINGS, "qwen3_5_moe"))
def test_greedy_decoding_with_a_cache_is_that_of_transformers(name):
    np.testing.assert_array_equal(greedy(name), reference(name)["continuation"])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers_live(name):
    """Computed by the `transformers` and torch that are here, as the references once were."""
    torch = pytest.importorskip("torch")
    if name.endswith("_mxfp4"):
        # `transformers` unpacks with it.
        pytest.importorskip("accelerate")
    from reference.make_reference import compute

    # More would only wait for each other, in models as small as these.
    torch.set_num_threads(1)
    given = checkpoint(name)
    live, _ = compute(REFERENCE / name, given.vocab_size)
    np.testing.assert_array_equal(live["prompt"], reference(name)["prompt"])
    logits = make_logits(given.model)(loaded(name), live["tokens"])
    error = np.max(np.abs(logits - live["logits"]))
    print(f"{name}: largest error of a logit {error:.1e}")
    assert error <= 1e-4
    np.testing.assert_array_equal(greedy(name), live["continuation"])


@pytest.mark.slow_except("gemma3", "qwen3_moe")
@pytest.mark.parametrize("name", (*OWN_SETTINGS, "qwen3_5_moe"))
def test_logits_are_those_of_transformers_on_a_mesh(name):
    """At every place, with rows for every shard."""
    given, mesh = checkpoint(name), mixed(name)
    layout = make_layout(mesh, row_axes=TRAINING_ROWS)
    tokens = reference(name)["tokens"]
    params, rows = load_parameters(given, layout), np.tile(tokens, (4, 1))
    logits = make_logits(given.model, mesh)(params, rows)
    for other, allowed in (
        (reference(name)["logits"], 1e-4),
        (make_logits(given.model)(loaded(name), tokens), 4e-5),
    ):
        assert np.max(np.abs(logits.reshape(4, *other.shape) - other)) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gemma3", MeshShape(data=4, tensor=2)),
        ("qwen3_moe", MeshShape(data=2, expert=2, tensor=2)),
        ("olmo3", MeshShape(data=2, tensor=2, context=2)),
        ("gpt_oss", MeshShape(expert=2, tensor=2, context=2)),
        ("deepseek_v3", MeshShape(data=2, expert=2, tensor=2)),
    ],
    ids=str,
)
def test_engine_samples_the_tokens_of_transformers_on_a_mesh(name, mesh):
    """A slot on each of four data shards or two on each of two, which begin one after the other."""
    given, slots = checkpoint(name), range(4)
    engine = Engine(
        EngineConfig(
            model=given.model,
            vocab_size=given.vocab_size,
            num_slots=len(slots),
            num_rows=len(slots),
            chunk_size=5,
            rules=SlotRules(burst=16, end_of_turn_ids=(given.vocab_size,)),
            seed=0,
            page_size=16,
        ),
        make_layout(mesh),
    )
    weights = unstack_layers(jax.device_get(loaded(name)), given.model.num_layers)
    weights = engine.load_params(jax.tree.map(jnp.asarray, weights))
    prompt = tuple(reference(name)["prompt"].tolist())
    _, transcripts = converse(
        functools.partial(engine.play, weights),
        engine.empty_state(len(prompt) + NUM_GREEDY),
        {slot: Script(seed=slot, row=slot, messages=(prompt,)) for slot in slots},
        num_slots=len(slots),
        temperature=dict.fromkeys(slots, 0.0),
        turn_limits=dict.fromkeys(slots, NUM_GREEDY),
        delays={slot: slot for slot in slots},
    )
    for slot in slots:
        assert transcripts[slot].turns() == [reference(name)["continuation"].tolist()]


def test_cached_decoding_in_chunks_equals_the_full_forward():
    """Over three pages a row; greedy decoding above is token by token."""
    name, size = "gemma3", 6
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    full = make_logits(model)(loaded(name), tokens)
    params = unstack_layers(jax.device_get(loaded(name)), model.num_layers)
    chunk = jax.jit(functools.partial(forward_chunk, model))
    cache = empty_cache(model, len(tokens), tokens.shape[1], page_size=16)
    for start in range(0, tokens.shape[1], size):
        counts = np.full(len(tokens), size, np.int32)
        logits, cache = chunk(
            params, cache, tokens[:, start : start + size], counts * 0 + start, counts
        )
        np.testing.assert_allclose(logits, full[:, start + size - 1], atol=2e-5)


@pytest.mark.slow_except("qwen3_moe")
@pytest.mark.parametrize("name", ("llama", "qwen2", *OWN_SETTINGS))
def test_every_setting_of_the_family_matters(name):
    """Without it the logits are others: the comparison above would have shown its absence."""
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    changes = {
        "rope_scaling": RopeScaling(),
        "windows": (),
        "window_rope_theta": 0.0,
        "attention_bias": False,
        "out_bias": False,
        "attention_sinks": False,
        "expert_bias": False,
        "query_key_norm": "",
        "no_rope_every": 0,
        "query_pre_attn_scalar": 0,
        "attention_softcap": 0.0,
        "final_softcap": 0.0,
        "norm_from_one": False,
        "post_norms": False,
        "activation": "silu",
        "scale_embeddings": False,
        "rope_interleaved": False,
        "shared_ffn_size": 0,
        "router_correction": False,
        "expert_groups": 1,
        "expert_scale": 1.0,
        "attention_gate": False,
        "shared_ffn_gate": False,
    }
    if model.has_states:
        changes["rope_size"] = 0
    if model.rope_scaling.score_mscale:
        changes["rope_scaling"] = dataclasses.replace(model.rope_scaling, score_mscale=0.0)
    if model.expert_groups > 1:
        changes["group_score"] = 3 - model.group_score
    if model.num_experts:
        other = not model.normalize_expert_weights
        changes |= {"normalize_expert_weights": other, "experts_per_token": 2}
    for field, value in changes.items():
        if getattr(model, field) == value:
            continue
        other = dataclasses.replace(model, **{field: value})
        logits = make_logits(other)(loaded(name), tokens)
        assert np.max(np.abs(logits - reference(name)["logits"])) > 0.1, field


def test_biases_begin_at_zero_and_norms_at_one():
    model = ModelConfig(attention_bias=True, query_key_norm="head")

    def init(model):
        specs = parameter_specs(model, 64)
        return jax.jit(lambda key: init_parameters(specs, key))(jax.random.key(0))

    params = init(model)
    assert params["layers"]["query_bias"].shape == (2, 2, 2, 16)
    for name in ("query_bias", "key_bias", "value_bias"):
        assert not np.any(params["layers"][name])
    for name in ("query_norm", "key_norm"):
        np.testing.assert_array_equal(params["layers"][name], np.ones((2, 16)))
    plain = init(ModelConfig())
    for name, leaf in plain["layers"].items():
        np.testing.assert_array_equal(leaf, params["layers"][name])


def gradients(name: str, mesh: MeshShape):
    """The mean log-prob of the reference's tokens, and its gradients."""
    given, layout = checkpoint(name), make_layout(mesh, row_axes=TRAINING_ROWS)
    tokens = np.tile(reference(name)["tokens"][:, :LENGTH], (4, 1))

    def loss(params):
        hidden = forward_rows(given.model, layout, params, tokens, jnp.ones_like(tokens))
        softcap = given.model.final_softcap
        return -jnp.mean(next_scores(layout, params, hidden, tokens, softcap=softcap).logprobs)

    return jax.jit(jax.value_and_grad(loss))(load_parameters(given, layout))


@pytest.mark.slow_except("gpt_oss")
@pytest.mark.parametrize("name", (*OWN_SETTINGS, "qwen3_5"))
def test_gradients_are_finite_and_equal_on_a_mesh(name):
    """The other settings are in test_context.py."""
    loss, alone = gradients(name, MeshShape())
    sharded_loss, sharded = gradients(name, mixed(name))
    assert float(sharded_loss) == pytest.approx(float(loss), rel=1e-6)

    def check(path, left, right):
        # Where experts are chosen nothing is differentiated.
        is_trained = path[-1].key != "router_correction"
        assert np.all(np.isfinite(left)) and np.any(left) == is_trained, path
        np.testing.assert_allclose(left, right, atol=2e-5 * float(np.max(np.abs(left))) + 1e-6)

    jax.tree_util.tree_map_with_path(check, alone, sharded)


def test_the_trainer_scores_what_transformers_computes():
    """Two samples in a row, and log-probs in chunks: caps and windows as in the logits."""
    name = "gemma3"
    given, layout = checkpoint(name), make_layout(MeshShape())
    tokens, logits = reference(name)["tokens"], reference(name)["logits"]
    rows = np.concatenate([tokens[:1], tokens[1:]], axis=1)
    segments = np.repeat([[1, 2]], tokens.shape[1], axis=1)
    config = TrainConfig(logprob_chunk=40, remat="full")

    @jax.jit
    def score(params, tokens, segment_ids):
        batch = SimpleNamespace(tokens=tokens, segment_ids=segment_ids, allowed=())
        return score_batch(given.model, config, layout, 0.7, params, batch).logprobs

    found = np.asarray(score(loaded(name), rows, segments)).reshape(tokens.shape)
    expected = np.take_along_axis(
        scipy.special.log_softmax(logits[:, :-1] / 0.7, axis=-1), tokens[:, 1:, None], axis=2
    )[..., 0]
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-4)
