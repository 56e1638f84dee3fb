# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""report.html: one self-contained page about a run, made from its metrics lines and a few episodes.

No plotting library, no external resource: the curves are inline SVG (`charts`), the page is
`report.html.jinja` with autoescape. A chart whose keys are missing in the run is left out.
"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from earl_jax.telemetry.atomic import write_atomically
from earl_jax.telemetry.charts import Series, line_chart, stacked_chart
from earl_jax.telemetry.metrics import NONFINITE
from earl_jax.telemetry.progress import format_count, format_duration
from earl_jax.telemetry.staleness import staleness_words
from earl_jax.telemetry.timeline import mesh_switches, mesh_timeline

_MAX_EPISODES = 12
_MAX_TOKENS = 600  # of one episode, and
_MAX_CHARACTERS = 6000  # of one message, so that the page stays light
_RECENT_STEPS = 10
_GIB = 2**30
# Of an evaluation: what it is, and what every environment has, or none.
_OWN_KEYS = ("step", "name", "reward_mean", "turns_mean", "failed_share", "sft_loss")

# Stages that the selector's seconds of a step are of.
_EXPECTED_STAGES = ("publish", "rollout", "dispatch", "train")

Row = Mapping[str, Any]


def write_report(
    path: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    metrics: Sequence[Row],
    episodes: Sequence[Row] = (),
    notes: Sequence[str] = (),
) -> None:
    """Writes the page atomically.

    `metrics` are lines as `read_metrics` returns them, in the order of their steps; `episodes` are
    records as `read_trajectories` returns them (the first 12 are shown); `notes` are sentences for
    the top of the page, behind which it says what the rule of an asynchronous run has cost.
    """
    steps = [row for row in metrics if "eval" not in row]
    evaluations = [row for row in metrics if "eval" in row]
    page = template("report.html.jinja").render(
        title=title,
        notes=[*notes, *(f"The run {words}." for words in staleness_words(config, steps))],
        figures=_figures(config, steps, evaluations),
        charts=_charts(steps, evaluations),
        timeline=mesh_timeline(steps),
        switches=mesh_switches(steps),
        episodes=[_episode(e) for e in episodes[:_MAX_EPISODES]],
        num_episodes=len(episodes),
        config=json.dumps(config, indent=2, default=str),
    )
    write_atomically(path, page)


