# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The selector: which meshes are possible, which is chosen and why, what is kept and counted."""

import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import check_tensor_axis
from earl_jax.selector.candidates import (
    context_candidates,
    divisors,
    for_rows,
    rollout_candidates,
    train_candidates,
)
from earl_jax.selector.choose import BudgetTooSmall, Option, Settings, choose
from earl_jax.selector.memory import device_budget, program_bytes, resident_bytes
from earl_jax.selector.throughput import Measurement, ThroughputTable, cache_folder, load_table
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.load import Load

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
D2T4 = MeshShape(data=2, tensor=4)


def possible(shape):
    return None


def at_most_two_heads(shape):
    return None if shape.tensor <= 2 else f"2 heads do not divide by {shape.tensor}"


# Candidates.


def test_rollout_candidates_of_eight_devices_are_all_divisor_shapes():
    assert [s.sizes for s in rollout_candidates(8, (), possible)] == [
        (8, 1, 1, 1, 1),
        (4, 1, 1, 1, 2),
        (2, 1, 1, 1, 4),
        (1, 1, 1, 1, 8),
    ]


def test_train_candidates_of_eight_devices_are_all_divisor_shapes():
    expected = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1)]
    expected += [(4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)]
    shapes = train_candidates(8, (), possible)
    assert [(s.data, s.fsdp, s.tensor) for s in shapes] == expected
    assert {s.expert for s in shapes} == {1}


def test_experts_are_cut_where_their_number_divides():
    def sizes(candidates):
        return [(s.data, s.fsdp, s.expert, s.tensor) for s in candidates]

    shapes = sizes(rollout_candidates(4, (), possible, num_experts=6))
    assert shapes == [(4, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 1, 4), (1, 1, 2, 2)]
    shapes = sizes(train_candidates(4, (), possible, num_experts=6))
    expected = [(4, 1, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1)]
    expected += [(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 4)]
    assert shapes == expected
    # 8 = data x fsdp x expert x tensor: three factors of two over four axes, C(6, 3) ways.
    assert len(set(train_candidates(8, (), possible, num_experts=128))) == 20


def test_long_rows_may_be_cut_over_context_too():
    """8 = context x data x fsdp x tensor: the other 4, 2 or 1 devices in 6, 3 and 1 ways."""
    shapes = context_candidates(8, possible)
    assert [s.context for s in shapes] == 6 * [2] + 3 * [4] + [8]
    assert {s.num_devices for s in shapes} == {8}
    assert not set(shapes) & set(train_candidates(8, (), possible))
    assert for_rows(shapes, 8191) == []
    assert {s.context for s in for_rows(shapes, 16384)} == {2, 4}
    assert for_rows(shapes, 131072) == shapes
    assert context_candidates(8, lambda shape: "never") == []
    # One that is named is taken for rows of any length.
    assert train_candidates(8, ("data=4,context=2",), possible) == [MeshShape(data=4, context=2)]


def test_candidates_drop_what_the_check_refuses():
    assert rollout_candidates(8, (), at_most_two_heads) == [D8, D4T2]
    assert all(s.tensor <= 2 for s in train_candidates(8, (), at_most_two_heads))
    assert len(train_candidates(8, (), at_most_two_heads)) == 7


@pytest.mark.parametrize(
    "num_devices, num_rollout, num_train",
    # 6 = 2 * 3: 4 divisors, 3 * 3 ordered triples. 4096 = 2**12: 13, and 14 * 13 / 2.
    [(1, 1, 1), (6, 4, 9), (4096, 13, 91)],
)
def test_candidates_of_other_device_counts(num_devices, num_rollout, num_train):
    start = time.perf_counter()
    rollout = rollout_candidates(num_devices, (), possible)
    train = train_candidates(num_devices, (), possible)
    assert time.perf_counter() - start < 0.5
    assert (len(set(rollout)), len(set(train))) == (num_rollout, num_train)
    assert {s.num_devices for s in [*rollout, *train]} == {num_devices}


