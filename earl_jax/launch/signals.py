# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a run: SIGINT (Ctrl-C) and SIGTERM."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

# Exit status of a process that Ctrl-C ended at once: that of shells, 128 + SIGINT.
INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"


class StopSignals:
    """The signals that this process receives while the `with` block runs.

    The first one only sets `received`: the run looks at it before each round of a rollout and
    behind each step, saves and ends. A Ctrl-C behind it ends the process at once, with status 130.
    A second SIGTERM does not: launchers send several, and the run is saving.
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
        self._block = _listening(_SIGNALS, self._receive)
        self._block.__enter__()
        return self

    def __exit__(self, *of: Any) -> None:
        self._block.__exit__(*of)

    def _receive(self, number: int) -> None:
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
            _end_at_once(f"stopped at once by a second signal; {self._saved()}")


@contextlib.contextmanager
def ends_at_ctrl_c(words: str) -> Iterator[None]:
    """Ends the process at a Ctrl-C in the block, with `words` and status 130.

    Where Ctrl-C is ignored, as in a shell's job in the background, it still is.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    with _listening((signal.SIGINT,), lambda number: _end_at_once(words)):
        yield


def _end_at_once(words: str) -> NoReturn:
    """Ends this process, from any thread: `sys.exit` in a thread would end the thread alone."""
    os.write(2, f"\n{words}\n".encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def _listening(numbers: Sequence[int], receive: Callable[[int], None]) -> Iterator[None]:
    """Calls `receive` with the number of each of these signals that comes, in a thread.

    Python runs its handlers in the main thread, between two bytecodes, which a compilation keeps
    waiting for minutes. So a thread reads the signals as the C handler writes them.
    """

    def listen() -> None:
        while (byte := os.read(read, 1)) != _END:
            if byte[0] in numbers:
                receive(byte[0])

    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = {number: signal.signal(number, _do_nothing) for number in numbers}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.write(write, _END)
        thread.join()
        os.close(write)
        os.close(read)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal, so that Python writes it to the wakeup file descriptor and goes on."""
