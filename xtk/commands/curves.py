"""Curves of several runs as SVG, a colour for each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from xtk.commands.page import COLOURS

WIDTH, HEIGHT = 440, 190  # of what is drawn in, in pixels
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 10, 26  # around it
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
# Stretches of a long curve of which the lowest and the highest point are drawn: no spike is lost.
STRETCHES = 250
TICKS = 4

STYLE = "polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }\ncircle { stroke: none; }\n"


@dataclass(frozen=True)
class Curve:
    """A metric of a run.

    Attributes:
        run: how the run is called.
        number: of the run, which has a colour by it.
        points: (step, value), steps rising.
    """

    run: str
    number: int
    points: Sequence[tuple[float, float]]


def colour(number: int) -> str:
    """Return the colour of a run."""
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> str:
    """Return how the line of a run is broken: where colours come again, otherwise."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def figure(metric: str, unit: str, curves: Sequence[Curve]) -> str:
    """Return the curves of one metric over one another, as HTML."""
    shown = [Curve(curve.run, curve.number, thinned(curve.points)) for curve in curves]
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [y for curve in shown for _, y in curve.points]
    across, up = _scale(xs), _scale(ys)
    lines = "".join(_line(curve, across, up) for curve in shown)
    told = ", ".join(f"{curve.run} {number(curve.points[-1][1])}" for curve in shown)
    label = escape(f"{metric} by step; last: {told}")
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<figure data-metric="{escape(metric)}">\n<figcaption>{escape(metric)}{small}</figcaption>\n'
        f'<svg viewBox="0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}" role="img" aria-label="{label}">'
        f"{_grid(across, up)}{lines}</svg>\n</figure>\n"
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each stretch of a long curve, and its ends; a short one as it is."""
    if len(points) <= 2 * STRETCHES:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in range(STRETCHES):
        places = range(len(points) * stretch // STRETCHES, len(points) * (stretch + 1) // STRETCHES)
        kept |= {min(places, key=lambda at: points[at][1]), max(places, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def _line(curve: Curve, across: tuple[float, float], up: tuple[float, float]) -> str:
    places = [
        (LEFT + WIDTH * (x - across[0]) / (across[1] - across[0]), TOP + HEIGHT * (up[1] - y) / (up[1] - up[0]))
        for x, y in curve.points
    ]
    end = places[-1]
    step, value = curve.points[-1]
    title = escape(f"{curve.run}: {number(value)} at step {step:,.0f}")
    paint = colour(curve.number)
    joined = " ".join(f"{x:.1f},{y:.2f}" for x, y in places)
    return (
        f'<g data-run="{escape(curve.run)}"><title>{title}</title>'
        f'<polyline points="{joined}" stroke="{paint}" stroke-dasharray="{dash(curve.number)}"></polyline>'
        f'<circle cx="{end[0]:.1f}" cy="{end[1]:.2f}" r="2.5" fill="{paint}"></circle></g>'
    )


def _grid(across: tuple[float, float], up: tuple[float, float]) -> str:
    parts = []
    for value in ticks(*up):
        y = TOP + HEIGHT * (up[1] - value) / (up[1] - up[0])
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 5:.1f}" text-anchor="end">{number(value)}</text>')
    for value in ticks(*across):
        x = LEFT + WIDTH * (value - across[0]) / (across[1] - across[0])
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{number(value)}</text>')
    return "".join(parts)


def _scale(values: Iterable[float]) -> tuple[float, float]:
    """Return a range with some room that holds values and is not empty."""
    values = list(values)
    low, high = min(values), max(values)
    if low == high == 0:
        return -0.03, 1.0
    room = 0.03 * (high - low) or 0.5 * abs(high) or 1.0
    return low - room, high + room


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers inside a range, about as many as `TICKS`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number as people read it: four digits, thousands with commas."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    if 1e4 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"
