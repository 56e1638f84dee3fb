# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tools, and a reward function, for the environment "tools"."""

import asyncio
import functools
from typing import ClassVar

import numpy as np


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(what: str) -> str:
    """Raises an error.

    Args:
        what: its message
    """
    raise ValueError(what)


def reach(host: str) -> str:
    """Asks a host that is away.

    Args:
        host: its name
    """
    raise ConnectionError(f"{host} is away")


def undescribed(a: int) -> int:
    """Has no line for its argument."""
    return a


def exact(reply: str, *, prompt: str, answer: str) -> dict[str, float]:
    """Pays 1 for the answer, and reports its length."""
    return {"reward": float(reply == answer), "length": float(len(reply))}


def power(a: int, b: int) -> dict:
    """Returns a power.

    Args:
        a: the base
        b: the exponent
    """
    return {"power": a**b}


def twice(function):
    """A decorator that does not keep the function's name."""

    def wrapped(a: int) -> int:
        """Doubles a result.

        Args:
            a: a number
        """
        return 2 * function(a)

    return wrapped


add_twice = twice(add)


def wrapped_outage() -> str:
    """Asks as a client of HTTP does, which raises an error of its own."""
    try:
        raise ConnectionRefusedError("port 7000")
    except OSError as error:
        raise RuntimeError("request failed") from error


async def grouped_outage() -> str:
    """Asks two at once."""
    raise ExceptionGroup("two", [ValueError("a"), TimeoutError("b")])


class SilentError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        """Raises."""
        raise ValueError("no text")


def silent() -> str:
    """Raises an error without a text."""
    raise SilentError


def numbers() -> dict:
    """Returns numbers of numpy."""
    return {"mean": np.float64(1.5), "count": np.int64(3), "all": np.arange(2)}


def positional(a: int, /) -> int:
    """Takes a number by position.

    Args:
        a: a number
    """
    return a


def many(**kwargs: int) -> int:
    """Takes any.

    Args:
        kwargs: numbers
    """
    return len(kwargs)


def unresolved(a: "Nothing") -> int:  # noqa: F821
    """Has a type that nobody knows.

    Args:
        a: a number
    """
    return 0


class Private:
    """A class without a tool."""

    def reward(self, reply: str) -> float:
        """Pays for any reply."""
        return 1.0


class Unpaid(Private):
    """A class whose reward takes no reply."""

    def count(self) -> int:
        """Counts."""
        return 1

    def reward(self) -> float:
        """Takes no reply."""
        return 1.0


class Careful:
    """A class with more than methods, and tools of every kind."""

    class Item:
        """No tool."""

    def __init__(self) -> None:
        """Has a function that is no tool."""
        self.helper = add

    @property
    def price(self) -> float:
        """No tool either, and not asked for."""
        raise RuntimeError("not ready")

    @staticmethod
    def one() -> int:
        """Returns 1."""
        return 1

    @classmethod
    def two(cls) -> int:
        """Returns 2."""
        return 2

    def reward(self, reply: str) -> float:
        """Pays for any reply."""
        return 1.0


no_function = functools.partial(add, 1)


def dicts(text: str) -> list:
    """Calls of a format that are none."""
    return [{"name": "add"}]


class Stock:
    """A shop's stock, which buying makes smaller; the episode is paid by what is left."""

    def __init__(self, *, row: dict, seed: int):
        """`row["stock"]` are numbers by item."""
        self.left, self.seed = dict(row["stock"]), seed

    def count(self, item: str) -> int:
        """Returns how many there are.

        Args:
            item: the name
        """
        return self.left[item]

    def buy(self, item: str, number: int) -> dict:
        """Takes some away.

        Args:
            item: the name
            number: how many
        """
        self.left[item] -= number
        return {"left": self.left[item]}

    def reward(self, reply: str) -> float:
        """Pays for a stock of nothing, if the reply says so."""
        return float(reply == "done" and not any(self.left.values()))


class Log:
    """Writes down what happens after an outage."""

    done: ClassVar[list[str]] = []

    async def leave(self) -> str:
        """Asks someone who is away."""
        await asyncio.sleep(0)
        raise TimeoutError("no answer")

    async def work(self) -> str:
        """Works for a while."""
        await asyncio.sleep(0.05)
        self.done.append("worked")
        return "worked"

    def reward(self, reply: str) -> float:
        """Pays for any reply."""
        return 1.0


class Meeting:
    """Two tools that each end only when the other was called too."""

    def __init__(self) -> None:
        """Begins with nobody there."""
        self.there = asyncio.Event()

    async def wait(self) -> str:
        """Waits for the other."""
        await self.there.wait()
        return "met"

    async def come(self) -> str:
        """Lets the other go on."""
        self.there.set()
        return "came"

    async def reward(self, reply: str) -> float:
        """Pays for any reply."""
        return 1.0
