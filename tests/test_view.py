# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The local page over runs, asked for over HTTP."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.view import view_server
from tests.support import ROOT


def write_run(workdir, *, rewards, win=None, report=None):
    workdir.mkdir()
    lines = [
        {"step": step, "reward_mean": reward, "stage_s": {"train": 0.5}, "decision": "words"}
        for step, reward in enumerate(rewards, start=1)
    ]
    if win is not None:
        evaluation = {"name": "a <game>", "episodes": 8, "reward_mean": 0.25, "win": win}
        lines.append({"step": len(rewards), "eval": evaluation})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "config.json").write_text(json.dumps({"num_steps": 40}))
    if report:
        (workdir / "report.html").write_text(report)
    return workdir


@pytest.fixture
def serve():
    """Returns a function that serves workdirs and returns the address of the page."""
    servers = []

    def start(*workdirs):
        servers.append(view_server(workdirs, 0))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(address):
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        return answer.read().decode()


def charts(page):
    """Returns the curves of each chart: the points of each run."""
    found = {}
    for data, label in re.findall(r'data-chart="([^"]*)" aria-label="([^"]*) over steps', page):
        series = json.loads(data.replace("&#34;", '"').replace("&lt;", "<"))["series"]
        found[label] = {one["name"]: (one["xs"], one["ys"]) for one in series}
    return found


def test_runs_are_overlaid_by_metric_and_listed_with_their_last_evaluation(tmp_path, serve):
    a = write_run(tmp_path / "a", rewards=[-1.0, 0.5], win=0.75, report="the report of a")
    b = write_run(tmp_path / "b", rewards=[0.0, 0.25, 1.0])
    address = serve(a, b)
    page = get(address + "/")
    found = charts(page)
    assert found["reward_mean"] == {
        str(a): ([1, 2], [-1.0, 0.5]),
        str(b): ([1, 2, 3], [0.0, 0.25, 1.0]),
    }
    assert found["eval/win"] == {str(a): ([2], [0.75])}
    assert found["stage_s/train"].keys() == {str(a), str(b)}
    assert list(found)[0] == "reward_mean" and "step" not in found
    assert "a &lt;game&gt;, step 2: reward 0.25, win 0.75" in page and "<game>" not in page
    assert "2 of 40" in page and "3 of 40" in page and "+0.500" in page
    assert re.findall(r'href="([^"]+)"', page) == ["run/0/report.html"]
    assert get(f"{address}/run/0/report.html") == "the report of a"


def test_every_request_reads_the_runs_again(tmp_path, serve):
    a = write_run(tmp_path / "a", rewards=[0.5])
    address = serve(a)
    assert charts(get(address))["reward_mean"] == {str(a): ([1], [0.5])}
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward_mean": 0.75}\n{"step": 3, "rew')
    assert charts(get(address))["reward_mean"] == {str(a): ([1, 2], [0.5, 0.75])}


def test_a_run_that_begins_or_is_damaged_is_shown_with_a_note(tmp_path, serve):
    new, damaged = tmp_path / "new", write_run(tmp_path / "damaged", rewards=[1.0])
    new.mkdir()
    (new / "config.json").write_text("{}")
    (damaged / "metrics.jsonl").write_text("no JSON\n{}\n")
    page = get(serve(new, damaged))
    assert "no step has finished yet" in page and "line 1 of 2 is damaged" in page


def test_nothing_but_the_page_and_the_reports_is_served(tmp_path, serve):
    address = serve(write_run(tmp_path / "a", rewards=[1.0]))
    reports = "/run/1/report.html", "/run/0/report.html"
    for path in ("/x", *reports, "/run/0/config.json", "/../a"):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(address + path)
        assert error.value.code == 404, path
        error.value.close()


def test_bad_input_says_what_to_give(tmp_path):
    with pytest.raises(InputError, match="holds no run: there is no metrics.jsonl"):
        view_server([tmp_path], 0)
    run = write_run(tmp_path / "a", rewards=[1.0])
    with pytest.raises(InputError, match="--port=70000; give a port from 0"):
        view_server([run], 70000)
    with view_server([run], 0) as server:
        port = server.server_address[1]
        with pytest.raises(InputError, match=f"--port={port} cannot be used .*in use"):
            view_server([run], port)


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    run = write_run(tmp_path / "a", rewards=[1.0])
    command = [sys.executable, "-m", "earl_jax.view", str(run), "--port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
            assert "reward mean" in get(address)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
