# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of devices, checkpoints, evaluation and logs."""

import dataclasses
from typing import Literal

from earl_jax.engine.config import Sampling
from earl_jax.settings.errors import InputError, check_bounds, check_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The devices of a run.

    `platform` "auto" takes JAX's choice. `num_cpu_devices` is the number of virtual devices on
    CPUs. The first `num_rollout` devices of all processes play episodes and the others train; with
    0 all devices do both in turn. Every process that plays must have the same number of such
    devices. With "auto", in asynchronous runs, the selector chooses the number so that the slower
    of the two stages is as fast as possible, and moves both stages while the run goes on where
    another number is faster by more than 10 % with the move paid for. Of several processes each
    gives as many of its devices.
    """

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    num_cpu_devices: int = 8
    num_rollout: int | Literal["auto"] = 0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.devices")
        check_bounds(self, "config.devices", {"num_cpu_devices": (1, None)})
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
class CheckpointConfig:
    """Settings of checkpoints.

    A checkpoint is saved every `every_steps` steps, and at the end. The newest `keep` checkpoints
    are kept. Beside the newest the `keep_best` checkpoints are kept whose evaluations had the
    highest mean rewards, or with config.algorithm "sft" the lowest held-out loss; a checkpoint
    without an evaluation of its step counts as the worst. Checkpoints of every
    `keep_every_steps`-th step are kept too; 0: none.

    `export` writes the policy too, as a folder that `transformers` loads, in the type of the
    checkpoint in config.model.path, fp32 where there is none. "auto": at the end of a run that has
    such a path. True: with every checkpoint as well, except one caused by a signal, which must be
    quick; the newest config.checkpoint.keep of them stay, and training waits for each. Adapters
    (config.train.lora) are written to a folder for PEFT beside it.
    """

    every_steps: int = 50
    keep: int = 3
    keep_best: int = 0
    keep_every_steps: int = 0
    export: Literal["auto", True, False] = "auto"

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.checkpoint")
        if self.every_steps < 1 or self.keep < 2:
            raise InputError(
                f"config.checkpoint.every_steps is {self.every_steps} and config.checkpoint.keep "
                f"is {self.keep}; at least 1 and 2: the one before the newest is the spare"
            )
        more = {"keep_best": (0, None), "keep_every_steps": (0, None)}
        check_bounds(self, "config.checkpoint", more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of evaluations.

    A run is evaluated at step 0, every `every_steps` steps and at the end. `games` is the number of
    tasks; with 0 a run plays none, at the end neither. `final_games` is the number of tasks at the
    end.

    Each task is played `samples` times. With several the summary also has the expected best reward
    of two, four ... samples of a task (pass@k where rewards are 0 and 1).

    `sft_path` is a JSONL file of conversations as config.train.sft_path, of which nothing is
    learnt: each evaluation scores them too (docs/howto/conversations.md).

    `temperature` divides logits; 0 takes the likeliest token. `top_k` keeps the k likeliest tokens;
    0: all. `top_p` keeps the fewest likeliest tokens whose share of the mass is at least so much;
    1: all. `min_p` keeps tokens at least so likely as that fraction of the likeliest; 0: all.
    """

    every_steps: int = 50
    games: int = 128
    final_games: int = 512
    samples: int = 1
    sft_path: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def sampling(self) -> Sampling:
        """The sampling of evaluation episodes."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        numbers = ("final_games", "samples", "every_steps")
        bounds = {"games": (0, None), **dict.fromkeys(numbers, (1, None))}
        check_bounds(self, "config.eval", bounds)
        self.sampling.validate("config.eval.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of the log.

    Episodes are written of the first step, of the last and of every `trajectories_every_steps`-th.
    `trackers` get the metrics too: "tensorboard" (the extra of that name), "wandb" (likewise), or
    "module:Class" of the user's own (docs/quickstart.md). `trace` writes the stages of every step,
    with their times, to trace.json of the workdir (trace.N.json of process N), which
    https://ui.perfetto.dev shows.
    """

    trajectories_every_steps: int = 10
    trackers: tuple[str, ...] = ()
    trace: bool = False

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_bounds(self, "config.log", {"trajectories_every_steps": (1, None)})
