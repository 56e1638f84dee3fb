# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The throughput table of a run: fed by real steps, kept on disk, and read as config says."""

import json
import statistics

import pytest

from earl_jax.loop import rl_step
from earl_jax.placement.placement import Placement
from earl_jax.run.build import build_run
from earl_jax.selector.table import KEPT, TRUSTED, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from tests.support.placements import D8, SIXTEEN_SLOTS, TOKENS, first_position, given
from tests.support.problems import rollout_key, train_key
from tests.support.settings import make_config

TRAIN_KEY, ROLLOUT_KEY = train_key(D8, TOKENS, 1, "none"), rollout_key(D8, TOKENS, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_with(table):
    return build_run(make_config(given(SIXTEEN_SLOTS, (D8,), (D8,), table=str(table))))


def opened(run):
    table, note = run.open_table()
    placement = Placement(run.stages, table)
    placement.choose_step(TOKENS, None)
    return placement, note


def files(cache):
    return {path: path.read_text() for path in cache.rglob("*.json")}


@pytest.mark.slow
def test_real_steps_feed_the_table_and_the_next_run_begins_with_their_medians(cache):
    """A step in which a program was compiled says nothing of the trainer's speed."""
    run = run_with("auto")
    placement, note = opened(run)
    assert note is None and placement.table.speeds == {}
    position = first_position(run, placement)
    seen = []
    for _ in range(4):
        position, record = rl_step(run, placement, position)
        speeds = placement.table.speeds
        seen.append([len(speeds.get(key, ())) for key in (TRAIN_KEY, ROLLOUT_KEY)])
    assert [train for train, _ in seen] == [0, 1, 2, 3]
    assert [rollout for _, rollout in seen] in ([0, 1, 2, 3], [1, 2, 3, 4])
    ((path, text),) = files(cache).items()
    assert path.is_relative_to(cache / "earl_jax" / "throughput")
    assert ThroughputTable.from_dict(json.loads(text)).speeds == speeds
    assert len(speeds[TRAIN_KEY]) >= TRUSTED
    # Rows that are padding are computed too: the selector counts as many.
    tokens = sum(outcome.num_tokens for outcome in record.outcomes)
    positions = run.config.train.epochs * tokens / record.packing_fill
    assert speeds[TRAIN_KEY][-1] == pytest.approx(positions / record.stage_s["train"])
    again, note = opened(run)
    assert note is None
    for key in (TRAIN_KEY, ROLLOUT_KEY):
        assert again.table.speeds[key] == (statistics.median(speeds[key]),)


@pytest.mark.slow
def test_run_whose_kept_table_was_poisoned_finds_back_to_its_best_mesh_within_ten_steps(cache):
    """Real steps: one mesh is kept at a third of its speed, another at half of the first's."""
    meshes = (D8, MeshShape(tensor=2, data=1, context=4))
    config = make_config(given(SIXTEEN_SLOTS, meshes, (D8,), table="auto"))

    def steps(number):
        run = build_run(config)
        placement, _ = opened(run)
        position, used = first_position(run, placement), []
        for _ in range(number):
            position, _ = rl_step(run, placement, position)
            used.append(placement.rollout.mesh)
        return placement.table, used

    table, used = steps(4)
    assert set(used) == {D8}
    speed = statistics.median(table.speeds[ROLLOUT_KEY])
    poison = {ROLLOUT_KEY: speed / 3, rollout_key(meshes[1], TOKENS, 16): speed / 2}
    for key, wrong in poison.items():
        for _ in range(KEPT):
            table = table.with_speed(key, wrong)
    table.write()
    _, used = steps(12)
    assert set(used[9:]) == {D8}


def test_model_reads_and_writes_no_speeds_and_remembers_failures(cache):
    known, _ = opened(run_with("auto"))
    known.add_speed(known.train, TOKENS, 123.0)
    before = files(cache)
    assert len(before) == 1
    run = run_with("model")
    placement, _ = opened(run)
    assert placement.table.speeds == {}
    placement.add_speed(placement.train, TOKENS, 123.0)
    assert placement.table.speeds == {} and files(cache) == before
    placement.fail("rollout")
    (path,) = files(cache).keys() - before.keys()
    assert json.loads(path.read_text())["entries"] == {}
    again, _ = opened(run)
    assert again.table.failures == placement.table.failures
    assert again.rollout != placement.rollout
    # What failed by one table is another's business: that of the run by speeds is as it was.
    assert all(path.read_text() == text for path, text in before.items())


def test_given_table_is_read_and_not_changed(tmp_path):
    path = tmp_path / "mine.json"
    ThroughputTable(path=path).with_speed(TRAIN_KEY, 7.0).with_speed(TRAIN_KEY, 9.0).write()
    before = path.read_text()
    placement, note = opened(run_with(path))
    assert note is None
    assert placement.table.speeds == {TRAIN_KEY: (7.0, 9.0)}
    placement.add_speed(placement.train, TOKENS, 123.0)
    placement.fail("rollout")
    assert placement.table.speeds == {TRAIN_KEY: (7.0, 9.0)}
    assert len(placement.table.failures) == 1
    assert path.read_text() == before
    # What ran out of memory is remembered elsewhere, and no speed of this run.
    again, _ = opened(run_with(path))
    assert again.table.speeds == {TRAIN_KEY: (7.0, 9.0)}
    assert again.table.failures == placement.table.failures


@pytest.mark.parametrize(
    "text", [None, "", "{", "{}", "[]", '{"entries": {"a": 1}}', '{"entries": {}, "failures": [3]}']
)
def test_path_of_something_else_is_an_error_that_names_the_setting(tmp_path, text):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"config.selector.table={path} cannot be read"):
        run_with(path).open_table()


def test_table_that_cannot_be_written_is_kept_in_memory(cache):
    cache.write_text("a file, where a folder should be")
    predicted = []
    run = run_with("auto")
    table, _ = run.open_table()
    placement = Placement(run.stages, table, predicted.append)
    placement.choose_step(TOKENS, None)
    for _ in range(2):
        placement.add_speed(placement.train, TOKENS, 123.0)
    assert placement.table.speeds[TRAIN_KEY] == (123.0, 123.0)
    assert len(predicted) == 1 and "cannot be kept for later runs" in predicted[0]
