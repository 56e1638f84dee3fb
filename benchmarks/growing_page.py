# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the runs of benchmarks/growing.py come to: verdicts, the page and the curves."""

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.growing_pairs import StaticPair
from benchmarks.growing_runs import LIMIT, Run
from benchmarks.learning import curves_svg
from earl_jax.config import Config
from earl_jax.telemetry.charts import Series

# A static mesh that fits the budget should be slower than ours by this share.
SLOWER = 0.15
# Steps at the end of a run that its reward is taken from, and steps before the limit.
LAST, BEFORE = 5, 3
# A reward is lost where it is lower by so much.
MARGIN = 0.1


def by_arm(runs: Sequence[Run], *kinds: str) -> dict[str, list[Run]]:
    """The runs of these kinds of arms, by arm, in their order; each by its seed."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        if run.kind in kinds:
            found.setdefault(run.arm, []).append(run)
    return found


# Static meshes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A static arm beside ours.

    `breaks` is the first step that breaks the budget, of any seed, None where none does; `ratio`
    its tokens per second over ours, all steps of all its seeds, by turns where turns were taken,
    None where it breaks; `worst` the ratio of the turn where it comes nearest. What had not `begun`
    was refused before its first step.
    """

    arm: str
    seeds: int
    breaks: int | None
    needs: int | None
    ratio: float | None
    worst: float | None = None
    begun: bool = True

    @property
    def is_as_claimed(self) -> bool:
        """Whether it breaks the budget, or is slower than ours by `SLOWER`."""
        return self.ratio is None or self.ratio <= 1 - SLOWER


def standing(found: Sequence[Run], ours: Sequence[Run], budget: int) -> Standing:
    """Of the runs of one arm, beside ours of the same seeds."""
    broken = [run for run in found if run.breaks(budget) is not None]
    seeds = {run.seed for run in found}
    same = [run for run in ours if run.seed in seeds]
    by_turns = all(run.turns for run in (*found, *same))
    ratio = None if broken else speed(found, by_turns) / speed(same, by_turns)
    first = min((step for run in broken if (step := run.breaks(budget))), default=None)
    return Standing(
        arm=found[0].arm,
        seeds=len(found),
        breaks=first,
        needs=max((need_of(run, budget) for run in broken), default=None),
        ratio=ratio,
        worst=None if broken else max(turn_ratios(found, same), default=None),
        begun=all(run.reward for run in found),
    )


def speed(runs: Sequence[Run], by_turns: bool) -> float:
    """Tokens per second: of all steps of all these runs, over the seconds of all of them."""
    took = [
        turn
        for run in runs
        for turn in (run.turns if by_turns else [(sum(run.tokens), sum(run.seconds))])
    ]
    return sum(tokens for tokens, _ in took) / sum(seconds for _, seconds in took)


def turn_ratios(found: Sequence[Run], ours: Sequence[Run]) -> list[float]:
    """Tokens per second over ours, turn by turn, seed by seed."""
    by_seed = {run.seed: run.turn_tokens_per_s for run in ours}
    return [
        theirs / own
        for run in found
        for theirs, own in zip(run.turn_tokens_per_s, by_seed[run.seed], strict=False)
    ]


def need_of(run: Run, budget: int) -> int:
    """Bytes per device that a run which breaks the budget takes there, or would have taken."""
    return max([run.needs or 0, *(taken for taken in run.peak_bytes if taken > budget)])


def standings(runs: Sequence[Run], budget: int) -> list[Standing]:
    """Every static arm that was run."""
    ours = [run for run in runs if run.kind == "ours"]
    return [standing(found, ours, budget) for found in by_arm(runs, "held", "fixed").values()]


def static_words(found: Sequence[Standing]) -> list[str]:
    """Which static arms break, which are slower, and which are not: one sentence each."""
    broken = [s for s in found if s.ratio is None]
    slower = [s for s in found if s.ratio is not None and s.is_as_claimed]
    others = [s for s in found if not s.is_as_claimed]

    def listed(some: Sequence[Standing], words: Callable[[Standing], str]) -> str:
        return "; ".join(f"{s.arm} ({words(s)})" for s in some) or "none"

    return [
        f"Break the budget: {listed(broken, _broken_words)}.",
        f"Fit, and are slower than ours by {SLOWER:.0%} or more: {listed(slower, _slower_words)}.",
        f"Fit, and are NOT slower by {SLOWER:.0%}: {listed(others, _slower_words)}.",
    ]


