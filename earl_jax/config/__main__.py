# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the complete configuration of a training command, as JSON: `python -m earl_jax.config`.

Takes the flags of `python -m earl_jax.main`, checks them, and starts nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.file import given_config, make_config
from earl_jax.launch.start import exit_status


def print_config(arguments: Sequence[str]) -> None:
    """Prints the config of these flags. Raises ValueError for a mistake in them."""
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.config", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, help="a file in configs/")
    parser.add_argument("--workdir", type=Path, help="printed as it is")
    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    config = make_config(given_config(flags.config, overrides)[0], overrides).as_dict()
    workdir = {"workdir": str(flags.workdir)} if flags.workdir else {}
    print(json.dumps(workdir | config, indent=2, default=str))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print_config(sys.argv[1:])))
