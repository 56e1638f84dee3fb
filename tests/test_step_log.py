# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a line of metrics.jsonl says of compiling and saving."""

import time
import types

from earl_jax import training
from earl_jax.run import saver
from earl_jax.run.step_log import StepLog
from earl_jax.telemetry.metrics import to_plain


def test_costs_are_those_of_the_slowest_process_and_each_is_written_once():
    waits, compiles = iter([0.5, 0.0]), iter([3, 0])
    others = iter([[1.5, 2, 0.25], [0.0, 0, 0.0]])
    changes = {"switched": [], "switch_notes": [], "switch_s": 0.0, "peak_bytes_per_device": 1}
    changes |= {"out_of_memory": None}
    elsewhere, added = changes | {"out_of_memory": ["the move to data=4"]}, []
    log = StepLog(
        run=types.SimpleNamespace(
            problem=types.SimpleNamespace(budget_bytes=None),
            cluster=types.SimpleNamespace(
                count=2, gather=lambda own, _: [own, [elsewhere, *next(others)]]
            ),
        ),
        placement=types.SimpleNamespace(
            take_log=lambda: types.SimpleNamespace(metrics=lambda: changes),
            train=types.SimpleNamespace(mesh="data=8"),
            observations=types.SimpleNamespace(add_wait=added.append),
            words="",
        ),
        recorder=None,
        workdir=None,
        ahead=types.SimpleNamespace(
            take_waited_s=lambda: next(waits), take_compiles=lambda: next(compiles), is_on=True
        ),
        checkpoint_s=0.125,
    )
    record = types.SimpleNamespace(metrics=lambda: {"step": 1})
    line = to_plain(log._line(record))
    assert (line["compile_s"], line["compiles"], line["checkpoint_s"]) == (1.5, 3, 0.25)
    assert line["out_of_memory"] == ["the move to data=4"], "of whichever process"
    assert not {"compile_s", "compiles", "checkpoint_s"} & to_plain(log._line(record)).keys()
    # The selector counts waits in any case: of several processes only some programs are made ahead.
    assert added == [1.5, 0.0]


def test_the_stall_of_a_save_is_measured(monkeypatch):
    monkeypatch.setattr(saver, "save", lambda *_: time.sleep(0.05))
    log = types.SimpleNamespace(checkpoint_s=0.0)
    kept = types.SimpleNamespace(checkpoint=types.SimpleNamespace(keep_best=0))
    parts = dict.fromkeys(("placement", "checkpoints", "workdir", "recorder"))
    parts["run"] = types.SimpleNamespace(config=kept)
    saving = types.SimpleNamespace(log=log, saver=saver.Saver(**parts))
    training.Training._save(saving, types.SimpleNamespace(step=1), {})
    assert 0.05 <= log.checkpoint_s < 5
