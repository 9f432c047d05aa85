"""Running of all checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from xtk.doctor import CHECKS
from xtk.doctor.doctor_inputs import DoctorInputs, Finding
from xtk.errors import XtkError
from xtk.name_registry import load_registered


def run_checks(inputs: DoctorInputs) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that fails is an error finding, and equal errors are reported once."""
    reported: list[tuple[str, str]] = []
    table = {target.partition(":")[2]: target for target in CHECKS}
    for name in table:
        try:
            for finding in load_registered(table, name, "check")(inputs):
                if finding.level == "error":
                    reported.append((finding.what, finding.where))
                yield replace(finding, check=finding.check or name)
        except XtkError as failure:
            where = failure.where or ""
            if not any(failure.what == what and where in other for what, other in reported):
                yield Finding("error", failure.what, where, failure.hint or "", check=name)
            reported.append((failure.what, where))
