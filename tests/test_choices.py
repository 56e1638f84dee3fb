# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns of some replies or tokens: no other comes, and log-probs are among these alone."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.choices import (
    ALWAYS,
    FREE,
    allowed_ids,
    allowed_table,
    check_allowed,
    check_choices,
    choice_tree,
    choice_width,
    no_choices,
    set_allowed,
    set_choices,
    walk,
)
from earl_jax.engine.config import Sampling
from earl_jax.engine.sampling import SamplingRows, draw, sample, sampling_rows
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.run.build import build_run
from earl_jax.serving.requests import RequestError, RequestOptions, allow
from earl_jax.sharding.layout import MeshShape
from tests.support.choices import BRANCHES, HOT, Words, engine_for
from tests.support.episodes import (
    MODEL,
    RATIO_RUN,
    assert_same_episodes,
    check_rows,
    collect,
    renderer,
    tasks,
    tokenizer,
    weights,
)
from tests.support.forward import row_logits
from tests.support.placements import one_step
from tests.support.settings import make_config

SLOW = pytest.mark.slow
REPLIES = ((5, 0), (5, 7, 0), (6, 0))


def test_the_tree_of_three_replies_by_hand():
    parents, tokens = choice_tree(REPLIES)
    assert parents.tolist() == [0, 1, 1, 3, 0, 5]
    assert tokens.tolist() == [5, 0, 7, 0, 6, 0]
    # 0, 5, 6 and 7.
    assert choice_width(REPLIES) == 4 and choice_width(()) == 0
    check_choices(REPLIES, 6)
    with pytest.raises(ValueError, match="6 branches; the engine takes 5"):
        check_choices(REPLIES, 5)
    check_choices(REPLIES, 6, 2)
    check_choices((), 0, 1)
    with pytest.raises(ValueError, match="one of 2 tokens; rows of experience hold 1"):
        check_choices(REPLIES, 6, 1)


def test_the_tokens_that_each_one_was_chosen_among_by_hand():
    """On the devices as the host walks: 5 or 6, behind 5 0 or 7, behind that 0; then anything.

    A slot of certain tokens has these always, and a free one nothing.
    """
    rows = no_choices(3, 8)
    set_choices(rows, 0, REPLIES)
    set_allowed(rows, 1, (9, 4))
    choices, found = jax.tree.map(jnp.asarray, rows), []
    for tokens in ((5, 4, 1), (7, 9, 1), (0, 4, 1), (3, 4, 1)):
        found.append(np.stack(allowed_ids(choices, 3), axis=1).tolist())
        choices = walk(choices, jnp.array(tokens), jnp.ones(3, bool))
    by_hand = [[6, 7, 0], [1, 8, 0], [1, 0, 0], [0, 0, 0]]
    assert [slots[0] for slots in found] == by_hand
    assert all(slots[1:] == [[5, 10, 0], [0, 0, 0]] for slots in found)
    assert allowed_table((5, 7, 0), REPLIES, (), 3).tolist() == by_hand[:3]
    assert allowed_table((4, 9), (), (9, 4), 3).tolist() == [[5, 10, 0]] * 2
    assert not allowed_table((1, 2), (), (), 3).any()


GRID = (np.arange(400, dtype=np.float32) + 0.5) / 400
# Alike in all tests, which so share a program.
SLOTS, NUM_BRANCHES, VOCAB = 5, 8, 10


@jax.jit
def draw_at_grid(logits, choices, settings):
    return jax.vmap(lambda u: draw(jnp.full(SLOTS, u), logits, choices, settings))(GRID)


def drawn(logits, choices, settings=None):
    """Returns, by slot, (share, log-prob) of each token that an even grid of numbers draws."""
    assert logits.shape == (SLOTS, VOCAB) and choices.tokens.shape == (SLOTS, NUM_BRANCHES)
    settings = settings or sampling_rows(Sampling(), SLOTS)
    sides = draw_at_grid(logits, choices, settings)
    found = []
    for tokens, logprobs in zip(*(np.asarray(side).T for side in sides), strict=True):
        counts = collections.Counter(tokens.tolist())
        at_token = dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        found.append({t: (counts[t] / len(GRID), at_token[t]) for t in sorted(counts)})
    return found


