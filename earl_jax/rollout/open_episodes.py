# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that are open at a checkpoint: what they had, kept in a file.

A run that goes on gives their replies to environments anew, which begin from the same seeds. Where
these say what they said then, an episode goes on behind its last token (rollout/service.py);
otherwise it is played from its beginning.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from earl_jax.telemetry.atomic import write_atomically
from earl_jax.trajectory import Turn

# The folder of a workdir with a file for each checkpoint and process.
FOLDER = "open_episodes"
# Numbers of tokens in such a file, as the fields of a turn.
_FIELDS = {
    "token_ids": np.int32,
    "versions": np.int32,
    "logprobs": np.float32,
    "model_logprobs": np.float32,
}
# The end of the notes on a file that is not used.
_ANEW = "its open episodes are played from their beginning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEpisode:
    """The turns of an episode up to the policy's last one, which goes on with `in_turn`.

    Those of the environment and of the policy alternate in each conversation, an environment's
    first. Their ids are what counts; texts may be absent.
    """

    turns: tuple[Turn, ...]
    in_turn: bool = False

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token."""
        return min(turn.versions[0] for turn in self.turns if turn.versions)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(turn.versions) for turn in self.turns)


def open_episode(turns: Sequence[Turn], reply: Turn | None = None) -> OpenEpisode | None:
    """Returns the record of these turns and the `reply` under way; None: nothing was sampled."""
    turns = [*turns, *([] if reply is None else [reply])]
    while turns and turns[-1].author == "environment":
        # It says that again, when it is given the reply before it.
        turns = turns[:-1]
    return OpenEpisode(turns=tuple(turns), in_turn=reply is not None) if turns else None


# The files.


def write_episodes(
    workdir: Path, step: int, process: int, episodes: Mapping[int, OpenEpisode], rules: Any
) -> None:
    """Writes this process's open episodes by number, and the `rules` that they were played by."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    numbers: dict[str, list[float]] = {name: [] for name in _FIELDS}
    facts = []
    for turn in (turn for each in episodes.values() for turn in each.turns):
        fact = {"author": turn.author, "forks": turn.forks}
        fact |= {"conversation": turn.conversation} if turn.conversation else {}
        for name, values in numbers.items():
            values += getattr(turn, name)
            fact[name] = len(getattr(turn, name))
        facts.append(fact)
    heads = [[number, len(each.turns), each.in_turn] for number, each in episodes.items()]
    words = json.dumps({"rules": rules, "episodes": heads, "turns": facts}).encode()
    arrays: dict[str, Any] = {name: np.array(numbers[name], kind) for name, kind in _FIELDS.items()}
    file = io.BytesIO()
    np.savez(file, words=np.frombuffer(words, np.uint8), **arrays)
    write_atomically(folder / f"{step}.{process}.npz", file.getvalue())


def read_episodes(
    workdir: Path, step: int, rules: Any, say: Callable[[str], None]
) -> dict[int, OpenEpisode]:
    """Returns the episodes that all processes have kept with the checkpoint of this step.

    None of a file that is damaged, or whose episodes were played by other rules; `say` is told.
    """
    found: dict[int, OpenEpisode] = {}
    for path in sorted((workdir / FOLDER).glob(f"{step}.*.npz")):
        try:
            with np.load(io.BytesIO(path.read_bytes())) as arrays:
                words = json.loads(arrays["words"].tobytes())
                numbers = {name: iter(arrays[name].tolist()) for name in _FIELDS}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            say(f"{path} cannot be read ({error}): {_ANEW}")
            continue
        if words["rules"] == rules:
            found |= _episodes(words, numbers)
        else:
            changed = "config.asynchrony.rule, max_staleness or kv"
            say(f"{changed} is another one than in {path}: {_ANEW}")
    return found


def _episodes(words: dict[str, Any], numbers: dict[str, Iterator[Any]]) -> dict[int, OpenEpisode]:
    def turn(fact: dict[str, Any]) -> Turn:
        fields: dict[str, Any] = {
            name: tuple(islice(each, fact[name])) for name, each in numbers.items()
        }
        fields |= {name: fact[name] for name in ("forks", "conversation") if name in fact}
        return Turn(author=fact["author"], text="", **fields)

    turns = map(turn, words["turns"])
    return {
        number: OpenEpisode(turns=tuple(islice(turns, count)), in_turn=in_turn)
        for number, count, in_turn in words["episodes"]
    }


def drop_episodes(workdir: Path, kept: Sequence[int]) -> None:
    """Removes the files of all checkpoints but these, half written ones too."""
    for path in (workdir / FOLDER).glob("*.npz*"):
        if path.name.split(".")[0] not in map(str, kept):
            path.unlink(missing_ok=True)
