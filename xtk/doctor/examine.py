"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor import CHECKS
from xtk.doctor.case import Case, Finding
from xtk.errors import XtkError
from xtk.lookup import lookup


def examine(case: Case) -> Iterator[Finding]:
    """Yield what each check finds; one that cannot be made is an error of its own, what several meet is told once."""
    met: set[str] = set()
    table = {place.partition(":")[2]: place for place in CHECKS}
    for name in table:
        try:
            yield from lookup(table, name, "check")(case)
        except XtkError as wrong:
            if str(wrong) not in met:
                yield Finding(name, "error", wrong.what, wrong.where or "", wrong.hint or "")
            met.add(str(wrong))
