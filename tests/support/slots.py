# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One round of the engine on one device: scripted conversations and their forward pass.

`converse` is the smallest host that can drive an engine: scripted environments, no RolloutService.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine import decode_state, slots
from earl_jax.engine.config import Sampling, SlotRules
from earl_jax.engine.decoding import Decoder
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs, pack_inputs, unpack_outputs
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.sampling import sampling_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.logprobs import score_logits
from earl_jax.models.parameters import ParameterSpec, is_spec, parameter_specs, unstack_layers
from tests.support.forward import row_logits

# Eight key/value heads, so that every candidate mesh of eight devices is possible in test_engine.
MODEL = ModelConfig(num_layers=2, width=32, num_heads=16, num_kv_heads=8, head_size=4, ffn_size=64)
VOCAB, END, MAX_TOKENS, CHUNK = 32, 0, 48, 5
MAX_TURN_TOKENS = 6
RULES = SlotRules(burst=4, end_of_turn_ids=(END,))
NUM_SLOTS = 8
# Four pages are full at MAX_TOKENS, and the last one is not.
PAGE_SIZE = 11


@dataclasses.dataclass(frozen=True)
class Script:
    """An episode: its seed, its row, and what its environment says whatever the policy answers."""

    seed: int
    row: int
    messages: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Transcript:
    """An episode as the host saw it, in order; `turn_ids` as in Experience."""

    ids: list[int] = dataclasses.field(default_factory=list)
    turn_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    queue: list[int] = dataclasses.field(default_factory=list)
    turn: int = 0
    fresh: bool = True
    over: bool = False

    def note(self, ids, turn=0, logprobs=(), version=0):
        self.ids += ids
        self.turn_ids += [turn] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += [version] * len(ids)

    def answer(self, message):
        """The environment speaks; the token sampled last goes in before its message."""
        self.queue = [*self.ids[-1:], *message]
        self.note(list(message))

    def turns(self) -> list[list[int]]:
        """The policy's turns."""
        return [
            [token for token, at in zip(self.ids, self.turn_ids, strict=True) if at == turn]
            for turn in range(1, self.turn + 1)
        ]


def converse(
    play: Callable[[Any, RoundInputs], tuple[Any, RoundOutputs]],
    state: Any,
    scripts: Mapping[int, Script],
    *,
    num_slots: int = NUM_SLOTS,
    chunk_size: int = CHUNK,
    temperature: Mapping[int, float] | None = None,
    version: Callable[[int], int] = lambda round_index: 0,
    delays: Mapping[int, int] | None = None,
    turn_limits: Mapping[int, int] | None = None,
) -> tuple[Any, dict[int, Transcript]]:
    """Plays the script of each slot to its end. `delays`: rounds to wait before a slot begins."""
    transcripts = {slot: Transcript() for slot in scripts}
    for slot, t in transcripts.items():
        t.answer(scripts[slot].messages[0])
    for round_index in range(300):
        waiting = {slot for slot, delay in (delays or {}).items() if delay > round_index}
        columns = {
            "count": np.zeros(num_slots, np.int32),
            "restart": np.zeros(num_slots, np.int32),
            "begin_turn": np.zeros(num_slots, np.int32),
            "seed": np.zeros(num_slots, np.int32),
            "row": np.full(num_slots, NO_ROW, np.int32),
            "sampling": sampling_rows(Sampling(), num_slots),
            "chunk": np.zeros((num_slots, chunk_size), np.int32),
            "turn_limit": np.full(num_slots, MAX_TURN_TOKENS, np.int32),
        }
        for slot in transcripts.keys() - waiting:
            columns["turn_limit"][slot] = (turn_limits or {}).get(slot, MAX_TURN_TOKENS)
            columns["sampling"].temperature[slot] = temperature[slot] if temperature else 1.0
            give_chunk(columns, slot, transcripts[slot], scripts[slot])
        state, report = play(state, RoundInputs(**columns, version=version(round_index)))
        for slot, t in transcripts.items():
            if report.count[slot]:
                take_down(report, slot, t, scripts[slot], version(round_index))
        if all(t.over for t in transcripts.values()):
            return state, transcripts
    raise AssertionError("episodes did not end within 300 rounds")


def give_chunk(columns: dict[str, np.ndarray], slot: int, t: Transcript, script: Script) -> None:
    chunk_size = columns["chunk"].shape[1]
    part, t.queue = t.queue[:chunk_size], t.queue[chunk_size:]
    if not part:
        return
    columns["chunk"][slot, : len(part)] = part
    columns["count"][slot] = len(part)
    columns["seed"][slot], columns["row"][slot] = script.seed, script.row
    columns["restart"][slot], columns["begin_turn"][slot] = t.fresh, not t.queue
    t.turn += not t.queue
    t.fresh = False


def take_down(report: RoundOutputs, slot: int, t: Transcript, script: Script, version: int) -> None:
    count = int(report.count[slot])
    tokens, logprobs = report.tokens[slot, :count], report.logprobs[slot, :count]
    t.note(tokens.tolist(), t.turn, logprobs.tolist(), version)
    if report.active[slot]:
        return
    t.over = t.turn == len(script.messages)
    if not t.over:
        t.answer(script.messages[t.turn])


