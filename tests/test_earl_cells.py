# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""EARL's table of 30 cells by the selector's own candidates."""

import dataclasses

import pytest

from benchmarks import earl_cells
from benchmarks.earl_cells import CELLS, SETUPS, Cell, Found, Setup, is_right, predicted

OUT_OF_MEMORY = CELLS[4]


@pytest.fixture(scope="module")
def found():
    candidates = earl_cells.candidates_for(Setup())
    return {cell: predicted(candidates, cell) for cell in CELLS}


def test_a_cell_is_right_by_its_sign_or_by_pages_that_do_not_fit():
    gains = [is_right(Cell(1, 1, 5.0), Found(gain, True)) for gain in (0.1, -0.1)]
    assert gains == [True, False]
    short = [is_right(Cell(1, 1, None), Found(5.0, fits)) for fits in (True, False)]
    assert short == [False, True]


def test_the_signs_of_29_cells_and_the_cell_out_of_memory_are_predicted(found):
    assert len(CELLS) == 30 and OUT_OF_MEMORY == Cell(32768, 128, None)
    assert all(is_right(cell, each) for cell, each in found.items())
    assert not found[OUT_OF_MEMORY].fits


def test_pages_for_all_fit_where_fewer_than_512k_tokens_are_in_flight(found):
    """Four GPUs hold so many beside the weights: ten cells do not fit, of which nine ran."""
    short = {cell for cell, each in found.items() if not each.fits}
    assert short == {cell for cell in CELLS if cell.context * cell.responses >= 512 * 1024}
    assert len(short) == 10


def test_both_meshes_are_candidates_of_one_problem():
    candidates = earl_cells.candidates_for(Setup())
    four, eight = earl_cells.on_both(candidates, CELLS[0]).values()
    assert (four.plan.num_slots, eight.plan.num_slots) == (8 * 32, 8 * 16)
    assert candidates.problem.num_processes == 16


@pytest.mark.parametrize(("name", "right"), [*zip(SETUPS, (30, 30, 30, 30, 27), strict=True)])
def test_other_set_ups_lose_few_cells(name, right):
    """With a published engine's kernels, and with this project's."""
    for is_ours in (False, True):
        wrong = earl_cells.wrong_cells(dataclasses.replace(SETUPS[name], is_ours=is_ours))
        assert len(CELLS) - len(wrong) == right


def test_a_rule_by_context_alone_reaches_24_cells():
    """TP8 from some context on, where the cell out of memory counts for TP8."""

    def right(least: int) -> int:
        return sum((c.context >= least) == (c.gain is None or c.gain > 0) for c in CELLS)

    assert max(right(cell.context) for cell in CELLS) == 24
