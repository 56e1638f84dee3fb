# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The selector's problem: a model, its work in a step, and the devices. Pure.

A run and the planner make the same record (placement/problem.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from earl_jax.models.layer_groups import PageRule, make_page_rule
from earl_jax.selector.footprint import (
    Footprint,
    device_bytes,
    engine_bytes,
    kept_bytes,
    page_bytes,
    rollout_footprint,
    train_footprint,
    trainer_bytes,
)
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.plans import Failure, Plan, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.roofline import scoring_s, token_s, train_parts
from earl_jax.selector.sizes import ModelSizes, Workload
from earl_jax.settings.errors import InputError
from earl_jax.settings.remat import REMATS
from earl_jax.sharding.layout import MeshShape

# Returns why a shape cannot be used, in words; None where it can.
Check = Callable[[MeshShape], str | None]
# Rows are not cut over `context` into fewer tokens a shard, unless the user names such a mesh.
LEAST_SHARD_TOKENS = 4096
# The fraction of positions in packed rows that hold a token (benchmarks/packing.md).
FILL = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A model, its work in a step, and the devices.

    Attributes:
        hardware: all devices, of both stages.
        sizes: the model's parameters by shape and placement.
        work: the slots, rows, chunks and pages of a step, by the config.
        budget_bytes: bytes of a device that a stage may use; None: no limit is known.
        weights_obstacle: returns why parameters cannot be cut over a mesh.
        attention_obstacle: returns why the trainer's attention cannot.
        rollout_meshes_named: the candidates that the config names, "data=4,tensor=2"; () for all.
        train_meshes_named: likewise.
        num_rollout: devices for rollouts only, the others are for training only; 0: all do both.
        splits: the numbers of devices for rollouts that may be chosen, `num_rollout` one of them,
            as many of each process; () where it is fixed, and whole processes play.
        num_processes: the processes of the run.
        num_players: those of them that play: each its part of a rollout, or its mesh spans them
            (`num_parts`).
        span_obstacle: why a rollout mesh cannot span the processes, in words; "" where it can.
        can_offload: the optimizer's moments may be in host memory during a rollout.
        can_offload_inputs: layers' inputs may be during an update.
        preempted_bytes: host memory that preempted episodes may take beside the moments.
        rollout_stays: a rollout stays on the devices during an update, because it goes on then.
        plays: False for a run of supervised updates alone: a step has no plan of a rollout.
        every: of a problem with one of several splits, that with all of them.
    """

    hardware: Hardware
    sizes: ModelSizes
    work: Workload
    budget_bytes: int | None
    weights_obstacle: Check = lambda mesh: None
    attention_obstacle: Check = lambda mesh: None
    rollout_meshes_named: tuple[str, ...] = ()
    train_meshes_named: tuple[str, ...] = ()
    num_rollout: int = 0
    splits: tuple[int, ...] = ()
    num_processes: int = 1
    num_players: int = 1
    span_obstacle: str = ""
    can_offload: bool = False
    can_offload_inputs: bool = False
    preempted_bytes: int = 0
    rollout_stays: bool = False
    plays: bool = True
    every: "Problem | None" = None

    def behind_warm_start(self) -> "Problem":
        """Returns the problem without the moments of supervised updates."""
        if not self.sizes.sft_moments:
            return self
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, sft_moments=()))

    # Splits.

    @functools.cache  # noqa: B019 - a problem lives as long as its run or plan
    def at(self, num_rollout: int) -> "Problem":
        """Returns the problem in which so many devices are for rollouts, and that is fixed."""
        return dataclasses.replace(self, num_rollout=num_rollout, splits=(), every=self)

    def of(self, plan: Plan) -> "Problem":
        """Returns the problem with the split of which a plan's mesh is; this one if none is."""
        every = self.every or self
        number = plan.mesh.num_devices
        split = number if plan.stage == "rollout" else self.hardware.num_devices - number
        return every.at(split) if split in every.splits else self

    # Meshes.

    def check_meshes(self) -> None:
        """Raises ValueError where a stage of a step has no mesh (`meshes`)."""
        for stage in ("rollout", "train") if self.plays else ("train",):
            self.meshes(stage)

    def num_parts(self, mesh: MeshShape) -> int:
        """Returns the number of engines of a rollout mesh: one a player, or one that spans all."""
        return self.num_players if mesh.data % self.num_players == 0 else 1

    def spans(self, mesh: MeshShape) -> bool:
        """Returns True if a rollout mesh is one engine over several processes."""
        return self.num_parts(mesh) < self.num_players

    def num_devices(self, stage: Stage) -> int:
        """Returns the number of devices of a stage."""
        number = self.hardware.num_devices
        return number - self.num_rollout if stage == "train" else self.num_rollout or number

    @functools.cache  # noqa: B019 - a problem lives as long as its run or plan
    def meshes(self, stage: Stage, tokens: int = 0) -> list[MeshShape]:
        """Returns a stage's meshes for contexts of so many tokens (`mesh_candidates`).

        Raises ValueError if none is possible, or one that the config names is not.
        """
        named, check = self.rollout_meshes_named, self.rollout_obstacle
        if stage == "train":
            named, check = self.train_meshes_named, self.train_obstacle
        number = self.num_devices(stage)
        if named and (self.splits or self.every is not None):
            named = [text for text in named if MeshShape.parse(text).num_devices == number]
            if not named:
                field = f"config.selector.{stage}_meshes"
                raise InputError(f"{field} names no mesh of {number} devices")
        return mesh_candidates(stage, number, named, check, self.sizes.model.num_experts, tokens)

    def rollout_obstacle(self, mesh: MeshShape) -> str | None:
        """Returns why a rollout cannot use this mesh, in words; None where it can."""
        work = self.work
        players, why = self.num_players, self.span_obstacle
        if players < self.num_processes:
            why = "a mesh that spans processes needs all of them (config.devices.num_rollout = 0)"
        if why and self.spans(mesh):
            return f"data={mesh.data} does not divide over the {players} processes, and {why}"
        for field, number in (("num_slots", work.num_slots), ("episodes_per_step", work.num_rows)):
            if number % mesh.data:
                return f"rollout.{field} = {number} does not divide by data={mesh.data}"
        if (rows := work.num_rows // work.parts) % mesh.data:
            return f"{rows} rows of each of asynchrony.parts do not divide by data={mesh.data}"
        for field, size in (("page_size", work.page_size), ("chunk_size", work.chunk_size)):
            if size % mesh.context:
                return f"rollout.{field} = {size} does not divide by context={mesh.context}"
        # An engine's weights are not cut over `context`; nor can tokens be, behind states.
        return self.weights_obstacle(mesh if self.sizes.state_layers else mesh._replace(context=1))

    def train_obstacle(self, mesh: MeshShape, micro_batches: int = 0) -> str | None:
        """Returns why the trainer cannot use this mesh so, in words; None where it can.

        `micro_batches` 0 is the config's number.
        """
        rows = self.work.num_rows // (micro_batches or self.work.micro_batches)
        parts = mesh.data * mesh.fsdp * mesh.expert
        if rows % parts:
            return f"{rows} rows per micro-batch do not divide by {parts}"
        if (rows := self.work.num_rows // self.work.parts) % parts:
            return f"{rows} rows of each of asynchrony.parts do not divide by {parts}"
        return self.attention_obstacle(mesh) or self.weights_obstacle(mesh)

    @functools.cache  # noqa: B019
    def train_plans(self, length: int) -> list[TrainPlan]:
        """Returns the plans for rows of so many tokens, mesh by mesh, on each the config's first.

        Those with layers' inputs in host memory are last, if the hosts hold them.
        """
        work, plans = self.work, list[TrainPlan]()
        remats = REMATS[REMATS.index(work.remat) :]
        for mesh in self.meshes("train", length):
            here, number = list[TrainPlan](), work.micro_batches
            while work.num_rows % number == 0 and self.train_obstacle(mesh, number) is None:
                here += [TrainPlan(mesh, number, remat) for remat in remats]
                number *= 2
            here.sort(key=lambda plan: plan.remat == "offload")
            plans += [p for p in here if p.remat != "offload" or self._holds_inputs(p, length)]
        return plans

    def _holds_inputs(self, plan: TrainPlan, length: int) -> bool:
        """Returns True if each host's memory may hold layers' inputs, beside a backup."""
        work = dataclasses.replace(self.work, micro_batches=plan.micro_batches, remat=plan.remat)
        kept = kept_bytes(self.sizes, work, plan.mesh, length)
        state = sum(trainer_bytes(self.sizes, plan.mesh))
        return self.can_offload_inputs and self.hosts_hold(state + kept)

    def hosts_hold(self, num_bytes: int) -> bool:
        """Returns True if each host's memory holds so many bytes of each of its devices."""
        devices = min(self.hardware.devices_a_host, self.hardware.num_devices)
        held = devices * num_bytes + self.preempted_bytes
        return held <= self.hardware.host_memory_bytes

    @property
    def holds_backup(self) -> bool:
        """True if a host's memory holds the trainer's state once, beside preempted episodes."""
        state = sum(trainer_bytes(self.sizes, MeshShape()))
        return state + self.preempted_bytes <= self.hardware.host_memory_bytes

    @functools.cache  # noqa: B019
    def slot_numbers(self, mesh: MeshShape) -> tuple[int, ...]:
        """Returns the numbers of slots for a rollout on this mesh: the config's, then halves."""
        numbers = [self.work.num_slots]
        while numbers[-1] % (2 * mesh.data) == 0:
            numbers.append(numbers[-1] // 2)
        return tuple(numbers)

    def failure(self, plan: Plan, tokens: int) -> Failure:
        """Returns what is remembered of a plan that ran out of memory at this context bucket."""
        # What a warm start takes of it is there again behind its last step.
        taken = device_bytes(self.sizes.sft_moments, MeshShape()) // self.hardware.num_devices
        limit = (self.budget_bytes or 0) - taken
        if isinstance(plan, RolloutPlan):
            cached = plan.pages * self.work.page_size // self.page_rule.num_groups
            size = (tokens, cached, plan.num_slots, int(not plan.offload), -limit)
        else:
            rows = self.work.num_rows // plan.micro_batches
            size = (tokens, rows, 2 - REMATS.index(plan.remat), -limit)
        return Failure(stage=plan.stage, mesh=str(plan.mesh), size=size)

    # Bytes per device.

    @property
    def budget(self) -> float:
        """The budget, infinite where none is known."""
        return math.inf if self.budget_bytes is None else self.budget_bytes

    @functools.cache  # noqa: B019
    def update_footprint(self, plan: TrainPlan, length: int) -> Footprint:
        """Returns the bytes of an update on rows of so many tokens."""
        work = dataclasses.replace(self.work, micro_batches=plan.micro_batches, remat=plan.remat)
        return train_footprint(self.sizes, work, plan.mesh, length, self.hardware.platform)

    @functools.cache  # noqa: B019
    def bare_footprint(self, mesh: MeshShape, num_slots: int, max_tokens: int) -> Footprint:
        """Returns the bytes of a rollout without its KV cache, beside no trainer."""
        parts = self.num_parts(mesh)
        work = dataclasses.replace(self.work, num_slots=num_slots, num_players=parts)
        chips = self.hardware.platform, self.hardware.chip
        return rollout_footprint(self.sizes, work, mesh, max_tokens, *chips)

    @functools.cache  # noqa: B019
    def page_bytes(self, mesh: MeshShape) -> int:
        """Returns the bytes of a device's part of a page, which is cut over tensor and context."""
        return page_bytes(self.sizes, self.work, mesh)

    def round_footprint(self, plan: RolloutPlan, max_tokens: int) -> Footprint:
        """Returns the bytes of a rollout of episodes of up to `max_tokens` tokens, by itself."""
        bare = self.bare_footprint(plan.mesh, plan.num_slots, max_tokens)
        return dataclasses.replace(bare, cache=plan.pages * self.page_bytes(plan.mesh))

    def without_pages(self, plan: Plan, program_bytes: int) -> int:
        """Returns a program's bytes but for those of its pages."""
        if isinstance(plan, RolloutPlan):
            program_bytes -= plan.pages * self.page_bytes(plan.mesh)
        return max(1, program_bytes)

    @functools.cache  # noqa: B019
    def trainer_bytes(self, mesh: MeshShape, offload: bool = False) -> int:
        """Returns the bytes of a trainer on each device during a rollout."""
        if self.num_rollout:
            return 0
        parameters, moments = trainer_bytes(self.sizes, mesh)
        return parameters if offload else parameters + moments

    @functools.cache  # noqa: B019
    def moments_bytes(self, mesh: MeshShape) -> int:
        """Returns the bytes of the optimizer's moments on each device."""
        return trainer_bytes(self.sizes, mesh)[1]

    # Pages.

    @functools.cache  # noqa: B019
    def least_pages(self, max_tokens: int) -> int:
        """Returns the pages of a row shard that hold one whole episode."""
        return self.page_rule.most_pages(max_tokens)

    @functools.cached_property
    def page_rule(self) -> PageRule:
        """The pages of an episode, as the engine has them."""
        work = self.work
        return make_page_rule(
            self.sizes.windows, work.page_size, work.chunk_size, work.sampled_tokens
        )

    # Seconds, by the speed model.

    def packed_rows(self, length: int, tokens: int | None, mesh: MeshShape) -> int:
        """Returns the rows of `length` tokens that episodes of so many in all are packed in.

        There are as many for each row shard. `tokens` None: all episodes are as long as a row.
        """
        most, shards = self.work.num_rows, mesh.data * mesh.fsdp * mesh.expert
        if tokens is None:
            return most
        rows = max(1, math.ceil(tokens / (FILL * length)))
        return min(most, shards * math.ceil(rows / shards))

    @functools.cache  # noqa: B019
    def update_speed(self, plan: TrainPlan, length: int, rows: int | None = None) -> float:
        """Returns the tokens/s of updates on `rows` rows of so many tokens, None: all episodes'.

        They go in as many micro-batches as they need of the plan's. A supervised batch of equal
        size counts too, and so do the passes before a step's first update.
        """
        rows, most = rows or self.work.num_rows, self.work.num_rows // plan.micro_batches
        batch = dataclasses.replace(
            self.work, num_rows=rows, micro_batches=-(-rows // most), remat=plan.remat
        )
        number = batch.num_batches
        work = dataclasses.replace(
            batch, num_rows=number * rows, micro_batches=number * batch.micro_batches
        )
        hardware = self._hardware_of(plan.mesh)
        seconds = train_parts(hardware, self.sizes, work, plan.mesh, length).total
        seconds += scoring_s(hardware, self.sizes, batch, plan.mesh, length) / work.epochs
        return work.num_rows * length / seconds

    @functools.cache  # noqa: B019
    def round_speed(
        self, mesh: MeshShape, num_slots: int, max_tokens: int, rows: int, appended: float
    ) -> float:
        """Returns the tokens/s that all slots sample, at the end of their context bucket.

        A row shard has pages for `rows` of its slots: 16 slots with pages for 7 run as 7, 7 and 2.
        """
        times, left = divmod(num_slots // mesh.data, rows)
        live, rest = rows * mesh.data, left * mesh.data
        seconds = times * self.live_token_s(mesh, num_slots, live, max_tokens, appended)
        if left:
            seconds += self.live_token_s(mesh, num_slots, rest, max_tokens, appended)
        return num_slots / seconds

    @functools.cache  # noqa: B019
    def live_token_s(
        self, mesh: MeshShape, num_slots: int, live: int, max_tokens: int, appended: float
    ) -> float:
        """Returns the seconds of a token of each of `live` episodes, in slots of all row shards."""
        work = dataclasses.replace(self.work, num_slots=num_slots, appended=appended)
        hardware = self._hardware_of(mesh)
        return token_s(hardware, self.sizes, work, mesh, -(-live // mesh.data), max_tokens)

    @functools.cache  # noqa: B019
    def publish_s(self, mesh: MeshShape) -> float:
        """Returns the seconds of new weights on their way to a rollout on this mesh.

        Where the devices that train are fewer, each sends more than a device receives.
        """
        senders = self.num_devices("train") or mesh.num_devices
        return self.relocate_s(mesh, 0) * max(1.0, mesh.num_devices / senders)

    @functools.cache  # noqa: B019
    def relocate_s(self, mesh: MeshShape, cache_bytes: int) -> float:
        """Returns the seconds of moving a rollout's weights and KV cache to this mesh."""
        return self._arrival_s(engine_bytes(self.sizes.engine, mesh) + cache_bytes)

    @functools.cache  # noqa: B019
    def move_s(self, mesh: MeshShape) -> float:
        """Returns the seconds of moving the trainer's state to this mesh."""
        return self._arrival_s(sum(trainer_bytes(self.sizes, mesh)))

    def offload_s(self, mesh: MeshShape) -> float:
        """Returns the seconds a step of moving the moments to host memory and back."""
        return 2 * self.moments_bytes(mesh) / self.hardware.host_bytes_per_s

    def _hardware_of(self, mesh: MeshShape) -> Hardware:
        """Returns the devices of a mesh; where they are split, as many of each host."""
        hardware = self.hardware.with_devices(mesh.num_devices)
        if self.num_processes == 1 or not (self.splits or self.every):
            return hardware
        each = max(1, mesh.num_devices // self.hardware.num_hosts)
        return dataclasses.replace(hardware, devices_a_host=each)

    def _arrival_s(self, num_bytes: int) -> float:
        hardware = self.hardware
        # The links of a slice of TPUs go from host to host.
        by_network = hardware.num_devices > hardware.linked and hardware.platform != "tpu"
        rates = hardware.link_bytes_per_s, hardware.network_bytes_per_s
        return num_bytes / rates[by_network]


# The shapes of meshes.


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def mesh_shapes(
    stage: Stage, num_devices: int, num_experts: int = 0, context: int = 1
) -> list[MeshShape]:
    """Returns all shapes of a stage over all devices, with rows cut in `context` parts.

    A rollout's have the widest data axis first, and no fsdp. Those of training are least cut first.
    """
    number = num_devices // context
    shapes = [
        MeshShape(rows // fsdp // expert, fsdp, context, expert, number // rows)
        for rows in reversed(divisors(number))
        for expert in divisors(rows)
        if max(num_experts, 1) % expert == 0
        for fsdp in (divisors(rows // expert) if stage == "train" else (1,))
    ]
    if stage == "train":
        return shapes
    return sorted(shapes, key=lambda shape: (-shape.data, shape.expert))


def mesh_candidates(
    stage: Stage,
    num_devices: int,
    named: Sequence[str],
    check: Check,
    num_experts: int = 0,
    tokens: int = 0,
) -> list[MeshShape]:
    """Returns the shapes of a stage that can be used, or those of them that the user named.

    Rows of `tokens` tokens are cut over `context` too, where each shard has LEAST_SHARD_TOKENS, or
    no other shape can be used. Those shapes are last, least cut first. One that is named may cut
    rows of any length.

    Raises:
        ValueError: a shape that the user named cannot be used, or none can.
    """
    field, shapes = f"{stage}_meshes", mesh_shapes(stage, num_devices, num_experts)
    reasons = {shape: check(shape) for shape in shapes}
    usable = [shape for shape, reason in reasons.items() if reason is None]
    allowed = "; ".join(f"'{shape}'" for shape in usable) or "none"
    if not named:
        for context in divisors(num_devices)[1:]:
            if not usable or context * LEAST_SHARD_TOKENS <= tokens:
                long = mesh_shapes(stage, num_devices, num_experts, context)
                usable += [shape for shape in long if check(shape) is None]
        if not usable:
            why = "; ".join(f"{shape}: {reason}" for shape, reason in reasons.items())
            words = {"rollout": "rollouts of this model", "train": "training of this model"}[stage]
            raise InputError(
                f"no mesh of {num_devices} devices fits {words}: {why}. Change these numbers, or "
                "give the stage other devices (config.devices.num_rollout)"
            )
        return usable
    for shape in map(MeshShape.parse, named):
        reason = check(shape)
        if shape.num_devices != num_devices:
            reason = f"it has {shape.num_devices} devices, and this run {num_devices}"
        if reason is not None:
            raise InputError(
                f"config.selector.{field} has '{shape}', which is impossible: {reason}. "
                f"Possible here: {allowed}"
            )
    return list(map(MeshShape.parse, named))
