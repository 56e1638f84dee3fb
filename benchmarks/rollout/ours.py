# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Our engine in a process of its own, through all that an RL rollout goes through.

Tasks, environments in their pool, the chat, the collector, the engine on one CPU device: what is
timed is what a user waits for, from the tasks to the trajectories and their device rows.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.rollout import decode_step
from benchmarks.rollout.answering import answer_jobs
from benchmarks.rollout.work import MAX_POSITIONS, MODEL, VOCAB_SIZE, Message, renderer, tokenizer
from earl_jax.dispatch.weights import publish
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import dense_pool, roomier_pages
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs
from earl_jax.engine.session import Policy, Session, empty_session, relocate
from earl_jax.envs.conversation import Conversation, Heard
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.main import start_jax
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import init_parameters, parameter_shardings, parameter_specs
from earl_jax.rollout.collect import Collector, Rollout
from earl_jax.rollout.config import CacheRules, Limits, RolloutConfig
from earl_jax.rollout.episode import Task
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.trajectory import Trajectory

CHUNK_SIZE = 64
BURST = 16
STEP_RUNS = 4
PAGE_SIZE = 128
ROOMS = (128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)


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
    """What is played.

    Episode i hears `messages[i]` one by one, `env_ms` after it has said `turn_tokens[i]` tokens to
    the one before. A decode step has `step_rows` rows, 0: one for each of `num_slots`. `places` is
    the room that every episode begins with, 0: what it needs. With
    `reads_again` every turn is an episode of its own, whose prompt is the conversation so far.
    """

    messages: Sequence[Sequence[Message]]
    turn_tokens: Sequence[int]
    num_slots: int
    step_rows: int = 0
    temperature: float = 1.0
    env_ms: float = 0.0
    patience_ms: float = 100.0
    burst: int = BURST
    max_tokens: int = 0
    reads_again: bool = False

    @staticmethod
    def parse(job: dict[str, Any]) -> "Script":
        """From JSON."""
        sampled = [[Message(text, tuple(ids)) for text, ids in m] for m in job.pop("messages")]
        return Script(messages=sampled, **job)


class Speaker:
    """An environment that says its messages one by one, whatever it hears."""

    def __init__(self, texts: Sequence[str], delay_s: float):
        self._texts, self._delay_s = iter(texts[1:]), delay_s
        self._first = texts[0]

    def start(self) -> Start:
        """The first message."""
        return Start(text=self._first, role="x")

    def step(self, reply: str) -> StepResult:
        """The next message."""
        if self._delay_s:
            time.sleep(self._delay_s)
        text = next(self._texts, None)
        if text is None:
            return StepResult(reward=1.0, done=True, stop_reason="win")
        return StepResult(text=text, reward=0.0, done=False)


class CutTurns(Conversation):
    """Every turn is a whole one, also where its length was up before it had ended."""

    def reply(self, ids: Sequence[int], before_stop: str | None = None) -> tuple[str, bool]:
        """The text, and True."""
        return super().reply(ids, before_stop)[0], True


class GivenIds(CutTurns):
    """Begins with ids, which are written in the message as numbers."""

    def open(self, sampled: Any, tools: Any = ()) -> Heard:
        """These ids."""
        return Heard(tuple(map(int, sampled.split())))


class TimedEngine(Engine):
    """Notes for each round its seconds, and the tokens that were appended and sampled.

    Traces the next round that appends nothing to the folder `trace`, where there is one.
    """

    def __init__(self, config: EngineConfig, layout: Layout):
        super().__init__(config, layout)
        self.rounds: list[tuple[float, int, int]] = []
        self.trace: str | None = None

    def play(
        self, params: Any, state: DecodeState, inputs: RoundInputs, **options: bool
    ) -> tuple[DecodeState, RoundOutputs]:
        """One round."""
        appended = int(np.sum(inputs.count))
        if self.trace is not None and not appended:
            traced = jax.profiler.trace(self.trace)
            self.trace = None
        else:
            traced = contextlib.nullcontext()
        with traced:
            start_s = time.perf_counter()
            state, report = super().play(params, state, inputs, **options)
            seconds = time.perf_counter() - start_s
        self.rounds.append((seconds, appended, int(report.count.sum())))
        return state, report


