# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the dispatcher counts the bytes that it says it does."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.dispatch.gather import Controller
from benchmarks.dispatch.links import WAYS, receivers
from benchmarks.dispatch.links import measure as measure_links
from benchmarks.dispatch.paper import FIELDS, tables
from benchmarks.dispatch.processes import Settings
from benchmarks.dispatch.traffic import collectives
from earl_jax.bench import main, parse_flags
from tests.support import ROOT
from tests.support.processes import free_port


def test_rank_0_gathers_and_scatters():
    """Three ranks with two rows each, as threads; ranks 0 and 2 want rows 0 to 2."""
    import threading

    port, parts = free_port(), [slice(0, 3), slice(3, 6), slice(0, 3)]
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    got, through = {}, {}

    def take_part(rank: int) -> None:
        controller = Controller(rank, 3, "127.0.0.1", port)
        got[rank] = controller.gather_and_scatter(rows[2 * rank : 2 * rank + 2], parts)
        through[rank] = controller.through_bytes
        for peer in controller.peers.values():
            peer.close()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(got[rank], rows[part])
    # In: four rows of 8 bytes. Out: three rows to each of two ranks.
    assert through == {0: 4 * 8 + 2 * 3 * 8, 1: 0, 2: 0}


def test_on_paper_the_batch_is_the_papers_and_each_plan_takes_less_than_two_seconds():
    rows = list(tables((32768,)))
    for row in rows:
        assert row["batch GB"] == pytest.approx(500, rel=0.01)
        assert row["plan s"] < 2
    same, torn = rows[0], rows[2]
    # Of eight devices' rows each of the eight holds half. A host is eight devices.
    assert same["total GB"] == pytest.approx(4 * same["batch GB"])
    assert same["busiest host GB"] == 0
    assert torn["busiest host GB"] * 128 == pytest.approx(torn["total GB"], rel=0.01)
    assert torn["s at 200 Gbit/s a host"] == pytest.approx(torn["busiest host GB"] / 25)
    assert len(FIELDS) == 4


def test_the_command_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "dispatch", "--only=paper,papers"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    assert (
        "'papers' is no part of processes, links, within, weights, compiled, paper"
        in capsys.readouterr().err
    )
    assert parse_flags(["dispatch"]).workers == "4,8,16"


@pytest.mark.slow
def test_two_workers_on_loopback():
    done = subprocess.run(
        [sys.executable, "-m", "earl_jax.bench", "dispatch", "--only=processes", "--workers=4"]
        + ["--scale=1024", "--repeats=1", "--loopback", "--json", "--tensor=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows] == ["dispatch", "gather"] * 3
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        size = ours["MiB a worker"]
        assert ours["network"] == theirs["network"] == "loopback"
        # Groups are workers 0 and 2, 1 and 3; each wants two workers' rows: 0 and 3 hold one.
        assert ours["total MiB"] == pytest.approx(size * (1 + 2 + 2 + 1))
        assert theirs["through rank 0 MiB"] == pytest.approx(size * (3 + 3 * 2))


def test_every_piece_has_one_that_waits_for_it():
    for way in WAYS:
        goals = [receivers(way, rank, 16) for rank in range(16)]
        some = [goal for goal in goals if goal]
        assert all(rank not in goal for rank, goal in enumerate(goals))
        # Who sends, sends four; and in each turn no two send to one.
        assert {len(goal) for goal in some} == {4}
        assert all(len(set(turn)) == len(some) for turn in zip(*some, strict=True))
    assert goals[14] == [15, 1, 3, 5]


@pytest.mark.slow
def test_bare_sockets_on_loopback_carry_every_byte(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = Settings(workers=(4,), scale=1024, repeats=1, loopback=True)
    rows = list(measure_links(settings))
    assert [row["way"] for row in rows] == list(WAYS)
    # A host fails where a byte is missing. Three are no further away than four hosts are.
    assert [row["MiB a worker"] for row in rows] == pytest.approx([2 * 187 / 1024] * 4)
    assert all(0 < row["median ms"] < 10_000 for row in rows)


# One of each kind as XLA writes them, at a device; all devices together receive so many bytes.
LINES = {
    # Each of eight has 64 bytes, and gets the 448 of the others.
    "%a = f32[16,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}": 8 * 448,
    # Begun and done apart: operand and result; two groups of four.
    "%b = (bf16[2,8]{1,0}, bf16[8,8]{1,0:T(8,128)(2,1)}) all-gather-start(%p), "
    "replica_groups=[2,4]<=[8], dimensions={0}": 8 * 96,
    "%m = bf16[8,8]{1,0} all-gather(%p), "
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}": 8 * 96,
    "%n = bf16[8,8]{1,0} all-gather(%p), replica_groups=mesh['a'=8] {'a':(1)4}": 8 * 96,
    # Several arrays in one.
    "%c = (s8[8]{0}, f32[4]{0}) all-gather(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0)": 8 * 12,
    "%d = f32[8,4]{1,0} all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}": 8 * 96,
    "%o = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%p), replica_groups=[2,4]<=[8]": 8 * 96,
    "%e = f32[4]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], to_apply=%add": 8 * 112,
    "%f = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add": 8 * 28,
    # A device that sends itself something sends nothing.
    "%g = u16[10]{0} collective-permute(%p), source_target_pairs={{0,1},{1,1},{2,0}}": 2 * 20,
    "%h = (u16[10]{0}, u16[10]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
    "source_target_pairs={{0,1}}, metadata={op_name={3,4}}": 20,
    "%i = f32[4]{0} all-gather-done(%b)": None,
    "%j = f32[4]{0} fusion(%all-gather.2, %all-reduce), kind=kLoop": None,
}


def test_the_bytes_of_a_programs_text_by_hand():
    for line, num_bytes in LINES.items():
        found = [each.received_bytes for each in collectives(line, 8)]
        assert found == ([] if num_bytes is None else [num_bytes]), line
    assert len(collectives("\n".join(LINES), 8)) == 11


def test_the_bytes_of_a_compiled_program():
    """Eight rows of 32 bytes to everyone: each lacks seven."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows)
    text = jax.jit(lambda x: x, out_shardings=whole).lower(shape).compile().as_text()
    assert collectives(text, 8) == [("all-gather", 8 * 7 * 32)]
