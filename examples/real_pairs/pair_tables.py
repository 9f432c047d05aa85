"""Print the tables of the real pairs, and draw their two figures, from OUTPUT/results.jsonl.

python examples/real_pairs/pair_tables.py OUTPUT
"""

from __future__ import annotations

import math
import statistics
import sys
from html import escape
from pathlib import Path

from pair_results import Results, half_interval, paired_difference
from pairs import NOT_TRAINED, PAIRS, SMALL_FUNCTIONS, TEACHER

from xtk.evaluation.byte_text_categories import TEXT_CATEGORIES

LEFT, PANEL, GAP, TOP, ROW = 290, 150, 16, 46, 22
# Losses that also compare spans of several tokens, and two that do not: next bytes, spans of one token on each side.
SPAN_LOSSES, WITHOUT_SPANS = ("bpm", "escd", "simct", "gold", "alm", "p-kl"), ("byte-kl", "strict")
COLORS = {"better": "#1a7f37", "worse": "#c0392b", "same": "#777"}


def reference_line(results: Results, pair: str) -> str:
    """Return the name of the pair's default line, with the learning rate that the results have."""
    names = {name for one, name, _, measure in results.figures if one == pair and measure == "test"}
    default = PAIRS[pair].default.name
    return next((name for name in sorted(names) if name.rpartition(" lr=")[0] == default), "")


def lines_of(results: Results, pair: str) -> list[str]:
    """Return the measured lines of a pair: teacher, not trained, and the others, best first."""
    names = {name for one, name, _, measure in results.figures if one == pair and measure == "test"}
    first = [name for name in (TEACHER, NOT_TRAINED) if name in names]

    def mean(name: str) -> float:
        return float(statistics.mean(results.values(pair, name, "test", "bits_per_byte").values()))

    return first + sorted(names - set(first), key=mean)


def cell(values: dict[int, float], digits: int = 3) -> str:
    """Return the mean of the seeds as text."""
    return f"{statistics.mean(values.values()):.{digits}f}" if values else ""


def difference_cell(values: dict[int, float], reference: dict[int, float]) -> str:
    """Return the paired difference as text, with its interval if there are two seeds or more."""
    difference = paired_difference(values, reference)
    if difference is None:
        return ""
    mean, half = difference
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else "")


def pair_table(results: Results, pair: str) -> list[str]:
    """Return the Markdown lines of a pair's table."""
    reference = reference_line(results, pair)
    measures = [
        *(("test", figure) for figure in ("digits", "white space", "byte-kl", "top1_agreement")),
        *((other, "bits_per_byte") for other in (*PAIRS[pair].other, "teacher's answers")),
        *((measure, f"pass@{k}") for measure in ("solved", SMALL_FUNCTIONS) for k in (1, 10)),
        ("solved", "truncated_fraction"),
    ]
    names = lines_of(results, pair)
    shown = [one for one in measures if any(results.values(pair, name, *one) for name in names)]
    titles = [_title(*one) for one in shown]
    header = ["line", "bits per byte", "minus the default", *titles, "seeds"]
    rows = [header, ["---"] * len(header)]
    for name in names:
        bits = results.values(pair, name, "test", "bits_per_byte")
        own = (TEACHER, NOT_TRAINED)
        versus = difference_cell(bits, results.values(pair, reference, "test", "bits_per_byte"))
        versus = "" if name in own or name == reference else versus
        rest = [cell(results.values(pair, name, *one)) for one in shown]
        rows.append([f"`{name}`" if name not in own else name, cell(bits), versus, *rest, str(len(bits))])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _title(measure: str, figure: str) -> str:
    if measure == SMALL_FUNCTIONS:
        return f"{measure}: {figure}"
    return figure if measure in ("test", "solved") else measure


def grid_table(results: Results, pair: str) -> list[str]:
    """Return the bits per byte of the development set of all settings, seed 0."""
    rows = sorted((values["bits_per_byte"], name) for (one, name, seed, measure), values in results.figures.items()
                  if (one, seed, measure) == (pair, 0, "dev"))  # fmt: skip
    return ["| setting | bits per byte of the development set, seed 0 |", "| --- | --- |",
            *(f"| `{name}` | {bits:.3f} |" for bits, name in rows)]  # fmt: skip


def document_table(results: Results, pair: str) -> list[str]:
    """Return the differences of seed 0 from the default, paired by documents."""
    rows = [
        (values["difference"], half_interval(values["error"], values["documents"]), name)
        for (one, name, _, measure), values in results.figures.items()
        if (one, measure) == (pair, "documents")
    ]
    if not rows:
        return []
    return ["| setting, seed 0 | minus the default, 95 % over documents |", "| --- | --- |",
            *(f"| `{name}` | {value:+.3f} ± {half:.3f} |" for value, half, name in sorted(rows))]  # fmt: skip


Differences = dict[tuple[str, str], tuple[float, float] | None]  # {(panel, row): (mean, half interval)}


