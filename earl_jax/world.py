# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Everything static, built once from the config: meshes, engines, jitted steps, the tokenizer.

A World holds no step of a run and no weights. Programs are made per mesh on first use and kept.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_jax.config import Config
from earl_jax.engine.choices import choice_tree
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool
from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.conversation import Conversation
from earl_jax.envs.environment import Chooses, Environment
from earl_jax.envs.examples import example_ids, play_example
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.registry import Played
from earl_jax.envs.tasks import TaskArgs
from earl_jax.launch.cluster import find_cluster
from earl_jax.models.attention.kernels import Choice, choose_kernel, pages_in_words
from earl_jax.models.attention.rows import BLOCK_SIZE
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.parameters import Params
from earl_jax.origin import max_context, open_origin
from earl_jax.placement.problem import hardware_of_devices, make_problem
from earl_jax.rollout.config import make_engine_config
from earl_jax.rollout.episode import Task
from earl_jax.selector.memory import device_budget
from earl_jax.selector.plans import RolloutPlan
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from earl_jax.sharding.placing import absent_tree
from earl_jax.train import step as train_step
from earl_jax.train.checkpoint import spread_over
from earl_jax.train.learner import Learner
from earl_jax.train.offload import has_host_memory
from earl_jax.train.sft import HostBatch
from earl_jax.train.step import TrainState

# Evaluation episodes have numbers, and so seeds, that no training episode reaches.
FIRST_EVAL_EPISODE = 2**30


