# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""All checks before a run, in the order in which a failure is cheapest to find."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from earl_jax.config.config import Config
from earl_jax.launch.agreement import check_same
from earl_jax.launch.cluster import Cluster, find_cluster, processes_only
from earl_jax.launch.layouts import across_in_words
from earl_jax.models.checkpoints.hf_read import check_weights
from earl_jax.placement.placement import Placement
from earl_jax.placement.stages import compiled_bytes
from earl_jax.preflight import hosts, kernels, links
from earl_jax.preflight.storage import check_storage
from earl_jax.rollout.load import expected_tokens
from earl_jax.run.build import Run
from earl_jax.run.saved_position import new_placement
from earl_jax.run.source import build_from
from earl_jax.run.workdir import changed_settings
from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.settings.errors import InputError


def check(config: Config, workdir: Path, *, restart: bool = False) -> None:
    """Checks all processes, and prints what was found; leaves nothing in the workdir.

    With `restart` the run is to begin again, whatever the workdir holds.
    Ends the process with status 1 where machines do not fit, and names them.

    Raises:
        ValueError: a mistake of the user's, with the host that has it.
    """
    # Each process by itself, before the first word of another: one that hangs is found by this.
    facts = hosts.facts_here()
    print(f"{processes_only(config.distributed.timeout_s).who}: {facts}", flush=True)
    cluster = find_cluster(0, config.distributed.timeout_s)
    say = _first_says(cluster)
    if cluster.count > 1:
        say(cluster.order_in_words())
    check_same(cluster, config.as_dict())
    say("config, code and versions: the same in all processes")
    cluster.check_kinds()
    # Mistakes in what was given, before machines are timed.
    for line in [] if restart else changed_settings(workdir, config.as_dict()):
        say(f"changed: {line}")
    for line in check_storage(cluster, workdir):
        say(line)
    saved = (path.name for path in (workdir / "checkpoints").glob("*"))
    is_new = restart or not any(map(str.isdigit, saved))
    run = build_from(config, workdir, cluster, lambda: "", is_new=is_new)
    if run.origin.checkpoint:
        check_weights(run.origin.checkpoint)
    for note in run.notes:
        say(note)
    problems, lines = hosts.misfits(cluster, facts)
    slow, rates = links.misfits(links.links(cluster))
    for line in (*lines, *rates):
        say(line)
    wrong, lines = kernels.misfits(_check_programs(run, say))
    for line in lines:
        say(line)
    if problems or slow or wrong:
        if cluster.is_first:
            print(f"error: {'; '.join((*problems, *slow, *wrong))}", file=sys.stderr)
        sys.exit(1)
    say("all checks passed")


def _first_says(cluster: Cluster) -> Callable[[str], None]:
    """Returns `print`, which does nothing in the other processes."""
    return (lambda text: print(f"* {text}", flush=True)) if cluster.is_first else lambda text: None


def _check_programs(run: Run, say: Callable[[str], None]) -> Placement:
    """Compiles the programs of the first step, and returns the placement with their plans.

    Raises ValueError for those over the budget.
    """
    placement = new_placement(run, say)
    placement.choose_step(expected_tokens(run.stages.rollout, None), None)
    rollout, train = placement.plans.rollout, placement.train
    plans: list[tuple[RolloutPlan | TrainPlan, int]] = [(train, placement.length)]
    if rollout is not None:
        plans.insert(0, (rollout, placement.max_tokens))
    for plan, tokens in plans:
        start_s, stage = time.perf_counter(), plan.stage
        num_bytes = compiled_bytes(run.stages, plan, tokens)
        if num_bytes is not None and plan is train:
            # The moments of a warm start are no argument of the program.
            num_bytes += placement.problem.update_footprint(train, tokens).trainer
        budget = run.problem.budget_bytes
        words = f"{stage} {plan.words()}, context {tokens}"
        if num_bytes is None or (budget is not None and num_bytes > budget):
            needs = (
                "more than a device has" if num_bytes is None else f"{num_bytes / 2**20:.1f} MiB"
            )
            raise InputError(
                f"{words}: needs {needs}, budget {(budget or 0) / 2**20:.1f} MiB per device "
                "(config.selector.budget_bytes_per_device)"
            )
        limit = "no budget" if budget is None else f"budget {budget / 2**20:.1f}"
        say(
            f"{words}: {num_bytes / 2**20:.1f} MiB per device, {limit}; compiled in "
            f"{time.perf_counter() - start_s:.1f} s"
        )
    if run.cluster.num_hosts > 1:
        layouts, names = run.stages.layouts, run.cluster.hosts
        if rollout is not None:
            say(f"rollout {across_in_words(layouts.rollout(rollout.mesh), names)}")
        say(f"train {across_in_words(layouts.train(train.mesh), names)}")
    return placement
