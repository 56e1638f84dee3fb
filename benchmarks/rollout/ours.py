# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Our engine in a process of its own, through all that an RL rollout goes through.

Tasks, environments in their pool, the chat, the collector, the engine on one CPU device: what is
timed is what a user waits for, from the tasks to the trajectories and their device rows.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.rollout.answering import answer_jobs
from benchmarks.rollout.work import MAX_POSITIONS, MODEL, VOCAB_SIZE, Message, renderer, tokenizer
from earl_jax.dispatch.weights import publish
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine, Policy, Session, empty_session
from earl_jax.engine.pages import dense_pool
from earl_jax.engine.relocation import relocate
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.conversation import Conversation
from earl_jax.launch.start import start_jax
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import PageRule
from earl_jax.models.parameters import init_parameters, parameter_shardings, parameter_specs
from earl_jax.rollout.actor import collect
from earl_jax.rollout.config import Limits, RolloutConfig
from earl_jax.rollout.results import Rollout
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Task
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.trajectory import Trajectory

CHUNK_SIZE = 64
BURST = 16
PAGE_SIZE = 128
CONTEXT_BUCKETS = (128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)


def write_checkpoint(folder: Path, model: ModelConfig = MODEL) -> None:
    """Random weights of the tiny Qwen2, as `transformers` has them."""
    specs = parameter_specs(model, VOCAB_SIZE)
    shardings = parameter_shardings(specs, make_layout(MeshShape()))
    init = jax.jit(lambda key: init_parameters(specs, key), out_shardings=shardings)
    save_checkpoint(
        folder,
        init(jax.random.key(0)),
        model=model,
        vocab_size=VOCAB_SIZE,
        tokenizer=tokenizer(),
        dtype="float32",
        max_positions=MAX_POSITIONS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A rollout.

    Episode i reads `messages[i]` one by one, `env_ms` after it has sampled `turn_tokens[i]` tokens
    as the answer to the one before; episode 0 `slow_ms` after it, if that is more.
    """

    messages: Sequence[Sequence[Message]]
    turn_tokens: Sequence[int]
    num_slots: int
    temperature: float = 1.0
    env_ms: float = 0.0
    slow_ms: float = 0.0
    patience_s: float | Literal["auto"] = "auto"

    @staticmethod
    def parse(job: dict[str, Any]) -> "Script":
        """Returns the script of a job."""
        sampled = [[Message(text, tuple(ids)) for text, ids in m] for m in job.pop("messages")]
        return Script(messages=sampled, **job)


class Speaker:
    """An environment that gives its messages one by one, whatever the replies are."""

    def __init__(self, texts: Sequence[str], delay_s: float):
        self._texts, self._delay_s = iter(texts[1:]), delay_s
        self._first = texts[0]

    def start(self) -> Start:
        """Returns the first message."""
        return Start(text=self._first, role="x")

    def step(self, reply: str) -> StepResult:
        """Returns the next message."""
        if self._delay_s:
            time.sleep(self._delay_s)
        text = next(self._texts, None)
        if text is None:
            return StepResult(reward=1.0, done=True, stop_reason="win")
        return StepResult(text=text, reward=0.0, done=False)


class CutTurns(Conversation):
    """Every turn is a whole one, also where its length was up before it had ended."""

    def reply(self, ids: Sequence[int], before_stop: str | None = None) -> tuple[str, bool]:
        """Returns the text, and True."""
        return super().reply(ids, before_stop)[0], True


class TimedEngine(Engine):
    """Notes the seconds of each round."""

    def __init__(self, config: EngineConfig, layout: Layout):
        super().__init__(config, layout)
        self.rounds: list[float] = []

    def play(
        self, params: Any, state: DecodeState, inputs: RoundInputs, **options: bool
    ) -> tuple[DecodeState, RoundOutputs]:
        """Runs one round."""
        start_s = time.perf_counter()
        state, report = super().play(params, state, inputs, **options)
        # The report is read by the host in any case, at once.
        jax.block_until_ready(report.count)
        self.rounds.append(time.perf_counter() - start_s)
        return state, report


class Player:
    """Our engine with a checkpoint's weights, on one device. Programs are kept."""

    def __init__(self, folder: Path):
        self.checkpoint = open_checkpoint(folder)
        self.layout = make_layout(MeshShape())
        self._master = load_parameters(self.checkpoint, self.layout)

    @functools.cache  # noqa: B019 - lives as long as the process
    def engine(self, num_slots: int, num_rows: int) -> TimedEngine:
        """With no token that ends a turn."""
        config = EngineConfig(
            model=self.checkpoint.model,
            vocab_size=self.checkpoint.vocab_size,
            num_slots=num_slots,
            num_rows=num_rows,
            chunk_size=CHUNK_SIZE,
            rules=SlotRules(burst=BURST, end_of_turn_ids=()),
            seed=0,
            page_size=PAGE_SIZE,
        )
        return TimedEngine(config, self.layout)

    @functools.cache  # noqa: B019
    def policy(self, engine: Engine) -> Policy:
        """Returns the weights in this engine's layout and types."""
        shapes, shardings = engine.parameter_shapes, engine.parameter_shardings
        return Policy(params=publish(self._master, shapes, shardings).params, version=0)

    def play(self, script: Script) -> Rollout:
        """One rollout."""
        texts = [[message.text for message in messages] for messages in script.messages]
        number = len(texts)
        config = RolloutConfig(
            num_slots=script.num_slots,
            episodes_per_step=number,
            chunk_size=CHUNK_SIZE,
            burst=BURST,
            patience_s=script.patience_s,
            context_buckets=CONTEXT_BUCKETS,
            page_size=PAGE_SIZE,
        )
        engine = self.engine(script.num_slots, number)
        engine.rounds.clear()
        max_tokens = CONTEXT_BUCKETS[0]
        every = dense_pool(1, script.num_slots, max_tokens, PageRule(PAGE_SIZE))
        session = empty_session(engine, self.policy(engine), max_tokens, every)
        tasks = [
            Task(episode=i, group=i, args={"seed": i}, limits=Limits(max_turn_tokens=tokens))
            for i, tokens in enumerate(script.turn_tokens)
        ]
        # Environments that sleep need a thread each, or they would wait for each other.
        pool = EnvironmentPool(
            script.num_slots if script.env_ms or script.slow_ms else 2, timeout_s=60.0
        )
        service = RolloutService(
            session,
            config,
            lambda: CutTurns(renderer()),
            pool,
            lambda task: Speaker(
                texts[task.episode],
                max(script.env_ms, 0 if task.episode else script.slow_ms) / 1000,
            ),
            functools.partial(_grow_pool, config),
            num_devices=1,
            sampling=Sampling(temperature=script.temperature),
        )
        rollout = collect(service, tasks)
        jax.block_until_ready(rollout.session.state)
        pool.close()
        return rollout

    def measure(self, script: Script) -> dict[str, Any]:
        """Plays and times a script."""
        start_s = time.perf_counter()
        rollout = self.play(script)
        seconds = time.perf_counter() - start_s
        return _account(rollout, seconds)


def _grow_pool(config: RolloutConfig, session: Session, tokens: int, pages: int) -> Session:
    """Returns the session with longer rows or more pages, on the same mesh."""
    max_tokens = max(session.max_tokens, config.max_tokens_for(tokens))
    pool = session.pool
    if pages > pool.pages:
        # As a run with memory for them.
        most = dense_pool(1, config.num_slots, max_tokens, PageRule(PAGE_SIZE)).pages
        pool = pool._replace(pages=max(pages, most))
    return relocate(session, session.engine, max_tokens, pool)


def _account(rollout: Rollout, seconds: float) -> dict[str, Any]:
    engine, stats = rollout.session.engine, rollout.stats
    assert isinstance(engine, TimedEngine)
    replies = [_ids(trajectory, "policy") for trajectory in rollout.trajectories]
    observed = [_ids(trajectory, "environment") for trajectory in rollout.trajectories]
    return {
        "seconds": seconds,
        "tokens": sum(map(len, replies)),
        "observed": sum(map(len, observed)),
        "prefilled": stats.prefill_tokens,
        "busy_s": sum(engine.rounds),
        "env_wait_s": stats.env_wait_s,
        "decode_rows": stats.decode_rows,
        "idle_rows": stats.idle_rows,
        "replies": replies,
    }


def _ids(trajectory: Trajectory, author: str) -> list[int]:
    """Returns all ids of this author."""
    turns = (turn.token_ids for turn in trajectory.turns if turn.author == author)
    return [token for ids in turns for token in ids]


def answer_job(player: Player, job: dict[str, Any]) -> dict[str, Any]:
    """Returns what came of a Script."""
    return player.measure(Script.parse(job))


def main() -> None:
    """Answers jobs about the checkpoint in the folder that is given; writes it where it is not."""
    folder = Path(sys.argv[1])
    start_jax("cpu", 1)
    if not folder.exists():
        write_checkpoint(folder)
    answer_jobs(functools.partial(answer_job, Player(folder)))


if __name__ == "__main__":
    main()
