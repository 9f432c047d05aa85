"""`xtk report`: a self-contained page that shows all metrics of its runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xtk_processes import run_here, run_xtk

from xtk.pages import svg_curves
from xtk.pages.report_html import ReportedRun, headline, metric_title, report_page

VOID_TAGS = ("meta", "br", "rect", "line")
SPECIAL_NAME = 'student <b>&"x" 日本語'
TEXT = "Anna has <script>alert(1)</script> 3\u2028apples & pears"
UNFINISHED_METRICS = [
    {"step": 0, "loss": 3.0, "reward": 0.0},
    {"step": 10, "loss": 2.0, "reward": 0.25, "learning_rate": 1e-5, "rollout_entropy": 1.5, "rollout_length": 12.0},
    {"step": 20, "loss": math.nan, "reward": 0.5, "learning_rate": 0.0, "rollout_entropy": 1.25, "rollout_length": 9.5},
]
RESULTS = [
    {"model": "before", "data": "test.txt", "bits_per_byte": 1.5, "bytes": 900},
    {"model": "ce", "data": "test.txt", "bits_per_byte": 1.375, "bytes": 900},
    {
        "model": "after",
        "data": "test.txt",
        "bits_per_byte": 1.25,
        "bits_per_byte_error": 0.01,
        "bytes": 900,
        "difference": 0.25,
        "difference_error": 0.02,
    },
]


class Page(HTMLParser):
    """Parser that collects what a page shows and which resources it would load."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.rows: list[list[str]] = []
        self.samples: list[str] = []
        self.external: list[str] = []
        self.text = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.external += [name for name in found if name in ("src", "href", "xlink:href", "action", "srcset", "data")]
        self.external += [tag] if tag in ("script", "link", "iframe", "img", "object", "embed", "base", "form") else []
        self.external += [value for value in found.values() if value and ("url(" in value or "://" in value)]
        self.external += [name for name in found if name.startswith("on")]
        if tag == "polyline":
            (metric,) = (given["data-metric"] for name, given in self._open if name == "figure")
            (run,) = (given["data-run"] for name, given in self._open if name == "g")
            points = [tuple(map(float, point.split(","))) for point in str(found["points"]).split()]
            self.lines[str(metric), str(run)] = points
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if str(found.get("class")).startswith("sample"):
            self.samples.append("")
        if tag not in VOID_TAGS:
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_TAGS:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        names = [name for name, _ in self._open]
        if "style" in names:
            assert "url(" not in data
            assert "@import" not in data
        if "td" in names or "th" in names:
            self.rows[-1][-1] += data
        if self._open and str(self._open[-1][1].get("class")).startswith("sample"):
            self.samples[-1] += data

    def row(self, name: str) -> list[str]:
        (row,) = (row for row in self.rows if row and row[0] == name)
        return row[1:]


def finite_points(records, metric):
    found = [(one["step"], one[metric]) for one in records if isinstance(one.get(metric), int | float)]
    return [(step, value) for step, value in found if math.isfinite(value)]


@pytest.fixture(scope="module")
def runs(pair, cache, corpus, tmp_path_factory) -> tuple[Path, Path]:
    """Return a finished run and a killed run; the name of the killed run has special characters of HTML."""
    root = tmp_path_factory.mktemp("runs")
    losses = ["--loss", "ce", "--loss", "p-kl", "--max-steps", 6, "--logging-steps", 1]
    evaluation = ["--per-device-train-batch-size", 2, "--eval-data", corpus, "--eval-steps", 2, "--eval-on-start"]
    run_xtk("distill", pair.student, cache, *losses, *evaluation, "-o", root / "first")
    killed = root / SPECIAL_NAME
    killed.mkdir()
    recipe = json.loads((root / "first" / "recipe.json").read_text())
    recipe["identity"] |= {"seed": 7, "max_steps": 400}
    (killed / "recipe.json").write_text(json.dumps(recipe))
    lines = [json.dumps(record) for record in UNFINISHED_METRICS]
    (killed / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 30, "lo']))
    rollouts = [
        {"step": step, "prompt": 1, "text": TEXT, "finish_reason": "stop", "reward": step / 8} for step in range(20)
    ]
    rollout_lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rollouts)
    (killed / "rollouts.jsonl").write_text(rollout_lines, encoding="utf-8")
    return root / "first", killed


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> tuple[Path, dict]:
    """Return the page of both runs and the JSON that the command printed."""
    root = tmp_path_factory.mktemp("page")
    (root / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RESULTS))
    command = ["report", *runs, "--evaluation", root / "results.jsonl", "--baseline", "before", "--baseline", "ce"]
    command += ["--teacher", "ce", "-o", root / "page.html"]
    printed = json.loads(run_xtk(*command, "--json").stdout)
    first = (root / "page.html").read_bytes()
    (root / "page.html").unlink()
    assert run_xtk(*command).stdout == f"{root / 'page.html'}\n"
    assert (root / "page.html").read_bytes() == first, "same inputs, same bytes"
    return root / "page.html", printed