def check_drawn(found, logits, may) -> None:
    """Checks that the allowed tokens alone are drawn, by their probabilities among these."""
    kept = np.array(sorted(may))
    logprobs = logits[kept] - np.logaddexp.reduce(logits[kept])
    assert list(found) == kept.tolist()
    np.testing.assert_allclose([p for _, p in found.values()], logprobs, atol=1e-5)
    np.testing.assert_allclose([n for n, _ in found.values()], np.exp(logprobs), atol=3e-3)


def test_a_walk_meets_the_tokens_that_may_come_and_no_others():
    """One slot says 5 7 0, one 6 0, the others may say anything."""
    rows = no_choices(SLOTS, NUM_BRANCHES)
    for slot in (0, 1):
        set_choices(rows, slot, REPLIES)
    choices = jax.tree.map(jnp.asarray, rows)
    logits = np.arange(50, dtype=np.float32).reshape(SLOTS, VOCAB) / 10
    # Behind its reply a slot may say anything.
    expected = [({5, 6}, {5, 6}), ({0, 7}, {0}), ({0}, set(range(VOCAB)))]
    for sampled, allowed in zip(([5, 6], [7, 0], [0, 0]), expected, strict=True):
        found = drawn(logits, choices)
        for slot, may in enumerate((*allowed, set(range(VOCAB)))):
            check_drawn(found[slot], logits[slot], may)
        tokens = jnp.array([*sampled, 9, 9, 9])
        # Who does not move stays where it is.
        assert walk(choices, tokens, jnp.zeros(SLOTS, bool)).node.tolist() == (
            choices.node.tolist()
        )
        choices = walk(choices, tokens, jnp.ones(SLOTS, bool))
    assert choices.node.tolist() == [FREE] * SLOTS


def test_certain_tokens_alone_come_for_as_long_as_the_turn_lasts():
    rows = no_choices(SLOTS, NUM_BRANCHES)
    set_allowed(rows, 1, (7, 2, 7))
    choices = jax.tree.map(jnp.asarray, rows)
    logits = np.random.default_rng(0).normal(size=(SLOTS, VOCAB)).astype(np.float32)
    for sampled in (7, 2, 2):
        found = drawn(logits, choices)
        for slot, may in enumerate((range(VOCAB), (2, 7))):
            check_drawn(found[slot], logits[slot], may)
        choices = walk(choices, jnp.full(SLOTS, sampled), jnp.ones(SLOTS, bool))
    assert choices.node.tolist() == [FREE, ALWAYS, FREE, FREE, FREE]


def test_temperature_and_cuts_apply_among_the_allowed_tokens_by_hand():
    """The first and the last of 0.1 0.2 0.3 0.4 are left: 1 to 4, squared 1 to 16.

    The likeliest of them at temperature 0, with its log-prob untempered; and one that is free,
    beside them and alone, to the last bit.
    """
    logits = np.full((SLOTS, VOCAB), -np.inf, np.float32)
    logits[:, :4] = np.log([0.1, 0.2, 0.3, 0.4])
    rows = no_choices(SLOTS, NUM_BRANCHES)
    for slot in range(1, SLOTS):
        set_allowed(rows, slot, (3, 0))
    plain = sampling_rows(Sampling(), SLOTS)
    settings = SamplingRows(
        temperature=np.float32([1, 1, 0.5, 1, 0]),
        top_k=np.int32([0, 0, 0, 1, 0]),
        top_p=plain.top_p,
        min_p=plain.min_p,
    )
    found = drawn(logits, jax.tree.map(jnp.asarray, rows), settings)
    shares = [{t: share for t, (share, _) in slot.items()} for slot in found]
    assert shares[0] == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, abs=3e-3)
    assert shares[1] == pytest.approx({0: 0.2, 3: 0.8}, abs=3e-3)
    assert shares[2] == pytest.approx({0: 1 / 17, 3: 16 / 17}, abs=3e-3)
    assert shares[3] == shares[4] == {3: 1}
    logprobs = [{t: logprob for t, (_, logprob) in slot.items()} for slot in found]
    assert logprobs[1] == pytest.approx({0: np.log(0.2), 3: np.log(0.8)}, abs=1e-6)
    assert logprobs[2] == pytest.approx({0: np.log(1 / 17), 3: np.log(16 / 17)}, abs=1e-6)
    assert (logprobs[3][3], logprobs[4][3]) == pytest.approx((0, np.log(0.8)), abs=1e-6)
    free = jax.tree.map(jnp.asarray, no_choices(SLOTS, NUM_BRANCHES))
    [alone, *_] = drawn(logits, free, settings)
    assert alone == found[0]


