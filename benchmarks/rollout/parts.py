# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark; each prints a Markdown table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rollout.engines import OURS, Contestant, Engine, Found, header, row, take_turns
from benchmarks.rollout.work import Message, make_messages, tail_lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the parts."""

    prompt: int = 64
    batches: tuple[int, ...] = (16, 64)
    lengths: tuple[int, ...] = (128, 512)
    greedy: tuple[int, int] = (16, 64)
    requests: int = 256
    median: int = 32
    tail_batches: tuple[int, ...] = (16, 64, 256)
    tail_slots: tuple[int, ...] = (16, 64)
    conversations: int = 16
    turns: int = 10
    turn_tokens: int = 64
    env_ms: tuple[int, ...] = (0, 10, 100)
    waiting_slots: tuple[int, ...] = (64, 256, 512)
    waiting_episodes: int = 512
    slow_slots: int = 8
    slow_ms: tuple[int, ...] = (0, 1000)
    waiting_turns: int = 4
    waiting_tokens: int = 32


TINY = Sizes(
    prompt=8,
    batches=(2,),
    lengths=(8,),
    greedy=(2, 8),
    requests=16,
    median=2,
    tail_batches=(4,),
    tail_slots=(4,),
    conversations=2,
    turns=2,
    turn_tokens=8,
    env_ms=(0, 1),
    waiting_slots=(2, 4),
    waiting_episodes=4,
    slow_slots=2,
    slow_ms=(0, 20),
    waiting_turns=2,
    waiting_tokens=4,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The engines (`torch` once for each number of threads), sizes and repeats."""

    ours: Engine
    torch: Sequence[Engine]
    tunix: Sequence[Engine]
    sizes: Sizes
    repeats: int = 3
    temperature: float = 1.0

    @property
    def others(self) -> list[Engine]:
        """The engines that play static batches."""
        return [*self.torch, *self.tunix]


def _conversations(number: int, messages: int, num_tokens: int) -> list[list[Message]]:
    return [make_messages(f"conversation {i}", messages, num_tokens) for i in range(number)]


def _script(
    messages: Sequence[Sequence[Message]],
    turn_tokens: Sequence[int],
    num_slots: int,
    **options: Any,
) -> dict[str, Any]:
    """Returns a job for our engine."""
    messages = [[(message.text, message.ids) for message in messages] for messages in messages]
    words = {"messages": messages, "turn_tokens": list(turn_tokens)}
    return words | {"num_slots": num_slots} | options


def _batches(
    messages: Sequence[Sequence[Message]], lengths: Sequence[int], batch: int, **options: Any
) -> dict[str, Any]:
    """Returns a job for the others: the first messages as prompts."""
    prompts = [messages[0].ids for messages in messages]
    words = {"prompts": prompts, "lengths": list(lengths), "batch": batch, "max_tokens": 0}
    return words | options