@functools.cache
def stacked_params() -> Any:
    """Random weights, with a head that makes distributions of about two bits."""
    rng = np.random.default_rng(1)

    def draw(spec: ParameterSpec) -> jax.Array:
        noise = rng.normal(size=spec.shape) * (spec.deviation or 0.1) + (not spec.deviation)
        return jnp.asarray(noise, jnp.float32)

    values = jax.tree.map(draw, parameter_specs(MODEL, VOCAB), is_leaf=is_spec)
    return {**values, "head": 2 * values["head"]}


@functools.cache
def params() -> Any:
    """The same as the engine wants them: a list of layers."""
    values = jax.tree.map(np.asarray, stacked_params())
    return jax.tree.map(jnp.asarray, unstack_layers(values, MODEL.num_layers))


def make_scripts(number: int, *, first: int = 0, turns: int = 3) -> dict[int, Script]:
    """Slot i plays episode i in row i: prompts and answers of different lengths."""
    scripts = {}
    for i in range(first, first + number):
        rng = np.random.default_rng(i)
        messages = tuple(
            tuple(rng.integers(1, VOCAB, int(rng.integers(1, 9))).tolist()) for _ in range(turns)
        )
        scripts[i - first] = Script(seed=1000 + i, row=i - first, messages=messages)
    return scripts


@functools.cache
def jitted_play(rules: SlotRules = RULES) -> Any:
    return jitted_round(MODEL, rules)


def jitted_round(model: ModelConfig, rules: SlotRules) -> Any:
    """A round on one device: of weights, state, inputs and key."""
    return jax.jit(
        lambda weights, state, inputs, key: slots.play(
            Decoder(model, rules, weights, key), state, inputs, 0
        )
    )


def play_on_one_device(rules: SlotRules = RULES, weights: Any = None):
    def play(state, inputs):
        key = jax.random.key(7)
        state, packed = jitted_play(rules)(weights or params(), state, pack_inputs(inputs), key)
        report = unpack_outputs(
            np.asarray(packed), model_logprobs=rules.model_logprobs, drafts=rules.draft > 0
        )
        return state, report

    return play


def empty(max_tokens: int = MAX_TOKENS):
    return decode_state.empty_state(MODEL, NUM_SLOTS, NUM_SLOTS, max_tokens, page_size=PAGE_SIZE)


_full_forward = jax.jit(functools.partial(row_logits, MODEL))


def full_forward(episodes: list[list[int]], rows: int = NUM_SLOTS) -> np.ndarray:
    """Logits of whole finished episodes by the trainer's forward pass, one row each."""
    tokens, segments = (np.zeros((rows, MAX_TOKENS), np.int32) for _ in range(2))
    for row, ids in enumerate(episodes):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return np.asarray(_full_forward(stacked_params(), tokens, segments))


_score = jax.jit(score_logits)


def check_logprobs(
    transcripts: Mapping[int, Transcript], temperature: Mapping[int, float] | None = None
):
    """Every log-prob that the engine gave is the trainer's, to 1e-5; greedy ones at 1."""
    logits_BTV = full_forward([t.ids for t in transcripts.values()], len(transcripts))
    for row, (slot, t) in enumerate(transcripts.items()):
        value = (temperature[slot] if temperature else 1.0) or 1.0
        targets = np.zeros(MAX_TOKENS, np.int32)
        targets[: len(t.ids) - 1] = t.ids[1:]
        scores = np.asarray(_score(logits_BTV[row], targets, np.float32(value)).logprobs)
        positions = np.flatnonzero(t.turn_ids)
        assert len(positions) >= t.turn
        np.testing.assert_allclose(
            np.array(t.logprobs)[positions], scores[positions - 1], atol=2e-5, rtol=0
        )


def check_rows(
    experience: Any, transcripts: Mapping[int, Transcript], scripts: Mapping[int, Script]
):
    """The rows hold exactly what the host saw, bit for bit, and zeros behind it."""
    for slot, t in transcripts.items():
        row, length = scripts[slot].row, len(t.ids)
        for field in ("turn_ids", "logprobs", "versions"):
            written = np.asarray(getattr(experience, field))[row]
            np.testing.assert_array_equal(written[:length], np.float32(getattr(t, field)), field)
            assert not written[length:].any(), field
        tokens = np.asarray(experience.tokens)[row]
        np.testing.assert_array_equal(tokens[:length], t.ids)
        assert not tokens[length:].any()


def assert_same(
    transcripts: Mapping[int, Transcript], other: Mapping[int, Transcript], atol: float = 1e-5
):
    """Same tokens by the same authors; log-probs within `atol`. Compared in the order given."""
    for t, o in zip(transcripts.values(), other.values(), strict=True):
        assert (t.ids, t.turn_ids) == (o.ids, o.turn_ids)
        np.testing.assert_allclose(t.logprobs, o.logprobs, atol=atol, rtol=atol and 1e-7)
