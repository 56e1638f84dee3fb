# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and gradients of every algorithm against torch autograd.

torch_reference.json has the inputs and what an implementation of its own, written from the papers,
makes of them in fp64 (tests/support/torch_reference.py). Here the same episodes go the way of a
run: credit on the host, packed rows, estimates and the update's sums on the devices, in fp32.
"""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.advantages import assign_credit, next_averages
from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import scored_passes
from earl_jax.models.config import ModelConfig
from earl_jax.models.logprobs import TokenScores
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import with_estimates
from earl_jax.train.update import Update, value_sums
from earl_jax.trajectory import Outcome, TrajectoryBatch, TurnState
from tests.support import ROOT

REFERENCE = json.loads((ROOT / "tests/support/torch_reference.json").read_text())
ROWS, LENGTH = 6, 16
# Of each token of the policy, in the unit of the file.
UNITS = {"logprobs", "entropy", "behaviour", "proximal", "reference", "values", "old_values"}
# Of the value itself, and of the largest of its kind.
RTOL, ATOL = 3e-5, 3e-6


def case_name(case: dict) -> str:
    keys = ("is_first", "entropy_coefficient", "correction")
    facts = [f"{key}={case[key]}" for key in keys if case.get(key)]
    settings = [f"{name}={value}" for name, value in case["args"].items()]
    return "-".join([case["algorithm"], case["batch"], *settings, *facts])


def make_algorithm(case: dict) -> Algorithm:
    entry = ALGORITHMS[case["algorithm"]]
    if not case["args"]:
        return entry
    settings = dataclasses.replace(entry.settings, **case["args"])
    settings.validate("config.algorithm_args")
    return dataclasses.replace(entry, settings=settings)


def make_outcome(number: int, episode: dict) -> Outcome:
    turns = episode["turns"]
    return Outcome(
        episode=number,
        group=episode["group"],
        role=episode["role"],
        turn_rewards=tuple(episode["rewards"]),
        stop_reason=episode["stop_reason"],
        num_turns=max(len(episode["rewards"]), *turns),
        num_tokens=len(turns),
        num_policy_tokens=np.count_nonzero(turns),
        sample_starts=(0,),
        versions=(),
        turn_states=tuple(TurnState(state, state) for state in episode["states"]),
    )


def pack(episodes: list[dict], counts: np.ndarray, advantages: np.ndarray):
    """Returns the facts of the tokens, [B,T] by name, and the places of the policy's, in order.

    Episodes that count stand beside each other in rows. All places that are not the policy's have
    facts that would be seen in any sum.
    """
    facts = {name: np.full((ROWS, LENGTH), 7.5, np.float32) for name in (*UNITS, "advantages")}
    names = ("turns", "segments", "groups")
    facts |= {name: np.zeros((ROWS, LENGTH), np.int32) for name in names}
    row, at, places = 0, 0, []
    for index in np.flatnonzero(counts):
        episode, length = episodes[index], len(episodes[index]["turns"])
        if at + length > LENGTH:
            row, at = row + 1, 0
        inside = slice(at, at + length)
        facts["segments"][row, inside] = facts["segments"][row].max() + np.array(episode["samples"])
        facts["turns"][row, inside] = episode["turns"]
        facts["groups"][row, inside] = 1 + episode["group"]
        own = at + np.flatnonzero(episode["turns"])
        for name in UNITS:
            facts[name][row, own] = np.multiply(episode[name], REFERENCE["unit"])
        facts["advantages"][row, own] = advantages[index, facts["turns"][row, own] - 1]
        places += [(row, place) for place in own]
        at += length
    return facts, tuple(np.array(places, int).reshape(-1, 2).T)


def make_batch(facts: dict[str, np.ndarray], scored: tuple[str, ...]) -> TrajectoryBatch:
    """The batch as it is before its first update, with what a scorer would have computed."""
    names = {"proximal": "proximal", "reference": "reference", "values": "old_values"}
    return TrajectoryBatch(
        tokens=facts["turns"],
        segment_ids=facts["segments"],
        turn_ids=facts["turns"],
        logprobs=facts["behaviour"],
        versions=facts["turns"],
        advantages=facts["advantages"],
        groups=facts["groups"],
        **{field: facts[name] for field, name in names.items() if field in scored},
    )


def check(found, expected, name: str) -> None:
    largest = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=ATOL * largest, err_msg=name)


def make_update(algorithm: Algorithm, correction: str, cap: float) -> Update:
    """The update of a run with these settings; its sums need no model."""
    return Update(
        ModelConfig(),
        TrainConfig(correction=correction or "auto"),
        make_layout(MeshShape()),
        vocab_size=8,
        temperature=1.0,
        algorithm=algorithm,
        importance_cap=cap,
    )


def check_loss(found: jax.Array, expected: float, gradient: jax.Array) -> None:
    """The sum of its terms, whose sizes are about those of the gradient, may be near 0."""
    atol = ATOL * float(jnp.abs(gradient).sum())
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=atol)


def check_tokens(found: jax.Array, places, expected: list, name: str) -> None:
    """`expected` are one value for each token of the policy, or two to be between.

    Places that are not the policy's have exact zeros.
    """
    values = np.array(found)
    if np.ndim(expected) == 2:
        expected = np.clip(values[places], *np.sort(expected, axis=0))
    check(values[places], expected, name)
    values[places] = 0.0
    assert not values.any(), name


def test_the_file_has_what_torch_computes(monkeypatch):
    """Needs torch, as by `uv run --with torch pytest tests/test_torch_losses.py`."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "tests/support")
    made = json.loads(json.dumps(importlib.import_module("torch_reference").numbers()))
    assert jax.tree.structure(made) == jax.tree.structure(REFERENCE)
    paths, written = zip(*jax.tree_util.tree_leaves_with_path(REFERENCE), strict=True)
    for path, found, other in zip(paths, jax.tree.leaves(made), written, strict=True):
        is_same = found == other or found == pytest.approx(other, rel=1e-6, abs=1e-12)
        assert is_same, f"{jax.tree_util.keystr(path)}: {found}, {other} in the file"


