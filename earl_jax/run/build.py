# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of one run, built from its config.

Only the loop and the commands hold the whole `Run`; each part takes what it needs.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.engine.choices import choice_tree, choice_width
from earl_jax.engine.config import NO_LIMIT
from earl_jax.envs.environment import Chooses, Environment
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.registry import Played
from earl_jax.envs.single_turn import prompt_of
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_dataset import ChatDataset
from earl_jax.envs.text.conversation import Conversation
from earl_jax.launch.cluster import Cluster, find_cluster
from earl_jax.launch.layouts import Layouts
from earl_jax.launch.start import compute_exactly, host_memory_bytes
from earl_jax.models.attention.kernels import (
    Choice,
    choose_kernel,
    choose_pages_kernel,
    pages_in_words,
)
from earl_jax.models.attention.rows import BLOCK_SIZE
from earl_jax.models.moe.grouped_matmul import products_in_words
from earl_jax.placement.facts import facts_of, open_table
from earl_jax.placement.problem import check_groups, hardware_of_devices, make_problem
from earl_jax.placement.stages import Stages, make_learner
from earl_jax.rollout.actor import Actor
from earl_jax.rollout.engines import Engines
from earl_jax.rollout.origin import Origin, open_origin
from earl_jax.rollout.tasks import Tasks
from earl_jax.selector.memory import device_budget
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.train.learner import Learner
from earl_jax.train.offload import has_host_memory
from earl_jax.train.state import TrainState

# The environments whose first message has the prompt of a dataset's row.
_PROMPTED = ("single_turn", "tools")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The parts of a run that never change: no step of it, and no weights.

    `attention` are the kernels of attention in training; `notes` are for the user at the start.
    `source` and `teacher` are those of source.py that a new run begins with, if its config names
    them.
    """

    config: Config
    origin: Origin
    stages: Stages
    actor: Actor
    tasks: Tasks
    attention: tuple[Choice, ...]
    notes: tuple[str, ...]
    source: Any = None
    teacher: Any = None

    @property
    def cluster(self) -> Cluster:
        """The processes and their devices."""
        return self.stages.cluster

    @property
    def learner(self) -> Learner:
        """The trainer's programs."""
        return self.stages.learner

    def judged_state(self, state: TrainState) -> TrainState:
        """Returns a state of which the policy is to be evaluated, exported or served.

        It has the moving average as its parameters, with config.train.ema_decay.
        """
        averaged = self.config.train.ema_decay > 0
        return dataclasses.replace(state, params=state.ema) if averaged else state

    @property
    def problem(self) -> Problem:
        """The facts that the selector chooses by."""
        return self.stages.problem

    def open_table(self) -> tuple[ThroughputTable, str | None]:
        """Returns the throughput table of config.selector.table, and a sentence for the user."""
        facts = facts_of(
            self.config,
            self.cluster,
            self.origin.model,
            self.origin.vocab_size,
            choice_branches=self.stages.engines.choice_branches,
            attention=[choice.kernel for choice in self.attention],
        )
        return open_table(self.config.selector.table, facts, self.cluster)