@functools.cache
def template(name: str) -> jinja2.Template:
    """Returns a template of this folder, with autoescape."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("earl_jax.telemetry", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _figures(
    config: Mapping[str, Any], steps: Sequence[Row], evaluations: Sequence[Row]
) -> list[dict[str, str]]:
    """Returns the figures of the headline: value, name, and a detail."""
    num_steps = config.get("num_steps")
    step = max((row["step"] for row in (*steps, *evaluations)), default=0)
    # A run that came further may have been resumed with fewer.
    of_all = f"of {num_steps}" if num_steps and step <= num_steps else ""
    figures = [_figure(f"{step}", "steps", of_all)]
    times = column(steps, "time_s")[1]
    if times:
        # In older runs it starts again where a new process resumed them.
        ends = [a for a, b in itertools.pairwise(times) if b < a] + times[-1:]
        figures.append(_figure(format_duration(sum(ends)), "training time"))
    figures += _evaluation_figures(evaluations)
    losses = [(y, x) for x, y in zip(*_held_out(evaluations), strict=True) if math.isfinite(y)]
    if losses:
        lowest, at = min(losses)
        detail = f"lowest {lowest:.3f}, step {at}"
        figures.append(_figure(f"{losses[-1][0]:.3f}", "held-out loss", detail))
    learnt = ("reward_mean", "reward", "{:+.3f}".format)
    if not any("reward_mean" in row for row in steps):  # supervised updates alone
        learnt = ("loss", "loss", "{:.3f}".format)
    for key, name, form in (
        learnt,
        ("rollout_tokens_per_s", "rollout tokens/s", format_count),
    ):
        recent = [y for y in column(steps, key)[1] if math.isfinite(y)][-_RECENT_STEPS:]
        if recent:
            detail = f"mean of the last {len(recent)} steps" if len(recent) > 1 else "last step"
            figures.append(_figure(form(statistics.fmean(recent)), name, detail))
    longest = [y for y in column(steps, "context_tokens_max")[1] if math.isfinite(y)]
    if longest:
        figures.append(_figure(f"{max(longest):,.0f}", "longest context", "tokens"))
    if any("rollout_mesh" in row or "train_mesh" in row for row in steps):
        count = sum(len(row.get("switched") or ()) for row in steps)
        figures.append(_figure(str(count), "mesh switches"))
    return figures


def _figure(value: str, name: str, detail: str = "") -> dict[str, str]:
    return {"value": value, "name": name, "detail": detail}


def _evaluation_figures(evaluations: Sequence[Row]) -> list[dict[str, str]]:
    """Returns the newest and the best evaluation, by the mean reward."""
    played = [row for row in evaluations if "reward_mean" in row["eval"]]
    if not played:
        return []
    last = played[-1]
    peers = [row for row in played if row["eval"].get("name") == last["eval"].get("name")]
    best = max(peers, key=lambda row: row["eval"]["reward_mean"])
    detail = [f"reward, step {last['step']}"]
    shown = ("failed_share", *_reported([last["eval"]]))
    detail += [f"{k} {last['eval'][k]:.3g}" for k in shown if k in last["eval"]]
    return [
        _figure(f"{last['eval']['reward_mean']:.3g}", "last evaluation", "; ".join(detail[:4])),
        _figure(
            f"{best['eval']['reward_mean']:.3g}", "best evaluation", f"reward, step {best['step']}"
        ),
    ]


def _charts(steps: Sequence[Row], evaluations: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns title, legend and SVG of every chart that has data, in reading order."""

    def curves(title: str, label: str, *keys: tuple[str, str], scale: float = 1.0, **options):
        series = []
        for color, (key, name) in enumerate(keys):
            xs, ys = column(steps, key)
            if xs:
                dashed = key == "budget_bytes_per_device"
                ys = [y / scale for y in ys]
                series.append(Series(name=name, xs=xs, ys=ys, color=color, dashed=dashed))
        return card(title, series, line_chart(series, label=label, **options))

    cards = [
        curves("Reward", "mean reward of an episode", ("reward_mean", "reward")),
        *_evaluation_charts(evaluations),
        curves(
            "Context", "tokens", ("context_tokens_mean", "mean"), ("context_tokens_max", "longest"),
            from_zero=True,
        ),
        curves(
            "Throughput", "tokens/s",
            ("rollout_tokens_per_s", "rollout"), ("train_tokens_per_s", "train"), from_zero=True,
        ),
        _stage_chart(steps),
        _step_chart(steps),
        curves(
            "Memory", "GiB per device",
            ("peak_bytes_per_device", "peak"), ("budget_bytes_per_device", "budget"),
            scale=_GIB, from_zero=True,
        ),
        curves("Entropy", "nats per token", ("entropy", "entropy")),
        curves("Loss", "loss", ("loss", "loss")),
        _held_out_chart(steps, evaluations),
        curves("KL to the sampler", "nats per token", ("kl", "k3 estimate")),
        curves(
            "Log-prob mismatch", "nats, rollout against training (log scale)",
            ("logprob_mismatch_mean", "mean"), ("logprob_mismatch_max", "max"), log=True,
        ),
        curves(
            "Load of experts", "busiest expert over the mean",
            ("expert_load_max", "worst layer"), from_zero=True,
        ),
        curves("Gradient norm", "norm before clipping", ("grad_norm", "norm"), from_zero=True),
    ]  # fmt: skip
    return [card for card in cards if card["svg"]]


def card(title: str, series: Sequence[Series], svg: Markup) -> dict[str, Any]:
    """Returns a chart for charts.html.jinja, with a legend where it has several curves."""
    return {"title": title, "legend": series if len(series) > 1 else (), "svg": svg}


