# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: the metrics of a run, one JSON object a line.

A training step is a line of flat numbers and a few words, an evaluation is `{"step": 20, "eval":
{"win": 0.5}}`. Every line is valid JSON: JSON has no NaN and no infinity, so these are the strings
"nan", "inf" and "-inf" in the file, and `read_metrics` gives them back as floats (pandas and
`float()` understand the strings as well). A key whose value is None has no value in this run and is
left out.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.atomic import remove_cut_line, write_atomically
from earl_jax.trajectory import Trajectory

# Of an update, by name.
Metrics = dict[str, float]
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Appends lines to `path`.

    Each line is flushed as it is written, so a SIGKILL can cut the last line only. Opening removes
    such a cut line of an earlier run; call `truncate_after` before it to drop steps that a resumed
    run will take again.
    """

    def __init__(self, path: Path):
        if path.exists():
            remove_cut_line(path)
        self._path, self._file = path, path.open("a", encoding="utf-8", errors="replace")

    def write(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one line, and returns it.

        It needs "step"; its values may be numpy or jax numbers, and nested.
        Values on a device are fetched one by one here: fetch a step's metrics in one
        `jax.device_get` before.

        Raises FileNotFoundError where the file was removed since.
        """
        line = to_plain(metrics)
        if not isinstance(line.get("step"), int):
            raise InputError(f"a line of metrics needs an integer 'step', got {line.get('step')!r}")
        # The system would take the line, for a file that has no name any more.
        self._path.stat()
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        return line

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, oldest first, without a last line that was cut.

    Raises ValueError with the line number where any other line is not a JSON object.
    """
    return [_from_plain(record) for _, record in _whole_lines(path)]


def truncate_after(path: Path, step: int) -> dict[str, Path]:
    """Takes the lines of steps greater than `step` and a cut last line out of the file.

    The other lines keep their bytes. A file that does not exist yet stays so. Lines of later steps
    and damaged lines are appended to files beside it, metrics.dropped.jsonl and
    metrics.damaged.jsonl; those that got lines are returned, by "dropped" and "damaged".
    """
    if not path.exists():
        return {}
    data, kept = path.read_bytes(), []
    others: dict[str, list[bytes]] = {"dropped": [], "damaged": []}
    # Split at b"\n" only: str.splitlines would also split at U+2028 inside a string.
    for line in data.split(b"\n")[:-1]:
        number = _step_of(line)
        is_kept = number is not None and number <= step
        target = kept if is_kept else others["damaged" if number is None else "dropped"]
        target.append(line + b"\n")
    aside = {}
    for name, lines in others.items():
        if lines:
            aside[name] = path.with_name(f"{path.stem}.{name}{path.suffix}")
            before = aside[name].read_bytes() if aside[name].exists() else b""
            write_atomically(aside[name], before + b"".join(lines))
    # Last: a kill before it leaves every line in a file, some of them in two.
    if data != b"".join(kept):
        write_atomically(path, b"".join(kept))
    return aside


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line of metrics; None for a line that is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def sampling_kl(trajectories: Sequence[Trajectory]) -> float | None:
    """Returns KL(sampling distribution, model) in nats per token, estimated from drawn tokens.

    How far temperature and cuts lead away from the policy that is trained; where replies are
    restricted both are among the allowed tokens. None where log-probs under the model were not
    written down.
    """
    return mean_gap(map(sampling_gap, trajectories))


def sampling_gap(trajectory: Trajectory) -> tuple[float, int]:
    """Returns the sum of an episode's tokens in `sampling_kl`, and their number."""
    gaps = [
        behaviour - model
        for turn in trajectory.turns
        if turn.model_logprobs
        for behaviour, model in zip(turn.logprobs, turn.model_logprobs, strict=True)
    ]
    return math.fsum(gaps), len(gaps)


def mean_gap(gaps: Iterable[tuple[float, int]]) -> float | None:
    """Returns `sampling_kl` from the sums and numbers of episodes; their order changes no bit."""
    each = list(gaps)
    number = sum(number for _, number in each)
    return math.fsum(total for total, _ in each) / number if number else None


def to_plain(value: Any, key: str = "metrics") -> Any:
    """Returns `value` for JSON: numpy's and jax's numbers as Python's, None in a dict left out.

    Raises TypeError, naming the key, for what has no obvious JSON form.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        # float() strips numpy.float64, which is a float with another repr.
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        items = ((str(k), to_plain(v, f"{key}.{k}")) for k, v in value.items())
        return {k: v for k, v in items if v is not None}
    if isinstance(value, list | tuple):
        return [to_plain(v, f"{key}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "dtype"):
        return to_plain(np.asarray(value).tolist(), key)
    raise TypeError(
        f"{key} is a {type(value).__name__}; metrics hold numbers, strings, lists and dicts"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, str):
        return NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_from_plain(v) for v in value]
    return value


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line that ends with a newline: its bytes and its object."""
    # Split at b"\n" only: str.splitlines would also split at U+2028 inside a string.
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{path}, line {number} of {len(lines)} is damaged ({error}): {_shorten(line)}. "
                f"Only a cut last line is expected after a kill; remove this line to go on."
            ) from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: expected a JSON object, got {_shorten(line)}")
        yield line + b"\n", record


def _shorten(line: bytes) -> str:
    return repr(line[:60]) + ("..." if len(line) > 60 else "")


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields name and value of every number in a line; nested names are joined by "/"."""
    for key, value in line.items():
        value = NONFINITE.get(value, value) if isinstance(value, str) else value
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, float(value)
