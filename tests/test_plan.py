# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner: what is chosen at each context, that a run chooses the same, and the command."""

import dataclasses
import json
import math
import random
import re
import types

import jax
import pytest

from earl_jax.models.presets import PRESETS, preset_vocab_size
from earl_jax.placement import problem as problem_module
from earl_jax.placement.problem import (
    find_model,
    hardware_of_devices,
    make_problem,
    planned_problem,
)
from earl_jax.plan import plan_command
from earl_jax.run import build
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import TIE, choose_plans, full_step
from earl_jax.selector.footprint import kept_bytes, trainer_bytes
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.plans import Failure, Plans, RolloutPlan, TrainPlan
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text
from tests.support import ROOT
from tests.support.placements import load_of
from tests.support.problems import rollout_key, train_key
from tests.support.references import CHECKPOINT
from tests.support.settings import make_config

EMPTY = ThroughputTable()
D8 = MeshShape(data=8)
BF16 = "model.compute_dtype=bfloat16"
SMALL = {"model": {"num_layers": 1, "width": 16}, "rollout": {"num_slots": 8}}
HELD = ("selector.rollout_meshes=('data=8',)", "selector.train_meshes=('data=1,fsdp=8',)")
TWELVES = ("rollout.num_slots=96", "rollout.episodes_per_step=96")
DEEP = ("model.num_layers=32", "model.width=256", "model.ffn_size=1024")


def problem_on(topology="h100:1x8", *overrides, budget=10**12, vocab_size=32):
    rollout = ["rollout.num_slots=64", "rollout.episodes_per_step=64", "rollout.page_size=16"]
    config = make_config({}, [*rollout, *overrides])
    model, vocab_size = find_model(config, vocab_size)
    return planned_problem(config, model, vocab_size, parse_topology(topology), budget)


def with_budget(problem, budget, **changes):
    return dataclasses.replace(problem, budget_bytes=budget, **changes)


def trains(schedule):
    return [stop.decision.train.plan for stop in schedule]


def rollouts(schedule):
    return [stop.decision.rollout.plan for stop in schedule]


# The schedule.


def test_training_is_rated_by_the_rows_that_episodes_are_packed_in():
    problem = problem_on("h100:1x8")
    one, eight = MeshShape(tensor=8), MeshShape(data=2, fsdp=4)
    assert problem.packed_rows(1024, None, one) == 64
    # 95 % of the positions hold a token; there is a row for each episode at most, and one at least.
    assert problem.packed_rows(1024, 8 * 973, one) == 9
    assert problem.packed_rows(1024, 8 * 972, one) == 8
    assert (
        problem.packed_rows(1024, 64 * 1024, one) == 64 and problem.packed_rows(1024, 0, one) == 1
    )
    # Eight row shards need as many rows each: a mesh that pads is not faster for its padding.
    assert problem.packed_rows(1024, 8 * 973, eight) == 16
    assert problem.packed_rows(1024, 0, eight) == 8
    whole, parts = TrainPlan(D8, 1, "full"), TrainPlan(D8, 8, "full")
    # Eight packed rows are one micro-batch by either plan; 64 are eight by the second.
    assert problem.update_speed(parts, 1024, 8) == problem.update_speed(whole, 1024, 8)
    assert problem.update_speed(parts, 1024, 64) < problem.update_speed(whole, 1024, 64)
    few = Candidates(problem, EMPTY, load=load_of(1024, mean=8 * 972 / 64))
    rated = {c.plan: c.tokens_per_s for c in few.train(1024)}
    assert rated[TrainPlan(D8, 8, "none")] == rated[TrainPlan(D8, 1, "none")]
    step = full_step(problem, 1024)
    every = choose_plans(Candidates(problem), step, Plans(), only="train").train
    assert choose_plans(few, step, Plans(), only="train").train.seconds < every.seconds


def test_passes_and_a_stream_are_part_of_a_steps_planned_time():
    def update_s(*overrides: str) -> tuple[tuple[str, ...], float]:
        problem = problem_on("h100:1x8", "selector.train_meshes=('data=8',)", *overrides)
        decision = choose_plans(
            Candidates(problem), full_step(problem, 1024), Plans(), only="train"
        )
        return problem.work.scored, decision.train.seconds

    scored, plain_s = update_s()
    # A second batch as large, and one optimizer step.
    _, streamed_s = update_s("train.sft_weight=0.5")
    assert scored == () and 1.9 * plain_s < streamed_s < 2 * plain_s
    scored, penalised_s = update_s("algorithm_args.kl_coefficient=0.1")
    # A forward pass beside it and a backward pass of twice as much.
    assert scored == ("reference",) and plain_s / 5 < penalised_s - plain_s < plain_s / 2
    # Two updates of the same batch: both passes once.
    scored, twice_s = update_s("algorithm_args.kl_coefficient=0.1", "train.epochs=2")
    assert set(scored) >= {"reference"} and twice_s < 2 * penalised_s


