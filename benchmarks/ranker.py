# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A trained ranker of lengths beside the free signals of the order "longest".

    uv run python -m benchmarks.ranker [--write]
    uv run python -m benchmarks.ranker --steps=0 [--write]

StreamRL (arXiv 2504.15930) trains a ranker of prompts by the length of their replies. Here it is a
ridge regression of the logarithm of an episode's tokens on the policy's hidden state at the last
token of the prompt (`Ranker`), fitted anew behind each step on the steps before. It predicts tasks
that it has not seen, of a policy that learns meanwhile. The policy is a real one of the product: it
learns by supervised examples to answer prompts such as "7 times 6 and 5, maple" with about so many
letters, and then by GRPO to come closer. A second regression on the counts of the prompt's tokens
shows what the prompt alone says, without a policy.

A recall is the share of the longest 20, 10 or 5 % of a step's episodes that is among as many
expected to be the longest. A gain is the time of a synchronous rollout of the step's episodes in
the order of their tasks, by its time in another order, both by the simulation of simulate.py. The
second command is the simulation alone, with log-normal lengths, all that a prompt says, and a
ranker with StreamRL's recalls.
"""

import bisect
import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import simulate
from benchmarks.pages import parser_of, show, table
from benchmarks.simulate import PERCENTS, OpenService, Setup, SimulatedService, recalls, run
from earl_jax.config.file import make_config
from earl_jax.envs.environment import Start, StepResult
from earl_jax.launch.start import start_jax
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.rollout.scheduler import Order
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.sharding.layout import Layout

PAGE = Path(__file__).with_suffix(".md")
SEEDS = 3
PAPER = {20: 0.87, 10: 0.82, 5: 0.76}
GROUPS, GROUP_SIZE = 32, 8
# What is told of groups may be known only when the first of them has begun, whose prompt is read.
READ = {name: ", when it is read, and free signals" for name in ("ranker", "prompt")}
# Steps of supervised updates, then those in which the ranker learns before it is measured.
TAUGHT, LEARNS = 8, 2
SETTINGS: dict[str, Any] = {
    "env": {"name": "benchmarks.ranker:Letters"},
    "tasks": {"name": "benchmarks.ranker:Twice"},
    "algorithm": "grpo",
    "model": {
        "num_layers": 2,
        "width": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 256,
        "compute_dtype": "float32",
    },
    "rollout": {
        "num_slots": 64,
        "episodes_per_step": GROUPS * GROUP_SIZE,
        "group_size": GROUP_SIZE,
        "chunk_size": 32,
        "burst": 8,
        "max_turn_tokens": 93,
        "context_buckets": (112,),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 1},
    "selector": {"table": "model"},
    "train": {
        "learning_rate": 1e-4,
        "epochs": 1,
        "sft_steps": TAUGHT,
        "sft_updates": 15,
        "sft_learning_rate": 3e-3,
    },
}


# The task, and its source.


class Letters:
    """Asks for a number of letters; the reward is 1 minus the error of its logarithm.

    "3 times 4 and 5, maple" asks for 17, "3 plus 4 and 5, maple" for 12, and "3 without 4 and 5,
    maple" for 3. There are 4,704 prompts.
    """

    def __init__(self, *, seed: int) -> None:
        rng = random.Random(f"letters {seed}")
        first, second, third = rng.randint(2, 8), rng.randint(2, 8), rng.randint(1, 8)
        word = rng.choice(("times", "times", "plus", "without"))
        self.number = {
            "times": first * second + third,
            "plus": first + second + third,
            "without": first,
        }[word]
        tree = rng.choice(("maple", "birch", "cedar", "alder"))
        self._text = f"{first} {word} {second} and {third}, {tree}"

    def start(self) -> Start:
        """Returns the prompt."""
        return Start(text=self._text)

    def step(self, reply: str) -> StepResult:
        """Rewards the number of words."""
        gap = abs(math.log(max(1, len(reply.split())) / self.number))
        return StepResult(reward=1.0 - gap, done=True, stop_reason="end")

    def example_reply(self, rng: random.Random) -> str:
        """Returns about so many letters."""
        number = round(self.number * rng.lognormvariate(0.0, 0.3))
        return " ".join(rng.choice("abcd") for _ in range(min(90, max(1, number))))


class Twice:
    """New tasks for each step; but the last half of the measured steps plays the first again."""

    def __init__(self, *, seed: int, num_tasks: int, num_again: int, first_again: int) -> None:
        self._seed, self._num_tasks = seed, num_tasks
        self._num_again, self._first_again = num_again, first_again

    def batch(self, step: int) -> list[dict[str, int]]:
        """Returns the tasks of a step."""
        step -= self._num_again * (step >= self._first_again)
        return [
            {"seed": 1_000_000 * self._seed + self._num_tasks * step + i}
            for i in range(self._num_tasks)
        ]

    def evaluation(self, number: int) -> list[dict[str, int]]:
        """Returns tasks that are never trained on."""
        return [{"seed": -1 - i} for i in range(number)]


# The ranker.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranker:
    """Sums of a ridge regression of log lengths on F features of the prompt and a constant, first.

    `gram_FF` and `moments_F` are sums over episodes, in float64 on the host: 0.5 MB for 256
    features. Each step counts `keeps` times as much as the next one, because the policy changes.
    """

    gram_FF: np.ndarray
    moments_F: np.ndarray
    keeps: float = 0.9

    @classmethod
    def new(cls, num_features: int) -> "Ranker":
        """Returns a ranker that knows nothing."""
        size = 1 + num_features
        return cls(gram_FF=np.zeros((size, size)), moments_F=np.zeros(size))

    def learn(self, features_NF: np.ndarray, lengths_N: np.ndarray) -> "Ranker":
        """Returns the ranker behind a step, with the features and the tokens of its episodes."""
        rows_NF = _with_constant(features_NF)
        return dataclasses.replace(
            self,
            gram_FF=self.keeps * self.gram_FF + rows_NF.T @ rows_NF,
            moments_F=self.keeps * self.moments_F + rows_NF.T @ np.log(lengths_N),
        )

    def expected(self, features_NF: np.ndarray) -> np.ndarray:
        """Returns the tokens that episodes of these prompts are expected to have.

        Features count in units of their deviation, and those that never changed not at all. The
        penalty F is that of weights that, together, vary the logarithm as much from task to task as
        it varies within a task.
        """
        number, squares_F = self.gram_FF[0, 0], np.diag(self.gram_FF)[1:]
        means_F, log_mean = self.gram_FF[0, 1:] / number, self.moments_F[0] / number
        variances_F = squares_F / number - means_F**2
        changes_F = variances_F > 1e-9 * squares_F / number
        units_F = np.where(changes_F, 1 / np.sqrt(np.where(changes_F, variances_F, 1.0)), 0.0)
        covariances_FF = self.gram_FF[1:, 1:] / number - np.outer(means_F, means_F)
        penalty_FF = np.eye(len(means_F)) * len(means_F) / number
        weights_F = np.linalg.solve(
            units_F[:, None] * covariances_FF * units_F[None, :] + penalty_FF,
            units_F * (self.moments_F[1:] / number - means_F * log_mean),
        )
        return np.exp(log_mean + (features_NF - means_F) * units_F @ weights_F)


def _with_constant(features_NF: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ones((len(features_NF), 1)), features_NF], axis=1, dtype=np.float64)


@functools.partial(jax.jit, static_argnums=(0, 1))
def last_states(
    model: ModelConfig, layout: Layout, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    """Returns the policy's hidden state at the last token of each prompt, x_BD."""
    segment_ids_BT = (jnp.arange(tokens_BT.shape[1])[None, :] < lengths_B[:, None]).astype(int)
    x_BTD = forward_rows(model, layout, params, tokens_BT, segment_ids_BT)
    return x_BTD[jnp.arange(len(lengths_B)), lengths_B - 1]


