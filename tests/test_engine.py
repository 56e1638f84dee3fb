# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine plays the same episodes on every mesh, and across changes of mesh or max tokens."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine, Policy, Session
from earl_jax.engine.relocation import relocate
from earl_jax.engine.round_inputs import idle_inputs
from earl_jax.models import decoder
from earl_jax.models.attention.kernels import PagesChoice
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from tests.support.caches import rows_of, whole_pages_on
from tests.support.engines import (
    CANDIDATES,
    CONFIG,
    NUM_ROWS,
    NUM_SLOTS,
    UNSHARDED,
    engine_on,
    scripts,
    weights_on,
)
from tests.support.hlo import COLLECTIVE, replica_groups
from tests.support.slots import (
    CHUNK,
    END,
    MAX_TOKENS,
    MAX_TURN_TOKENS,
    MODEL,
    RULES,
    assert_same,
    check_logprobs,
    check_rows,
    converse,
    params,
)


@functools.cache
def converse_on(shape: MeshShape):
    """The conversation on this mesh, from its start to its end."""
    play = functools.partial(engine_on(shape).play, weights_on(shape))
    return converse(play, engine_on(shape).empty_state(MAX_TOKENS), scripts(), num_slots=NUM_SLOTS)


def test_the_selector_may_return_four_meshes():
    """Shows that the tests below play on all meshes of these sizes."""
    assert [str(shape) for shape in CANDIDATES] == [
        "data=8",
        "data=4,tensor=2",
        "data=2,tensor=4",
        "data=1,tensor=8",
    ]


def collectives(shape: MeshShape) -> list[str]:
    text = engine_on(shape).lower_play(MAX_TOKENS).compile().as_text()
    return [line.strip() for line in text.splitlines() if COLLECTIVE.search(line)]


def test_a_round_over_several_processes_is_lowered_without_an_array(monkeypatch):
    """Devices to compile for hold none. Every process reads what all slots sampled."""
    monkeypatch.setattr(Layout, "spans_processes", True)
    monkeypatch.setattr("earl_jax.engine.engine.place", None)
    config = dataclasses.replace(CONFIG, seed=CONFIG.seed + 1)
    text = Engine(config, make_layout(MeshShape(data=4, tensor=2))).lower_play(MAX_TOKENS).as_text()
    assert '"result[1]", sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>' in text


@pytest.mark.parametrize(("truncates", "number"), [(False, 0), (True, 2)])
def test_a_round_branches_only_where_slots_may_truncate(truncates, number):
    """On GPUs the host reads the condition of each branch, at every decode step."""
    config = dataclasses.replace(CONFIG, rules=RULES._replace(truncates=truncates))
    text = Engine(config, make_layout(MeshShape())).lower_play(MAX_TOKENS).as_text()
    assert len(re.findall(r"stablehlo\.(?:case|if)\b", text)) == number


def test_without_a_tensor_axis_a_round_has_no_collective():
    assert collectives(MeshShape(data=8)) == []


def test_with_a_tensor_axis_no_collective_crosses_a_data_shard():
    """Shards decode unequally long, so that waiting for another one would be waiting for ever.

    Per forward pass: one all-reduce behind the embedding and two a layer, and one all-gather of the
    logits. A round has two: of the chunk, and of the loop over tokens.
    """
    shape = MeshShape(data=4, tensor=2)
    lines = collectives(shape)
    kinds = [re.search(r"\b(all-[a-z]+|collective-[a-z]+)", line.split(" = ")[1]) for line in lines]
    counts = collections.Counter(kind[1] if kind else "other" for kind in kinds)
    # Of the pass that appends, what stands behind the last layer's keys is not computed.
    assert counts == {"all-reduce": 4 * MODEL.num_layers, "all-gather": 1}
    shards = {tuple(range(first, first + shape.tensor)) for first in range(0, 8, shape.tensor)}
    for line in lines:
        assert replica_groups(line) == shards, line


@pytest.mark.slow_except("data=8", "data=4,tensor=2")
@pytest.mark.parametrize("shape", [*CANDIDATES[:2], CANDIDATES[-1]], ids=str)
def test_a_mesh_samples_the_same_tokens_with_the_trainers_logprobs(shape):
    """Episodes that move from mesh to mesh are in test_relocate.py."""
    state, transcripts = converse_on(shape)
    assert_same(transcripts, converse_on(UNSHARDED)[1])
    check_logprobs(transcripts)
    check_rows(state.experience, transcripts, scripts())
    ours = {script.row for script in scripts().values()}
    strangers = sorted(set(range(NUM_ROWS)) - ours)
    for field in jax.tree.leaves(state.experience):
        assert not np.asarray(field)[strangers].any()
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert placed == engine_on(shape).state_shardings