def _broken_words(found: Standing) -> str:
    where = f"at step {found.breaks}" if found.begun else "before the first step"
    return f"{where}, which needs {found.needs / 2**20:.2f} MiB" if found.needs else where


def _slower_words(found: Standing) -> str:
    assert found.ratio is not None
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    nearest = "" if found.worst is None else f", {found.worst:.2f} where it comes nearest"
    return f"{found.ratio:.2f} of our tokens per second, {seeds}{nearest}"


# The collapse.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collapse:
    """Rewards of a run with a hard limit, and of the run without it, around where it first cuts.

    `before` is the mean of the `BEFORE` steps before, `after` that of all steps from there on,
    `last` that of the `LAST` last; `free_before`, `free_last` are those of the run without.
    `walked_before`, `walked_last` are steps of the trail that were walked: what the policy can do,
    whatever a walk that is cut is paid.
    """

    seed: int
    step: int
    before: float
    after: float
    last: float
    cut: float
    free_before: float
    free_last: float
    walked_before: float
    walked_last: float

    @property
    def is_one(self) -> bool:
        """Whether reward is lost and stays lost, and rises without the limit."""
        lost = max(self.after, self.last) <= self.before - MARGIN
        return lost and self.free_last > self.free_before


def collapse(limited: Run, free: Run) -> Collapse:
    """Raises ValueError where no episode was cut, or in one of the first steps."""
    first = next((step for step, share in enumerate(limited.cut) if share > 0), 0)
    if first < BEFORE:
        raise ValueError(f"{limited.arm}, seed {limited.seed}: nothing is cut behind step {BEFORE}")
    before = slice(first - BEFORE, first)
    return Collapse(
        seed=limited.seed,
        step=first + 1,
        before=statistics.fmean(limited.reward[before]),
        after=statistics.fmean(limited.reward[first:]),
        last=statistics.fmean(limited.reward[-LAST:]),
        cut=statistics.fmean(limited.cut[-LAST:]),
        free_before=statistics.fmean(free.reward[before]),
        free_last=statistics.fmean(free.reward[-LAST:]),
        walked_before=statistics.fmean(limited.walked[before]),
        walked_last=statistics.fmean(limited.walked[-LAST:]),
    )


def collapses(runs: Sequence[Run]) -> list[Collapse]:
    """Seed by seed."""
    free = {run.seed: run for run in runs if run.kind == "no"}
    return [collapse(run, free[run.seed]) for run in runs if run.kind == "limit"]


# What is written.


def curves(runs: Sequence[Run]) -> str:
    """Reward by step: ours (and without a budget, dashed), with the limit, and the same without."""
    looks = {"ours": (0, False), "unconstrained": (0, True), "limit": (1, False), "no": (2, True)}
    series = [
        Series(
            name=f"{run.arm}, seed {run.seed}",
            xs=range(1, len(run.reward) + 1),
            ys=run.reward,
            color=looks[run.kind][0],
            dashed=looks[run.kind][1],
        )
        for run in runs
        if run.kind in looks
    ]
    lowest = min(min(run.reward) for run in runs if run.kind in looks)
    return curves_svg(series, label="mean reward", y_range=(min(-1.0, lowest), 1.0))


def page(runs: Sequence[Run], pairs: Sequence[StaticPair], config: Config, note: str) -> str:
    """The Markdown page."""
    budget = config.selector.budget_bytes_per_device
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "jaxlib"))
    ours = [run for run in runs if run.kind == "ours"]
    lines = [
        "# The growing run",
        "",
        "`uv run python -m benchmarks.growing`: `configs/trail_tiny_cpu.py`, 8 virtual CPU devices",
        f"on one of {os.cpu_count()} cores, {platform.machine()},",
        f"Python {platform.python_version()},",
        f"{versions}, {time.strftime('%Y-%m')}. The budget is {budget:,} bytes per device.",
        *([note] if note else []),
        "",
        *_table(runs, budget),
        "",
        *_ABOUT_TABLE,
        "",
        "## Static meshes",
        "",
        *_bullets(static_words(standings(runs, budget))),
        *_turns_table(runs),
        *_pairs_table(pairs, runs, config),
        "",
        "## The learning curve",
        "",
        "![reward by step](growing.svg)",
        "",
        _distances(runs),
        "",
        *_timeline(ours[0], budget),
        "",
        "## With a hard limit",
        "",
        *_collapse_table(collapses(runs)),
        "",
        *_READING,
    ]
    return "\n".join(lines) + "\n"


