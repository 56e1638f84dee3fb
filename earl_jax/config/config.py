# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The stages' settings together.

Each setting keeps its section's rules, agrees with the others (combinations.py), and has an effect
in this run (idle.py).
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.algorithms.algorithms import ALGORITHMS, find_algorithm
from earl_jax.algorithms.requirements import Networks, networks_of
from earl_jax.config.combinations import OF_LEARNING, OF_MODEL, OF_SETTINGS, check
from earl_jax.config.idle import check_effects
from earl_jax.config.sections import (
    CheckpointConfig,
    DevicesConfig,
    EvalConfig,
    LogConfig,
)
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
from earl_jax.settings.errors import InputError, RunError, check_bounds, in_words
from earl_jax.train.config import TrainConfig

CORPUS_EPISODES = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run.

    `num_steps` is the number of RL steps, of which each plays episodes and trains on them; with
    config.algorithm "sft" that of updates.

    `seed` determines everything random. Runs of one `seed` are equal where plans do not follow
    observed speeds (config.selector.table).

    `algorithm` is the name of one, such as "reinforce", "grpo" or "dapo" (all are in
    docs/concepts/algorithms.md), or `module:name` of an `Algorithm` of one's own.
    `algorithm_args` are its settings, a record of the type of `Algorithm.settings`. `init_from`
    (--init_from) is "WORKDIR" or "WORKDIR@STEP": a new run begins with the weights of that run's
    checkpoint, the newest unless a step is given, and with nothing else of it.

    `reference_from` makes a teacher the reference policy of the algorithm: a run of the same model,
    "WORKDIR" or "WORKDIR@STEP", or a checkpoint of `transformers`, as config.model.path, of any
    size and with the same tokenizer. "": the reference is the policy that the run began with, or
    that the supervised steps of its warm start led to (train.sft_steps); of adapters it is their
    base.
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
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    def validate(self, *, learns: bool = True) -> None:
        """Raises ValueError naming the field that breaks a rule, or has no effect in this run.

        Without `learns` rules of what is learnt from episodes are left out: they are evaluated.
        """
        check_bounds(self, "config", {"num_steps": (1, None)})
        if not 0 <= self.seed < 2**31:
            raise InputError(f"config.seed is {self.seed}; it must lie in [0, 2**31)")
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if section.name != "algorithm_args" and hasattr(value, "validate"):
                value.validate()
        self._check_algorithm()
        check(OF_SETTINGS, self)
        check_effects(self, self.defaults())
        # The model of a path is known later.
        if not self.model.path:
            check(OF_MODEL, self)
        played = self.open_environment()
        environment = played.make(**played.first_args)
        if learns:
            check(OF_LEARNING, self, environment)

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
        kind = type(find_algorithm(self.algorithm).settings)
        if not isinstance(self.algorithm_args, kind):
            raise InputError(
                f"config.algorithm_args is {self.algorithm_args!r}; for config.algorithm = "
                f"{self.algorithm!r} it must be of type {kind.__name__}"
            )
        if hasattr(self.algorithm_args, "validate"):
            self.algorithm_args.validate("config.algorithm_args")

    @property
    def plays(self) -> bool:
        """False for a run of supervised updates alone."""
        return self.algorithm != "sft"

    @property
    def num_groups(self) -> int:
        """The groups of a step."""
        return self.rollout.episodes_per_step // self.rollout.group_size

    @property
    def min_group_size(self) -> int:
        """The least config.rollout.group_size of the algorithm with its settings."""
        own = getattr(self.algorithm_args, "min_group_size", 1)
        return max(find_algorithm(self.algorithm).min_group_size, own)

    @property
    def export_obstacle(self) -> str:
        """The reason why `transformers` has no model with layers as config.model; "": it has."""
        try:
            family_of(self.model)
        except ValueError as error:
            return str(error)
        return ""

    def open_environment(self) -> Played:
        """Returns the environment of this run, and its tasks."""
        return open_environment(self.env, self.tasks, seed=self.seed, num_tasks=self.num_groups)

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
        return self.rollout.temperature if self.train.ratio == "behaviour" else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the configuration for config.json, without the `distributed` section."""
        settings = dataclasses.asdict(self)
        del settings["distributed"]
        settings["env"]["args"] = self.env.all_args
        settings["model"] = {name: settings["model"][name] for name in MODEL_SETTINGS}
        return settings


def with_setting(config: Any, names: Sequence[str], value: Any) -> Any:
    """Returns the config with one value replaced; `names` are those of its path. Checks nothing."""
    name, *rest = names
    value = with_setting(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


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
