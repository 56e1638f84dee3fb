# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Contexts cut over the `context` axis in a rollout: the same words, a part of the cache each."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from earl_jax.engine.engine import Engine
from earl_jax.models.attention.page_shares import PageShare, share_tokens
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_drafts
from earl_jax.models.kv_cache import place_pages
from earl_jax.models.parameters import init_parameters, parameter_specs, unstack_layers
from earl_jax.run.build import build_run
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import MeshShape, make_abstract_layout, make_layout
from tests.support import engines
from tests.support.caches import empty_cache
from tests.support.engines import NUM_SLOTS
from tests.support.hlo import COLLECTIVE, replica_groups
from tests.support.settings import make_config
from tests.support.shardings import resident_bytes
from tests.support.slots import (
    MAX_TOKENS,
    MODEL,
    VOCAB,
    Script,
    assert_same,
    check_logprobs,
    check_rows,
    converse,
    make_scripts,
    params,
)

# A chunk is cut over four, a page of eight tokens too; prompts are several chunks and pages long.
CHUNK = 4
CONFIG = dataclasses.replace(engines.CONFIG, chunk_size=CHUNK, page_size=8)
WHOLE, MIXED = MeshShape(data=8), MeshShape(data=2, context=2, tensor=2)


engine_on = functools.partial(engines.engine_on, config=CONFIG)


@functools.cache
def weights_on(shape: MeshShape):
    return engine_on(shape).load_params(params())


@functools.cache
def scripts() -> dict[int, Script]:
    """One episode a slot; prompts of one token to five chunks and a half."""
    made = make_scripts(NUM_SLOTS, turns=2)
    for slot, script in made.items():
        prompt = np.random.default_rng(slot).integers(1, VOCAB, 1 + 21 * slot // 15).tolist()
        made[slot] = dataclasses.replace(
            script, row=slot // 2 * 4 + slot % 2, messages=(tuple(prompt), *script.messages[1:])
        )
    return made


@functools.cache
def converse_on(shape: MeshShape):
    play = functools.partial(engine_on(shape).play, weights_on(shape))
    state = engine_on(shape).empty_state(MAX_TOKENS)
    return converse(play, state, scripts(), num_slots=NUM_SLOTS, chunk_size=CHUNK)


# What a device has.


def test_a_page_is_cut_in_the_middle():
    """By hand: of pages of 8 tokens the second of two devices has 4 to 7, and 12 to 15."""
    assert PageShare(1, 2).positions(jnp.arange(2), 4).tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    tokens = share_tokens(PageShare(1, 2), 6)
    assert (tokens.first, tokens.length) == (3, 3)
    # A word said alone is computed by all.
    assert not share_tokens(PageShare(1, 2), 1).is_cut


@pytest.mark.parametrize("length", [1, 31, 32, 1000])
def test_every_device_has_as_many_keys_of_any_context(length):
    """To less than a page: whatever a query looks back on, and so whatever a chunk costs."""
    pages = jnp.arange(1 + length // 32)
    seen = [int((PageShare(i, 4).positions(pages, 8) < length).sum()) for i in range(4)]
    assert sum(seen) == length
    assert max(seen) - min(seen) <= 8


def test_the_cache_is_cut_and_weights_are_not():
    def bytes_on(shape: MeshShape) -> tuple[int, int]:
        engine = engine_on(shape)
        cache = engine.state_shapes(MAX_TOKENS).cache.pools
        pages = resident_bytes(cache, engine.state_shardings.cache.pools)
        return pages, resident_bytes(engine.parameter_shapes, engine.parameter_shardings)

    # On half as many row shards there are twice the rows on each, and a half of each page.
    assert bytes_on(MeshShape(data=4, context=2)) == bytes_on(WHOLE)
    assert bytes_on(MIXED) == bytes_on(MeshShape(data=4, tensor=2))


def test_a_page_must_divide():
    with pytest.raises(ValueError, match="page_size is 8, .*context=16.* multiple of 16"):
        Engine(CONFIG, make_abstract_layout(MeshShape(context=16)))


# What is played.


def test_same_tokens_are_sampled_with_the_trainers_logprobs():
    """Behind prompts of several chunks and pages, of which only the last chunk is followed."""
    state, transcripts = converse_on(MIXED)
    assert_same(transcripts, converse_on(WHOLE)[1])
    check_logprobs(transcripts)
    check_rows(state.experience, transcripts, scripts())
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert placed == engine_on(MIXED).state_shardings
    assert max(len(script.messages[0]) for script in scripts().values()) > 2 * CONFIG.page_size


def test_collectives_stay_within_a_row_shard_and_none_is_a_permute():
    """Row shards decode unequally long, and a permute waits for every device.

    Over `context`, in each layer of a chunk queries, keys and values are gathered, the largest
    scores compared, and two sums scattered, but for the last layer, of which keys and values are
    all that is wanted; for a decoded token two all-reduces a layer. Over `tensor` what there is
    without `context`, and heads are not gathered.
    """
    text = engine_on(MIXED).lower_play(MAX_TOKENS).compile().as_text()
    lines = [line.strip() for line in text.splitlines() if COLLECTIVE.search(line)]
    found = collections.Counter()
    for line in lines:
        kind = re.search(r"\b(all-[a-z]+|reduce-scatter|collective-permute)", line.split(" = ")[1])
        # Devices next to each other differ in `tensor`, the innermost axis, where there is one.
        apart = {group[1] - group[0] for group in replica_groups(line)}
        found[kind and kind[1], *apart] += 1
        assert {len(group) for group in replica_groups(line)} == {2}, line
    layers, apart = MODEL.num_layers, MIXED.tensor
    expected = {
        ("all-gather", apart): 3 * layers - 1,
        ("all-reduce", apart): layers - 1 + 2 * layers,
        ("reduce-scatter", apart): 2 * (layers - 1),
        ("all-reduce", 1): 4 * layers,
        ("all-gather", 1): 1,
    }
    assert found == expected


@pytest.mark.slow
def test_every_token_is_read_as_on_one_device():
    """Two chunks, the second from the middle of a page on; windows, experts, an int8 cache."""
    model = ModelConfig(
        num_layers=1,
        width=16,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        ffn_size=16,
        windows=(6,),
        attention_softcap=20.0,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_size=8,
    )
    specs = parameter_specs(model, VOCAB)
    weights = jax.jit(lambda key: init_parameters(specs, key))(jax.random.key(0))
    weights = unstack_layers(weights, model.num_layers)
    layout = make_layout(MeshShape(context=4))
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (2, 24)))
    cache = empty_cache(model, 2, 32, 8, "int8")

    def read(parts, cache, tokens, cached, count):
        cache = dataclasses.replace(cache, parts=parts)
        logits, cache = forward_drafts(
            model, weights, cache, tokens, cached, count, layout=layout if parts > 1 else None
        )
        return logits, dataclasses.replace(cache, parts=1)

    pages = [
        place_pages(layer, lambda axes: P(*("context" if a == "T" else None for a in axes)))
        for layer in cache.pools
    ]
    placed = dataclasses.replace(cache, table=P(), pools=pages)
    cut = jax.shard_map(
        functools.partial(read, 4),
        mesh=layout.mesh,
        in_specs=(placed, P(), P(), P()),
        out_specs=(P(), placed),
        axis_names={"context"},
        check_vma=False,
    )
    sampled = []
    for program in (jax.jit(cut), jax.jit(functools.partial(read, 1))):
        now, found = cache, []
        for first, count in ((0, (12, 10)), (12, (12, 7))):
            cached = jnp.array([first, first and 10])
            logits, now = program(now, tokens[:, first : first + 12], cached, jnp.array(count))
            found += [logits[0], logits[1, : count[1]]]
        sampled.append(jnp.concatenate(found))
    assert np.ptp(sampled[1]) > 0.1
    np.testing.assert_allclose(*sampled, atol=1e-5)


