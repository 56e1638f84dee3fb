# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What is sure to be too large is not compiled, and what could fit is."""

import re

import pytest
from test_placement import CUBE, D4T2, D8, GIVEN, LISTED, LONG, SHORT, trainer_bytes

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.estimates import (
    FAR,
    Estimate,
    enough_words,
    rollout_estimate,
    train_estimate,
)
from earl_jax.placement import Placement
from earl_jax.selector.choose import BudgetTooSmall, Option
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.throughput import ThroughputTable
from earl_jax.survival import _least_need
from earl_jax.world import World


@pytest.fixture(scope="module")
def world():
    """Of two meshes a stage; the first run of each room has a program a mesh."""
    return World(make_config(GIVEN | {"selector": LISTED | {"order": "listed"}}))


def calibrated(world, said):
    return Calibration(world, ThroughputTable(path=None, measurements={}), said.append)


def test_what_is_sure_by_hand():
    """A third of a figure may be its error; of what is given there is none."""
    assert FAR == 1.5
    estimate = Estimate(total=300, given=100)
    assert [estimate.surely_exceeds(most) for most in (99, 100, 199, 200)] == [
        True,
        True,
        True,
        False,
    ]
    whole = Estimate(total=300, given=250)
    assert whole.surely_exceeds(249) and not whole.surely_exceeds(250)


def test_what_a_program_is_given_is_counted_exactly(world):
    """By hand: parameters with two moments; half of them on two devices; a page of 16 places."""
    for mesh in (D8, CUBE):
        estimate = train_estimate(world, mesh, SHORT, TrainRung(1, False))
        # Without two counters.
        assert estimate.given == trainer_bytes(mesh) - 8
    one = rollout_estimate(world, D8, SHORT, RolloutRung(8, 1))
    three = rollout_estimate(world, D8, SHORT, RolloutRung(8, 3))
    # Keys and values of 1 layer, 2 heads, 16 places, 8 numbers.
    assert three.given - one.given == 2 * (2 * 2 * 16 * 8 * 4)
    assert one.given == (trainer_bytes(D8) - 8) // 3 + 2 * 2 * 16 * 8 * 4


def test_the_smallest_need_is_asked_of_a_compiler_for_the_smallest_alone():
    """By hand: on the last rung 50 and 40 by arithmetic are 55 and 70, and 90 is not asked for."""
    computed = {"first": {D8: 1000, D4T2: 900}, "last": {D8: 50, D4T2: 40, CUBE: 90}}
    exact, asked = {D8: 55, D4T2: 70, CUBE: 80}, []

    def options_on(rung, meshes):
        asked.extend((rung, mesh) for mesh in meshes if (rung, mesh) not in asked)
        return [
            Option(
                mesh=mesh,
                bytes_per_device=exact[mesh] if mesh in meshes else size,
                tokens_per_s=None,
                is_computed=mesh not in meshes,
            )
            for mesh, size in computed[rung].items()
        ]

    assert _least_need(["first", "last"], options_on, 10) == 55
    assert asked == [("last", D4T2), ("last", D8)]


@pytest.mark.slow
def test_a_hopeless_budget_is_refused_behind_a_program_a_stage(world, monkeypatch):
    """Of sixteen that the candidates have on the first and last rungs at two rooms."""
    said = []
    monkeypatch.setattr(world, "budget_bytes", 1000)
    calibration = calibrated(world, said)
    placement = Placement(world, calibration)
    calibration.measure_all()
    assert said == [] and dict(calibration.table.measurements) == {}
    for option in (*calibration.train_options(LONG), *calibration.rollout_options(LONG, 0)):
        assert option.is_computed and option.bytes_per_device > 1000
    with pytest.raises(BudgetTooSmall) as error:
        placement.check_budget()
    assert len(said) <= 3 and all(f"with room for {LONG} tokens" in words for words in said)
    words = rf"is 1000, .* {LONG} tokens .* that would do is (\d+), ([\d.]+) KiB more"
    named, more = re.search(words, str(error.value)).groups()
    assert float(more) == pytest.approx((int(named) - 1000) / 1024, abs=0.01)
    # What it names is a compiler's figure, which is enough for that stage.
    beside = trainer_bytes(CUBE)
    found = [
        found.program_bytes + beside * entry.startswith("rollout")
        for entry, found in calibration.table.measurements.items()
    ]
    assert int(named) in found


def test_what_was_not_compiled_is_said_to_be_about_so_large(world, monkeypatch):
    monkeypatch.setattr(world, "budget_bytes", 1000)
    placement = Placement(world, calibrated(world, []))
    with pytest.raises(BudgetTooSmall, match=r"that would do is about \d+ \(rollout on"):
        placement.choose_step(SHORT, None)


def test_the_end_names_hardware_that_would_do(world):
    """A model of some thousand numbers fits one chip of any kind."""
    words = enough_words(world, LONG)
    assert words == (
        f"By computed bytes, with room for {LONG} tokens an episode, this would do, of numbers "
        "that are powers of two: 1 v5e, 1 v5p, 1 v6e, 1 h100, 1 h200, 1 b200"
    )
