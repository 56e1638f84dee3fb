# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The error for a mistake in what was given: a setting, a file, a request."""


class InputError(ValueError):
    """A mistake in what was given. The message says what it was, what is allowed, what to change.

    A command that ends with it prints this message alone and exits with status 2. Any other error
    is one of the machine or of the program, and ends a command with status 1.
    """


class RunFailed(RuntimeError):
    """An end of a run that every process comes to alike, with its reason in words.

    A command that ends with it prints the message without a traceback and exits with status 1.
    """
