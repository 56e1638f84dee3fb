# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A task with a tool, learnt with several seeds.

    uv run python -m benchmarks.tools [--write]

A shop has four items, of each a number from 0 to 9 that only the tool `count` knows. The prompt
asks for one of them; the answer is its number. In the conversations of the warm start half of the
replies are a number at random, without a call, and half of the calls ask for an item at random: so
a policy that does as they do answers right in one of five episodes. The environment is "tools"
(docs/howto/tools.md). An evaluation plays 256 tasks of another file. Two runs at once have a core
each.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import parser_of, show, table, with_spread
from benchmarks.runs import on_a_core_each, play
from earl_jax.telemetry.metrics import read_metrics

ITEMS = ("pears", "plums", "nuts", "figs")
SEEDS, STEPS, SFT_STEPS, EVERY = 5, 160, 40, 40
# Runs at once.
JOBS = 2


class Evaluation(NamedTuple):
    """An evaluation: means over its episodes, and the seconds that the run has taken.

    The reward is 1 for a right answer.
    """

    step: int
    seconds: float
    reward: float
    calls: float
    failed_calls: float


class Shop:
    """A shop whose stock the tool `count` knows."""

    def __init__(self, *, row: dict[str, Any]):
        """`row` has the `stock` and the `item` that the prompt asks for."""
        self._stock, self._item = row["stock"], row["item"]

    def count(self, item: str) -> str:
        """Returns how many there are.

        Args:
            item: the name of the item
        """
        return str(self._stock[item])

    def reward(self, reply: str) -> float:
        """Pays 1 for the number of the item that was asked for."""
        return float(reply == str(self._stock[self._item]))


def make_row(rng: random.Random) -> dict[str, Any]:
    """Returns a task."""
    item = rng.choice(ITEMS)
    stock = {each: rng.randint(0, 9) for each in ITEMS}
    return {"prompt": f"how many {item}?", "item": item, "stock": stock}


def make_conversation(rng: random.Random) -> dict[str, Any]:
    """Returns a conversation of the warm start."""
    row = make_row(rng)
    asked = {"role": "user", "content": row["prompt"]}
    if rng.random() < 0.5:
        answer = {"role": "assistant", "content": str(rng.randint(0, 9))}
        return {"messages": [asked, answer], "tools": described()}
    item = rng.choice(ITEMS)
    call = json.dumps({"name": "count", "arguments": {"item": item}})
    number = str(row["stock"][item])
    messages = [
        asked,
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": number, "name": "count"},
        {"role": "assistant", "content": number},
    ]
    return {"messages": messages, "tools": described()}


def described() -> list[dict[str, Any]]:
    """Returns the description of the shop's tool."""
    from transformers.utils.chat_template_utils import get_json_schema

    return [get_json_schema(Shop(row={"stock": {}, "item": ""}).count)]


def settings_of(folder: Path, seed: int) -> dict[str, Any]:
    """Returns the settings of a run on the files of `folder`."""
    return {
        "num_steps": STEPS,
        "seed": seed,
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "model": {"num_layers": 2, "width": 64, "num_heads": 4, "head_size": 16, "ffn_size": 128},
        "env": {
            "name": "tools",
            "args": {"tools": ("benchmarks.tools:Shop",), "failed_call_reward": -0.5},
        },
        "tasks": {"path": str(folder / "tasks.jsonl"), "eval_path": str(folder / "others.jsonl")},
        "rollout": {
            "num_slots": 64,
            "episodes_per_step": 128,
            "group_size": 8,
            "max_turn_tokens": 16,
            "max_turns": 4,
            "context_buckets": (64,),
        },
        "algorithm": "grpo",
        "train": {
            "learning_rate": 2e-3,
            "sft_path": str(folder / "talks.jsonl"),
            "sft_steps": SFT_STEPS,
            "sft_updates": 4,
            "sft_learning_rate": 4e-3,
            "entropy_coefficient": 0.01,
        },
        "eval": {"every_steps": EVERY, "games": 256, "final_games": 256},
    }


def write_files(folder: Path, seed: int) -> None:
    """Writes tasks, others to evaluate with, and conversations."""
    rng = random.Random(seed)
    for name, number, make in (
        ("tasks", 4096, make_row),
        ("others", 256, make_row),
        ("talks", 2048, make_conversation),
    ):
        lines = [json.dumps(make(rng)) for _ in range(number)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def measure(seed: int) -> list[Evaluation]:
    """Returns the evaluations of a run."""
    evaluations = list[Evaluation]()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), seed)
        play(settings_of(Path(name), seed), Path(name) / "run")
        seconds = 0.0
        for row in read_metrics(Path(name) / "run" / "metrics.jsonl"):
            seconds = row.get("time_s", seconds)
            if found := row.get("eval"):
                numbers = (found[name] for name in ("tool_calls", "failed_tool_calls"))
                times = row["step"], seconds
                evaluations.append(Evaluation(*times, found["reward_mean"], *numbers))
    return evaluations


def rows_of(found: Sequence[Sequence[Evaluation]]) -> list[dict[str, Any]]:
    """Returns the table: of each seed the mean reward by step, and calls and seconds at the end."""
    return [
        {
            "seed": seed,
            **{f"reward at {one.step}": one.reward for one in each},
            "calls": each[-1].calls,
            "failed calls": each[-1].failed_calls,
            "s": each[-1].seconds,
        }
        for seed, each in enumerate(found)
    ]


def main() -> None:
    """Runs all seeds and prints the table."""
    flags = parser_of(__doc__).parse_args()
    found = on_a_core_each(measure, range(SEEDS), JOBS)
    rows = with_spread(rows_of(found), "seed")
    show(table(rows), Path(__file__).with_suffix(".md"), write=flags.write)


if __name__ == "__main__":
    main()
