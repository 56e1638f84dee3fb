# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Wall time of the stages of a step."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.trace import Trace

# The stages that this process is in, the innermost last; the first is none of a step.
_stages: list[str] = ["start"]


def stage_now() -> str:
    """Returns the stage that this process is in: "start", "train", or "after train"."""
    return _stages[-1]


class StageTimer:
    """Adds up seconds by stage name: `with timer("rollout"): ...`.

    Writes each stage to the `trace`, if there is one, as one of `step`. `compile_s` are the seconds
    of a stage in which this thread waited for programs.
    """

    def __init__(self, trace: Trace | None = None, step: int = 0) -> None:
        self.seconds: dict[str, float] = {}
        self.compile_s = collections.defaultdict[str, float](float)
        self._trace, self._step = trace, step
        # When each stage was entered and left last.
        self._spans: dict[str, tuple[float, float]] = {}
        # The thread that waits for the newest computation; when the one before was ready, and the
        # seconds of all until then.
        self._waiting: threading.Thread | None = None
        self._ready_s = self._computed_s = 0.0

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Times the block; a stage that is entered twice adds up."""
        start, compiled_s = time.perf_counter(), compile_clock().own_seconds()
        _stages.append(stage)
        try:
            yield
            _stages[0] = f"after {stage}"
        except BaseException:
            # Who catches it says that it was in this stage.
            _stages[0] = stage
            raise
        finally:
            _stages.pop()
            end = time.perf_counter()
            self._spans[stage] = start, end
            self.seconds[stage] = self.seconds.get(stage, 0.0) + end - start
            self.compile_s[stage] += compile_clock().own_seconds() - compiled_s
            if self._trace is not None:
                self._trace.write(stage, self._step, start, end)

    def count_until_ready(self, stage: str, start_s: float, array: jax.Array) -> None:
        """Counts the computation of `array` since `start_s`, and traces it; returns at once.

        Where the one before is still computed, it begins behind that. What fails does not count.
        """
        # A copy of it, because the array itself may be donated before it is there.
        given = (self._waiting, stage, start_s, jnp.copy(array.addressable_data(0)))
        self._waiting = threading.Thread(target=self._wait, args=given, daemon=True)
        self._waiting.start()

    def busy_s(self, stage: str) -> float:
        """Returns the seconds of the computations, and of the stage's last block behind them.

        Example: computations from 1 to 3 and from 3 to 4, and a block from 3.5 to 6, are 5 seconds.
        """
        if self._waiting is not None:
            self._waiting.join()
        start_s, end_s = self._spans[stage]
        return self._computed_s + max(0.0, end_s - max(start_s, self._ready_s))

    def _wait(
        self, before: threading.Thread | None, stage: str, start_s: float, array: jax.Array
    ) -> None:
        if before is not None:
            before.join()
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError:
            return
        start_s, self._ready_s = max(start_s, self._ready_s), time.perf_counter()
        self._computed_s += self._ready_s - start_s
        if self._trace is not None:
            self._trace.write(stage, self._step, start_s, self._ready_s)
