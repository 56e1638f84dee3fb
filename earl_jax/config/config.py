# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The stages' settings together, and the rules between them.

Each setting keeps its section's rules, agrees with the others, and has an effect in this run.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.algorithms.algorithms import ALGORITHMS, find_algorithm
from earl_jax.algorithms.requirements import Networks, networks_of
from earl_jax.config.idle import check_effects
from earl_jax.config.sections import (
    CheckpointConfig,
    DevicesConfig,
    DispatchConfig,
    EvalConfig,
    LogConfig,
)
from earl_jax.engine.config import Sampling
from earl_jax.envs.environment import Chooses, OffersExamples
from earl_jax.envs.examples import corpus
from earl_jax.envs.registry import EnvConfig, Played, open_environment
from earl_jax.envs.tasks import TasksConfig
from earl_jax.envs.text.chat_dataset import texts_of
from earl_jax.envs.text.conversation import ChatConfig
from earl_jax.launch.distributed import DistributedConfig
from earl_jax.models.checkpoints.families.table import family_of
from earl_jax.models.checkpoints.hf_read import Checkpoint, open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.config import MODEL_SETTINGS, ModelConfig
from earl_jax.models.presets import preset_named
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.selector.config import SelectorConfig
from earl_jax.settings.errors import InputError, RunError, in_words
from earl_jax.train.config import TrainConfig