def test_every_algorithm_has_a_case():
    assert {case["algorithm"] for case in REFERENCE["cases"]} == ALGORITHMS.keys()


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=case_name)
def test_values_and_gradients_are_those_of_torch(case):
    algorithm, expected = make_algorithm(case), case["expected"]
    episodes = REFERENCE["batches"][case["batch"]]
    # Others compare a group whole; in a run all of its episodes have one role.
    if case["algorithm"] not in ("reinforce", "spiral"):
        episodes = [{**episode, "role": "x"} for episode in episodes]
    outcomes = [make_outcome(number, episode) for number, episode in enumerate(episodes)]
    averages = case.get("averages", {})
    credit = assign_credit(algorithm, outcomes, averages)
    assert credit.counts.tolist() == expected["counts"]
    found = next_averages(algorithm, outcomes, averages)
    assert found == pytest.approx(expected.get("averages", {}), rel=1e-6)

    facts, places = pack(episodes, *credit)
    corrects, updates = case["cap"] > 0, 1 if case.get("is_first") else 2
    scored = scored_passes(algorithm, updates=updates, corrects=corrects)
    batch = jax.tree.map(jnp.asarray, make_batch(facts, scored))
    if {"advantages", "returns"} & set(scored):
        batch = with_estimates(batch, algorithm)
    if "advantages" in expected:
        check(np.asarray(batch.advantages)[places], expected["advantages"], "advantages")

    update = make_update(algorithm, case["correction"], case["cap"])
    scores = TokenScores(jnp.asarray(facts["logprobs"]), jnp.asarray(facts["entropy"]))

    def mean_loss(logprobs):
        controls = jnp.asarray([0.0, case.get("entropy_coefficient", 0.0)])
        sums = update.loss_sums(scores._replace(logprobs=logprobs), batch, controls)
        return sums["loss"] / jnp.maximum(sums["divisor"], 1.0)

    loss, gradient = jax.value_and_grad(mean_loss)(scores.logprobs)
    check_loss(loss, expected["loss"], gradient)
    check_tokens(gradient, places, expected["gradient"], "gradient")
    if "value_loss" in expected:
        check_critic(algorithm, batch, facts, places, expected)


def check_critic(algorithm, batch, facts, places, expected) -> None:
    check_tokens(batch.returns, places, expected["returns"], "returns")

    def mean_loss(values):
        return value_sums(algorithm, values, batch)["value_loss"] / len(expected["returns"])

    loss, gradient = jax.value_and_grad(mean_loss)(jnp.asarray(facts["values"]))
    check_loss(loss, expected["value_loss"], gradient)
    check_tokens(gradient, places, expected["value_gradient"], "value gradient")
