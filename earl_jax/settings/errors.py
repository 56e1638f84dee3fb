# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one message: a mistake in what was given, or a failed run."""


class RunError(RuntimeError):
    """The reason why a run cannot go on, through no mistake in what was given.

    A command that ends with it prints this message alone and exits with status 1.
    """


class InputError(ValueError):
    """A mistake in what was given. The message says what it was, what is allowed, what to change.

    A command that ends with it prints this message alone and exits with status 2. Any other error
    is one of the machine or of the program, and ends a command with status 1.
    """