CORPUS_EPISODES = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run of `num_steps` RL steps.

    `seed` determines everything random. Runs of one `seed` are equal where plans do not follow
    observed speeds (config.selector.table).

    `algorithm` is the name of one, such as "reinforce", "grpo" or "dapo" (all are in
    docs/concepts/algorithms.md), or `module:name` of an `Algorithm` of one's own.
    `algorithm_args` are its settings, a record of the type of `Algorithm.settings`. `init_from`
    (--init_from) is "WORKDIR" or "WORKDIR@STEP": a new run begins with the weights of that run's
    checkpoint, the newest unless a step is given, and with nothing else of it.

    `reference_from` makes a teacher the reference policy of the algorithm: a run of the same model,
    "WORKDIR" or "WORKDIR@STEP", or a checkpoint of `transformers`, as config.model.path, of any
    size and with the same tokenizer. "": the reference is the policy that the run began with; of
    adapters it is their base.
    """

    num_steps: int = 100
    seed: int = 0
    init_from: str = ""
    reference_from: str = ""
    algorithm: str = "grpo"
    algorithm_args: Any = ALGORITHMS["grpo"].settings
    devices: DevicesConfig = DevicesConfig()
    distributed: DistributedConfig = DistributedConfig()
    env: EnvConfig = EnvConfig()
    tasks: TasksConfig = TasksConfig()
    chat: ChatConfig = ChatConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    selector: SelectorConfig = SelectorConfig()
    dispatch: DispatchConfig = DispatchConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    def validate(self, *, learns: bool = True) -> None:
        """Raises ValueError naming the field that breaks a rule, or has no effect in this run.

        Without `learns` rules of what is learnt from episodes are left out: they are evaluated.
        """
        if self.num_steps < 1:
            raise InputError(f"config.num_steps is {self.num_steps}; it must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"config.seed is {self.seed}; it must lie in [0, 2**31)")
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if dataclasses.is_dataclass(value) and section.name != "algorithm_args":
                typing.cast(Any, value).validate()
        per_update, size = self.rollout.episodes_per_step, self.rollout.group_size
        if self.plays and per_update % size:
            raise InputError(
                f"config.rollout.episodes_per_step is {per_update}; it must be a multiple of "
                f"config.rollout.group_size ({size})"
            )
        if per_update % self.train.micro_batches:
            raise InputError(
                f"config.train.micro_batches is {self.train.micro_batches}, which does not divide "
                f"config.rollout.episodes_per_step ({per_update})"
            )
        self._check_algorithm()
        check_effects(self, self.defaults())
        self._check_mini_batches()
        self._check_split()
        self._check_parts()
        self._check_environment(learns)
        if learns:
            self._check_ratio()
        if self.checkpoint.export is True and not self.model.path:
            try:
                family_of(self.model)
            except ValueError as error:
                raise InputError(
                    f"config.checkpoint.export is True with no config.model.path, and {error}"
                ) from error

    def defaults(self) -> "Config":
        """Returns the defaults of a run of this model and algorithm."""
        settings = find_algorithm(self.algorithm).settings
        return Config(model=preset_named(self.model.preset), algorithm_args=settings)

    def make_algorithm(self) -> Algorithm:
        """Returns the algorithm with its settings. Raises ValueError where there is none."""
        return dataclasses.replace(find_algorithm(self.algorithm), settings=self.algorithm_args)

    @property
    def networks(self) -> Networks:
        """The networks that the trainer holds beside the policy.

        Raises ValueError for a teacher whose config.json cannot be read.
        """
        has_base = self.train.lora.rank > 0 and not self.reference_from
        networks = networks_of(self.make_algorithm(), has_base=has_base)
        teacher = find_teacher(self.reference_from) if networks.reference else None
        if teacher is None:
            return networks
        model = dataclasses.replace(teacher.model, compute_dtype=self.model.compute_dtype)
        return networks._replace(teacher=(model, teacher.vocab_size))

    def _check_algorithm(self) -> None:
        """Raises ValueError unless there is such an algorithm, with such settings."""
        if not self.plays and not self.train.sft_path:
            raise InputError(
                "config.algorithm is 'sft' with no config.train.sft_path; a run's episodes are the "
                "policy's own samples, and it would learn to repeat them whatever their reward: "
                "set config.train.sft_steps, for supervised updates on the environment's examples, "
                "and take an algorithm of rewards, such as 'grpo'; or name a file of conversations"
            )
        if self.algorithm == "distillation" and not self.reference_from:
            raise InputError(
                "config.algorithm is 'distillation' with no config.reference_from; the teacher "
                "would be the policy that the run begins with: name a run or a checkpoint there"
            )
        algorithm = find_algorithm(self.algorithm)
        kind = type(algorithm.settings)
        if not isinstance(self.algorithm_args, kind):
            raise InputError(
                f"config.algorithm_args is {self.algorithm_args!r}; for config.algorithm = "
                f"{self.algorithm!r} it must be of type {kind.__name__}"
            )
        if hasattr(self.algorithm_args, "validate"):
            self.algorithm_args.validate("config.algorithm_args")
        own = getattr(self.algorithm_args, "min_group_size", 1)
        least = max(algorithm.min_group_size, own)
        if self.rollout.group_size < least:
            raise InputError(
                f"config.algorithm is {self.algorithm!r} with config.rollout.group_size of "
                f"{self.rollout.group_size}; it compares the episodes of a group: set "
                f"config.rollout.group_size to {least} or more"
            )
        if algorithm.is_off_policy and self.train.correction not in ("auto", "none"):
            raise InputError(
                f"config.train.correction is {self.train.correction!r} with config.algorithm "
                f"{self.algorithm!r}, whose loss is right whoever sampled, and would be weighted "
                "wrongly: set config.train.correction to 'none' or 'auto'"
            )
        by_episode = algorithm.is_off_policy or algorithm.critic or "groups" in algorithm.all_needs
        if self.asynchrony.rule == "mask" and by_episode:
            whole = "sequences" if algorithm.is_off_policy else "episodes"
            raise InputError(
                "config.asynchrony.rule is 'mask', which takes the overdue tokens out of an "
                f"episode, with config.algorithm {self.algorithm!r}, which computes with whole "
                f"{whole}: set config.asynchrony.rule to 'in_order', 'wait' or 'drop'"
            )

    @property
    def plays(self) -> bool:
        """False for a run of supervised updates alone."""
        return self.algorithm != "sft"

    def open_environment(self) -> Played:
        """Returns the environment of this run, and its tasks."""
        num_tasks = self.rollout.episodes_per_step // self.rollout.group_size
        return open_environment(self.env, self.tasks, seed=self.seed, num_tasks=num_tasks)

    def row_batches(self, num_players: int) -> int:
        """Returns the most steps' episodes that have rows at once where so many processes play."""
        return self.asynchrony.row_batches + self.rollout.has_queue(num_players)

    def corpus(self) -> list[str]:
        """Returns the text that the tokenizer of a run without a checkpoint is trained on.

        Raises ValueError where the environment, which tells it, returns what it must not; RunError
        where it raises.
        """
        path, played = self.train.sft_path, self.open_environment()
        conversations = texts_of(path) if path else []
        try:
            return conversations + corpus(
                played.make,
                played.tasks,
                num_steps=self.num_steps,
                num_episodes=CORPUS_EPISODES,
                seed=0,
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own environment
            kind = InputError if isinstance(error, InputError) else RunError
            raise kind(
                f"an episode of config.env.name {self.env.name!r}, whose text the tokenizer is "
                f"trained on, failed: {in_words(error)}"
            ) from error

    def _check_environment(self, learns: bool) -> None:
        """Raises ValueError unless the environment can be made and has the methods needed."""
        played = self.open_environment()
        environment = played.make(**played.first_args)
        if not learns:
            return
        for name in ("sft_steps", "sft_weight"):
            value = getattr(self.train, name)
            has_examples = self.train.sft_path or isinstance(environment, OffersExamples)
            if value and not has_examples:
                raise InputError(
                    f"config.train.{name} is {value}, and config.env.name {self.env.name!r} offers "
                    "no examples to learn from (a method example_reply); set it to 0, or name a "
                    "file of conversations in config.train.sft_path"
                )
        chooses = isinstance(environment, Chooses) and len(environment.all_choices()) > 0
        if chooses and self.train.ratio == "behaviour":
            raise InputError(
                f"config.env.name {self.env.name!r} limits replies to choices (mask_illegal) with "
                "config.train.ratio 'behaviour'; the trainer scores under all tokens, so what is "
                "not allowed would look like a change of the policy: set config.train.ratio to "
                "'model'"
            )

    def _check_ratio(self) -> None:
        """Raises ValueError where the trainer scores tokens under another distribution."""
        rollout = self.rollout
        if self.train.ratio == "model":
            return
        for field in ("top_k", "top_p", "min_p"):
            value = getattr(rollout, field)
            if value != getattr(Sampling, field):
                raise InputError(
                    f"config.rollout.{field} is {value} with config.train.ratio 'behaviour'; the "
                    "trainer scores under all tokens, so what is cut off would look like a change "
                    "of the policy: set config.train.ratio to 'model'"
                )

    def _check_mini_batches(self) -> None:
        """Raises ValueError where a step's groups cannot be dealt out to as many updates."""
        number, rollout = self.train.mini_batches, self.rollout
        num_groups = rollout.episodes_per_step // rollout.group_size
        if num_groups % number:
            raise InputError(
                f"config.train.mini_batches is {number}, which does not divide the {num_groups} "
                "groups of a step (config.rollout.episodes_per_step / group_size)"
            )
        if number > 1 and self.asynchrony.parts > 1:
            raise InputError(
                f"config.train.mini_batches is {number} with config.asynchrony.parts of "
                f"{self.asynchrony.parts}; streamed parts add up to one update, and mini-batches "
                "are dealt out when all episodes are finished: set one of them to 1"
            )

    def _check_split(self) -> None:
        """Raises ValueError where the selector is to split devices whose stages take turns."""
        if self.devices.num_rollout == "auto" and not self.asynchrony.is_on:
            raise InputError(
                "config.devices.num_rollout is 'auto' in a synchronous run, whose stages take "
                "turns, so that all devices had better do both: set it to 0, or set "
                "config.asynchrony.max_staleness or parts"
            )

    def _check_parts(self) -> None:
        """Raises ValueError where a step's groups cannot go to the trainer one after the other."""
        parts, rollout = self.asynchrony.parts, self.rollout
        if parts == 1:
            return
        given = f"config.asynchrony.parts is {parts}"
        num_groups = rollout.episodes_per_step // rollout.group_size
        if num_groups % parts:
            raise InputError(
                f"{given}, which does not divide the {num_groups} groups of a step "
                "(config.rollout.episodes_per_step / group_size)"
            )
        if not self.devices.are_apart:
            raise InputError(
                f"{given}, and rollouts and training share their devices; set "
                "config.devices.num_rollout, so that the trainer can work while episodes are played"
            )
        if not self.make_algorithm().streams:
            raise InputError(
                f"{given}, and the advantages of config.algorithm {self.algorithm!r} are known "
                "when all episodes of a step are finished; take one that compares within groups, "
                "such as 'grpo', 'rloo' or 'dapo', or set it to 1"
            )

    @property
    def importance_cap(self) -> float:
        """The cap at which the loss truncates importance weights; 0 without a correction."""
        same = self.rollout.is_precise_as(self.model.compute_dtype)
        same = same and not self.asynchrony.max_staleness
        off = self.train.correction == "none" or (self.train.correction == "auto" and same)
        off = off or self.make_algorithm().is_off_policy or not self.plays
        return 0.0 if off else self.train.importance_cap

    @property
    def train_temperature(self) -> float:
        """The temperature that the trainer scores tokens at."""
        has_ratio = self.plays and self.train.ratio == "behaviour"
        return self.rollout.temperature if has_ratio else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the configuration for config.json, without the `distributed` section."""
        settings = dataclasses.asdict(self)
        del settings["distributed"]
        settings["env"]["args"] = self.env.all_args
        settings["model"] = {name: settings["model"][name] for name in MODEL_SETTINGS}
        return settings


def find_teacher(text: str) -> Checkpoint | None:
    """Returns the checkpoint of `transformers` that config.reference_from names; None for a run.

    Raises ValueError for one that cannot be read.
    """
    # A run's checkpoints need not be there any more; a model's config.json has no algorithm.
    if not text or _is_run(split_source(text)[0]):
        return None
    return open_checkpoint(find_folder(text, "config.reference_from"))


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "checkpoints").is_dir() or "algorithm" in json.loads(
            (folder / "config.json").read_text()
        )
    except (OSError, ValueError, TypeError):
        return False


def split_source(text: str) -> tuple[Path, int | None]:
    """Returns the workdir and the step of "WORKDIR@STEP"; None of "WORKDIR"."""
    name, at, number = text.rpartition("@")
    has_step = bool(at) and number.isdigit() and not Path(text).is_dir()
    return Path(name if has_step else text), int(number) if has_step else None
