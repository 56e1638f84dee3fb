# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run end when one of them cannot go on.

Where one had too little memory in a program of all, it has written down what failed: started again,
they go on with less. It tells the others, and all end with a status that says so; whoever started
them starts them again (gpu_scripts/again.sh).
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import jax

from earl_jax.placement.placement import ShortAlone
from earl_jax.sharding.host_channel import HostChannel, open_channel
from earl_jax.sharding.waiting import PeerLost

# The exit status of a process that another one of its run has left.
LOST = 1
# And of one that is to be started again: EX_TEMPFAIL of sysexits.h, which nothing else here uses.
AGAIN = 75
# A call to process 0 waits no longer: who listens must be able to stop.
_SLICE_S = 2.0
# So long a process that lost another one waits for a word of why.
_WORD_S = 5.0
# So long process 0, which passes words on, stays behind its own.
_LINGER_S = 3.0


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Inside, a process of several ends as soon as another one says that all start again.

    In a thread, because it may be in a program that waits for the other one for ever.
    """
    if jax.process_count() == 1:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_listen, args=(open_channel(), over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # JAX's way out must not find it in a call.
        thread.join()


def end(error: Exception) -> NoReturn:
    """Ends this process of several, with a word of why on stderr.

    With status AGAIN where it, or the one that it lost, had too little memory in a program of all;
    else LOST. Not by `sys.exit`: what JAX does on its way out would wait for all.
    """
    words, number = str(error), f"process {jax.process_index()} of {jax.process_count()}"
    if isinstance(error, ShortAlone):
        open_channel().announce(words)
        _leave(words, AGAIN)
    with contextlib.suppress(PeerLost):
        if told := open_channel().announced(_WORD_S):
            _leave(told, AGAIN)
    if isinstance(error, jax.errors.JaxRuntimeError):
        words = (
            f"{number}: {words}. If that is a transfer, another process ended or cannot be "
            "reached. Start the run again: it goes on from its newest checkpoint"
        )
    _leave(words, LOST)


def _listen(channel: HostChannel, over: threading.Event) -> None:
    # Process 0 may be gone: whoever needs it hears that too.
    with contextlib.suppress(PeerLost):
        while not over.is_set():
            if told := channel.announced(_SLICE_S):
                _leave(told, AGAIN)


def _leave(words: str, status: int) -> NoReturn:
    print(f"error: {words}", file=sys.stderr, flush=True)
    if status == AGAIN and jax.process_index() == 0:
        time.sleep(_LINGER_S)
    os._exit(status)
