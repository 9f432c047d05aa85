"""`xtk report`: a page that shows every number of its runs, and needs nothing but itself."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xtk_processes import run_xtk

from xtk.commands import svg_curves

VOID = ("meta", "br", "rect", "line")
ODD = 'student <b>&"x" 日本語'
TEXT = "Anna has <script>alert(1)</script> 3\u2028apples & pears"
WRITTEN = [
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
ROLLOUTS = [
    {"prompt": "2 + 2 =", "completion": " 5", "prompt_number": 0, "reward": 0.0, "finish_reason": "stop"},
    {"prompt": "2 + 2 =", "completion": " 6", "prompt_number": 0, "reward": 0.0, "finish_reason": "stop"},
    {"messages": [{"role": "user", "content": "Hi", "train": False},
                  {"role": "assistant", "content": "A", "train": True},
                  {"role": "tool", "content": "B", "train": False},
                  {"role": "assistant", "content": "C", "train": True}],
     "prompt_number": 1, "finish_reason": "length"},
]  # fmt: skip
ANSWERS = [{"model": "after", "problem": 0, "sample": 0, "answer": TEXT, "reward": 1.0, "finish_reason": "stop"}]


class Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.rows: list[list[str]] = []
        self.samples: list[str] = []
        self.far: list[str] = []
        self.text = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.far += [name for name in found if name in ("src", "href", "xlink:href", "action", "srcset", "data")]
        self.far += [tag] if tag in ("script", "link", "iframe", "img", "object", "embed", "base", "form") else []
        self.far += [value for value in found.values() if value and ("url(" in value or "://" in value)]
        self.far += [name for name in found if name.startswith("on")]
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
        if tag not in VOID:
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
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


def points_of(records, metric):
    found = [(one["step"], one[metric]) for one in records if isinstance(one.get(metric), int | float)]
    return [(step, value) for step, value in found if math.isfinite(value)]


@pytest.fixture(scope="module")
def runs(pair, cache, corpus, tmp_path_factory) -> tuple[Path, Path]:
    """A finished run, and one that was killed, of a name with letters that HTML takes for its own."""
    root = tmp_path_factory.mktemp("runs")
    losses = ["--loss", "ce", "--loss", "p-kl", "--max-steps", 6, "--logging-steps", 1]
    reading = ["--per-device-train-batch-size", 2, "--eval-data", corpus, "--eval-steps", 2, "--eval-on-start"]
    run_xtk("distill", pair.student, cache, *losses, *reading, "-o", root / "first")
    killed = root / ODD
    killed.mkdir()
    recipe = json.loads((root / "first" / "recipe.json").read_text())
    recipe["identity"] |= {"seed": 7, "max_steps": 400}
    (killed / "recipe.json").write_text(json.dumps(recipe))
    lines = [json.dumps(record) for record in WRITTEN]
    (killed / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 30, "lo']))
    rollouts = [
        {"step": step, "prompt": 1, "text": TEXT, "finish_reason": "stop", "reward": step / 8} for step in range(20)
    ]
    told = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rollouts)
    (killed / "rollouts.jsonl").write_text(told, encoding="utf-8")
    return root / "first", killed


@pytest.fixture(scope="module")
def written(runs, cache, tmp_path_factory) -> tuple[Path, dict]:
    """The page of both, and what the command printed."""
    root = tmp_path_factory.mktemp("page")
    (root / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RESULTS))
    for name, records in (("before.jsonl", ROLLOUTS), ("answers.jsonl", ANSWERS)):
        (root / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    command = ["report", *runs, "--evaluation", root / "results.jsonl", "--baseline", "before", "--baseline", "ce"]
    command += ["--samples", root / "before.jsonl", "--samples", root / "answers.jsonl"]
    command += ["--cache", cache, "-o", root / "page.html"]
    told = json.loads(run_xtk(*command, "--json").stdout)
    first = (root / "page.html").read_bytes()
    (root / "page.html").unlink()
    assert run_xtk(*command).stdout == f"{root / 'page.html'}\n"
    assert (root / "page.html").read_bytes() == first, "same inputs, same bytes"
    return root / "page.html", told


def test_every_metric_of_every_run_is_a_curve_of_its_values(runs, written):
    page = Page(written[0].read_text(encoding="utf-8"))
    assert page.far == []
    first = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for run, records in zip(runs, (first, WRITTEN), strict=True):
        names = {name for record in records for name in record} - {
            "step",
            "training_seconds",
            "tokens",
            "skipped_steps",
        }
        assert {"loss"} < names
        for name in names:
            assert len(page.lines[name, run.name]) == len(points_of(records, name))
    assert ("reward", "first") not in page.lines
    for name in ("loss", "learning_rate"):  # of both runs in one figure: pixels are one straight map of the values
        values = np.array(points_of(first, name) + points_of(WRITTEN, name))
        pixels = np.array(page.lines[name, "first"] + page.lines[name, ODD])
        for axis, sign, error in ((0, 1, 0.051), (1, -1, 0.0051)):
            slope, offset = np.polyfit(values[:, axis], pixels[:, axis], 1)
            assert np.sign(slope) == sign
            assert np.abs(slope * values[:, axis] + offset - pixels[:, axis]).max() <= 2 * error
        assert pixels.min() >= 0


def test_tables_tell_last_values_differences_results_recipes_and_the_cache(runs, written, cache):
    page, told = Page(written[0].read_text(encoding="utf-8")), written[1]
    assert page.text.count("finished, 6 steps") == page.text.count("unfinished, at step 20 of 400") == 1
    assert told["kind"] == "report"
    assert [one["path"] for one in told["runs"]] == [str(run) for run in runs]
    last = json.loads((runs[0] / "xtk.json").read_text())["metrics"]
    assert told["runs"][0]["metrics"] == last
    loss = svg_curves.format_number(last["loss"])
    difference = 2.0 - last["loss"]  # a loss that is no number is none
    sign = "+" if difference > 0 else "\N{MINUS SIGN}"
    assert page.row("loss") == [loss, f"2 {sign}{svg_curves.format_number(abs(difference))} to first"]
    assert page.row("reward") == ["", "0.5"]
    less = "\N{MINUS SIGN}"
    compared = [
        "1.5 +0.125 to ce",
        f"1.375 {less}0.125 to before",
        f"1.25 ± 0.01 {less}0.25 to before {less}0.125 to ce",
    ]
    assert page.row("test.txt: bits_per_byte") == compared
    first, *_, end = (json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines())
    gain = end["eval_bits_per_byte"] - first["eval_bits_per_byte"]
    bits, difference = (svg_curves.format_number(value) for value in (end["eval_bits_per_byte"], abs(gain)))
    expected = f"{bits} {'+' if gain > 0 else less}{difference}"
    assert page.row("eval_bits_per_byte") == [f"{expected} to untrained", ""]
    assert page.row("seed") == ["42", "7"]
    assert "2 of" in page.text, "two options differ"
    assert page.row("inputs.student.weights")[0].startswith("sha256:")
    statistics = json.loads(run_xtk("inspect", cache, "--json").stdout)["statistics"]
    assert page.row("positions") == [f"{statistics['positions']:,}"]


def test_what_was_written_is_shown_as_it_was_written(written):
    page = Page(written[0].read_text(encoding="utf-8"))
    compared = ["2 + 2 =", " 5", TEXT, "Hi", "A\n[tool] B\nC"]
    assert page.samples == [*compared, *[TEXT] * 6]
    for told in ("before, reward 0", "after, reward 1", "before, truncated"):
        assert page.text.count(told) == 1
    places = [page.text.index(f"step {step}, prompt 1, reward {reward}") for step, reward in ((1, 0), (20, 2.375))]
    assert places == sorted(places)


def test_the_alignment_and_the_audit_are_those_that_align_and_inspect_tell(written, pair, corpus, projection, tmp_path):
    page = Page(written[0].read_text(encoding="utf-8"))
    counted = json.loads(run_xtk("align", pair.student, pair.teacher, corpus, "--stats", "--json").stdout)
    kinds = {
        name: [f"{kind['spans']:,}", f"{kind['span_fraction']:.2%}"] for name, kind in counted["span_kinds"].items()
    }
    assert {name: page.row(name)[:2] for name in kinds} == kinds
    audited = json.loads(run_xtk("inspect", projection, "--json").stdout)["header"]["audit"]
    digits = audited["categories"]["digits"]
    shares = [(f"{digits[f'{side}_tokens']:,}", digits[f"unmatched_{side}_tokens"] / digits[f"{side}_tokens"])
              for side in ("student", "teacher")]  # fmt: skip
    assert page.row("digits") == [cell for count, share in shares for cell in (count, f"{share:.1%}")]
    run_xtk("prune-projection", projection, "--top-k", 1, "-o", tmp_path / "one.safetensors")
    run_xtk(
        "report", written[1]["runs"][0]["path"], "--projection", tmp_path / "one.safetensors", "-o", tmp_path / "p.html"
    )
    audited = json.loads(run_xtk("inspect", tmp_path / "one.safetensors", "--json").stdout)["header"]["audit"]
    assert (
        f"mapped {100 * audited['rows']['mapped'] / sum(audited['rows'].values()):.1f} %"
        in (tmp_path / "p.html").read_text()
    )


def test_a_page_is_replaced_when_its_runs_go_on_and_nothing_else_is(runs, tmp_path):
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
    for told, *arguments in (
        ("page that was made from other inputs", runs[1], "-o", "page.html"),
        ("the output path is an existing file, which is not one of xtk's pages", runs[1], "--force", "-o", "notes"),
        ("metrics.jsonl, line 1", run, "-o", "new"),
        ("not a run of xtk distill", tmp_path, "-o", "new"),
        ("RUN names the same run twice", runs[0], runs[0], "-o", "new"),
        ("RUN names the same run twice", runs[0], f"{runs[0].parent}/../{runs[0].parent.name}/first/", "-o", "new"),
        ("not a run of xtk distill", runs[0], tmp_path / "typo", "-o", "new"),
        ("the file of --samples has no completions", runs[0], "--samples", runs[1] / "metrics.jsonl", "-o", "new"),
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
        done = run_xtk("report", *arguments, cwd=tmp_path, code=1)
        assert told in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_of_several_runs_those_that_died_early_are_left_out(runs, tmp_path):
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead.log").write_text("")
    done = run_xtk("report", tmp_path / "dead", runs[1], tmp_path / "dead.log", "--json", "-o", tmp_path / "page.html")
    assert f"report: left out {tmp_path / 'dead'}" in done.stderr
    assert [run["path"] for run in json.loads(done.stdout)["runs"]] == [str(runs[1])]
    swept = "".join(json.dumps({"path": str(path)}) + "\n" for path in (tmp_path / "never", runs[1]))
    done = run_xtk("report", "-", "-o", tmp_path / "swept.html", stdin=swept)
    assert re.search(r"left out .*never: no recipe.json", done.stderr)


def written_by(path: Path, *records: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_samples_of_other_programs_end_in_a_page_or_an_error(runs, tmp_path):
    given = {"prompt": "Who?", "problem": 0, "answer": "Anna"}
    odd = [{**given, "problem": at, "reward": reward} for at, reward in enumerate([math.nan, math.inf, 10**400, None])]
    run_xtk("report", runs[1], "--samples", written_by(tmp_path / "odd.jsonl", *odd), "-o", tmp_path / "page.html")
    for messages in (["a", "b"], {"role": "user"}, "a"):
        file = written_by(tmp_path / "wrong.jsonl", {"prompt_number": 0, "messages": messages})
        done = run_xtk("report", runs[1], "--samples", file, "-o", tmp_path / "other.html", code=1)
        assert "the file of --samples has no completions" in done.stderr


def test_samples_stand_under_the_prompt_that_was_read_and_below_the_names_of_their_files(runs, tmp_path):
    def rollout(prompt: str, text: str) -> dict:
        return {"prompt": prompt, "completion": text, "prompt_number": 0, "finish_reason": "stop"}

    before = written_by(tmp_path / "before" / "r.v1.jsonl", rollout("2 + 2 =", "5"))
    after = written_by(tmp_path / "after" / "r.v1.jsonl", rollout("2 + 2 =", "4"))
    other = written_by(tmp_path / "after" / "p2.jsonl", rollout("Who?", "Anna"))
    answered = {"model": "/models/student", "problem": 0, "sample": 0, "finish_reason": "stop"}
    cold = written_by(tmp_path / "cold.jsonl", {**answered, "prompt": "2 + 2 =", "answer": "cold"})
    hot = written_by(tmp_path / "hot.jsonl", {**answered, "answer": "hot"})  # which may be to either prompt
    files = [word for file in (before, after, other, cold, hot) for word in ("--samples", file)]
    run_xtk("report", runs[1], *files, "-o", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.samples[:7] == ["2 + 2 =", "5", "4", "cold", "Who?", "Anna", "hot"]
    for told in ("before/r.v15", "after/r.v14", "after/p2Anna", f"student, {tmp_path.name}/coldcold", "/hothot"):
        assert told in page.text.replace("\n", "")
    run_xtk("report", runs[1], "--samples", hot, "--samples", before, "-o", tmp_path / "two.html")
    page = Page((tmp_path / "two.html").read_text(encoding="utf-8"))
    assert page.samples[:3] == ["2 + 2 =", "hot", "5"]
    twice = ["--samples", hot, "--samples", tmp_path / "after" / ".." / "hot.jsonl"]
    assert "same file twice" in run_xtk("report", runs[1], *twice, "-o", tmp_path / "new", code=1).stderr


numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=3000))
def test_a_long_curve_keeps_its_ends_and_its_spikes(values):
    points = list(enumerate(values))
    kept = svg_curves.thin_points(points)
    assert len(kept) <= max(2 * svg_curves.THINNED_INTERVALS + 2, 1)
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    assert {kept[0], kept[-1]} == {points[0], points[-1]}
    assert {min(value for _, value in kept), max(value for _, value in kept)} == {min(values), max(values)}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_any_finite_values_are_drawn_inside_of_the_plot(values):
    figure = svg_curves.curves_figure("loss", "", [svg_curves.MetricCurve("run", 0, list(enumerate(values)))])
    places = re.search(r'polyline points="([^"]+)"', figure)[1].split()
    assert len(places) == len(values)
    for place in places:
        assert svg_curves.MARGIN_TOP <= float(place.split(",")[1]) <= svg_curves.MARGIN_TOP + svg_curves.PLOT_HEIGHT


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_ticks_are_round_numbers_inside_of_their_range(low, size):
    found = svg_curves.round_ticks(low, low + size)
    assert 1 <= len(found) <= svg_curves.APPROXIMATE_TICKS + 1
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in found)
    steps = {round((after - before) / size, 6) for before, after in pairwise(found)}
    assert len(steps) <= 1 or max(steps) - min(steps) < 1e-5
