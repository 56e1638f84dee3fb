# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts of a server: made in processes that can be ended, one client after the other."""

import asyncio
import contextlib
import os
import re
import time
from pathlib import Path

import grpc
import pytest

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.serving.requests import RequestError
from earl_jax.serving.texts import MOST_WORKERS, Texts
from tests.support.served import MODEL

# "y" makes a template that never ends, "d" one that divides by zero, and so on.
TEMPLATE = """\
{%- set word = messages[0].content -%}
{%- if word == 'd' %}{{ 1 // 0 }}
{%- elif word == 'y' %}
  {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif word == 'h' %}{{ 'x' * 10000000 }}
{%- elif word == 'm' %}{{ 'x' * 100000000000 }}
{%- elif word == 'r' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- else %}<|user|>{{ word }}<|end|><|assistant|>{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    loaded = load_tokenizer(MODEL)
    loaded.chat_template = TEMPLATE
    return loaded


@contextlib.contextmanager
def texts_of(tokenizer, timeout_s: float = 30.0):
    with contextlib.closing(Texts(tokenizer, {}, timeout_s=timeout_s, most_bytes=2**20)) as texts:
        yield texts


def message(word: str) -> dict:
    return {"messages": [{"role": "user", "content": word}], "tools": [], "arguments": {}}


async def refusal(texts, job) -> str:
    with pytest.raises(RequestError) as caught:
        await texts.ids_of("x", **job)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.words


def children(pid: int) -> set[int]:
    return {int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


async def until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def test_template_failure_is_an_error_of_its_request(tokenizer):
    async def play(texts) -> None:
        for job, words in (
            (message("d"), "chat template refuses the messages: .*zero"),
            (message("h"), "template makes a text of 10000000 letters .* holds at most 1048576"),
            (message("m"), "refuses the messages: MemoryError"),
            (message("r"), "refuses the messages: .*recursion"),
            (message("<|end|>"), "contains the control token"),
            ({"text": "\ud800"}, "lone surrogate"),
        ):
            assert re.search(words, await refusal(texts, job))
            assert await texts.ids_of("x", text="abc") == tokenizer.encode("abc")
        whole = tokenizer.encode("<|user|>abc<|end|><|assistant|>")
        assert await texts.ids_of("x", **message("abc")) == whole

    with texts_of(tokenizer) as texts:
        asyncio.run(play(texts))


def test_endless_template_is_ended_and_delays_no_other_request(tokenizer):
    """Its client's own next prompt waits for it; those of others are made at once."""

    async def play(texts) -> None:
        await texts.ids_of("x", text="a")
        [worker] = children(texts._process.pid)
        start = time.perf_counter()
        endless = asyncio.ensure_future(refusal(texts, message("y")))
        await asyncio.sleep(0.1)
        own = asyncio.ensure_future(texts.ids_of("x", text="b"))
        for _ in range(3):
            await texts.ids_of("another", text="b")
        assert not endless.done() and not own.done()
        assert "takes more than 4 s (--text_timeout_s" in await endless
        assert 3.9 < time.perf_counter() - start < 20
        assert await own == tokenizer.encode("b")
        await until(lambda: worker not in children(texts._process.pid))

    with texts_of(tokenizer, timeout_s=4.0) as texts:
        asyncio.run(play(texts))


def test_a_client_that_left_costs_nothing_more(tokenizer):
    """Prompts that never end, of as many clients as there are workers, and of more that wait."""

    async def play(texts) -> None:
        tasks = [
            asyncio.ensure_future(texts.ids_of(f"client {i}", **message("y")))
            for i in range(3 * MOST_WORKERS)
        ]
        await until(lambda: len(children(texts._process.pid)) == MOST_WORKERS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        start = time.perf_counter()
        assert await texts.ids_of("x", text="b") == tokenizer.encode("b")
        assert time.perf_counter() - start < 5
        await until(lambda: len(children(texts._process.pid)) == 1)

    with texts_of(tokenizer) as texts:
        asyncio.run(play(texts))


def test_a_worker_or_the_process_itself_that_is_killed_is_replaced(tokenizer):
    async def play(texts) -> None:
        assert await texts.ids_of("x", text="b") == tokenizer.encode("b")
        os.kill(children(texts._process.pid).pop(), 9)
        await until(lambda: not children(texts._process.pid))
        assert await texts.ids_of("x", text="b") == tokenizer.encode("b")
        [worker] = children(texts._process.pid)
        texts._process.kill()
        texts._process.wait()
        os.kill(worker, 9)
        await until(lambda: not Path(f"/proc/{worker}").exists())
        assert await texts.ids_of("x", text="b") == tokenizer.encode("b")

    with texts_of(tokenizer) as texts:
        asyncio.run(play(texts))


def test_nothing_is_left_when_the_server_ends(tokenizer):
    """Also where it ends without a word: its sockets close."""

    async def play(texts) -> None:
        await texts.ids_of("x", text="b")

    with texts_of(tokenizer) as texts:
        asyncio.run(play(texts))
        process, [worker] = texts._process, children(texts._process.pid)
        texts._control.close()
        assert process.wait(20) == 0
        for each in texts._idle:
            each.connection.close()
        asyncio.run(until(lambda: not Path(f"/proc/{worker}").exists()))