def test_unrestricted_draw_only_adds_a_check_of_the_slots():
    """Outside of its restricted branch `draw` adds only the nodes to what `sample` does."""
    rows = sampling_rows(Sampling(), 3)
    arrays = (np.zeros(3, np.float32), np.zeros((3, 1000), np.float32))
    choices = jax.tree.map(jnp.asarray, no_choices(3, 8))

    def made(function):
        jaxpr = jax.make_jaxpr(function)(*arrays)
        return collections.Counter(out.aval.shape for eqn in jaxpr.eqns for out in eqn.outvars)

    more = made(lambda u, x: draw(u, x, choices, rows)) - made(lambda u, x: sample(u, x, rows))
    assert more and set(more) <= {(), (3,)}


def test_allowed_tokens_must_exist_and_be_within_choice_branches():
    check_allowed((0, 319), 2, 320)
    for ids, words in (
        ((5, 320), "allowed_token_ids hold 320; ids go from 0 to 319"),
        ((-1,), "allowed_token_ids hold -1; ids go"),
        ((1, 2, 3), "are 3 with the end of turn; the engine takes 2 .*choice_branches"),
    ):
        with pytest.raises(ValueError, match=words):
            check_allowed(ids, 2, 320)


class Digits(Words):
    """Allows replies of certain digits, then of others, then anything."""

    ROUNDS = (("3", "5", "8"), ("1",), ())

    def start(self):
        return Start(text="go.", role="x", allowed_token_ids=digit_ids(self.ROUNDS[0]))

    def step(self, reply: str):
        sampled = super().step(reply)
        return dataclasses.replace(
            sampled, choices=(), allowed_token_ids=digit_ids(sampled.choices)
        )


def digit_ids(digits):
    return tuple(tokenizer().convert_tokens_to_ids(list(digits)))


def hand_logprobs(replies, ids, logits):
    """Log-probs of a turn's ids among these replies, or all, from the logits at each of them."""
    logprobs = []
    for index, token in enumerate(ids):
        so_far = tuple(ids[:index])
        may = sorted({r[index] for r in replies if len(r) > index and r[:index] == so_far})
        of = logits[index][may] if replies else logits[index]
        logprobs.append(float(logits[index][token] - np.logaddexp.reduce(of)))
    return logprobs


def full_logits(trajectory):
    """f64[T,V] behind each token of an episode, by the trainer's forward pass."""
    params = jax.tree.map(np.asarray, weights())
    params["layers"] = jax.tree.map(lambda *layers: np.stack(layers), *params["layers"])
    ids = np.zeros((1, 64), np.int32)
    whole = [token for turn in trajectory.turns for token in turn.token_ids]
    ids[0, : len(whole)] = whole
    segments = (np.arange(64) < len(whole)).astype(np.int32)[None]
    logits = jax.jit(functools.partial(row_logits, MODEL))(params, ids, segments)
    return np.asarray(logits, np.float64)[0]