_ABOUT_TABLE = (
    "Tokens per second are tokens of all steps over seconds of all steps: choosing, moving, and",
    "loading programs are in them. They are those of a run for which programs were compiled and",
    "speeds measured before, but for the programs in the column 'compiled'; seconds of the whole",
    "process are said for that run too, and, of the first seed, for the one before, which began",
    "with an empty cache folder. 'held' is one pair of meshes from the first step to the last,",
    "under the same budget, and may be used as ours may: less at a time, activations computed",
    "again.",
)

_READING = (
    "## How to read it",
    "",
    "Bytes are exact: they are XLA's for the programs that ran. They are counted and not felt: a",
    "virtual CPU device has no memory of its own to run out of. Speeds are another matter: eight",
    "virtual devices share the machine's cores, so a mesh costs here what its collectives and its",
    "smaller matrices cost a core, and saves nothing that a network or a memory bus would. Meshes",
    "with `context` are slow here for short rows and fast for long ones. Ratios of two runs also",
    "differ by what else the machine did: both cores at work slow each other by a third and more.",
)


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _table(runs: Sequence[Run], budget: int) -> list[str]:
    ours = {run.seed: run.tokens_per_s for run in runs if run.kind == "ours"}
    lines = [
        "| run | seed | contexts, first step to longest | most MiB per device | breaks the budget "
        "| s of all steps | tokens/s, ours = 1 | process s | compiled "
        "| the first, cold, s | reward at the end |",
        "|" + "---|" * 11,
    ]
    for run in (run for run in runs if run.kind not in ("limit", "no")):
        step = run.breaks(budget)
        broken = "never" if step is None else _broken_words(standing([run], [], budget))
        if not run.reward:
            lines.append(f"| {run.arm} | {run.seed} | | | {broken} | | | | | | |")
            continue
        timed = run.wall_s > 0
        cells = (
            f"{run.longest[0]} to {max(run.longest)} ({run.growth:.0f}x)",
            f"{max(run.peak_bytes) / 2**20:.2f}",
            broken,
            f"{sum(run.seconds):.1f}" if timed else "",
            f"{run.tokens_per_s / ours[run.seed]:.2f}" if timed else "",
            f"{run.wall_s:.0f}" if timed else "",
            f"{run.compiled}" if timed else "",
            "" if run.cold_s is None else f"{run.cold_s:.0f}",
            f"{statistics.fmean(run.reward[-LAST:]):.3f}",
        )
        lines.append(f"| {run.arm} | {run.seed} | {' | '.join(cells)} |")
    return lines


def _turns_table(runs: Sequence[Run]) -> list[str]:
    """The runs by turns, and each arm's tokens per second over ours."""
    if not any(run.turns for run in runs):
        return []
    lines = [
        "",
        "By turns: runs of one seed that followed each other on the same core, each arm's with its",
        "programs and speeds in its cache folder.",
        "",
        "| run | seed | s of all steps | tokens/s, ours = 1 |",
        "|---|---|---|---|",
    ]
    for run in sorted((run for run in runs if run.turns), key=lambda run: run.seed):
        ours = [other for other in runs if other.kind == "ours" and other.seed == run.seed]
        seconds = ", ".join(f"{seconds:.1f}" for _, seconds in run.turns)
        ratios = ", ".join(f"{ratio:.2f}" for ratio in turn_ratios([run], ours))
        lines.append(f"| {run.arm} | {run.seed} | {seconds} | {ratios} |")
    first = [run for run in runs if run.turns and run.seed == runs[0].seed]
    return [
        *lines,
        "",
        f"Seconds by step of their first runs, seed {runs[0].seed}. A step that is slow by itself",
        "loads programs that were not run before, for another mesh, room, or number of turns:",
        "",
        *(f"    {' '.join(f'{s:.1f}' for s in run.seconds)}  {run.arm}" for run in first),
    ]


