# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a run's events (events.py): read for a replay, and cut where a run goes on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.atomic import write_atomically
from earl_jax.telemetry.episodes import set_file_aside

# The file of a run's events in its workdir.
EVENTS = "events.jsonl"
# What is read of events when a run goes on.
_KEYS = {
    "open": {"version"},
    "submit": {"groups"},
    "take": {"groups"},
    "drop": {"groups"},
    "trained": {"step"},
}
# The events of a process that only trains: those that all processes have.
_SHARED = ("open", "plans")


def events_file(workdir: Path, process: int = 0) -> Path:
    """Returns the file of a process's events; that of the first is `EVENTS`."""
    return workdir / (f"events.{process}.jsonl" if process else EVENTS)


def read_events(workdir: Path, process: int = 0) -> list[dict[str, Any]]:
    """Returns the events of a run, as this process is to repeat them.

    They end with the last step that has ended in all processes; a rollout that was stopped behind
    it has none.

    Raises:
        InputError: the folder has none, its file is damaged, or no step has ended.
    """
    path = events_file(workdir, process)
    only_trains = not path.exists()
    path = next(
        (each for each in (path, workdir / EVENTS, *_files(workdir)) if each.exists()), path
    )
    try:
        lasts = [_last_step(_whole_lines(each)) for each in _files(workdir)]
        # Where one was killed, others may be a step ahead; a file may be of an earlier number of
        # processes.
        step = min((last for last in lasts if last >= max(lasts) - 1), default=0)
        events = [event for event, _ in _up_to(_whole_lines(path), step)]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); a run is replayed by its events"
        ) from error
    if not events:
        raise InputError(f"{path} has no step that has ended; there is nothing to replay")
    if any("version" not in event for event in events):
        raise InputError(
            f"{path} has events without the version of the weights, of an earlier version of "
            "earl_jax; replay the run with that one"
        )
    if first := next((e["version"] for e in events if e["event"] == "open"), 0):
        raise InputError(
            f"{path} begins with step {first + 1}: the run has no events of the steps before, as "
            "an earlier version of earl_jax wrote none of synchronous ones, and cannot be replayed"
        )
    return [event for event in events if not only_trains or event["event"] in _SHARED]


def drop_events(workdir: Path, step: int) -> None:
    """Drops all processes' events behind the end of this step, of a run that goes on from there."""
    for path in _files(workdir):
        kept = [line for _, line in _up_to(_whole_lines(path), step)]
        write_atomically(path, "".join(line + "\n" for line in kept))


def set_events_aside(workdir: Path, step: int) -> None:
    """Moves all processes' events, which are damaged or end before this step, to until_STEP."""
    for path in _files(workdir):
        set_file_aside(path, workdir / f"until_{step}")


def last_noted_step(workdir: Path) -> int:
    """Returns the last step that has ended by all processes' events; 0 for none."""
    return max((_last_step(_whole_lines(path)) for path in _files(workdir)), default=0)


class Begun(NamedTuple):
    """The groups of a run from the first that was submitted to the last.

    Of the `open_groups` no step took one, nor was it dropped; it may have been submitted or not.
    """

    first: int
    last: int
    open_groups: list[int]


def begun_groups(workdir: Path, step: int) -> Begun | None:
    """Returns the groups that are begun by all processes' events, whoever played them.

    All numbers of groups in events are those of the run. Behind a synchronous step none is open.
    None without groups, or without events up to the end of this step.
    """
    if last_noted_step(workdir) != step:
        return None
    files = [_whole_lines(path) for path in _files(workdir)]
    ends = [event for lines in files for event, _ in lines if event["event"] == "trained"]
    synchronous = max((each["step"] for each in ends if "round" not in each), default=0)
    files = [lines[len(_up_to(lines, synchronous)) :] for lines in files]
    submitted: set[int] = set()
    over: set[int] = set()
    for lines in files:
        # Of one process: a group is submitted again where memory was too short for what took it.
        own: dict[int, str] = {}
        for event, _ in lines:
            if event["event"] in ("submit", "take", "drop"):
                own.update(dict.fromkeys(event["groups"], event["event"]))
        submitted |= own.keys()
        over |= {number for number, last in own.items() if last != "submit"}
    if not submitted:
        return None
    first, last = min(submitted), max(submitted)
    return Begun(first, last, [n for n in range(first, last + 1) if n not in over])


def _files(workdir: Path) -> list[Path]:
    """Returns the files of all processes' events."""
    return sorted(workdir.glob("events*.jsonl"))


def _whole_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Returns the events of a file and their lines, without a last one that was cut short.

    Raises InputError for another line that is no event.
    """
    lines, found = path.read_bytes().splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            name = event.get("event") if isinstance(event, dict) else None
            if name is None or not _KEYS.get(name, set()) <= event.keys():
                raise ValueError(f"{event!r:.60} is no event")
            found.append((event, line.decode()))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path} is damaged in line {number}: {error}") from error
    return found


def _last_step(events: Sequence[tuple[dict[str, Any], str]]) -> int:
    return max((event["step"] for event, _ in events if event["event"] == "trained"), default=0)


def _up_to(
    events: Sequence[tuple[dict[str, Any], str]], step: int
) -> Sequence[tuple[dict[str, Any], str]]:
    """Returns the events up to the end of this step."""
    ends = (
        number
        for number, (event, _) in enumerate(events, start=1)
        if event["event"] == "trained" and event["step"] <= step
    )
    return events[: max(ends, default=0)]
