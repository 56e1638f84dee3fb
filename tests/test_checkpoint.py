# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bit for bit, on any mesh, and the one before the newest when that is damaged."""

import asyncio
import concurrent.futures
import copy
import dataclasses
import functools
import json
import multiprocessing
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tensorstore

from earl_jax.config.resume import MAY_CHANGE
from earl_jax.run.workdir import open_workdir
from earl_jax.settings.errors import InputError, disk_in_words
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint
from earl_jax.train.disk_errors import _unraisable
from earl_jax.train.state import state_shapes, state_shardings
from tests.support.saved_states import (
    CUBE,
    D8,
    MODEL,
    POSITION,
    TRAIN,
    VOCAB,
    assert_bitwise_equal,
    made,
    restored,
)
from tests.support.settings import make_config


def test_a_state_comes_back_bit_for_bit_on_any_mesh(checkpoints):
    checkpoints.save(3, made(3), POSITION)
    checkpoints.wait()
    assert checkpoints.steps() == [3]
    assert checkpoints.position(3) == POSITION
    back = restored(checkpoints, 3, CUBE)
    assert_bitwise_equal(made(3), back)
    shardings = state_shardings(MODEL, TRAIN, VOCAB, CUBE)
    for leaf, where in zip(jax.tree.leaves(back), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)


def test_saved_state_is_unaffected_by_later_donation(checkpoints):
    state = made(0)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 7, s), donate_argnums=0)
    overwrite.lower(state).compile()
    checkpoints.save(1, state, POSITION)
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    assert_bitwise_equal(made(0), restored(checkpoints, 1))


def test_the_newest_are_kept_and_found_by_the_next_process(checkpoints, tmp_path):
    for step in (10, 20, 30):
        checkpoints.save(step, made(step), POSITION | {"step": step})
    checkpoints.wait()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.steps() == again.steps() == [30, 20]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["20", "30"]
    assert again.position(20)["step"] == 20
    assert_bitwise_equal(made(20), restored(again, 20))
    again.close()


def data_files(folder):
    """The files of a checkpoint that hold arrays, largest first."""
    return sorted((folder / "state").rglob("d/*"), key=lambda p: -p.stat().st_size)


def truncate(folder):
    for path in data_files(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete_data(folder):
    assert data_files(folder)
    for path in data_files(folder):
        path.unlink()


def flip_a_bit(folder):
    # In each file: of some that orbax keeps, nothing is read again.
    for path in data_files(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))