def test_divisors_rise():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_named_candidates_keep_the_order_of_the_user():
    named = ("data=2,tensor=4", "data=8")
    assert rollout_candidates(8, named, possible) == [D2T4, D8]


@pytest.mark.parametrize("candidates", [rollout_candidates, train_candidates])
def test_a_named_mesh_of_another_device_count_is_refused(candidates):
    with pytest.raises(ValueError) as error:
        candidates(8, ("data=8", "data=3"), at_most_two_heads)
    field = candidates.__name__.removesuffix("_candidates") + "_meshes"
    for words in (
        f"config.selector.{field}",
        "'data=3'",
        "3 devices",
        "has 8",
        "'data=4,tensor=2'",
    ):
        assert words in str(error.value)
    assert "tensor=4" not in str(error.value)


def test_a_named_mesh_that_the_model_cannot_use_is_refused():
    with pytest.raises(ValueError) as error:
        rollout_candidates(8, ("data=2,tensor=4",), at_most_two_heads)
    message = str(error.value)
    assert "config.selector.rollout_meshes has 'data=2,tensor=4'" in message
    assert "2 heads do not divide by 4" in message
    assert "Possible here: 'data=8'; 'data=4,tensor=2'" in message


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="'model=2'.*axes are data, fsdp, context, expert, tensor"):
        rollout_candidates(8, ("data=4,model=2",), possible)


def test_a_mesh_says_the_axes_that_cut_something():
    shape = MeshShape(data=2, expert=4, tensor=2)
    assert str(shape) == "data=2,expert=4,tensor=2"
    assert MeshShape.parse(str(shape)) == shape
    assert str(MeshShape.parse("data=4,tensor=2")) == "data=4,tensor=2"


def test_no_possible_mesh_says_why_for_each():
    with pytest.raises(ValueError, match="data=2: never; data=1,tensor=2: never"):
        rollout_candidates(2, (), lambda shape: "never")


def test_a_model_is_cut_only_where_it_divides():
    model = ModelConfig(num_kv_heads=2, num_heads=4, ffn_size=192, width=64)
    assert check_tensor_axis(model, 320, tensor=2, fsdp=8) is None
    assert "model.num_kv_heads = 2 does not divide by 4" in check_tensor_axis(model, 320, 4, 1)
    assert "vocabulary = 321 does not divide by 2" in check_tensor_axis(model, 321, 2, 1)
    assert "model.width = 64 does not divide by 3" in check_tensor_axis(model, 320, 1, 3)


def test_only_a_model_with_experts_has_an_expert_axis():
    dense = ModelConfig(num_kv_heads=2, num_heads=4, ffn_size=191, width=64)
    assert "model.num_experts = 0, so that there are no experts" in check_tensor_axis(
        dense, 320, 1, 1, expert=2
    )
    # The network that a dense model would have is not there, and need not divide.
    mixed = dataclasses.replace(dense, num_experts=6, expert_ffn_size=32)
    assert check_tensor_axis(mixed, 320, tensor=2, fsdp=1, expert=2) is None
    assert "model.num_experts = 6 does not divide by 4" in check_tensor_axis(mixed, 320, 1, 1, 4)
    odd = dataclasses.replace(mixed, expert_ffn_size=33)
    assert "model.expert_ffn_size = 33 does not divide by 2" in check_tensor_axis(odd, 320, 2, 1)

    def check(shape):
        return check_tensor_axis(dense, 320, shape.tensor, shape.fsdp, shape.expert)

    with pytest.raises(ValueError, match=r"train_meshes has 'data=4,expert=2'.*model.num_experts"):
        train_candidates(8, ("data=4,expert=2",), check)


# The choice.


def option(mesh, num_bytes, speed):
    return Option(mesh=mesh, bytes_per_device=num_bytes, tokens_per_s=speed)


