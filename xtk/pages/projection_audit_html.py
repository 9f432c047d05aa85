"""A projection's audit as HTML: student tokens by kind, and unmatched tokens by category."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from xtk.pages.html_page import render
from xtk.pages.projection_audit_tables import ROW_KINDS


def audit_sections(audit: dict[str, Any]) -> Markup:
    """Return `audit` in the header of a projection as HTML."""
    from xtk.projection.coverage_audit import audit_warning
    from xtk.projection.token_categories import CATEGORIES

    rows = {kind: audit["rows"][kind] / max(sum(audit["rows"][kind] for kind in ROW_KINDS if kind in audit["rows"]), 1)
            for kind in ROW_KINDS if audit["rows"].get(kind)}  # fmt: skip
    categories = audit.get("categories") or {}
    sides = {
        name: [
            (figures[f"{side}_tokens"], figures[f"unmatched_{side}_tokens"] / max(figures[f"{side}_tokens"], 1))
            for side in ("student", "teacher")
        ]
        for name, figures in categories.items()
    }
    return render(
        "audit",
        audit=audit,
        kinds=[(share, f"{kind} {100 * share:.1f} %, {audit['rows'][kind]:,} rows") for kind, share in rows.items()],
        categories=[(name, sides[name]) for name in CATEGORIES if name in sides],
        warning="; ".join(line.strip() for line in (audit_warning(audit) or "").splitlines()),
    )
