# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import io
import json
import math

import pytest

from earl_jax.telemetry.episodes import (
    failures_of,
    read_trajectories,
    trajectory_lines,
    truncate_trajectories_after,
    write_trajectories,
)
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.trajectory import Trajectory, Turn


def _write(folder, step, trajectories):
    return write_trajectories(folder, step, trajectory_lines(trajectories))


def _turn(author, text, token_ids, logprobs=(), versions=()):
    return Turn(author=author, text=text, token_ids=token_ids, logprobs=logprobs, versions=versions)


def _trajectory(*turns, rewards=(0.0, 1.0)):
    return Trajectory(
        episode=7,
        group=3,
        role="x",
        turns=turns,
        turn_rewards=rewards,
        stop_reason="win",
        row=0,
        detail="row of three",
    )


EPISODE = _trajectory(
    _turn("environment", "your move\u2028", (9, 8)),
    _turn("policy", "b2", (4, 2), (-0.5, -0.25), (1, 1)),
    _turn("environment", "I play a1", (9,)),
    _turn("policy", "c3", (6,), (-2.0,), (2,)),
)


def test_several_messages_and_samples_are_distinguished(tmp_path):
    content = (("tool", "42"), ("user", "so?"))
    answer = Turn(
        author="environment", text="42\nso?", token_ids=(9, 9), messages=content, forks=True
    )
    turns = (*EPISODE.turns[:2], answer, EPISODE.turns[3])
    path = _write(tmp_path, 1, [_trajectory(*turns), EPISODE])
    forked, flat = read_trajectories(path)
    assert forked["messages"] == [
        {"role": "user", "content": "your move\u2028"},
        {"role": "assistant", "content": "b2"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "c3"},
    ]
    assert forked["sample_starts"] == [0, 4] and "sample_starts" not in flat
    assert forked["token_ids"] == [9, 8, 4, 2, 9, 9, 6] and forked["wrote"] == list("eeppeep")


def test_logprobs_under_the_model_are_there_where_they_were_written_down(tmp_path):
    turns = [
        dataclasses.replace(turn, model_logprobs=(-1.5,) * len(turn.logprobs))
        for turn in EPISODE.turns
    ]
    both, one = read_trajectories(_write(tmp_path, 1, [_trajectory(*turns), EPISODE]))
    assert both["model_logprobs"] == [None, None, -1.5, -1.5, None, -1.5]
    assert both["logprobs"] == one["logprobs"] and "model_logprobs" not in one


def test_an_episode_reads_as_written(tmp_path):
    path = _write(tmp_path / "trajectories", 12, [EPISODE, EPISODE])
    assert path == tmp_path / "trajectories" / "step_000012.jsonl"
    first, second = read_trajectories(path)
    assert first == second == {
        "episode": 7,
        "group": 3,
        "role": "x",
        "reward": 1.0,
        "stop_reason": "win",
        "detail": "row of three",
        "num_turns": 2,
        "num_tokens": 6,
        "turn_rewards": [0.0, 1.0],
        "messages": [
            {"role": "user", "content": "your move\u2028"},
            {"role": "assistant", "content": "b2"},
            {"role": "user", "content": "I play a1"},
            {"role": "assistant", "content": "c3"},
        ],
        "token_ids": [9, 8, 4, 2, 9, 6],
        "wrote": ["e", "e", "p", "p", "e", "p"],
        "logprobs": [None, None, -0.5, -0.25, None, -2.0],
        "versions": [None, None, 1, 1, None, 2],
    }  # fmt: skip


def test_nonfinite_numbers_are_valid_json_and_texts_stay(tmp_path):
    episode = _trajectory(
        _turn("environment", "nan", (1,)),
        _turn("policy", "inf", (2, 3), (-math.inf, math.nan), (0, 0)),
        rewards=(math.nan,),
    )
    path = _write(tmp_path, 1, [episode])
    raw = json.loads(path.read_text())
    assert raw["logprobs"] == [None, "-inf", "nan"] and raw["reward"] == "nan"
    (read,) = read_trajectories(path)
    assert read["logprobs"][1] == -math.inf and math.isnan(read["logprobs"][2])
    assert math.isnan(read["reward"]) and math.isnan(read["turn_rewards"][0])
    assert [m["content"] for m in read["messages"]] == ["nan", "inf"]