def decide(options, *, current=None, budget=None, step_tokens=1000, switch_s=0.0, **settings):
    settings = {"hysteresis": 0.0, "horizon_steps": 1, **settings}
    return choose(
        "rollout",
        options,
        current=current,
        places=48,
        load=None,
        step_tokens=step_tokens,
        switch_s=switch_s,
        settings=Settings(budget_bytes=budget, **settings),
    )


def test_the_start_takes_the_fastest_that_fits():
    options = [option(D8, 100, 10.0), option(D4T2, 200, 30.0), option(D2T4, 150, 20.0)]
    assert decide(options).mesh == D4T2
    assert decide(options, budget=200).mesh == D4T2
    assert decide(options, budget=199).mesh == D2T4
    decision = decide(options, budget=149)
    assert (decision.mesh, decision.switched, decision.bytes_per_device) == (D8, False, 100)
    assert decision.predicted_s == 1000 / 10.0


def test_ties_go_to_the_first():
    options = [option(D8, 1, 5.0), option(D4T2, 1, 5.0)]
    assert decide(options).mesh == D8
    assert decide(options[::-1]).mesh == D4T2


def test_without_speeds_the_first_of_the_list_that_fits_stays_while_it_fits():
    options = [option(D8, 200, None), option(D4T2, 150, None), option(D2T4, 100, None)]
    start = decide(options, budget=200)
    assert (start.mesh, start.predicted_s) == (D8, None)
    assert "first of the list that fits" in start.reason and "measured" not in start.reason
    left = decide(options, current=D8, budget=199)
    assert (left.mesh, left.switched) == (D4T2, True)
    # It would fit again on the first, and stays where it is.
    assert decide(options, current=D4T2, budget=200).mesh == D4T2
    assert decide(options, current=D2T4, budget=149).mesh == D2T4


def test_a_mesh_that_does_not_fit_is_left_whatever_it_costs():
    options = [option(D8, 101, 1000.0), option(D4T2, 100, 1.0)]
    decision = decide(options, current=D8, budget=100, hysteresis=9.0, switch_s=1e9)
    assert (decision.mesh, decision.switched) == (D4T2, True)
    # One byte more of budget and it stays.
    assert decide(options, current=D8, budget=101).mesh == D8


@pytest.mark.parametrize(
    "hysteresis, switch_s, leaves",
    [
        # 1000 tokens a step: 10 s at 100 tokens/s, 8 s at 125. Gain 25 %, 2 s saved a step, 6 s in
        # the horizon of 3 steps.
        (0.24, 5.9, True),
        (0.25, 5.9, False),  # by more than the hysteresis
        (0.26, 5.9, False),
        (0.24, 6.0, False),  # earned back, and something more
        (0.24, 6.1, False),
        (0.26, 6.1, False),
    ],
)
def test_a_mesh_that_fits_is_left_for_a_gain_that_beats_both_thresholds(
    hysteresis, switch_s, leaves
):
    options = [option(D8, 1, 100.0), option(D4T2, 1, 125.0)]
    decision = decide(
        options, current=D8, hysteresis=hysteresis, switch_s=switch_s, horizon_steps=3, budget=9
    )
    assert decision.switched == leaves
    assert decision.mesh == (D4T2 if leaves else D8)
    assert decision.predicted_s == (8.0 if leaves else 10.0)


def test_more_work_a_step_or_a_longer_horizon_earns_the_switch_back():
    options = [option(D8, 1, 100.0), option(D4T2, 1, 125.0)]
    # 2 s saved in each of 3 steps do not pay 7 s; 4 s saved, or 4 steps, do.
    common = {"current": D8, "switch_s": 7.0}
    assert not decide(options, horizon_steps=3, **common).switched
    assert decide(options, horizon_steps=3, step_tokens=2000, **common).switched
    assert decide(options, horizon_steps=4, **common).switched