def test_bytes_rise_with_the_context_and_a_mesh_that_does_not_fit_is_left():
    problem = problem_on("h100:1x8", "train.micro_batches=8", "train.remat=full")
    contexts = [128, 256, 512, 1024]
    free = make_schedule(problem, EMPTY, contexts)
    first = trains(free)[0].mesh
    assert {plan.mesh for plan in trains(free)} == {first}
    needs = [stop.decision.train.num_bytes for stop in free]
    assert needs == sorted(set(needs))
    tight = make_schedule(with_budget(problem, needs[2] - 1), EMPTY, contexts[:3])
    assert trains(tight)[2] != trains(free)[2]
    assert all(choice.num_bytes < needs[2] for s in tight for choice in s.decision.choices)
    # With more memory a step is never slower.
    for more, less in zip(free[:3], tight[:3], strict=True):
        assert more.decision.seconds <= less.decision.seconds * (1 + TIE)


def test_layers_inputs_are_in_host_memory_where_nothing_else_fits_and_the_hosts_hold_them():
    """One row of 128K tokens, with 32 layers of 4,096 numbers in bf16, takes 32 GiB a device."""
    problem = problem_on(
        "h100:1x8",
        *("model.preset=llama3.1-8b", BF16, "selector.train_meshes=('data=1,fsdp=8',)"),
        "rollout.episodes_per_step=8",
        budget=60 * 2**30,
        vocab_size=128_256,
    )
    plans = problem.train_plans(131_072)
    assert plans[-1] == TrainPlan(MeshShape(fsdp=8), 1, "offload")
    short, long = (
        stop.decision.train.plan for stop in make_schedule(problem, EMPTY, [4096, 2**17])
    )
    assert short.remat != "offload" and long.remat == "offload"
    full, offload = (
        problem.update_footprint(long._replace(remat=remat), 2**17).total
        for remat in ("full", "offload")
    )
    assert full - offload == 2**17 * 32 * 4096 * 2 and offload < 60 * 2**30 < full
    small = dataclasses.replace(problem.hardware, host_memory_bytes=8 * (full - offload) - 1)
    for other in (
        dataclasses.replace(problem, hardware=small),
        dataclasses.replace(problem, can_offload_inputs=False),
    ):
        assert {plan.remat for plan in other.train_plans(2**17)} == {"none", "dots", "full"}


def test_inputs_in_host_memory_are_those_of_as_few_rows_as_are_as_fast():
    """A row of 128K tokens of llama3.1-8b has 34.4 GB of inputs, on each of 8 devices: 275 GB."""
    problem = problem_on(
        "h100:1x8",
        *("model.preset=llama3.1-8b", BF16, "selector.train_meshes=('data=1,tensor=8',)"),
        budget=60 * 2**30,
        vocab_size=128_256,
    )
    (plan,) = trains(make_schedule(problem, EMPTY, [131_072]))
    assert plan == TrainPlan(MeshShape(tensor=8), 64, "offload")
    work = dataclasses.replace(problem.work, micro_batches=64, remat="offload")
    held = 8 * kept_bytes(problem.sizes, work, plan.mesh, 131_072)
    assert held == 8 * 131_072 * 32 * 4096 * 2
    # By a table in which more rows at a time are faster by more than a tie there are more.
    table = EMPTY
    for number in (16, 32, 64):
        key = train_key(plan.mesh, 131_072, number, "offload")
        speed = 1000.0 * (1.01 if number == 32 else 0.9)
        table = table.with_speed(key, speed).with_speed(key, speed).with_speed(key, speed)
    assert trains(make_schedule(problem, table, [131_072]))[0].micro_batches == 32


def test_of_equal_steps_inputs_stay_on_the_devices():
    meshes = "selector.train_meshes=('data=8','data=1,fsdp=8')"
    problem = problem_on("h100:1x8", meshes, "train.remat=full")

    def chosen(gain):
        """By a table in which only the offload of inputs on the second mesh is faster."""
        table = EMPTY
        for plan in problem.train_plans(64):
            key = train_key(plan.mesh, 64, plan.micro_batches, plan.remat)
            is_best = (plan.mesh.fsdp, plan.remat) == (8, "offload")
            for _ in range(3):
                table = table.with_speed(key, 100.0 * (gain if is_best else 1.0))
        return trains(make_schedule(problem, table, [64]))[0].remat

    assert chosen(1.0 + TIE / 2) == "full" and chosen(1.0 + 3 * TIE) == "offload"


def test_a_config_may_not_ask_for_memory_that_there_is_not():
    config = make_config({}, ["train.remat=offload"])
    facts = {"hardware": parse_topology("cpu:8"), "budget_bytes": None}
    with pytest.raises(InputError, match='config.train.remat is "offload", and these devices have'):
        make_problem(config, config.model, 64, has_host_memory=False, **facts)
    problem = make_problem(config, config.model, 64, **facts)
    assert {plan.remat for plan in problem.train_plans(64)} == {"offload"}
    plain = make_config({}, ["train.remat=full"])
    offered = make_problem(plain, plain.model, 64, **facts).train_plans(64)
    assert {plan.remat for plan in offered} == {"full"}


def test_contexts_are_those_asked_for_and_no_bucket():
    (stop,) = make_schedule(problem_on(), EMPTY, [1000])
    assert (stop.context, stop.decision.train.tokens) == (1000, 1000)
    plan = rollouts([stop])[0]
    assert plan.pages == plan.num_slots // plan.mesh.data * -(-1000 // 16)


