# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A small engine, and episodes of Tic-Tac-Toe on it, collected as a run collects them."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.choices import allowed_table
from earl_jax.engine.config import NO_LIMIT, EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine, Policy, Session, empty_session
from earl_jax.engine.pages import Pool
from earl_jax.engine.relocation import relocate
from earl_jax.engine.rows import make_rows
from earl_jax.envs.examples import play_example
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.conversation import Conversation
from earl_jax.envs.text.tokenizer import ASSISTANT, CHAT_TEMPLATE, build_tokenizer
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import pages_for
from earl_jax.models.parameters import is_spec, parameter_specs, unstacked_specs
from earl_jax.rollout.actor import collect as play_all
from earl_jax.rollout.config import CacheRules, RolloutConfig
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Task
from earl_jax.sharding.layout import MeshShape, make_layout

NUM_DEVICES = 8
MODEL = ModelConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=64)
# Two of three layers have a window.
WINDOWED = dataclasses.replace(MODEL, num_layers=3, windows=(4, 0, 4))
# Latent attention: a page has one row of 12 + 4 numbers a token and layer.
LATENT = dataclasses.replace(
    MODEL, num_layers=2, num_kv_heads=4, latent_size=12, rope_size=4, value_size=6
)
# Linear attention beside attention that rotates half of a head.
LINEAR = dataclasses.replace(
    MODEL,
    num_layers=2,
    rope_size=4,
    attention_gate=True,
    attention_every=2,
    linear_key_size=8,
    linear_value_size=6,
)
CONFIG = RolloutConfig(
    num_slots=16,
    episodes_per_step=48,
    chunk_size=8,
    burst=4,
    max_turn_tokens=4,
    unfinished_reward=-0.5,
    # Rounds wait for every environment, so that their number does not depend on the machine.
    patience_s=60.0,
    context_buckets=(16, 24, 32),
    page_size=8,
)
# Where nobody takes anything over, an episode's rounds are a matter of its own length.
CACHE_RULES = CacheRules(share_prefixes=False)
MAX_TOKENS = CONFIG.context_buckets[-1]


def game_corpus(num_games: int, seed: int = 0, make=BoardGame) -> list[str]:
    """Returns all moves, and the text of so many games of Tic-Tac-Toe, or of what `make` makes."""
    rng, texts = random.Random(seed), make().all_replies()
    for index in range(num_games):
        texts += play_example(make(index=index, seed=rng.getrandbits(63)), rng).texts
    return texts


@functools.cache
def tokenizer():
    return build_tokenizer(game_corpus(60), 320)


@functools.cache
def renderer() -> ChatRenderer:
    return ChatRenderer(tokenizer())


def num_rows(num_slots: int, episodes: int) -> int:
    """Rows of experience, with spare ones where there are slots for all data shards."""
    devices = NUM_DEVICES if num_slots % NUM_DEVICES == 0 else 1
    rows = make_rows(num_rows=episodes, num_slots=num_slots, num_devices=devices)
    return rows.total


@functools.cache
def engine(
    num_slots: int = CONFIG.num_slots,
    mesh: MeshShape = MeshShape(data=8),  # noqa: B008
    burst: int = CONFIG.burst,
    model_logprobs: bool = False,
    ngram: int = 1,
    draft: int = 0,
    model: ModelConfig = MODEL,
    episodes: int = CONFIG.episodes_per_step,
) -> Engine:
    rules = SlotRules(
        burst=burst,
        end_of_turn_ids=renderer().end_of_turn_ids,
        model_logprobs=model_logprobs,
        truncates=False,
        ngram=ngram,
        draft=draft,
    )
    return Engine(
        EngineConfig(
            model=model,
            vocab_size=320,
            num_slots=num_slots,
            num_rows=num_rows(num_slots, episodes),
            chunk_size=CONFIG.chunk_size,
            rules=rules,
            seed=3,
            page_size=CONFIG.page_size,
        ),
        make_layout(mesh),
    )


@functools.cache
def weights(seed: int = 0, *, ends_turns: bool = True, model: ModelConfig = MODEL):
    """The policy of `weight_values`, on the devices."""
    values = weight_values(seed, ends_turns=ends_turns, model=model)
    return engine(model=model).load_params(jax.tree.map(jnp.asarray, values))


def weight_values(seed: int = 0, *, ends_turns: bool = True, model: ModelConfig = MODEL):
    """A policy that says one random digit and ends its turn, or never ends it.

    Random weights, but for two features of the embedding that drown the rest: the first is 10
    everywhere, the second tells digits (10) from the assistant's mark (-10). The head reads them.
    """
    rng = np.random.default_rng(seed)

    def draw(spec):
        noise = rng.normal(size=spec.shape) * spec.deviation if spec.deviation else np.ones(1)
        return np.broadcast_to(noise, spec.shape).astype(np.float32)

    specs = unstacked_specs(parameter_specs(model, 320), model.num_layers)
    values = jax.tree.map(draw, specs, is_leaf=is_spec)
    digits = [tokenizer().convert_tokens_to_ids(str(digit)) for digit in range(9)]
    speaks, ends = tokenizer().convert_tokens_to_ids(ASSISTANT), renderer().end_of_turn_id
    embed, head = values["embed"].copy(), values["head"] / 2
    embed[:, 0], embed[:, 1] = 10, 0
    embed[digits, 1], embed[speaks, 1] = 10, -10
    head[0], head[1] = -8, 0
    head[0, digits] = 0
    if ends_turns:
        head[0, ends], head[1, ends], head[1, digits] = 0, 6, -6
    return {**values, "embed": embed, "head": head}