# Which axes are manual.


def test_axes_of_size_1_are_manual_where_no_other_axis_is_left():
    rows, pages = ("data", "fsdp"), ("data", "fsdp", "context")
    pages_cut, heads_cut = MeshShape(data=2, context=4), MeshShape(data=4, tensor=2)
    assert make_abstract_layout(pages_cut).by_hand(pages) == set(MESH_AXES)
    assert make_abstract_layout(pages_cut).by_hand(rows) == set(rows)
    assert make_abstract_layout(heads_cut).by_hand(rows) == set(rows)
    # Then JAX constrains no result of an operation: only the engine does, its logits.
    text = Engine(CONFIG, make_layout(WHOLE)).lower_play(MAX_TOKENS).as_text()
    assert "manual_computation" in text
    assert text.count("sdy.sharding_constraint") <= 2


# The selector.


def test_a_rollout_considers_to_cut_long_contexts(tmp_path):
    """From 4,096 tokens a shard on, where the list of meshes is empty, chunks and pages divide."""
    overrides = ["selector.rollout_meshes=()", "model.num_kv_heads=2", "rollout.chunk_size=4"]
    overrides += ["rollout.episodes_per_step=16", "rollout.num_slots=16"]
    world = build_run(make_config({}, overrides), tmp_path / "tokenizer")
    assert {shape.context for shape in world.problem.meshes("rollout", 8191)} == {1}
    assert {shape.context for shape in world.problem.meshes("rollout", 8192)} == {1, 2}
    long = world.problem.meshes("rollout", 131_072)
    assert {str(shape) for shape in long if shape.context > 1} == {
        "data=4,context=2",
        "data=2,context=2,tensor=2",
        "data=2,context=4",
        "data=1,context=4,tensor=2",
    }
    named = ["selector.rollout_meshes=('data=1,context=8',)"]
    with pytest.raises(ValueError, match="rollout.chunk_size = 4 does not divide by context=8"):
        build_run(make_config({}, overrides + named), tmp_path / "tokenizer")