@pytest.mark.parametrize(
    "choices", [[f"{i}" for i in range(50_000)], ["a" * 100_000], ["a", "b" * 769]]
)
def test_choices_that_no_server_takes_are_refused_before_they_are_encoded(choices):
    """A client could hold up all others with them, and fill the memory with their trees."""
    encoded = []
    options = RequestOptions(sampling=Sampling(), choices=tuple(choices))
    with pytest.raises(RequestError, match=r"choices takes at least \d+ different .* takes 256"):
        allow(options, 8, 256, encoded.append, token_bytes=3)
    assert not encoded
    kept = allow(
        dataclasses.replace(options, choices=("ab",)), 8, 256, lambda text: (5, 6), token_bytes=3
    )
    assert kept.choice_ids == ((5, 6),)


def test_only_choices_are_sampled_with_log_probs_among_the_choices(pool):
    replies_seen = []
    # Else what this policy is sure of is all that is ever said.
    hot = Sampling(temperature=HOT)
    rollout = collect(
        pool, tasks(40), lambda task: Words(replies_seen), player=engine_for(BRANCHES), sampling=hot
    )
    check_rows(rollout, 40)
    # Every reply that may be said is, by some, and no other; then anything.
    assert {sampled[0] for sampled in replies_seen} == set(Words.ROUNDS[0])
    assert {sampled[1] for sampled in replies_seen if len(sampled) > 1} == set(Words.ROUNDS[1])
    anything = [t.turns[5].token_ids for t in rollout.trajectories if len(t.turns) == 6]
    assert len({token for ids in anything for token in ids}) > 30
    for trajectory in rollout.trajectories[:4]:
        logits = full_logits(trajectory)
        place = 0
        rounds = itertools.chain.from_iterable(zip([None] * 3, Words.ROUNDS, strict=True))
        for turn, words in zip(trajectory.turns, rounds, strict=True):
            ids = turn.token_ids
            if turn.author == "policy":
                there = logits[place - 1 : place - 1 + len(ids)]
                under_model = hand_logprobs((), ids, there)
                np.testing.assert_allclose(turn.model_logprobs, under_model, atol=1e-4)
                replies = [renderer().reply(word) for word in words or ()]
                expected = hand_logprobs(replies, ids, there / HOT)
                np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)
            place += len(ids)


