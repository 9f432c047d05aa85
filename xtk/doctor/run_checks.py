"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor import CHECKS
from xtk.doctor.inputs import DoctorInputs, Finding
from xtk.errors import XtkError
from xtk.registry import load_registered


def run_checks(inputs: DoctorInputs) -> Iterator[Finding]:
    """Yield what each check finds; one that cannot be made is an error of its own, what several meet is told once."""
    met: list[tuple[str, str]] = []
    table = {place.partition(":")[2]: place for place in CHECKS}
    for name in table:
        try:
            for finding in load_registered(table, name, "check")(inputs):
                if finding.level == "error":
                    met.append((finding.what, finding.where))
                yield finding
        except XtkError as wrong:
            where = wrong.where or ""
            if not any(wrong.what == what and where in there for what, there in met):
                yield Finding(name, "error", wrong.what, where, wrong.hint or "")
            met.append((wrong.what, where))