def fill_with_garbage(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff\x00{garbage" * 50)


def empty_the_position(folder):
    for path in (folder / "position").iterdir():
        if path.is_file():
            path.write_bytes(b"")


def lose_the_state(folder):
    shutil.rmtree(folder / "state")


def lose_the_position(folder):
    shutil.rmtree(folder / "position")


@pytest.fixture(scope="module")
def next_process():
    """Another process, as when a run is started again.

    And because, when one array cannot be read, tensorstore's reads of the others outlive orbax's
    event loop: they complain later, to whatever test runs then.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_NUM_CPU_DEVICES", "8")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()


def failure(read):
    """The damage that a read finds, in words; None if none. Anything else rises."""
    try:
        read()
    except DamagedCheckpoint as error:
        return str(error)
    return None


def set_newest_aside(folder):
    """Resumes over a damaged step 20; returns what it raised."""
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.steps() == [20, 10]
    words = failure(lambda: (checkpoints.position(20)["step"], restored(checkpoints, 20)))
    checkpoints.discard(20)
    assert checkpoints.steps() == [10]
    assert (folder.parent / "damaged_20").is_dir()
    assert checkpoints.position(10)["step"] == 10
    assert_bitwise_equal(made(10), restored(checkpoints, 10))
    # The run takes step 20 again, and saves it again; which may be damaged again.
    checkpoints.save(20, made(21), POSITION)
    checkpoints.wait()
    assert checkpoints.steps() == [20, 10]
    assert_bitwise_equal(made(21), restored(checkpoints, 20))
    checkpoints.discard(20)
    assert checkpoints.steps() == [10]
    checkpoints.close()
    return words


def words_of(folder):
    """Returns the words of the error that a damaged step 20 raises."""
    with Checkpoints(folder, keep=2) as checkpoints:
        return failure(lambda: (checkpoints.position(20)["step"], restored(checkpoints, 20)))


def test_a_damaged_newest_raises_is_set_aside_and_the_one_before_is_used(
    checkpoints, next_process, tmp_path
):
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        checkpoints.save(step, made(step), POSITION | {"step": step})
    checkpoints.wait()
    found = {}
    for damage in (
        truncate,
        delete_data,
        fill_with_garbage,
        empty_the_position,
        lose_the_state,
        lose_the_position,
    ):
        other = shutil.copytree(folder, tmp_path / damage.__name__)
        damage(other / "20")
        found[damage] = next_process(words_of, other)
    flip_a_bit(folder / "20")
    found[flip_a_bit] = next_process(set_newest_aside, folder)
    for damage, words in found.items():
        assert words and words.splitlines()[0], f"the note shows the first line: {damage}"


def fill_the_disk(folder):
    """Saves where no file may be as large as an array; returns what it raises and what is left."""
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(10, made(10), POSITION)
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        checkpoints.save(20, wide_state(5), POSITION)
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            checkpoints.look()
        return None
    except (OSError, ValueError) as error:
        return disk_in_words(error), checkpoints.steps()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        checkpoints.close()


def test_a_disk_that_cannot_take_a_checkpoint_is_noticed_without_waiting(next_process, tmp_path):
    words, steps = next_process(fill_the_disk, tmp_path / "checkpoints")
    assert f"{tmp_path / 'checkpoints'}/20" in words and "File too large" in words
    assert steps == [10]


def read_as_a_wider_model(folder):
    checkpoints = Checkpoints(folder, keep=2)
    wider = dataclasses.replace(MODEL, width=32)
    shapes, shardings = state_shapes(wider, TRAIN, VOCAB), state_shardings(wider, TRAIN, VOCAB, D8)
    with pytest.raises(InputError) as raised:
        checkpoints.state(1, shapes, shardings)
    return str(raised.value)


def test_a_state_of_another_structure_is_a_mistake_and_no_damage(
    checkpoints, next_process, tmp_path
):
    checkpoints.save(1, made(1), POSITION)
    checkpoints.wait()
    words = next_process(read_as_a_wider_model, tmp_path / "checkpoints")
    assert "the checkpoint of step 1" in words and "['float32', [64, 16]] there" in words
    assert "name another --workdir" in words


# From this width on arrays are files of their own; smaller ones are in files that check themselves.
WIDE = dataclasses.replace(MODEL, width=64, ffn_size=128, head_size=32)


def wide_state(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf, where: jax.device_put(
            rng.standard_normal(leaf.shape).astype(leaf.dtype), where
        ),
        state_shapes(WIDE, TRAIN, VOCAB),
        state_shardings(WIDE, TRAIN, VOCAB, CUBE),
    )


def damage_one_file(rng, folder):
    """Flips a bit, cuts a file short, removes it, or fills a part of it with zeros."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    # Every second one by the bytes: in the arrays.
    by_bytes = rng.integers(2) == 1
    path = files[rng.choice(len(files), p=sizes / sizes.sum() if by_bytes else None)]
    data, kind = bytearray(path.read_bytes()), rng.integers(4)
    at = int(rng.integers(max(1, len(data))))
    if kind == 0 and data:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        path.unlink()
        return f"{path.name} removed"
    else:
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(bytes(data))
    return f"{path.name} {('flipped', 'cut', '', 'zeroed')[kind]} at {at}"


def read_damaged(folder, spoilt, seeds):
    """Damages a copy of a checkpoint for each seed; returns (what was done, what came of it)."""
    found, expected = [], wide_state(5)
    shapes = state_shapes(WIDE, TRAIN, VOCAB)
    shardings = state_shardings(WIDE, TRAIN, VOCAB, D8)
    for seed in seeds:
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(folder, spoilt)
        done = damage_one_file(np.random.default_rng(seed), spoilt / "20")
        checkpoints = Checkpoints(spoilt, keep=2)
        words = failure(functools.partial(checkpoints.position, 20))
        words = words or failure(functools.partial(checkpoints.state, 20, shapes, shardings))
        if words is None:
            assert checkpoints.position(20) == POSITION, done
            assert_bitwise_equal(expected, checkpoints.state(20, shapes, shardings))
        checkpoints.close()
        found.append((done, words))
    return found


@pytest.mark.slow
def test_random_damage_is_harmless_or_named(checkpoints, next_process, tmp_path):
    """Never wrong values: each damaged checkpoint is read as it was saved, or not at all."""
    checkpoints.save(20, wide_state(5), POSITION)
    checkpoints.wait()
    files = list((tmp_path / "checkpoints/20").rglob("d/*"))
    assert max(file.stat().st_size for file in files) > 100_000, "arrays lie outside"
    found = next_process(read_damaged, tmp_path / "checkpoints", tmp_path / "spoilt", range(24))
    named = [done for done, words in found if words]
    assert 24 // 3 < len(named), found


# The workdir.

CONFIG = make_config({"rollout": {"context_buckets": (16, 40)}}).as_dict()


def keep(workdir, config):
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config))