def test_a_faster_mesh_over_the_budget_is_no_reason_to_leave():
    options = [option(D8, 1, 1.0), option(D4T2, 11, 1e6)]
    assert decide(options, current=D8, budget=10).mesh == D8


def test_a_budget_too_small_names_the_smallest_that_would_do_and_it_does():
    options = [option(D8, 300, 9.0), option(D4T2, 200, 3.0), option(D2T4, 250, 6.0)]
    with pytest.raises(BudgetTooSmall) as error:
        decide(options, current=D8, budget=199)
    message = str(error.value)
    for words in (
        "config.selector.budget_bytes_per_device is 199",
        "rollout",
        "48 tokens",
        "200 (mesh data=4,tensor=2)",
    ):
        assert words in message
    assert decide(options, current=D8, budget=200).mesh == D4T2
    assert isinstance(error.value, ValueError)


MESHES = [D8, D4T2, D2T4, MeshShape(tensor=8)]
OPTIONS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=1, max_size=4).map(
    lambda rows: [option(m, b, float(s)) for m, (b, s) in zip(MESHES, rows, strict=False)]
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), options=OPTIONS, switch_s=st.floats(0, 50), budget=st.integers(1, 110))
def test_the_choice_is_pure_and_does_not_depend_on_order_but_for_ties(
    data, options, switch_s, budget
):
    current = data.draw(st.sampled_from([None, *MESHES]))
    shuffled = data.draw(st.permutations(options))
    before = [dataclasses.replace(o) for o in options]

    def outcome(given_options):
        try:
            return decide(
                given_options, current=current, budget=budget, switch_s=switch_s, hysteresis=0.1
            )
        except BudgetTooSmall as error:
            return str(error).split("; the smallest")[0]

    first = outcome(options)
    assert outcome(options) == first
    assert options == before
    # Speeds within the hysteresis of each other count as ties: there the order is the preference.
    speeds = sorted(o.tokens_per_s for o in options)
    if all(faster > slower * 1.1 for slower, faster in itertools.pairwise(speeds)):
        assert outcome(shuffled) == first


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=3, max_size=3),
    rooms=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    budget=st.integers(1, 60),
    hysteresis=st.floats(0, 0.5),
    switch_s=st.floats(0, 50),
)
def test_a_sequence_of_choices_keeps_to_the_budget_and_to_its_mesh_when_nothing_changes(
    table, rooms, budget, hysteresis, switch_s
):
    """`table`: bytes per place and tokens/s at one place of each mesh; long contexts are slower."""
    current, last_room = None, None
    for room in rooms:
        options = [
            option(mesh, slope * room, speed / room)
            for mesh, (slope, speed) in zip(MESHES, table, strict=False)
        ]
        common = {"budget": budget, "hysteresis": hysteresis, "switch_s": switch_s}
        try:
            decision = decide(options, current=current, **common)
        except BudgetTooSmall:
            assert min(o.bytes_per_device for o in options) > budget
            continue
        assert decision.bytes_per_device <= budget
        assert decision.switched == (current is not None and decision.mesh != current)
        assert not (decision.switched and room == last_room)
        again = decide(options, current=decision.mesh, **common)
        assert (again.mesh, again.switched) == (decision.mesh, False)
        current, last_room = decision.mesh, room


# The reasons.