def test_every_metric_of_every_run_is_plotted_as_a_curve(runs, report):
    page = Page(report[0].read_text(encoding="utf-8"))
    assert page.external == []
    first = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for run, records in zip(runs, (first, UNFINISHED_METRICS), strict=True):
        names = {name for record in records for name in record} - {
            "step",
            "training_seconds",
            "tokens",
            "skipped_steps",
            "distillation_loss",  # equals the only loss with a teacher
            "teacher_bits_per_byte",  # of the first step, in the table of runs
            "student_bits_per_byte",
        }
        values = {name: {value for _, value in finite_points(first + UNFINISHED_METRICS, name)} for name in names}
        constant = {name for name in names if len(values[name]) == 1}
        assert not constant & {name for name, _ in page.lines}  # a table has their last values
        assert {"loss"} < names - constant
        for name in names - constant:
            assert len(page.lines[name, run.name]) == len(finite_points(records, name))
    assert ("reward", "first") not in page.lines
    for name in ("loss", "learning_rate"):  # both runs share a figure: pixels are one linear function of the values
        values = np.array(finite_points(first, name) + finite_points(UNFINISHED_METRICS, name))
        pixels = np.array(page.lines[name, "first"] + page.lines[name, SPECIAL_NAME])
        for axis, sign, error in ((0, 1, 0.051), (1, -1, 0.0051)):
            slope, offset = np.polyfit(values[:, axis], pixels[:, axis], 1)
            assert np.sign(slope) == sign
            assert np.abs(slope * values[:, axis] + offset - pixels[:, axis]).max() <= 2 * error
        assert pixels.min() >= 0


def test_tables_show_last_values_differences_results_and_recipes(runs, report):
    page, printed = Page(report[0].read_text(encoding="utf-8")), report[1]
    assert page.text.count("finished, 6 steps") == page.text.count("unfinished, at step 20 of 400") == 1
    assert printed["kind"] == "report"
    assert [one["path"] for one in printed["runs"]] == [str(run) for run in runs]
    last = json.loads((runs[0] / "xtk.json").read_text())["metrics"]
    assert printed["runs"][0]["metrics"] == last
    loss = svg_curves.format_number(last["loss"])
    difference = 2.0 - last["loss"]  # the last loss is NaN and is ignored
    sign = "+" if difference > 0 else "\N{MINUS SIGN}"
    assert page.row("loss") == [loss, f"2 {sign}{svg_curves.format_number(abs(difference))} compared with first"]
    assert page.row("reward") == ["", "0.5"]
    minus = "\N{MINUS SIGN}"
    compared = [
        "1.5 +0.125 compared with ce",
        f"1.375 {minus}0.125 compared with before",
        f"1.25 ± 0.01 {minus}0.25 compared with before {minus}0.125 compared with ce",
    ]
    assert page.row("test.txt: bits per byte") == compared
    first, *_, last_line = (json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines())
    gain = last_line["eval_bits_per_byte"] - first["eval_bits_per_byte"]
    bits, difference = (svg_curves.format_number(value) for value in (last_line["eval_bits_per_byte"], abs(gain)))
    expected = f"{bits} {'+' if gain > 0 else minus}{difference}"
    assert page.row("held-out bits per byte") == [f"{expected} compared with untrained", ""]
    assert ["teacher", "1.375", "", "", ""] in page.rows
    assert f"first has {last['eval_bits_per_byte']:.3f} bits per byte on held-out text" in page.text
    assert "; the teacher has 1.375." in page.text
    assert page.row("seed") == ["42", "7"]
    assert "2 of" in page.text, "two options differ"
    assert page.row("inputs.student.weights")[0].startswith("sha256:")


def test_completions_of_an_on_policy_run_are_shown_verbatim(report):
    page = Page(report[0].read_text(encoding="utf-8"))
    assert page.samples == [TEXT] * 6
    offsets = [page.text.index(f"step {step}, prompt 1, reward {reward}") for step, reward in ((1, 0), (20, 2.375))]
    assert offsets == sorted(offsets)


