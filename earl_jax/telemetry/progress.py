# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The display of a run: live on a terminal, a few plain lines elsewhere."""

import collections
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_LINES = 30  # for a whole run, besides notes
_MAX_SILENCE_S = 300.0  # a run of long steps still shows a sign of life
_SHOWN_METRICS = 5  # of an evaluation
_PACE_STEPS = 20  # the time left follows the newest steps: they grow as contexts do


class Progress:
    """Shows the lines of `metrics.jsonl` as they are made.

    With a terminal, one display is redrawn in place and notes scroll above it. Without one, about
    30 plain lines are printed for a run (the first and the last always, at least one in five
    minutes) and every note. The last step's line is printed at the end, with its evaluation.

    As a context manager it restores the terminal whatever happens. `stream` is standard output
    unless given; a `console` instead decides by itself whether it is a terminal. `clock` returns
    seconds.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if console is None:
            out: TextIO = sys.stdout if stream is None else stream
            # rich would believe FORCE_COLOR and the like; a file is no terminal whatever they say.
            console = Console(file=out, force_terminal=out.isatty(), highlight=False)
        self._console = console
        self._num_steps = num_steps
        self._clock = clock
        self._start_s = clock()
        self._newest: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=_PACE_STEPS)
        self._printed_step: int | None = None
        self._printed_s = -math.inf
        self._unprinted = False
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=self._display, refresh_per_second=4)
            self._live.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes a line of metrics: a training step, or an evaluation (one with "eval")."""
        if "eval" in metrics:
            self._evaluation = {"step": metrics["step"], **metrics["eval"]}
        else:
            self._newest = dict(metrics)
            self._marks.append((self._clock(), self._step))
        self._unprinted = True
        if self._live is None and "eval" not in metrics and self._is_due():
            self._print_line()

    def note(self, text: str) -> None:
        """Prints an event, such as a switch of the mesh with its reason."""
        if self._live is None:
            self._print(f"* {text}")
        else:
            self._console.print(Text.assemble(("* ", "bold cyan"), text), soft_wrap=True)

    def close(self) -> None:
        """Shows the last state and gives the terminal back. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
        elif self._unprinted:
            self._print_line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _step(self) -> int:
        return int(self._newest.get("step", self._evaluation.get("step", 0)))

    def _is_due(self) -> bool:
        every = max(1, math.ceil(self._num_steps / _PLAIN_LINES))
        if self._step >= self._num_steps:
            return False
        if self._printed_step is None:
            return True
        crossed = self._step // every > self._printed_step // every
        return crossed or self._clock() - self._printed_s >= _MAX_SILENCE_S

    def _print_line(self) -> None:
        width, facts = len(str(self._num_steps)), self._facts()
        # Of a step whose line was printed only the evaluation is new.
        new = [facts["eval"]] if self._step == self._printed_step else facts.values()
        fields = [f"step {self._step:>{width}}/{self._num_steps}", *new]
        self._print("  ".join(field for field in fields if field))
        self._printed_step, self._printed_s, self._unprinted = self._step, self._clock(), False

    def _print(self, text: str) -> None:
        self._console.file.write(text + "\n")
        self._console.file.flush()

    def _facts(self) -> dict[str, str]:
        """Returns the fields of one line; an empty string where the run has no value."""
        newest, evaluation = self._newest, self._evaluation
        meshes = [
            f"{stage} {newest[key]}"
            for stage, key in (("rollout", "rollout_mesh"), ("train", "train_mesh"))
            if newest.get(key)
        ]
        if newest.get("plan"):
            meshes.append(f"({newest['plan']})")
        reward, loss = newest.get("reward_mean"), newest.get("loss")
        speed, failed = newest.get("rollout_tokens_per_s"), newest.get("failed_share")
        left_s = self._time_left_s()
        return {
            "reward": "" if reward is None else f"reward {reward:+.3f}",
            # A run that plays nothing has no other sign of what it learns.
            "loss": f"loss {loss:.3f}" if reward is None and loss is not None else "",
            "failed": f"{failed:.1%} failed" if failed else "",
            "eval": f"eval@{evaluation['step']} {shown(evaluation)}" if evaluation else "",
            "speed": "" if speed is None else f"{format_count(speed)} tok/s",
            "meshes": "  ".join(meshes),
            "left": "" if left_s is None else f"{format_duration(left_s)} left",
        }

    def _time_left_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last <= first or last >= self._num_steps:
            return None
        return (self._num_steps - last) * (last_s - first_s) / (last - first)

    def _display(self) -> Group:
        facts = self._facts()
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        elapsed = format_duration(self._clock() - self._start_s)
        bar.add_row(
            Text(f"step {self._step}/{self._num_steps}", style="bold"),
            ProgressBar(total=max(1, self._num_steps), completed=self._step),
            Text(", ".join(filter(None, [elapsed, facts["left"]])), style="dim"),
        )
        learning = [
            facts[key] for key in ("reward", "loss", "failed", "eval", "speed") if facts[key]
        ]
        context = self._newest.get("context_tokens_max")
        if context is not None:
            learning.append(f"longest context {format_count(context)}")
        rows = [bar, Text("   ".join(learning) or "waiting for the first step")]
        if facts["meshes"]:
            rows.append(Text("mesh   " + facts["meshes"].replace("  ", "   "), style="cyan"))
        return Group(*rows)


def shown(evaluation: Mapping[str, Any]) -> str:
    """Returns the mean reward of an evaluation, and the first means that its environment reported.

    Example: "reward 0.52, win 0.7, draw 0.12". Counts, which are no floats, are left out.
    """
    means = {name: value for name, value in evaluation.items() if isinstance(value, float)}
    means.pop("turns_mean", None)
    words = [f"{name.removesuffix('_mean')} {value:.3g}" for name, value in means.items()]
    return ", ".join(words[:_SHOWN_METRICS])


def format_duration(seconds: float) -> str:
    """Returns seconds for people: 42 s, 3 min 05 s, 32 min, 2 h 07 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def format_count(value: float) -> str:
    """Returns three digits and a metric prefix: 950, 12.3k, 1.2M."""
    for limit, scale, letter in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"
