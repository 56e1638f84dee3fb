# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
import html.parser
import io
import json
import math
import re

import pytest

from earl_jax.telemetry.charts import Series, line_chart
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.telemetry.report import write_report
from earl_jax.telemetry.timeline import Segment, mesh_segments, mesh_switches

EPISODE = {
    "episode": 41,
    "group": 5,
    "role": "x",
    "reward": -1.0,
    "stop_reason": "illegal",
    "detail": "square <b>1</b> is taken",
    "num_turns": 1,
    "num_tokens": 5,
    "turn_rewards": [-1.0],
    "messages": [
        {"role": "user", "content": "your move"},
        {"role": "assistant", "content": "<script>alert('x')</script> & \"b2\""},
    ],
    "token_ids": [11, 12, 13, 14, 15],
    "wrote": ["e", "e", "p", "p", "e"],
}


def _step(step, **more):
    return {
        "step": step,
        "time_s": 2.0 * step,
        "reward_mean": step / 10,
        "context_tokens_mean": 100.0 + step,
        "context_tokens_max": 200 + step,
        "rollout_tokens_per_s": 1000.0,
        "stage_s": {"rollout": 1.5, "train": 0.5},
        "rollout_mesh": "data=8",
        "train_mesh": "fsdp=8",
        "logprob_mismatch_max": 1e-3,
        "peak_bytes_per_device": 2**30 * step,
        "budget_bytes_per_device": 2**34,
        "grad_norm": 1.0,
        **more,
    }


def _page(tmp_path, metrics, episodes=(), **more):
    path = tmp_path / "report.html"
    options = {"title": "a run", "config": {"num_steps": 3}, **more}
    write_report(path, metrics=metrics, episodes=episodes, **options)
    assert list(tmp_path.iterdir()) == [path]
    return path.read_text(encoding="utf-8")


class _Parser(html.parser.HTMLParser):
    """Checks that tags close in order; collects the tags with their attributes."""

    VOID = {"meta", "link", "img", "br", "input", "hr"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_hostile_episode_is_text(tmp_path):
    hostile = "</pre><script>evil()</script>"
    page = _page(
        tmp_path,
        [_step(1, decision=hostile, switched=["rollout"], rollout_mesh=hostile)],
        [EPISODE],
        title=hostile,
        notes=[hostile],
        config={"name": hostile},
    )
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;b2&#34;" in page
    assert "square &lt;b&gt;1&lt;/b&gt; is taken" in page
    assert "evil()</script>" not in page
    assert [tag for tag, _ in _Parser(page).tags].count("script") == 1  # our own tooltips


def test_hostile_keys_do_not_leave_a_chart(tmp_path):
    hostile = "'\"><script>evil()</script>"
    rows = [
        _step(1, stage_s={hostile: 1.0}),
        {"step": 1, "eval": {"name": hostile, "win": 0.5}},
        {"step": 1, "eval": {"name": "task", hostile: 0.5}},
    ]
    page = _page(tmp_path, rows)
    assert [tag for tag, _ in _Parser(page).tags].count("script") == 1


def test_the_page_loads_nothing(tmp_path):
    rows = [_step(1), {"step": 1, "eval": {"win": 0.5}}, _step(2)]
    page = _page(tmp_path, rows, [EPISODE])
    assert not re.search(r"https?://|@import|url\(", page)
    for _, attributes in _Parser(page).tags:
        assert not {"src", "href", "srcset", "action"} & attributes.keys()


def test_tokens_are_grouped_by_author(tmp_path):
    page = _page(tmp_path, [], [EPISODE])
    spans = re.findall(r'<span class="([ep])">([\d ]+)</span>', page)
    assert spans == [("e", "11 12"), ("p", "13 14"), ("e", "15")]


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1}],
        [{"step": 0, "eval": {"win": 0.0}}],
        [{"step": 0, "eval": {}}],
        [_step(1)],
        [_step(1, reward_mean=math.nan, grad_norm=math.inf, logprob_mismatch_max=0.0)],
        [_step(1, stage_s={"train": math.nan})],
        [{"step": 1, "reward_mean": 0.5}, {"step": 2, "loss": 0.1}],
    ],
)
def test_any_beginning_of_a_run_is_a_page(tmp_path, metrics):
    page = _page(tmp_path, metrics)
    _Parser(page)
    assert not re.search(r'(?:d|x|y|cx|cy|x1|y1)="[^"]*(?:nan|inf)', page)


