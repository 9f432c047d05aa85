"""Draw the figures of the manual, and fill the numbers of its pages from docs/figures/results.json; `--check` compares.

python docs/figures.py [--check]

The alignment is drawn from the page of `xtk align --html`, with the tokenizers in XTK_DATA; without them it stays.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from results import DATA, NAMES, Difference, difference, draw_spans, fill, level, objective_differences

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
SENTENCE = "In 2026 the café sold 12,345."
TOKENIZERS = {"Llama 3": "llama3", "Qwen": "qwen"}
# Colors follow the reader's light or dark setting. Blue: xtk; orange: others; both readable with color blindness.
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1c1c1e; } .small { font-size: 13px; fill: #5c5c62; }
.bold { font-weight: 600; } .mono { font: 15px ui-monospace, monospace; } .faint { fill: #6b6b70; }
line, path, .box { stroke: #6b6b70; fill: none; } .grid { stroke: #dcdce0; } .box { fill: #f4f4f6; }
text.xtk, .xtk { fill: #0072b2; } text.other, .other { fill: #c45a00; } text.teacher, .teacher { fill: #6b6b70; }
.bar-xtk { stroke: #0072b2; } .bar-other { stroke: #c45a00; } .bar-teacher { stroke: #6b6b70; }
.many { fill: #d7e9ff; } .arrow { fill: #6b6b70; stroke: none; }
@media (prefers-color-scheme: dark) {
text { fill: #ececee; } .small, .faint { fill: #a8a8b0; } line, path, .box { stroke: #9a9aa2; }
.grid { stroke: #3a3a40; } .box { fill: #26262b; }
text.xtk, .xtk { fill: #56b4e9; } text.other, .other { fill: #f0a04b; } text.teacher, .teacher { fill: #a8a8b0; }
.bar-xtk { stroke: #56b4e9; } .bar-other { stroke: #f0a04b; } .bar-teacher { stroke: #a8a8b0; }
.many { fill: #12395f; } .arrow { fill: #9a9aa2; } }
"""


