# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Events of a run: all that depends on time, written down so that it can be replayed.

One thread plays and trains, or plays in a process of its own, so that events have one order. Of
several processes each that plays has its events in a file of its own, and those that train decide
nothing by the time. Each event is a JSON object on a line of its own, with its `event` and the
`version` of the weights in use, which is that of the last "open" or "publish" before it:

- "open": a rollout service was opened, with weights of `version`, by a run with these `settings`
  (config/resume.py); rounds and calls are counted from here. Where a step has another one before,
  memory was too short for that. In a synchronous run each step begins with one.
- "plans": plans were chosen (`Placement.as_dict`), or memory was too short for an update, which is
  made with these.
- "split": behind round `round` both stages moved, before version `version` was published, to plans
  of a `placement` whose split of the devices is another one.
- "grow": a session moved to the roomier plan of a `placement` behind the `call`-th look.
- "tail": the last episodes of a step moved to a `plan` (`RolloutPlan.as_list`) behind that look.
- "queue": a process asked for groups of the queue of all processes; the next one was `first`.
- "submit": the tasks of the groups `groups` were submitted behind round `round`.
- "answers": in the `call`-th look for answers those of the tickets `tickets` were there; `failed`
  has the stop reason and detail of calls that hung or raised, and `requests` by ticket the names of
  the requests of agents that were taken, where there are some; a name has the rewards before it.
- "asked": in the `poll`-th look for requests of agents, those with the keys `keys` were there; the
  branches of episodes (`answers.branch_key`) have `requests` of these names.
