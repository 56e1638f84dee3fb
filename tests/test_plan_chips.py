# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m earl_jax.plan` for every kind of chip: its text, and its JSON beside that."""

import json
import re
import sys
from typing import NamedTuple

import pytest

from earl_jax import plan
from earl_jax.sharding.plan_text import bytes_text
from earl_jax.sharding.topology import CHIPS

# The columns of each stage's table, as JSON names these bytes.
KINDS = {
    "train": ["weights", "optimizer", "gradients", "activations"],
    "rollout": ["weights", "cache", "activations", "trainer"],
}


class Case(NamedTuple):
    """Hardware, and a model of which rows of the third context fit no mesh that is named."""

    topology: str
    model: str
    trainers: tuple[str, ...]
    contexts: tuple[int, int, int] = (1024, 16_384, 131_072)


CASES = (
    Case("v5e:16x16", "qwen2.5-7b", ("fsdp=256", "fsdp=128,tensor=2")),
    Case("v5p:4x4x8", "qwen2.5-72b", ("fsdp=128", "fsdp=64,tensor=2")),
    Case("v6e:4x4", "qwen2.5-7b", ("fsdp=16", "data=2,fsdp=8")),
    Case("h100:16x8", "qwen2.5-72b", ("fsdp=128", "fsdp=64,tensor=2")),
    Case("h200:1x8", "qwen2.5-32b", ("fsdp=8", "fsdp=4,tensor=2"), (1024, 16_384, 262_144)),
    Case("b200:1x8", "qwen2.5-32b", ("fsdp=8", "fsdp=4,tensor=2"), (1024, 16_384, 262_144)),
)


def run(monkeypatch, capsys, case, contexts, *flags):
    """What the command prints; it ends with status 0, and without a word of complaint."""
    named = "".join(f"'{mesh}'," for mesh in case.trainers)
    arguments = [
        f"--topology={case.topology}",
        f"--contexts={','.join(map(str, contexts))}",
        "--vocab_size=152064",
        f"--config.model.preset={case.model}",
        "--config.model.compute_dtype=bfloat16",
        "--config.train.remat=True",
        "--config.rollout.num_slots=256",
        "--config.rollout.episodes_per_step=256",
        "--config.rollout.context_buckets=(1024,)",
        "--config.selector.budget_bytes_per_device=0",
        "--config.selector.rollout_meshes=()",
        f"--config.selector.train_meshes=({named})",
        *flags,
    ]
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    with pytest.raises(SystemExit) as end:
        plan.main()
    printed = capsys.readouterr()
    assert (end.value.code, printed.err) == (0, "")
    return printed.out


def part_of(text, stage):
    """The rows of a stage's table by context, and the notes below it by context."""
    heading = {"train": "training: ", "rollout": "rollout: "}[stage]
    (part,) = (part for part in text.split("\n\n") if part.startswith(heading))
    _, header, *lines = part.splitlines()
    assert header.split()[:7] == ["context", "mesh", *KINDS[stage], "together"]
    rows, notes = {}, {}
    for line in lines:
        if note := re.fullmatch(r"  ([\d,]+): (.*)", line):
            notes[int(note[1].replace(",", ""))] = note[2]
        else:
            context, *cells = re.split(r" {2,}", line.strip())
            rows[int(context.replace(",", ""))] = cells
    return rows, notes


def check_row(cells, found, stage, budget):
    """A row of a table is what JSON has of this mesh."""
    sizes = [bytes_text(found["bytes"].get(kind, 0)) for kind in KINDS[stage]]
    total = found["bytes_per_device"]
    mark = "" if found["safe"] else " ?"
    assert cells[:7] == [
        found["mesh"],
        *sizes,
        f"{bytes_text(total)} ~",
        f"{total / budget:.0%}{mark}",
    ]
    seconds = f"{found['update_s']:,.2f}" if stage == "train" else f"{1000 * found['token_s']:,.2f}"
    assert cells[7:9] == [seconds, f"{found['tokens_per_s']:,.0f}"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.topology)
def test_the_plan_for_a_chip_says_in_text_what_it_has_in_json(case, monkeypatch, capsys):
    """Both stages at every context: the bytes, what was chosen, and which meshes do not fit."""
    contexts = case.contexts[:2]
    values = json.loads(run(monkeypatch, capsys, case, contexts, "--json"))
    text = run(monkeypatch, capsys, case, contexts)
    budget = values["budget_bytes_per_device"]
    assert text.startswith(f"{case.topology}: {values['devices']} devices on {values['hosts']} ho")
    assert budget < CHIPS[case.topology.partition(":")[0]].hbm_bytes
    assert [entry["context"] for entry in values["contexts"]] == [*contexts]
    for stage in ("train", "rollout"):
        rows, notes = part_of(text, stage)
        assert [*rows] == [*notes] == [*contexts]
        for entry in values["contexts"]:
            by_mesh = {found["mesh"]: found for found in entry[stage]["meshes"]}
            for found in by_mesh.values():
                assert found["bytes_per_device"] == sum(found["bytes"].values())
                assert found["fits"] == (found["bytes_per_device"] <= budget) >= found["safe"]
            chosen = by_mesh[entry[stage]["mesh"]]
            assert chosen["fits"]
            check_row(rows[entry["context"]], chosen, stage, budget)
            over = sum(not found["fits"] for found in by_mesh.values())
            assert (f"; {over} do not, " in notes[entry["context"]]) == bool(over)
    start = values["schedule"][0]
    assert f"from the start: rollout {start['rollout_mesh']}" in text
    assert f", train {start['train_mesh']}" in text


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.topology)
def test_the_plan_for_a_chip_says_by_how_much_long_rows_do_not_fit(case, monkeypatch, capsys):
    """The row is of the mesh that is nearest to the budget; and what would do is named."""
    values = json.loads(run(monkeypatch, capsys, case, case.contexts, "--json"))
    text = run(monkeypatch, capsys, case, case.contexts)
    entry, budget = values["contexts"][2], values["budget_bytes_per_device"]
    least = min(entry["train"]["meshes"], key=lambda found: found["bytes_per_device"])
    over = least["bytes_per_device"] - budget
    assert "mesh" not in entry["train"] and "rollout" not in entry
    assert entry["train"]["shortfall_bytes"] == over > 0
    rows, notes = part_of(text, "train")
    check_row(rows[case.contexts[2]], least, "train", budget)
    words = f"no mesh fits; the least, {least['mesh']}, is {bytes_text(over)} over the budget"
    assert notes[case.contexts[2]].endswith(words)
    rows, notes = part_of(text, "rollout")
    assert [*rows] == [*case.contexts[:2]]
    assert notes[case.contexts[2]] == "training fits no mesh, so neither does the rollout"

    ends = next(stop for stop in values["schedule"] if not stop["fits"])["places"]
    before = max(stop["places"] for stop in values["schedule"] if stop["fits"])
    assert case.contexts[1] <= before < ends <= case.contexts[2]
    assert f"ends at {before:,} tokens an episode: room for {ends:,} fits no mesh" in text
    assert values["enough"]["places"] == ends
    enough = ", ".join(f"{number} {chip}" for chip, number in values["enough"]["devices"].items())
    assert f"room for {ends:,} tokens: the smallest that would do: {enough} (" in text


def test_every_chip_has_a_case():
    assert {case.topology.partition(":")[0] for case in CASES} == CHIPS.keys()