def test_only_a_page_of_the_same_runs_is_replaced_and_invalid_inputs_are_refused(runs, tmp_path):
    run = Path(shutil.copytree(runs[1], tmp_path / "run"))
    command = ["report", "-", "-o", tmp_path / "page.html"]
    run_xtk(*command, stdin=f"{run}\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 31, "loss": 1.0}) + "\n")
    run_xtk(*command, stdin=f"{run}\n")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "unfinished, at step 31" in page
    (tmp_path / "notes").write_text("notes")
    (run / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    (tmp_path / "broken.json").write_text("[1, 2]")
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "another.json").write_text(json.dumps([{**RESULTS[0], "bits_per_byte": 1.625}]))
    for message, *arguments in (
        ("page that was made from other inputs", runs[1], "-o", "page.html"),
        ("the output path is an existing file, which is not a page of xtk", runs[1], "-o", "notes"),
        ("metrics.jsonl, line 1", run, "-o", "new"),
        ("is not a run of xtk distill: it has no recipe.json", tmp_path, "-o", "new"),
        ("RUN names the same run twice", runs[0], runs[0], "-o", "new"),
        ("RUN names the same run twice", runs[0], f"{runs[0].parent}/../{runs[0].parent.name}/first/", "-o", "new"),
        ("not a run of xtk distill", runs[0], tmp_path / "typo", "-o", "new"),
        ("no bits per byte of the teacher", runs[0], "--evaluation", "results.json", "--teacher", "x", "-o", "new"),
        ("did you mean before", runs[0], "--evaluation", "results.json", "--baseline", "bfore", "-o", "new"),
        (
            "the model before has two different results for bits_per_byte on test.txt: 1.5000 and 1.6250",
            runs[0],
            "--evaluation",
            "results.json",
            "--evaluation",
            "another.json",
            "-o",
            "new",
        ),
        ("has a JSON value that is not an object", runs[0], "--evaluation", "broken.json", "-o", "new"),
    ):
        done = run_here("report", *arguments, cwd=tmp_path, code=1)
        assert message in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_runs_without_a_recipe_are_left_out(runs, tmp_path):
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead.log").write_text("")
    done = run_xtk("report", tmp_path / "dead", runs[1], tmp_path / "dead.log", "--json", "-o", tmp_path / "page.html")
    assert f"report: left out {tmp_path / 'dead'}" in done.stderr
    assert [run["path"] for run in json.loads(done.stdout)["runs"]] == [str(runs[1])]
    sweep_output = "".join(json.dumps({"path": str(path)}) + "\n" for path in (tmp_path / "never", runs[1]))
    done = run_xtk("report", "-", "-o", tmp_path / "swept.html", stdin=sweep_output)
    assert re.search(r"left out .*never: no recipe.json", done.stderr)


def reported_run(name: str, bits: list[float], objective: str, **values: float) -> ReportedRun:
    metrics = [{"step": step, "eval_bits_per_byte": value, **values} for step, value in enumerate(bits)]
    return ReportedRun(name, name, "finished", "sha256:0", {"losses": [objective]}, metrics)


@pytest.mark.parametrize(
    ("runs_bits", "teacher", "sentence"),
    [
        ({"ce-0": [3.2, 2.499]}, None, "ce-0 has 2.499 bits per byte on held-out text, 3.200 before training."),
        ({"ce-0": [3.2, 2.499], "distilled-0": [3.2, 2.304]}, 2.248,
         "distilled-0 has 2.304 bits per byte on held-out text, 0.195 fewer than ce-0 (2.499); "
         "the teacher has 2.248: 78% of the gap between ce-0 and the teacher is closed."),
        ({"ce-0": [3.2, 2.5], "distilled-0": [3.2, 2.6]}, 2.25,
         "ce-0 has 2.500 bits per byte on held-out text, the fewest of these runs; the teacher has 2.250."),
        ({"ce-0": [3.2, 2.5004], "distilled-0": [3.2, 2.4996]}, 2.25,
         "ce-0 and distilled-0 have 2.500 bits per byte on held-out text; the teacher has 2.250."),
        ({"a": [], "b": []}, None, ""),
    ],
)  # fmt: skip
def test_the_headline_is_the_result_in_a_sentence(runs_bits, teacher, sentence):
    assert headline([reported_run(name, bits, "ce") for name, bits in runs_bits.items()], teacher) == sentence


def test_only_comparable_values_are_compared_and_only_changing_ones_are_drawn():
    runs = [
        reported_run("ce-0", [3.0, 2.5], "ce", loss=3.5, ce=3.5, gradient_norm=1.0),
        reported_run("kl-0", [3.0, 2.3], "byte-kl", loss=0.7, ce=3.4, gradient_norm=1.0),
    ]
    html = report_page(runs, [], [], "", teacher_bits=2.2)
    page = Page(html)
    assert page.row("loss") == ["3.5", "0.7"]  # of different losses
    assert page.row("gradient norm") == ["1", "1"]
    assert page.row("ce, nats per token") == ["3.5", "3.4 \N{MINUS SIGN}0.1 compared with ce-0"]
    assert {metric for metric, _ in page.lines} == {"eval_bits_per_byte", "loss", "ce"}
    assert html.count('class="level"') == 1
    assert html.count(">teacher 2.2</text>") == 1
    assert html.count(">step</text>") == 3
    same = Page(report_page([runs[0], replace(runs[1], recipe={"losses": ["ce"]})], [], [], ""))
    assert "compared with ce-0" in same.row("loss")[1]


def test_a_sum_that_equals_a_single_loss_is_shown_once():
    runs = [
        reported_run("kl-0", [3.0, 2.3], "byte-kl", **{"loss": 0.7, "byte-kl": 0.7, "distillation_loss": 0.7}),
        reported_run("kl-1", [3.0, 2.4], "byte-kl", **{"loss": 0.8, "byte-kl": 0.8, "distillation_loss": 0.8}),
    ]
    page = Page(report_page(runs, [], [], ""))
    assert {metric for metric, _ in page.lines} == {"eval_bits_per_byte", "byte-kl"}
    assert page.row("byte-kl")[0] == "0.7"
    assert not [row for row in page.rows if row and row[0] in ("loss", "distillation loss")]
    weighted = [replace(runs[0], metrics=[{**line, "distillation_loss": 0.35} for line in runs[0].metrics]), runs[1]]
    page = Page(report_page(weighted, [], [], ""))
    assert page.row("distillation loss") == ["0.35", "0.8 +0.45 compared with kl-0"]


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("eval_bits_per_byte", "held-out bits per byte"),
        ("eval_top1_agreement/qwen_3", "held-out top-1 agreement (qwen_3)"),
        ("eval_my_task/exact_match", "held-out my_task (exact_match)"),
        ("region_tokens/answer", "region tokens (answer)"),
        ("byte-kl", "byte-kl"),
        ("peak_memory_gib", "peak memory"),
    ],
)
def test_titles_of_metrics_are_words_and_keep_names_of_teachers_and_tasks(metric, title):
    assert metric_title(metric) == title


numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=3000))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values):
    points = list(enumerate(values))
    thinned = svg_curves.thin_points(points)
    assert len(thinned) <= max(2 * svg_curves.THINNED_INTERVALS + 2, 1)
    assert set(thinned) <= set(points)
    assert thinned == sorted(thinned)
    assert {thinned[0], thinned[-1]} == {points[0], points[-1]}
    assert {min(value for _, value in thinned), max(value for _, value in thinned)} == {min(values), max(values)}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_finite_values_are_plotted_inside_of_the_plot_area(values):
    figure = svg_curves.curves_figure("loss", "", [svg_curves.MetricCurve("run", 0, list(enumerate(values)))])
    points = re.search(r'polyline points="([^"]+)"', figure)[1].split()
    assert len(points) == len(values)
    for point in points:
        assert svg_curves.MARGIN_TOP <= float(point.split(",")[1]) <= svg_curves.MARGIN_TOP + svg_curves.PLOT_HEIGHT


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_ticks_are_evenly_spaced_inside_of_their_range(low, size):
    ticks = svg_curves.round_ticks(low, low + size)
    assert 1 <= len(ticks) <= svg_curves.APPROXIMATE_TICKS + 1
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in ticks)
    steps = {round((after - before) / size, 6) for before, after in pairwise(ticks)}
    assert len(steps) <= 1 or max(steps) - min(steps) < 1e-5


def test_labels_of_ticks_differ():
    labels = [label for _, label in svg_curves.labelled_ticks(2.2173, 2.2181)]
    assert len(set(labels)) == len(labels) >= 2
    assert all(2.2173 <= float(label) <= 2.2181 for label in labels)


def test_a_metric_with_one_value_per_run_has_no_curve():
    runs = [reported_run("ce-0", [2.5], "ce"), reported_run("kl-0", [2.3], "byte-kl")]
    page = Page(report_page(runs, [], [], ""))
    assert not page.lines
    assert page.row("held-out bits per byte")[0] == "2.5"
