# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention and DeepSeek's mixtures: pages of latents, routers by hand, what is refused.

Logits, cached decoding, gradients and exports are those of every family (test_families.py,
test_hf_write.py, test_export.py).
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from earl_jax.engine.engine import Engine
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models import decoder
from earl_jax.models.attention import paged_triton
from earl_jax.models.attention.folding import unfold
from earl_jax.models.attention.kernels import (
    PagesChoice,
    attend_rows,
    attention_over_pages,
    choose_pages_kernel,
)
from earl_jax.models.attention.page_shares import own_share
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_settings import read_settings
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_drafts, forward_rows
from earl_jax.models.kv_cache import LayerCache, PagedCache, place_pages
from earl_jax.models.moe.experts import route
from earl_jax.models.moe.routing import count_routing
from earl_jax.models.parameters import layers_with, stack_layers, uniform_stacks, unstack_layers
from earl_jax.models.presets import PRESETS, preset_named, preset_vocab_size
from earl_jax.placement.problem import workload
from earl_jax.selector.hardware import parse_topology
from earl_jax.serving.serve_flags import check_against_model, parse_flags
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from tests.support.caches import empty_cache
from tests.support.episodes import (
    CONFIG,
    LATENT,
    GrowPool,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
    weights,
)
from tests.support.forward import row_logits
from tests.support.references import (
    REFERENCE,
    assert_equal_trees,
    change_config,
    checkpoint,
    loaded,
    reference,
)
from tests.support.settings import make_config

NAMES = ["deepseek_v2", "deepseek_v3"]


@pytest.mark.slow_except("deepseek_v3-blockwise")
@pytest.mark.parametrize(
    ("name", "kernel"), [*((name, "blockwise") for name in NAMES), ("deepseek_v3", "triton")]
)
def test_reading_latents_equals_expanded_keys_and_values_at_every_token(name, kernel, monkeypatch):
    """Chunks of 7 tokens in pages of 8, then one by one: all log-probs of the whole vocabulary."""
    choice = PagesChoice(kernel, "of the test")
    monkeypatch.setattr(decoder, "choose_pages_kernel", lambda *given: choice)
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    full = jax.nn.log_softmax(jax.jit(functools.partial(row_logits, model))(loaded(name), tokens))
    params = unstack_layers(jax.device_get(loaded(name)), model.num_layers)

    @jax.jit
    def append(*given):
        logits, cache = forward_drafts(model, *given)
        return jax.nn.log_softmax(logits), cache

    cache = empty_cache(model, len(tokens), tokens.shape[1], page_size=8)
    start = 0
    for size in [7] * 5 + [1] * (tokens.shape[1] - 35):
        counts = np.full(len(tokens), size, np.int32)
        found, cache = append(
            params, cache, tokens[:, start : start + size], counts * 0 + start, counts
        )
        np.testing.assert_allclose(found, full[:, start : start + size], atol=3e-5)
        start += size


