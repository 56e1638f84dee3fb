# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The queue of prompts that JetStream's generate thread looks at before every step."""

from types import SimpleNamespace

import numpy as np

from earl_jax.serving.driver import PromptQueue, request_name
from earl_jax.serving.jetstream_engine import PROMPT_CHUNK


def ask(client: str, number: int = 0, length: int = 9) -> SimpleNamespace:
    name = request_name(client, number)
    return SimpleNamespace(prefill_content=np.zeros(length), history_path=name)


def test_replies_wait_for_a_short_prompt_and_not_for_a_long_one():
    """Steps are made where the queue says that it is empty: at no moment of a long one not."""
    short, long = ask("a"), ask("a", 1, PROMPT_CHUNK + 1)
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


def test_clients_take_turns_whatever_the_number_of_their_requests():
    prompts = PromptQueue()
    asked = [ask("::1", i) for i in range(6)] + [ask("b", i) for i in range(2)] + [ask("c")]
    for each in asked:
        prompts.put(each)
    assert prompts.qsize() == 9
    names = [prompts.get().history_path for _ in asked]
    assert names == ["::1/0", "b/0", "c/0", "::1/1", "b/1", "::1/2", "::1/3", "::1/4", "::1/5"]
    assert prompts.qsize() == 0 and prompts.empty()


def test_the_client_with_the_fewest_requests_in_slots_is_next():
    prompts = PromptQueue()
    held = [ask("a", i) for i in range(3)]
    for each in held:
        prompts.put(each)
        assert prompts.get() is each
    prompts.put(ask("a", 3))
    later = [ask("b", i) for i in range(4)]
    for each in later:
        prompts.put(each)
    assert [prompts.get() for _ in range(3)] == later[:3]
    assert prompts.get().history_path == "a/3"
    # Those that are over count no more; one that waits is only taken from the queue.
    gone = ask("c")
    prompts.put(gone)
    prompts.remove(gone)
    prompts.put(ask("a", 4))
    for each in held:
        prompts.remove(each)
    assert prompts.get().history_path == "a/4" and prompts.get() is later[3]
    assert prompts.qsize() == 0