def build_run(
    config: Config, tokenizer_folder: Path | None = None, stop: Callable[[], str] = lambda: ""
) -> Run:
    """Builds the parts of a run; compiles nothing.

    A rollout is abandoned when `stop()` names a signal.

    The tokenizer is that of the checkpoint in config.model.path. Without one it is read from
    `tokenizer_folder` if it is there, else trained on the environment's own text and kept there, so
    that a resumed run has the same one.

    Raises:
        ValueError: a setting that is impossible for these devices or this environment, or a
            checkpoint that cannot be read.
    """
    given = config.devices.num_rollout
    cluster = find_cluster(0 if given == "auto" else given, config.distributed.timeout_s)
    cluster.check_kinds()
    trained = config.model.compute_dtype
    compute_exactly(trained, config.rollout.computes_as(trained))
    origin = open_origin(config.model, tokenizer_folder, cluster, config.corpus, plays=config.plays)
    _check_origin(config, origin)
    if config.asynchrony.is_on and cluster.count > 1:
        _check_processes(config, cluster)
    played = config.open_environment()
    renderer = ChatRenderer(origin.tokenizer, origin.end_ids, config.chat.template_arguments)
    choices = _all_choices(config, played, renderer)
    # What is only evaluated is not learnt from.
    width = choice_width(choices) if config.plays else 0
    problem = _problem(config, origin, cluster, width)
    cluster = cluster.split_by(problem.splits) if problem.splits else cluster
    layouts = Layouts(cluster)
    engines = Engines(
        rollout=config.rollout,
        model=origin.model,
        vocab_size=origin.vocab_size,
        cluster=cluster,
        layouts=layouts,
        seed=config.seed,
        model_logprobs=config.train.ratio == "model",
        end_of_turn_ids=renderer.end_of_turn_ids,
        choice_branches=len(choice_tree(choices)[0]),
        choice_width=problem.work.choice_width,
        batches=config.row_batches(len(cluster.players)),
    )
    stages = Stages(
        problem=problem,
        cluster=cluster,
        layouts=layouts,
        engines=engines,
        learner=make_learner(
            config,
            origin.model,
            origin.vocab_size,
            layouts.train,
            origin.checkpoint,
            trains=cluster.trains,
            choice_width=problem.work.choice_width,
        ),
        rollout=config.rollout.with_limit(
            origin.max_context, forks=config.chat.history != "append"
        ),
        feeds_table=config.selector.table == "auto",
    )
    tasks = Tasks(
        played=played,
        rollout=config.rollout,
        renderer=renderer,
        seed=config.seed,
        num_steps=config.num_steps,
    )
    attention = _attention(config, stages, origin)
    return Run(
        config=config,
        origin=origin,
        stages=stages,
        actor=_actor(config, origin, cluster, renderer, played.make, stop),
        tasks=tasks,
        attention=attention,
        notes=(*origin.notes, *_kernel_notes(config, stages, origin, attention)),
    )


def check_prompts(run: Run) -> None:
    """Raises ValueError where no prompt of a dataset's first step leaves a token for a reply.

    The first messages of other environments are known when these are played.
    """
    config, rollout = run.config, run.config.rollout
    if not (config.plays and config.tasks.source == "dataset" and config.env.name in _PROMPTED):
        return
    most = min(rollout.max_episode_tokens or NO_LIMIT, rollout.max_context(run.origin.max_context))
    shortest = NO_LIMIT
    for task in run.tasks.played.tasks.batch(0):
        start = prompt_of(task["row"])
        try:
            # It begins an episode; tools, which are described there, make it longer.
            ids = run.tasks.renderer.first(start.messages or start.text)
        except InputError:
            # It fails its episodes, with its own reason.
            return
        shortest = min(shortest, len(ids))
        if shortest < most:
            return
    raise InputError(
        f"the prompts of the first step, rows of config.tasks.path ({config.tasks.path!r}), have "
        f"{shortest} tokens or more, and an episode at most {most} (config.rollout."
        "max_episode_tokens, or the model's or the longest context): none leaves one for a reply"
    )


def with_conversations(run: Run) -> Run:
    """Returns the run with the conversations of config.train.sft_path as its examples, if any.

    Raises ValueError for a file that cannot be, and for other files in other processes.
    """
    found = _open_conversations(run, run.config.train.sft_path, "config.train.sft_path")
    if found is None:
        return run
    return dataclasses.replace(
        run,
        stages=dataclasses.replace(run.stages, example_tokens=found.max_tokens),
        tasks=dataclasses.replace(run.tasks, conversations=found),
        notes=(*run.notes, str(found)),
    )


def with_held_out(run: Run) -> Run:
    """Returns the run with the conversations of config.eval.sft_path, if any; raises likewise."""
    found = _open_conversations(run, run.config.eval.sft_path, "config.eval.sft_path")
    if found is None:
        return run
    return dataclasses.replace(
        run,
        stages=dataclasses.replace(run.stages, held_out_tokens=found.max_tokens),
        tasks=dataclasses.replace(run.tasks, held_out=found),
        notes=(*run.notes, f"held out: {found}"),
    )


