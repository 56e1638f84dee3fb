# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""trajectories/step_NNNNNN.jsonl: the episodes of a step, one a line, for people and for replay."""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.atomic import write_atomically
from earl_jax.telemetry.metrics import NONFINITE
from earl_jax.trajectory import FAILURES, Outcome, Trajectory, Turn

_ROLES = {"environment": "user", "policy": "assistant"}


def trajectory_lines(trajectories: Iterable[Trajectory]) -> list[str]:
    """Returns each episode as a line of `write_trajectories`: a JSON object.

    Its keys: episode, group, role, reward, stop_reason, detail, num_turns, num_tokens,
    turn_rewards, turn_roles (the side of each policy turn, where the policy played several),
    metrics (what the environment reported, if anything), messages (`{"role": "user", "content":
    text}`; the policy is "assistant"), sample_starts (where several samples begin among the tokens;
    not there for one), and four flat lists of one entry per token: token_ids, wrote ("e"
    environment, "p" policy), logprobs and versions (null where the environment wrote); a fifth,
    model_logprobs, where these were recorded (config.train.ratio "model"). A log-prob that is not
    finite is the string "nan", "inf" or "-inf".

    Example: prompt ids (9, 8) and reply (4,) give token_ids [9, 8, 4], wrote ["e", "e", "p"],
    logprobs [null, null, -0.5], versions [null, null, 3].

    Raises ValueError where a policy turn has another number of log-probs or versions than tokens.
    """
    return [json.dumps(_record(t), ensure_ascii=False, allow_nan=False) for t in trajectories]


def write_trajectories(folder: Path, step: int, lines: Iterable[str]) -> Path:
    """Writes `folder`/step_NNNNNN.jsonl from its lines, atomically, and returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    write_atomically(path, "".join(line + "\n" for line in lines))
    return path


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """Returns the episodes of a file of `write_trajectories`, with floats for "nan".

    Raises ValueError with the line number where a line is not a JSON object.
    """
    episodes = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            episode = json.loads(line)
            for key in ("logprobs", "turn_rewards", *({"model_logprobs"} & episode.keys())):
                episode[key] = [NONFINITE.get(x, x) for x in episode[key]]
            episode["reward"] = NONFINITE.get(episode["reward"], episode["reward"])
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}, line {number} is not an episode: {error!r}") from error
        episodes.append(episode)
    return episodes


def truncate_trajectories_after(folder: Path, step: int) -> Path | None:
    """Moves the files of steps greater than `step` out of the folder, and removes unfinished files.

    Returns the folder beside it that they are in, trajectories.dropped; None where there are none.
    """
    dropped = None
    for path in sorted(folder.glob("step_*.jsonl*")):
        match = re.fullmatch(r"step_(\d{6,})\.jsonl(\.tmp)?", path.name)
        if match and match[2]:
            path.unlink()
        elif match and int(match[1]) > step:
            dropped = folder.with_name(f"{folder.name}.dropped")
            set_file_aside(path, dropped)
    return dropped


def set_file_aside(path: Path, folder: Path) -> Path:
    """Moves a file to a folder, under a name that is free there, which is returned."""
    folder.mkdir(exist_ok=True)
    names = (f"{path.stem}{f'.{n}' if n else ''}{path.suffix}" for n in itertools.count())
    target = next(folder / name for name in names if not (folder / name).exists())
    path.rename(target)
    return target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """The episodes of a step that failed, and that nothing can be learnt from.

    `reasons` are the different ones, the most frequent first; of those that differ in numbers only
    (a port, an address) it is the first one.
    """

    num_failed: int
    num_episodes: int
    reasons: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of the episodes that failed."""
        return self.num_failed / self.num_episodes

    @property
    def kind(self) -> str:
        """The most frequent reason without its numbers; "" where none failed."""
        return _without_numbers("".join(self.reasons[:1]))

    def in_words(self) -> str:
        """Returns how many failed, and the most frequent reason; "" for none.

        Example: "8 of 8 episodes failed, most often as unencodable: the chat template has no
        place for tools".
        """
        if not self.reasons:
            return ""
        first, *others = self.reasons
        often = ", most often" if others else ""
        return f"{self.num_failed} of {self.num_episodes} episodes failed{often} as {first}"


def failures_of(episodes: Sequence[Trajectory | Outcome]) -> Failures:
    """Returns the failures among these episodes, of which there is at least one."""
    failed = [f"{e.stop_reason}: {e.detail[:300]}" for e in episodes if e.stop_reason in FAILURES]
    counts = collections.Counter(map(_without_numbers, failed))
    examples = {_without_numbers(reason): reason for reason in reversed(failed)}
    return Failures(
        num_failed=len(failed),
        num_episodes=len(episodes),
        reasons=tuple(examples[kind] for kind, _ in counts.most_common()),
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+\b|\d+", "#", text)


def _record(trajectory: Trajectory) -> dict[str, Any]:
    turns = trajectory.turns
    return {
        "episode": int(trajectory.episode),
        "group": int(trajectory.group),
        "role": trajectory.role,
        "reward": _number(trajectory.reward),
        "stop_reason": trajectory.stop_reason,
        "detail": trajectory.detail,
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "turn_rewards": [_number(x) for x in trajectory.turn_rewards],
        **({"turn_roles": trajectory.turn_roles} if trajectory.turn_roles else {}),
        **({"metrics": dict(trajectory.metrics)} if trajectory.metrics else {}),
        "messages": [message for turn in turns for message in _messages(turn)],
        **({"sample_starts": trajectory.sample_starts} if trajectory.sample_starts != (0,) else {}),
        "token_ids": [int(token) for turn in turns for token in turn.token_ids],
        "wrote": _join(turns, lambda turn: [turn.author[0]] * len(turn.token_ids)),
        "logprobs": _join(turns, lambda turn: _per_token(turn, "logprobs", _number)),
        "versions": _join(turns, lambda turn: _per_token(turn, "versions", int)),
        **(
            {"model_logprobs": _join(turns, lambda t: _per_token(t, "model_logprobs", _number))}
            if any(turn.model_logprobs for turn in turns)
            else {}
        ),
    }


def _messages(turn: Turn) -> list[dict[str, str]]:
    messages = turn.messages or ((_ROLES[turn.author], turn.text),)
    return [{"role": role, "content": text} for role, text in messages]


def _join(turns: Sequence[Turn], entries) -> list:
    return list(itertools.chain.from_iterable(map(entries, turns)))


def _per_token(turn: Turn, field: str, convert) -> list:
    if turn.author == "environment":
        return [None] * len(turn.token_ids)
    values = getattr(turn, field)
    if len(values) != len(turn.token_ids):
        raise InputError(
            f"a policy turn has {len(turn.token_ids)} tokens but {len(values)} {field}; "
            f"Turn.{field} must hold one value per token"
        )
    return [convert(value) for value in values]


def _number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else repr(value)