def tasks(number: int, first: int = 0) -> list[Task]:
    return [
        Task(episode=first + i, group=first + i, args={"seed": 100 + first + i, "index": i % 2})
        for i in range(number)
    ]


def tictactoe(task: Task):
    return BoardGame(**task.args)


@dataclasses.dataclass
class GrowPool:
    """Grows the session as `grow_session` does on the same mesh; records the calls.

    Pages come by the dozen; at most `most_pages` a row shard, as where the budget is reached.
    """

    most_pages: int = 1000
    wanted: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    wanted_pages: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __call__(self, session: Session, tokens: int, pages: int) -> Session:
        if tokens > session.max_tokens:
            self.wanted.append((session.max_tokens, tokens))
        if pages > session.pool.pages:
            self.wanted_pages.append((session.pool.pages, pages))
        assert tokens > session.max_tokens or pages > session.pool.pages, "asked for nothing"
        max_tokens = CONFIG.max_tokens_for(tokens)
        if pages > session.pool.pages:
            pages = min(pages + -pages % 12, self.most_pages)
        pool = session.pool._replace(pages=max(pages, session.pool.pages))
        return relocate(session, session.engine, max_tokens, pool)


_RULE_NAMES = {field.name for field in dataclasses.fields(CacheRules)}


def open_service(
    pool,
    make=tictactoe,
    *,
    params=None,
    version=0,
    max_tokens=MAX_TOKENS,
    num_slots=CONFIG.num_slots,
    pages=0,
    grow=None,
    player=None,
    sampling=Sampling(),  # noqa: B008
    num_devices=NUM_DEVICES,
    max_context=NO_LIMIT,
    shrink=None,
    new_conversation=lambda: Conversation(renderer()),
    on_tokens=lambda ticket, tokens: None,
    more=lambda num_free: (),
    events=None,
    **changes,
) -> RolloutService:
    """A service with these changes of CONFIG and CACHE_RULES."""
    player = player or engine(num_slots)
    rules = {name: changes.pop(name) for name in _RULE_NAMES & changes.keys()}
    size = player.config.page_size
    shards = player.layout.num_row_shards
    pages = pages or pages_for(max_tokens, size) * num_slots // shards
    policy = Policy(params=player.load_params(params or weights()), version=version)
    return RolloutService(
        empty_session(player, policy, max_tokens, Pool(shards, pages)),
        dataclasses.replace(CONFIG, num_slots=num_slots, **changes),
        new_conversation,
        pool,
        make,
        grow or GrowPool(),
        num_devices=num_devices,
        sampling=sampling,
        max_context=max_context,
        shrink=shrink,
        cache_rules=dataclasses.replace(CACHE_RULES, **rules),
        on_tokens=on_tokens,
        more=more,
        events=events,
    )


def collect(pool, todo, make=tictactoe, *, services=None, **settings):
    """Plays the tasks; the service that does is added to `services`."""
    service = open_service(pool, make, **settings)
    if services is not None:
        services.append(service)
    return play_all(service, todo)


def check_nothing_is_held(service: RolloutService, longest: int = MAX_TOKENS) -> None:
    """No slot has an episode, and nothing is left in host memory.

    Pages are free or held for what an idle slot has read: without it every page is free.
    """
    assert service.num_live == 0
    blocks, pages = service._blocks, service._blocks._pages
    for slot in range(service.session.engine.config.num_slots):
        assert pages.num_held(slot) <= pages.rule.num_groups * pages_for(longest, CONFIG.page_size)
        pages.keep(slot, 0)
    assert not np.array(pages.holders()).any()
    free = [pages.num_free(shard) for shard in range(pages.pool.shards)]
    assert free == [pages.pool.pages] * pages.pool.shards
    host = blocks._host
    assert (host.held_bytes, host.slots, host._leaving, blocks._leaving) == (0, [], [], {})
    assert not service._row_pool._moves