def _open_conversations(run: Run, path: str, setting: str) -> ChatDataset | None:
    if not path:
        return None
    config, rollout = run.config, run.config.rollout
    most_tokens = rollout.max_context(run.origin.max_context)
    limit = f"config.rollout.max_episode_tokens (0, here {most_tokens})"
    if run.origin.max_context < NO_LIMIT:
        limit = f"the {most_tokens} that the model of config.model.path reads"
    if 0 < rollout.max_episode_tokens <= most_tokens:
        most_tokens = rollout.max_episode_tokens
        limit = f"config.rollout.max_episode_tokens ({most_tokens})"
    conversations = ChatDataset(
        path,
        run.tasks.renderer,
        history=config.chat.history,
        seed=config.seed,
        most_tokens=most_tokens,
        limit=limit,
        setting=setting,
    )
    states = run.cluster.gather(conversations.state(), setting)
    if any(state != states[0] for state in states):
        raise InputError(
            f"{setting} is {path!r}, which is not the same file in all processes; put the same one "
            "on each host"
        )
    return conversations


def _actor(
    config: Config,
    origin: Origin,
    cluster: Cluster,
    renderer: ChatRenderer,
    make: Callable[..., Environment],
    stop: Callable[[], str],
) -> Actor:
    """Returns what plays this process's episodes, in environments that `make` returns."""
    return Actor(
        rollout=config.rollout,
        cluster=cluster,
        renderer=renderer,
        history=config.chat.history,
        pool=EnvironmentPool(
            config.env.workers_for(config.rollout.num_slots), config.env.timeout_s
        ),
        make=make,
        max_context=config.rollout.max_context(origin.max_context),
        batches=config.row_batches(len(cluster.players)),
        stop=stop,
    )


def _check_processes(config: Config, cluster: Cluster) -> None:
    """Raises ValueError where these processes cannot play ahead of each other's updates."""
    settings, given = config.asynchrony, config.devices.num_rollout
    words = (
        f"this run has {cluster.count} processes and is asynchronous (config.asynchrony."
        f"max_staleness {settings.max_staleness}, parts {settings.parts}, refill {settings.refill})"
    )
    both = set(cluster.players) & set(cluster.trainers)
    if cluster.disjoint and both:
        each = Counter(device.process_index for device in cluster.devices)
        whole = list(itertools.accumulate(each.values()))
        raise InputError(
            f"{words}: all play and train, or some play and the others train, and "
            f"config.devices.num_rollout is {given!r}; set it to 0, to 'auto', or to the devices "
            f"of the first processes, one of {whole[:-1]}, or start one process"
        )
    if 0 not in cluster.players:
        raise InputError(
            f"{words}: process 0 must be one of those that play, which are {cluster.players}, by "
            "the order of their hosts and slices; give its number to one of these"
        )
    check_groups(config, len(cluster.players))


def _check_origin(config: Config, origin: Origin) -> None:
    """Raises ValueError where tokens of the settings are beyond those of the run's model."""
    unknown = [i for i in config.rollout.stop_token_ids if i >= origin.vocab_size]
    if unknown:
        raise InputError(
            f"config.rollout.stop_token_ids holds {unknown[0]}; ids go from 0 to "
            f"{origin.vocab_size - 1}"
        )
    most = config.rollout.max_episode_tokens
    # An episode of several samples may come to more than the model reads at once.
    if most > origin.max_context and config.chat.history == "append":
        raise InputError(
            f"config.rollout.max_episode_tokens is {most}, and the model of config.model.path "
            f"({config.model.path!r}) is made for {origin.max_context} (max_position_embeddings); "
            "lower it, or leave it at 0: episodes then end where the model does"
        )