def _briefly(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job with replies of two tokens, for engines that compile nothing."""
    if "messages" in job:
        return {**job, "turn_tokens": 2}
    return {**job, "lengths": [2] * len(job["lengths"])}


def _play(bench: Bench, job: Mapping[str, Any], label: str = OURS) -> Contestant:
    return Contestant(label, bench.ours, job, job)


def equal_lengths(bench: Bench) -> None:
    """Everybody's reply is equally long; nothing ends early."""
    sizes, names = bench.sizes, [engine.name for engine in bench.others]
    print(header("batch x new tokens", OURS, *names, "ours / best other"))
    for batch in sizes.batches:
        for new in sizes.lengths:
            best = take_turns(_equal(bench, batch, new, bench.temperature), bench.repeats)
            print(row(f"{batch} x {new}", *_against(best, names)), flush=True)
    batch, new = sizes.greedy
    found = take_turns(_equal(bench, batch, new, 0.0), 1)
    for name in names:
        pairs = zip(found[OURS]["replies"], found[name]["replies"], strict=True)
        same = sum(ours == theirs for ours, theirs in pairs)
        print(f"\nGreedy: {same} of {batch} replies of {new} tokens are those of {name}.")


def _against(best: Mapping[str, Found], names: Sequence[str]) -> list[str]:
    """Returns tokens per second of ours and of the others, and ours over the best of them."""
    speed = {label: found["tokens"] / found["seconds"] for label, found in best.items()}
    cells = [f"{speed[name]:,.0f}" for name in (OURS, *names)]
    fastest = max((speed[name] for name in names), default=None)
    return [*cells, f"{speed[OURS] / fastest:.2f}" if fastest else ""]


def _equal(bench: Bench, batch: int, new: int, temperature: float) -> list[Contestant]:
    messages, lengths = _conversations(batch, 1, bench.sizes.prompt), [new] * batch
    job = _batches(messages, lengths, batch, temperature=temperature)
    return [
        _play(bench, _script(messages, lengths, batch, temperature=temperature)),
        *(Contestant(engine.name, engine, job, _briefly(job)) for engine in bench.torch),
        *(Contestant(engine.name, engine, job, job) for engine in bench.tunix),
    ]


def long_tail(bench: Bench) -> None:
    """Most replies are short; static batches wait for their longest."""
    sizes, drawn = bench.sizes, {"temperature": bench.temperature}
    lengths = tail_lengths(sizes.requests, sizes.median)
    messages = _conversations(sizes.requests, 1, sizes.prompt)
    entered = [
        _play(bench, _script(messages, lengths, slots, **drawn), f"{OURS}, {slots} slots")
        for slots in sizes.tail_slots
    ]
    for batch in sizes.tail_batches:
        # Nobody knows beforehand how long the replies of a batch will be.
        job = _batches(messages, lengths, batch, max_tokens=sizes.prompt + max(lengths), **drawn)
        label = f"batches of {batch}"
        for engine in bench.torch:
            entered.append(Contestant(f"{engine.name}, {label}", engine, job, _briefly(job)))
        for engine in bench.tunix:
            entered.append(Contestant(f"{engine.name}, {label}", engine, job, job))
    best = take_turns(entered, bench.repeats)
    fastest = min(f["seconds"] for label, f in best.items() if label.startswith(OURS))
    print(
        header(
            f"{sum(lengths):,} tokens in {sizes.requests} replies",
            "s",
            "tokens/s",
            "seconds over ours",
        )
    )
    for label, found in best.items():
        seconds = found["seconds"]
        cells = (f"{seconds:.1f}", f"{found['tokens'] / seconds:,.0f}")
        print(row(label, *cells, f"{seconds / fastest:.2f}"), flush=True)
    _print_best(best, fastest)


def many_turns(bench: Bench) -> None:
    """Conversations: what was read stays read, or all of it is read again each turn."""
    sizes, drawn = bench.sizes, {"temperature": bench.temperature}
    messages = _conversations(sizes.conversations, sizes.turns, sizes.turn_tokens)
    script = _script(messages, [sizes.turn_tokens] * len(messages), len(messages), **drawn)
    ids = [[message.ids for message in messages] for messages in messages]
    job = {"messages": ids, "turn_tokens": sizes.turn_tokens, **drawn}
    entered = [
        _play(bench, script),
        *(
            Contestant(f"{engine.name}, reading again", engine, job, _briefly(job))
            for engine in bench.torch
        ),
        # Its programs are compiled for the lengths.
        *(Contestant(f"{engine.name}, reading again", engine, job, job) for engine in bench.tunix),
    ]
    best = take_turns(entered, bench.repeats)
    observed = sizes.conversations * sizes.turns * sizes.turn_tokens
    everything = observed * sizes.turns
    print(
        header(
            f"{sizes.conversations} x {sizes.turns} turns",
            "s",
            "tokens/s",
            "tokens prefilled",
            "of them known",
            "seconds over ours",
        )
    )
    for label, found in best.items():
        prefilled = found.get("prefilled", everything)
        cells = (
            f"{found['seconds']:.1f}",
            f"{found['tokens'] / found['seconds']:,.0f}",
            f"{prefilled:,}",
            f"{prefilled - observed:,}",
            f"{found['seconds'] / best[OURS]['seconds']:.2f}",
        )
        print(row(label, *cells), flush=True)
    _print_best(best, best[OURS]["seconds"])


def _print_best(best: Mapping[str, Found], ours_s: float) -> None:
    """Prints the fastest engine that is not ours, and how far behind it is."""
    others = {label: f["seconds"] for label, f in best.items() if not label.startswith(OURS)}
    if others:
        fastest = min(others, key=lambda label: others[label])
        print(f"\nThe best other, {fastest}, takes {others[fastest] / ours_s:.2f} times as long.")


def waiting(bench: Bench) -> None:
    """Environments that take their time."""
    sizes = bench.sizes
    messages = _conversations(sizes.waiting_episodes, sizes.waiting_turns, sizes.prompt)
    lengths = [sizes.waiting_tokens] * len(messages)
    columns = ("slots", "environment's ms a step", "tokens/s", "rows computed", "of them idle")
    columns += ("device idle", "no slot had work")
    print(header(*columns))
    for slots in sizes.waiting_slots:
        for env_ms in sizes.env_ms:
            # A round that waits for the slowest would have nobody go on meanwhile.
            options = {"env_ms": env_ms, "patience_s": 0.001}
            found = take_turns(
                [_play(bench, _script(messages, lengths, slots, **options))], bench.repeats
            )
            found = found[OURS]
            cells = (
                f"{found['tokens'] / found['seconds']:,.0f}",
                f"{found['decode_rows']:,}",
                f"{found['idle_rows'] / max(1, found['decode_rows']):.0%}",
                _idle(found),
                f"{found['env_wait_s'] / found['seconds']:.1%}",
            )
            print(row(slots, env_ms, *cells), flush=True)


def one_slow(bench: Bench) -> None:
    """One environment that takes its time, among quick ones."""
    sizes = bench.sizes
    messages = _conversations(8 * sizes.slow_slots, sizes.waiting_turns, sizes.prompt)
    lengths = [sizes.waiting_tokens] * len(messages)
    print(header("its ms a step", "tokens/s", "s", "waited for environments", "device idle"))
    for slow_ms in sizes.slow_ms:
        script = _script(messages, lengths, sizes.slow_slots, slow_ms=slow_ms)
        found = take_turns([_play(bench, script)], bench.repeats)[OURS]
        cells = (
            f"{found['tokens'] / found['seconds']:,.0f}",
            f"{found['seconds']:.2f}",
            f"{found['env_wait_s'] / found['seconds']:.1%}",
            _idle(found),
        )
        print(row(slow_ms, *cells), flush=True)


def _idle(found: Mapping[str, float]) -> str:
    """Returns the share of the time in which no round ran."""
    return f"{1 - found['busy_s'] / found['seconds']:.1%}"


PARTS: Mapping[str, tuple[str, Callable[[Bench], None]]] = {
    "equal": ("Equal lengths, tokens/s", equal_lengths),
    "tail": ("Long-tailed lengths", long_tail),
    "turns": ("Many turns", many_turns),
    "waiting": ("Environments that take their time", waiting),
    "slow": ("One slow environment among quick ones", one_slow),
}