def test_reasons_carry_their_numbers():
    load = Load(
        context_tokens_max=41,
        context_tokens_mean=30.5,
        tokens_in_flight_max=1234,
        rollout_tokens=1000,
    )
    options = [option(D8, 3 * 2**20, 1000.0), option(D4T2, 2**20, 1500.0)]

    def reason(current, budget, **settings):
        decision = choose(
            "rollout",
            options,
            current=current,
            places=48,
            load=load,
            step_tokens=3000,
            switch_s=4.0,
            settings=Settings(budget_bytes=budget, **settings),
        )
        return decision.reason

    calm = {"hysteresis": 0.6, "horizon_steps": 1}
    context = "contexts up to 41 tokens, 1234 in flight, room for 48 tokens an episode"
    here = "1.00 MiB of 2.00 MiB per device, 1,500 tokens/s measured"
    assert reason(None, 2 * 2**20, **calm) == (
        f"starts on data=4,tensor=2: fastest that fits; {context}, {here}"
    )
    assert reason(D8, 2 * 2**20, **calm) == (
        "leaves data=8, which needs 3.00 MiB of a budget of 2.00 MiB per device, "
        f"for data=4,tensor=2: {context}, {here}"
    )
    assert reason(D8, None, **calm) == (
        f"stays on data=8: {context}, 3.00 MiB per device, 1,000 tokens/s measured"
    )
    # 3 s a step against 2 s: 4 s are earned back in 4 steps.
    assert reason(D8, None, hysteresis=0.4, horizon_steps=5) == (
        "leaves data=8 for data=4,tensor=2, 50% faster, the switch of 4.00 s earned back in 4 "
        f"steps: {context}, 1.00 MiB per device, 1,500 tokens/s measured"
    )


# The table.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "earl_jax"


FACTS = {"model": {"width": 64}, "devices": ["cpu cpu"] * 8, "versions": {"jax": "1"}}
MEASURED = Measurement(tokens_per_s=1234.5678901234567, program_bytes=10**12, switch_s=0.1)


def test_the_cache_folder_is_the_users(cache, monkeypatch, tmp_path):
    assert cache_folder() == cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "earl_jax"


def test_a_table_comes_back_from_disk_bit_for_bit(cache):
    table, note = load_table(FACTS)
    assert (dict(table.measurements), note) == ({}, None)
    assert cache in table.path.parents
    entry = table.entry("rollout", D4T2, 48)
    assert entry == "rollout data=4,tensor=2 48"
    with_one = table.with_measurement(entry, MEASURED)
    assert dict(table.measurements) == {}, "the table itself does not change"
    with_two = with_one.with_measurement("train data=8 16", MEASURED)
    again, note = load_table(dict(reversed(FACTS.items())))
    assert (again, note) == (with_two, None)
    assert ThroughputTable.from_dict(again.path, json.loads(json.dumps(again.as_dict()))) == again


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"width": 65}},
        {"devices": ["cpu cpu"] * 4},
        {"devices": ["gpu NVIDIA H200"] * 8},
        {"versions": {"jax": "2"}},
    ],
)
def test_other_models_devices_and_versions_have_other_files(cache, change):
    table, _ = load_table(FACTS)
    table.with_measurement("rollout data=8 16", MEASURED)
    other, _ = load_table({**FACTS, **change})
    assert other.path != table.path
    assert dict(other.measurements) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"\xff\xfe\x00garbage",
        lambda whole: b"[1, 2]",
        lambda whole: whole.replace(b"switch_s", b"swatch_s"),
    ],
)
def test_a_damaged_table_is_measured_again_and_said(cache, damage):
    table, _ = load_table(FACTS)
    whole_table = table.with_measurement("rollout data=8 16", MEASURED)
    table.path.write_bytes(damage(table.path.read_bytes()))
    found, note = load_table(FACTS)
    assert dict(found.measurements) == {}
    assert str(table.path) in note and "measuring again" in note
    found.with_measurement("rollout data=8 16", MEASURED)
    assert load_table(FACTS) == (whole_table, None)


def test_a_write_that_dies_leaves_the_old_table_whole(cache, monkeypatch):
    table, _ = load_table(FACTS)
    kept = table.with_measurement("rollout data=8 16", MEASURED)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr("os.replace", die)
        kept.with_measurement("rollout data=8 32", MEASURED)
    assert load_table(FACTS) == (kept, None)


def test_from_dict_keeps_an_entry_of_bytes_only():
    entry = Measurement(tokens_per_s=None, program_bytes=7, switch_s=0.0)
    table = ThroughputTable(path=None, measurements={"train data=8 16": entry})
    assert ThroughputTable.from_dict(None, table.as_dict()) == table


