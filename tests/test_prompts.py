# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of a prompt alone: their tokens round by round, beside and instead of environments."""

import collections

import pytest

from earl_jax.engine.config import Sampling
from earl_jax.envs.text.conversation import Completion
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.task import Prompt, Task
from earl_jax.settings.errors import InputError
from tests.support.environments import Talker
from tests.support.episodes import (
    GrowPool,
    check_nothing_is_held,
    open_service,
    renderer,
    tasks,
    tokenizer,
    weights,
)


def talker(task):
    return Talker(task.args["seed"])


def play(service, todo) -> dict:
    """Finished trajectories by ticket; their rows are given back."""
    service.submit(todo)
    found = {}
    for finished in service.drain():
        for each in finished:
            service.release(each.row)
            found[each.ticket] = each.trajectory
    return found


def as_prompt(task: Task, trajectory) -> Task:
    """The first turn of an episode as a task of its own, with the tokens' seed."""
    limits = Limits(max_turn_tokens=len(trajectory.turns[1].token_ids))
    prompt = Prompt(token_ids=trajectory.turns[0].token_ids)
    return Task(
        episode=500 + task.episode, group=500, prompt=prompt, seed=task.token_seed, limits=limits
    )


def test_prompts_have_the_tokens_of_episodes_that_begin_alike(pool):
    """Among other episodes, and with so few pages that some are preempted."""
    params, sampling = weights(ends_turns=False), Sampling(temperature=0.7)
    given = {"params": params, "sampling": sampling, "max_tokens": 32, "max_turn_tokens": 12}
    todo = tasks(24)
    played = play(open_service(pool, talker, **given), todo)
    prompts = [as_prompt(task, played[number]) for number, task in enumerate(todo)]
    streamed = collections.defaultdict(list)
    service = open_service(
        pool,
        talker,
        pages=4,
        grow=GrowPool(most_pages=4),
        on_tokens=lambda ticket, new: streamed[ticket].append(new),
        **given,
    )
    mixed = [task for pair in zip(prompts, todo, strict=True) for task in pair]
    found = play(service, mixed)
    assert service.stats.preempted_episodes > 0
    for number, prompt in enumerate(prompts):
        alone, before = found[2 * number], played[number].turns[1]
        assert [turn.author for turn in alone.turns] == ["environment", "policy"]
        assert alone.turns[0].token_ids == prompt.prompt.token_ids
        assert alone.turns[1].token_ids == before.token_ids
        assert alone.turns[1].logprobs == pytest.approx(before.logprobs, abs=1e-4)
        assert alone.reward == 0
        # A round's tokens come once, and together they are the turn.
        ids = [token for new in streamed[2 * number] for token in new.token_ids]
        logprobs = [value for new in streamed[2 * number] for value in new.logprobs]
        assert tuple(ids) == alone.turns[1].token_ids
        assert tuple(logprobs) == alone.turns[1].logprobs
        assert not any(new.model_logprobs for new in streamed[2 * number])
    check_nothing_is_held(service)


def test_a_turn_behind_a_prompt_ends_by_its_stops_and_limits(pool):
    """An end of turn, a stop string, a limit; and a prompt that leaves no token for a reply."""
    renders = renderer()
    ids = renders.render_opening(renders.opening("ab")).ids
    service = open_service(
        pool,
        max_context=40,
        new_conversation=lambda: Completion(renders.decode, renders.end_of_turn_ids),
    )
    digits = tuple("012345678")
    todo = [
        Task(episode=0, group=0, prompt=Prompt(token_ids=ids)),
        Task(episode=1, group=1, prompt=Prompt(token_ids=ids), stops=Stops(strings=digits)),
        Task(
            episode=2, group=2, prompt=Prompt(token_ids=ids), limits=Limits(max_turn_tokens=1),
            model_logprobs=True,
        ),
        Task(episode=3, group=3, prompt=Prompt(token_ids=ids * 9)),
    ]  # fmt: skip
    found = play(service, todo)
    reasons = [found[ticket].stop_reason for ticket in range(4)]
    assert reasons == ["replied", "replied", "turn_too_long", "prompt_too_long"]
    digit, end = found[0].turns[1].token_ids
    assert (end, tokenizer().decode([digit])) == (renders.end_of_turn_id, found[0].turns[1].text)
    assert len(found[1].turns[1].token_ids) == 1 and found[1].turns[1].text == ""
    assert len(found[2].turns[1].model_logprobs) == 1
    assert [turn.author for turn in found[3].turns] == []


def test_a_prompt_without_ids_is_refused(pool):
    with pytest.raises(InputError, match=r"episode 7: Task.prompt has no token_ids"):
        open_service(pool).submit([Task(episode=7, group=7, prompt=Prompt(token_ids=()))])