def line_differences(results: Results, pairs: list[str]) -> Differences:
    """Return the bits per byte of each line minus those of the pair's default."""
    differences: Differences = {}
    for pair in pairs:
        reference = results.values(pair, reference_line(results, pair), "test", "bits_per_byte")
        for name in lines_of(results, pair):
            if name not in (TEACHER, NOT_TRAINED) and reference:
                values = results.values(pair, name, "test", "bits_per_byte")
                differences[pair, name] = paired_difference(values, reference)
    return differences


def chosen_line(results: Results, pair: str, loss: str) -> str:
    """Return the measured line of a loss, from a cache, with the lowest bits per byte of the development set; or ""."""
    names = {
        name: results.values(pair, name, "dev", "bits_per_byte").get(0, math.inf)
        for name in lines_of(results, pair)
        if name.rpartition(" lr=")[0].rpartition("+")[2].partition(":")[0] == loss
    }
    return min(names, key=lambda name: names[name], default="")


def span_differences(results: Results, pairs: list[str]) -> Differences:
    """Return the bits per byte of each loss over spans minus those of `byte-kl` and `strict`, by text category."""
    differences: Differences = {}
    for pair in pairs:
        for category in ("bits_per_byte", *TEXT_CATEGORIES):
            values = {
                loss: results.values(pair, chosen_line(results, pair, loss), "test", category)
                for loss in (*SPAN_LOSSES, *WITHOUT_SPANS)
            }
            for loss in SPAN_LOSSES:
                for other in WITHOUT_SPANS:
                    if (one := paired_difference(values[loss], values[other])) is not None:
                        panel = "all text" if category == "bits_per_byte" else category
                        differences[panel, f"{pair}: {loss} minus {other}"] = one
    return differences


def draw(title: str, differences: Differences) -> str:
    """Return an SVG with a panel for each first part of the keys, and a row for each second part."""
    panels = list(dict.fromkeys(panel for panel, _ in differences))
    names = list(dict.fromkeys(name for _, name in differences))
    largest = max((abs(one[0]) for one in differences.values() if one), default=0.0) or 0.01
    width, bottom = LEFT + max(len(panels), 2) * (PANEL + GAP), TOP + len(names) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 28}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{bottom + 28}" fill="white"/>',
        f'<text x="{LEFT}" y="14" fill="#222">{title}; bars: 95 % over seeds</text>',
        *(f'<text x="{LEFT - 10}" y="{TOP + number * ROW + 15}" text-anchor="end" fill="#222">{escape(name)}</text>'
          for number, name in enumerate(names)),
    ]  # fmt: skip
    for at, panel in enumerate(panels):
        middle = LEFT + at * (PANEL + GAP) + PANEL / 2
        scale = PANEL / 2 / (1.3 * largest)
        parts += [f'<text x="{middle}" y="{TOP - 12}" text-anchor="middle" fill="#222">{panel}</text>',
                  f'<path d="M{middle} {TOP}V{bottom}" stroke="#222"/>']  # fmt: skip
        for tick in (-largest, largest):
            parts.append(f'<text x="{middle + tick * scale:.1f}" y="{bottom + 14}" text-anchor="middle" '
                         f'fill="#222">{tick:+.2f}</text>')  # fmt: skip
        for number, name in enumerate(names):
            if one := differences.get((panel, name)):
                parts += _point(middle, scale, TOP + (number + 0.5) * ROW, one)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _point(middle: float, scale: float, y: float, difference: tuple[float, float]) -> list[str]:
    mean, half = difference
    half = half if math.isfinite(half) else 0.0
    kind = "better" if half and mean + half < 0 else "worse" if half and mean - half > 0 else "same"
    ends = [middle + min(max((mean + sign * half) * scale, -PANEL / 2), PANEL / 2) for sign in (-1, 1)]
    return [
        f'<path d="M{ends[0]:.1f} {y}H{ends[1]:.1f}" stroke="{COLORS[kind]}" stroke-width="2"/>',
        f'<circle cx="{middle + mean * scale:.1f}" cy="{y}" r="3.5" fill="{COLORS[kind]}"/>',
    ]


def print_tables(folder: Path) -> None:
    """Print the tables of all pairs with their settings, and write the figures."""
    results = Results(folder)
    pairs = [pair for pair in PAIRS if lines_of(results, pair)]
    write = sys.stdout.write
    write("\n" + ", ".join(f"{name} {value}" for name, value in results.settings.items()) + "\n")
    for pair in pairs:
        tables = pair_table(results, pair), grid_table(results, pair), document_table(results, pair)
        write(f"\n**{pair}**\n\n" + "\n\n".join("\n".join(table) for table in tables if table) + "\n")
    lines = draw("bits per byte minus those of the default", line_differences(results, pairs))
    spans = draw("bits per byte by category; left of the line spans help", span_differences(results, pairs))
    for name, svg in (("differences", lines), ("spans", spans)):
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    write(f"\nFigures: differences.svg and spans.svg in {folder}. ")
    write(f"All measurements took {results.seconds / 3600:.1f} hours.\n")


if __name__ == "__main__":
    print_tables(Path(sys.argv[1]))