# Makespans.


class Ranked(SimulatedService):
    """A simulated service whose scheduler is told how long the episodes of a group will be.

    `told(group)` counts as an episode of the group that has ended. It is told when the group is
    submitted, or, with `at_prompt`, when its first episode has begun: its prompt is read then
    anyway.
    """

    def __init__(
        self,
        setup: Setup,
        order: Order,
        instances: int,
        slots: int,
        *,
        told: Callable[[int], float],
        at_prompt: bool = False,
    ) -> None:
        super().__init__(setup, order, instances, slots)
        self._told, self._at_prompt = told, at_prompt
        self._known: set[int] = set()

    def submit(self, tasks: Sequence[Any]) -> list[int]:
        """Queues tasks. Returns their tickets."""
        tickets = super().submit(tasks)
        if not self._at_prompt:
            self._tell({task.group for task in tasks})
        return tickets

    def _refill(self) -> None:
        super()._refill()
        self._tell({self._tasks[ticket].group for ticket in self._began})

    def _tell(self, groups: Set[int]) -> None:
        lengths = self._scheduler._lengths
        assert lengths is not None, "the order is 'longest'"
        for group in groups - self._known:
            self._known.add(group)
            # A task of no service, whose number no other has.
            lengths.add(-1 - group, group)
            lengths.end(-1 - group, round(self._told(group)))


