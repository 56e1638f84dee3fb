# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A line of metrics.jsonl that the processes of a run write together."""

from earl_jax.run.step_log import of_all_processes

QUIET = {"switched": [], "switch_notes": [], "out_of_memory": None}


def test_costs_of_a_step_are_those_of_the_slowest_process():
    """Each cost by itself; what changed or failed in any process is there once."""
    first = QUIET | {"switch_s": 0.5, "peak_bytes_per_device": 7, "switched": ["train"]}
    second = QUIET | {"switch_s": 0.25, "peak_bytes_per_device": 9, "switched": ["train"]}
    second |= {"switch_notes": ["rollout data=8 -> data=4"], "out_of_memory": ["a move"]}
    assert of_all_processes([[first, 0.5, 3, 0.125], [second, 1.5, 2, 0.25]]) == {
        "switched": ["train"],
        "switch_notes": ["rollout data=8 -> data=4"],
        "out_of_memory": ["a move"],
        "switch_s": 0.5,
        "peak_bytes_per_device": 9,
        "compile_s": 1.5,
        "compiles": 3,
        "checkpoint_s": 0.25,
    }
    # What cost nothing is no key of the line.
    found = of_all_processes([[first, 0.0, 0, 0.0]])
    assert [found[name] for name in ("compile_s", "compiles", "checkpoint_s")] == [None] * 3
