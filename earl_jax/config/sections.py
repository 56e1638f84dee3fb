# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The stages' settings together, and the rules between them.

Each setting keeps its section's rules, agrees with the others, and has an effect in this run.
"""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from earl_jax.algorithms.algorithm import Algorithm, keep_every_group
from earl_jax.algorithms.algorithms import ALGORITHMS, find_algorithm
from earl_jax.algorithms.requirements import Networks, networks_of
from earl_jax.engine.config import Sampling
from earl_jax.envs.conversation import ChatConfig
from earl_jax.envs.environment import Chooses, OffersExamples
from earl_jax.envs.examples import corpus
from earl_jax.envs.registry import EnvConfig, Played, open_environment
from earl_jax.envs.tasks import TasksConfig
from earl_jax.launch.distributed import DistributedConfig
from earl_jax.models.checkpoints.families import family_of
from earl_jax.models.checkpoints.hf_read import Checkpoint, open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.config import MODEL_SETTINGS, ModelConfig
from earl_jax.models.presets import preset_named
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.selector.config import SelectorConfig
from earl_jax.settings.choices import check_choices
from earl_jax.settings.errors import InputError, RunError
from earl_jax.train.config import TrainConfig

CORPUS_EPISODES = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The devices of a run.

    `platform` "auto" takes JAX's choice; on CPUs there are `num_cpu_devices` virtual devices. The
    first `num_rollout` devices of all processes play episodes and the others train; with 0 all
    devices do both in turn. Every process that plays must have the same number of such devices.
    With "auto", in asynchronous runs, the selector chooses the number so that the slower of the two
    stages is as fast as possible, and moves both stages while the run goes on where another number
    is faster by more than `selector.hysteresis` with the move paid for.
    """

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    num_cpu_devices: int = 8
    num_rollout: int | Literal["auto"] = 0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.devices")
        if self.num_cpu_devices < 1:
            raise InputError(
                f"config.devices.num_cpu_devices is {self.num_cpu_devices}; it must be at least 1"
            )
        if self.num_rollout != "auto" and self.num_rollout < 0:
            raise InputError(
                f"config.devices.num_rollout is {self.num_rollout}; it must be at least 0 (0: all "
                "devices play and train), or 'auto'"
            )

    @property
    def are_apart(self) -> bool:
        """True if no device both plays and trains."""
        return self.num_rollout != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Settings of moves of arrays from layout to layout.

    `forbid_host_bytes` "auto": the run ends if experience or weights pass through the host, except
    between processes that have no direct link; these bytes are reported at the start and counted.
    True: a run without a direct link does not start. False: bytes are only counted. `chunk_bytes`
    bounds the bytes in flight on a device while weights, optimiser state or KV caches move; 0: a
    move goes all at once, which is faster.
    """

    forbid_host_bytes: Literal["auto", True, False] = "auto"
    chunk_bytes: int = 0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.dispatch")
        if self.chunk_bytes < 0:
            raise InputError(
                f"config.dispatch.chunk_bytes is {self.chunk_bytes}; give bytes, or 0 for no bound"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `every_steps` steps and at the end; the newest `keep` are kept.

    `export` writes the policy too, as a folder that `transformers` loads, in the type of the
    checkpoint in config.model.path, fp32 where there is none. "auto": at the end of a run that has
    such a path. True: with every checkpoint as well, except one caused by a signal, which must be
    quick; the newest `keep` exports stay, and training waits while one is written. Adapters
    (config.train.lora) are written to a folder for PEFT beside it.
    """

    every_steps: int = 50
    keep: int = 3
    export: Literal["auto", True, False] = "auto"

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.checkpoint")
        if self.every_steps < 1 or self.keep < 2:
            raise InputError(
                f"config.checkpoint.every_steps is {self.every_steps} and config.checkpoint.keep "
                f"is {self.keep}; at least 1 and 2: the one before the newest is the spare"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation episodes: `games` every `every_steps` steps, `final_games` at the end.

    `temperature`, `top_k`, `top_p` and `min_p` are settings of the sampling (see `Sampling`).
    `averaged`: the weights that are evaluated, exported and served, and that another run's
    --init_from begins with, are the moving average (config.train.ema_decay), not the trained ones.
    """

    every_steps: int = 50
    games: int = 128
    final_games: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    averaged: bool = False

    @property
    def sampling(self) -> Sampling:
        """The sampling of evaluation episodes."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        for field in ("games", "final_games"):
            if getattr(self, field) < 1:
                raise InputError(
                    f"config.eval.{field} is {getattr(self, field)}; it must be at least 1"
                )
        if self.every_steps < 1:
            raise InputError(
                f"config.eval.every_steps is {self.every_steps}; it must be at least 1"
            )
        self.sampling.validate("config.eval.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of the log: intervals in steps.

    Episodes are written of the first step, of the last and of every `trajectories_every_steps`-th;
    report.html is made anew at every `report_every_steps`-th and at the end. `tensorboard` writes
    the metrics for TensorBoard too; it needs the extra of that name.
    """

    trajectories_every_steps: int = 10
    report_every_steps: int = 25
    tensorboard: bool = False

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        if self.trajectories_every_steps < 1 or self.report_every_steps < 1:
            raise InputError(
                "config.log.trajectories_every_steps and config.log.report_every_steps must be at "
                f"least 1; they are {self.trajectories_every_steps} and {self.report_every_steps}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run of `num_steps` RL steps; `seed` determines everything random.

    `algorithm` is the name of one, such as "reinforce", "grpo" or "dapo" (all are in
    docs/concepts/algorithms.md), or `module:name` of an `Algorithm` of one's own.
    `algorithm_args` are its settings, a record of the type of `Algorithm.settings`. `init_from`
    (--init_from) is "WORKDIR" or "WORKDIR@STEP": a new run begins with the weights of that run's
    checkpoint, the newest unless a step is given, and with nothing else of it.

    `reference_from` makes a teacher the reference policy of the algorithm: a run of the same model,
    "WORKDIR" or "WORKDIR@STEP", or a checkpoint of `transformers`, as config.model.path, of any
    size and with the same tokenizer. "": the reference is the policy that the run began with.
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

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule, or has no effect in this run."""
        if self.num_steps < 1:
            raise InputError(f"config.num_steps is {self.num_steps}; it must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"config.seed is {self.seed}; it must lie in [0, 2**31)")
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if dataclasses.is_dataclass(value) and section.name != "algorithm_args":
                typing.cast(Any, value).validate()
        per_update = self.rollout.episodes_per_step
        if per_update % self.train.micro_batches:
            raise InputError(
                f"config.train.micro_batches is {self.train.micro_batches}, which does not divide "
                f"config.rollout.episodes_per_step ({per_update})"
            )
        self._check_algorithm()
        self._check_mini_batches()
        self._check_split()
        self._check_parts()
        self._check_environment()
        self._check_ratio()
        if self.checkpoint.export is True and not self.model.path:
            try:
                family_of(self.model)
            except ValueError as error:
                raise InputError(
                    f"config.checkpoint.export is True with no config.model.path, and {error}"
                ) from error
        _check_effects(self)

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
        if self.algorithm == "sft":
            raise InputError(
                "config.algorithm is 'sft'; a run's episodes are the policy's own samples, and it "
                "would learn to repeat them whatever their reward: set config.train.sft_steps, for "
                "supervised updates on the environment's examples, and take an algorithm of "
                "rewards, such as 'grpo'"
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
        if self.rollout.group_size < algorithm.min_group_size:
            raise InputError(
                f"config.algorithm is {self.algorithm!r} with config.rollout.group_size of "
                f"{self.rollout.group_size}; it compares the episodes of a group: set "
                f"config.rollout.group_size to {algorithm.min_group_size} or more"
            )
        if algorithm.is_off_policy and self.train.correction not in ("auto", "none"):
            raise InputError(
                f"config.train.correction is {self.train.correction!r} with config.algorithm "
                f"{self.algorithm!r}, whose loss is right whoever sampled, and would be weighted "
                "wrongly: set config.train.correction to 'none' or 'auto'"
            )

    def open_environment(self) -> Played:
        """Returns the environment of this run, and its tasks."""
        num_tasks = self.rollout.episodes_per_step // self.rollout.group_size
        return open_environment(self.env, self.tasks, seed=self.seed, num_tasks=num_tasks)

    def row_batches(self, num_players: int) -> int:
        """Returns the most steps' episodes that have rows at once where so many processes play."""
        return self.asynchrony.row_batches + self.rollout.has_queue(num_players)

    def corpus(self) -> list[str]:
        """Returns the text that the tokenizer of a run without a checkpoint is trained on.

        Raises RunError where the environment, which tells it, raises.
        """
        played = self.open_environment()
        try:
            return corpus(
                played.make,
                played.tasks,
                num_steps=self.num_steps,
                num_episodes=CORPUS_EPISODES,
                seed=0,
            )
        except Exception as error:  # noqa: BLE001 - a user's own environment
            raise RunError(
                f"an episode of config.env.name {self.env.name!r}, whose text the tokenizer is "
                f"trained on, failed: {type(error).__name__}: {error}"
            ) from error

    def _check_environment(self) -> None:
        """Raises ValueError unless the environment can be made and has the methods needed."""
        played = self.open_environment()
        environment = played.make(**played.first_args)
        for name in ("sft_steps", "sft_weight"):
            value = getattr(self.train, name)
            if value and not isinstance(environment, OffersExamples):
                raise InputError(
                    f"config.train.{name} is {value}, and config.env.name {self.env.name!r} offers "
                    "no examples to learn from (a method example_reply); set it to 0"
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
        off = off or self.make_algorithm().is_off_policy
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


def find_teacher(text: str) -> Checkpoint | None:
    """Returns the checkpoint of `transformers` that config.reference_from names; None for a run.

    Raises ValueError for one that cannot be read.
    """
    if not text or (split_source(text)[0] / "checkpoints").is_dir():
        return None
    return open_checkpoint(find_folder(text, "config.reference_from"))


def split_source(text: str) -> tuple[Path, int | None]:
    """Returns the workdir and the step of "WORKDIR@STEP"; None of "WORKDIR"."""
    name, at, number = text.rpartition("@")
    has_step = bool(at) and number.isdigit() and not Path(text).is_dir()
    return Path(name if has_step else text), int(number) if has_step else None


# A setting that may do nothing in a run: whether it does nothing, its path, and why.
_Idle = tuple[bool, str, str]


def _check_effects(config: Config) -> None:
    """Raises ValueError for a setting that differs from its default and has no effect here."""
    for path, _, reason in settings_without_effect(config):
        raise InputError(
            f"config.{path} = {_get(config, path)!r} has no effect in this run, because {reason}; "
            "remove it, or change the other"
        )


def settings_without_effect(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yields the settings that differ from their defaults and have no effect in this run.

    Each with its default, and the reason in words.
    """
    settings = find_algorithm(config.algorithm).settings
    defaults = Config(model=preset_named(config.model.preset), algorithm_args=settings)
    for is_idle, path, reason in (
        *_idle_model(config),
        *_idle_rollout(config),
        *_idle_training(config),
    ):
        if is_idle and _get(config, path) != _get(defaults, path):
            yield path, _get(defaults, path), reason


def _idle_model(config: Config) -> Iterator[_Idle]:
    model = config.model
    for name in MODEL_SETTINGS:
        if name not in ("path", "compute_dtype"):
            yield model.path != "", f"model.{name}", "config.model.path gives the model"
    for name in ("experts_per_token", "expert_ffn_size"):
        yield model.num_experts == 0, f"model.{name}", "config.model.num_experts is 0"
    yield model.num_experts > 0, "model.ffn_size", "experts are of model.expert_ffn_size"


def _idle_rollout(config: Config) -> Iterator[_Idle]:
    apart = "config.devices.num_rollout gives the trainer devices of its own"
    yield config.devices.are_apart, "selector.offload", apart
    ours = "without config.model.path the chat template is ours, which only appends"
    yield config.model.path == "", "chat.history", ours
    platform = config.devices.platform
    elsewhere = f"config.devices.platform is {platform!r}"
    yield platform in ("gpu", "tpu"), "devices.num_cpu_devices", elsewhere
    in_turn, asynchrony = "config.asynchrony.max_staleness is 0", config.asynchrony
    yield asynchrony.max_staleness == 0, "asynchrony.kv", in_turn
    is_in_turn = asynchrony.max_staleness == asynchrony.refill == 0
    yield is_in_turn, "asynchrony.rule", f"{in_turn} and config.asynchrony.refill too"
    keeps_all = f"config.algorithm {config.algorithm!r} keeps every group"
    is_kept = config.make_algorithm().keep_group is keep_every_group
    yield is_kept, "asynchrony.refill", keeps_all
    no_events = "a synchronous run has no events"
    yield not config.asynchrony.is_on, "asynchrony.checksums", no_events


def _idle_training(config: Config) -> Iterator[_Idle]:
    train, model = config.train, config.model
    # The model of a path is known later: run/ checks it.
    without_experts = model.num_experts == 0 and not model.path
    yield without_experts, "train.balance_coefficient", "config.model.num_experts is 0"
    chosen = f"config.train.optimizer is {train.optimizer!r}"
    for name in ("adam_b1", "adam_b2", "momentum_dtype"):
        yield train.optimizer == "adafactor", f"train.{name}", chosen
    yield train.optimizer in ("adafactor", "lion"), "train.adam_eps", chosen
    constant = "config.train.schedule is 'constant'"
    yield train.schedule == "constant", "train.final_learning_rate", constant
    # Without a correction, a rollout of another precision has ratios that are not 1 from the start.
    # So has one of older weights.
    same_policy = config.rollout.is_precise_as(model.compute_dtype)
    same_policy = same_policy and not config.asynchrony.max_staleness
    is_one_update = train.epochs == train.mini_batches == 1
    one_update = "config.train.epochs is 1 and config.train.mini_batches too"
    never_clips = is_one_update and (config.importance_cap > 0 or same_policy)
    for name in ("clip_low", "clip_high", "dual_clip") if config.algorithm in ALGORITHMS else ():
        if hasattr(config.algorithm_args, name):
            yield never_clips, f"algorithm_args.{name}", one_update
    for name, reason in getattr(config.algorithm_args, "idle", tuple)():
        yield True, f"algorithm_args.{name}", reason
    yield config.importance_cap == 0, "train.importance_cap", "there is no correction here"
    yield from _idle_proximal(config, is_one_update=is_one_update)
    yield is_one_update and same_policy, "train.ess_scaling", one_update
    for name in ("alpha", "targets", "base_dtype"):
        yield train.lora.rank == 0, f"train.lora.{name}", "config.train.lora.rank is 0"
    value_clip = config.algorithm in ALGORITHMS and hasattr(config.algorithm_args, "value_clip")
    yield value_clip and is_one_update, "algorithm_args.value_clip", one_update
    for name in ("learning_rate", "pretrain_steps"):
        none = f"config.algorithm {config.algorithm!r} has no critic"
        yield config.make_algorithm().critic is None, f"train.critic.{name}", none
    no_average = "config.train.ema_decay is 0"
    yield train.ema_decay == 0, "eval.averaged", no_average
    no_reference = f"config.algorithm {config.algorithm!r} needs no reference with its settings"
    yield "reference" not in config.make_algorithm().all_needs, "reference_from", no_reference
    for name in ("sft_updates", "sft_learning_rate"):
        none = "config.train.sft_steps is 0"
        yield train.sft_steps == 0, f"train.{name}", none


def _idle_proximal(config: Config, *, is_one_update: bool) -> Iterator[_Idle]:
    no_correction = config.importance_cap == 0
    algorithm = config.make_algorithm()
    is_interpolated = "proximal" in algorithm.all_needs and not algorithm.scores_first_policy
    no_correction = no_correction and not is_interpolated
    one_update = "the only update of a step has these log-probs without a pass: "
    one_update += "config.train.epochs is 1 and config.train.mini_batches too"
    newest = "the newest weights sampled every token: config.asynchrony.max_staleness is 0"
    yield no_correction, "train.proximal", "there is no correction here"
    yield is_one_update, "train.proximal", one_update
    yield config.asynchrony.max_staleness == 0, "train.proximal", newest


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config