def makespan(
    setup: Setup,
    order: Order = "fifo",
    episodes: Sequence[int] | None = None,
    told: Sequence[float] | None = None,
    *,
    at_prompt: bool = False,
) -> float:
    """Returns the time in which a step's episodes are played, given in this order.

    Of groups for which `told` has a length, `Ranked` is told it.
    """
    opened: OpenService = SimulatedService
    if told is not None:
        opened = functools.partial(Ranked, told=told.__getitem__, at_prompt=at_prompt)
    todo = range(setup.episodes_per_step) if episodes is None else episodes
    return simulate.makespan(setup, todo, order, setup.instances, setup.slots, opened)


def ranked(expected: Sequence[float]) -> list[int]:
    """Returns the numbers of episodes, the one that is expected to be the longest first."""
    return sorted(range(len(expected)), key=lambda i: (-expected[i], i))


def as_good_as(lengths: Sequence[int], recall: float, seed: int = 0) -> list[float]:
    """Returns lengths with log-normal errors, so large that the recall of 20 % is this one."""
    rng = random.Random(f"errors {seed}")
    errors = [rng.gauss() for _ in lengths]

    def with_errors(size: float) -> list[float]:
        return [n * math.exp(size * error) for n, error in zip(lengths, errors, strict=True)]

    sizes = [i / 100 for i in range(400)]
    place = bisect.bisect_left(
        sizes, -recall, key=lambda size: -recalls(with_errors(size), lengths)[20]
    )
    return with_errors(sizes[place])


def spread(by_group: Sequence[float], size: int) -> list[float]:
    """Returns the values of groups of this size as one of each episode."""
    return [float(value) for value in by_group for _ in range(size)]