def test_a_reply_is_made_of_the_allowed_tokens_with_log_probs_among_these(pool):
    """Digits, and the end of turn, in any number and order; and then anything."""
    replies_seen = []
    rollout = collect(
        pool,
        tasks(40),
        lambda task: Digits(replies_seen),
        player=engine_for(BRANCHES),
        sampling=Sampling(temperature=HOT),
    )
    check_rows(rollout, 40)
    assert {c for sampled in replies_seen for c in sampled[0]} == {"3", "5", "8"}
    assert {c for sampled in replies_seen if len(sampled) > 1 for c in sampled[1]} == {"1"}
    assert {len(sampled[0]) for sampled in replies_seen} >= {0, 1, 2}
    last = [t.turns[5].token_ids for t in rollout.trajectories if len(t.turns) == 6]
    assert len({token for ids in last for token in ids}) > 10
    for trajectory in rollout.trajectories[:4]:
        logits, place = full_logits(trajectory), 0
        for index, turn in enumerate(trajectory.turns):
            ids = list(turn.token_ids)
            if turn.author == "policy":
                there = logits[place - 1 : place - 1 + len(ids)] / HOT
                digits = digit_ids(Digits.ROUNDS[index // 2])
                kept = there[:, [*digits, renderer().end_of_turn_id]] if digits else there
                expected = there[np.arange(len(ids)), ids] - np.logaddexp.reduce(kept, axis=1)
                np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)
            place += len(ids)


@pytest.mark.parametrize("mesh", [None, pytest.param(MeshShape(data=4, tensor=2), marks=SLOW)])
def test_rows_say_what_each_token_was_chosen_among(pool, mesh):
    """As the host finds it from a turn's choices (`check_rows`); model log-probs are so, too."""
    rollout = collect(
        pool,
        tasks(16),
        lambda task: (Words, Digits)[task.episode % 2]([]),
        player=engine_for(BRANCHES, mesh=mesh, choice_width=6),
        sampling=Sampling(temperature=HOT),
    )
    check_rows(rollout, 16)
    first, *_, last = (np.asarray(ids) for ids in rollout.experience.allowed)
    assert (first > 0).sum() > 60 and not last.any()
    for trajectory in rollout.trajectories[:2]:
        logits, place = full_logits(trajectory), 0
        for turn in trajectory.turns:
            if turn.author == "policy":
                there = logits[place - 1 : place - 1 + len(turn.token_ids)]
                among = allowed_table(turn.token_ids, turn.choices, turn.allowed, 6)
                for logprob, token, row, ids in zip(
                    turn.model_logprobs, turn.token_ids, there, among, strict=True
                ):
                    of = row[ids[ids > 0] - 1] if ids.any() else row
                    assert logprob == pytest.approx(row[token] - np.logaddexp.reduce(of), abs=1e-4)
            place += len(turn.token_ids)


@pytest.mark.slow
def test_bursts_and_meshes_change_nothing(pool):
    players = engine_for(BRANCHES), engine_for(BRANCHES, 8, MeshShape(data=4, tensor=2))
    first, other = (
        collect(
            pool,
            tasks(24),
            lambda task: (Words, Digits)[task.episode % 2]([]),
            player=player,
            burst=player.config.rules.burst,
        )
        for player in players
    )
    assert_same_episodes(first.trajectories, other.trajectories)
    check_rows(other, 24)


@pytest.mark.slow
def test_no_shard_waits_for_another_in_the_choices():
    text = engine_for(BRANCHES, 8, MeshShape(data=4, tensor=2)).lower_play(32).compile().as_text()
    assert "collective-permute" not in text


def test_no_illegal_move_is_played_where_they_are_masked(pool):
    """Random play loses half of its games to illegal moves where they are not."""
    replies = tuple(map(renderer().reply, BoardGame(mask_illegal=True).all_choices()))
    assert len(choice_tree(replies)[0]) == BRANCHES
    player = engine_for(BRANCHES)

    def masked_game(task):
        return BoardGame(mask_illegal=True, **task.args)

    masked = collect(pool, tasks(40), masked_game, player=player)
    check_rows(masked, 40)
    assert {t.stop_reason for t in masked.trajectories} <= {"win", "draw", "loss"}
    free = collect(pool, tasks(40), player=player)
    assert sum(t.stop_reason == "illegal" for t in free.trajectories) > 15


@pytest.mark.slow
def test_choices_that_the_engine_does_not_take_end_their_own_episode(pool):
    def make(task):
        return Words([]) if task.episode % 2 else BoardGame(seed=1)

    rollout = collect(pool, tasks(8), make)
    for trajectory in rollout.trajectories:
        assert (trajectory.stop_reason == "unencodable") == (trajectory.episode % 2 == 1)
    assert "takes 0 (SlotRules.choice_branches)" in rollout.trajectories[1].detail


class Strange(Digits):
    """Allows a token that is none."""

    def start(self):
        return dataclasses.replace(super().start(), allowed_token_ids=(5, 320))


def test_tokens_that_are_none_end_their_own_episode(pool):
    rollout = collect(
        pool,
        tasks(8),
        lambda task: (Digits, Strange)[task.episode % 2]([]),
        player=engine_for(BRANCHES),
    )
    for trajectory in rollout.trajectories:
        assert (trajectory.stop_reason == "unencodable") == (trajectory.episode % 2 == 1)
    assert "allowed_token_ids hold 320; ids go from 0 to 319" in rollout.trajectories[1].detail


class Wide:
    """Allows four digits at first, of which `all_choices` would name none."""

    def start(self):
        return Start(text="go.", role="x", choices=("1", "2", "3", "4"))

    def step(self, reply: str):
        return StepResult(reward=1.0, done=True, stop_reason="win")


def test_replies_that_go_on_in_more_ways_than_rows_hold_end_their_own_episode(pool):
    """Cut off, a token would be scored among others than it was chosen from."""
    rollout = collect(
        pool,
        tasks(8),
        lambda task: (Words([]), Wide())[task.episode % 2],
        player=engine_for(BRANCHES, choice_width=3),
    )
    check_rows(rollout, 8)
    for trajectory in rollout.trajectories:
        assert (trajectory.stop_reason == "unencodable") == (trajectory.episode % 2 == 1)
    assert "go on with one of 4 tokens" in rollout.trajectories[1].detail


@pytest.mark.parametrize("ratio", ["behaviour", pytest.param("model", marks=SLOW)])
def test_the_trainer_scores_masked_moves_among_those_that_were_legal(ratio):
    """Its log-probs are the engine's, at the temperature or without, on packed and cut rows."""
    cuts = {"temperature": 1.5, "top_k": 3 if ratio == "model" else 0}
    given = RATIO_RUN | {
        "env": {"args": {"mask_illegal": True}},
        "rollout": RATIO_RUN["rollout"] | cuts,
        "selector": RATIO_RUN["selector"] | {"train_meshes": ("data=2,fsdp=2,tensor=2",)},
        "train": {"epochs": 2, "ratio": ratio},
        "algorithm_args": {"kl_coefficient": 0.1},
    }
    record = one_step(build_run(make_config(given)))
    assert {t.stop_reason for t in record.trajectories} <= {"win", "draw", "loss"}
    first = record.updates[0]
    assert first["logprob_mismatch_max"] < 1e-4 and first["clip_fraction"] == 0
    # The reference has the same weights.
    assert first["reference_kl"] < 1e-9
    # Behind a legal move nothing is left to choose: the end of turn has no entropy.
    moves = [turn for t in record.trajectories for turn in t.turns if turn.author == "policy"]
    np.testing.assert_allclose([turn.logprobs[1] for turn in moves], 0, atol=1e-5)
    assert 0 < first["entropy"] < np.log(9) / 2


def test_settings_that_cannot_be_are_refused():
    masked = {**RATIO_RUN, "env": {"args": {"mask_illegal": True}}}
    with pytest.raises(ValueError, match="illegal_reward is -0.5 but has no effect"):
        make_config(masked, ["env.args.illegal_reward=-0.5"])
    with pytest.raises(ValueError, match="takes 2 tokens.*config.rollout.max_turn_tokens is 1"):
        build_run(make_config(masked, ["rollout.max_turn_tokens=1"]))
    for given, sizes in ((masked, (18, 10)), (RATIO_RUN, (0, 0))):
        engines = build_run(make_config(given)).stages.engines
        assert (engines.choice_branches, engines.choice_width) == sizes


def test_the_selector_counts_the_rows_with_what_tokens_were_chosen_among():
    """Per token: tokens, turns, log-probs and versions, and ten ids where moves are masked."""
    given = RATIO_RUN | {"rollout": {"num_slots": 8, "episodes_per_step": 16}, "train": {}}
    mesh, totals = MeshShape(data=8), []
    for args, of_token in (({}, 16), ({"mask_illegal": True}, 56)):
        run = build_run(make_config(given | {"env": {"args": args}}))
        engine = run.stages.engines.engine(mesh)
        rows = jax.eval_shape(lambda engine=engine: engine.new_state(64, None)).experience
        assert sum(4 * leaf.size for leaf in jax.tree.leaves(rows)) == rows.tokens.size * of_token
        totals.append(run.problem.bare_footprint(mesh, 8, 64).total)
    # Two rows of a data shard's episodes, and a spare one for its slot.
    assert totals[1] - totals[0] == 3 * 64 * 40
