# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Possible meshes for a number of devices, a model and the user's constraints."""

import dataclasses
import time

import pytest

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import check_tensor_axis
from earl_jax.sharding.layout import MeshShape
from tests.support.meshes import rollout_candidates, train_candidates

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
D2T4 = MeshShape(data=2, tensor=4)


def possible(shape):
    return None


def at_most_two_heads(shape):
    return None if shape.tensor <= 2 else f"2 heads do not divide by {shape.tensor}"


def test_rollout_candidates_of_eight_devices_are_all_divisor_shapes():
    assert [tuple(s) for s in rollout_candidates(8, (), possible)] == [
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
    whole = train_candidates(8, (), possible)
    assert train_candidates(8, (), possible, tokens=8191) == whole
    shapes = train_candidates(8, (), possible, tokens=131072)
    assert shapes[:10] == whole
    assert [s.context for s in shapes[10:]] == 6 * [2] + 3 * [4] + [8]
    assert {s.num_devices for s in shapes} == {8}
    assert train_candidates(8, (), possible, tokens=16384) == shapes[:19]
    uncut = train_candidates(8, (), lambda s: "never" if s.context > 1 else None, tokens=131072)
    assert uncut == whole
    # A rollout cuts no layers: data x tensor of the other devices.
    rollouts = rollout_candidates(8, (), possible, tokens=131072)[4:]
    assert [s.context for s in rollouts] == 3 * [2] + 2 * [4] + [8]
    assert {s.fsdp for s in rollouts} == {1}
    # One that is named is taken for rows of any length.
    assert train_candidates(8, ("data=4,context=2",), possible) == [MeshShape(data=4, context=2)]


def test_contexts_of_any_length_are_cut_where_no_other_mesh_is_possible():
    """Two rows and two heads on eight devices: in two parts at least."""

    def check(shape):
        rows = shape.data * shape.fsdp
        return "two rows, and two heads" if rows > 2 or shape.tensor > 2 else None

    names = [str(shape) for shape in train_candidates(8, (), check)]
    assert names == ["data=2,context=2,tensor=2", "data=1,fsdp=2,context=2,tensor=2"]
    longer = train_candidates(8, (), check, tokens=16_384)
    assert [shape.context for shape in longer] == [2, 2, 4, 4, 4]
    assert [str(s) for s in rollout_candidates(8, (), check)] == ["data=2,context=2,tensor=2"]


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
    assert time.perf_counter() - start < 10
    assert (len(set(rollout)), len(set(train))) == (num_rollout, num_train)
    assert {s.num_devices for s in [*rollout, *train]} == {num_devices}


def test_named_candidates_keep_the_order_of_the_user():
    named = ("data=2,tensor=4", "data=8")
    assert rollout_candidates(8, named, possible) == [D2T4, D8]


@pytest.mark.parametrize("candidates", [rollout_candidates, train_candidates])
def test_a_named_mesh_of_another_device_count_is_refused(candidates):
    with pytest.raises(ValueError) as error:
        candidates(8, ("data=8", "data=3"), at_most_two_heads)
    field = f"{candidates.args[0]}_meshes"
    for words in (
        f"config.selector.{field}",
        "'data=3'",
        "3 devices",
        "this run 8",
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
