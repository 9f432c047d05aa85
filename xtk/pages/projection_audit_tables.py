"""A projection's audit as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ROW_KINDS = ("exact", "special", "composed", "mapped", "unmapped", "padding")


def audit_lines(audit: dict[str, Any]) -> Iterator[str]:
    """Yield the numbers of student tokens by kind, the table of categories, and the warning if there is one."""
    from xtk.projection.coverage_audit import audit_warning

    yield "  audit"
    rows = audit["rows"]
    yield f"    rows: {', '.join(f'{rows[kind]:,} {kind}' for kind in ROW_KINDS if kind in rows)}"
    unreached = audit["unreachable_teacher_tokens"]
    yield f"    unmapped mass {audit['unmapped_mass']:.2%}; unreachable teacher tokens: {unreached:,}"
    categories = audit.get("categories")
    if categories:
        yield ""
        yield from _category_table(categories)
    warned = audit_warning(audit)
    if warned:
        yield ""
        yield from (f"    {line}" for line in warned.splitlines())


def _category_table(categories: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line per category: token counts, unmatched percentages, and the losses of this projection."""
    from xtk.projection.token_categories import CATEGORIES

    whole = all("unmapped_mass" in figures for figures in categories.values())
    lost = f"{'unmapped mass':>14}{'unreachable':>13}" if whole else ""
    yield f"    {'category':15}{'student':>9}{'unmatched':>11}{'teacher':>10}{'unmatched':>11}{lost}"
    for name, figures in ((name, categories[name]) for name in CATEGORIES if name in categories):
        sides = "".join(
            f"{figures[f'{side}_tokens']:>{width},}"
            f"{figures[f'unmatched_{side}_tokens'] / max(figures[f'{side}_tokens'], 1):>11.1%}"
            for side, width in (("student", 9), ("teacher", 10))
        )
        lost = f"{figures['unmapped_mass']:>14.2%}{figures['unreachable_teacher_tokens']:>13,}" if whole else ""
        yield f"    {name:15}{sides}{lost}"
    if not whole:
        yield "    (unmapped mass by category is stored only by build-projection, not by prune-projection)"
