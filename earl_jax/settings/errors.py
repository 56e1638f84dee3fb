# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one message: a mistake in what was given, or a failed run.

And the checks of settings that raise them.
"""

import contextlib
import errno
import os
import re
import sysconfig
import traceback
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What a person puts right by naming another folder or by being allowed to write there.
_MISTAKES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    # As where a file system takes no folders of users, such as /proc.
    errno.ENOENT,
)

# A disk that is full, limited or broken, which no flag puts right.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
# As libraries that raise errors of their own write the system's number in them.
_NUMBER = re.compile(r"os[ _]error(?:_code)?[ =']+(\d+)")


def is_mistake(error: OSError) -> bool:
    """Returns True where a folder that was named is no good; not for a full or broken disk."""
    return error.errno in _MISTAKES


def disk_in_words(error: BaseException) -> str:
    """Returns what is wrong with the disk, where that is what an error is about; "" elsewhere."""
    found = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number not in _DISK:
        return disk_in_words(error.__cause__) if error.__cause__ else ""
    name = error.filename if isinstance(error, OSError) else None
    quoted = re.search(r'"(/[^"]+)"', str(error))
    where = name or (quoted[1] if quoted else "a file")
    return (
        f"{where} cannot be written: {os.strerror(number)}. Make room there, or mend the disk, and "
        "give the same command again: a run goes on from its newest checkpoint"
    )


@contextlib.contextmanager
def writes_below(folder: Path) -> Iterator[None]:
    """Gives an error of the disk that names no file, as of a write into an open one, a place."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK and error.filename is None:
            error.filename = f"a file, most likely one below {folder},"
        raise


# Folders of code that is no user's: this package, and what is installed.
_INSTALLED = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


def in_words(error: BaseException) -> str:
    """Returns the message of an error; of one that is no ValueError, its type and place too."""
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}{where_raised(error)}"


def where_raised(error: BaseException) -> str:
    """Returns " (FILE, line N)" of the innermost call in a user's own code; "" without one."""
    calls = ((f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__))
    own = [call for call in calls if not call[0].startswith(("<", *_INSTALLED))]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


class RunError(RuntimeError):
    """The reason why a run cannot go on, through no mistake in what was given.

    A command that ends with it prints this message alone and exits with status 1.
    """


class InputError(ValueError):
    """A mistake in what was given. The message says what it was, what is allowed, what to change.

    A command that ends with it prints this message alone and exits with status 2. Any other error
    is one of the machine or of the program, and ends a command with status 1.
    """


def check_choices(section: Any, path: str) -> None:
    """Raises ValueError for a field of a `Literal` type that holds something else.

    `path` is the record's name in a config, such as "config.train".
    """
    for field, kind in typing.get_type_hints(type(section)).items():
        if typing.get_origin(kind) is typing.Literal:
            check_choice(getattr(section, field), typing.get_args(kind), f"{path}.{field}")


def check_choice(value: Any, choices: tuple[Any, ...], path: str) -> None:
    """Raises ValueError, with the choices, for a value that is none of them."""
    if value not in choices:
        raise InputError(f"{path} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_bounds(section: Any, path: str, bounds: Mapping[str, tuple[float, float | None]]) -> None:
    """Raises ValueError for a field outside its bounds; None is no upper bound.

    An infinite number is a mistake too.
    """
    for field, (least, most) in bounds.items():
        value = getattr(section, field)
        if not least <= value <= (1e30 if most is None else most):
            upper = "" if most is None else f" and at most {most}"
            raise InputError(f"{path}.{field} is {value}; it must be at least {least}{upper}")
