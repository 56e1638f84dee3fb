# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's `Engine` interface, as a client of the rollouts' scheduler.

JetStream's own orchestrator and server drive it. The service reads prompts itself, so that
`prefill` only notes their ids; `insert` submits a task, and `generate` hands out one token a slot.
"""

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from earl_jax.engine.engine import Policy
from earl_jax.envs.environment import NONFINITE_LOGITS
from earl_jax.rollout.config import Limits
from earl_jax.rollout.reply import NewTokens
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving._jetstream import import_engine
from earl_jax.serving.chat_prompt import prompt_encoder
from earl_jax.serving.config import MAX_SEED
from earl_jax.serving.driver import open_service
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.serving.tokenizer import ServedTokenizer
from earl_jax.settings.errors import InputError

_jetstream = import_engine()
# JetStream pads prompts to powers of two in this range, and knows no other limit of their length.
LEAST_PREFILL, MOST_PREFILL = 16, 32_768
# The orchestrator puts a beginning-of-text token before ids. Ours are taken as they are, and texts
# have such a token where their tokenizer writes one; this marks the one to drop.
NO_TOKEN = -1
# In the place of ResultTokens.valid: a token, the reply is over, there is no token yet.
TOKEN, OVER, WAITS = 1, 0, -1


@dataclasses.dataclass(eq=False)
class Slot:
    """A slot of JetStream: the ticket of its task, and its tokens that were not handed out yet.

    `num_tokens` were handed out. `is_over` if no more are sampled.
    """

    ticket: int | None = None
    tokens: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    num_tokens: int = 0
    is_over: bool = True

    def take(self) -> tuple[int, int, int]:
        """Returns the next token, 0 for none; its validity; and the tokens handed out so far."""
        if not self.tokens:
            return 0, OVER if self.is_over else WAITS, self.num_tokens
        self.num_tokens += 1
        return self.tokens.popleft(), TOKEN, self.num_tokens


@struct.dataclass
class StepTokens(_jetstream.engine_api.ResultTokens):
    """The tokens of a step, on the host: one of each slot, or none of slots that wait for theirs.

    `unread` has the tickets of slots that were not read, by slot; `begin_reading` is called with
    the step before its slots are read.
    """

    unread: dict[int, int] = struct.field(pytree_node=False)
    begin_reading: Callable[["StepTokens"], None] = struct.field(pytree_node=False)

    def convert_to_numpy(self) -> "StepTokens":
        """Returns the step itself."""
        self.begin_reading(self)
        return self

    def get_result_at_slot(self, slot: int) -> Any:
        """Returns the slot's token. Without a column where it waits: JetStream then goes on."""
        self.unread.pop(slot, None)
        found = super().get_result_at_slot(slot)
        columns = int(found.valid.item() != WAITS)
        return found.replace(tokens=found.tokens[:, :columns], valid=found.valid[:, :columns])


class Tokenizer(_jetstream.tokenizer_api.Tokenizer):
    """JetStream's view of a `transformers` tokenizer."""

    pad_id, bos_id = 0, NO_TOKEN

    def __init__(self, tokenizer: Any, served: ServedTokenizer) -> None:
        self._tokenizer, self._served = tokenizer, served
        self._ids_of = prompt_encoder(tokenizer)

    def encode(self, s: str, **options: Any) -> tuple[Any, int]:
        """Returns ids padded to the next of JetStream's prefill lengths, and how many count."""
        ids = np.asarray(self._ids_of(s), np.int32)
        pad = _jetstream.token_utils.pad_tokens
        return pad(ids, self.bos_id, self.pad_id, **options | {"is_bos": False})

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Returns the text of any ids; JetStream asks for that of one token at a time."""
        del options
        return self._served.decode(token_ids)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, where there is one."""
        return self._tokenizer.eos_token_id

    @property
    def stop_tokens(self) -> set[int]:
        """The ids that end a reply."""
        return set(self._served.ends)