def test_rows_too_long_for_a_device_are_cut_over_context():
    """And not over anything else, with layers' inputs on the devices or in host memory."""
    problem = problem_on(
        "h100:1x8",
        *("model.preset=llama3.1-8b", BF16, "train.remat=full", "train.micro_batches=8"),
        budget=60 * 2**30,
        vocab_size=128_256,
    )
    for can_offload in (True, False):
        problem = dataclasses.replace(problem, can_offload_inputs=can_offload)
        found = trains(make_schedule(problem, EMPTY, [4096, 131_072, 262_144]))
        assert [plan.mesh.context for plan in found] == [1, 2, 4]
    # A mesh that the user names is taken for rows of any length.
    named = dataclasses.replace(problem, train_meshes_named=("context=8",))
    assert trains(make_schedule(named, EMPTY, [4096]))[0].mesh == MeshShape(context=8)


def test_the_moments_leave_where_no_rollout_fits_beside_them():
    """By two bytes too little for the whole trainer; and only where hosts have memory for them."""
    problem = problem_on("h100:1x8", *HELD, *DEEP)
    weights, moments = trainer_bytes(problem.sizes, MeshShape(fsdp=8))
    whole = RolloutPlan(D8, 64, 8 * 32)
    taken = problem.round_footprint(whole, 512).total + weights + moments
    # A twentieth stays free.
    need = math.ceil(taken / 0.95)

    def chosen(budget, **changes):
        return rollouts(make_schedule(with_budget(problem, budget, **changes), EMPTY, [512]))[0]

    assert chosen(need) == whole
    assert chosen(need - 2) == whole._replace(offload=True)
    # Where they must stay there are fewer pages.
    assert chosen(need - 2, can_offload=False) == whole._replace(pages=8 * 32 - 1)
    held = 8 * moments + problem.preempted_bytes
    for host_bytes, offload in ((held, True), (held - 1, False)):
        hardware = dataclasses.replace(problem.hardware, host_memory_bytes=host_bytes)
        assert chosen(need - 2, hardware=hardware).offload == offload


def test_exact_mode_compiles_until_the_bytes_of_both_stages_are_exact():
    problem, asked = problem_on(budget=4 * 2**20), []

    def compiled(table, plan, tokens):
        asked.append(plan)
        if isinstance(plan, RolloutPlan):
            return table.with_bytes(rollout_key(plan.mesh, tokens, plan.num_slots), 2**20)
        # The first training mesh is larger than was computed, beyond the budget.
        key = train_key(plan.mesh, tokens, plan.micro_batches, plan.remat)
        first = len([p for p in asked if isinstance(p, TrainPlan)]) == 1
        return table.with_bytes(key, 2**30 if first else 2**20)

    (stop,) = make_schedule(problem, EMPTY, [16], compiled)
    updates = [plan for plan in asked if isinstance(plan, TrainPlan)]
    assert updates[0] != updates[-1] == trains([stop])[0]
    assert len(set(asked)) == len(asked)
    assert all(choice.is_exact for choice in stop.decision.choices)
    assert stop.decision.rollout.num_bytes > 2**20


# Hosts, and a run.


def test_rollout_meshes_are_inside_processes_or_span_all():
    overrides = ("model.preset=llama3.1-8b", BF16)
    v5e = problem_on("v5e:4x4", *overrides, vocab_size=128_256)
    meshes = v5e.meshes("rollout")
    names = ["data=16", "data=8,tensor=2", "data=4,tensor=4", "data=2,tensor=8"]
    assert list(map(str, meshes)) == names
    assert [v5e.num_parts(mesh) for mesh in meshes] == [4, 4, 4, 1]
    one = problem_on("v5e:4x4", *overrides, "distributed.num_processes=1", vocab_size=128_256)
    assert one.meshes("rollout") == meshes and not any(map(one.spans, meshes))
    for override in ("rollout.order=queue", "devices.num_rollout=8"):
        kept = problem_on("v5e:4x4", *overrides, override, vocab_size=128_256)
        found = kept.meshes("rollout")
        assert found and not any(map(kept.spans, found)), override
    named = 'selector.rollout_meshes=("data=2,tensor=8",)'
    with pytest.raises(ValueError, match='over the 4 processes, and .*"queue" .* take "fifo"'):
        problem_on("v5e:4x4", *overrides, named, "rollout.order=queue", vocab_size=128_256)
    with pytest.raises(ValueError, match="num_processes is 3 .*, which does not divide the 8 dev"):
        problem_on("cpu:8", "distributed.num_processes=3")
    with pytest.raises(ValueError, match="num_processes is 4 .* divide the 15 devices of v5e:3x5"):
        problem_on("v5e:3x5")


