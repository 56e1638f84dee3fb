# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The split of devices between rollout and training, chosen by times that are computed by hand."""

import dataclasses

import pytest

from earl_jax.placement.problem import with_splits
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import Step, choose_plans
from earl_jax.selector.plans import Plans
from earl_jax.selector.table import TRUSTED, ThroughputTable, parse_key
from earl_jax.sharding.layout import MeshShape
from tests.support.problems import hand_problem, rollout_key, rollout_on, train_key, train_on

R2, R4, R6 = MeshShape(data=2), MeshShape(data=4), MeshShape(tensor=6)
T6, T4, T2 = MeshShape(tensor=6), MeshShape(fsdp=4), MeshShape(fsdp=2)
# Both stages scale with their devices: 50 and 100 tokens/s a device.
ROLLOUT, TRAIN = {R2: 100.0, R4: 200.0, R6: 300.0}, {T6: 600.0, T4: 400.0, T2: 200.0}
HERE = Plans(rollout_on(R4), train_on(T4))


def problem(**settings):
    return with_splits(hand_problem(TRAIN, ROLLOUT, **settings))


def step(rollout_tokens: int, **fields) -> Step:
    """A step of so many sampled tokens, and 8 training rows of 20."""
    sizes = {"max_tokens": 20, "length": 20, "cache_tokens": 80, "lasts": 10}
    return Step(**{**sizes, "rollout_tokens": rollout_tokens, **fields})


def chosen(rollout_tokens: int, current=HERE, calm=8, table=None, only=None, of=None, **fields):
    candidates = Candidates(of or problem(), table or ThroughputTable())
    return choose_plans(candidates, step(rollout_tokens, **fields), current, calm, only)


def seconds(decision):
    return [choice.seconds for choice in decision.choices]


def meshes(decision):
    return decision.rollout.plan.mesh, decision.train.plan.mesh


def test_of_equal_splits_the_one_is_taken_whose_faster_stage_is_faster():
    """Training takes 0.8 s with 6 devices that play; rollouts 0.8 s with 4, and 0.53 s with 6."""
    decision = chosen(160, Plans())
    assert decision.seconds == pytest.approx(0.8)
    assert [each.num_rollout for each in decision.splits][:2] == [4, 6]
    assert decision.splits[1].seconds == pytest.approx(0.8)


def test_a_split_that_is_no_candidate_any_more_is_left_at_once():
    tight = problem(rollout_bytes={R4: 9000}, budget_bytes=8000)
    decision = chosen(160, calm=0, of=tight)
    assert meshes(decision) == (R6, T2)
    assert "the split in use does not fit" in str(decision.rollout)


@pytest.mark.parametrize(
    ("rollout_tokens", "split", "seconds"),
    # Training takes 160 tokens: 0.267, 0.4 and 0.8 s with 2, 4 and 6 devices that play.
    [
        # 3.2, 1.6 or 1.07 s of rollout.
        (320, (R6, T2), 3.2 / 3),
        # 0.8 s of rollout with 4 devices, and of training with 6; there rollout takes 0.53 s.
        (160, (R4, T4), 0.8),
        # 0.2, 0.1 or 0.07 s.
        (20, (R2, T6), 160 / 600),
    ],
)
def test_the_first_choice_balances_both_stages(rollout_tokens, split, seconds):
    decision = chosen(rollout_tokens, Plans())
    assert meshes(decision) == split
    assert decision.seconds == pytest.approx(seconds)
    assert [time.num_rollout for time in decision.splits][0] == split[0].num_devices
    assert len(decision.splits) == 3


def test_a_split_that_is_given_overlaps_its_stages_where_the_run_is_asynchronous():
    """With 4 devices each 1.6 s of rollout, and 0.4 s of training."""
    given = hand_problem(TRAIN, ROLLOUT, num_rollout=4)
    for batches, parts, seconds in ((1, 1, 2.0), (2, 1, 1.6), (1, 2, 1.6)):
        work = dataclasses.replace(given.work, batches=batches, parts=parts)
        decision = chosen(320, Plans(), of=dataclasses.replace(given, work=work))
        assert meshes(decision) == (R4, T4)
        assert decision.seconds == pytest.approx(seconds)


def test_both_stages_wait_for_new_weights():
    """With 4 devices 0.8 s of rollout and 0.4 s of training; with 6 it is 0.53 and 0.8 s."""
    decision = chosen(160, of=problem(weights_s=0.5))
    assert meshes(decision) == (R4, T4) and seconds(decision) == pytest.approx([0.8, 0.4])
    assert decision.seconds == pytest.approx(1.3)
    # Where training is the slower stage it is not beside them either: 0.1 and 0.4 s.
    other = next(
        each for each in chosen(20, of=problem(weights_s=0.5)).splits if each.num_rollout == 4
    )
    assert other.seconds == pytest.approx(0.9)
    given = hand_problem(TRAIN, ROLLOUT, num_rollout=4, weights_s=0.5)
    work = dataclasses.replace(given.work, batches=2)
    assert chosen(160, of=dataclasses.replace(given, work=work)).seconds == pytest.approx(1.3)


def test_the_split_moves_both_ways_and_says_why():
    # Rollout 1 s here against 0.8 s of training there; and 0.4 s of training against 0.267 s.
    more, less = chosen(200), chosen(20)
    assert (meshes(more), meshes(less)) == ((R6, T2), (R2, T6))
    assert all(choice.switched for choice in (*more.choices, *less.choices))
    assert str(more.rollout) == (
        "rollout: data=4 -> data=1,tensor=6 (6 play (rollout 0.667 s, training 0.8 s); before: "
        "4 play (rollout 1 s, training 0.4 s))"
    )
    assert (
        str(more.train) == "train: data=1,fsdp=4 -> data=1,fsdp=2 (with the split of the devices)"
    )


