"""Draw the figure of docs/explanation/which-loss.md from the table on that page; `--check` compares.

python docs/figures.py [--check]
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

PAGE = Path(__file__).parent / "explanation" / "which-loss.md"
FIGURE = PAGE.with_suffix(".svg")
LEFT, PANEL, GAP, TOP, ROW = 275, 140, 14, 46, 24
LOWEST, HIGHEST = -0.22, 0.25
TICKS = (-0.2, 0.0, 0.2)
DIFFERENCE = re.compile(r"([+-]\d\.\d+) ± (\d\.\d+)")


def read_table(page: str) -> tuple[list[str], list[tuple[str, list[tuple[float, float] | None]]]]:
    """Return the settings, and of each loss the differences from the default with their standard errors."""
    lines = page[page.index("| losses |") :].splitlines()
    settings = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [DIFFERENCE.search(cell) for cell in cells]
        if any(found) and not name.startswith("for comparison"):
            values = [(float(one[1]), float(one[2])) if one else None for one in found]
            name = "level: the teacher's tokenizer" if name.startswith("the student with") else name
            rows.append((name.replace("`", "").replace("*", ""), values))
    return settings, rows


def draw(settings: list[str], rows: list[tuple[str, list[tuple[float, float] | None]]]) -> str:
    """Return an SVG with a panel for each setting: points with twice the standard error on both sides."""
    width, height = LEFT + len(settings) * (PANEL + GAP), TOP + len(rows) * ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]

    def text(x: float, y: float, content: str, anchor: str = "middle") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222">{escape(content)}</text>')

    def line(x1: float, y1: float, x2: float, y2: float, color: str, stroke: float = 1) -> None:
        parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" stroke-width="{stroke}"/>')

    bottom = TOP + len(rows) * ROW
    for at, setting in enumerate(settings):
        left = LEFT + at * (PANEL + GAP)

        def place(value: float, left: float = left) -> float:
            return left + PANEL * (min(max(value, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)

        text(left + PANEL / 2, TOP - 12, setting)
        for tick in TICKS:
            line(place(tick), TOP, place(tick), bottom, "#222" if tick == 0 else "#ddd")
            text(place(tick), bottom + 14, f"{tick:+.1f}" if tick else "0")
        for number, (_, values) in enumerate(rows):
            y, one = TOP + (number + 0.5) * ROW, values[at]
            if one:
                difference, error = one
                color = "#1a7f37" if difference + 2 * error < 0 else "#c0392b" if difference - 2 * error > 0 else "#777"
                line(place(difference - 2 * error), y, place(difference + 2 * error), y, color, 2)
                parts.append(f'<circle cx="{place(difference):.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
    for number, (name, _) in enumerate(rows):
        text(LEFT - 10, TOP + (number + 0.5) * ROW + 4, name, "end")
    text(LEFT, 14, "bits per byte minus those of the default; bars: two standard errors; grey: no difference", "start")
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the figure, or compare it."""
    content = draw(*read_table(PAGE.read_text(encoding="utf-8")))
    if "--check" in sys.argv:
        if FIGURE.read_text(encoding="utf-8") != content:
            raise SystemExit(f"{FIGURE} is not drawn from the table: run python docs/figures.py")
    else:
        FIGURE.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