def test_half_a_character_does_not_stop_the_run(tmp_path):
    path = _write(tmp_path, 1, [_trajectory(_turn("environment", "\ud83d", (1,)))])
    assert read_trajectories(path)[0]["messages"][0]["content"] == "?"


def test_a_policy_turn_needs_a_logprob_per_token(tmp_path):
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        _write(tmp_path, 1, [_trajectory(_turn("policy", "b2", (4, 2), (-0.5,), (1, 1)))])
    assert list(tmp_path.iterdir()) == []


def test_truncate_sets_later_steps_aside_and_removes_what_a_kill_left(tmp_path):
    folder, dropped = tmp_path / "trajectories", tmp_path / "trajectories.dropped"
    folder.mkdir()
    for times in (b"first", b"second"):
        for name in ("step_000001.jsonl", "step_000002.jsonl", "step_1000000.jsonl"):
            (folder / name).write_bytes(times)
        (folder / "step_000001.jsonl.tmp").write_bytes(b"")
        (folder / "notes.txt").write_bytes(b"")
        assert truncate_trajectories_after(folder, 1) == dropped
        assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "step_000001.jsonl"]
    assert {path.name: path.read_bytes() for path in dropped.iterdir()} == {
        "step_000002.jsonl": b"first",
        "step_000002.1.jsonl": b"second",
        "step_1000000.jsonl": b"first",
        "step_1000000.1.jsonl": b"second",
    }
    assert truncate_trajectories_after(folder, 1) is None
    assert truncate_trajectories_after(tmp_path / "absent", 1) is None


def test_damage_is_an_error_with_its_line(tmp_path):
    path = _write(tmp_path, 1, [EPISODE])
    path.write_bytes(path.read_bytes() + b'{"episode": 8')
    with pytest.raises(ValueError, match=r"step_000001\.jsonl, line 2"):
        read_trajectories(path)


def test_a_damaged_file_is_set_aside_where_the_report_is_written(tmp_path):
    folder = tmp_path / "trajectories"
    paths = [_write(folder, step, [EPISODE]) for step in (1, 2)]
    damaged = paths[1].read_bytes() + b'{"episode": 8\n'
    paths[1].write_bytes(damaged)
    (tmp_path / "metrics.jsonl").write_text("")
    screen = io.StringIO()
    with Progress(2, screen) as progress:
        for _ in range(2):
            Recorder(tmp_path, progress).write_report("a run", {}, ())
    aside = tmp_path / "trajectories.damaged" / paths[1].name
    assert aside.read_bytes() == damaged and list(folder.iterdir()) == [paths[0]]
    assert screen.getvalue().count("line 2 is not an episode") == 1
    assert str(aside) in screen.getvalue()
    assert f"Episode {EPISODE.episode}" in (tmp_path / "report.html").read_text()


def test_failures_are_counted_by_their_reason_and_numbers_make_none_of_their_own():
    reasons = [
        ("win", "row of three"),
        ("environment_timeout", "no answer within 10.0 s"),
        ("environment_error", "OSError: port 8080 is taken"),
        ("environment_error", "OSError: port 8081 is taken"),
        ("turn_too_long", "no end of turn within 4 tokens"),
    ]
    episodes = [
        dataclasses.replace(EPISODE, stop_reason=reason, detail=detail)
        for reason, detail in reasons
    ]
    failures = failures_of([episode.outcome for episode in episodes])
    assert failures == failures_of(episodes)
    assert (failures.num_failed, failures.num_episodes, failures.share) == (3, 5, 0.6)
    assert failures.reasons == (
        "environment_error: OSError: port 8080 is taken",
        "environment_timeout: no answer within 10.0 s",
    )
    assert failures.kind == "environment_error: OSError: port # is taken"
    assert failures.in_words() == (
        "3 of 5 episodes failed, most often as environment_error: OSError: port 8080 is taken"
    )
    none = failures_of(episodes[:1])
    assert (none.share, none.reasons, none.kind, none.in_words()) == (0.0, (), "", "")
    assert [episode.outcome.detail for episode in episodes][::4] == ["", ""], "failures' only"