def signals(setup: Setup, lengths: Sequence[int], told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns for each order its recalls and its gain over first in, first out.

    `told` are lengths expected of the groups by name, of rankers that need a prompt. Recalls of
    free signals are of the episodes that have not ended yet.
    """
    fifo = makespan(setup)
    size = setup.group_size
    groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    rest = [length for group in groups for length in group[1:]]
    first = [float(group[0]) for group in groups for _ in group[1:]]
    found = {"free signals": (recalls(first, rest), makespan(setup, "longest"))}
    for name, each in told.items():
        expected = spread(each, size)
        own = recalls(expected, lengths)
        found[name] = own, makespan(setup, "fifo", ranked(expected))
        found[f"{name}, and free signals"] = own, makespan(setup, "longest", told=each)
        if name in READ:
            late = makespan(setup, "longest", told=each, at_prompt=True)
            found[f"{name}{READ[name]}"] = own, late
    paper = as_good_as(lengths, PAPER[20])
    found["a ranker of episodes with the paper's recall of 20 %"] = (
        recalls(paper, lengths),
        makespan(setup, "fifo", ranked(paper)),
    )
    known = [float(length) for length in lengths]
    found["lengths known"] = recalls(known, lengths), makespan(setup, "fifo", ranked(known))
    return {name: (own, fifo / took) for name, (own, took) in found.items()}


def rows_of(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a table of the means over steps of `signals`; a name may be in some of them only."""
    rows = []
    for name in dict.fromkeys(name for step in steps for name in step):
        found = [step[name] for step in steps if name in step]
        means = {p: statistics.fmean(own[p] for own, _ in found) for p in PERCENTS}
        row = {f"recall {percent} %": round(means[percent], 3) for percent in PERCENTS}
        gain = statistics.fmean(gain for _, gain in found)
        rows.append({"order by": name, **row, "gain": round(gain, 3)})
    return rows


# A policy's run.


def play(num_steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields, step by step: groups of lengths, what was expected of them, seconds.

    Of `num_steps` new steps, behind those in which the policy was taught and the ranker began, and
    of as many that play the same tasks again.
    """
    from earl_jax.loop import rl_step
    from earl_jax.rollout.load import expected_tokens
    from earl_jax.run.build import build_run
    from earl_jax.run.workdir import Position, new_placement
    from earl_jax.telemetry.load import LoadHistory

    first_again = TAUGHT + LEARNS + num_steps
    source = {"num_again": num_steps, "first_again": first_again}
    world = build_run(
        make_config(
            SETTINGS
            | {
                "num_steps": first_again + num_steps,
                "seed": seed,
                "tasks": SETTINGS["tasks"] | {"args": source},
            }
        )
    )
    placement = new_placement(world, print)
    placement.choose_step(expected_tokens(world.config.rollout, None), None)
    state = world.learner.first_state(placement.train.mesh)
    position = Position(step=0, state=state, history=LoadHistory())
    ranker, of_tokens = Ranker.new(world.origin.model.width), Ranker.new(world.origin.vocab_size)
    before: dict[int, np.ndarray] = {}
    for step in range(first_again + num_steps):
        starts = [
            world.tasks.played.make(**args).start() for args in world.tasks.played.tasks.batch(step)
        ]
        prompts = [world.tasks.renderer.first(start.messages or start.text) for start in starts]
        begin_s = time.perf_counter()
        states_ND = states_of(world, placement, position.state.params, prompts)
        state_s = time.perf_counter() - begin_s
        counts_NV = np.array(
            [np.bincount(ids, minlength=world.origin.vocab_size) for ids in prompts]
        )
        told = {}
        if step >= TAUGHT + LEARNS:
            if step < first_again:
                told = {
                    "ranker": ranker.expected(states_ND),
                    "ranker by tokens of the prompt": of_tokens.expected(counts_NV),
                }
            else:
                told = {"last length of the task": before[step - num_steps]}
        begin_s = time.perf_counter()
        position, record = rl_step(world, placement, position)
        lengths = [each.num_tokens for each in record.outcomes]
        by_group = np.array(lengths).reshape(GROUPS, GROUP_SIZE)
        before[step] = by_group.mean(axis=1)
        if step < first_again and step >= TAUGHT:
            each = by_group.reshape(-1)
            ranker = ranker.learn(np.repeat(states_ND, GROUP_SIZE, axis=0), each)
            of_tokens = of_tokens.learn(np.repeat(counts_NV, GROUP_SIZE, axis=0), each)
        yield {
            "step": step,
            "lengths": lengths,
            "told": told,
            "is_new": step < first_again,
            "reward": statistics.fmean(each.reward for each in record.outcomes),
            "state_s": state_s,
            "rollout_s": record.stage_s["rollout"],
        }


def states_of(
    world: Any, placement: Any, params: Any, prompts: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns the hidden states of the prompts' last tokens, one pass over all of them."""
    width = 32 * -(-max(map(len, prompts)) // 32)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    layout = world.stages.layouts.train(placement.train.mesh)
    ends = np.array([len(ids) for ids in prompts], np.int32)
    return np.asarray(last_states(world.origin.model, layout, params, tokens, ends))


def measured(num_steps: int) -> str:
    """Returns the tables of a policy's runs, and a sentence with their lengths and seconds."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    kept = []
    for seed in range(SEEDS):
        for each in play(num_steps, seed):
            lengths = each["lengths"]
            mean, most = statistics.fmean(lengths), max(lengths)
            print(
                f"seed {seed}, step {each['step']}: tokens {mean:.1f}, most {most}, reward "
                f"{each['reward']:.2f}, states {each['state_s']:.3f} s, rollout "
                f"{each['rollout_s']:.2f} s",
                flush=True,
            )
            if not each["told"]:
                continue
            setup = Setup(
                slots=16, groups=GROUPS, group_size=GROUP_SIZE, lengths=tuple(lengths), burst=1
            )
            means = np.array(lengths).reshape(GROUPS, GROUP_SIZE).mean(axis=1)
            told = each["told"] | ({"mean of the group known": means} if each["is_new"] else {})
            found[each["is_new"]].append(signals(setup, lengths, told))
            kept.append(each)
    every = [length for each in kept for length in each["lengths"]]
    logs = np.log(every).reshape(-1, GROUP_SIZE)
    within = float(logs.var(axis=1, ddof=1).mean())
    share = 1.0 - within / float(logs.var())
    words = (
        f"{len(kept)} measured steps of {SEEDS} runs: {statistics.fmean(every):.1f} tokens an "
        f"episode, at most {max(every)}; the task decides {share:.2f} of the variance of their "
        f"logarithm. The states of a step's {GROUPS} prompts take "
        f"{1e3 * statistics.median(each['state_s'] for each in kept):.0f} ms, its rollout "
        f"{statistics.median(each['rollout_s'] for each in kept):.1f} s."
    )
    new, again = table(rows_of(found[True])), table(rows_of(found[False]))
    return f"{words}\n\nNew tasks:\n\n{new}\n\nThe same tasks again:\n\n{again}"


# The simulation alone.


def length_of_task(setup: Setup, group: int) -> float:
    """Returns the median length of the episodes of a group: all that its prompt says."""
    of_task = random.Random(f"task {setup.seed} {group}").gauss()
    return setup.median * math.exp(setup.sigma * math.sqrt(setup.by_task) * of_task)


def simulated(by_task: float) -> dict[str, Any]:
    """Returns the row of a share of the task: gains, where lengths are those of simulate.py."""
    found = []
    for seed in range(SEEDS):
        setup = Setup(by_task=by_task, seed=seed)
        lengths = [setup.length(episode) for episode in range(setup.episodes_per_step)]
        prompts = [length_of_task(setup, group) for group in range(setup.groups)]
        found.append(signals(setup, lengths, {"prompt": prompts}))
    short = {
        "free signals": "free signals",
        "prompt": "all that the prompt says",
        "prompt, and free signals": "and free signals",
        "prompt, when it is read, and free signals": "known when it is read",
        "a ranker of episodes with the paper's recall of 20 %": "recall .87 of episodes",
        "lengths known": "lengths known",
    }
    rows = {row["order by"]: row for row in rows_of(found)}
    gains = {words: rows[name]["gain"] for name, words in short.items()}
    limits = {f"its recall {p} %": rows["prompt"][f"recall {p} %"] for p in PERCENTS}
    return {"share of the task": by_task, **gains, **limits}


def speeds(train_share: float) -> list[dict[str, Any]]:
    """Returns the speeds of whole runs by order, relative to the synchronous one in order.

    On 64 devices; updates take `train_share` of the time of a synchronous rollout.
    """
    runs = {
        "synchronous": AsynchronyConfig(),
        "streaming in 8 parts": AsynchronyConfig(parts=8),
        "asynchronous, staleness 1, 8 parts": AsynchronyConfig(max_staleness=1, parts=8),
        "asynchronous, staleness 4, 8 parts": AsynchronyConfig(max_staleness=4, parts=8),
    }
    rows = []
    for name, settings in runs.items():
        found: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            setup = Setup(seed=seed, num_steps=10)
            told = functools.partial(length_of_task, setup)
            played = run(setup, AsynchronyConfig(), "fifo", train_s=0.0)
            train_s = train_share / played["speed"]
            one = run(setup, AsynchronyConfig(), "fifo", train_s=train_s)["speed"]
            orders: dict[str, tuple[Order, Any]] = {
                "first in, first out": ("fifo", SimulatedService),
                "free signals": ("longest", SimulatedService),
                "and all that the prompt says": ("longest", functools.partial(Ranked, told=told)),
                "known when it is read": (
                    "longest",
                    functools.partial(Ranked, told=told, at_prompt=True),
                ),
            }
            for words, (order, opened) in orders.items():
                result = run(setup, settings, order, train_s=train_s, open_service=opened)
                found.setdefault(words, []).append(result["speed"] / one)
        means = {words: round(statistics.fmean(each), 3) for words, each in found.items()}
        rows.append({f"updates take {train_share:g}": name, **means})
    return rows


def main() -> None:
    """Prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="0: only the simulation")
    flags = parser.parse_args()
    if flags.steps:
        start_jax("cpu", 1)
        show(measured(flags.steps), PAGE, write=flags.write, name="measured")
        return
    rollouts = table([simulated(by_task) for by_task in (0.3, 0.5, 0.7, 0.9)])
    runs = [table(speeds(train_share)) for train_share in (0.5, 1.0)]
    text = "\n\n".join([f"Gains of rollouts:\n\n{rollouts}", *runs])
    show(text, PAGE, write=flags.write, name="simulated")


if __name__ == "__main__":
    main()
