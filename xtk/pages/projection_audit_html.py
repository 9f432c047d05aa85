"""A projection's audit as HTML: student tokens by kind, and unmatched tokens by category."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from xtk.pages.html_page import stacked_bar
from xtk.pages.projection_audit_tables import ROW_KINDS

AUDIT_STYLE = """
.share { position: relative; min-width: 7rem; }
.share i { position: absolute; inset: 0.2rem 0.6rem 0.2rem 0; z-index: -1; font-size: inherit; }
.share i::before { content: ""; display: block; height: 100%; width: var(--share); background: var(--bar);
  opacity: 0.4; border-radius: 0.15rem; }
"""


def audit_sections(audit: dict[str, Any]) -> Iterator[str]:
    """Yield an audit as HTML.

    Args:
        audit: `audit` in the header of a projection.
    """
    from xtk.projection.coverage_audit import audit_warning
    from xtk.projection.token_categories import CATEGORIES

    rows = {kind: audit["rows"][kind] for kind in ROW_KINDS if audit["rows"].get(kind)}
    total = max(sum(rows.values()), 1)
    yield "<p>Student tokens by kind of mapping</p>\n"
    yield stacked_bar((kind, count / total, f"{count:,} rows") for kind, count in rows.items())
    missing = f"{audit['unmapped_mass']:.2%} of the probability mass is unmapped"
    yield f"<p>{missing}; {audit['unreachable_teacher_tokens']:,} teacher tokens are unreachable.</p>\n"
    categories = audit.get("categories") or {}
    if categories:
        heads = ("student tokens", "unmatched", "teacher tokens", "unmatched")
        numbers = "".join(f'<th scope="col" class="number">{escape(head)}</th>' for head in heads)
        yield f'<div class="scroll"><table>\n<tr><th scope="col">category</th>{numbers}</tr>\n'
        for name in (name for name in CATEGORIES if name in categories):
            cells = "".join(_unmatched_cells(categories[name], side) for side in ("student", "teacher"))
            yield f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'
        yield "</table></div>\n"
    if warning := audit_warning(audit):
        yield f"<p>{escape('; '.join(line.strip() for line in warning.splitlines()))}.</p>\n"


def _unmatched_cells(figures: dict[str, Any], side: str) -> str:
    count, unmatched = figures[f"{side}_tokens"], figures[f"unmatched_{side}_tokens"]
    share = unmatched / max(count, 1)
    return (
        f'<td class="number">{count:,}</td>'
        f'<td class="number share"><i style="--share: {share:.1%}"></i>{share:.1%}</td>'
    )
