# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The queue of prompts that JetStream's generate thread looks at before every step."""

from types import SimpleNamespace

import numpy as np

from earl_jax.serving.driver import PromptQueue
from earl_jax.serving.jetstream_engine import PROMPT_CHUNK


def test_replies_wait_for_a_short_prompt_and_not_for_a_long_one():
    """Steps are made where the queue says that it is empty: at no moment of a long one not."""
    short, long = (SimpleNamespace(prefill_content=np.zeros(n)) for n in (9, PROMPT_CHUNK + 1))
    prompts = PromptQueue()
    assert prompts.empty()
    prompts.put(short)
    assert not prompts.empty()
    prompts.put(long)
    assert not prompts.empty()  # the short one is read first
    assert prompts.get() is short and prompts.empty()  # the long one is next
    prompts.put(short)
    assert prompts.get() is long and prompts.empty()  # it is being read
    assert prompts.get() is short and prompts.empty()
    prompts.put(short)
    assert not prompts.empty()
    prompts.get()
    prompts.put(None)  # as JetStream ends the thread that reads
    assert not prompts.empty() and prompts.get() is None
