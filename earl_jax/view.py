# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Shows runs on a local page: python -m earl_jax.view WORKDIR [WORKDIR ...] [--port=8900]."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from earl_jax.launch.start import exit_status
from earl_jax.settings.flags import parse_known
from earl_jax.telemetry.view import view_server

_HELP = """\
Serves a page over one or several runs, on this machine alone: the curves of all runs in the same
charts, a list of the runs with their last evaluation, and a link to the report of each. The page is
made anew at each request, also while runs go on. Nothing in a workdir is changed.

examples:
  python -m earl_jax.view runs/trail_tiny_cpu
  python -m earl_jax.view runs/a runs/b --port=8901

Ctrl-C ends it. To see runs of another machine: ssh -L 8900:127.0.0.1:8900 HOST
"""


def view_command(arguments: Sequence[str]) -> None:
    """Runs the command until it is ended.

    Raises InputError for a folder that holds no run, and as `parse_known`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.view",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("workdirs", metavar="WORKDIR", type=Path, nargs="+", help="folder of a run")
    parser.add_argument("--port", type=int, default=8900, help="0: any that is free (%(default)s)")
    flags = parse_known(parser, arguments)
    with view_server(flags.workdirs, flags.port) as server:
        host, port = server.server_address[:2]
        print(f"the page is at http://{host}:{port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: view_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
