"""The HTML page of `xtk evaluate-draft --html`: speed-up by block size, and the tables of the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xtk.pages.html_page import page, render
from xtk.pages.svg_curves import MetricCurve, curves_figure


def draft_page(
    record: dict[str, Any], summary: str, tables: Sequence[tuple[str, list[str], list[list[str]]]], request: str
) -> str:
    """Return the page."""
    blocks = record["block_sizes"]
    sizes = [block["num_draft_tokens"] for block in blocks]
    lines = {"measured here": [block["speed_up"] for block in blocks]}
    lines["expected from costs here"] = [block["expected_speed_up"] for block in blocks]
    for ratio in blocks[0]["by_cost_ratio"]:
        values = [block["by_cost_ratio"][ratio]["expected_speed_up"] for block in blocks]
        lines[f"expected at cost ratio {ratio}"] = values
    lines["target alone"] = [1.0 for _ in blocks]
    curves = [
        MetricCurve(name, at, list(zip(sizes, values, strict=True))) for at, (name, values) in enumerate(lines.items())
    ]
    content = render(
        "draft",
        summary=summary,
        picture=curves_figure("speed-up", "by draft tokens per block", curves, "block size"),
        keys=list(enumerate(lines)),
        tables=tables,
    )
    return page(f"{record['draft']} as a draft of {record['target']}", content, request)