def _problem(config: Config, origin: Origin, cluster: Cluster, choice_width: int) -> Problem:
    """Returns the selector's problem. Raises ValueError where no mesh, or a named one, can be."""
    own_bytes = [device_budget(config.selector.budget_bytes_per_device), host_memory_bytes()]
    budgets, hosts_bytes = zip(*cluster.gather(own_bytes, "the sizes of memory"), strict=True)
    own = [d for d in cluster.train_devices if d.process_index == cluster.index]
    problem = make_problem(
        config,
        origin.model,
        origin.vocab_size,
        hardware_of_devices(cluster.devices, cluster.num_hosts, min(hosts_bytes)),
        budget_bytes=min((each for each in budgets if each is not None), default=None),
        num_processes=cluster.count,
        num_players=len(cluster.players),
        has_host_memory=all(map(has_host_memory, own)),
        choice_width=choice_width,
    )
    problem.check_meshes()
    return problem


def _attention(config: Config, stages: Stages, origin: Origin) -> tuple[Choice, ...]:
    """Returns the kernels that attention in training may have, for short and long rows."""
    # One mesh with a context axis and one without: all meshes have the same devices.
    meshes = {shape.context > 1: shape for shape in reversed(stages.problem.meshes("train"))}
    rollout, setting = config.rollout, config.train.attention
    most = rollout.max_episode_tokens or BLOCK_SIZE + 1
    lengths = [rollout.max_tokens_for(min(tokens, most)) for tokens in (1, BLOCK_SIZE + 1)]
    choices = (
        choose_kernel(setting, stages.layouts.train(meshes[cut]), origin.model, length)
        for cut in sorted(meshes)
        for length in lengths
    )
    return tuple(dict.fromkeys(choices))


def _kernel_notes(
    config: Config, stages: Stages, origin: Origin, attention: tuple[Choice, ...]
) -> list[str]:
    """Returns what a user should know of kernels and precision at the start of a run."""
    notes = [f"attention in training: {choice}" for choice in attention]
    if origin.model.num_experts:
        platform = str(stages.layouts.train(stages.problem.meshes("train")[0]).platform)
        notes.append(f"products of experts: {products_in_words(platform, origin.model)}")
    if not config.plays:
        return notes
    layout, rollout = stages.layouts.rollout(stages.problem.meshes("rollout")[0]), config.rollout
    dtype = rollout.computes_as(config.model.compute_dtype)
    played = dataclasses.replace(origin.model, compute_dtype=dtype)
    choice = choose_pages_kernel(rollout.attention, layout, played, rollout.tokens_a_page)
    pages = pages_in_words(choice, str(layout.platform), rollout.tokens_a_page)
    notes.append(f"attention in the rollout: {pages}")
    if not config.rollout.is_precise_as(config.model.compute_dtype):
        notes.append(f"rollout in another precision than training: {_precision(config)}")
    return notes


def _all_choices(
    config: Config, played: Played, renderer: ChatRenderer
) -> tuple[tuple[int, ...], ...]:
    """Returns the ids of all choices of a turn; none where a reply may be anything.

    Raises ValueError where one is longer than a turn.
    """
    environment, most = played.make(**played.first_args), config.rollout.max_turn_tokens
    choices = environment.all_choices() if isinstance(environment, Chooses) else ()
    if not choices:
        return ()
    replies = Conversation(renderer).choices(choices)
    longest = max(map(len, replies))
    if longest > most:
        raise InputError(
            f"a choice of config.env.name {config.env.name!r} takes {longest} tokens with its end "
            f"of turn; config.rollout.max_turn_tokens is {most}: raise it"
        )
    return replies


def _precision(config: Config) -> str:
    """Returns the precision of the rollout, and what the loss does about it, in words."""
    rollout, cap = config.rollout, config.importance_cap
    dtype = rollout.computes_as(config.model.compute_dtype)
    stored = {"weights": rollout.weight_dtype, "KV cache": rollout.kv_dtype}
    weights = "".join(f"{t} {what}, " for what, t in stored.items() if t != "compute")
    correction = f"importance weights up to {cap:g}" if cap else "no correction of the loss"
    return f"{weights}{dtype} against {config.model.compute_dtype}; {correction}"