def test_it_stays_for_less_than_the_hysteresis_and_within_a_window():
    # 0.85 s here, 0.8 s there.
    assert meshes(chosen(170)) == (R4, T4)
    assert meshes(chosen(200, calm=7)) == (R4, T4)
    assert meshes(chosen(200, calm=7, is_new=True)) == (R6, T2)


def test_the_move_is_paid_for_by_the_steps_that_it_lasts():
    # 1 s here. There 0.8 s and a tenth, or a hundredth, of 4 s of moving the trainer.
    slow = problem(trainer_move_s=4.0)
    assert meshes(chosen(200, of=slow)) == (R4, T4)
    assert meshes(chosen(200, of=slow, lasts=100)) == (R6, T2)
    # Live episodes move with their pages. In each row shard of 8 slots with up to 20 tokens: 12 of
    # 10 tokens (80 tokens and half a page a slot) of 13 bytes each.
    page_s = problem(cache_byte_s=0.01)
    time = next(t for t in chosen(200, of=page_s).splits if t.num_rollout == 6)
    pages = chosen(200, of=page_s, lasts=10**9).rollout.plan.pages
    assert pages >= 12 and time.cost_s - time.seconds == pytest.approx(pages * 13 * 0.01 / 10)


def test_one_stage_is_chosen_within_the_split_in_use():
    for only, mesh in (("train", T4), ("rollout", R4)):
        decision = chosen(10**6, only=only)
        assert getattr(decision, only).plan.mesh == mesh and decision.splits == ()


def test_live_episodes_keep_their_slots():
    few = Plans(rollout_on(R4, num_slots=4), train_on(T4))
    assert chosen(200, few, keeps_slots=True).rollout.plan.num_slots == 4
    assert chosen(200, few).rollout.plan.num_slots == 8


def observed(rollout, train=None):
    """A table of tokens/s of the plans in use."""
    table = ThroughputTable()
    for key, speed in ((rollout_key(R4, 20, 8), rollout), (train_key(T4, 20, 1, "full"), train)):
        for _ in range(TRUSTED if speed else 0):
            table = table.with_speed(key, speed)
    return table


def test_observed_times_decide_and_correct_those_of_other_splits():
    # Rollouts have half of the computed speed: 1.6 s here, 160 / 150 s with 6 devices.
    decision = chosen(160, table=observed(100.0, 400.0))
    assert meshes(decision) == (R6, T2)
    times = {each.num_rollout: seconds(each) for each in decision.splits}
    assert times[4] == pytest.approx([1.6, 0.4])
    assert times[6] == pytest.approx([160 / 150, 0.8])
    # Training has a quarter: 1.6 s here, 160 / 150 s with 6 devices; rollouts 0.8 and 1.6 s.
    decision = chosen(160, table=observed(200.0, 100.0))
    assert decision.splits[0].num_rollout == 4
    decision = chosen(80, table=observed(200.0, 100.0))
    assert meshes(decision) == (R2, T6)


def test_until_both_stages_were_observed_the_model_weighs_them():
    """By the rollout's observed speed alone training would look twice as fast as it may be."""
    decision = chosen(160, table=observed(100.0))
    assert meshes(decision) == (R4, T4)
    assert seconds(decision) == pytest.approx([0.8, 0.4])


def test_nothing_moves_while_the_program_is_not_there():
    waits = Candidates(problem(), may_try=lambda key: False)
    assert meshes(choose_plans(waits, step(200), HERE)) == (R4, T4)
    ready = Candidates(problem(), may_try=lambda key: parse_key(key)[0].mesh in (R6, T2))
    assert meshes(choose_plans(ready, step(200), HERE)) == (R6, T2)


def test_a_load_that_shifts_slowly_moves_the_split_once_each_way():
    """Sampled tokens rise from 20 to 400 and fall again, with 8 % of noise: no storm."""
    plans, calm, seen = Plans(), 0, []
    rising = [20 * 1.05**n for n in range(60)]
    for number, tokens in enumerate([*rising, *reversed(rising)]):
        noisy = round(tokens * (1.08 if number % 2 else 0.92))
        decision = chosen(noisy, plans, calm)
        calm = 0 if any(choice.switched for choice in decision.choices) else calm + 1
        plans = decision.plans
        seen.append(plans.rollout.mesh.num_devices)
    changes = [seen[0]] + [b for a, b in zip(seen, seen[1:], strict=False) if a != b]
    assert changes == [2, 4, 6, 4, 2]


def test_splits_without_a_mesh_of_both_stages_are_no_candidates():
    assert problem().splits == (2, 4, 6) and problem().num_rollout == 4
    without = {mesh: speed for mesh, speed in TRAIN.items() if mesh != T2}
    assert with_splits(hand_problem(without, ROLLOUT)).splits == (2, 4)
    whole = hand_problem({MeshShape(fsdp=8): 1.0}, ROLLOUT)
    with pytest.raises(ValueError, match=r"no split of 8 devices .*2 to play: no mesh of 6"):
        with_splits(whole)
    with pytest.raises(ValueError, match="leave out config.selector.rollout_meshes and train_mesh"):
        with_splits(dataclasses.replace(whole, rollout_meshes_named=("data=8",)))
    # Each of several processes gives as many.
    assert with_splits(hand_problem(TRAIN, ROLLOUT, num_processes=4, num_players=4)).splits == (4,)
    with pytest.raises(ValueError, match=r"no split of 8 .*each process needs at least two"):
        with_splits(hand_problem(TRAIN, ROLLOUT, num_processes=8, num_players=8))
