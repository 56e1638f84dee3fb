# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The curves of benchmarks/staleness.md."""

import html
import json
import re

import pytest

from benchmarks.pages import read_table
from benchmarks.staleness import LAGS, LOSSES, PAGE, curves_of

ROW = {"reward at the end": "0.8", "spread": "0.1", "10": "0.2", "20": "0.8"}


def curves_in(svg: str) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the points of each curve, by its name."""
    (data,) = re.findall(r'data-chart="([^"]*)"', svg)
    series = json.loads(html.unescape(data))["series"]
    return {one["name"]: (one["xs"], one["ys"]) for one in series}


def test_a_row_is_a_curve_and_a_bar_of_its_seeds():
    rows = [{"loss": "naive", "eta": "16"} | ROW, {"loss": "decoupled", "eta": "16"} | ROW]
    svg = curves_of(rows)
    found = curves_in(svg)
    assert found["naive, eta 16"] == found["decoupled, eta 16"] == ([10, 20], [0.2, 0.8])
    # One standard deviation each way, side by side behind the last step.
    (left, _), ends = found["naive, eta 16, end"]
    assert ends == pytest.approx([0.7, 0.9])
    assert 20 < left < found["decoupled, eta 16, end"][0][0]
    # Eta 16 is the fifth colour; dashes are those of naive alone, its bar's too.
    assert set(re.findall(r'<g class="(s\d)">', svg)) == {"s4"}
    assert svg.count('class="curve dashed"') == 2 and svg.count('class="curve"') == 2


def test_the_picture_is_of_the_numbers_on_the_page():
    """Call `benchmarks.staleness.draw` where this fails."""
    svg = PAGE.with_suffix(".svg").read_text()
    assert svg == curves_of(read_table(PAGE, "table"))
    cells = {f"{loss}, eta {lag}" for lag in LAGS for loss in LOSSES}
    assert {curve for curve in curves_in(svg) if not curve.endswith("end")} == cells
