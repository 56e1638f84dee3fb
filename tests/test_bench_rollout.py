# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/rollout plays what it says that it measures. Our side; the others need torch, Tunix.

Its parts run in this process, on a smaller model; jobs and answers go through JSON as they do
between processes.
"""

import collections
import dataclasses
import functools
import json
import statistics
import sys

import pytest

from earl_jax.models.config import ModelConfig
from tests.support import ROOT

MODEL = ModelConfig(
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_size=32,
    attention_bias=True,
)


@dataclasses.dataclass
class InProcess:
    """Engine's `ask`, without a process."""

    player: object
    name: str = "ours"
    found: list = dataclasses.field(default_factory=list)

    def ask(self, job):
        from benchmarks.rollout.answering import answer_line
        from benchmarks.rollout.ours import answer_job

        answer = functools.partial(answer_job, self.player)
        self.found.append(json.loads(answer_line(answer, json.dumps(job))))
        return self.found[-1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from benchmarks.rollout import ours

    folder = tmp_path_factory.mktemp("bench") / "checkpoint"
    ours.write_checkpoint(folder, MODEL)
    return InProcess(ours.Player(folder))


@pytest.fixture
def play(engine, capsys):
    """Plays a part at tiny sizes: the lines that it prints, and what our engine answered."""

    def play(part):
        from benchmarks.rollout.parts import PARTS, TINY, Bench

        engine.found.clear()
        PARTS[part][1](
            Bench(ours=engine, torch=(), tunix=(), sizes=TINY, repeats=1, temperature=0.0)
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines], [
            *engine.found
        ]

    return play


CHILD = """
import sys
sys.path.insert(0, {folder!r})
from answering import answer_jobs

def answer(job):
    print("a library says something")
    if job["tokens"] < 0:
        raise ValueError("fewer than none")
    return {{"tokens": job["tokens"], "seconds": 1.0}}

answer_jobs(answer)
"""


@pytest.fixture
def children(engine):
    """Two processes that answer as engines do."""
    from benchmarks.rollout.engines import Engine

    script = CHILD.format(folder=str(ROOT / "benchmarks" / "rollout"))
    started = [Engine(name, [sys.executable, "-c", script]) for name in ("one", "other")]
    yield started
    for child in started:
        child.close()


def test_a_process_answers_its_jobs_whatever_it_prints(children):
    assert children[0].ask({"tokens": 3})["tokens"] == 3
    assert children[0].ask({"tokens": 4}).keys() == {"tokens", "seconds"}
    assert children[1].versions().startswith(f"Python {sys.version.split()[0]}, jax ")


def test_process_that_ends_is_reported_with_its_last_words(children):
    with pytest.raises(SystemExit, match="one ended:(.|\n)*fewer than none"):
        children[0].ask({"tokens": -1})


def test_other_work_is_no_comparison(children):
    from benchmarks.rollout.engines import Contestant, take_turns

    def entered(*tokens):
        jobs = [{"tokens": number} for number in tokens]
        pairs = zip(children, jobs, strict=True)
        return [Contestant(child.name, child, job, job) for child, job in pairs]

    assert take_turns(entered(5, 5), 2)["other"]["tokens"] == 5
    with pytest.raises(SystemExit, match="not the same work: {'one': 5, 'other': 6} new tokens"):
        take_turns(entered(5, 6), 1)


def test_prompts_have_the_length_that_is_asked_for(engine):
    from benchmarks.rollout.work import VOCAB_SIZE, make_messages, tokenizer

    assert len(tokenizer()) == VOCAB_SIZE
    sampled = make_messages("a", 3, 64)
    assert [len(message.ids) for message in sampled] == [64] * 3
    assert len({message.ids for message in sampled}) == 3
    assert sampled == make_messages("a", 3, 64) != make_messages("b", 3, 64)


def test_the_longest_reply_is_sixteen_times_the_median(engine):
    from benchmarks.rollout.work import tail_lengths

    lengths = tail_lengths(256, 32)
    assert len(lengths) == 256 and max(lengths) == 512
    assert statistics.median(lengths) == 32
    assert collections.Counter(lengths) == {16: 96, 32: 96, 64: 32, 128: 24, 256: 6, 512: 2}


@pytest.mark.slow
def test_replies_are_equally_long(play):
    table, (warm_up, found, *_) = play("equal")
    assert [line[0] for line in table] == ["batch x new tokens", "---", "2 x 8"]
    assert [len(reply) for reply in found["replies"]] == [8, 8]
    assert found["tokens"] == 16 and found["observed"] == found["prefilled"] == 16
    assert 0 < found["busy_s"] < found["seconds"]
    assert warm_up["replies"] == found["replies"]


def test_no_turn_is_prefilled_twice(play):
    table, found = play("turns")
    assert [len(reply) for reply in found[-1]["replies"]] == [16, 16]
    assert [line[3:5] for line in table[2:]] == [["32", "0"]]


def test_baseline_without_a_cache_reads_the_whole_conversation_each_turn(engine):
    """Two conversations of two turns, of one id a message and two a turn, which count the ids."""
    from benchmarks.rollout.answering import read_again

    given = []

    def generate(contexts, new):
        given.append([[*context] for context in contexts])
        return [[len(context)] * new for context in contexts]

    job = {"messages": [[[5], [6]], [[7], [8]]], "turn_tokens": 2}
    assert read_again(job, generate) == [[1, 1, 4, 4]] * 2
    assert given == [[[5], [7]], [[5, 1, 1, 6], [7, 1, 1, 8]]]


@pytest.mark.slow
def test_every_reply_of_the_tail_has_its_own_length(play):
    from benchmarks.rollout.work import tail_lengths

    _, found = play("tail")
    assert [len(reply) for reply in found[-1]["replies"]] == tail_lengths(16, 2)


@pytest.mark.slow
def test_environments_that_wait_have_a_row_for_each_size(play):
    table, found = play("waiting")
    assert len(table[2:]) == 4 and {len(line) for line in table} == {7}
    assert all(one["busy_s"] < one["seconds"] for one in found)


def test_the_hosts_work_of_a_round_is_counted_by_part(monkeypatch):
    from benchmarks import host

    monkeypatch.setattr(host, "ROUNDS", 4)
    found = host.measure(8, host.Work(2, 20))
    assert 8 <= found.pop("tokens") <= 8 * host.BURST
    assert len(found) == 9 and all(ms > 0 for ms in found.values()), found
