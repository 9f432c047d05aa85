"""Metric curves of several runs as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from xtk.pages.html_page import COLORS

PLOT_WIDTH, PLOT_HEIGHT = 440, 190  # plot area, in pixels
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 66, 10, 10, 26  # around the plot area
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
# Long curves are drawn as the lowest and highest point of this many intervals, so that spikes stay visible.
THINNED_INTERVALS = 250
APPROXIMATE_TICKS = 4
MAX_VALUE = 1e300  # larger values are drawn at the edge: their difference is not finite

CURVE_STYLE = "polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }\ncircle { stroke: none; }\n"


@dataclass(frozen=True)
class MetricCurve:
    """A metric of a run.

    Attributes:
        run: name of the run.
        color_index: index of the run, which selects its color.
        points: (step, value) in the order of steps.
    """

    run: str
    color_index: int
    points: Sequence[tuple[float, float]]


def curve_color(number: int) -> str:
    """Return the color of a run."""
    return COLORS[number % len(COLORS)]


def curve_dash(number: int) -> str:
    """Return the dash pattern of a run's line, which distinguishes runs of the same color."""
    return DASHES[number // len(COLORS) % len(DASHES)]


def curves_figure(metric: str, unit: str, curves: Sequence[MetricCurve]) -> str:
    """Return one plot with the curves of a metric, as HTML."""
    shown = [MetricCurve(curve.run, curve.color_index, thin_points(curve.points)) for curve in curves]
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [y for curve in shown for _, y in curve.points]
    across, up = _scale(xs), _scale(ys)
    lines = "".join(_line(curve, across, up) for curve in shown)
    last_values = ", ".join(f"{curve.run} {format_number(curve.points[-1][1])}" for curve in shown)
    label = escape(f"{metric} by step; last: {last_values}")
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<figure data-metric="{escape(metric)}">\n<figcaption>{escape(metric)}{small}</figcaption>\n'
        f'<svg viewBox="0 0 {MARGIN_LEFT + PLOT_WIDTH + MARGIN_RIGHT} {MARGIN_TOP + PLOT_HEIGHT + MARGIN_BOTTOM}" '
        f'role="img" aria-label="{label}">'
        f"{_grid(across, up)}{lines}</svg>\n</figure>\n"
    )


def thin_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return lowest and highest point of each interval of a long curve, and its ends; all points of a short one."""
    if len(points) <= 2 * THINNED_INTERVALS:
        return list(points)
    kept = {0, len(points) - 1}
    for interval in range(THINNED_INTERVALS):
        places = range(len(points) * interval // THINNED_INTERVALS, len(points) * (interval + 1) // THINNED_INTERVALS)
        kept |= {min(places, key=lambda at: points[at][1]), max(places, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def _line(curve: MetricCurve, across: tuple[float, float], up: tuple[float, float]) -> str:
    places = [
        (
            MARGIN_LEFT + PLOT_WIDTH * (x - across[0]) / (across[1] - across[0]),
            MARGIN_TOP + PLOT_HEIGHT * (up[1] - min(max(y, up[0]), up[1])) / (up[1] - up[0]),
        )
        for x, y in curve.points
    ]
    end = places[-1]
    step, value = curve.points[-1]
    title = escape(f"{curve.run}: {format_number(value)} at step {step:,.0f}")
    paint = curve_color(curve.color_index)
    joined = " ".join(f"{x:.1f},{y:.2f}" for x, y in places)
    return (
        f'<g data-run="{escape(curve.run)}"><title>{title}</title>'
        f'<polyline points="{joined}" stroke="{paint}" stroke-dasharray="{curve_dash(curve.color_index)}"></polyline>'
        f'<circle cx="{end[0]:.1f}" cy="{end[1]:.2f}" r="2.5" fill="{paint}"></circle></g>'
    )


def _grid(across: tuple[float, float], up: tuple[float, float]) -> str:
    parts = []
    for value in round_ticks(*up):
        y = MARGIN_TOP + PLOT_HEIGHT * (up[1] - value) / (up[1] - up[0])
        parts.append(f'<line x1="{MARGIN_LEFT}" x2="{MARGIN_LEFT + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        parts.append(f'<text x="{MARGIN_LEFT - 5}" y="{y + 5:.1f}" text-anchor="end">{format_number(value)}</text>')
    for value in round_ticks(*across):
        x = MARGIN_LEFT + PLOT_WIDTH * (value - across[0]) / (across[1] - across[0])
        parts.append(
            f'<text x="{x:.1f}" y="{MARGIN_TOP + PLOT_HEIGHT + 20}" text-anchor="middle">{format_number(value)}</text>'
        )
    return "".join(parts)


def _scale(values: Iterable[float]) -> tuple[float, float]:
    """Return a non-empty range that contains the values, up to `MAX_VALUE`, with a margin."""
    values = [min(max(value, -MAX_VALUE), MAX_VALUE) for value in values]
    low, high = min(values), max(values)
    if low == high == 0:
        return -0.03, 1.0
    margin = 0.03 * (high - low) or 0.5 * abs(high) or 1.0
    return low - margin, high + margin


def round_ticks(low: float, high: float) -> list[float]:
    """Return about `APPROXIMATE_TICKS` round numbers in a range: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / APPROXIMATE_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def format_number(value: float) -> str:
    """Return a number as text: four significant digits, thousands with commas."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    if 1e4 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"