def _evaluation_charts(evaluations: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns two charts for each evaluation: metrics within 0 to 1, and the others."""
    names = list(dict.fromkeys(row["eval"].get("name") for row in evaluations))
    cards = []
    for name in names:
        rows = [
            {"step": row["step"], **row["eval"]}
            for row in evaluations
            if row["eval"].get("name") == name
        ]
        columns = {"reward": column(rows, "reward_mean")}
        columns |= {key: column(rows, key) for key in _reported(rows)}
        title = f"Evaluation: {name}" if name else "Evaluation"
        inside = {k for k, (_, ys) in columns.items() if all(0 <= y <= 1 for y in ys)}
        for keys, y_range in ((inside, (0.0, 1.0)), (columns.keys() - inside, None)):
            series = [
                Series(name=key, xs=xs, ys=ys, color=color)
                for color, (key, (xs, ys)) in enumerate(columns.items())
                if key in keys and xs
            ]
            svg = line_chart(series, label="mean of the episodes", y_range=y_range)
            cards.append(card(title, series, svg))
    return cards


def _held_out_chart(steps: Sequence[Row], evaluations: Sequence[Row]) -> dict[str, Any]:
    """Returns the loss on held-out conversations, beside that on those that are learnt."""
    trained = "supervised_loss" if any("reward_mean" in row for row in steps) else "loss"
    held_out = _held_out(evaluations)
    pairs = (("held out", held_out), ("trained on", column(steps, trained)))
    series = [
        Series(name=name, xs=xs, ys=ys, color=color)
        for color, (name, (xs, ys)) in enumerate(pairs)
        if xs and held_out[0]
    ]
    return card("Loss on conversations", series, line_chart(series, label="nats per token"))


def _held_out(evaluations: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Returns steps and losses of the evaluations that scored conversations."""
    return column([{"step": row["step"], **row["eval"]} for row in evaluations], "sft_loss")


def _reported(evaluations: Sequence[Row]) -> list[str]:
    """Returns the keys of environments' metrics: these are means, and so floats; counts are not."""
    keys = dict.fromkeys(
        key for row in evaluations for key, value in row.items() if isinstance(value, float)
    )
    return [key for key in keys if key not in _OWN_KEYS]


def _stage_chart(steps: Sequence[Row]) -> dict[str, Any]:
    rows = [row for row in steps if row.get("stage_s")]
    stages = dict.fromkeys(stage for row in rows for stage in row["stage_s"])
    xs = [row["step"] for row in rows]
    series = [
        Series(name=s, xs=xs, ys=[_number(row["stage_s"].get(s)) or 0.0 for row in rows], color=i)
        for i, s in enumerate(stages)
    ]
    return card("Time of the stages", series, stacked_chart(series, label="seconds per step"))


def _step_chart(steps: Sequence[Row]) -> dict[str, Any]:
    """Returns the seconds that the selector expected of each step beside those that it took.

    Of the stages that it counts, without the wait for programs.
    """
    rows = [row for row in steps if row.get("stage_s") and _number(row.get("expected_step_s"))]
    taken = [
        sum(_number(row["stage_s"].get(stage)) or 0.0 for stage in _EXPECTED_STAGES)
        - (_number(row.get("compile_s")) or 0.0)
        for row in rows
    ]
    xs, expected = column(rows, "expected_step_s")
    series = [
        Series(name="expected", xs=xs, ys=expected, color=0, dashed=True),
        Series(name="taken", xs=xs, ys=taken, color=1),
    ]
    label = "seconds of publishing, rollout, dispatch and training (log scale)"
    svg = line_chart(series if rows else [], label=label, log=True)
    return card("Time of a step, by the selector and really", series, svg)


def _episode(episode: Row) -> dict[str, Any]:
    """Returns one episode for the page; consecutive ids of one author share one span."""
    authors = zip(episode.get("wrote") or (), episode.get("token_ids") or (), strict=False)
    shown = itertools.islice(authors, _MAX_TOKENS)
    runs = [
        {"author": author, "ids": " ".join(str(token) for _, token in run)}
        for author, run in itertools.groupby(shown, key=lambda pair: pair[0])
    ]
    messages = [
        {"role": m["role"], "content": m["content"][:_MAX_CHARACTERS],
         "cut": max(0, len(m["content"]) - _MAX_CHARACTERS)}
        for m in episode.get("messages") or ()
    ]  # fmt: skip
    reward = _number(episode.get("reward"))
    return {
        "number": episode.get("episode", "?"),
        "facts": [
            form.format(episode[key])
            for key, form in (
                ("role", "as {}"),
                ("num_turns", "turns: {}"),
                ("num_tokens", "tokens: {}"),
            )
            if episode.get(key) not in (None, "")
        ],
        "reward": "" if reward is None else f"{reward:+g}",
        "good": reward is not None and reward > 0,
        "stop_reason": episode.get("stop_reason", ""),
        "detail": episode.get("detail", ""),
        "messages": messages,
        "runs": runs,
        "hidden_tokens": max(0, len(episode.get("token_ids") or ()) - _MAX_TOKENS),
    }


def column(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of the rows that have a number under `key`."""
    pairs = [(row["step"], _number(row.get(key))) for row in rows]
    found = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NONFINITE.get(value)
    return None if value is None or isinstance(value, dict | list) else float(value)