def test_a_model_is_planned_across_hosts_where_it_must_be_or_is_faster():
    """v5e: hosts of four chips of 16 GB.

    A layer of Qwen2.5-32B has 2 x 5120 x 5120 + 2 x 5120 x 1024 numbers of attention and 3 x 5120
    x 27648 of its network, 487.6 million; 64 layers, embedding and head 32.76 billion. In bf16
    over four chips 16.38 GB each, over eight 8.19. Of the 14B there are 48 layers of 275.3 million,
    with embedding and head 14.77 billion: 7.39 GB over four, whose reading takes long for
    few slots, and products for many take as long over eight.
    """
    for preset, slots, tensor, weights in (
        ("qwen2.5-32b", 64, 8, 8.19e9),
        ("qwen2.5-14b", 64, 8, 3.70e9),
        ("qwen2.5-14b", 512, 4, 7.39e9),
    ):
        overrides = (f"model.preset={preset}", BF16, "train.lora.rank=16")
        overrides += (f"rollout.num_slots={slots}", f"rollout.episodes_per_step={slots}")
        budget = parse_topology("v5e:4x8").usable_bytes
        problem = problem_on("v5e:4x8", *overrides, budget=budget, vocab_size=None)
        assert problem.num_processes == 8
        (stop,) = make_schedule(problem, EMPTY, [1024])
        plan = stop.decision.rollout.plan
        assert plan.mesh == MeshShape(data=32 // tensor, tensor=tensor)
        assert problem.spans(plan.mesh) == (tensor == 8)
        assert problem.round_footprint(plan, 1024).weights == pytest.approx(weights, rel=2e-3)


def test_live_episodes_stay_inside_processes_or_across_them():
    problem = problem_on("cpu:2x4", *DEEP, "model.num_heads=8", "model.num_kv_heads=8")
    across, inside = MeshShape(tensor=8), MeshShape(data=2, tensor=4)
    assert problem.spans(across) and not problem.spans(inside)
    candidates = Candidates(problem)
    step = dataclasses.replace(full_step(problem, 16), move_s=lambda mesh: 0.0)
    train = choose_plans(candidates, step, Plans()).train.plan
    live = dataclasses.replace(step, keeps_slots=True)
    for mesh in (across, inside):
        current = Plans(RolloutPlan(mesh, 64, 64), train)
        chosen = choose_plans(candidates, live, current, only="rollout").rollout.plan.mesh
        assert problem.spans(chosen) == problem.spans(mesh)
    # Between steps a mesh across them is left for one that is faster by a quarter.
    current = Plans(RolloutPlan(across, 64, 64), train)
    assert choose_plans(candidates, step, current, only="rollout").rollout.plan.mesh == D8
    # What fits on eight devices, and in no way on four, has to be across.
    least = min(
        candidate.num_bytes
        for candidate in candidates.rollouts(16, 0, 0.0)
        if not problem.spans(candidate.plan.mesh)
    )
    tight = with_budget(problem, least + problem.trainer_bytes(train.mesh) - 1)
    on = Plans(RolloutPlan(inside, 64, 64), train)
    chosen = choose_plans(Candidates(tight), step, on, only="rollout").rollout
    assert chosen.plan.mesh == across and "data=2,tensor=4 -> data=1,tensor=8" in chosen.reason


@pytest.mark.parametrize(("topology", "processes", "seed"), [("cpu:8", 1, 0), ("cpu:2x4", 2, 1)])
def test_a_plan_and_a_run_make_the_same_decisions(topology, processes, seed):
    """By the same table, at every context, whatever the budget."""
    draw = random.Random(seed)
    config = make_config({}, ["selector.offload=on", "rollout.num_slots=16"])
    facts = {"budget_bytes": 1, "num_processes": processes}
    here = hardware_of_devices(jax.devices(), processes, 10**12)
    run = make_problem(config, config.model, 64, here, **facts)
    plan = planned_problem(config, config.model, 64, parse_topology(topology), 1)
    table, sizes = EMPTY, []
    for way in draw.sample(run.train_plans(128), 6):
        key = train_key(way.mesh, 128, way.micro_batches, way.remat)
        table = table.with_speed(key, draw.uniform(1e3, 1e5)).with_bytes(key, draw.randint(1, 9**7))
        sizes.append(run.update_footprint(way, 128).total)
    mesh = draw.choice(run.meshes("train"))
    table = table.with_failure(Failure(stage="train", mesh=str(mesh), size=(64, 16, 1, 0)))
    found = set()
    for budget in (max(sizes), min(sizes), min(sizes) // 2, 10):
        both = [
            make_schedule(with_budget(problem, budget), table, [32, 100, 128])
            for problem in (run, plan)
        ]
        decisions = [[(stop.decision, stop.why) for stop in each] for each in both]
        assert decisions[0] == decisions[1]
        found |= {stop.decision and stop.decision.plans for stop in both[0]}
    assert None in found and len(found) > 2


def test_a_run_takes_no_more_host_memory_than_there_is():
    """A data sheet gives 250 GB for each GPU of a host; its own size counts if that is less."""
    card = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 4090")
    for number, hosts, host_bytes, held in (
        (2, 1, 64 * 10**9, 64 * 10**9),
        (2, 1, 10**12, 500 * 10**9),
        (16, 2, 10**13, 2000 * 10**9),
    ):
        hardware = hardware_of_devices([card] * number, hosts, host_bytes)
        assert hardware.host_memory_bytes == held
    assert hardware_of_devices(jax.devices(), 1, 10**9).host_memory_bytes == 10**9


def test_a_run_knows_the_memory_of_its_smallest_host(monkeypatch):
    monkeypatch.setattr(build, "host_memory_bytes", lambda: 10**9)
    run = build.build_run(make_config(SMALL))
    assert run.problem.hardware.host_memory_bytes == 10**9


@pytest.mark.parametrize(
    ("topology", "rate"),
    # Between the hosts of a slice of TPUs are links too: 50 GB/s of v5e on each of four, of which
    # an array's way is one axis.
    [("v5e:2x2", "link"), ("v5e:4x4", "link"), ("h100:1x8", "link"), ("h100:2x8", "network")],
)
def test_weights_and_state_go_by_the_network_only_where_there_is_no_link(topology, rate):
    problem = problem_on(topology, "model.preset=qwen2.5-1.5b", BF16, vocab_size=None)
    hardware, mesh = problem.hardware, MeshShape(data=problem.hardware.num_devices)
    rates = {"link": hardware.link_bytes_per_s, "network": hardware.network_bytes_per_s}
    # 1.544 billion parameters in bf16; in fp32 with two moments.
    assert problem.publish_s(mesh) == pytest.approx(2 * 1.544e9 / rates[rate], rel=0.01)
    assert problem.relocate_s(mesh, 2 * 1_544_000_000) == pytest.approx(
        2 * problem.publish_s(mesh), rel=0.01
    )
    assert problem.move_s(mesh) == pytest.approx(12 * 1.544e9 / rates[rate], rel=0.01)


def test_few_devices_that_train_send_more_than_each_of_many_receives():
    given = ("model.preset=qwen2.5-1.5b", BF16, *TWELVES, "asynchrony.max_staleness=1")
    # 24 copies of 3.09 GB leave eight GPUs, or eight arrive at as many.
    for number, share in ((24, 3), (16, 1), (8, 1)):
        problem = problem_on("h100:4x8", *given, f"devices.num_rollout={number}", vocab_size=None)
        copies_s = 2 * 1.544e9 / problem.hardware.network_bytes_per_s
        mesh = MeshShape(data=number)
        assert problem.publish_s(mesh) == pytest.approx(share * copies_s, rel=0.01)
        assert problem.relocate_s(mesh, 0) == pytest.approx(copies_s, rel=0.01)


def test_a_trainer_moves_as_contexts_grow_where_its_mesh_holds_them_no_longer():
    """On to meshes that cut rows over more devices."""
    problem = problem_on(
        "h100:1x8",
        *("model.preset=qwen2.5-7b", BF16, "rollout.num_slots=128", "rollout.page_size=128"),
        *("rollout.episodes_per_step=128", "rollout.chunk_size=128"),
        budget=60 * 2**30,
        vocab_size=None,
    )
    schedule = make_schedule(problem, EMPTY, [1024, 4096, 32_768, 65_536, 131_072])
    assert [plan.mesh for plan in trains(schedule)] == [
        *(MeshShape(fsdp=8), MeshShape(fsdp=8), MeshShape(fsdp=2, context=4)),
        *(MeshShape(context=8), MeshShape(context=8)),
    ]
    # As in a run that has settled.
    assert not any(choice.switched for choice in schedule[-1].decision.choices)


def test_a_plan_that_failed_in_less_memory_may_run_in_more():
    """As with XLA_CLIENT_MEM_FRACTION 0.75 in one run and 0.92 in the next."""
    problem = problem_on("h100:1x8", "model.preset=qwen2.5-7b", BF16, budget=60 * 2**30)
    step = full_step(problem, 8192)
    first = choose_plans(Candidates(problem), step, Plans()).plans
    for plan in first:
        table = EMPTY.with_failure(problem.failure(plan, 8192))
        for budget, fails in ((60, True), (59, True), (73, False)):
            other = with_budget(problem, budget * 2**30)
            assert bool(table.failure_of(other.failure(plan, 8192))) is fails
            chosen = choose_plans(Candidates(other, table), step, Plans()).plans
            assert (plan in chosen) <= (not fails)


def test_processes_that_share_a_queue_have_rows_for_twice_their_parts():
    overrides = ("rollout.num_slots=16", "rollout.episodes_per_step=64", "rollout.order=queue")
    one, two = (problem_on(topology, *overrides) for topology in ("cpu:8", "cpu:2x4"))
    assert (one.work.batches, two.work.batches) == (1, 2)
    # 64 rows more of 128 tokens of 16 bytes, over eight devices.
    totals = [each.bare_footprint(MeshShape(data=8), 16, 128).total for each in (one, two)]
    assert totals[1] - totals[0] == 64 // 8 * 128 * 16
    assert problem_on("cpu:2x4", *overrides, "rollout.order=fifo").work.batches == 1


def test_presets_have_their_own_vocabulary_without_a_tokenizer(monkeypatch):
    monkeypatch.setattr(problem_module, "build_tokenizer", None)
    for name in PRESETS:
        config = make_config({"model": {"preset": name}})
        assert find_model(config, None)[1] == preset_vocab_size(name) >= 32_000
        assert find_model(config, 77)[1] == 77


def test_rollouts_that_stay_are_tabled_beside_the_whole_update():
    """As they are chosen, and not beside the trainer's state alone."""
    overrides = ("model.preset=qwen2.5-7b", BF16, "asynchrony.max_staleness=1")
    problem = problem_on("h100:1x8", *overrides, budget=60 * 2**30, vocab_size=None)
    (stop,) = make_schedule(problem, EMPTY, [8192])
    chosen = next(c for c in stop.rollouts if c.plan.mesh == stop.decision.rollout.plan.mesh)
    train = stop.decision.plans.train
    assert stop.resident == Candidates(problem).update_bytes(train, 8192)[0]
    assert stop.resident > problem.trainer_bytes(train.mesh)
    assert chosen.plan == stop.decision.plans.rollout


def test_processes_with_unequal_numbers_of_devices_play_by_themselves():
    """Two of 4 devices play and one of 8 trains: an average process has 5."""
    problem = problem_on("h100:2x8", "devices.num_rollout=8")
    unequal = dataclasses.replace(problem, num_processes=3, num_players=2)
    assert unequal.spans(MeshShape(tensor=8)) and problem.num_players == 1


def test_a_split_that_processes_cannot_have_is_not_planned():
    config = make_config({}, ["devices.num_rollout=6"])
    model, vocab_size = find_model(config, None)
    with pytest.raises(InputError, match="num_rollout is 6, .* multiple of 4"):
        planned_problem(config, model, vocab_size, parse_topology("cpu:2x4"), 2**30)


PARTS = ("algorithm=grpo", "asynchrony.parts=2", "devices.num_rollout=auto")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("devices.num_rollout=2",), "num_rollout is 2, .* multiple of 4"),
        (("rollout.group_size=48",), "2 processes play, and the 1 groups .* no multiple of 2"),
        (("rollout.group_size=24", *PARTS), "2 groups .* of 4, their number"),
    ],
)
def test_an_asynchronous_run_that_its_processes_would_refuse_is_not_planned(overrides, words):
    """One process plays the same plan."""
    given = ["asynchrony.max_staleness=1", "rollout.num_slots=48", "rollout.episodes_per_step=48"]
    config = make_config({}, [*given, *overrides])
    model, vocab_size = find_model(config, None)
    assert planned_problem(config, model, vocab_size, parse_topology("cpu:8"), 2**30)
    with pytest.raises(InputError, match=words):
        planned_problem(config, model, vocab_size, parse_topology("cpu:2x4"), 2**30)


