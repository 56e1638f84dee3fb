# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`main --check`: what it says of hosts, links, storage and programs, and who does not fit."""

import itertools
import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from earl_jax.launch.agreement import open_shared_workdir
from earl_jax.preflight import hosts, storage
from earl_jax.preflight.links import Link, misfits, rounds_of_pairs
from earl_jax.preflight.preflight import check
from earl_jax.preflight.storage import check_storage
from earl_jax.settings.errors import InputError
from tests.support import ROOT
from tests.support.clusters import Meeting, OneOfTwo
from tests.support.commands import ALL, SMALL, Command
from tests.support.runs import config_of
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
def test_one_process_is_checked_and_leaves_nothing(tmp_path, capsys):
    check(config_of(SMALL | ALL), tmp_path / "a/b")
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0].startswith(f"process 0 of 1 on {socket.gethostname()}: 8 x cpu, host memory")
    # What was given, before machines are timed, and programs last.
    places = [
        output.index(words)
        for words in (
            "config, code and versions: the same",
            "all processes write",
            "attention in training: ",
            "all-reduce between 1 pairs",
            "dispatch between 1 pairs",
            "rollout data=8, context 48: ",
            "train data=2,fsdp=4, context 48: ",
        )
    ]
    assert places == sorted(places), output
    assert lines[-1] == "* all checks passed"
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_is_too_small_is_a_mistake(tmp_path):
    budget = {"selector.budget_bytes_per_device": 100_000}
    with pytest.raises(InputError, match="config.selector.budget_bytes_per_device"):
        check(config_of(SMALL | ALL | budget), tmp_path / "w")
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
    words = "holds a run of another config: config.seed.* --restart, .* keeps what it holds \\("
    with pytest.raises(InputError, match=words):
        check(make_config({"seed": 1}), workdir)
    other = make_config({"seed": 1, "init_from": str(tmp_path / "none")})
    with pytest.raises(InputError, match="--init_from=.* holds no checkpoint of a run"):
        check(other, workdir, restart=True)
    assert {path.name for path in workdir.iterdir()} == {"config.json", "checkpoints"}


@pytest.mark.slow
def test_two_processes_are_checked_with_the_link_between_them(tmp_path):
    host = socket.gethostname()
    ends = Command(tmp_path / "w", 2, CHECK, CHECK, **ALL).ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    for number, (_, output, _) in enumerate(ends):
        assert f"process {number} of 2 on {host}: 4 x cpu" in output
    assert f"process 0 on {host} - process 1 on {host}: all-reduce" in ends[0][1]
    assert f"order: {host} (8 devices of processes 0, 1)" in ends[0][1]
    assert "* all checks passed" in ends[0][1] and "* " not in ends[1][1]
    assert list(tmp_path.iterdir()) == []


def test_the_process_with_other_code_is_named(tmp_path):
    """One message, from the first process; both end with status 2, and leave nothing."""
    code = tmp_path / "code"
    for folder in ("earl_jax", "configs"):
        shutil.copytree(ROOT / folder, code / folder)
    with (code / "earl_jax/loop.py").open("a") as file:
        file.write("# another version\n")
    run = Command(tmp_path / "w", 2, CHECK, CHECK, folders=[ROOT, code], **ALL)
    ends = run.ends()
    assert [status for status, _, _ in ends] == [2, 2], ends
    assert "versions.code is " in ends[0][2] and "error: " not in ends[1][2]
    assert "Traceback" not in ends[0][2] + ends[1][2]
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("open_it", "words"),
    [
        (check_storage, "in process 0 on a: it is not the folder that process 1 on b writes to"),
        (
            lambda cluster, workdir: open_shared_workdir(cluster, workdir, workdir.mkdir),
            "is not the same folder in process 1 as in process 0; all processes write",
        ),
    ],
    ids=["a check", "a run"],
)
def test_a_workdir_that_is_another_folder_in_one_process_is_a_mistake_of_all(
    tmp_path, monkeypatch, open_it, words
):
    monkeypatch.setattr(storage, "_PATIENCE_S", 0.1)
    meeting = Meeting()

    def opened(index: int) -> str:
        with pytest.raises(InputError) as raised:
            open_it(OneOfTwo(index, meeting), tmp_path / f"of_process_{index}")
        return str(raised.value)

    with ThreadPoolExecutor(2) as threads:
        messages = list(threads.map(opened, range(2)))
    assert all(words in message for message in messages), messages
    # None leaves files, and a check leaves none of the folders that it made.
    assert not any(path.is_file() for path in tmp_path.glob("of_process_0/**/*"))
    assert open_it is not check_storage or list(tmp_path.iterdir()) == []