class Player:
    """Our engine with a checkpoint's weights, on one device. Programs are kept."""

    def __init__(self, folder: Path):
        self.checkpoint = open_checkpoint(folder)
        self.layout = make_layout(MeshShape())
        self._master = load_parameters(self.checkpoint, self.layout)

    @functools.cache  # noqa: B019 - lives as long as the process
    def engine(self, num_slots: int, step_rows: int, num_rows: int, burst: int) -> TimedEngine:
        """With no token that ends a turn."""
        config = EngineConfig(
            model=self.checkpoint.model,
            vocab_size=self.checkpoint.vocab_size,
            num_slots=num_slots,
            num_rows=num_rows,
            chunk_size=CHUNK_SIZE,
            rules=SlotRules(burst=burst, end_of_turn_ids=()),
            seed=0,
            step_rows=step_rows,
            page_size=PAGE_SIZE,
        )
        return TimedEngine(config, self.layout)

    @functools.cache  # noqa: B019
    def policy(self, engine: Engine) -> Policy:
        """The weights as this engine wants them."""
        shapes, shardings = engine.parameter_shapes, engine.parameter_shardings
        return Policy(params=publish(self._master, shapes, shardings).params, version=0)

    def play(self, script: Script, texts: Sequence[Sequence[str]], conversation: Any) -> Rollout:
        """One rollout."""
        number = len(texts)
        config = RolloutConfig(
            num_slots=script.num_slots,
            step_rows=script.step_rows,
            episodes_per_step=number,
            chunk_size=CHUNK_SIZE,
            burst=script.burst,
            patience_s=script.patience_ms / 1000,
            context_buckets=ROOMS,
            page_size=PAGE_SIZE,
        )
        engine = self.engine(script.num_slots, script.step_rows, number, script.burst)
        engine.rounds.clear()
        max_tokens = script.max_tokens or ROOMS[0]
        every = dense_pool(1, script.num_slots, max_tokens, PAGE_SIZE)
        session = empty_session(engine, self.policy(engine), max_tokens, every)
        tasks = [
            Task(episode=i, group=i, env_seed=i, player=0, limits=Limits(max_turn_tokens=tokens))
            for i, tokens in enumerate(script.turn_tokens)
        ]
        # Environments that sleep need a thread each, or they would wait for each other.
        pool = EnvironmentPool(script.num_slots if script.env_ms else 2, timeout_s=60.0)
        collector = Collector(
            config,
            lambda: conversation(renderer()),
            pool,
            lambda task: Speaker(texts[task.episode], script.env_ms / 1000),
            functools.partial(_make_room, config),
            num_devices=1,
            cache_rules=CacheRules(share_prefixes=not script.reads_again),
        )
        rollout = collector.collect(
            session, tasks, sampling=Sampling(temperature=script.temperature)
        )
        jax.block_until_ready(rollout.session.state)
        pool.close()
        return rollout

    def measure(self, script: Script) -> dict[str, Any]:
        """Plays and times a script."""
        if script.reads_again:
            return self._measure_again(script)
        texts = [[message.text for message in messages] for messages in script.messages]
        start_s = time.perf_counter()
        rollout = self.play(script, texts, CutTurns)
        seconds = time.perf_counter() - start_s
        return _account(rollout, seconds)

    def _measure_again(self, script: Script) -> dict[str, Any]:
        """The same conversations, but each turn reads all that was said before it once more."""
        total: dict[str, Any] = {}
        contexts: list[tuple[int, ...]] = [()] * len(script.messages)
        sampled: list[list[int]] = [[]] * len(script.messages)
        for turn in range(len(script.messages[0])):
            contexts = [c + m[turn].ids for c, m in zip(contexts, script.messages, strict=True)]
            texts = [[" ".join(map(str, context))] for context in contexts]
            start_s = time.perf_counter()
            rollout = self.play(script, texts, GivenIds)
            found = _account(rollout, time.perf_counter() - start_s)
            replies = found.pop("replies")
            contexts = [c + tuple(reply) for c, reply in zip(contexts, replies, strict=True)]
            sampled = [[*all, *reply] for all, reply in zip(sampled, replies, strict=True)]
            total = {key: total.get(key, 0) + value for key, value in found.items()}
        return total | {"replies": sampled}


