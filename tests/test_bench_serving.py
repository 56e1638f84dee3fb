# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serving counts what it says; its clients ask as it says, of a server of this file."""

import asyncio

import pytest
from jetstream.core.proto import jetstream_pb2

from benchmarks.serving import Reply, ask_at_rate, ask_in_turn, summarize


def test_a_load_by_hand():
    """Three replies of 3, 1 and no tokens within 4 s: first ones after 1 and 0.5 s, then 0.75 s."""
    found = summarize([Reply(10, (11, 11.5, 12.5)), Reply(13.5, (14,)), Reply(11, ())])
    assert (found.requests_per_s, found.tokens_per_s) == (3 / 4, 4 / 4)
    assert found.first_ms == pytest.approx((750, 500 + 0.95 * 500))
    assert found.token_ms == pytest.approx((750, 750))


class Slow:
    """Answers each request with two tokens, 20 ms after each other, and counts who is there."""

    def __init__(self):
        self.open, self.most, self.began = 0, 0, []

    async def Decode(self, number):  # noqa: N802
        self.open += 1
        self.most = max(self.most, self.open)
        self.began.append(number)
        sample = {"token_ids": [number]}
        for _ in range(2):
            await asyncio.sleep(0.02)
            yield jetstream_pb2.DecodeResponse(stream_content={"samples": [sample]})
        self.open -= 1


def test_clients_ask_one_request_after_the_other():
    server = Slow()
    replies = asyncio.run(ask_in_turn(server, range(7), 3))
    assert server.most == 3 and sorted(server.began) == list(range(7))
    assert [len(reply.token_s) for reply in replies] == [2] * 7
    assert all(reply.token_s[0] - reply.sent_s >= 0.02 for reply in replies)


def test_requests_come_at_their_rate_whoever_is_answered():
    """A thousand in a second, each of which takes 40 ms: many are open at once."""
    server = Slow()
    replies = asyncio.run(ask_at_rate(server, range(50), 1000.0))
    assert server.most > 10 and server.began == list(range(50))
    assert len(replies) == 50
