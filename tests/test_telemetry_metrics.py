# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.advantages import counted
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.run.step_record import lag_metrics
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.metrics import MetricsLog, read_metrics, sampling_kl, truncate_after
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.telemetry.trackers import TensorBoard
from earl_jax.trajectory import Trajectory, Turn
from tests.support import wait_until
from tests.support.trajectories import make_outcome

STEP_1 = b'{"step": 1, "reward_mean": 0.5}\n'
EVAL_1 = (
    b'{"step": 1,  "eval": {"win": 0.25}}\n'  # two blanks: bytes that we would not write ourselves
)
STEP_2 = b'{"step": 2, "reward_mean": 0.75}\n'


def test_lines_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "stage_s": {"train": 0.5}, "switched": ["rollout"], "decision": "↯"})
        log.write({"step": 1, "eval": {"name": "random", "win": 0.25}})
        read = read_metrics(path)  # Before it is closed.
    assert read == [
        {"step": 1, "stage_s": {"train": 0.5}, "switched": ["rollout"], "decision": "↯"},
        {"step": 1, "eval": {"name": "random", "win": 0.25}},
    ]


def test_how_far_sampling_is_from_the_model_is_the_mean_gap_of_logprobs():
    """-0.5 for -0.75, -1 for -1.25, and nothing for a turn that has no second log-prob."""

    def episode(*turns):
        return Trajectory(
            episode=0, group=0, role="x", turns=turns, turn_rewards=(), stop_reason="win", row=0
        )

    sampled = Turn(author="environment", text="go", token_ids=(1,))
    one = Turn(author="policy", text="a", token_ids=(2,), logprobs=(-3.0,), versions=(0,))
    two = Turn(
        author="policy",
        text="ab",
        token_ids=(2, 3),
        logprobs=(-0.5, -1.0),
        versions=(0, 0),
        model_logprobs=(-0.75, -1.25),
    )
    assert sampling_kl([episode(sampled, one), episode(sampled, two)]) == 0.25
    assert sampling_kl([episode(sampled, one)]) is None


def test_lags_are_of_the_tokens_that_are_trained_on():
    """Version 5 trains on 3 tokens of its own, 2 of version 4 and 1 of 2: lags of 5 in 6 tokens.

    Neither on the failed episode nor on the group of equal rewards, which DAPO drops.
    """
    outcomes = [
        make_outcome(0, versions=((2, 1), (4, 2))),
        make_outcome(1, 0.0, versions=((5, 3),)),
        make_outcome(2, versions=((0, 9),), stop_reason="environment_error"),
        make_outcome(3, versions=((1, 9),), group=1),
        make_outcome(4, versions=((1, 9),), group=1),
    ]
    trained = counted(ALGORITHMS["dapo"], outcomes)
    assert [each.episode for each in trained] == [0, 1]
    expected = {
        "version_lag_max": 3,
        "version_lag_mean": 5 / 6,
        "staleness_tokens": [3, 2, 0, 1],
        "overdue_tokens": None,
    }
    assert lag_metrics(5, trained, 0, masks=False) == expected
    # One token is beyond a bound of 1; it was trained on, or left out.
    assert lag_metrics(5, trained, 4, masks=False) == expected | {"overdue_tokens": 1}
    masked = lag_metrics(5, trained, 4, masks=True)
    assert (masked["overdue_tokens"], masked["staleness_tokens"]) == (1, [3, 2])
    assert (masked["version_lag_max"], masked["version_lag_mean"]) == (1, 2 / 5)
    nothing = lag_metrics(5, [], 0, masks=False)
    assert set(nothing.values()) == {None}


def test_numbers_of_numpy_and_jax_become_plain_and_none_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(
            {
                "step": np.int32(3),
                "loss": jnp.float32(0.5),
                "kl": jnp.bfloat16(1.5),
                "ok": np.bool_(True),
                "mean": np.float64(0.25),
                "quantiles": np.array([1, 2]),
                "missing": None,
                "stage_s": {"train": jnp.float32(2.0), "rollout": None},
            }
        )
    assert path.read_text() == (
        '{"step": 3, "loss": 0.5, "kl": 1.5, "ok": true, "mean": 0.25, "quantiles": [1, 2], '
        '"stage_s": {"train": 2.0}}\n'
    )