class World:
    """The static parts of one run."""

    def __init__(self, config: Config, tokenizer_folder: Path | None = None) -> None:
        """Builds what needs no weights; compiles nothing.

        The tokenizer is that of the checkpoint in config.model.path. Without one it is read from
        `tokenizer_folder` if it is there, else built from the environment's own text and saved
        there, so that a resumed run has the same one.

        Raises:
            ValueError: a setting that is impossible for these devices or this game, or a checkpoint
                that cannot be read.
        """
        self.config = config
        # What a user should know at the start of a run.
        self.notes: list[str] = []
        self.processes = find_cluster(config.devices.num_rollout, config.distributed.timeout_s)
        self.processes.check_kinds()
        self.own_rollout = config.rollout.part(len(self.processes.players))
        self.pool = EnvironmentPool(config.env.num_workers, config.env.timeout_s)
        self.played = config.open_environment()
        self.checkpoint = (
            open_checkpoint(find_folder(config.model.path)) if config.model.path else None
        )
        origin = open_origin(config, self.checkpoint, tokenizer_folder, self.processes)
        self.model, self.tokenizer = origin.model, origin.tokenizer
        self.vocab_size = origin.vocab_size
        self.notes += origin.notes
        self.max_context = max_context(config, self.checkpoint)
        # Now, because it raises for adapters that this model cannot have.
        train_step.trained_specs(self.model, config.train, self.vocab_size)
        self.learner = Learner(
            self.model,
            config.train,
            config.make_algorithm(),
            vocab_size=self.vocab_size,
            temperature=config.train_temperature,
            importance_cap=config.importance_cap,
            layout=self.train_layout,
        )
        self.renderer = ChatRenderer(self.tokenizer, origin.end_ids, config.chat.template_arguments)
        self.choice_branches = _choice_branches(config, self.played, self.renderer)
        budget = device_budget(config.selector.budget_bytes_per_device)
        budgets = self.processes.gather(budget, "the devices' limits")
        self.budget_bytes = min((each for each in budgets if each is not None), default=None)
        self.problem = make_problem(
            config,
            self.model,
            self.vocab_size,
            hardware_of_devices(self.processes.devices, self.processes.count),
            budget_bytes=self.budget_bytes,
            num_processes=self.processes.count,
            can_offload=self._can_offload(),
        )
        # Raises where the config names a mesh that is impossible here, or none is possible.
        self._check_meshes()
        self.attention_choices = self._attention_choices()
        self.notes += [f"attention in training: {choice}" for choice in self.attention_choices]
        self.notes.append(f"attention in the rollout: {self._rollout_attention()}")
        if not config.rollout.is_precise_as(self.model.compute_dtype):
            self.notes.append(f"rollout in another precision than training: {_precision(config)}")

    def _check_meshes(self) -> None:
        """Raises ValueError where a stage has no mesh, or a named one is impossible."""
        assert self.problem.rollout_meshes and self.problem.train_meshes

    def _can_offload(self) -> bool:
        """Whether the optimizer's moments may wait in host memory during a rollout."""
        processes, setting = self.processes, self.config.selector.offload
        if setting == "off" or processes.disjoint:
            return False
        device = next(d for d in processes.train_devices if d.process_index == processes.index)
        return has_host_memory(device) and (setting == "on" or device.platform != "cpu")

    def _attention_choices(self) -> list[Choice]:
        """Returns the kernels that attention in training may have, for short and long rows."""
        # One mesh speaks for all that cut rows, or do not: they have the same devices.
        meshes = {shape.context > 1: shape for shape in reversed(self.problem.train_meshes)}
        rollout, setting = self.config.rollout, self.config.train.attention
        most = rollout.max_episode_tokens or BLOCK_SIZE + 1
        lengths = [rollout.max_tokens_for(min(tokens, most)) for tokens in (1, BLOCK_SIZE + 1)]
        choices = [
            choose_kernel(setting, self.train_layout(meshes[cut]), self.model, length)
            for cut in sorted(meshes)
            for length in lengths
        ]
        return list(dict.fromkeys(choices))

    def _rollout_attention(self) -> str:
        """That of prefill and decoding, in words: there is one, whose steps go by the platform."""
        platform = self.joint_layout(self.problem.rollout_meshes[0]).platform
        return pages_in_words(str(platform), self.config.rollout.tokens_a_page)

    def weights_obstacle(self, shape: MeshShape) -> str | None:
        """Returns why the model cannot be cut so, in words; None where it can."""
        return self.problem.weights_obstacle(shape)

    @functools.cache  # noqa: B019 - a World lives as long as the run
    def rollout_layout(self, shape: MeshShape) -> Layout:
        """This process's part of the rollout's layout of this shape: where its engine is."""
        return make_layout(self.processes.own_mesh(shape), self.processes.own_devices)

    @functools.cache  # noqa: B019
    def joint_layout(self, shape: MeshShape) -> Layout:
        """The rollout's layout of this shape over all devices that play, of all processes."""
        return make_layout(shape, self.processes.rollout_devices)

    @functools.cache  # noqa: B019
    def train_layout(self, shape: MeshShape) -> Layout:
        """The trainer's layout of this shape over all devices that train."""
        return make_layout(shape, self.processes.train_devices, row_axes=TRAINING_ROWS)

    def engine(self, shape: MeshShape, num_slots: int | None = None) -> Engine:
        """This process's engine on this rollout mesh; `num_slots` of all processes, None: all."""
        slots = num_slots or self.config.rollout.num_slots
        return self._engine(shape, slots // len(self.processes.players))

    @functools.cache  # noqa: B019
    def _engine(self, shape: MeshShape, num_slots: int) -> Engine:
        config = make_engine_config(
            dataclasses.replace(self.own_rollout, num_slots=num_slots),
            self.model,
            self.vocab_size,
            num_devices=len(self.processes.own_devices),
            seed=self.config.seed,
            model_logprobs=self.config.train.ratio == "model",
        )
        rules = config.rules._replace(
            end_of_turn_ids=self.renderer.end_of_turn_ids, choice_branches=self.choice_branches
        )
        config = dataclasses.replace(config, rules=rules)
        return Engine(config, self.rollout_layout(shape))

    def cache_pool(self, plan: RolloutPlan) -> Pool:
        """Returns the pages of this process's part of a rollout."""
        return Pool(self.processes.own_mesh(plan.mesh).data, plan.pages)

    def train_state_shapes(self) -> TrainState:
        """A TrainState as shapes."""
        return self.learner.state_shapes()

    def train_state_shardings(self, shape: MeshShape) -> TrainState:
        """Where a TrainState lives on this training mesh."""
        return self.learner.state_shardings(shape)

    def spread_shardings(self, devices: Sequence[Any]) -> TrainState:
        """Shardings of a TrainState that is cut over these devices, for files."""
        return spread_over(
            devices,
            self.model,
            self.config.train,
            self.vocab_size,
            lambda shape: self.weights_obstacle(shape) is None,
        )

    @property
    def saved_shardings(self) -> TrainState | None:
        """Shardings of a TrainState as it is saved; None where it is saved as it is placed."""
        cluster = self.processes
        return None if cluster.all_train else self.spread_shardings(cluster.devices)

    def init_train_state(self, shape: MeshShape) -> TrainState:
        """Random weights on this training mesh; the same values on every mesh."""
        if not self.processes.trains:
            return absent_tree(self.train_state_shapes(), self.train_state_shardings(shape))
        return train_step.init_state(
            self.model,
            self.config.train,
            self.vocab_size,
            self.train_layout(shape),
            self.config.seed,
        )

    def first_train_state(self, shape: MeshShape) -> TrainState:
        """What the run begins with: the checkpoint's weights, or else `init_train_state`."""
        if self.checkpoint is None or not self.processes.trains:
            return self.init_train_state(shape)
        lora, layout = self.config.train.lora, self.train_layout(shape)
        dtype = lora.base_dtype if lora.rank else "float32"
        params = load_parameters(self.checkpoint, layout, dtype)
        return train_step.state_of(
            params, self.model, self.config.train, self.vocab_size, layout, self.config.seed
        )

    def frozen_base(self, shape: MeshShape) -> Params:
        """What the adapters adapt, on this mesh, as the run began with it; None without adapters.

        The same bits whenever it is asked for: they come from the same files, or the same seed.
        """
        if not self.config.train.lora.rank:
            return None
        return self.first_train_state(shape).base

    def policy(self, state: TrainState) -> Params:
        """What the decoder computes with, for `publish` and for export."""
        return train_step.policy_parameters(self.config.train, state.params, state.base)

    def new_conversation(self) -> Conversation:
        """For one episode."""
        return Conversation(self.renderer, self.config.chat.history)

    def make_environment(self, task: Task) -> Environment:
        """A fresh environment for this task."""
        return self.played.make(**task.args)

    def training_tasks(self, step: int) -> list[Task]:
        """The episodes of RL step `step`: those of a group play the same task."""
        count, size = self.config.rollout.episodes_per_step, self.config.rollout.group_size
        tasks = self.played.tasks.batch(step)
        if len(tasks) != count // size:
            raise ValueError(
                f"config.tasks.name {self.config.tasks.name!r} gave {len(tasks)} tasks for step "
                f"{step}; there must be {count // size} (config.rollout.episodes_per_step / "
                "group_size)"
            )
        first = step * count
        return [
            Task(episode=first + i, group=(first + i) // size, args=tasks[i // size])
            for i in range(count)
        ]

    def evaluation_tasks(self, number: int) -> list[Task]:
        """The same evaluation episodes every time."""
        tasks = self.played.tasks.evaluation(number)
        return [
            Task(episode=FIRST_EVAL_EPISODE + i, group=FIRST_EVAL_EPISODE + i, args=args)
            for i, args in enumerate(tasks)
        ]

    def demonstrations(self, step: int) -> list[HostBatch]:
        """The supervised batches of RL step `step`: fresh episodes, none after the first steps."""
        train, rows = self.config.train, self.config.rollout.episodes_per_step
        if step >= train.sft_steps:
            return []
        updates = range(step * train.sft_updates, (step + 1) * train.sft_updates)
        batches = (self.played.tasks.batch(n % self.config.num_steps) for n in updates)
        return [self._examples(tasks, rows, n) for n, tasks in zip(updates, batches, strict=True)]

    def _examples(self, tasks: Sequence[TaskArgs], rows: int, number: int) -> HostBatch:
        rng = random.Random(f"examples {self.config.seed} {number}")
        environments = (self.played.make(**tasks[row % len(tasks)]) for row in range(rows))
        found = [example_ids(play_example(each, rng), self.renderer) for each in environments]
        return HostBatch(
            token_ids=tuple(tuple(ids) for ids, _ in found),
            turn_ids=tuple(tuple(turns) for _, turns in found),
        )


def _choice_branches(config: Config, played: Played, renderer: ChatRenderer) -> int:
    """Room for the tree of all replies that there may be; 0 where the policy may say anything.

    Raises ValueError where one is longer than a turn.
    """
    environment, most = played.make(**played.first_args), config.rollout.max_turn_tokens
    choices = environment.all_choices() if isinstance(environment, Chooses) else ()
    if not choices:
        return 0
    replies = Conversation(renderer).choices(choices)
    longest = max(map(len, replies))
    if longest > most:
        raise ValueError(
            f"a choice of config.env.name {config.env.name!r} takes {longest} tokens with its end "
            f"of turn; config.rollout.max_turn_tokens is {most}: raise it"
        )
    return len(choice_tree(replies)[0])


def _precision(config: Config) -> str:
    """The rollout's, and what the loss does about it, for people."""
    rollout, cap = config.rollout, config.importance_cap
    dtype = rollout.computes_as(config.model.compute_dtype)
    stored = {"weights": rollout.weight_dtype, "KV cache": rollout.kv_dtype}
    weights = "".join(f"{t} {what}, " for what, t in stored.items() if t != "compute")
    correction = f"importance weights up to {cap:g}" if cap else "no correction of the loss"
    return f"{weights}{dtype} against {config.model.compute_dtype}; {correction}"
