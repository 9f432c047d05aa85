"""A projection's audit as lines of text and as HTML: student tokens by kind, and unmatched tokens by category."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from xtk.pages.html_page import render
from xtk.projection.coverage_audit import audit_warning
from xtk.projection.token_categories import CATEGORIES

ROW_KINDS = ("exact", "special", "composed", "mapped", "unmapped", "padding")


def audit_lines(audit: dict[str, Any]) -> Iterator[str]:
    """Yield the numbers of student tokens by kind, the table of categories, and the warning if there is one."""
    yield "  audit"
    rows = audit["rows"]
    yield f"    rows: {', '.join(f'{rows[kind]:,} {kind}' for kind in ROW_KINDS if kind in rows)}"
    unreached = audit["unreachable_teacher_tokens"]
    yield f"    unmapped mass {audit['unmapped_mass']:.2%}; unreachable teacher tokens: {unreached:,}"
    if categories := _categories(audit):
        yield ""
        yield from _category_table(categories)
    if warned := audit_warning(audit):
        yield ""
        yield from (f"    {line}" for line in warned.splitlines())


def _categories(audit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each category, in the order of `CATEGORIES`."""
    stored = audit.get("categories") or {}
    return {name: stored[name] for name in CATEGORIES if name in stored}


def _sides(figures: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the number of tokens of student and teacher, and the fraction that has no match."""
    counts = [(figures[f"{side}_tokens"], figures[f"unmatched_{side}_tokens"]) for side in ("student", "teacher")]
    return [(count, unmatched / max(count, 1)) for count, unmatched in counts]


def _category_table(categories: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line per category: token counts, unmatched percentages, and the losses of this projection."""
    whole = all("unmapped_mass" in figures for figures in categories.values())
    lost = f"{'unmapped mass':>14}{'unreachable':>13}" if whole else ""
    yield f"    {'category':15}{'student':>9}{'unmatched':>11}{'teacher':>10}{'unmatched':>11}{lost}"
    for name, figures in categories.items():
        sides = "".join(
            f"{count:>{width},}{unmatched:>11.1%}"
            for (count, unmatched), width in zip(_sides(figures), (9, 10), strict=True)
        )
        lost = f"{figures['unmapped_mass']:>14.2%}{figures['unreachable_teacher_tokens']:>13,}" if whole else ""
        yield f"    {name:15}{sides}{lost}"
    if not whole:
        yield "    (unmapped mass by category is stored only by build-projection, not by prune-projection)"


def audit_sections(audit: dict[str, Any]) -> Markup:
    """Return `audit` in the header of a projection as HTML."""
    rows = {kind: audit["rows"][kind] for kind in ROW_KINDS if audit["rows"].get(kind)}
    total = max(sum(rows.values()), 1)
    return render(
        "audit",
        audit=audit,
        kinds=[(num / total, f"{kind} {100 * num / total:.1f} %, {num:,} rows") for kind, num in rows.items()],
        categories=[(name, _sides(figures)) for name, figures in _categories(audit).items()],
        warning="; ".join(line.strip() for line in (audit_warning(audit) or "").splitlines()),
    )
