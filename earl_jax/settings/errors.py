# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one message: a mistake in what was given, or a failed run."""

import errno

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
)


def is_mistake(error: OSError) -> bool:
    """Returns True where a folder that was named is no good; not for a full or broken disk."""
    return error.errno in _MISTAKES


class RunError(RuntimeError):
    """The reason why a run cannot go on, through no mistake in what was given.

    A command that ends with it prints this message alone and exits with status 1.
    """


class InputError(ValueError):
    """A mistake in what was given. The message says what it was, what is allowed, what to change.

    A command that ends with it prints this message alone and exits with status 2. Any other error
    is one of the machine or of the program, and ends a command with status 1.
    """
