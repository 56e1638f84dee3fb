# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Wall time of the stages of a step."""

import contextlib
import time
from collections.abc import Iterator

import jax

from earl_jax.telemetry.trace import Trace

# The stages that this process is in, the innermost last; the first is none of a step.
_stages: list[str] = ["start"]


def stage_now() -> str:
    """Returns the stage that this process is in: "start", "train", or "after train"."""
    return _stages[-1]


class StageTimer:
    """Adds up seconds by stage name: `with timer("rollout"): ...`.

    Writes each stage to the `trace`, if there is one, as one of `step`.
    """

    def __init__(self, trace: Trace | None = None, step: int = 0) -> None:
        self.seconds: dict[str, float] = {}
        self._trace, self._step = trace, step

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Times the block; a stage that is entered twice adds up."""
        start = time.perf_counter()
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
            self.seconds[stage] = self.seconds.get(stage, 0.0) + end - start
            if self._trace is not None:
                self._trace.write(stage, self._step, start, end)

    def trace_until_ready(self, stage: str, array: jax.Array) -> None:
        """Writes the computation of `array` to the trace, if there is one; does not wait for it."""
        if self._trace is not None:
            self._trace.write_when_ready(stage, self._step, array)
