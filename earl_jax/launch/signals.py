# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a run: SIGINT (Ctrl-C) and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"


class StopSignals:
    """The signals that this process receives while the `with` block runs.

    The first one only sets `received`: the run looks at it before each round of a rollout and
    behind each step, saves and ends. A Ctrl-C behind it ends the process at once, with status 130.
    A second SIGTERM does not: launchers send several, and the run is saving.

    Python runs its handlers in the main thread, between two bytecodes, which a compilation keeps
    waiting for minutes. So a thread reads the signals as the C handler writes them.
    """

    def __init__(self, saved: Callable[[], str]) -> None:
        """`saved()` says what is saved, for the user of a run that ends at once."""
        self._saved = saved
        self._received: list[str] = []

    @property
    def received(self) -> str:
        """The name of the first signal; "" before it."""
        return self._received[0] if self._received else ""

    def __enter__(self) -> "StopSignals":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {number: signal.signal(number, _do_nothing) for number in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.write(self._write, _END)
        self._thread.join()
        os.close(self._write)
        os.close(self._read)

    def _listen(self) -> None:
        while (byte := os.read(self._read, 1)) != _END:
            number = byte[0]
            if number not in _SIGNALS:
                continue
            self._received.append(signal.Signals(number).name)
            if len(self._received) == 1:
                again = "again " if number == signal.SIGINT else ""
                print(
                    f"* {self.received}: the run gives up its rollout, or finishes its step, saves "
                    f"and ends; Ctrl-C {again}ends it at once",
                    file=sys.stderr,
                    flush=True,
                )
            elif number == signal.SIGINT:
                # `sys.exit` in a thread ends the thread alone.
                os.write(2, f"\nstopped at once by a second signal; {self._saved()}\n".encode())
                os._exit(128 + number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal, so that Python writes it to the wakeup file descriptor and goes on."""
