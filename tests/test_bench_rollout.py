# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/rollout plays what it says that it measures. Our side; the others need torch, Tunix.

Its parts run in this process, on a smaller model; jobs and answers go through JSON as they do
between processes.
"""

import collections
import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from earl_jax.models.config import ModelConfig

ROOT = Path(__file__).parent.parent
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
        from benchmarks.rollout.ours import answer_job

        self.found.append(
            json.loads(json.dumps(answer_job(self.player, json.loads(json.dumps(job)))))
        )
        return self.found[-1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Before the environment's packages: google-jetstream has one named benchmarks.
        patch.syspath_prepend(ROOT)
        from benchmarks.rollout import ours

        folder = tmp_path_factory.mktemp("bench") / "checkpoint"
        ours.write_checkpoint(folder, MODEL)
        yield InProcess(ours.Player(folder))


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


def test_prompts_have_the_length_that_is_asked_for(engine):
    from benchmarks.rollout.work import VOCAB_SIZE, make_messages, tokenizer

    assert len(tokenizer()) == VOCAB_SIZE
    said = make_messages("a", 3, 64)
    assert [len(message.ids) for message in said] == [64] * 3
    assert len({message.ids for message in said}) == 3
    assert said == make_messages("a", 3, 64) != make_messages("b", 3, 64)


def test_the_longest_reply_is_sixteen_times_the_median(engine):
    from benchmarks.rollout.work import tail_lengths

    lengths = tail_lengths(256, 32)
    assert len(lengths) == 256 and max(lengths) == 512
    assert statistics.median(lengths) == 32
    assert collections.Counter(lengths) == {16: 96, 32: 96, 64: 32, 128: 24, 256: 6, 512: 2}


def test_replies_are_equally_long(play):
    table, (warm_up, found, *_) = play("equal")
    assert table[2][0] == "2 x 8" and len(table) == 3
    assert [len(reply) for reply in found["replies"]] == [8, 8]
    assert found["tokens"] == 16 and found["heard"] == found["prefilled"] == 16
    assert 0 < found["busy_s"] < found["seconds"]
    assert warm_up["replies"] == found["replies"]


def test_turns_that_are_read_again_are_the_same_turns(play):
    table, found = play("turns")
    appended, again = found[-2:]
    assert appended["replies"] == again["replies"]
    assert [len(reply) for reply in appended["replies"]] == [16, 16]
    assert [line[3:5] for line in table[2:]] == [["32", "0"], ["64", "32"]]


def test_every_reply_of_the_tail_has_its_own_length(play):
    from benchmarks.rollout.work import tail_lengths

    _, found = play("tail")
    assert [len(reply) for reply in found[-1]["replies"]] == tail_lengths(16, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"), [("room", 1), ("waiting", 2), ("growth", 3), ("step", 1)]
)
def test_every_other_part_prints_its_table(play, part, rows):
    table, _ = play(part)
    width = len(table[0])
    body = [line for line in table[2:] if len(line) == width]
    assert len(body) == rows
