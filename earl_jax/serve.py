# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a policy: python -m earl_jax.serve --workdir=DIR | --model=HF_DIR [--port=8000]."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence

from earl_jax.launch.start import compute_exactly, exit_status, start_jax
from earl_jax.serving.serve_flags import check_flags, parse_flags, sampling
from earl_jax.serving.served_policy import ServedPolicy, model_policy


def run_policy(flags: argparse.Namespace) -> ServedPolicy:
    """Returns the newest checkpoint of a run."""
    from earl_jax.config.file import read_workdir_config

    config = read_workdir_config(flags.workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    from earl_jax.run.saved_position import read_newest

    run, position, _ = read_newest(config, flags.workdir)
    params = run.learner.policy(run.judged_state(position.state))
    dtype = flags.compute_dtype or config.rollout.computes_as(config.model.compute_dtype)
    compute_exactly(dtype)
    return ServedPolicy(
        name=str(flags.workdir),
        version=position.step,
        template_arguments=config.chat.template_arguments,
        model=dataclasses.replace(run.origin.model, compute_dtype=dtype),
        vocab_size=run.origin.vocab_size,
        tokenizer=run.origin.tokenizer,
        end_ids=run.actor.renderer.end_of_turn_ids,
        max_context=config.rollout.max_context(run.origin.max_context),
        weight_dtype=flags.weight_dtype or config.rollout.weight_dtype,
        kv_dtype=flags.kv_dtype or config.rollout.kv_dtype,
        load=lambda layout: params,
        num_draft_tokens=config.rollout.num_draft_tokens,
    )


def serve_command(arguments: Sequence[str]) -> None:
    """Runs the command until it is ended. Raises ValueError for bad input."""
    flags = parse_flags(arguments)
    from earl_jax.sharding.layout import MeshShape

    check_flags(flags)
    mesh = MeshShape.parse(flags.mesh) if flags.mesh else None
    policy = run_policy(flags) if flags.workdir else model_policy(flags, mesh or MeshShape())
    drawn = sampling(flags, policy.sampling)

    import jax

    from earl_jax.dispatch.weights import publish
    from earl_jax.serving.server import run_server
    from earl_jax.serving.sizes import make_engine, served_engine

    engine, rollout = make_engine(flags, policy, mesh or MeshShape(data=len(jax.devices())))
    weights = policy.load(engine.layout)
    params = publish(weights, engine.parameter_shapes, engine.parameter_shardings).params
    # The fp32 weights are not needed any more.
    del weights
    policy = policy.without_weights()
    # Only now is it known how much memory the weights leave.
    run_server(flags, policy, served_engine(flags, policy, engine, rollout, drawn), params)


def main() -> None:
    """Runs the command of the console."""
    # Until the server is up; then it ends open requests first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    sys.exit(exit_status(lambda: serve_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
