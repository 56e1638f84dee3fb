# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a table of measurements is of: who takes it, who measures again, and what is said."""

import io
import json

import pytest
from test_placement import GIVEN

from earl_jax import measurements
from earl_jax.config_file import load_config_file, make_config
from earl_jax.main import DEFAULT_CONFIG
from earl_jax.measurements import facts_of, open_table
from earl_jax.plan import main, plan_command
from earl_jax.run import _measured_before, _new_placement
from earl_jax.scene import make_scene
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.roofline import train_s
from earl_jax.selector.throughput import Measurement, ThroughputTable, load_table
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.progress import Progress
from earl_jax.world import World

MEASURED = Measurement(tokens_per_s=100.0, program_bytes=1, switch_s=0.0)
ENTRY = "train data=8 24"


# A run's own.


@pytest.fixture(scope="module")
def world():
    return World(make_config(GIVEN))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_table_says_what_it_is_of(world, own_cache):
    table, note = open_table(world)
    assert note is None
    table.with_measurement(ENTRY, MEASURED)
    facts = json.loads(table.path.read_text())["facts"]
    cpus = {"platform": "cpu", "kind": "cpu", "number": 8}
    assert facts["devices"] == {"rollout": cpus, "train": cpus}
    assert (facts["model"]["width"], facts["vocab_size"]) == (16, 320)
    assert {"jax", "jaxlib", "earl_jax"} <= facts["versions"].keys()
    assert facts["rollout"]["num_slots"] == 8 and facts["train"]["remat"] is False


def test_flags_are_facts_in_any_order_but_for_those_that_dump(world, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2 --xla_a=1")
    facts = facts_of(world)
    assert facts["flags"]["XLA_FLAGS"] == ["--xla_a=1", "--xla_b=2"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1  --xla_dump_to=/somewhere --xla_b=2")
    assert facts_of(world) == facts
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    assert facts_of(world) != facts


def test_a_run_says_with_what_it_was_measured_before(world, own_cache, monkeypatch):
    """Of the tables with other facts that with the fewest is named: one, and not two."""
    table, _ = open_table(world)
    table.with_measurement(ENTRY, MEASURED)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    versions = {"jax": "0.9", "jaxlib": "0.9", "earl_jax": "0"}
    monkeypatch.setattr(measurements, "_versions", lambda _: versions)
    further, _ = open_table(world)
    further.with_measurement(ENTRY, MEASURED)
    monkeypatch.setattr(measurements, "_versions", lambda _: versions | {"jax": "0.10"})
    shown = io.StringIO()
    with Progress(1, shown) as progress:
        placement = _new_placement(world, progress)
    assert dict(placement.calibration.table.measurements) == {}
    assert (
        "this model was measured on such devices before, with versions.jax 0.9 (here 0.10); "
        "measuring again"
    ) in " ".join(shown.getvalue().split())


FACTS = {"model": {"width": 64}, "vocab_size": 320, "devices": {"train": {"number": 8}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"jax": "2"}}, "with versions.jax 1 (here 2)"),
        ({"versions": {"jax": "1", "libtpu": "3"}}, "with versions.libtpu none (here 3)"),
        ({"flags": ["--a", "--b"]}, "with flags none (here --a --b)"),
        ({"model": {"width": 65}}, None),
        ({"vocab_size": 384}, None),
        ({"devices": {"train": {"number": 4}}}, None),
    ],
)
def test_stale_is_what_was_measured_of_the_same_thing(own_cache, change, words):
    facts = FACTS | {"versions": {"jax": "1"}, "flags": []}
    load_table(facts)[0].with_measurement(ENTRY, MEASURED)
    found, note = load_table(facts | change)
    assert dict(found.measurements) == {}
    assert note is None if words is None else words in note and note.endswith("measuring again")
    # When it was measured again nothing is said of it.
    found.with_measurement(ENTRY, MEASURED)
    assert load_table(facts | change) == (found.with_measurement(ENTRY, MEASURED), None)


