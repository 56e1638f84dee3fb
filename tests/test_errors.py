# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exit status of a command: 2 for a mistake in what was given, 1 for every other error."""

import pytest

from earl_jax.launch.start import exit_status
from earl_jax.settings.errors import InputError


def ends_with(error: Exception):
    def command() -> None:
        raise error

    return command


def test_mistake_in_what_was_given_is_one_message_and_status_2(capsys):
    assert exit_status(lambda: None) == 0
    assert exit_status(ends_with(InputError("config.seed is -1; give 0 or more"))) == 2
    assert capsys.readouterr().err == "error: config.seed is -1; give 0 or more\n"


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(28, "No space left on device"), RuntimeError("lost")]
)
def test_other_errors_keep_their_traceback_and_end_with_1(error, capsys):
    with pytest.raises(type(error)):
        exit_status(ends_with(error))
    assert capsys.readouterr().err == ""
