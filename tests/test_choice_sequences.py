# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Many choices one after the other: what random loads, noise, failures and gaps never cause."""

import dataclasses
import itertools
import random

import pytest
from test_step_choice import D2T4, D4T2, D8, F8, load, option, work

from earl_jax.selector.choose import BudgetTooSmall, Option, Settings
from earl_jax.selector.step_choice import Pair, StepDecision, choose_step
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW, Load, LoadHistory

MESHES = {
    "rollout": [D8, D4T2, D2T4, MeshShape(tensor=8)],
    "train": [D8, MeshShape(data=4, fsdp=2), MeshShape(data=2, fsdp=4), F8],
}
# What the trainer leaves on a device, by its mesh.
KEPT = dict(zip(MESHES["train"], (5, 4, 3, 2), strict=True))
# Options that a stage may have on one mesh, such as rungs of its ladder.
MOST_WAYS = 1
NOISE = (0.0, 0.02, 0.07, 0.2, 0.5)
# Shares of options without a speed: everything was timed, some was not, nothing was.
UNTIMED = (0.0, 0.0, 0.02, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One option of a stage: bytes and seconds per token, both affine in the room."""

    mesh: MeshShape
    fixed_bytes: int
    bytes_a_place: float
    base_s: float
    s_a_place: float

    @staticmethod
    def draw(mesh: MeshShape, rng: random.Random) -> "Candidate":
        return Candidate(
            mesh=mesh,
            fixed_bytes=rng.randint(1, 40),
            bytes_a_place=rng.uniform(0.1, 2.0),
            base_s=rng.uniform(0.5, 2.0),
            s_a_place=rng.uniform(0, 0.05),
        )


class Machine:
    """The candidates of both stages on devices with a budget, with noise, gaps and failures."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.candidates = {
            stage: [
                Candidate.draw(mesh, rng)
                for mesh in meshes
                for _ in range(rng.randint(1, MOST_WAYS))
            ]
            for stage, meshes in MESHES.items()
        }
        self.budget = rng.randint(30, 150)
        self.noise, self.untimed_share = rng.choice(NOISE), rng.choice(UNTIMED)
        # From which room on a candidate is known to run out of memory.
        self.failed = {
            (stage, candidate): rng.randint(16, 200)
            for stage, candidates in self.candidates.items()
            for candidate in candidates
            if rng.random() < 0.1
        }
        self.untimed: dict[tuple[Candidate, int], bool] = {}

    def options(self, stage: str, places: int) -> list[Option]:
        """As they are measured now."""
        return [self._option(stage, each, places) for each in self.candidates[stage]]

    def _option(self, stage: str, candidate: Candidate, places: int) -> Option:
        failed = self.failed.get((stage, candidate), 1000) <= places
        untimed = self.untimed.setdefault(
            (candidate, places), self.rng.random() < self.untimed_share
        )
        speed = 1000.0 / (candidate.base_s + candidate.s_a_place * places)
        noise = 1.0 + self.rng.uniform(-self.noise, self.noise)
        return option(
            candidate.mesh,
            int(candidate.fixed_bytes + candidate.bytes_a_place * places),
            None if untimed or failed else speed * noise,
            move_s=0.5 * candidate.base_s,
            impossible="ran out of memory" if failed else "",
        )

    def fail(self, stage: str, mesh: MeshShape, places: int) -> None:
        """What is on this mesh runs out of memory in such a room, and so in larger ones."""
        for candidate in self.candidates[stage]:
            if candidate.mesh == mesh:
                known = self.failed.get((stage, candidate), places)
                self.failed[stage, candidate] = min(known, places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """All that `choose_step` is asked."""

    rollouts: list[Option]
    trains: list[Option]
    budget: int | None
    expected: Load
    places: int
    hysteresis: float = 0.1

    def answer(self, current: Pair | None, calm: int) -> StepDecision:
        return choose_step(
            self.rollouts,
            self.trains,
            resident_bytes=[KEPT[train.mesh] for train in self.trains],
            current=current,
            calm_steps=calm,
            work=work(self.expected, self.expected.rollout_tokens, places=self.places),
            settings=Settings(
                budget_bytes=self.budget, hysteresis=self.hysteresis, horizon_steps=10
            ),
        )

    def needs(self) -> list[tuple[Pair, int, float | None]]:
        """Of every pair that did not fail: its meshes, its bytes, and the seconds of a step."""
        found = []
        for rollout, train in itertools.product(self.rollouts, self.trains):
            if rollout.impossible or train.impossible:
                continue
            num_bytes = max(rollout.bytes_per_device + KEPT[train.mesh], train.bytes_per_device)
            seconds = None
            if rollout.tokens_per_s and train.tokens_per_s:
                seconds = self.expected.rollout_tokens / rollout.tokens_per_s + rollout.move_s
                seconds += 1000 / train.tokens_per_s
            found.append((Pair(rollout.mesh, train.mesh), num_bytes, seconds))
        return found

    def possible(self) -> dict[Pair, list[float | None]]:
        """The pairs that can be, with the seconds of a step in each way."""
        found: dict[Pair, list[float | None]] = {}
        for pair, num_bytes, seconds in self.needs():
            if self.budget is None or num_bytes <= self.budget:
                found.setdefault(pair, []).append(seconds)
        return found


def check_refusal(question: Question, error: BudgetTooSmall) -> None:
    """It is refused only where nothing can be, and the budget that is named is the smallest."""
    assert not question.possible()
    needs = [num_bytes for _, num_bytes, _ in question.needs()]
    named = f"that would do is {min(needs)} (" if needs else "Use devices with more"
    assert named in str(error)


def check_leaving(question: Question, current: Pair, calm: int, decision: StepDecision) -> bool:
    """Whether the pair had to be left. If it could stay, a window is over and the gain is real."""
    could_stay = question.possible().get(current)
    if could_stay is None:
        return True
    assert calm >= WINDOW
    assert decision.predicted_s is not None
    slowest = max(seconds for seconds in could_stay if seconds is not None)
    assert slowest > (1.0 + question.hysteresis) * decision.predicted_s
    return False


class Sequence:
    """The choices of one run, each held against what must be so whatever the loads are."""

    def __init__(self) -> None:
        self.current: Pair | None = None
        self.calm, self.step, self.chosen, self.refused = 0, 0, 0, 0
        self.forced, self.free = [], []
        self.last_failure = -WINDOW
        # When a pair was left, and whether it had to be.
        self.left: dict[Pair, tuple[int, bool]] = {}

    def take(self, question: Question) -> None:
        """One step more."""
        self.step += 1
        try:
            decision = question.answer(self.current, self.calm)
        except BudgetTooSmall as error:
            check_refusal(question, error)
            self.refused += 1
            return
        self.chosen += 1
        assert decision.pair in question.possible()
        if question.budget is not None:
            assert decision.rollout.bytes_per_device <= question.budget
            assert decision.train.bytes_per_device <= question.budget
        if self.chosen % 10 == 0:
            assert question.answer(self.current, self.calm) == decision
        left, self.current = self.current, decision.pair
        if left is None or left == decision.pair:
            self.calm += left is not None
            return
        had_to = check_leaving(question, left, self.calm, decision)
        self._check_return(decision.pair, had_to)
        (self.forced if had_to else self.free).append(self.step)
        self.left[left], self.calm = (self.step, had_to), 0
        # Nothing has changed: it stays.
        assert question.answer(decision.pair, 0).pair == decision.pair

    def _check_return(self, pair: Pair, must: bool) -> None:
        """Who comes back within a window is driven there, by memory, and had left for speed.

        Or what it was driven to has failed meanwhile.
        """
        when, had_to = self.left.get(pair, (-WINDOW, False))
        if self.step - when < WINDOW:
            assert must and (not had_to or self.last_failure >= when)


def random_sequence(seed: int) -> tuple[Machine, Sequence, int]:
    """A run of 40 steps: jumps, growth, noise, failures, speeds that nobody knows."""
    rng = random.Random(seed)
    machine, sequence, history, failures = Machine(rng), Sequence(), LoadHistory(), 0
    longest = rng.randint(8, 60)
    for step in range(40):
        longest = max(4, int(longest * rng.choice([1.0, 1.0, 1.1, 0.9, 2.0, 0.5])) % 200)
        history = history.add(load(longest, rollout_tokens=rng.randint(100, 5000)))
        expected = history.forecast()
        assert expected is not None
        places = 16 * -(-expected.context_tokens_max // 16)
        if sequence.current and rng.random() < 0.01:
            stage = rng.choice(["rollout", "train"])
            machine.fail(stage, getattr(sequence.current, stage), places)
            sequence.last_failure, failures = step + 1, failures + 1
        question = Question(
            rollouts=machine.options("rollout", places),
            trains=machine.options("train", places),
            budget=machine.budget,
            expected=expected,
            places=places,
        )
        sequence.take(question)
    return machine, sequence, failures


@pytest.mark.parametrize("choices", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_choices_under_random_loads_are_possible_and_never_oscillate(choices):
    """Steps where nothing fits are not counted."""
    made = forced = free = refused = failures = untimed = 0
    for seed in itertools.count():
        machine, sequence, failed = random_sequence(seed)
        made, refused = made + sequence.chosen, refused + sequence.refused
        forced, free = forced + len(sequence.forced), free + len(sequence.free)
        failures, untimed = failures + failed, untimed + any(machine.untimed.values())
        if made >= choices:
            break
    # Else the loads would show nothing.
    assert min(forced, free, refused) >= choices / 100
    assert min(failures, untimed) >= choices / 200


def switches_under(noise: float, jumps: bool, steps: int = 300) -> list[int]:
    """At which steps of one run meshes change, where every speed is measured anew for each."""
    rng = random.Random(0)
    costs = {
        "rollout": {D8: (1.0, 0.01), D4T2: (1.04, 0.008), D2T4: (1.5, 0.001)},
        "train": {D8: (1.0, 0.01), F8: (1.05, 0.01)},
    }

    def options(stage: str, places: int) -> list[Option]:
        return [
            option(
                mesh,
                1,
                1000.0 / (base + grows * places) * (1.0 + rng.uniform(-noise, noise)),
                move_s=0.5 * base,
            )
            for mesh, (base, grows) in costs[stage].items()
        ]

    sequence, history = Sequence(), LoadHistory()
    for _ in range(steps):
        history = history.add(load(max(1, int(rng.gauss(44, 4))) if jumps else 44))
        expected = history.forecast()
        places = 48 if expected.context_tokens_max <= 48 else 96
        sequence.take(
            Question(
                rollouts=options("rollout", places),
                trains=options("train", places),
                budget=None,
                expected=expected,
                places=places,
                hysteresis=0.15,
            )
        )
    assert not sequence.forced
    return sequence.free


@pytest.mark.parametrize("noise", [0.02, 0.07])
def test_noise_below_half_of_the_hysteresis_moves_nothing(noise):
    """1.07 / 0.93 is 1.15. Contexts that jump to and fro move it when they first come to a room."""
    assert switches_under(noise, jumps=False) == []
    assert len(switches_under(noise, jumps=True)) <= 2


@pytest.mark.parametrize("noise", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("jumps", [False, True])
def test_larger_noise_moves_it_at_most_once_a_window(noise, jumps):
    """Speeds that differ by half of themselves from step to step: no storm, one switch in nine."""
    switches = switches_under(noise, jumps)
    gaps = [later - earlier for earlier, later in itertools.pairwise(switches)]
    assert len(switches) > 3, "else this shows nothing"
    assert min(gaps) > WINDOW
    assert len(switches) <= 300 // (WINDOW + 1) + 1