def test_many_differences_are_counted(own_cache):
    facts = FACTS | {"settings": dict.fromkeys("abcdef", 1)}
    load_table(facts)[0].with_measurement(ENTRY, MEASURED)
    _, note = load_table(FACTS | {"settings": dict.fromkeys("abcdef", 2)})
    assert "settings.d 1 (here 2) and 2 more; measuring again" in note


def test_a_damaged_or_empty_neighbour_is_not_named(own_cache):
    empty, _ = load_table(FACTS | {"versions": 1})
    empty.write()
    damaged, _ = load_table(FACTS | {"versions": 2})
    damaged.path.write_text("{")
    assert load_table(FACTS | {"versions": 3})[1] is None


def test_a_resumed_run_leaves_what_other_versions_measured():
    """What it chose by itself comes first, where it is of the same facts."""
    facts, said = {"versions": {"jax": "1"}}, []
    saved = ThroughputTable(path=None, measurements={ENTRY: MEASURED}, facts=facts)
    kept = ThroughputTable(path=None, measurements={}, facts=facts)
    assert _measured_before(saved, kept, said.append).measurements == {ENTRY: MEASURED}
    # From before tables said what they were of.
    unknown = ThroughputTable(path=None, measurements={ENTRY: MEASURED})
    assert _measured_before(unknown, kept, said.append).measurements == {ENTRY: MEASURED}
    assert said == []
    newer = ThroughputTable(path=None, measurements={}, facts={"versions": {"jax": "2"}})
    assert _measured_before(saved, newer, said.append) == newer
    assert len(said) == 1 and "versions.jax 1 (here 2); measuring again" in said[0]


# One that is given to a plan.


@pytest.fixture(scope="module")
def default_facts():
    """Of a run of the default config on eight virtual devices."""
    return facts_of(World(make_config(load_config_file(DEFAULT_CONFIG))))


@pytest.fixture
def given(default_facts, tmp_path):
    """`given(measurements, change)` writes a table whose facts have this change."""

    def write(entries, change=lambda facts: None):
        facts = json.loads(json.dumps(default_facts))
        change(facts)
        path = tmp_path / "table.json"
        ThroughputTable(path=path, measurements=entries, facts=facts).write()
        return path

    return write


def planned(capsys, path, *more):
    plan_command(["--topology=cpu:8", f"--table={path}", *more])
    return capsys.readouterr().out


def computed_speed(mesh, places):
    """Tokens per second of an update of the default config's 128 rows."""
    config = make_config(load_config_file(DEFAULT_CONFIG))
    scene = make_scene(config, parse_topology("cpu:8"), 320, 17_000_000)
    update = train_s(scene.hardware, scene.sizes, scene.work, mesh, places)
    return 128 * places / update.total


def measured(tokens_per_s):
    return Measurement(tokens_per_s=tokens_per_s, program_bytes=1, switch_s=0.0)


def test_a_table_of_a_run_multiplies_speeds_by_the_median_of_its_factors(given, capsys):
    """By hand: 1/4, 1/2 and 2 times what is computed; what has no speed or another rung is out."""
    d8, f8 = MeshShape(data=8), MeshShape(fsdp=8)
    entries = {
        "train data=8 24": measured(computed_speed(d8, 24) / 4),
        "train data=8 40": measured(computed_speed(d8, 40) / 2),
        "train data=1,fsdp=8 40": measured(computed_speed(f8, 40) * 2),
        "train data=1,fsdp=8 24": measured(None),
        "train data=8 24 micro_batches=8,remat=True": measured(1e9),
        "train data=4,fsdp=2 24": measured(1e9),
    }
    out = planned(capsys, given(entries))
    assert "speeds are multiplied by measured over computed: train x 0.5" in out
    assert (
        "no entry of this table matches a rollout mesh of this plan (it has data=1,fsdp=8, "
        "data=4,fsdp=2, data=8); speeds of rollout are computed"
    ) in out
    values = json.loads(planned(capsys, given(entries), "--json"))
    assert values["calibration"] == {"train": pytest.approx(0.5)}
    assert len(values["table_notes"]) == 1