# The command.


TICTACTOE = f"--config={ROOT / 'configs/tictactoe_tiny_cpu.py'}"


def test_eight_billion_parameters_hold_131072_tokens_on_chips_of_16_gib():
    """Eight live episodes of Llama 3.1 8B are 2 GiB a chip of v5e:8x8, beside weights and state."""
    rows = ("rollout.num_slots=64", "rollout.episodes_per_step=64")
    given = ("model.preset=llama3.1-8b", BF16, "rollout.context_buckets=(131072,)", *rows)
    chips = parse_topology("v5e:8x8")
    problem = problem_on("v5e:8x8", *given, budget=chips.usable_bytes, vocab_size=128_256)
    (stop,) = make_schedule(problem, EMPTY, [131_072])
    plans = stop.decision.plans
    assert plans.rollout.mesh.tensor * plans.rollout.mesh.context >= 8
    assert plans.rollout.pages * plans.rollout.mesh.data >= 8 * problem.least_pages(131_072)


@pytest.mark.parametrize(
    ("topology", "preset"), [("h100:1x8", "qwen2.5-7b"), ("h100:1x1", "qwen2.5-0.5b")]
)
def test_a_preset_alone_is_planned_by_the_defaults(capsys, topology, preset):
    plan_command([f"--topology={topology}", f"--config.model.preset={preset}", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["notes"] == [] and "smallest" not in values
    assert values["budget_bytes_per_device"] == parse_topology(topology).usable_bytes
    assert [stop["context"] for stop in values["schedule"]] == [2**n for n in range(10, 18)]


def run(capsys, *arguments):
    plan_command([TICTACTOE, *arguments])
    return capsys.readouterr().out


SPLIT = ("devices.num_rollout=auto", "asynchrony.max_staleness=2")


def test_short_contexts_are_cut_for_no_split_where_others_do_without():
    """Seven devices train a model of width 3,584 in a ring of seven, or not at all."""
    problem = problem_on("h100:1x8", "model.preset=qwen2.5-7b", BF16, *SPLIT, *TWELVES)
    assert {mesh.context for mesh in problem.at(1).meshes("train")} == {7}
    assert problem.splits == (2, 4, 6)


def test_the_split_is_the_one_of_all_fixed_ones_whose_slower_stage_is_fastest():
    """With each split the plans and seconds are those of a run that has it fixed."""
    problem = problem_on("h100:1x8", *SPLIT, *TWELVES)
    assert problem.splits == (2, 4, 6)
    (stop,) = make_schedule(problem, EMPTY, [1024])
    found = {each.num_rollout: each for each in stop.decision.splits}
    assert sorted(found) == [2, 4, 6]
    for split, decision in found.items():
        fixed = problem_on("h100:1x8", f"devices.num_rollout={split}", SPLIT[1], *TWELVES)
        (alone,) = make_schedule(fixed, EMPTY, [1024])
        for choice, given in zip(decision.choices, alone.decision.choices, strict=True):
            assert choice.seconds == pytest.approx(given.seconds)
        assert decision.seconds == alone.decision.seconds
        rollout_s, train_s = (choice.seconds for choice in decision.choices)
        weights_s = fixed.publish_s(decision.rollout.plan.mesh)
        assert decision.seconds == pytest.approx(max(rollout_s, train_s) + weights_s)
    best = min(found.values(), key=lambda each: each.seconds)
    assert stop.decision.splits[0] == best and stop.decision.seconds == best.seconds
    plans = stop.decision.plans
    assert plans.rollout.mesh.num_devices == 8 - plans.train.mesh.num_devices == best.num_rollout


def test_every_host_gives_as_many_devices_where_the_split_is_chosen():
    problem = problem_on("h100:4x8", *SPLIT, *TWELVES)
    assert problem.splits == (8, 16, 24)
    for split in problem.splits:
        own = problem.at(split)
        # An engine is on 2, 4 or 6 devices of its host.
        assert {mesh.data % 4 for mesh in own.meshes("rollout")} == {0} and own.num_players == 4
    # Of 16 that train on 4 of each host 8 are on two hosts: slower than 8 of one.
    halves, whole = problem.at(16), problem_on("h100:4x8", "devices.num_rollout=16", *TWELVES)
    cut = TrainPlan(MeshShape(data=2, tensor=8), 1, "full")
    assert halves.update_speed(cut, 1024) < 0.7 * whole.update_speed(cut, 1024)


def test_the_plan_prints_the_split(capsys):
    flags = [f"--config.{setting}" for setting in (*SPLIT, *TWELVES)]
    flags += ["--topology=h100:4x8", "--config.model.preset=qwen2.5-7b", "--contexts=1024,4096"]
    plan_command(flags)
    words = r"split: \d+ play: rollout [\d.,]+ s, training [\d.,]+ s, new weights [\d.,]+ s "
    words += r"\(others: \d+ play, "
    assert len(re.findall(words, capsys.readouterr().out)) > 1


def test_a_config_is_planned_for_this_machine(capsys):
    out = run(capsys, "--topology=cpu:8")
    assert "cpu:8: 8 devices, 1 process; budget 16.21 MiB" in out
    assert re.search("^model: [0-9]{2,3},[0-9]{3} parameters, ", out, re.M)
    assert all(words in out for words in ("optimizer", "trainer", "data=4,tensor=2", "schedule:"))
    # Its contexts are its context_buckets.
    assert re.search(r"  24: next best \S+, .* tokens/s, \d+% of budget", out)
    assert re.search(r"  24 tokens: a step takes .* s; rollout: starts on data=.*; train: ", out)
    out = run(capsys, "--topology=cpu:8", "--config.selector.train_meshes=('data=8',)")
    assert "  24: there is no other mesh\n" in out


def test_a_preset_for_chips_needs_no_other_flag(capsys):
    """The config is for CPU devices: what it says of them is said not to count."""
    out = run(capsys, "--topology=h100:1x8", "--config.model.preset=qwen2.5-7b")
    note = out.splitlines()[0]
    assert "tictactoe_tiny_cpu.py is for CPU devices; planned with selector.budget_bytes" in note
    assert "model.compute_dtype=bfloat16" in note
    assert "budget 73.28 GiB of the 79.65 GiB" in out and "vocabulary 152,064" in out
    assert {int(share) for share in re.findall(r"(\d+)%(?: \?)?  ", out)} <= set(range(101))
    assert re.search("131,072: (next best|faster by itself)", out) and "do not fit:" not in out
    # What is given counts.
    given = "--config.selector.budget_bytes_per_device=40000000000"
    flags = ["--topology=h100:1x8", "--config.model.preset=qwen2.5-7b", given, "--contexts=1024"]
    values = json.loads(run(capsys, *flags, "--json"))
    assert values["budget_bytes_per_device"] == 40_000_000_000
    assert "budget_bytes_per_device" not in values["notes"][0]


@pytest.mark.slow_except("v6e:*")
@pytest.mark.parametrize(
    ("topology", "model", "hbm_gib"),
    [("v6e:2x4", "qwen2.5-7b", 30), ("h100:2x8", "qwen3-30b-a3b", 75)],
)
def test_the_plan_for_a_chip_says_in_text_what_it_has_in_json(topology, model, hbm_gib, capsys):
    flags = [f"--topology={topology}", f"--config.model.preset={model}", f"--hbm_gib={hbm_gib}"]
    flags += ["--config.rollout.num_slots=256", "--config.rollout.episodes_per_step=256"]
    flags += ["--contexts=1024,20000,500000"]
    values, text = json.loads(run(capsys, *flags, "--json")), run(capsys, *flags)
    budget = hbm_gib * 2**30
    assert values["budget_bytes_per_device"] == budget
    per_host = 4 if topology[0] == "v" else 8
    assert values["processes"] == values["hosts"] == values["devices"] // per_host
    for entry, stop in zip(values["contexts"], values["schedule"], strict=True):
        assert entry["context"] == stop["context"]
        for stage in {"train", "rollout"} & entry.keys():
            meshes = {found["mesh"]: found for found in entry[stage]["meshes"]}
            for found in meshes.values():
                assert found["bytes_per_device"] == sum(found["bytes"].values())
                assert found["fits"] == (found["bytes_per_device"] <= budget) >= found["safe"]
            if not stop["fits"]:
                continue
            chosen = meshes[entry[stage]["mesh"]]
            assert chosen["mesh"] == stop[f"{stage}_mesh"] and chosen["fits"]
            rows = re.findall(rf"^ *{entry['context']:,}  .*", text, re.M)
            row = rows[stage == "rollout"]
            assert row.split()[1] == chosen["mesh"]
            for words in (chosen["plan"], f"{chosen['tokens_per_s']:,.0f}"):
                assert words in row
            assert f"{bytes_text(chosen['bytes_per_device'])} ~" in row
            over = sum(not found["fits"] for found in meshes.values())
            fit = "does not fit" if over == 1 else "do not fit"
            assert not over or f"; {over} {fit}, " in text
        if not stop["fits"]:
            assert values["smallest"]["context"] <= stop["context"]
            assert "the smallest hardware that would do (powers of two): " in text
    unfit = [stop for stop in values["schedule"] if not stop["fits"]]
    assert text.count("tokens do not fit: ") == bool(unfit)
    for first, last in zip(unfit[:1], unfit[-1:], strict=True):
        upto = f" to {last['context']:,}" if last is not first else ""
        assert f"{first['context']:,}{upto} tokens do not fit: {first['why']}" in text
    start = values["schedule"][0]
    assert f"train: starts on {start['train_mesh']} (" in text
    assert all(stop.get("decision", "") in text for stop in values["schedule"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v9:4x4"], "'v9:4x4' is not known; those known are like"),
        (["--topology=cpu:8", "--contexts=8,4"], "--contexts=8,4: give rising numbers"),
        (["--topology=h100:1x8", "--contexts=many"], "--contexts=many: give rising numbers"),
        (["--topology=cpu:8", "--hbm_gib=0"], "--hbm_gib=0.0; give GiB"),
        (["--topology=cpu:8", "--vocab_size=0"], "--vocab_size=0"),
        (["--topology=cpu:8", "--config.rollout.num_slot=8"], "did you mean 'num_slots'?"),
        (["--topology=h100:3x8"], "--config.rollout.num_slots=72"),
        (["--topology=cpu:4"], "'data=8', which is impossible: it has 8 devices, and this run 4"),
        (["--topology=cpu:8", "--config=nowhere.py"], "no such file"),
        (
            ["--topology=cpu:8", "--config.selector.table=nowhere.json"],
            "config.selector.table=nowhere.json cannot be read",
        ),
        (
            ["--topology=cpu:8", "--config.devices.num_rollout=8"],
            "8 devices in all; leave at least one to train",
        ),
    ],
)
def test_bad_input_is_answered_with_what_to_change(arguments, words):
    with pytest.raises(ValueError) as error:
        plan_command([TICTACTOE, *arguments])
    assert words in str(error.value)


def test_contexts_are_those_that_a_checkpoints_model_is_made_for(capsys):
    model = f"--config.model.path={CHECKPOINT}"
    flags = ["--config=configs/connect_four_qwen2_cpu.py", "--topology=h100:1x8", model]
    plan_command([*flags, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert [each["context"] for each in values["contexts"]] == [128]
    with pytest.raises(InputError, match="--contexts has 129, .* made for 128"):
        plan_command([*flags, "--contexts=64,129"])


def test_memory_beyond_a_devices_is_noted(capsys):
    out = run(capsys, "--topology=h100:1x8", "--hbm_gib=1000", "--contexts=1024")
    assert "--hbm_gib=1000 is more than the 79.65 GiB of a device" in out


def test_a_table_of_a_run_decides(capsys, tmp_path):
    """A slow mesh is left, and what was observed is marked."""
    flags = ["--topology=cpu:8", "--contexts=40", "--vocab_size=320", "--json"]
    plain = json.loads(run(capsys, *flags))
    table = EMPTY
    fast, slow = ("data=8", "data=1,fsdp=8")
    if plain["contexts"][0]["train"]["mesh"] == fast:
        fast, slow = slow, fast
    for mesh, speed in ((fast, 9e4), (slow, 1e4)):
        for _ in range(3):
            table = table.with_speed(train_key(MeshShape.parse(mesh), 40, 1, "none"), speed)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table.as_dict()))
    values = json.loads(run(capsys, *flags, f"--config.selector.table={path}"))
    chosen = values["contexts"][0]["train"]
    assert chosen["mesh"] == fast != plain["contexts"][0]["train"]["mesh"]
    (found,) = (mesh for mesh in chosen["meshes"] if mesh["mesh"] == fast)
    assert found["observed"] and found["tokens_per_s"] == 9e4


def test_sizes_that_are_advised_keep_groups_whole():
    """Seven devices: 16 episodes become 28, a multiple of 7 and of a group of 4; not 21."""
    given = ["rollout.group_size=4", "rollout.episodes_per_step=16"]
    config, hardware = make_config(SMALL, given), parse_topology("cpu:7")
    with pytest.raises(InputError, match="These divide evenly") as error:
        planned_problem(config, config.model, 512, hardware, None)
    advice = re.findall(r"--config\.(\S+)", str(error.value).partition("evenly: ")[2])
    assert advice == ["rollout.num_slots=14", "rollout.episodes_per_step=28"]
    config = make_config(SMALL, [*given, *advice])
    assert planned_problem(config, config.model, 512, hardware, None).meshes("train")