def holding(entry):
    return {"measurements": {"rollout data=8 16": entry}, "failures": []}


@pytest.mark.parametrize(
    "nonsense",
    [
        [],
        None,
        {},
        holding(3),
        holding({"tokens_per_s": 1.0}),
        holding({**dataclasses.asdict(MEASURED), "colour": 1}),
        holding({**dataclasses.asdict(MEASURED), "tokens_per_s": "fast"}),
        holding({**dataclasses.asdict(MEASURED), "tokens_per_s": 0.0}),
        holding({**dataclasses.asdict(MEASURED), "program_bytes": None}),
        holding({**dataclasses.asdict(MEASURED), "switch_s": [1]}),
        {"measurements": {}, "failures": [3]},
        {"measurements": {}, "failures": [{"stage": "rollout", "mesh": "data=8", "size": [1]}]},
        {"measurements": {}, "failures": [{"stage": "x", "mesh": "data=8", "size": [1, 2, 3]}]},
    ],
)
def test_from_dict_refuses_nonsense(nonsense):
    with pytest.raises(ValueError, match="not a throughput table"):
        ThroughputTable.from_dict(None, nonsense)


# Memory.


def test_program_bytes_are_arguments_and_results_with_a_donated_argument_once():
    # Per device, f32: a [128/8, 32] = 2048, b [32, 32] whole = 4096, a row [32] = 128.
    layout = make_layout(D8)
    rows, whole = layout.activations("B."), layout.activations("..")
    a = jax.ShapeDtypeStruct((128, 32), jnp.float32, sharding=rows)
    b = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=whole)
    c = jax.ShapeDtypeStruct((1, 32), jnp.float32, sharding=whole)

    def needed(function, *arguments, **options):
        return program_bytes(
            jax.jit(function, out_shardings=rows, **options).lower(*arguments).compile()
        )

    assert needed(jnp.matmul, a, b) == 2048 + 4096 + 2048
    assert needed(jnp.add, a, c) == 2048 + 128 + 2048
    assert needed(jnp.add, a, c, donate_argnums=0) == 2048 + 128


def test_program_bytes_counts_temporaries():
    def through_a_big_square(x):
        square = jnp.sin(x[:, None] * x[None, :])
        return jnp.sort(square, axis=1) @ x

    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    needed = program_bytes(jax.jit(through_a_big_square).lower(x).compile())
    # The sorted square has to be somewhere: 512 * 512 * 4 bytes.
    assert 2**20 + 2 * 512 * 4 <= needed <= 4 * 2**20


def test_resident_bytes_by_hand_and_as_the_devices_report():
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
    tree = {
        "rows": jnp.zeros((8, 6), jnp.int32),  # over data and fsdp: 2 * 6 * 4 = 48
        "weight": jnp.zeros(
            (4, 2, 8), jnp.bfloat16
        ),  # D over fsdp, K over tensor: 2 * 1 * 8 * 2 = 32
        "count": jnp.zeros((), jnp.float32),  # everywhere: 4
        "bits": jnp.zeros((3,), bool),  # everywhere: 3
    }
    shardings = {
        "rows": layout.activations("BT"),
        "weight": layout.parameters("DKH"),
        "count": layout.parameters(""),
        "bits": layout.parameters("."),
    }
    assert resident_bytes(tree, shardings) == 48 + 32 + 4 + 3
    shapes = jax.eval_shape(lambda: tree)
    assert resident_bytes(shapes, shardings) == 48 + 32 + 4 + 3
    placed = jax.device_put(tree, shardings)
    on_first = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert on_first == 87


def test_device_budget_is_the_setting_else_the_devices_limit_else_none():
    assert device_budget(12345) == 12345
    assert jax.local_devices()[0].memory_stats() is None, "the CPU reports no limit"
    assert device_budget(0) is None