def test_the_kl_is_named_for_the_sampler_and_its_estimator(tmp_path):
    page = _page(tmp_path, [_step(1, kl=0.01), _step(2, kl=0.02)])
    charts = [json.loads(a["data-chart"]) for tag, a in _Parser(page).tags if "data-chart" in a]
    assert "KL to the sampler" in page
    kl = {"name": "k3 estimate", "color": 0, "xs": [1, 2], "ys": [0.01, 0.02]}
    assert [kl] in [chart["series"] for chart in charts]


def test_only_what_the_run_has_is_charted(tmp_path):
    page = _page(tmp_path, [{"step": 1, "reward_mean": 0.5}, {"step": 2, "reward_mean": 1.5}])
    charts = [json.loads(a["data-chart"]) for tag, a in _Parser(page).tags if "data-chart" in a]
    assert [c["series"] for c in charts] == [
        [{"name": "reward", "color": 0, "xs": [1, 2], "ys": [0.5, 1.5]}]
    ]
    assert "Meshes" not in page and "Sample episodes" not in page


def test_the_seconds_that_a_step_took_are_charted_beside_those_expected(tmp_path):
    """By hand, of the stages that the selector counts, without a wait for programs."""
    stage_s = {"select": 9.0, "publish": 0.5, "rollout": 4.0, "dispatch": 0.25, "train": 2.0}
    rows = [
        {"step": 1, "stage_s": stage_s, "compile_s": 3.0, "expected_step_s": 9.0},
        {"step": 2, "stage_s": stage_s, "compile_s": 0.0, "expected_step_s": 6.5},
        {"step": 3, "stage_s": stage_s, "compile_s": 0.0, "expected_step_s": None},
    ]
    page = _Parser(_page(tmp_path, rows))
    charts = [json.loads(a["data-chart"]) for _, a in page.tags if "data-chart" in a]
    assert [
        {"name": "expected", "color": 0, "xs": [1, 2], "ys": [9.0, 6.5]},
        {"name": "taken", "color": 1, "xs": [1, 2], "ys": [3.75, 6.75]},
    ] in [chart["series"] for chart in charts]


def test_an_evaluation_is_charted_with_its_reward(tmp_path):
    rows = [
        {"step": step, "eval": {"name": "sums", "reward_mean": reward, "turn_too_long": 0.5}}
        for step, reward in ((0, -0.5), (1, 0.25))
    ]
    tags = _Parser(_page(tmp_path, rows)).tags
    charts = [json.loads(a["data-chart"])["series"] for tag, a in tags if "data-chart" in a]
    curves = [(curve["name"], curve["ys"]) for chart in charts for curve in chart]
    assert curves == [("turn_too_long", [0.5, 0.5]), ("reward", [-0.5, 0.25])]


def test_headlines(tmp_path):
    rows = [
        _step(1, time_s=50.0),
        {"step": 1, "eval": {"reward_mean": 0.5, "illegal": 0.25}},
        _step(2, time_s=10.0),  # a resumed run: its clock starts again
        {"step": 2, "eval": {"reward_mean": 0.25, "illegal": 0.5}},
    ]
    page = _page(tmp_path, rows)
    figures = re.findall(r"<b>([^<]*)</b><span>([^<]*)</span><small>([^<]*)</small>", page)
    assert figures == [
        ("2", "steps", "of 3"),
        ("1 min 00 s", "training time", ""),
        ("0.25", "last evaluation", "reward, step 2; illegal 0.5"),
        ("0.5", "best evaluation", "reward, step 1"),
        ("+0.150", "reward", "mean of the last 2 steps"),
        ("1k", "rollout tokens/s", "mean of the last 2 steps"),
        ("202", "longest context", "tokens"),
        ("0", "mesh switches", ""),
    ]


def test_a_run_that_was_resumed_with_fewer_steps_is_not_of_these(tmp_path):
    page = _page(tmp_path, [_step(4)])
    assert "<b>4</b><span>steps</span><small></small>" in page