def _make_room(config: RolloutConfig, session: Session, tokens: int, pages: int) -> Session:
    """More room, as `Sessions.make_room` gives it where the mesh stays and the budget allows."""
    max_tokens = max(session.max_tokens, config.max_tokens_for(tokens))
    pool = session.pool
    if pages > pool.pages:
        most = dense_pool(1, config.num_slots, max_tokens, PAGE_SIZE).pages
        pool = pool._replace(pages=max(pages, min(roomier_pages(pages), most)))
    return relocate(session, session.engine, max_tokens, pool)


def _account(rollout: Rollout, seconds: float) -> dict[str, Any]:
    engine, stats = rollout.session.engine, rollout.stats
    assert isinstance(engine, TimedEngine)
    replies = [_ids(trajectory, "policy") for trajectory in rollout.trajectories]
    heard = [_ids(trajectory, "environment") for trajectory in rollout.trajectories]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(rollout.session.state))
    return {
        "seconds": seconds,
        "tokens": sum(map(len, replies)),
        "heard": sum(map(len, heard)),
        "prefilled": stats.prefill_tokens,
        "busy_s": sum(seconds for seconds, _, _ in engine.rounds),
        "env_wait_s": stats.env_wait_s,
        "rounds": stats.rounds,
        "decode_rows": stats.decode_rows,
        "idle_rows": stats.idle_rows,
        "state_bytes": state_bytes,
        "in_flight": stats.tokens_in_flight_max,
        "replies": replies,
    }


def _ids(trajectory: Trajectory, author: str) -> list[int]:
    """All that this author said."""
    turns = (turn.token_ids for turn in trajectory.turns if turn.author == author)
    return [token for ids in turns for token in ids]


def measure_step(player: Player, script: Script) -> dict[str, Any]:
    """Seconds of a decode step in the engine's rounds, and of what it cannot do without.

    Of the script's rounds only those count that sample and append nothing: each one's fastest run,
    and the mean of these. `kinds` is the share of each kind of operation in the time that a burst's
    operations took.
    """
    texts = [[message.text for message in messages] for messages in script.messages]
    runs = []
    for _ in range(STEP_RUNS):
        engine = player.play(script, texts, CutTurns).session.engine
        assert isinstance(engine, TimedEngine)
        runs.append([seconds for seconds, appended, _ in engine.rounds if not appended])
    bursts = [min(seconds) for seconds in zip(*runs, strict=True)]
    # The first burst of a turn is in a round that appends.
    context = len(script.messages[0][0].ids) + (script.turn_tokens[0] + script.burst) // 2
    floors = decode_step.step_floors(
        player.checkpoint.model,
        player.policy(engine).params,
        batch=script.num_slots,
        context=context,
        steps=script.burst,
        repeats=STEP_RUNS,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine.trace = folder
        player.play(script, texts, CutTurns)
        kinds = decode_step.operation_kinds(Path(folder))
    step_s = sum(bursts) / len(bursts) / script.burst
    return {"step": step_s, "context": context, "kinds": kinds} | floors


def answer_job(player: Player, job: dict[str, Any]) -> dict[str, Any]:
    """What came of it: `what` is "play" or "step", the rest a Script."""
    what = job.pop("what")
    script = Script.parse(job)
    return measure_step(player, script) if what == "step" else player.measure(script)


def main() -> None:
    """Answers jobs about the checkpoint in the folder that is given; writes it where it is not."""
    folder = Path(sys.argv[1])
    start_jax("cpu", 1)
    if not folder.exists():
        write_checkpoint(folder)
    answer_jobs(functools.partial(answer_job, Player(folder)))


if __name__ == "__main__":
    main()
