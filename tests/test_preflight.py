# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`main --check`: what it says of hosts, links, storage and programs, and who does not fit."""

import itertools
import json
import shutil
import socket

import pytest

from earl_jax.preflight import hosts
from earl_jax.preflight.links import Link, misfits, rounds_of_pairs
from earl_jax.preflight.preflight import check
from earl_jax.settings.errors import InputError
from tests.support import ROOT
from tests.support.commands import ALL, Command
from tests.support.settings import make_config

CHECK = ["--check"]


def test_every_pair_of_hosts_meets_once_and_a_host_is_in_one_pair_of_a_round():
    for num in range(1, 10):
        rounds = list(rounds_of_pairs(num))
        met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
        assert met == list(itertools.combinations(range(num), 2))
        assert all(len({n for pair in pairs for n in pair}) == 2 * len(pairs) for pairs in rounds)


def test_a_slow_link_and_a_wrong_one_name_their_hosts():
    found = [Link("a - b", 40, 38, False), Link("a - c", 41, 5, False), Link("b - c", 39, 37, True)]
    problems, lines = misfits(found)
    assert problems == [
        "b - c: other numbers came than were sent",
        "a - c: dispatch at 5 GB/s, where the median is 37",
    ]
    assert lines[0] == "all-reduce between 3 pairs: 39 to 41 GB/s, median 40"
    assert misfits([]) == ([], [])


class ThreeHosts:
    """Three hosts, of which the third is `unlike` the two others; the first is this one."""

    hosts = ("a", "b", "c")

    def __init__(self, **unlike: float) -> None:
        self.unlike = unlike

    def barrier(self, what: str) -> None:
        pass

    def gather(self, own: dict[str, float], what: str) -> list[dict[str, float]]:
        factors = {name: own[name] * factor for name, factor in self.unlike.items()}
        return [own, own, own | factors]


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        ({}, ""),
        ({"device_bytes": 0.96, "flops_per_s": 0.21}, ""),
        ({"device_bytes": 0.9}, "72.0 GiB a device, where others have 80.0; another program"),
        ({"flops_per_s": 0.1}, "where the fastest has"),
        # Since 1970: a minute, or a few seconds.
        ({"clock_s": 1 + 60 / 1.8e9}, "its clock is +6"),
        ({"clock_s": 1 - 60 / 1.8e9}, "its clock is -6"),
        ({"clock_s": 1 + 5 / 1.8e9}, ""),
    ],
    ids=str,
)
def test_the_host_whose_clock_memory_or_speed_does_not_fit_is_named(unlike, words, monkeypatch):
    monkeypatch.setattr(hosts, "matmul_flops_per_s", lambda: 4e14)
    monkeypatch.setattr(hosts.time, "time", lambda: 1.8e9)
    facts = hosts.Facts(devices="8 x H100", device_bytes=80 * 2**30, host_bytes=0, versions={})
    found, lines = hosts.misfits(ThreeHosts(**unlike), facts)
    assert len(found) == bool(words)
    assert all(each.startswith("process 2 on c: ") and words in each for each in found), found
    slowest = 400 * unlike.get("flops_per_s", 1)
    assert lines == [f"speed of a device: {slowest:.3g} to 400 TFLOP/s in a matrix product"]


@pytest.mark.slow
def test_one_process_is_checked_and_leaves_nothing(cache, tmp_path):
    status, output, errors = Command(cache, tmp_path / "a/b", 1, CHECK, **ALL).ends()[0]
    assert status == 0, errors
    lines = output.splitlines()
    assert lines[0].startswith(f"process 0 of 1 on {socket.gethostname()}: 8 x cpu, host memory")
    for words in (
        "config, code and versions: the same",
        "all-reduce between 1 pairs",
        "dispatch between 1 pairs",
        "all processes write",
        "rollout data=8, context 48: ",
        "train data=2,fsdp=4, context 48: ",
    ):
        assert any(words in line for line in lines), (words, output)
    assert lines[-1] == "* all checks passed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_a_mistake(cache, tmp_path):
    budget = {"selector.budget_bytes_per_device": 100_000}
    status, _, errors = Command(cache, tmp_path / "w", 1, CHECK, **ALL, **budget).ends()[0]
    assert status == 2 and "config.selector.budget_bytes_per_device" in errors
    assert not (tmp_path / "w").exists()


def test_another_runs_workdir_and_weights_that_are_not_there_are_mistakes(tmp_path):
    """Found before a program is compiled, and nothing is written."""
    workdir = tmp_path / "w"
    with pytest.raises(InputError, match="--init_from=.* holds no checkpoint of a run"):
        check(make_config({"init_from": str(tmp_path / "none")}), workdir)
    assert not workdir.exists()
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(make_config({}).as_dict()))
    # A run that ended before its first checkpoint has the empty folder.
    (workdir / "checkpoints").mkdir()
    with pytest.raises(InputError, match="holds a run of another config: config.seed"):
        check(make_config({"seed": 1}), workdir)
    other = make_config({"seed": 1, "init_from": str(tmp_path / "none")})
    with pytest.raises(InputError, match="--init_from=.* holds no checkpoint of a run"):
        check(other, workdir, restart=True)
    assert {path.name for path in workdir.iterdir()} == {"config.json", "checkpoints"}


@pytest.mark.slow
def test_two_processes_are_checked_with_the_link_between_them(cache, tmp_path):
    host = socket.gethostname()
    ends = Command(cache, tmp_path / "w", 2, CHECK, CHECK, **ALL).ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    for number, (_, output, _) in enumerate(ends):
        assert f"process {number} of 2 on {host}: 4 x cpu" in output
    assert f"process 0 on {host} - process 1 on {host}: all-reduce" in ends[0][1]
    assert f"order: {host} (8 devices of processes 0, 1)" in ends[0][1]
    assert "* all checks passed" in ends[0][1] and "* " not in ends[1][1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_except("code")
@pytest.mark.parametrize("what", ["code", "workdir"])
def test_the_process_that_does_not_fit_is_named(cache, tmp_path, what):
    """One message, from the first process; both end with status 2, and leave nothing."""
    own, folders, host = [], [ROOT, ROOT], socket.gethostname()
    if what == "code":
        folders[1] = tmp_path / "code"
        shutil.copytree(ROOT / "earl_jax", folders[1] / "earl_jax")
        shutil.copytree(ROOT / "configs", folders[1] / "configs")
        with (folders[1] / "earl_jax/loop.py").open("a") as file:
            file.write("# another version\n")
        words = "versions.code is "
    else:
        own = [f"--workdir={tmp_path / 'other'}"]
        words = f"in process 0 on {host}: it is not the folder that process 1 on {host} writes to"
    run = Command(cache, tmp_path / "w", 2, CHECK, CHECK + own, folders=folders, **ALL)
    ends = run.ends()
    assert [status for status, _, _ in ends] == [2, 2], ends
    assert words in ends[0][2] and "error: " not in ends[1][2]
    assert "Traceback" not in ends[0][2] + ends[1][2]
    assert not (tmp_path / "w").exists()
