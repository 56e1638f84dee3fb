# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A soak of the rollout service by a client that does everything, in any order: soak.md.

    uv run python -m benchmarks.soak [--tokens=100000] [--seed=0] [--windows=4,0,0] [--write]

The client submits tasks, aborts some and gives them again, holds rows, changes the weights with
`kv="keep"` and "recompute", and pauses. Environments are slow, raise, answer garbage or hang. The
pool has pages for little more than one whole episode a row shard, so that episodes are preempted,
and host memory for the pages of few of them. Then:

- Each sampled token, of aborted tasks too, has the log-prob of a full forward pass of the trainer's
  decoder. Where several versions of the weights wrote its context, each position of that pass has
  the weights that wrote it (tests/support/contexts.py).
- With `--windows` layers have these windows, and episodes give up the pages behind them.
- Episodes come once, each as its row has it, and end as their environments do; all pages are free.
- What waits is counted in rounds (steps of the service).

Any of it that does not hold is an AssertionError.
"""

import collections
import dataclasses
import random
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.pages import parser_of, show, table
from earl_jax.engine.engine import Policy
from earl_jax.envs.environment import EPISODE_TOO_LONG, TURN_TOO_LONG, Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.launch.start import start_jax
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.rollout.task import Task
from earl_jax.sharding.layout import MeshShape
from tests.support.contexts import Gap, Recorder, gaps_of, trainer_params
from tests.support.episodes import (
    MODEL,
    check_nothing_is_held,
    check_row,
    engine,
    open_service,
    renderer,
    weight_values,
)

PAGE = Path(__file__).with_suffix(".md")
SLOTS, MESH = 8, MeshShape(data=2)
# Tokens of an episode, and pages of a row shard of four slots, as a multiple of the longest's.
LONGEST, PAGES = 64, 1.25
# Host memory for the pages of few preempted episodes: the others are read again.
HOST_GIB = 3 * 2**16 / 2**30
# Sets of weights, which versions take in turn.
NUM_WEIGHTS = 3
# The most tasks that wait for a slot, and rows that the client holds.
MOST_WAITING, MOST_HELD = 16, 4
# What the client does before a round, each with its probability.
SUBMIT, ABORT, SWAP, PAUSE = 0.4, 0.04, 0.05, 0.02
PAUSE_S = 0.03
# Long enough for a sound environment on a busy machine.
TIMEOUT_S = 3.0
# How environments end, and how often.
ENDS = {"done": 20, "raises": 1, "garbage": 1, "at start": 1, "hangs": 0.3}
# By its end, why an episode is over that is not cut before.
REASONS = {"done": "end", "hangs": "environment_timeout"}
CUTS = (TURN_TOO_LONG, EPISODE_TOO_LONG)
# Of a log-prob: sums are added up in another order than in a full forward pass.
MOST_GAP = 1e-5
# What has to happen, or the soak shows nothing (`RolloutStats`).
COUNTS = (
    *("preempted_episodes", "preempted_host_bytes", "recomputed_tokens", "shared_tokens"),
    *("copied_tokens", "other_shard_episodes", "drafted_tokens", "accepted_tokens"),
)


class Visitor:
    """An environment of one to four turns; its seed says how slow it is, and how it ends.

    Four tasks begin with the same words, most of which are those of all.
    """

    def __init__(self, seed: int, released: threading.Event) -> None:
        rng = random.Random(seed)
        self._rng, self._released, self._group = rng, released, seed // 4
        self._turns, self._delay_s = rng.randint(1, 4), rng.choice([0, 0, 0, 0.002, 0.02])
        (self.end,) = rng.choices(list(ENDS), list(ENDS.values()))

    def start(self) -> Start:
        """Returns the first words, or raises."""
        if self.end == "at start":
            raise OSError("no board")
        return Start(text=f"012345678012345678{self._group % 9}", role="x")

    def step(self, reply: str) -> StepResult:
        """Answers with some digits, or ends."""
        time.sleep(self._delay_s)
        self._turns -= 1
        if self._turns:
            text = "8" * self._rng.choice([1, 2, 9])
            return StepResult(text=text, reward=0.5, done=False)
        if self.end == "raises":
            raise OSError("the board fell over")
        if self.end == "hangs":
            self._released.wait()
        if self.end == "garbage":
            return {"text": reply}  # pyright: ignore[reportReturnType]
        return StepResult(text="", reward=0.5, done=True, stop_reason="end")


def talkative(seed: int, model: ModelConfig = MODEL) -> Any:
    """Returns a policy that says random digits, and ends its turn after some of them."""
    values = weight_values(seed, ends_turns=False, model=model)
    head = values["head"].copy()
    head[0, renderer().end_of_turn_id] = 0
    return {**values, "head": head}


class Waits:
    """Counts the rounds that tasks wait for a slot, and episodes in slots for their pages.

    `overtaken`: the most tickets between a task that waits for a slot and one that had one before
    it. `in_slot_alone` are rounds in which no environment of the row shard hangs, whose episode
    keeps its pages. `overtaken_in_slot`: the most episodes of a row shard that began to be read
    before one that had come to its slot earlier, and had its prompt.
    """

    def __init__(self) -> None:
        self.for_slot = self.overtaken = self.overtaken_in_slot = 0
        self.in_slot = self.in_slot_alone = 0
        self._round = 0
        self._submitted: dict[int, int] = {}
        # By ticket: what an episode has come to, for how many rounds, and how many of them alone.
        self._standing: dict[int, tuple[tuple[int, ...], int, int]] = {}
        # By ticket, of episodes that have their prompt and have read nothing: since which round, in
        # which row shard, and how many have overtaken them. And tickets of those that have begun.
        self._new: dict[int, tuple[int, int, int]] = {}
        self._begun: set[int] = set()

    def submit(self, tickets: Sequence[int]) -> None:
        """Notes new tasks."""
        self._submitted |= dict.fromkeys(tickets, self._round)

    def abort(self, tickets: Sequence[int]) -> None:
        """Notes tasks that wait no longer."""
        for ticket in tickets:
            self._submitted.pop(ticket, None)
            self._new.pop(ticket, None)

    def end_round(
        self, slots: Sequence[LiveEpisode | None], over: Sequence[int], hung: Collection[int]
    ) -> None:
        """Notes which episodes are in the slots behind a round, which are over, and which hang."""
        self._round += 1
        live = {slot: each for slot, each in enumerate(slots) if each is not None}
        in_slots = [*over, *(each.ticket for each in live.values())]
        here = [ticket for ticket in in_slots if ticket in self._submitted]
        for ticket in here:
            self.for_slot = max(self.for_slot, self._round - self._submitted.pop(ticket))
        if here and self._submitted:
            self.overtaken = max(self.overtaken, max(here) - min(self._submitted))
        for slot, each in live.items():
            self._note_beginning(each, slot * MESH.data // SLOTS)
        for ticket in over:
            self._new.pop(ticket, None)
        held = {slot * MESH.data // SLOTS for slot, each in live.items() if each.ticket in hung}
        before, self._standing = self._standing, {}
        for slot, each in live.items():
            # Reading again takes ids off the queue, and sampling adds to the length.
            place = (each.num_written, each.length, len(each.queue))
            last, rounds, alone = before.get(each.ticket, ((), 0, 0))
            if place != last or each.waits:
                rounds = alone = -1
            alone += slot * MESH.data // SLOTS not in held
            self._standing[each.ticket] = place, rounds + 1, max(0, alone)
            self.in_slot = max(self.in_slot, rounds + 1)
            self.in_slot_alone = max(self.in_slot_alone, alone)

    def _note_beginning(self, episode: LiveEpisode, shard: int) -> None:
        """Notes that an episode has its prompt, or has begun to be read; once each."""
        if episode.fresh:
            if not episode.waits:
                self._new.setdefault(episode.ticket, (self._round, shard, 0))
        elif episode.ticket not in self._begun:
            self._begun.add(episode.ticket)
            came, *_ = self._new.pop(episode.ticket, (self._round,))
            for ticket, (since, where, count) in self._new.items():
                if where == shard and since < came:
                    self._new[ticket] = (since, where, count + 1)
                    self.overtaken_in_slot = max(self.overtaken_in_slot, count + 1)


@dataclasses.dataclass
class Client:
    """One client of a service, its random choices, and what came of them."""

    rng: random.Random
    service: RolloutService
    recorder: Recorder
    num_tokens: int
    policies: Sequence[Any]
    waits: Waits = dataclasses.field(default_factory=Waits)
    # By ticket: tasks that are not over; and why those ended that are.
    owner: dict[int, Task] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    held: list[Finished] = dataclasses.field(default_factory=list)

    def play(self) -> None:
        """Plays until so many tokens are sampled, and then all tasks to their end."""
        while not self.is_enough or self.service.is_busy:
            for chance, act in (
                (SUBMIT, self._submit_new),
                (ABORT, self._abort),
                (SWAP, self._swap),
                (PAUSE, self._pause),
            ):
                if self.rng.random() < chance:
                    act()
            self._step()
        for each in self.held:
            self.service.release(each.row)

    @property
    def is_enough(self) -> bool:
        """Returns whether no more tasks are to come."""
        return self.service.stats.rollout_tokens >= self.num_tokens

    def _submit(self, tasks: Sequence[Task]) -> None:
        tickets = self.service.submit(tasks)
        self.owner |= dict(zip(tickets, tasks, strict=True))
        self.waits.submit(tickets)

    def _submit_new(self) -> None:
        num = min(self.rng.randint(1, 12), MOST_WAITING - len(self.owner) + self.service.num_live)
        if num > 0 and not self.is_enough:
            first = self.counts["tasks"]
            self._submit([Task(episode=e, group=e // 4) for e in range(first, first + num)])
            self.counts["tasks"] += num

    def _abort(self) -> None:
        """Gives up some tasks, those that wait and those that play, and submits them again."""
        chosen = self.rng.sample(sorted(self.owner), min(len(self.owner), 3))
        given_up = self.service.abort(chosen)
        self.waits.abort(chosen)
        # Those that are over are handed out by the next step.
        tickets = {self.owner[ticket].episode: ticket for ticket in chosen}
        for task in given_up:
            del self.owner[tickets[task.episode]]
        self.counts["aborted"] += len(given_up)
        self._submit(given_up)

    def _swap(self) -> None:
        kv = self.rng.choice(("keep", "recompute"))
        version = self.service.session.policy.version + 1
        params = self.policies[version % NUM_WEIGHTS]
        self.service.update_weights(Policy(params=params, version=version), kv)
        self.recorder.look()
        self.counts[kv] += 1

    def _pause(self) -> None:
        """Makes no step for a while; environments go on."""
        time.sleep(PAUSE_S)
        self.counts["pauses"] += 1

    def _step(self) -> None:
        finished = self.service.step()
        self.recorder.look()
        slots = self.service._slots
        hung = {
            each.ticket
            for each in slots
            if each and each.waits and _end_of(self.owner[each.ticket].episode) == "hangs"
        }
        self.waits.end_round(slots, [each.ticket for each in finished], hung)
        for each in finished:
            del self.owner[each.ticket]
            self.recorder.check(each.ticket, each.trajectory)
            self.ended[each.trajectory.episode] = each.trajectory.stop_reason
        self.held += finished
        if finished:
            # Those that are held may have moved, too.
            for each in self.held:
                check_row(self.service, each)
        while self.held and (len(self.held) > MOST_HELD or self.rng.random() < 0.5):
            self.service.release(self.held.pop(self.rng.randrange(len(self.held))).row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of a soak: its client, counts of the service, and the gaps of all tokens."""

    client: Client
    stats: RolloutStats
    gaps: Sequence[Gap]
    seconds: float

    def check(self) -> None:
        """Raises AssertionError where a claim of this module does not hold."""
        ended, stats, waits = self.client.ended, self.stats, self.client.waits
        assert sorted(ended) == list(range(self.client.counts["tasks"])), "each comes once"
        for episode, reason in ended.items():
            end = _end_of(episode)
            cut = reason in CUTS and end != "at start"
            assert cut or reason == REASONS.get(end, "environment_error"), (episode, reason)
        assert len(self.gaps) == stats.rollout_tokens
        assert max(gap.exact for gap in self.gaps) < MOST_GAP
        assert max(gap.alone for gap in self.gaps if gap.whole) < MOST_GAP
        # Of another policy: a claim that can fail.
        assert max(gap.alone for gap in self.gaps if not gap.whole) > 1e-2
        assert waits.overtaken < self.client.service.rows.batch_size
        assert all(getattr(stats, name) for name in COUNTS), stats
        assert {*REASONS.values(), "environment_error"} < {*ended.values()}
        assert all(self.client.counts[name] for name in ("aborted", "keep", "recompute", "pauses"))

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the page's table."""
        counts, reasons = self.client.counts, collections.Counter(self.client.ended.values())
        whole = [gap for gap in self.gaps if gap.whole]
        mixed = [gap for gap in self.gaps if not gap.whole]
        stats, waits = self.stats, self.client.waits
        found = {
            "sampled tokens": stats.rollout_tokens,
            "rounds": stats.rounds,
            "episodes that are over": len(self.client.ended),
            "tasks that were aborted, and given again": counts["aborted"],
            "weight swaps, `keep`": counts["keep"],
            "weight swaps, `recompute`": counts["recompute"],
            "pauses": counts["pauses"],
            "episodes whose environment raised or answered garbage": reasons["environment_error"],
            "episodes whose environment hung": reasons["environment_timeout"],
            "preemptions": stats.preempted_episodes,
            "KiB of pages moved to host memory and back": stats.preempted_host_bytes // 1024,
            "tokens that were read again": stats.recomputed_tokens,
            "tokens of prompts that were shared": stats.shared_tokens,
            "drafted tokens": stats.drafted_tokens,
            "drafted tokens that were accepted": stats.accepted_tokens,
            "tokens whose context one version wrote": len(whole),
            "- the most that a log-prob is off": _exponent(max(gap.exact for gap in whole)),
            "tokens whose context several versions wrote": len(mixed),
            "- the most that one is off": _exponent(max(gap.exact for gap in mixed)),
            "- the most that one is off from the newest weights alone": _exponent(
                max(gap.alone for gap in mixed)
            ),
            "most rounds that a task waited for a slot": waits.for_slot,
            "most rounds that an episode with something to do stood still": waits.in_slot,
            "- while no environment of its row shard hung": waits.in_slot_alone,
            "most tickets by which a task had a slot before an older one": waits.overtaken,
            "most episodes of a row shard that overtook one in its slot": waits.overtaken_in_slot,
            "seconds": round(self.seconds),
        }
        return [{"what": name, "number": value} for name, value in found.items()]


