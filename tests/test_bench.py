# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.bench on a tiny model: every stage times each of its meshes."""

import json

import pytest

from earl_jax.bench import bench_command
from earl_jax.settings.errors import InputError

MODEL = ("num_layers=1", "width=16", "num_heads=2", "num_kv_heads=2", "head_size=8", "ffn_size=16")
ROLLOUT = ("num_slots=8", "episodes_per_step=16", "context_buckets=(16,)")
TINY = (
    *("--json", "--repeats=1"),
    *(f"--config.model.{one}" for one in MODEL),
    *(f"--config.rollout.{one}" for one in ROLLOUT),
)


@pytest.fixture
def rows_of(capsys, monkeypatch):
    # JAX has started, on the same devices.
    monkeypatch.setattr("earl_jax.bench.start_jax", lambda *_: None)

    def rows(stage: str, *flags: str) -> list[dict]:
        bench_command([stage, *TINY, *flags])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows


@pytest.mark.slow
def test_stage_has_a_row_for_each_mesh(rows_of):
    rows = rows_of("rollout")
    assert [row["mesh"] for row in rows] == ["data=8", "data=4,tensor=2"]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(row["tokens"] / row["s"])


def test_dispatch_has_experience_and_weights_of_each_pair_of_meshes(rows_of):
    rows = rows_of("dispatch")
    assert len(rows) == 2 * 2 * 2
    ways = {(row["what"], row["from"], row["to"]): row for row in rows}
    # Two rows on each device before and after.
    assert ways["experience", "data=8", "data=8"]["moved MiB"] == 0
    # Four arrays of 16 rows of 16 tokens, of which one device of each pair has none.
    torn = ways["experience", "data=4,tensor=2", "data=8"]
    assert torn["moved MiB"] == 0
    # The weights are cut in eight: each of eight devices lacks seven parts of eight.
    assert ways["weights", "data=1,fsdp=8", "data=8"]["moved MiB"] > 0
    assert all(row["ms"] > 0 for row in rows)


def test_dispatch_moves_what_tokens_were_chosen_among(rows_of):
    """Ten ids a token beside four numbers: the nine moves of Tic-Tac-Toe, and the end of turn."""
    flags = "--config.env.name=tic_tac_toe", "--config.selector.train_meshes=('data=4,tensor=2',)"
    moved = []
    masked = "mask_illegal=True", "illegal_reward=-1.0"
    for more in ((), tuple(f"--config.env.args.{one}" for one in masked)):
        (row, *_) = [r for r in rows_of("dispatch", *flags, *more) if r["from"] == "data=8"]
        moved.append(row["moved MiB"])
    assert moved[1] == pytest.approx(14 / 4 * moved[0]) and moved[0] > 0


def test_switch_moves_the_trainer_and_a_live_rollout(rows_of):
    rows = rows_of("switch")
    assert [row["what"] for row in rows] == ["trainer", "live rollout"]
    # A device that has all keeps its part and needs nothing.
    assert rows[0]["moved MiB"] == 0 and rows[0]["to"] == "data=1,fsdp=8"
    # Its pages are regrouped on the way.
    assert rows[1]["moved MiB"] is None and rows[1]["ms"] > 0


def test_switch_without_another_mesh_is_an_error(monkeypatch):
    monkeypatch.setattr("earl_jax.bench.start_jax", lambda *_: None)
    meshes = (f"--config.selector.{stage}_meshes=('data=8',)" for stage in ("rollout", "train"))
    with pytest.raises(InputError, match="nothing moves: name several"):
        bench_command(["switch", *TINY, *meshes])


def test_a_run_that_plays_nothing_has_training_alone(tmp_path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"messages": [{"role": "user"}]}\n')
    flags = ("--config.algorithm=sft", f"--config.train.sft_path={talk}")
    with pytest.raises(
        InputError, match="'sft' plays nothing, so that there is no rollout to time"
    ):
        bench_command(["rollout", *TINY, *flags])


@pytest.mark.slow
def test_table_of_a_stage_is_markdown(capsys, monkeypatch):
    monkeypatch.setattr("earl_jax.bench.start_jax", lambda *_: None)
    bench_command(["train", *TINY[1:]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| mesh | micro-batches | remat | s | tokens | tokens/s |"
    assert len({line.count("|") for line in lines}) == 1
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    assert [row[1] for row in rows] == ["data=8", "data=1,fsdp=8"]
    assert {row[5] for row in rows} == {str(16 * 16)}