def _pairs_table(pairs: Sequence[StaticPair], runs: Sequence[Run], config: Config) -> list[str]:
    if not pairs:
        return []
    budget, rooms = config.selector.budget_bytes_per_device, config.rollout.context_buckets
    free = [run for run in runs if run.kind == "unconstrained"]
    lines = [
        "",
        "Without a selector: a pair of meshes and a way that stay, MiB per device by room",
        f"per episode, and the step at which they break the budget of {budget / 2**20:.2f} MiB,",
        "seed by seed. 'fixed' arms are of these: somebody must know the way beforehand.",
        "",
        "| rollout + training | way "
        f"| {' | '.join(f'{room} tokens' for room in rooms)} | breaks it at |",
        "|---|---|" + "---|" * (len(rooms) + 1),
    ]
    for pair in pairs:
        steps = [
            pair.breaks([config.rollout.places_for(n) for n in run.longest], budget) for run in free
        ]
        cells = [f"{pair.need[room] / 2**20:.2f}" for room in rooms]
        told = ", ".join("never" if step is None else f"step {step}" for step in steps)
        lines.append(f"| {pair.name} | {pair.way} | {' | '.join(cells)} | {told} |")
    return lines


def _distances(runs: Sequence[Run]) -> str:
    """Whether the curve with a budget is the one without."""
    (ours,), (free,) = by_arm(runs, "ours").values(), by_arm(runs, "unconstrained").values()
    apart = [_distance(*both) for both in zip(ours, free, strict=True)]
    spread = [_distance(*both) for both in itertools.combinations(free, 2)]
    return (
        "Mean distance between the reward curves with and without the budget, seed by seed: "
        f"{_numbers(apart)}; between those of two seeds without it: {_numbers(spread)}."
    )


def _distance(one: Run, other: Run) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one.reward, other.reward, strict=True))


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) or "(one seed only)"


def _timeline(run: Run, budget: int) -> list[str]:
    """Where a run was from step to step."""
    lines = [
        f"Ours, seed {run.seed}, from step to step:",
        "",
        f"| steps | longest episode | meshes | most MiB per device, of {budget / 2**20:.2f} |",
        "|---|---|---|---|",
    ]
    start = 0
    for where, group in itertools.groupby(run.where):
        end = start + len(list(group))
        longest, most = max(run.longest[start:end]), max(run.peak_bytes[start:end])
        lines.append(f"| {start + 1} to {end} | {longest} | {where} | {most / 2**20:.2f} |")
        start = end
    return lines


def _collapse_table(found: Sequence[Collapse]) -> list[str]:
    shown = sum(each.is_one for each in found)
    lines = [
        "The same task where transcripts lengthen that the policy has learnt: trails of 4 steps at",
        f"first, and one more every other RL step. At most {LIMIT} tokens an episode, half of what",
        "a walk over the longest trail has, beside the same run without the limit; what is cut is",
        "paid -1, as everywhere. Where trails outgrow the limit a walk that goes well is cut: who",
        "walks right is paid -1, and the policy comes to go wrong before the limit is there.",
        "",
        "In the runs above contexts lengthen because the policy learns, and there a limit is no",
        "such end: the policy can still walk less. With one of 192 tokens rewards were 0.07, 0.07",
        "and 0.09 over the three steps before it first cut, and 0.05, -0.02 and 0.12 over the last",
        "five of 26 steps (seeds 0 to 2), beside 0.49, 0.33 and 0.51 without it.",
        "",
        "| seed | the limit first cuts at step | the three steps before | all steps from there on "
        f"| last {LAST} | cut in these | steps walked, the three before | last {LAST} "
        f"| reward without it, the three before | last {LAST} |",
        "|" + "---|" * 10,
    ]
    lines += [
        f"| {each.seed} | {each.step} | {each.before:.3f} | {each.after:.3f} | {each.last:.3f} "
        f"| {each.cut:.0%} | {each.walked_before:.1f} | {each.walked_last:.1f} "
        f"| {each.free_before:.3f} | {each.free_last:.3f} |"
        for each in found
    ]
    return [
        *lines,
        "",
        f"Reward is lost (by {MARGIN} at least, over all steps from there on and in the last "
        f"{LAST}), and rises without the limit: {shown} of {len(found)} seeds.",
    ]