def soak(num_tokens: int, seed: int, windows: tuple[int, ...] = ()) -> Findings:
    """Plays until so many tokens are sampled, and all tasks are over. Returns what was found.

    The model has a layer for each of these `windows`, 0 for full attention.
    """
    model = dataclasses.replace(MODEL, num_layers=len(windows) or 1, windows=windows)
    start_s, recorder, released = time.perf_counter(), Recorder(), threading.Event()
    pool = EnvironmentPool(16, timeout_s=TIMEOUT_S)
    player = engine(SLOTS, MESH, draft=2, episodes=SLOTS, model=model)
    rule = player.config.page_rule
    values = [talkative(number, model) for number in range(NUM_WEIGHTS)]
    policies = [player.load_params(jax.tree.map(jnp.asarray, each)) for each in values]
    service = recorder.service = open_service(
        pool,
        lambda task: Visitor(task.episode, released),
        params=policies[0],
        max_tokens=LONGEST,
        num_slots=SLOTS,
        pages=int(PAGES * rule.most_pages(LONGEST)),
        grow=lambda session, tokens, pages: session,
        player=player,
        num_devices=MESH.data,
        on_tokens=recorder.on_tokens,
        episodes_per_step=SLOTS,
        max_turn_tokens=12,
        max_episode_tokens=LONGEST,
        num_draft_tokens=2,
        share_prefixes=True,
        copy_prefixes="on",
        preemption="host",
        preemption_host_gib=HOST_GIB,
        patience_s=0.002,
    )
    client = Client(random.Random(seed), service, recorder, num_tokens, policies)
    client.play()
    released.set()
    pool.close()
    check_nothing_is_held(service, LONGEST)
    gaps = gaps_of(model, [trainer_params(each) for each in values], recorder.all(), LONGEST)
    found = Findings(
        client=client, stats=service.stats, gaps=gaps, seconds=time.perf_counter() - start_s
    )
    found.check()
    return found


def _end_of(episode: int) -> str:
    """Returns how the episode's environment ends, whose seed is its number."""
    return Visitor(episode, threading.Event()).end


def _exponent(number: float) -> str:
    return f"{number:.1e}"


def main() -> None:
    """Soaks, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="to sample at least")
    parser.add_argument("--seed", type=int, default=0, help="of the client")
    parser.add_argument("--windows", default="", help="of the model's layers; 0: full attention")
    flags = parser.parse_args()
    start_jax("cpu", MESH.num_devices)
    windows = tuple(map(int, flags.windows.split(","))) if flags.windows else ()
    show(table(soak(flags.tokens, flags.seed, windows).rows()), PAGE, write=flags.write)


if __name__ == "__main__":
    main()
