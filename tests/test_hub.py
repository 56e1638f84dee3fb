# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by name: a folder first, then a hub; without a network a clear end, at once."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from earl_jax.launch.start import exit_status
from earl_jax.models.checkpoints.hub import find_folder
from tests.support import ROOT
from tests.support.references import REFERENCE
from tests.support.runs import command

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_FOLDERS = ["nowhere", "/no/where", "a/b/c", "./a", "../a", "a/", "~/a", "/a"]


class OneModel(BaseHTTPRequestHandler):
    """A hub that has `some/model` alone: a reference checkpoint, and a file that nobody needs."""

    FILES = {
        **{path.name: path.read_bytes() for path in (REFERENCE / "qwen2_tied").iterdir()},
        "consolidated.safetensors": b"the same weights again",
    }
    asked: set[str] = set()

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def log_message(self, format, *args):
        pass

    def _answer(self, *, body: bool):
        api = "/api/models/some/model/"
        name = self.path.rpartition(f"/some/model/resolve/{COMMIT}/")[2]
        if self.path.startswith(f"{api}revision/"):
            siblings = [{"rfilename": name} for name in self.FILES]
            sent = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(f"{api}tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": COMMIT}
                for name, content in self.FILES.items()
            ]
            sent = json.dumps(listed).encode()
        elif name in self.FILES:
            self.asked.add(name)
            sent = self.FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("ETag", f'"{hashlib.sha256(sent).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(sent)


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """`huggingface_hub` reads its settings when it is imported: each case is a process."""
    none = {"HF_HOME": str(folder / "hub"), "XDG_CACHE_HOME": str(folder), "no_proxy": "127.0.0.1"}
    return {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | none | settings


def test_a_local_folder_comes_first(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="config.model.path is 'org/name', which holds no config"):
        find_folder("org/name")
    Path("org/name/config.json").touch()
    assert find_folder("org/name") == Path("org/name")


@pytest.mark.parametrize("path", NO_FOLDERS)
def test_path_that_is_no_repository_name_is_a_missing_folder(path):
    with pytest.raises(ValueError, match=r"no such folder( \(the current .*\))?; give the folder"):
        find_folder(path)


def test_a_disk_that_is_too_small_for_the_model_is_no_mistake_in_its_name(monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/hub/model.safetensors")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert exit_status(lambda: find_folder("org/no-such-folder") and 0) == 1
    words = "error: /hub/model.safetensors cannot be written: No space left on device. Make room"
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, reason",
    # Nothing listens on port 9.
    [({"HF_ENDPOINT": "http://127.0.0.1:9"}, "refused"), ({"HF_HUB_OFFLINE": "1"}, "disabled")],
    ids=["unreachable", "offline"],
)
def test_a_hub_out_of_reach_ends_a_run_with_one_message(settings, reason, tmp_path):
    line = command("main", "--config.model.path=some/model")
    done = subprocess.run(
        [*line, f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "config.model.path is 'some/model'; there is no such folder (the current" in done.stderr
    assert reason in done.stderr and "Traceback" not in done.stderr


FIND = """
import sys
from earl_jax.models.checkpoints.hub import find_folder
try:
    print(find_folder(sys.argv[1]))
except ValueError as error:
    print("error:", error)
"""


def test_a_hub_gives_what_is_read_and_its_cache_gives_it_again(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def find(name: str, **settings: str) -> str:
        line = [sys.executable, "-c", FIND, name]
        env = environment(tmp_path, **settings)
        return subprocess.run(
            line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()

    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        folder = Path(find("some/model", HF_ENDPOINT=endpoint))
        unknown = find("some/other", HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    wanted = OneModel.FILES.keys() - {"consolidated.safetensors", "reference.npz"}
    assert {path.name for path in folder.iterdir()} == OneModel.asked == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == OneModel.FILES[name]
    assert "no hub gives a model of this name" in unknown and "some/other" in unknown
    assert find("some/model", HF_HUB_OFFLINE="1") == str(folder)
