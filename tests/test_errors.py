# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exit status of a command: 2 for a mistake in what was given, 1 for every other error."""

import importlib.util
import os
import subprocess
import sys

import pytest

from earl_jax.launch.start import exit_status
from earl_jax.settings.errors import InputError
from tests.support import ROOT


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


@pytest.mark.slow_except("gpu*")
@pytest.mark.parametrize(
    ("platform", "plugins", "extra"),
    [
        ("gpu", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "pip install 'jax[cuda13]'"),
        ("tpu", ("libtpu",), "pip install 'jax[tpu]'"),
    ],
    ids=["gpu", "tpu"],
)
def test_devices_whose_plugin_is_absent_end_with_status_2_and_the_extra(
    tmp_path, platform, plugins, extra
):
    if any(map(importlib.util.find_spec, plugins)):
        pytest.skip(f"a plugin for {platform} is installed here")
    flags = [f"--config.devices.platform={platform}", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "earl_jax.main", *flags],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: config.devices.platform is {platform!r}, but JAX's plugin")
    assert extra in line
    assert not (tmp_path / "run").exists()
