# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Resuming: a damaged checkpoint is set aside, a defect of the program is not taken for damage.

tests/test_checkpoint.py has the ways in which files are damaged.
"""

import io
import shutil
import types

import jax
import numpy as np
import pytest

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.run import saved_position, workdir
from earl_jax.run.build import build_run
from earl_jax.run.source import build_from
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.learner import Learner
from tests.support.settings import make_config

D8 = MeshShape(data=8)
POSITION = {
    "placement": {
        "rollout": ["data=8", 64, 4, False],
        "train": ["data=8", 1, "none"],
        "max_tokens": 24,
        "row_shapes": {},
        "calm_steps": 3,
        "most_tokens": 24,
        "most_length": 24,
    },
    "history": [],
    "throughput": {"entries": {}, "failures": []},
}


SMALLEST = {"num_layers": 1, "width": 16, "num_heads": 2, "ffn_size": 16}


def make_run(*overrides):
    given = {
        "model": SMALLEST,
        "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    }
    return build_run(make_config(given, overrides))


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture
def resume(run, tmp_path):
    """A workdir with checkpoints of steps 1 and 2, and the call that resumes it."""
    yield from resumed(run, tmp_path, POSITION)


def resumed(run, tmp_path, position):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        checkpoints.save(step, run.learner.init_state(D8), position)
    checkpoints.wait()
    notes = []

    def call():
        return saved_position.resume(run, checkpoints, tmp_path, notes.append)

    yield types.SimpleNamespace(
        run=run, call=call, notes=notes, workdir=tmp_path, steps=checkpoints.steps
    )
    checkpoints.close()


def test_the_newest_is_used(resume, run):
    position, placement = resume.call()
    assert position.step == 2
    assert placement.as_dict() == POSITION["placement"] | {"train": ["data=8", 1, "none"]}
    jax.tree.map(np.testing.assert_array_equal, position.state, run.learner.init_state(D8))
    assert len(resume.notes) == 1 and "after step 2" in resume.notes[0]


def test_exports_of_steps_that_come_again_are_set_aside(resume):
    for step in (2, 3):
        (resume.workdir / f"export/step_00000{step}").mkdir(parents=True)
    resume.call()
    assert [path.name for path in (resume.workdir / "export").iterdir()] == ["step_000002"]
    dropped = resume.workdir / "export.dropped"
    assert [path.name for path in dropped.iterdir()] == ["step_000003"]
    assert f"exports of steps after 2 are in {dropped} now" in resume.notes


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"max_tokens"', '"max_tokenz"', "its position is not what was saved"),
        ('["data=8", 64, 4, false]', '["data=8", 64, 5, false]', "not what was saved"),
        ("{", "[", "JSONDecodeError"),
    ],
)
def test_a_changed_position_is_damage(resume, old, new, words):
    path = resume.workdir / "checkpoints/2/position/metadata"
    text = path.read_text().replace('":', '": ').replace('":  ', '": ')
    assert old in text
    path.write_text(text.replace(old, new, 1))
    position, _ = resume.call()
    assert position.step == 1 and resume.steps() == [1]
    assert words in resume.notes[0] and "step 2 is damaged" in resume.notes[0]
    assert (resume.workdir / "damaged_2").is_dir()


def test_a_run_does_not_begin_again_where_all_checkpoints_are_damaged(resume):
    for step in (1, 2):
        (resume.workdir / f"checkpoints/{step}/position/metadata").write_text("{}")
    for _ in range(2):
        with pytest.raises(InputError, match="give --restart to begin from step 0"):
            resume.call()
    assert (resume.workdir / "damaged_1").is_dir() and (resume.workdir / "damaged_2").is_dir()


def test_a_run_does_not_begin_again_where_its_checkpoints_are_gone(resume):
    resume.call()
    shutil.rmtree(resume.workdir / "checkpoints")
    written = resume.workdir / "metrics.jsonl", resume.workdir / "trajectories/step_000001.jsonl"
    written[1].parent.mkdir()
    for path in written:
        path.write_bytes(b'{"step": 1}\n')
    checkpoints = Checkpoints(resume.workdir / "checkpoints", keep=2)
    words = f"are gone from .*give --restart .*or name another .*--workdir={resume.workdir}"
    with pytest.raises(InputError, match=words):
        saved_position.resume(resume.run, checkpoints, resume.workdir, resume.notes.append)
    checkpoints.close()
    assert {path.read_bytes() for path in written} == {b'{"step": 1}\n'}


def test_a_run_that_was_killed_in_its_first_save_begins_again(resume):
    """It has no mark of a finished checkpoint, and what it wrote is not deleted."""
    folder = resume.workdir / "new"
    (folder / "checkpoints/2.orbax-checkpoint-tmp").mkdir(parents=True)
    (folder / "trajectories").mkdir()
    (folder / "export/step_000001").mkdir(parents=True)
    lines = b'{"step": 1}\n{"step": 2}\n'
    (folder / "metrics.jsonl").write_bytes(lines)
    (folder / "trajectories/step_000001.jsonl").write_bytes(b"episodes")
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    assert saved_position.resume(resume.run, checkpoints, folder, resume.notes.append) is None
    assert (folder / "export.dropped/step_000001").is_dir()
    screen = io.StringIO()
    with Progress(2, screen) as progress:
        Recorder(folder, progress).drop_after(-1)
    assert f"what was written before is in {folder / 'metrics.dropped.jsonl'} and" in (
        screen.getvalue()
    )
    assert (folder / "metrics.jsonl").read_bytes() == b""
    assert (folder / "metrics.dropped.jsonl").read_bytes() == lines
    assert (folder / "trajectories.dropped/step_000001.jsonl").read_bytes() == b"episodes"
    # Its first checkpoint leaves the mark as soon as it is seen to be finished.
    checkpoints.save(2, resume.run.learner.init_state(D8), POSITION)
    assert not checkpoints.were_saved
    while not checkpoints.were_saved:
        checkpoints.look()
    assert (folder / "checkpoints/2").is_dir()
    checkpoints.close()


def test_a_tokenizer_that_is_half_written_is_of_no_run(run, tmp_path, monkeypatch):
    def half(tokenizer, folder):
        folder.mkdir()
        (folder / "tokenizer_config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    folder = tmp_path / "tokenizer"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(workdir, "save_tokenizer", half)
        workdir.keep_config(run.config, run.origin.tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    # As an older version left it, or of another command.
    folder.mkdir()
    (folder / "special_tokens_map.json").write_text("{")
    assert workdir.tokenizer_folder(run.cluster, tmp_path) is None
    workdir.keep_config(run.config, run.origin.tokenizer, tmp_path)
    assert workdir.tokenizer_folder(run.cluster, tmp_path) == folder
    assert load_tokenizer(folder).get_vocab() == run.origin.tokenizer.get_vocab()
    assert not (folder / "special_tokens_map.json").exists()
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    workdir.keep_config(run.config, run.origin.tokenizer, tmp_path)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before, "it is the run's from then on"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": None}, "placement is not one"),
        ({"throughput": {"entries": {"a": 1}, "failures": []}}, "not a throughput table"),
    ],
)
def test_a_position_of_another_version_is_no_damage(run, tmp_path, change, words):
    for resume in resumed(run, tmp_path, POSITION | change):
        with pytest.raises(InputError, match=f"does not know it .*{words}"):
            resume.call()
        assert resume.steps() == [2, 1] and not resume.notes


@pytest.fixture(scope="module")
def adapters_run():
    return make_run("train.lora.rank=1")


@pytest.mark.parametrize("found", [0, None], ids=["another", "none"])
def test_adapters_without_their_base(adapters_run, tmp_path, found):
    """Neither is damage: another base, and a position that names none."""
    position = POSITION if found is None else {**POSITION, "base_fingerprint": found}
    for resume in resumed(adapters_run, tmp_path, position):
        if found is None:
            with pytest.raises(InputError, match="without base_fingerprint"):
                resume.call()
            assert resume.steps() == [2, 1]
        else:
            with pytest.raises(ValueError, match="draws other weights from config.seed"):
                resume.call()
            assert resume.steps() == [2, 1] and not resume.notes


@pytest.mark.parametrize(
    ("kind", "where"), [(ValueError, "state_shapes"), (KeyError, "state_shardings")]
)
def test_a_defect_is_not_taken_for_damage(resume, monkeypatch, kind, where):
    def defect(self, *_):
        raise kind("a defect")

    monkeypatch.setattr(Learner, where, defect)
    with pytest.raises(kind, match="a defect"):
        resume.call()
    assert resume.steps() == [2, 1] and not resume.notes
    assert not list(resume.workdir.glob("damaged_*"))


def test_a_replay_has_the_tokenizer_of_its_run(run, tmp_path):
    """A number of steps that was raised since gives more tasks, and so another tokenizer."""
    first, again = tmp_path / "run", tmp_path / "again"
    first.mkdir()
    workdir.keep_config(run.config, run.origin.tokenizer, first)
    other = {"env": {"name": "trail"}, "model": SMALLEST}
    config, cluster = make_config(other), run.cluster
    vocab = [
        build_from(
            config, again, cluster, str, is_new=True, replay=each
        ).origin.tokenizer.get_vocab()
        for each in (None, first)
    ]
    assert vocab[0] != vocab[1] == run.origin.tokenizer.get_vocab()