- "checksum": the `sum` of all bits of these weights, with config.asynchrony.checksums.
- "publish": weights of `version` were published behind round `round`.
- "take": a step took the groups `groups` behind round `round`; "drop": they were given up.
- "trained": step `step` had ended, and an asynchronous run had played so many rounds.
"""

import collections
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.envs.pool import Failure
from earl_jax.envs.round_wait import RoundWait
from earl_jax.rollout.answers import Answer, Answers, ticket_of
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.atomic import sync

# A replay waits so long for a request of an agent that came in the run that is replayed.
_REQUEST_S = 60.0


class Events:
    """Writes events to a file, or compares them with those of an earlier run."""

    def __init__(self, path: Path | None = None, replayed: Sequence[dict[str, Any]] = ()) -> None:
        """Appends to `path`, None: nowhere; with `replayed`, these must come again."""
        self._path, self._replayed = path, list(replayed)
        self.is_replay = bool(replayed)
        # Looks for answers since the last "open".
        self.num_calls = 0
        self._next = self._version = 0
        # Of a replay since the last "open": the requests that are still to be taken, by ticket.
        self._requests: dict[int, collections.deque[str]] | None = None
        # Lines of the step under way.
        self._unwritten: list[str] = []

    def note(self, event: str, **facts: Any) -> None:
        """Notes an event, with the version of the weights in use unless `facts` have another one.

        It is written when its step has ended, or before a checkpoint (`sync`).

        Raises RunError where a replayed run did something else here.
        """
        line = json.loads(json.dumps({"event": event, "version": self._version, **facts}))
        if self.is_replay:
            if event == "trained":
                self._leave_out_a_round()
            expected = self._replayed[self._next] if self._next < len(self._replayed) else None
            if line != expected:
                raise RunError(
                    f"event {self._next + 1} of the run that is replayed is {expected}, and here "
                    f"it is {line}; replay it with the same code, packages and kind of devices"
                )
            self._next += 1
        if self._path is not None:
            self._unwritten.append(json.dumps(line) + "\n")
        if event == "trained":
            self._write()
        if event in ("open", "publish"):
            self._version = line["version"]
        if event == "open":
            self.num_calls, self._requests = 0, None

    def sync(self) -> None:
        """Returns when the events are on the disk: before a checkpoint that needs them is whole."""
        self._write()
        if self._path is not None and self._path.exists():
            sync(self._path)

    def _write(self) -> None:
        """Writes what was noted: once a step, as an append may take long on a shared disk."""
        if self._path is not None and self._unwritten:
            with self._path.open("a") as file:
                file.writelines(self._unwritten)
        self._unwritten = []

    def _leave_out_a_round(self) -> None:
        """Goes past what a round beside an update noted that came to no end, as by a signal.

        The service is opened anew behind it.
        """
        rest = self._replayed[self._next :]
        names = itertools.takewhile(
            ("answers", "asked", "grow").__contains__, (e["event"] for e in rest)
        )
        number = len(list(names))
        behind = rest[number + 1 : number + 2]
        if not behind or behind[0]["event"] == "open":
            self._next += number

    def skip_given_up(self) -> None:
        """Goes past the rollouts of a step that a synchronous run gave up, in a replay of it.

        Memory was too short for them, and nothing of them was trained on.
        """
        if (first := self.coming("open")) is None:
            return
        rest = self._replayed[self._next :]
        of_step = itertools.takewhile(lambda each: each["version"] == first["version"], rest)
        opened = [number for number, each in enumerate(of_step) if each["event"] == "open"]
        for each in rest[: opened[-1]]:
            self.note(**each)

    def coming(self, event: str) -> dict[str, Any] | None:
        """Returns the next event of a replay if it is of this name, and leaves it there."""
        found = self._replayed[self._next] if self._next < len(self._replayed) else None
        return found if found and found["event"] == event else None

    @property
    def is_over(self) -> bool:
        """True in a replay behind the last event."""
        return self.is_replay and self._next == len(self._replayed)

    def later(self, *events: str) -> dict[str, Any] | None:
        """Returns the first event of these names that is still to come in a replay."""
        rest = itertools.islice(self._replayed, self._next, None)
        return next((each for each in rest if each["event"] in events), None)

    def requests_of(self, ticket: int) -> collections.deque[str] | None:
        """Returns the names of the requests that are still to be taken in a replay of an episode.

        None in a run that is no replay, and where the service's events have no names, as those of
        an earlier version. Whoever takes one removes it.
        """
        if not self.is_replay:
            return None
        if self._requests is None:
            self._requests = collections.defaultdict(collections.deque)
            rest = itertools.islice(self._replayed, self._next, None)
            for each in itertools.takewhile(lambda each: each["event"] != "open", rest):
                named = each.get("requests", {}).items()
                for key, name in named if each["event"] in ("answers", "asked") else ():
                    self._requests[ticket_of(int(key))].append(name)
        return self._requests[ticket] if self._requests else None

    def record_calls(self, calls: Answers) -> Answers:
        """Returns the calls, with answers that are noted, or come as they did."""
        return _Recorded(calls, self)

    def next_call(self) -> int:
        """Returns the number of this look for answers."""
        self.num_calls += 1
        return self.num_calls


class _Recorded:
    """Calls whose answers are noted; in a replay each comes in the call in which it came."""

    def __init__(self, calls: Answers, events: Events) -> None:
        self._inner, self._events = calls, events
        # In a replay: answers that came before they are due, and tickets whose call has failed as
        # it did then, and is still under way here.
        self._early: dict[int, Answer | Failure] = {}
        self._given_up: set[int] = set()
        self._num_polls = 0

    def submit(self, calls: Any) -> None:
        self._inner.submit(calls)

    def take(
        self, wait: float | RoundWait = 0.0, *, at_least_one: bool = False
    ) -> dict[int, Answer | Failure]:
        call = self._events.next_call()
        if not self._events.is_replay:
            found = self._inner.take(wait, at_least_one=at_least_one)
        else:
            found = self._replayed(call, at_least_one)
        if found:
            failed = {
                str(ticket): [answer.stop_reason, answer.detail]
                for ticket, answer in found.items()
                if isinstance(answer, Failure)
            }
            requests = {
                str(ticket): answer.result.request
                for ticket, answer in found.items()
                if isinstance(answer, Answer) and answer.result.request
            }
            named = {"requests": requests} if requests else {}
            self._events.note("answers", call=call, tickets=list(found), failed=failed, **named)
        return found

    def poll(self, polls: Mapping[int, Callable[[], str | None]]) -> dict[int, str]:
        self._num_polls += 1
        if not self._events.is_replay:
            found = self._inner.poll(polls)
        else:
            event = self._events.coming("asked") or {"poll": 0}
            due = event["keys"] if event["poll"] == self._num_polls else []
            found = {key: self._comes(key, polls) for key in due}
        if found:
            requests = {str(key): name for key, name in found.items() if name}
            self._events.note("asked", poll=self._num_polls, keys=list(found), requests=requests)
        return found

    def _comes(self, key: int, polls: Mapping[int, Callable[[], str | None]]) -> str:
        """Waits for a request that was there in the run that is replayed. Returns its name."""
        until = time.monotonic() + _REQUEST_S
        while key in polls and time.monotonic() < until:
            if (name := polls[key]()) is not None:
                return name
            time.sleep(0.001)
        raise RunError(
            f"look {self._num_polls} for requests found one of {key} in the run that is replayed, "
            "and here there is none; replay it with the same agents, code, packages and devices"
        )

    def _replayed(self, call: int, at_least_one: bool) -> dict[int, Answer | Failure]:
        event = self._events.coming("answers")
        if event is None or event["call"] != call:
            if at_least_one and self._wait_for_some():
                raise RunError(
                    f"look {call} of the run that is replayed had no answer, and here one is "
                    "waited for; replay it with the same code, packages and kind of devices"
                )
            return {}
        failed = {
            int(ticket): Failure(stop_reason=reason, detail=detail)
            for ticket, (reason, detail) in event["failed"].items()
        }
        found: dict[int, Answer | Failure] = {}
        for ticket in event["tickets"]:
            while ticket not in failed and ticket not in self._early:
                came = self._wait_for_some()
                if not came:
                    raise RunError(
                        f"the answer to ticket {ticket} came in look {call} of the run that is "
                        "replayed, and here no environment was asked for it; replay it with the "
                        "same code, packages and kind of devices"
                    )
                self._early |= came
            early = self._early.pop(ticket, None)
            if early is None:
                self._given_up.add(ticket)
            found[ticket] = failed.get(ticket) or early  # pyright: ignore[reportArgumentType]
        return found

    def _wait_for_some(self) -> dict[int, Answer | Failure]:
        """Returns the next answers, but for calls that have failed as then; {}: none is awaited."""
        while came := self._inner.take(at_least_one=True):
            late = self._given_up & came.keys()
            self._given_up -= late
            if len(late) < len(came):
                return {ticket: came[ticket] for ticket in came if ticket not in late}
        return {}
