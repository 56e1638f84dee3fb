# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The host's time for the rounds of a rollout, in milliseconds of processor time.

    uv run python -m benchmarks.host_rounds [--slots=256,512]

The service, its block manager, the table of pages, the index of prompts, and the inputs and outputs
of rounds are those of the package. There are no devices: a round's tokens are there at once, and
what it takes to make them up is left out. So are copies to and from devices, and environments.
Prompts are those of prefixes.py, and all come at once. A table of rollout.md.
"""

import gc
import statistics
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.pages import machine, parser_of, table
from benchmarks.prefixes import CHUNK, GROUP, TOKENS, make_groups
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine, Policy, Session
from earl_jax.engine.pages import PageTable, dense_pool
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs, pack_inputs, unpack_outputs
from earl_jax.envs.text.conversation import Completion
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import Limits, RolloutConfig
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape, make_layout

BURST, SAMPLED, PAGE, VOCAB = 16, 512, 128, 150_000
MODEL = ModelConfig(num_layers=1, width=8, num_heads=1, num_kv_heads=1, head_size=8, ffn_size=8)


class NoDevices(Engine):
    """An engine whose rounds are over at once. `apart_s` is the time of making their tokens up."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, make_layout(MeshShape()))
        self.apart_s = 0.0
        # By slot: tokens that are left of its turn.
        self._left = np.zeros(config.num_slots, np.int32)

    def give_pages(self, state: Any, table: np.ndarray) -> Any:
        """Returns the state as it is."""
        return state

    def play(
        self, params: Any, state: Any, inputs: RoundInputs, **options: Any
    ) -> tuple[Any, RoundOutputs]:
        """Returns a burst of tokens of each slot that is in a turn."""
        pack_inputs(inputs)
        start_s = time.thread_time()
        self._left = np.where(inputs.begin_turn, inputs.turn_limit, self._left)
        count = np.minimum(self._left, BURST)
        self._left -= count
        numbers = np.zeros((len(count), 2 * BURST), np.int32)
        columns = [count[:, None], self._left[:, None] > 0]
        packed = np.concatenate([numbers, *columns], axis=1).astype(np.int32)
        self.apart_s += time.thread_time() - start_s
        return state, unpack_outputs(packed)


def open_service(engine: NoDevices) -> RolloutService:
    """Returns a service with pages for every slot to be full."""
    num_slots, rule, max_tokens = engine.config.num_slots, engine.config.page_rule, TOKENS + SAMPLED
    pools = [np.zeros((1, 1, PAGE, MODEL.head_size), np.float32)]
    pool = dense_pool(1, num_slots, max_tokens, rule)
    session = Session(
        engine=engine,
        policy=Policy(params=None, version=0),  # pyright: ignore[reportArgumentType]
        state=types.SimpleNamespace(cache=types.SimpleNamespace(pools=pools)),  # pyright: ignore
        max_tokens=max_tokens,
        pages=PageTable(pool, num_slots=num_slots, rule=rule),
    )

    def grow(session: Session, tokens: int, pages: int) -> Session:
        raise AssertionError("there are pages and tokens for all")

    config = RolloutConfig(
        num_slots=num_slots,
        episodes_per_step=num_slots,
        chunk_size=CHUNK,
        burst=BURST,
        page_size=PAGE,
    )
    return RolloutService(
        session,
        config,
        lambda: Completion(lambda ids: "", ()),
        None,
        None,
        grow,
        num_devices=1,
        sampling=Sampling(),
    )


def play(num_slots: int) -> list[float]:
    """Returns the milliseconds of the rounds until the first turns end, in their order."""
    config = EngineConfig(
        model=MODEL,
        vocab_size=VOCAB,
        num_slots=num_slots,
        num_rows=num_slots,
        chunk_size=CHUNK,
        rules=SlotRules(burst=BURST, end_of_turn_ids=()),
        seed=0,
        page_size=PAGE,
    )
    engine = NoDevices(config)
    service = open_service(engine)
    prompts = [prompt for each in make_groups(num_slots // GROUP) for prompt in each]
    limits = Limits(max_turn_tokens=SAMPLED)
    service.submit(
        [
            Task(episode=i, group=i // GROUP, prompt=Prompt(token_ids=tuple(ids)), limits=limits)
            for i, ids in enumerate(prompts)
        ]
    )
    # What is left of making the prompts is not collected while rounds are played.
    gc.collect()
    times, finished = [], []
    while not finished:
        engine.apart_s, start_s = 0.0, time.thread_time()
        finished = service.step()
        times.append(1e3 * (time.thread_time() - start_s - engine.apart_s))
    return times


def measure(num_slots: int) -> Iterator[dict[str, Any]]:
    """Yields the milliseconds of the kinds of rounds."""
    times, reads = play(num_slots), TOKENS // CHUNK
    for rounds, some in (
        (f"all {num_slots} prompts come", times[:1]),
        (f"{num_slots // GROUP} slots read, the others wait for them", times[1:reads]),
        ("these take the prompts over, and all sample", times[reads : reads + 1]),
        ("all sample", times[reads + 1 : -1]),
    ):
        mean, most = statistics.mean(some), max(some)
        yield {"slots": num_slots, "rounds": rounds, "number": len(some)} | {
            "mean, ms": mean,
            "most, ms": most,
        }


if __name__ == "__main__":
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--slots", default="256,512", help="numbers of slots")
    chosen = map(int, parser.parse_args().slots.split(","))
    print(f"{table([row for number in chosen for row in measure(number)])}\n\n{machine()}")
