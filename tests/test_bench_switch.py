# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.bench rollout|train|switch on a tiny model: every row is there and adds up."""

import json

import pytest

from earl_jax.bench import bench_command, parse_flags

TINY = [
    "--json",
    "--repeats=1",
    *(
        f"--config.model.{one}"
        for one in (
            "num_layers=1",
            "width=16",
            "num_heads=2",
            "num_kv_heads=2",
            "head_size=8",
            "ffn_size=16",
        )
    ),
    "--config.rollout.num_slots=8",
    "--config.rollout.episodes_per_step=16",
    "--config.rollout.context_buckets=(16,)",
]


def test_stages_have_their_own_parts():
    flags = parse_flags(["switch", "--config.model.width=32"])
    assert (flags.stage, flags.only, flags.overrides) == ("switch", "switch", ["model.width=32"])
    assert parse_flags(["dispatch"]).only == "processes,links,within,weights,compiled,paper"
    assert parse_flags(["rollout"]).only == "rollout" and parse_flags(["train"]).only == "train"


@pytest.fixture
def rows_of(capsys, monkeypatch):
    # JAX has started, on the same devices.
    monkeypatch.setattr("earl_jax.bench.start_jax", lambda *_: None)

    def rows(stage: str) -> list[dict]:
        bench_command([stage, *TINY])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows


@pytest.mark.parametrize(
    ("stage", "meshes"),
    [("rollout", ["data=8", "data=4,tensor=2"]), ("train", ["data=8", "data=1,fsdp=8"])],
)
def test_stage_has_a_row_for_each_mesh(rows_of, stage, meshes):
    rows = rows_of(stage)
    assert [row["mesh"] for row in rows] == meshes
    for row in rows:
        assert row["tokens/s"] == pytest.approx(row["tokens"] / row["s"])
    if stage == "train":
        assert {row["tokens"] for row in rows} == {16 * 16}


@pytest.mark.slow
def test_switches_of_a_tiny_model(rows_of):
    rows = rows_of("switch")
    whats = [row["what"] for row in rows]
    assert whats == ["trainer", "new weights", "new weights", "live rollout"]
    # Whole on every device before; a device keeps its part and needs nothing.
    assert rows[0]["moved MiB"] == 0 and rows[0]["to"] == "data=1,fsdp=8"
    # Its pages are regrouped on the way.
    assert rows[3]["moved MiB"] is None and rows[3]["MiB a device"] > 0
    for row in rows:
        assert row["stalled ms"] > 0
        assert row["times writing"] == pytest.approx(row["stalled ms"] / row["writing ms"])