class Drawing:
    """An SVG under construction.

    Args:
        width, height: size in pixels.
        label: what a screen reader says.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
            f'aria-label="{escape(label)}">\n<style>{STYLE}</style>'
        ]

    def text(self, x: float, y: float, content: str, anchor: str = "start", style: str = "") -> None:
        """Write a line of text; y is its baseline."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}" xml:space="preserve">'
            f"{escape(content)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "", width: float = 1) -> None:
        """Draw a line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}" stroke-width="{width:g}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, style: str = "") -> None:
        """Draw a rounded box."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" class="box {style}"/>'
        )

    def point(self, x: float, y: float, style: str) -> None:
        """Draw a point."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{style}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        path = " ".join(f"{'L' if at else 'M'}{x:.1f} {y:.1f}" for at, (x, y) in enumerate(points))
        self._parts.append(f'<path d="{path}" stroke-width="1.5"/>')
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        left, right = (x1 - 8 * dx - 5 * dy, y1 - 8 * dy - 5 * dx), (x1 - 8 * dx + 5 * dy, y1 - 8 * dy + 5 * dx)
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x1, y1), left, right))
        self._parts.append(f'<polygon points="{corners}" class="arrow"/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


class AlignedSpans(HTMLParser):
    """Spans of a page of `xtk align --html`: (kind, tokens of both sides), tokens as their visible characters."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.spans: list[tuple[str, tuple[list[str], list[str]]]] = []
        self._tokens: list[str] | None = None  # of the open side of the last span
        self.feed(page[page.index('<p class="spans"') :])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a span, a side or a token."""
        kind = str(dict(attrs).get("class", ""))
        if kind.startswith("span "):
            self.spans.append((kind.removeprefix("span "), ([], [])))
        elif kind in ("student", "teacher"):
            self._tokens = self.spans[-1][1][kind == "teacher"]
        elif tag == "bdi" and self._tokens is not None:
            self._tokens.append("")

    def handle_data(self, data: str) -> None:
        """Append characters to the open token."""
        if self._tokens and data.strip():
            self._tokens[-1] += data


def align_sentence(folder: Path) -> AlignedSpans:
    """Return the spans of the sentence, from the page that `xtk align --html` writes."""
    from xtk.cli import app

    one, other = (str(folder / "tokenizers" / name) for name in TOKENIZERS.values())
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(io.StringIO()):
        page = Path(output) / "page.html"
        app(["align", one, other, SENTENCE, "--html", str(page), "--quiet"], standalone_mode=False)
        return AlignedSpans(page.read_text(encoding="utf-8"))


def draw_alignment(aligned: AlignedSpans) -> str:
    """Return the tokens of a sentence, one tokenizer above the other; spans of several tokens are shaded."""
    letter, inset, gap, left = 9.05, 5, 5, 76

    def width(tokens: list[str]) -> float:
        return sum(len(token) * letter + 2 * inset for token in tokens)

    widths = [max(map(width, sides)) for _, sides in aligned.spans]
    drawing = Drawing(left + sum(widths) + gap * len(widths), 118, f"{SENTENCE!r} in tokens of Llama 3 and of Qwen")
    for row, name in enumerate(TOKENIZERS):
        drawing.text(0, 29 + 34 * row, name, style="bold")
    x: float = left
    for (kind, sides), span in zip(aligned.spans, widths, strict=True):
        drawing.box(x, 8, span, 66, "" if kind == "one" else "many")
        drawing.line(x, 41, x + span, 41, "grid")
        for row, tokens in enumerate(sides):
            at: float = x
            for number, token in enumerate(tokens):
                step = (len(token) * letter + 2 * inset) * span / width(tokens)
                drawing.text(at + step / 2, 30 + 33 * row, token, "middle", "mono")
                if number:
                    drawing.line(at, 8 + 33 * row, at, 41 + 33 * row)
                at += step
        x += span + gap
    drawing.text(left, 94, "A box is a span: the same bytes in both tokenizers. · is a space.", style="small")
    drawing.text(left, 112, "Shaded: one token of Llama 3, several tokens of Qwen.", style="small")
    return str(drawing)


def draw_headline() -> str:
    """Return bits per byte of teacher and students, a panel for each run, with 95 % intervals."""
    left, right, row, head, space = 232, 402, 26, 48, 22
    low, high, ticks = 1.0, 2.7, (1.0, 1.5, 2.0, 2.5)
    runs = list(DATA["runs"].values())
    bottom = sum(head + row * (1 + len(run["students"])) + space for run in runs)
    drawing = Drawing(594, bottom + 40, "Held-out bits per byte of teachers and students, with intervals")

    def place(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low)

    y = 0.0
    for run in runs:
        drawing.text(0, y + 18, run["title"], style="bold")
        drawing.text(0, y + 37, run["conditions"], style="small")
        y += head
        students = sorted(run["students"], key=lambda one: -level(run, one))
        end = y + row * (1 + len(students))
        for tick in ticks:
            drawing.line(place(tick), y, place(tick), end, "grid")
        drawing.line(place(level(run, "default")), y, place(level(run, "default")), end, "bar-xtk")
        for student in students:
            kind, value = "xtk" if student == "default" else "other", level(run, student)
            change, half = difference(run, student)
            drawing.text(left - 14, y + 18, NAMES[student], "end", "bold" if kind == "xtk" else "")
            if kind == "other":
                drawing.line(place(value - half), y + 13, place(value + half), y + 13, "bar-other", 3)
            drawing.point(place(value), y + 13, kind)
            shown = f"{value:.3f}" if kind == "xtk" else f"{value:.3f}   {change:+.3f} ± {half:.3f}"
            drawing.text(right + 14, y + 18, shown, style="small")
            y += row
        drawing.text(left - 14, y + 18, "the teacher", "end")
        drawing.point(place(run["teacher"]), y + 13, "teacher")
        drawing.text(right + 14, y + 18, f"{run['teacher']:.3f}", style="small")
        y = end + space
    for tick in ticks:
        drawing.text(place(tick), y - 4, f"{tick:.1f}", "middle", "small")
    drawing.text((left + right) / 2, y + 18, "bits per byte; lower is better", "middle", "small")
    drawing.text(right + 14, y - 4, "value, and minus", style="small")
    drawing.text(right + 14, y + 14, "the value of xtk", style="small")
    return str(drawing)


def draw_objectives() -> str:
    """Return a panel for each setting: differences of each objective from the default, with 95 % intervals."""
    settings = DATA["objectives"]["settings"]
    rows: list[tuple[str, list[Difference | None]]] = list(objective_differences())
    left, panel, gap, row, across = 252, 132, 24, 22, 3
    height = len(rows) * row + 60
    drawing = Drawing(
        left + across * (panel + gap), 44 + -(-len(settings) // across) * height,
        "Differences of each objective from the default in each setting",
    )  # fmt: skip
    drawing.text(0, 16, "Bits per byte minus those of the default: left of 0 is better", style="bold")
    drawing.text(0, 36, "Bars: 95 % intervals over three paired seeds. Gray: the interval contains 0.", style="small")
    for at, setting in enumerate(settings):
        down, along = divmod(at, across)
        draw_setting(
            drawing, setting, [cells[at] for _, cells in rows], left + along * (panel + gap), 78 + down * height
        )
        for number, (name, _) in enumerate(rows if not along else []):
            style = "small" if name in DATA["objectives"]["differences"] else "small faint"
            drawing.text(left - 12, 78 + down * height + number * row + 16, name, "end", style)
    return str(drawing)


def draw_setting(drawing: Drawing, setting: str, cells: list[Difference | None], left: float, top: float) -> None:
    """Draw the differences of one setting, one below the other."""
    panel, row, low, high = 132, 22, -0.25, 0.25
    bottom = top + len(cells) * row

    def place(value: float) -> float:
        return left + panel * (min(max(value, low), high) - low) / (high - low)

    drawing.text(left + panel / 2, top - 8, setting, "middle", "small")
    for tick in (-0.2, 0.0, 0.2):
        drawing.line(place(tick), top, place(tick), bottom, "" if tick == 0 else "grid")
        drawing.text(place(tick), bottom + 16, f"{tick:+.1f}" if tick else "0", "middle", "small")
    for number, cell in enumerate(cells):
        if cell:
            (change, half), y = cell, top + number * row + 11
            kind = "xtk" if change + half < 0 else "other" if change - half > 0 else "teacher"
            drawing.line(place(change - half), y, place(change + half), y, f"bar-{kind}", 3)
            drawing.point(place(change), y, kind)


def draw_on_policy() -> str:
    """Return the accuracy of each student of the on-policy example by steps, one line per seed."""
    curves = dict(DATA["on_policy"]["curves"])
    steps = curves.pop("steps")
    left, right, top, bottom = 66, 450, 14, 254
    styles = {"ce": "teacher", "byte-kl": "other", "on-policy bpm": "xtk"}
    drawing = Drawing(650, 300, "Fraction of sums answered right by steps, one line per seed")

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / steps[-1], bottom - (bottom - top) * value

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(0, tick)[1]
        drawing.line(left, y, right, y, "grid")
        drawing.text(left - 8, y + 5, f"{100 * tick:.0f} %", "end", "small")
    for step in steps:
        drawing.text(place(step, 0)[0], bottom + 18, f"{step}", "middle", "small")
    drawing.text((left + right) / 2, bottom + 38, "steps of 128 answers", "middle", "small")
    for number, (name, seeds) in enumerate(curves.items()):
        for values in seeds:
            points = [place(step, value) for step, value in zip(steps, values, strict=True)]
            for start, end in itertools.pairwise(points):
                drawing.line(*start, *end, f"bar-{styles[name]}", 2)
        mean = statistics.mean(values[-1] for values in seeds)
        drawing.text(right + 12, top + 60 + 24 * number, f"{name}: {100 * mean:.0f} %", style=f"{styles[name]} bold")
    drawing.text(right + 12, top + 34, "mean after 100 steps", style="small")
    drawing.text(right + 12, top + 16, "right answers,", style="small")
    return str(drawing)


def draw_pipeline() -> str:
    """Return the way from a corpus to an evaluated student, with what may stand in for each part."""
    drawing = Drawing(
        594, 250, "corpus, cache-teacher, cache, distill, student, evaluate; the same teacher online and on-policy"
    )

    def node(x: float, y: float, width: float, title: str, *lines: str) -> None:
        drawing.box(x, y, width, 26 + 18 * len(lines))
        drawing.text(x + width / 2, y + 20, title, "middle", "bold")
        for number, line in enumerate(lines):
            drawing.text(x + width / 2, y + 38 + 18 * number, line, "middle", "small")

    node(1, 40, 94, "corpus", "texts, chats")
    node(184, 40, 130, "teacher cache", "for any student")
    node(382, 40, 88, "student", "HF folder")
    node(516, 40, 77, "results", "HTML, hub")
    for x1, x2, *commands in (
        (95, 184, "xtk cache-", "teacher"), (314, 382, "xtk distill"), (470, 516, "xtk evaluate,", "report, export")
    ):  # fmt: skip
        drawing.arrow((x1, 62), (x2, 62))
        for number, command in enumerate(commands):
            drawing.text((x1 + x2) / 2, 30 - 16 * (len(commands) - 1) + 16 * number, command, "middle", "small")
    node(28, 164, 218, "teacher, any tokenizer", "Hugging Face, GGUF, vLLM,", "an API (xtk query-teacher)")
    drawing.arrow((138, 164), (138, 66))
    drawing.arrow((246, 184), (408, 184), (408, 84))
    drawing.text(254, 176, "xtk distill --teacher", style="small")
    drawing.arrow((446, 84), (446, 210), (246, 210))
    drawing.text(254, 228, "xtk distill-on-policy: the teacher scores", style="small")
    drawing.text(254, 244, "what the student generates", style="small")
    return str(drawing)


def figures() -> Iterator[tuple[Path, str]]:
    """Yield (path, content) of every figure that can be drawn here."""
    data = os.environ.get("XTK_DATA")
    if data:
        yield FIGURES / "alignment.svg", draw_alignment(align_sentence(Path(data)))
    drawings = {
        "headline": draw_headline,
        "losses": draw_objectives,
        "on-policy": draw_on_policy,
        "pipeline": draw_pipeline,
        "spans": draw_spans,
    }
    for name, draw in drawings.items():
        yield FIGURES / f"{name}.svg", draw()


def pages() -> Iterator[tuple[Path, str]]:
    """Yield (path, content) of every page, with its numbers from the data."""
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        yield path, fill(path.read_text(encoding="utf-8"))


def main() -> None:
    """Write figures and pages, or compare them."""
    stale: list[Any] = []
    for path, content in [*figures(), *pages()]:
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        if "--check" in sys.argv:
            stale.append(path.relative_to(DOCS.parent))
        else:
            path.write_text(content, encoding="utf-8")
    if stale:
        raise SystemExit(
            f"not as in docs/figures/results.json: {', '.join(map(str, stale))}; run python docs/figures.py"
        )


if __name__ == "__main__":
    main()