def test_nonfinite_numbers_are_valid_json_and_read_back_as_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "a": float("nan"), "b": {"c": np.float32("inf")}, "d": -math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert strict == {"step": 1, "a": "nan", "b": {"c": "inf"}, "d": "-inf"}
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"]["c"] == math.inf and row["d"] == -math.inf


def test_a_line_of_a_file_that_was_removed_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1})
        path.unlink()
        with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
            log.write({"step": 2})
    assert not path.exists()


@pytest.mark.parametrize("length", range(len(STEP_2)))
def test_a_last_line_cut_anywhere_is_ignored(tmp_path, length):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(STEP_1 + STEP_2[:length])
    assert read_metrics(path) == [{"step": 1, "reward_mean": 0.5}]


def test_opening_a_log_with_a_cut_last_line_does_not_glue_lines_together(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(STEP_1 + STEP_2[:9])
    with MetricsLog(path) as log:
        log.write({"step": 2, "reward_mean": 0.75})
    assert path.read_bytes() == STEP_1 + STEP_2


@pytest.mark.parametrize("damage", [b'{"step": 2, "rew\n', b"\n", b"[1]\n", b"\xff\n"])
def test_damage_elsewhere_is_an_error_with_its_line(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(STEP_1 + damage + STEP_2)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_truncate_keeps_the_bytes_of_earlier_steps_and_sets_later_ones_aside(tmp_path):
    path, dropped = tmp_path / "metrics.jsonl", tmp_path / "metrics.dropped.jsonl"
    for times in (1, 2):
        path.write_bytes(STEP_1 + EVAL_1 + STEP_2 + b'{"step": 3, "rew')
        assert truncate_after(path, 1) == {"dropped": dropped}
        assert path.read_bytes() == STEP_1 + EVAL_1
        assert dropped.read_bytes() == STEP_2 * times
    assert truncate_after(path, 1) == truncate_after(tmp_path / "absent", 1) == {}
    assert sorted(tmp_path.iterdir()) == [dropped, path]


def test_truncate_drops_a_cut_line_even_of_no_later_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(STEP_1 + STEP_2[:-1])
    truncate_after(path, 10)
    assert path.read_bytes() == STEP_1


@pytest.mark.parametrize("damage", [b"{\xff\n", b'{"loss": 1}\n', b"[]\n"])
def test_damaged_lines_are_set_aside(tmp_path, damage):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.damaged.jsonl"
    for times in (1, 2):
        path.write_bytes(STEP_1 + damage + STEP_2)
        assert truncate_after(path, 2) == {"damaged": aside}
        assert path.read_bytes() == STEP_1 + STEP_2 and aside.read_bytes() == damage * times
    assert truncate_after(path, 2) == {}


def _tensorboard_scalars(folder):
    """(tag, step, value) of all events."""
    events = _tensorboard_events(folder)
    return [(v.tag, event.step, v.simple_value) for event in events for v in event.summary.value]


def _tensorboard_events(folder):
    """All events: each is a length, its checksum, the event, a checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def recorded(workdir, lines, **given):
    """Returns the text that a recorder with these arguments shows while it writes the lines."""
    shown = io.StringIO()
    with Progress(1, shown) as progress:
        recorder = Recorder(workdir, progress, **given)
        with recorder, recorder.trackers:
            for line in lines:
                recorder.write(line)
    return shown.getvalue()


LINES = [
    {"step": 4, "reward_mean": 0.5, "stage_s": {"train": 2.0}, "decision": "stay"},
    {"step": 4, "eval": {"name": "random", "win": 0.25}},
    {"step": 5, "loss": math.nan},
]


def test_tensorboard_gets_every_number_under_its_path(tmp_path):
    pytest.importorskip("tensorboardX")
    recorded(tmp_path, LINES, trackers=("tensorboard",))
    found = _tensorboard_scalars(tmp_path / "tensorboard")
    *finite, (tag, step, value) = [each for each in found if each[0] != "time_s"]
    assert finite == [("reward_mean", 4, 0.5), ("stage_s/train", 4, 2.0), ("eval/win", 4, 0.25)]
    assert (tag, step) == ("loss", 5) and math.isnan(value)


def test_tensorboard_hides_steps_that_a_run_takes_again(tmp_path):
    tracker = TensorBoard(workdir=tmp_path)
    for step in (1, 2, 3, 2):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    # What is in a file from a start on counts instead of steps as late, of before.
    found = [(e.step, e.session_log.status) for e in _tensorboard_events(tmp_path / "tensorboard")]
    assert [step for step, status in found if status == 1] == [1, 2]
    assert _tensorboard_scalars(tmp_path / "tensorboard")[-1] == ("loss", 2, 2.0)


def _wandb_history(data: bytes) -> list[dict] | None:
    """Returns what the whole records of a file say, without the times; None where one is cut.

    Behind a header there are records: a checksum, a length and a type before each.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    at, found = 7, []
    while at < len(data):
        if at + 7 > len(data):
            return None
        _, length, _ = struct.unpack_from("<IHB", data, at)
        record, at = Record(), at + 7 + length
        if at > len(data):
            return None
        record.ParseFromString(data[at - length : at])
        items = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        found.append({k: v for k, v in items.items() if k[0] != "_" and k != "time_s"})
    return [each for each in found if each]


@pytest.mark.slow
def test_weights_and_biases_gets_every_number_with_its_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    shown = recorded(tmp_path, LINES[:2], trackers=("wandb",), config={"seed": 3})
    assert "wandb" not in shown
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    expected = [
        {"reward_mean": 0.5, "stage_s/train": 2.0, "step": 4},
        {"eval/win": 0.25, "step": 4},
    ]
    # Its own process may write all behind the header when the run is over.
    written = wait_until(lambda: _wandb_history(path.read_bytes()) == expected)
    assert written, _wandb_history(path.read_bytes())


class Noting:
    """A tracker that notes what it gets, and fails where it is told to."""

    got = []

    def __init__(self, *, config):
        self.got.append(("opened", config))
        if config.get("seed") == 13:
            raise ConnectionError("the service is away")

    def log(self, step, values):
        if "loss" in values:
            raise OSError("no route to host")
        self.got.append((step, values.keys() - {"time_s"}))

    def close(self):
        self.got.append("closed")


def test_a_tracker_of_ones_own_gets_numbers_and_what_fails_in_it_ends_nothing(tmp_path):
    Noting.got.clear()
    name = f"{__name__}:Noting"
    lines = [*LINES, {"step": 6, "loss": 1.0}, {"step": 7, "reward_mean": 1.0}]
    shown = recorded(tmp_path, lines, trackers=(name,), config={"seed": 3})
    assert Noting.got == [
        ("opened", {"seed": 3}),
        (4, {"reward_mean", "stage_s/train"}),
        (4, {"eval/win"}),
        (7, {"reward_mean"}),
        "closed",
    ]
    assert shown.count("no route to host") == shown.count("metrics.jsonl has all") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [4, 4, 5, 6, 7]


def test_a_tracker_that_cannot_be_opened_is_an_error_before_anything_compiles(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    own = f"{__name__}:Noting"
    for names, config, words in [
        (("tensorboard",), {}, r"'tensorboard'.*cannot be opened: .*earl_jax\[tensorboard\]"),
        (("wandb",), {}, "'wandb'.*cannot be opened: .*pip install 'earl_jax.wandb"),
        ((own,), {"seed": 13}, "cannot be opened: ConnectionError: the service is away"),
        (("tensorbord",), {}, "did you mean 'tensorboard'"),
        (("no.such:Tracker",), {}, "config.log.trackers is 'no.such:Tracker', which cannot be"),
    ]:
        with pytest.raises(InputError, match=words):
            recorded(tmp_path, (), trackers=names, config=config)
        # Another process than the first has none.
        recorded(tmp_path, (), trackers=names, config=config, writes=False)