@pytest.mark.parametrize("entries", [{}, {"train data=4,fsdp=2 24": measured(1.0)}])
def test_a_table_that_matches_nothing_is_said(given, capsys, entries):
    out = planned(capsys, given(entries))
    assert "no entry of this table matches a mesh of this plan (it has " in out
    assert "speeds are multiplied" not in out


def test_other_versions_and_other_work_are_said(given, capsys):
    def change(facts):
        facts["versions"]["jax"] = "0.0.1"
        facts["versions"]["libtpu"] = "0.0.2"
        facts["rollout"]["num_slots"] = 8
        facts["backend"] = "another"

    entries = {"rollout data=8 24": measured(1.0), "train data=8 24": measured(1.0)}
    path = given(entries, change)
    out = planned(capsys, path)
    assert f"--table={path}: its speeds are of other versions: jax 0.0.1 (here " in out
    assert "other work than is planned for: rollout.num_slots 8 (here 64)" in out
    assert "libtpu" not in out and "another" not in out
    notes = json.loads(planned(capsys, given(entries), "--json"))["table_notes"]
    assert notes == []


def other_model(facts):
    facts["model"]["num_layers"] = 28


def other_vocabulary(facts):
    facts["vocab_size"] = 152_064


def a_gpu(facts):
    facts["devices"]["train"] = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "number": 8}


def no_devices(facts):
    del facts["devices"]


def no_kinds(facts):
    facts["devices"] = ["cpu cpu"] * 8


@pytest.mark.parametrize(
    ("topology", "change", "words"),
    [
        ("cpu:8", other_model, "is of another model: model.num_layers 28 (here 2). Plan with"),
        ("cpu:8", other_vocabulary, "another model: vocab_size 152064 (here 320). Plan with"),
        ("cpu:8", a_gpu, "is of 8 NVIDIA H100 80GB HBM3 devices (gpu) in its train, and the plan"),
        ("h100:1x8", lambda facts: None, "is of 8 cpu devices (cpu) in its rollout, and the plan"),
        ("h100:1x8", a_gpu, "in its rollout, and the plan is for h100:1x8: one chip's speeds say"),
        ("v5e:2x4", lambda facts: None, "Give a table that a run on v5e has written, or none"),
        ("cpu:8", no_devices, "does not say which model and devices it is of"),
        ("cpu:8", no_kinds, "does not say which model and devices it is of"),
        ("cpu:8", dict.clear, "does not say which model and devices it is of"),
    ],
)
def test_a_table_of_something_else_is_refused(given, topology, change, words):
    path = given({"train data=8 24": MEASURED}, change)
    with pytest.raises(ValueError) as error:
        plan_command([f"--topology={topology}", f"--table={path}"])
    assert f"--table={path}" in str(error.value) and words in str(error.value)


def test_the_command_ends_with_status_2(given, monkeypatch, capsys):
    path = given({"train data=8 24": MEASURED})
    monkeypatch.setattr("sys.argv", ["plan", "--topology=h100:1x8", f"--table={path}"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "error: --table=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], ""),
        (lambda whole: b"", ""),
        (lambda whole: b"\xff\xfe\x00garbage", ""),
        (lambda whole: b"[1, 2]", "not a throughput table"),
        (lambda whole: whole.replace(b"switch_s", b"swatch_s"), "swatch_s"),
        (lambda whole: whole.replace(b'"facts": {', b'"facts": [], "were": {'), "not a throughput"),
        (lambda whole: whole.replace(b"train data=8 24", b"train x"), "'train x' is no key"),
        (lambda whole: whole.replace(b"train data=8 24", b"train x 24"), "cannot read 'x'"),
        (lambda whole: whole.replace(b"train data=8 24", b"train data=8"), "'train data=8' is"),
        (lambda whole: whole.replace(b"train data=8 24", b"train data=8 many"), "is no key"),
        (lambda whole: whole.replace(b"train data=8 24", b"dance data=8 24"), "is no key"),
    ],
)
def test_a_damaged_table_is_refused(given, damage, words):
    path = given({"train data=8 24": MEASURED})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as error:
        plan_command(["--topology=cpu:8", f"--table={path}"])
    assert f"--table={path} cannot be read: " in str(error.value) and words in str(error.value)
