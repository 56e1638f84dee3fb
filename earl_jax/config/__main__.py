# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the complete configuration of a training command, as JSON: `python -m earl_jax.config`.

Takes the flags of `python -m earl_jax.main`, checks them, and starts nothing.
"""

import json
import sys
from collections.abc import Sequence

from earl_jax.config.file import given_config, make_config
from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.launch.start import exit_status


def print_config(arguments: Sequence[str]) -> None:
    """Prints the config of these flags. Raises ValueError for a mistake in them."""
    flags, overrides = parse_flags(arguments)
    if flags.replay:
        config, _ = replayed_config(flags.replay, flags, overrides)
    else:
        config = make_config(given_config(flags.config, overrides)[0], overrides)
    workdir = {"workdir": str(flags.workdir)} if flags.workdir else {}
    print(json.dumps(workdir | config.as_dict(), indent=2, default=str))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print_config(sys.argv[1:])))