def check_row(service: RolloutService, finished) -> None:
    """The device row is the episode, and 0 behind it."""
    experience, turns = service.session.state.experience, finished.trajectory.turns
    expected = np.zeros((4, experience.tokens.shape[1]), np.float32)
    allowed = np.zeros((len(experience.allowed), experience.tokens.shape[1]), np.int32)
    position, spoken = 0, 0
    for turn in turns:
        here = slice(position, position + len(turn.token_ids))
        expected[0, here] = turn.token_ids
        if turn.author == "policy":
            spoken += 1
            expected[1, here], expected[2, here] = spoken, turn.logprobs
            expected[3, here] = turn.versions
            if len(allowed):
                given = turn.token_ids, turn.choices, turn.allowed
                allowed[:, here] = allowed_table(*given, len(allowed)).T
        position = here.stop
    names = ("tokens", "turn_ids", "logprobs", "versions")
    for name, numbers in zip(names, expected, strict=True):
        row = np.asarray(getattr(experience, name))[finished.row]
        np.testing.assert_array_equal(row, numbers, name)
    for ids, numbers in zip(experience.allowed, allowed, strict=True):
        np.testing.assert_array_equal(np.asarray(ids)[finished.row], numbers)


def check_rows(rollout, num_tasks: int) -> None:
    """Row i holds the turns of task i end to end, marked by author; nothing is anywhere else."""
    experience = rollout.experience
    written = {
        field.name: np.asarray(getattr(experience, field.name))
        for field in dataclasses.fields(experience)
        if field.name != "allowed" and getattr(experience, field.name) is not None
    }
    allowed = list(map(np.asarray, experience.allowed))
    written |= {f"allowed {rank}": rows for rank, rows in enumerate(allowed)}
    for trajectory in rollout.trajectories:
        expected = {name: [] for name in written}
        spoken = 0
        for turn in trajectory.turns:
            policy = turn.author == "policy"
            spoken += policy
            zeros = [0] * len(turn.token_ids)
            expected["tokens"] += turn.token_ids
            expected["turn_ids"] += [spoken * policy] * len(zeros)
            if allowed:
                given = turn.token_ids, turn.choices, turn.allowed, len(allowed)
                for rank, ids in enumerate(allowed_table(*given).T):
                    expected[f"allowed {rank}"] += ids.tolist()
            for name in written.keys() & {"logprobs", "versions", "model_logprobs"}:
                expected[name] += getattr(turn, name) if policy else zeros
        for name, numbers in expected.items():
            row = written[name][trajectory.row]
            np.testing.assert_array_equal(row[: len(numbers)], np.float32(numbers), name)
            if (name, trajectory.stop_reason) != ("tokens", "aborted"):
                # There it may be ids of an answer that was given up; nobody reads them.
                assert not row[len(numbers) :].any(), name
    assert not any(rows[num_tasks:].any() for rows in written.values())


def check_turns(trajectory) -> None:
    """Ids were rendered once, from the messages; the policy's turns are whole."""
    assert [turn.author for turn in trajectory.turns] == [
        ("environment", "policy")[i % 2] for i in range(len(trajectory.turns))
    ]
    for index, turn in enumerate(trajectory.turns):
        if turn.author == "policy":
            assert turn.token_ids[-1] == renderer().end_of_turn_id
            assert renderer().end_of_turn_id not in turn.token_ids[:-1]
            assert turn.text == renderer().decode_reply(turn.token_ids)
            assert len(turn.logprobs) == len(turn.versions) == len(turn.token_ids)
            assert max(turn.logprobs) <= 1e-6
        else:
            render = renderer().answer if index else renderer().first
            assert turn.token_ids == render(turn.text)


def assert_same_episodes(ours, theirs) -> None:
    """Equal in everything; log-probs to 1e-5."""

    def without_logprobs(trajectory):
        turns = tuple(
            dataclasses.replace(turn, logprobs=(), model_logprobs=()) for turn in trajectory.turns
        )
        return dataclasses.replace(trajectory, turns=turns)

    for one, other in zip(ours, theirs, strict=True):
        assert without_logprobs(one) == without_logprobs(other)
        for turn, same in zip(one.turns, other.turns, strict=True):
            np.testing.assert_allclose(turn.logprobs, same.logprobs, atol=1e-5)
            np.testing.assert_allclose(turn.model_logprobs, same.model_logprobs, atol=1e-5)


# Sections of a run whose ratio is against the model, as its cut sampling needs.
RATIO_RUN = {
    "model": {"width": 32, "ffn_size": 64},
    "rollout": {"num_slots": 8, "episodes_per_step": 16, "temperature": 1.5, "top_k": 3},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "train": {"ratio": "model", "epochs": 2},
}


@functools.cache
def calling_renderer() -> ChatRenderer:
    """A renderer whose template says that it writes calls as Qwen's does."""
    tokenizer = build_tokenizer(game_corpus(60), 320)
    tokenizer.chat_template = CHAT_TEMPLATE + "{# <tool_call> #}"
    return ChatRenderer(tokenizer)


FORGOTTEN = "1357"


@functools.cache
def forgetful_renderer() -> ChatRenderer:
    tokenizer = build_tokenizer(game_corpus(60), 320)
    forget = "".join(f" | replace('{digit}', '')" for digit in FORGOTTEN)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "<|assistant|>{% generation %}{{ message['content']",
        f"<|assistant|>{{% generation %}}{{{{ message['content']{forget}",
    )
    return ChatRenderer(tokenizer)
