# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""EARL's table of 30 cells: what is predicted of it, and under which assumptions."""

import dataclasses
import statistics

import pytest

from benchmarks.earl_cells import (
    CELLS,
    DGX_H100,
    MODEL,
    Cell,
    Reading,
    is_right,
    predicted_gain,
    with_host_tb,
    wrong_cells,
)
from benchmarks.plan import sizes_of

SIZES = sizes_of(MODEL)
OUT_OF_MEMORY = CELLS[4]


def cells_right(reading: Reading) -> int:
    return len(CELLS) - len(wrong_cells(SIZES, reading))


def test_a_cell_is_right_by_its_sign_or_by_having_no_room():
    assert [is_right(Cell(1, 1, 5.0), found) for found in (0.1, -0.1, None)] == [True, False, False]
    assert [is_right(Cell(1, 1, -5.0), found) for found in (0.1, -0.1)] == [False, True]
    assert [is_right(Cell(1, 1, None), found) for found in (0.1, None)] == [False, True]


def test_earls_table_is_predicted_from_sizes_and_a_data_sheet():
    """With a host of 2 TB all cells: which parallelism is faster, and where there is no room."""
    assert len(CELLS) == 30
    assert cells_right(Reading()) == 30
    assert OUT_OF_MEMORY == Cell(32768, 128, None)
    assert predicted_gain(SIZES, OUT_OF_MEMORY) is None


def test_the_29_signs_need_no_host_and_the_cell_without_room_does():
    assert wrong_cells(SIZES, Reading(keeps_waiting=False)) == [OUT_OF_MEMORY]
    assert wrong_cells(SIZES, Reading(alone=True)) == [OUT_OF_MEMORY]
    assert wrong_cells(SIZES, with_host_tb(2.45)) == [OUT_OF_MEMORY]
    assert [cells_right(with_host_tb(tb)) for tb in (1, 1.06, 1.07, 2.44, 4)] == [
        28,
        29,
        30,
        30,
        29,
    ]


@pytest.mark.parametrize("fraction", [0.69, 0.75, 0.8])
def test_the_signs_are_right_whether_responses_wait_for_each_other_or_not(fraction):
    for in_turn in (False, True):
        assert cells_right(Reading(fraction=fraction, in_turn=in_turn)) == 30


def test_with_a_full_memory_the_signs_need_responses_that_wait():
    """Those that are wrong have 512K tokens, a little more than four GPUs hold."""
    wrong = wrong_cells(SIZES, Reading(in_turn=True))
    assert {cell.context * cell.responses for cell in wrong} == {512 * 1024}
    assert len(wrong) == 4
    assert cells_right(Reading(fraction=0.92)) == 30 > cells_right(Reading(fraction=0.93)) == 28
    assert cells_right(Reading(fraction=0.68)) == 29


@pytest.mark.parametrize(
    "changes",
    [{"memory_bytes_per_s": factor} for factor in (0.4 / 0.8, 1 / 0.8)]
    + [{"flops_per_s": factor} for factor in (0.3 / 0.6, 1 / 0.6)]
    + [{"start_s": factor, "hop_s": factor} for factor in (0.0, 4.0)],
)
def test_the_signs_do_not_depend_on_assumed_rates(changes):
    rates = {name: getattr(DGX_H100, name) * factor for name, factor in changes.items()}
    assert cells_right(Reading(host=dataclasses.replace(DGX_H100, **rates))) == 30


def test_a_rule_by_context_alone_reaches_24_cells():
    """TP8 from some context on, where a cell without room counts for TP8."""

    def right(least: int) -> int:
        return sum(
            (cell.context >= least) == (cell.gain is None or cell.gain > 0) for cell in CELLS
        )

    assert max(right(cell.context) for cell in CELLS) == 24


def test_sizes_of_gains_are_not_predicted():
    """As plan.md says: far too large where caches do not fit, and off by points where they do."""
    pairs = [(cell.gain, predicted_gain(SIZES, cell)) for cell in CELLS if cell.gain is not None]
    off = [abs(found - gain) for gain, found in pairs if gain < 0]
    assert statistics.median(off) < 9 and 10 < max(off) < 15
    above = [(gain, found) for gain, found in pairs if gain > 0]
    assert all(gain < 7 and 25 < found < 52 for gain, found in above)