def test_pages_are_whole_on_every_device_of_the_tensor_axis_and_cut_over_context():
    made = engine(model=LATENT, mesh=MeshShape(data=2, context=2, tensor=2))
    [pool, _] = jax.tree.leaves(made.empty_state(32).cache.pools)
    pages, _, row, size = pool.shape
    assert (row, size) == (12 + 4, CONFIG.page_size)
    assert {shard.data.shape for shard in pool.addressable_shards} == {
        (pages // 2, 1, row, size // 2)
    }


@pytest.mark.parametrize(("length", "parts"), [(1, 1), (4, 2)])
def test_a_kernel_reads_latents_where_they_are_as_blockwise_attention(length, parts, monkeypatch):
    """Blocks of 4 tokens in pages of 8, splits of two pages; of whole pages or halves of them."""
    monkeypatch.setattr(paged_triton, "LATENT_TOKENS", 8 // parts // 2)
    monkeypatch.setattr(paged_triton, "TOKENS_A_SPLIT", 16)
    rng, cached = np.random.default_rng(0), np.array([31, 0, 7, 8, 25])
    counts = np.array([length, 1, 0, length, max(1, length - 2)])
    shape = (len(cached), length, 1, LATENT.num_heads, LATENT.cached_size)
    query = jnp.asarray(rng.normal(size=shape), jnp.float32)
    cache = empty_cache(LATENT, len(cached), 40, page_size=8)
    pool = jnp.asarray(rng.normal(size=cache.pools[0].key.shape), jnp.float32)
    table = jnp.asarray(rng.permutation(cache.num_pages).reshape(cache.table.shape), jnp.int32)
    cache = PagedCache(pools=[LayerCache(key=pool, value=None)], table=table)

    def run(kernel, cache, query, cached, counts):
        given = kernel, "cpu", LATENT, cache, cached, counts, length
        [reading], attend = attention_over_pages(*given)
        share = own_share(cache.parts)
        return attend(query, cache.pools[0], reading, None, share, cache.parts > 1, None)

    expected = jax.jit(functools.partial(run, "blockwise"))(cache, query, cached, counts)
    layout, whole = make_layout(MeshShape(context=parts), jax.devices()[:parts]), P()
    pages = place_pages(cache.pools[0], layout.activation_spec)
    by_kernel = jax.shard_map(
        functools.partial(run, "triton"),
        mesh=layout.mesh,
        in_specs=(PagedCache(pools=[pages], table=whole, parts=parts), *[whole] * 3),
        out_specs=P(None, "context"),
        check_vma=False,
    )
    out = jax.jit(by_kernel)(dataclasses.replace(cache, parts=parts), query, cached, counts)
    assert out.shape[-1] == LATENT.latent_size
    real, out = np.arange(length)[None] < counts[:, None], np.asarray(out)
    np.testing.assert_allclose(out[real], np.asarray(expected)[real], atol=2e-6)
    assert np.all(np.isfinite(out)) and not np.any(out[counts == 0])


# Four data shards of four slots, each with the latents whole on both of its devices.
MESH = MeshShape(data=4, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["host", "recompute"])
def test_episodes_play_alike_in_a_pool_that_holds_one_of_them(pool, preemption):
    """Prompts are taken over; episodes are preempted, and their latents come back."""

    def play(**settings):
        player = engine(model=LATENT, mesh=MESH)
        given = {"player": player, "params": weights(model=LATENT), "share_prefixes": True}
        return collect(pool, tasks(44), **given, **settings)

    whole, few = play(), play(pages=6, grow=GrowPool(most_pages=6), preemption=preemption)
    assert whole.stats.preempted_episodes == 0 < few.stats.preempted_episodes
    assert (few.stats.preempted_host_bytes > 0) == (preemption == "host")
    assert whole.stats.shared_tokens > 0
    assert_same_episodes(whole.trajectories, few.trajectories)
    check_rows(few, 44)


@pytest.mark.slow
def test_episodes_play_alike_with_the_kernel_for_gpus(pool, monkeypatch):
    """Interpreted, on each device's own heads of queries; prompts are taken over."""

    made, used = engine(model=LATENT, mesh=MESH), []

    def play(player):
        given = {"params": weights(model=LATENT), "share_prefixes": True}
        return collect(pool, tasks(44), player=player, **given)

    expected = play(made)

    def choose(setting, layout, model, page_size):
        used.append(layout.shape)
        return PagesChoice("triton", "of the test")

    monkeypatch.setattr(decoder, "choose_pages_kernel", choose)
    found = play(Engine(made.config, made.layout))
    assert set(used) == {MESH}
    assert_same_episodes(found.trajectories, expected.trajectories)
    check_rows(found, 44)


def test_values_smaller_than_keys_are_attended_to_by_every_kernel():
    """As by plain arithmetic; zeros behind values change nothing."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(2, 20, 3, 1, 8)), rng.normal(size=(2, 3, 20, 8)))
    value = rng.normal(size=(2, 3, 20, 5))
    scores = np.einsum("BTKGH,BKSH->BKGTS", query, key) * 0.3
    scores = np.where(np.tri(20, dtype=bool), scores, -np.inf)
    expected = np.einsum("BKGTS,BKSH->BTKGH", scipy.special.softmax(scores, axis=-1), value)
    inputs = [jnp.asarray(array, jnp.float32) for array in (query, key, value)]
    segments, layout = np.ones((2, 20), np.int32), make_layout(MeshShape())
    for kernel in ("blockwise", "splash"):
        attend = jax.jit(functools.partial(attend_rows, kernel, layout, scale=0.3))
        found = attend(*inputs, segments)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_rows_cut_over_context_score_as_whole_ones():
    """Beside experts and heads that are cut; the ring has values as long as keys."""
    name, mesh = "deepseek_v3", MeshShape(context=2, expert=2, tensor=2)
    given, layout = checkpoint(name), make_layout(mesh, row_axes=TRAINING_ROWS)
    tokens = np.tile(reference(name)["tokens"], (2, 1))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(*tokens.shape, 32)), jnp.float32)

    def total(layout, params):
        hidden = forward_rows(given.model, layout, params, tokens, jnp.ones_like(tokens))
        columns = jnp.moveaxis(hidden, 2, 0)
        whole = jnp.stack([unfold(layout, column, tokens.shape[1]) for column in columns], 2)
        return jnp.mean(whole * weights)

    def of(layout):
        program = jax.jit(jax.value_and_grad(functools.partial(total, layout)))
        return program(load_parameters(given, layout))

    loss, gradients = of(layout)
    expected, theirs = of(make_layout(MeshShape(), row_axes=TRAINING_ROWS))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, leaf in gradients["layers"].items():
        largest = float(np.max(np.abs(theirs["layers"][name])))
        np.testing.assert_allclose(
            leaf, theirs["layers"][name], atol=3e-5 * largest + 1e-7, err_msg=name
        )


# Routers.


def route_logits(model: ModelConfig, *logits: float, correction=None):
    given = np.array([logits], np.float32), np.eye(len(logits), dtype=np.float32), None, correction
    return jax.jit(functools.partial(route, model))(*given)


def test_corrections_choose_and_do_not_weigh():
    """Sigmoids 1/2, 1/3 and 1/4, of which corrections take the last two; weights are their own."""
    model = ModelConfig(
        num_experts=3, experts_per_token=2, router_scores="sigmoid", router_correction=True
    )
    logits, correction = np.log([1, 1 / 2, 1 / 3]), np.array([0.0, 0.4, 0.4], np.float32)
    weights, experts = route_logits(model, *logits, correction=correction)
    assert experts.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    real, identity = np.ones((1, 1), bool), np.eye(3, dtype=np.float32)
    count = jax.jit(functools.partial(count_routing, model))
    counted = count(logits.astype(np.float32)[None, None], identity, real, None, correction)
    assert counted.chosen.tolist() == [[0, 1, 1]]
    np.testing.assert_allclose(counted.probability, [[6 / 13, 4 / 13, 3 / 13]], rtol=1e-6)


# Layers that have other parameters than others.


def test_parameters_are_stacked_for_the_layers_that_have_them():
    """The first of three layers is dense."""
    layers = {"out": np.arange(3), "gate": np.array([7]), "router": np.array([8, 9])}
    assert layers_with("gate", 1, 3) == range(1) and layers_with("router", 2, 3) == range(1, 3)
    apart = unstack_layers({"layers": layers}, 3)["layers"]
    expected = [{"out": 0, "gate": 7}, {"out": 1, "router": 8}, {"out": 2, "router": 9}]
    assert jax.tree.map(int, apart) == expected
    again = stack_layers(apart)
    assert {name: leaf.tolist() for name, leaf in again.items()} == {
        name: leaf.tolist() for name, leaf in layers.items()
    }
    found = [(which, jax.tree.map(list, part)) for which, part in uniform_stacks(layers, 3, 1)]
    assert found == [
        (slice(0, 1), {"out": [0], "gate": [7]}),
        (slice(1, 3), {"out": [1, 2], "router": [8, 9]}),
    ]


# Checkpoints.


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(REFERENCE / "deepseek_v3_tied", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)},
        folder / "model.safetensors",
    )
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="layers.2.eh_proj.weight .* is not part of the model"):
        load_parameters(open_checkpoint(folder), make_layout(MeshShape()))
    path.write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    found = load_parameters(open_checkpoint(folder), make_layout(MeshShape()))
    jax.tree.map(np.testing.assert_array_equal, found, loaded("deepseek_v3_tied"))


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; only 'greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
        ("deepseek_v3", {"n_group": 3}, "num_experts is 8, which are not .*groups .3. groups"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_kv_heads is 2 .* every head has a key"),
        ("deepseek_v3", {"v_head_dim": 64}, "value_size is 64; it must be from 1 to"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "num_dense_layers is 3; it must be less"),
        ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts is None; it must be a whole"),
    ],
)
def test_checkpoints_with_unsupported_settings_are_refused(tmp_path, name, changed, words):
    settings = json.loads((REFERENCE / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(ValueError, match=words):
        open_checkpoint(tmp_path)


# The keys of published files that say what is computed.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
LEFT_OUT_BY_V2 = ("num_nextn_predict_layers", "quantization_config")
PUBLISHED: dict[str, dict] = {
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": DEEPSEEK_V3
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
        "max_position_embeddings": 131072,
    },
    "deepseek-v2-lite": {k: v for k, v in DEEPSEEK_V3.items() if k not in LEFT_OUT_BY_V2}
    | {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_its_preset(name):
    assert read_settings(PUBLISHED[name]) == (PRESETS[name], preset_vocab_size(name))


def test_a_kimi_k2_is_written_as_deepseek_v3(tmp_path):
    """Its weights are those of DeepSeek-V3, whose model_type `transformers` has code for."""
    folder = Path(shutil.copytree(REFERENCE / "deepseek_v3_tied", tmp_path / "model"))
    change_config(folder, model_type="kimi_k2")
    given = open_checkpoint(folder)
    params = load_parameters(given, make_layout(MeshShape()))
    save_checkpoint(
        tmp_path / "out",
        params,
        model=given.model,
        vocab_size=given.vocab_size,
        tokenizer=load_tokenizer(REFERENCE / "qwen2_tied"),
        dtype=given.dtype,
        max_positions=128,
        source=given,
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads((REFERENCE / "deepseek_v3_tied" / "config.json").read_text())
    again = load_parameters(open_checkpoint(tmp_path / "out"), make_layout(MeshShape()))
    assert_equal_trees(again, loaded("deepseek_v3_tied"))


def test_the_kernel_for_tpus_has_keys_and_values():
    choice = choose_pages_kernel("auto", make_layout(MeshShape()), LATENT, 128)
    assert choice.kernel == "blockwise"
    with pytest.raises(ValueError, match="attention is 'pallas_tpu', but .* pages hold latents"):
        choose_pages_kernel("pallas_tpu", None, LATENT, 128)


def test_gpus_read_latents_in_place_where_their_sizes_are_powers_of_two(monkeypatch):
    monkeypatch.setattr(Layout, "platform", "gpu")
    layout = make_layout(MeshShape(data=2, context=2, tensor=2))
    for name in ("deepseek-v2-lite", "deepseek-v3", "kimi-k2", "moonlight-16b-a3b"):
        assert choose_pages_kernel("auto", layout, preset_named(name), 128).kernel == "triton"
    for changes, words in (
        ({"latent_size": 384}, "power of two of at least 16, and config.model.latent_size is 384"),
        ({"rope_size": 8}, "power of two of at least 16, and config.model.rope_size is 8"),
        ({"compute_dtype": "float32"}, "in bfloat16, and the rollout computes in float32"),
    ):
        model = dataclasses.replace(preset_named("deepseek-v3"), **changes)
        choice = choose_pages_kernel("auto", layout, model, 128)
        assert choice.kernel == "blockwise" and choice.reason.endswith(words)
        with pytest.raises(ValueError, match=f"attention is 'triton', but .*{words}"):
            choose_pages_kernel("triton", layout, model, 128)


def test_the_planner_knows_where_latents_are_read_in_place():
    def contexts(topology: str, dtype: str = "model") -> tuple[int, ...]:
        rollout = {"page_size": 32, "compute_dtype": dtype}
        model = {"preset": "deepseek-v3", "compute_dtype": "bfloat16"}
        config = make_config({"model": model, "rollout": rollout})
        return workload(config, config.model, parse_topology(topology)).in_place_contexts

    assert contexts("h100:1x8") == (1, 2)
    assert contexts("v5e:2x4") == contexts("h100:1x8", "float32") == ()


def test_latents_in_int8_are_refused_and_their_weights_are_not():
    made = engine(model=LATENT)
    eight = Engine(dataclasses.replace(made.config, weight_dtype="int8"), made.layout)
    latent = eight.parameter_shapes["layers"][0]
    assert latent["latent"].values.dtype == jnp.int8 and latent["latent_up"].dtype == jnp.float32
    flags = parse_flags(["--model=x", "--kv_dtype=int8"])
    with pytest.raises(ValueError, match="--kv_dtype=int8, but this model caches latents"):
        check_against_model(flags, MeshShape(), "x", LATENT, 64, None)


def test_a_preset_with_fewer_layers_than_are_dense_is_refused():
    given = {"model": {"preset": "deepseek-v3", "num_layers": 3}}
    with pytest.raises(
        ValueError, match="num_dense_layers is 3; .* larger config.model.num_layers"
    ):
        make_config(given)
    given["model"]["num_layers"] = 4
    assert make_config(given).model.num_dense_layers == 3