class JetStreamEngine(_jetstream.engine_api.Engine):
    """An engine for JetStream's orchestrator, which may call it from several threads.

    A prompt that cannot be played ends without tokens, and stderr says why: the orchestrator ends
    the process for an exception. It does not tell the engine which slots it freed. Of each step it
    reads those whose requests go on; the others are freed when it reads the next step.
    """

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(self, served: ServedEngine, policy: Policy, tokenizer: Any) -> None:
        """`policy` is on the engine's devices, and `tokenizer` of `transformers`.

        Raises ValueError for a server of shorter prompts than JetStream's shortest.
        """
        if served.serving.max_prompt_tokens < LEAST_PREFILL:
            raise InputError(
                f"max_prompt_tokens is {served.serving.max_prompt_tokens}; JetStream pads prompts "
                f"to {LEAST_PREFILL} tokens and more, set at least {LEAST_PREFILL}"
            )
        self._served, self._policy, self._tokenizer = served, policy, tokenizer
        self._lock = threading.Lock()
        self._service: RolloutService | None = None
        self._slots = [Slot() for _ in range(self.max_concurrent_decodes)]
        self._num_tasks = 0
        # The step that is read, and what was not read of those before it.
        self._reading: StepTokens | None = None
        self._unread: collections.deque[dict[int, int]] = collections.deque()

    def load_params(self) -> Policy:
        """Returns the policy."""
        return self._policy

    def init_decode_state(self) -> RolloutService:
        """Returns the service, whose slots are empty then. It is opened at the first call."""
        with self._lock:
            if self._service is None:
                self._service = open_service(self._served, self._policy, self._on_tokens)
            for slot in range(self.max_concurrent_decodes):
                self._free(slot)
            return self._service

    def prefill(
        self, *, params: Policy, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> np.ndarray:
        """Returns the ids of the prompt, i32[T], behind those of `existing_prefix`."""
        del params
        ids = np.asarray(padded_tokens, np.int32)[:true_length]
        ids = ids[1:] if ids[:1].tolist() == [NO_TOKEN] else ids
        return ids if existing_prefix is None else np.concatenate([existing_prefix, ids])

    def insert(self, prefix: Any, decode_state: RolloutService, slot: int) -> RolloutService:
        """Submits the task of a prompt for this slot, whose task before it is given up."""
        ids, size = np.asarray(prefix).tolist(), self._served.engine.config.vocab_size
        with self._lock:
            self._free(slot)
            if ids and min(ids) >= 0 and max(ids) < size:
                [ticket] = decode_state.submit([self._task(ids)])
                self._slots[slot] = Slot(ticket, is_over=False)
            else:
                _say(f"a prompt of {len(ids)} ids is not played; it needs some, of 0 to {size - 1}")
        return decode_state

    def _task(self, ids: Sequence[int]) -> Task:
        number, self._num_tasks = self._num_tasks, self._num_tasks + 1
        return Task(
            episode=number,
            group=number,
            prompt=Prompt(token_ids=tuple(ids)),
            seed=MAX_SEED + 1 + number % (MAX_SEED + 1),
            limits=Limits(max_turn_tokens=self._served.serving.context_tokens),
        )

    def generate(
        self, params: Policy, decode_state: RolloutService
    ) -> tuple[RolloutService, StepTokens]:
        """Returns the next token of each slot, under the weights that the service has.

        Plays a round of the service where all tokens of the last one were handed out.
        """
        del params
        with self._lock:
            while self._unread:
                for number, ticket in self._unread.popleft().items():
                    if self._slots[number].ticket == ticket:
                        self._free(number)
            if not any(slot.tokens for slot in self._slots):
                self._play_round(decode_state)
            tickets = {i: s.ticket for i, s in enumerate(self._slots) if s.ticket is not None}
            data = np.array([slot.take() for slot in self._slots], np.int32)
        return decode_state, StepTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
            unread=tickets,
            begin_reading=self._begin_reading,
        )

    def _play_round(self, service: RolloutService) -> None:
        for each in service.step():
            service.release(each.row)
            if each.trajectory.stop_reason == NONFINITE_LOGITS:
                _say(each.trajectory.detail)
            for slot in self._slots:
                slot.is_over |= slot.ticket == each.ticket

    def _on_tokens(self, ticket: int, tokens: NewTokens) -> None:
        [slot] = [slot for slot in self._slots if slot.ticket == ticket]
        slot.tokens.extend(tokens.token_ids)

    def _begin_reading(self, step: StepTokens) -> None:
        """Notes what was not read of the step before; without the lock, which a round holds."""
        if self._reading is not None:
            self._unread.append(self._reading.unread)
        self._reading = step

    def free_resource(self, slot: int) -> None:
        """Gives up the task of a slot, if it has one."""
        with self._lock:
            self._free(slot)

    def _free(self, slot: int) -> None:
        freed, self._slots[slot] = self._slots[slot], Slot()
        if self._service is not None and freed.ticket is not None:
            self._service.abort({freed.ticket})

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Returns the placement of a prompt's ids between two engines: whole on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def get_tokenizer(self) -> Any:
        """Returns the message in which JetStream describes a tokenizer."""
        return _jetstream.tokenizer_pb2.TokenizerParameters(path="earl_jax")

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        """Returns the tokenizer of the policy."""
        del metadata
        return Tokenizer(self._tokenizer, self._served.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self._served.rollout.num_slots

    @property
    def max_prefill_length(self) -> int:
        """The longest prompt: of longer ones the orchestrator keeps the end. A power of two."""
        most = min(self._served.serving.max_prompt_tokens, MOST_PREFILL)
        return 1 << (most.bit_length() - 1)

    @property
    def mesh(self) -> Any:
        """The mesh of the engine."""
        return self._served.engine.layout.mesh


def _say(words: str) -> None:
    print(f"jetstream_engine: {words}", file=sys.stderr)