def test_a_new_workdir_is_made_and_stays_empty(tmp_path):
    workdir = tmp_path / "runs" / "one"
    assert open_workdir(workdir, CONFIG) == []
    assert list(workdir.iterdir()) == []


def test_the_same_config_opens_it_again(tmp_path):
    keep(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_bytes()
    assert open_workdir(tmp_path, CONFIG) == []
    assert (tmp_path / "config.json").read_bytes() == before


def test_another_config_is_an_error_that_lists_what_differs(tmp_path):
    keep(tmp_path, CONFIG)
    other = make_config(
        {"seed": 1, "rollout": {"context_buckets": (16, 40)}, "train": {"epochs": 3}}
    ).as_dict()
    with pytest.raises(ValueError) as error:
        open_workdir(tmp_path, other)
    message = str(error.value)
    assert f"--workdir={tmp_path}" in message
    assert "config.seed is 0 there, 1 here; config.train.epochs is 1 there, 3 here." in message
    # There is no checkpoint to begin with.
    assert "--restart" in message and "--init_from" not in message
    assert "context_buckets" not in message


@pytest.mark.parametrize("path", [*MAY_CHANGE])
def test_settings_that_may_change_are_noted_and_others_are_an_error(tmp_path, path):
    def change(settings, path, value):
        section, _, name = path.rpartition(".")
        for part in filter(None, section.split(".")):
            settings = settings[part]
        settings[name] = value

    keep(tmp_path, CONFIG)
    given = copy.deepcopy(CONFIG)
    where = given
    for part in path.split("."):
        assert part in where, f"MAY_CHANGE names {path}, which is no setting"
        where = where[part]
    leaf = f"{path}.{next(iter(where))}" if isinstance(where, dict) else path
    change(given, leaf, "another")
    [line] = open_workdir(tmp_path, given)
    assert line.startswith(f"config.{leaf} is ") and line.endswith("'another' here")
    # The nearest setting that may not.
    change(given, "rollout.num_slots", 7)
    with pytest.raises(ValueError, match="config.rollout.num_slots is 64 there, 7 here. Name"):
        open_workdir(tmp_path, given)


def test_a_config_with_a_key_less_or_more_is_reported(tmp_path):
    keep(tmp_path, {"seed": 0, "old": 1})
    with pytest.raises(ValueError) as error:
        open_workdir(tmp_path, {"seed": 0, "new": 2})
    assert "config.new is absent there, 2 here; config.old is 1 there, absent here" in str(
        error.value
    )


@pytest.mark.parametrize("damage", ["", '{"seed": 0', "\x00\x01", "[1]"])
def test_a_damaged_config_is_an_error_that_names_the_file(tmp_path, damage):
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(ValueError, match="config"):
        open_workdir(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == damage


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    impossible = Path("/proc/runs")
    for workdir in (tmp_path / "file", tmp_path / "file" / "runs" / "one", impossible):
        with pytest.raises(ValueError, match=f"--workdir={workdir} cannot be used: .*may write"):
            open_workdir(workdir, CONFIG)


def test_writes_that_end_when_their_save_has_failed_say_nothing(monkeypatch):
    """Tensorstore tells of them at a closed event loop; what others tell of is heard still."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", functools.partial(_unraisable, heard.append))
    promise, write = tensorstore.Promise.new()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(_result_of(write))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    promise.set_result(None)
    waiting._log_destroy_pending = False
    assert write.result() is None and not waiting.done() and not heard
    sys.unraisablehook(SimpleNamespace(exc_value=ValueError("another"), object=None))
    assert [str(each.exc_value) for each in heard] == ["another"]


async def _result_of(future):
    return await future


def test_the_newest_the_best_and_those_of_every_fifth_step_stay(tmp_path):
    """Also where the folder is opened again; steps without a rating are never the best."""
    kept = {"keep": 2, "keep_best": 1, "keep_every_steps": 5}
    opened = Checkpoints(tmp_path / "checkpoints", **kept)
    for step, rating in ((2, 0.9), (4, 0.1), (5, None), (7, 0.3), (8, -0.5)):
        opened.save(step, made(step), POSITION, rating)
    opened.wait()
    assert opened.steps() == [8, 7, 5, 2]
    opened.close()
    opened = Checkpoints(tmp_path / "checkpoints", **kept)
    for step, rating in ((10, 0.95), (11, None)):
        opened.save(step, made(step), POSITION, rating)
    opened.wait()
    assert opened.steps() == [11, 10, 5]
    assert_bitwise_equal(made(5), restored(opened, 5))
    opened.close()
