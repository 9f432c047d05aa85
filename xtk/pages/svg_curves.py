"""Metric curves of several runs as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from xtk.pages.html_page import COLORS, color, format_number, render

PLOT_WIDTH, PLOT_HEIGHT = 440, 190  # plot area, in pixels
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 66, 10, 10, 26  # around the plot area
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
# Long curves are drawn as the lowest and highest point of this many intervals, so that spikes stay visible.
THINNED_INTERVALS = 250
APPROXIMATE_TICKS = 4
MAX_VALUE = 1e300  # larger values are drawn at the edge: their difference is not finite


@dataclass(frozen=True)
class MetricCurve:
    """A metric of a run."""

    run: str  # its name
    color_index: int  # index of the run
    points: Sequence[tuple[float, float]]  # (step, value) in the order of steps


def curves_figure(
    title: str,
    unit: str,
    curves: Sequence[MetricCurve],
    by: str = "step",
    level: tuple[str, float] | None = None,
    metric: str = "",
) -> Markup:
    """Return one plot with the curves of a metric, as HTML."""
    shown = [(curve, thin_points(curve.points)) for curve in curves]
    low_x, high_x = _scale(x for _, points in shown for x, _ in points)
    levels = [] if level is None else [level[1]]
    low_y, high_y = _scale([*levels, *(y for _, points in shown for _, y in points)])

    def pixel_x(x: float) -> float:
        return MARGIN_LEFT + PLOT_WIDTH * (x - low_x) / (high_x - low_x)

    def pixel_y(y: float) -> float:
        return MARGIN_TOP + PLOT_HEIGHT * (high_y - min(max(y, low_y), high_y)) / (high_y - low_y)

    lines = [
        {
            "run": curve.run,
            "title": f"{curve.run}: {format_number(points[-1][1])} at {by} {points[-1][0]:,.0f}",
            "points": [f"{pixel_x(x):.1f},{pixel_y(y):.2f}" for x, y in points],
            "end": (pixel_x(points[-1][0]), pixel_y(points[-1][1])),
            "color": color(curve.color_index),
            "dash": DASHES[curve.color_index // len(COLORS) % len(DASHES)],
        }
        for curve, points in shown
    ]
    return render(
        "curves",
        title=title,
        metric=metric or title,
        unit="" if unit in title else unit,
        by=by,
        last=", ".join(f"{curve.run} {format_number(points[-1][1])}" for curve, points in shown),
        width=MARGIN_LEFT + PLOT_WIDTH + MARGIN_RIGHT,
        height=MARGIN_TOP + PLOT_HEIGHT + MARGIN_BOTTOM,
        left=MARGIN_LEFT,
        right=MARGIN_LEFT + PLOT_WIDTH,
        rows=[(pixel_y(value), label) for value, label in labelled_ticks(low_y, high_y)],
        columns=[(pixel_x(value), label) for value, label in labelled_ticks(low_x, high_x)],
        lines=lines,
        level=None if level is None else (pixel_y(level[1]), f"{level[0]} {format_number(level[1])}"),
    )


def labelled_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return `round_ticks` with labels, which have as many digits as tell them apart."""
    ticks = round_ticks(low, high)
    labels, digits = [format_number(value) for value in ticks], 5
    while len(set(labels)) < len(labels) and digits < 17:
        labels, digits = [f"{value:.{digits}g}" for value in ticks], digits + 1
    return list(zip(ticks, labels, strict=True))


def thin_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return lowest and highest point of each interval of a long curve, and its ends; all points of a short one."""
    if len(points) <= 2 * THINNED_INTERVALS:
        return list(points)
    kept = {0, len(points) - 1}
    for interval in range(THINNED_INTERVALS):
        places = range(len(points) * interval // THINNED_INTERVALS, len(points) * (interval + 1) // THINNED_INTERVALS)
        kept |= {min(places, key=lambda at: points[at][1]), max(places, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


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