def test_the_conversation_is_worth_comparing():
    """Turns of every length, ended and cut, prompts in one chunk and in several."""
    _, transcripts = converse_on(UNSHARDED)
    turns = [turn for t in transcripts.values() for turn in t.turns()]
    assert {len(turn) for turn in turns} >= {1, 2, 3, MAX_TURN_TOKENS}
    assert {turn[-1] == END for turn in turns} == {True, False}
    messages = [len(message) for script in scripts().values() for message in script.messages]
    assert min(messages) < CHUNK < max(messages)


@pytest.mark.parametrize("pages", [None, 13])
def test_longer_rows_keep_every_number_and_add_zeros(pages):
    """With the pages that there are, and with more."""
    engine = engine_on(CANDIDATES[0])
    state, _ = converse_on(CANDIDATES[0])
    session = Session(
        engine=engine,
        policy=Policy(params=weights_on(CANDIDATES[0]), version=0),
        state=state,
        max_tokens=MAX_TOKENS,
        pages=whole_pages_on(engine, MAX_TOKENS),
    )
    grown = relocate(
        session, engine, MAX_TOKENS + 16, session.pool._replace(pages=pages or session.pool.pages)
    )
    after_all = grown.state
    assert jax.tree.map(lambda leaf: leaf.sharding, after_all) == engine.state_shardings
    assert after_all.cache.num_pages == 8 * (pages or 10)
    assert after_all.cache.table.shape == (NUM_SLOTS, 1, 6)
    for before, after in zip(
        rows_of(MODEL, state.cache), rows_of(MODEL, after_all.cache), strict=True
    ):
        for side, values in before.items():
            np.testing.assert_array_equal(after[side][:, :, : values.shape[2]], values)
    if pages:
        for pool in jax.tree.leaves(after_all.cache.pools):
            assert not np.asarray(pool).reshape(8, 13, -1)[:, 10:].any()
    rest = [dataclasses.replace(s, cache=None) for s in (state, after_all)]
    for before, after in zip(*map(jax.tree.leaves, rest), strict=True):
        widths = [(0, m - n) for n, m in zip(before.shape, after.shape, strict=True)]
        assert sum(width for _, width in widths) in (0, 16)
        np.testing.assert_array_equal(np.pad(np.asarray(before), widths), after)


def test_load_params_places_every_weight_and_changes_none():
    for shape in CANDIDATES:
        weights = weights_on(shape)
        assert jax.tree.map(lambda leaf: leaf.sharding, weights) == (
            engine_on(shape).parameter_shardings
        )
        for ours, theirs in zip(jax.tree.leaves(params()), jax.tree.leaves(weights), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_round_brings_one_small_array_to_the_host_and_reuses_the_state():
    engine, weights = engine_on(CANDIDATES[0]), weights_on(CANDIDATES[0])
    state = engine.empty_state(MAX_TOKENS)
    inputs = idle_inputs(NUM_SLOTS, CHUNK, 0, Sampling(), version=0)
    with HostByteCounter() as counter:
        after, report = engine.play(weights, state, inputs)
    # Tokens and log-probs of a burst, a count and a flag: 4 bytes each.
    assert counter.num_bytes == NUM_SLOTS * (2 * RULES.burst + 2) * 4
    assert not report.count.any() and not report.active.any()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.cache.pools, state.experience)))
    assert not np.asarray(after.experience.tokens).any()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_slots": 12}, "num_slots"), ({"num_rows": 20}, "episodes_per_step")],
)
def test_slots_and_rows_must_divide_over_the_data_axis(changes, field):
    layout = make_layout(MeshShape(data=8))
    with pytest.raises(ValueError, match=f"config.rollout.{field} is .*data=8.* multiple of 8"):
        Engine(dataclasses.replace(CONFIG, **changes), layout)


def test_a_compute_type_of_bfloat16_keeps_weights_and_cache_in_it():
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    engine = Engine(dataclasses.replace(CONFIG, model=model), make_layout(MeshShape(data=8)))
    types = {leaf.dtype for leaf in jax.tree.leaves(engine.parameter_shapes)}
    shapes = engine.state_shapes(MAX_TOKENS)
    types |= {leaf.dtype for leaf in jax.tree.leaves(shapes.cache.pools)}
    assert types == {jnp.dtype(jnp.bfloat16)}
    assert shapes.experience.logprobs.dtype == jnp.float32


@pytest.mark.slow
def test_a_round_with_a_kernel_for_chips_says_the_same(monkeypatch):
    """The kernel for GPUs, interpreted, on each device's own heads."""
    shape, used = MeshShape(data=4, tensor=2), []

    def choose(setting, layout, model, page_size):
        used.append(layout.shape)
        return PagesChoice("triton", "of the test")

    monkeypatch.setattr(decoder, "choose_pages_kernel", choose)
    engine = Engine(CONFIG, make_layout(shape))
    play = functools.partial(engine.play, engine.load_params(params()))
    state = engine.empty_state(MAX_TOKENS)
    state, transcripts = converse(play, state, scripts(), num_slots=NUM_SLOTS)
    assert set(used) == {shape}
    assert_same(transcripts, converse_on(UNSHARDED)[1])
    check_logprobs(transcripts)
    check_rows(state.experience, transcripts, scripts())
