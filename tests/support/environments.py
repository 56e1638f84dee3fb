# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments of a few lines, and the environment of a task among them."""

import contextlib
import random
import threading
import time

from earl_jax.envs.environment import Message, Start, StepResult
from tests.support.episodes import tictactoe


class Talker:
    """An honest environment: three replies, a quarter of a point for each."""

    def __init__(self, seed: int):
        self.seed, self.replies = seed, 0

    def start(self):
        return Start(text=f"{self.seed}.", role="x")

    def step(self, reply: str):
        self.replies += 1
        if self.replies == 3:
            return StepResult(text="", reward=0.25, done=True, stop_reason="win", detail=reply)
        return StepResult(text=f"{self.seed + self.replies}.", reward=0.25, done=False)


class TakesTurns(Talker):
    """Goes on in turns with two conversations, and begins a third one between: 0 5 0 5 7 0."""

    numbers = (0, 5, 0, 5, 7, 0)

    def step(self, reply: str):
        self.replies += 1
        if self.replies == len(self.numbers):
            return StepResult(reward=1.0, done=True, stop_reason="win")
        number = self.numbers[self.replies]
        return StepResult(
            messages=(Message(role="user", text=f"{self.seed + self.replies}."),),
            reward=self.replies / 4,
            done=False,
            conversation=number,
            new_context=number not in self.numbers[: self.replies],
        )


class WithDefaults(Talker):
    """Has defaults of another type than annotated, that JSON changes, and that it cannot hold."""

    def __init__(
        self,
        *,
        limit: int = None,  # pyright: ignore[reportArgumentType]
        pair: tuple = (1, 2),
        tools: tuple = (len,),
        word: str = "a",
        seed: int = 0,
    ):
        super().__init__(seed)
        self.limit, self.pair, self.tools, self.word = limit, pair, tools, word


class Watched:
    """A game of Tic-Tac-Toe that does something before each of its steps, and after its last."""

    def __init__(self, task, before, over=lambda: None):
        self.game, self.before, self.over = tictactoe(task), before, over

    def start(self) -> Start:
        return self.game.start()

    def step(self, reply: str) -> StepResult:
        self.before()
        result = self.game.step(reply)
        if result.done:
            self.over()
        return result


class Lecture(Talker):
    """Begins with the same words, more than three chunks, and a number; answers may take time."""

    def __init__(self, seed: int, delay_s: float = 0.0):
        super().__init__(seed)
        self.delay_s = delay_s

    def start(self):
        return Start(text="0123456780123456780123456" + str(self.seed % 2), role="x")

    def step(self, reply):
        time.sleep(self.delay_s)
        return super().step(reply)


def lecture(task):
    return Lecture(task.args["seed"], 0.02 * (task.episode % 3 == 0))


class Wanderer:
    """Takes one to nine replies, rarely many; when an answer comes is a matter of luck."""

    def __init__(self, seed: int):
        self.left = min(9, int(random.Random(seed).paretovariate(1.0)))

    def start(self) -> Start:
        return Start(text=f"{self.left}.")

    def step(self, reply: str) -> StepResult:
        time.sleep(random.uniform(0.0, 0.004))
        self.left -= 1
        reward = len(reply) % 3 / 2
        if not self.left:
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        return StepResult(text=f"{self.left}.", reward=reward, done=False)


class Troubled(Wanderer):
    """Hangs at the first reply in some tasks; in others it raises, if the reply is of odd length.

    Evaluation is spared. Of a run's first 32 tasks four hang, and in eight some may fail.
    Those that hang in this process do so until the end of `hanging`.
    """

    released = threading.Event()

    @classmethod
    @contextlib.contextmanager
    def hanging(cls):
        # Another test of this process may have released its own.
        cls.released.clear()
        try:
            yield
        finally:
            cls.released.set()

    def __init__(self, index: int, seed: int):
        super().__init__(seed)
        in_run = index < 32
        self.hangs, self.raises = in_run and index % 8 == 3, in_run and index % 4 == 1

    def step(self, reply: str):
        while self.hangs and not self.released.wait(0.05):
            pass
        if self.raises and len(reply) % 2:
            raise OSError("the sandbox is down")
        return super().step(reply)


class EvenIsSolved:
    """Takes one reply, which is worth 1 in every other task, whatever it is."""

    def __init__(self, index: int):
        self.is_solved = index % 2 == 0

    def start(self) -> Start:
        return Start(text="?")

    def step(self, reply: str) -> StepResult:
        reward = 1.0 if self.is_solved else len(reply) % 3 / 2
        return StepResult(text="", reward=reward, done=True, stop_reason="end")


class FirstIsLong:
    """Takes one reply, and twenty in the first task of a run."""

    def __init__(self, index: int):
        self.left = 1 if index else 20

    def start(self) -> Start:
        return Start(text=f"{self.left}.")

    def step(self, reply: str) -> StepResult:
        self.left -= 1
        reward = len(reply) % 3 / 2
        if not self.left:
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        return StepResult(text=".", reward=reward, done=False)


class Shifting:
    """Takes eight replies, or one to a long text, by turns of so many tasks."""

    PHASE = 132

    def __init__(self, index: int):
        self.is_long = index // self.PHASE % 2 == 0
        self.left, self.letters = 8 if self.is_long else 1, random.Random(index)

    def start(self) -> Start:
        if self.is_long:
            return Start(text=f"{self.left}.")
        return Start(text="".join(self.letters.choices("abcdefghijklmnopqrstuvwxyz", k=120)))

    def step(self, reply: str) -> StepResult:
        self.left -= 1
        reward = len(reply) % 3 / 2
        if not self.left:
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        return StepResult(text=f"{self.left}.", reward=reward, done=False)
