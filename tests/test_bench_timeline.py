# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a run's stages, from spans and metrics that are made by hand."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks.timeline import COLORS, LEFT, RIGHT, WIDTH, Panel, picture, spans_of, steps_shown

SVG = "{http://www.w3.org/2000/svg}"


def event(name: str, tid: int, step: int, begin_s: float, end_s: float):
    times = {"ts": int(1e6 * (100 + begin_s)), "dur": int(1e6 * (end_s - begin_s))}
    return {"name": name, "ph": "X", "pid": 0, "tid": tid, "args": {"step": step}, **times}


EVENTS = [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "play"}},
    event("rollout", 1, 1, 0, 1),
    event("rollout", 1, 2, 2, 4),
    event("train", 2, 2, 4, 5.5),
    event("gradients", 3, 2, 3, 4.5),
    event("select", 2, 2, 1.5, 2),
    event("rollout", 1, 3, 6, 7),
]


def rectangles(svg: str):
    """The colour, left, top and width of each span, by its words."""
    found = {}
    for each in ET.fromstring(svg).iter(f"{SVG}rect"):
        if (title := each.find(f"{SVG}title")) is not None:
            numbers = [float(each.attrib[name]) for name in ("x", "y", "width")]
            found[title.text] = (each.attrib["fill"], *numbers)
    return found


def test_spans_are_those_of_the_steps_from_the_first_of_them_on():
    found = spans_of(EVENTS, 2, 2)
    assert [(s.stage, s.row, s.begin_s, s.end_s) for s in found] == [
        # Below the update that waits for them.
        ("gradients", "train", 1.5, 3.0),
        ("rollout", "play", 0.5, 2.5),
        ("train", "train", 2.5, 4.0),
        ("select", "train", 0.0, 0.5),
    ]
    assert len(spans_of(EVENTS, 1, 3)) == 6


def test_spans_of_all_panels_have_one_scale_and_the_colour_of_their_stage():
    """The longer of the panels takes 4 s, over the whole width."""
    panels = [Panel("one <1>", spans_of(EVENTS, 2, 2)), Panel("two", spans_of(EVENTS, 3, 3))]
    svg = picture(panels)
    found, second = rectangles(svg), (WIDTH - LEFT - RIGHT) / 4
    color, left, top, width = found["step 2: rollout, 2.000 s"]
    assert color == COLORS["rollout"][0]
    assert (left, width) == pytest.approx((LEFT + 0.5 * second, 2 * second), abs=0.1)
    _, left, below, width = found["step 3: rollout, 1.000 s"]
    assert (left, width) == pytest.approx((LEFT, second), abs=0.1) and below > top
    assert found["step 2: select, 0.500 s"][0] == COLORS["other"][0]
    # The trainer's row is below, with the gradients under the update.
    update, gradients = found["step 2: train, 1.500 s"], found["step 2: gradients, 1.500 s"]
    assert top < update[2] == gradients[2] < below
    assert list(found).index("step 2: gradients, 1.500 s") < list(found).index(
        "step 2: train, 1.500 s"
    )
    texts = [each.text for each in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"one <1>", "two", "play", "train", "0 s", "4 s"} <= set(texts)
    # Of each step and row one span has its number.
    assert texts.count("2") == 2 and texts.count("3") == 1


def rows(*compiled: int):
    return [{"step": n, **({"compile_s": 1.0} if n in compiled else {})} for n in range(1, 21)]


def test_steps_that_are_shown_are_the_first_calm_ones_behind_the_warm_up():
    assert steps_shown([rows(1, 2), rows(3)]) == (8, 11)
    assert steps_shown([rows(1, 2, 9), rows(3, 11)]) == (12, 15)
    assert steps_shown([rows(*range(8, 17)), rows()]) == (17, 20)
    with pytest.raises(SystemExit, match="without a new program"):
        steps_shown([rows(11), rows(14, 17, 20)])
