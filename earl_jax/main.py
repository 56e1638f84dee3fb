# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trains: python -m earl_jax.main [--config=FILE] [--config.KEY=VALUE ...] [--workdir=DIR]."""

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.file import given_config, make_config
from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.launch.start import STOPPED, STOPPED_REPLAY, exit_status, start_jax
from earl_jax.settings.errors import writes_below


def train_command(arguments: Sequence[str]) -> int:
    """Runs the whole command, from its flags to its last line. Returns the exit status."""
    start_s = time.perf_counter()
    flags, overrides = parse_flags(arguments)
    from earl_jax.telemetry.progress import shown

    if flags.replay:
        config, workdir = replayed_config(flags.replay, flags, overrides)
    else:
        given, name = given_config(flags.config, overrides)
        config, workdir = make_config(given, overrides), flags.workdir or Path("runs") / name
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
    from earl_jax.launch.cluster import processes_only
    from earl_jax.launch.ending import end_together
    from earl_jax.launch.signals import StopSignals
    from earl_jax.preflight.preflight import check
    from earl_jax.run.workdir import saved_in_words
    from earl_jax.training import train

    if flags.check:
        with end_together():
            check(config, workdir, restart=flags.restart)
        return 0
    with (
        end_together(),
        writes_below(workdir),
        StopSignals(lambda: saved_in_words(workdir)) as signals,
    ):
        end = train(
            config, workdir, lambda: signals.received, restart=flags.restart, replay=flags.replay
        )
    status = 0
    if end.stopped and not end.is_replayed:
        # A launcher starts a run again that is STOPPED, and a replay would refuse its workdir.
        status = STOPPED_REPLAY if flags.replay else STOPPED
    if status:
        # A launcher that sees the first status above 0 ends the processes that are still here.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes = processes_only(config.distributed.timeout_s)
    if not processes.is_first:
        return status
    evaluation = end.evaluation
    # That of a run that was stopped is of a step on the way.
    if evaluation and not end.stopped:
        played = f"{evaluation['episodes']} episodes of " if "episodes" in evaluation else ""
        print(f"{played}{evaluation['name']}: {shown(evaluation)}")
    if end.is_replayed:
        print(f"{end.stopped}: the run that it replays came no further")
    elif end.stopped and flags.replay:
        print(f"{end.stopped}. A replay begins again: give it a new --workdir")
    elif end.stopped:
        all_of_them = "on each host, with its own process_id: " if processes.count > 1 else ""
        again = shlex.join(each for each in sys.orig_argv if each != "--restart")
        print(f"{end.stopped}. To go on: {all_of_them}{again}")
    else:
        print(f"done in {time.perf_counter() - start_s:.0f} s; look at {workdir / 'report.html'}")
    return status


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