def test_a_run_without_rewards_has_its_loss_in_the_headline(tmp_path):
    page = _page(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    assert "<b>1.500</b><span>loss</span><small>mean of the last 2 steps</small>" in page


MESHES = [
    {"step": 1, "rollout_mesh": "data=8", "train_mesh": "fsdp=8"},
    {"step": 2, "rollout_mesh": "data=8", "train_mesh": "fsdp=8"},
    {
        "step": 3,
        "rollout_mesh": "data=4,tensor=2",
        "train_mesh": "fsdp=8",
        "switched": ["rollout"],
        "decision": "contexts grew",
        "switch_s": 1.5,
    },
    {
        "step": 4,
        "rollout_mesh": "data=8",
        "train_mesh": "fsdp=4",
        "switched": ["rollout", "train"],
        "decision": {"rollout": "contexts shrank", "train": "it is faster"},
        "switch_s": {"rollout": 0.5, "train": 0.25},
    },
]


def test_segments_are_the_run_lengths_of_the_meshes():
    assert mesh_segments(MESHES, "rollout_mesh") == [
        Segment("data=8", 1, 2),
        Segment("data=4,tensor=2", 3, 3),
        Segment("data=8", 4, 4),
    ]
    assert mesh_segments(MESHES, "train_mesh") == [Segment("fsdp=8", 1, 3), Segment("fsdp=4", 4, 4)]
    assert mesh_segments([{"step": 1}], "train_mesh") == []


def test_switches_say_from_what_to_what_and_why():
    rows = [tuple(s.values()) for s in mesh_switches(MESHES)]
    assert rows == [
        (3, "rollout", "data=8", "data=4,tensor=2", "contexts grew", "1.50 s"),
        (4, "rollout", "data=4,tensor=2", "data=8", "contexts shrank", "0.50 s"),
        (4, "train", "fsdp=8", "fsdp=4", "it is faster", "0.25 s"),
    ]


def test_a_spike_survives_thinning():
    ys = [0.0] * 5000
    ys[1234] = 7.0
    svg = line_chart([Series(name="a", xs=range(5000), ys=ys)], label="x")
    (data,) = re.findall(r'data-chart="([^"]*)"', svg)
    (series,) = json.loads(html.unescape(data))["series"]
    assert len(series["xs"]) <= 200
    assert (1234, 7.0) in zip(series["xs"], series["ys"], strict=True)


def test_the_clock_goes_on_where_a_run_is_resumed(tmp_path):
    """Behind the last step that is kept, and once for each process."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(_step(n, time_s=40.0 * n)) + "\n" for n in (1, 2, 3)))
    with Progress(3, io.StringIO()) as progress, Recorder(tmp_path, progress) as recorder:
        recorder.drop_after(2)
        recorder.write({"step": 3, "reward_mean": 0.0})
        # Where memory took the state it goes back to a checkpoint, and time goes on.
        recorder.close()
        recorder.drop_after(1)
        recorder.write({"step": 2, "reward_mean": 0.0})
    times = [json.loads(line)["time_s"] for line in path.read_text().splitlines()]
    assert times[0] == 40 and 80 < times[1] < 150, "the 80 count once"


def test_a_run_that_resumes_without_metrics_has_a_report(tmp_path):
    """It writes one before its next step makes the file: someone may have taken it away."""
    with Progress(3, io.StringIO()) as progress, Recorder(tmp_path, progress) as recorder:
        recorder.drop_after(2)
        recorder.write_report("a run", {"num_steps": 3}, [])
        assert (tmp_path / "report.html").exists()
        assert not (tmp_path / "metrics.jsonl").exists()


def test_the_page_says_what_the_rule_of_an_asynchronous_run_has_cost(tmp_path):
    asynchrony = {"rule": "admission", "max_staleness": 1}
    rows = [_step(1, staleness_tokens=[30, 10]), _step(2, staleness_tokens=[20, 10, 6, 4])]
    page = _page(tmp_path, rows, config={"num_steps": 3, "asynchrony": asynchrony})
    words = "The run trained on 10 of 80 tokens (12%) beyond config.asynchrony.max_staleness=1"
    assert f"{words}, up to 3 versions old." in page
