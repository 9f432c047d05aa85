"""Mathematical equality of formulas, in a process that is killed on timeout: computer algebra can run for hours."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path

from xtk.errors import XtkError
from xtk.rewards.answer_parsing import without_thin_spaces
from xtk.subprocesses import die_with_parent

_MEMORY = 4 << 30
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from xtk.rewards.math_equality import compare_formulas; compare_formulas()"
)
_FIRST = 120.0  # seconds, includes the import of the library


class MathComparer:
    """Compares LaTeX formulas with math-verify in a subprocess."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, answer: str, reference: str) -> float:
        """Return 1 if two formulas are equal, 0 if not or on timeout, nan if the reference is not a formula."""
        left, right = (" ".join(without_thin_spaces(text).split()) for text in (answer, reference))
        with self._lock:
            for _ in range(2):  # the process may have been killed
                result, is_late = self._compare_in_process(self._running_process(), left, right, self.seconds)
                if result is not None or is_late:
                    break
            return 0.0 if result is None else result

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the process, started and able to compare."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = self._start()
            if self._compare_in_process(process, "1", "1", _FIRST)[0] != 1.0:
                raise XtkError(
                    "the process that compares formulas with math-verify did not start",
                    hint="python -c 'import math_verify' shows why; or use --reward boxed:compare=strings",
                )
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        here = str(Path(__file__).parent.parent.parent)
        return subprocess.Popen(
            [sys.executable, "-c", _START, here, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _compare_in_process(
        self, process: subprocess.Popen[bytes], answer: str, reference: str, seconds: float
    ) -> tuple[float | None, bool]:
        """Return the result of the process, and whether it is too late. Without a result the process is killed."""
        is_late = False
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps([answer, reference]).encode() + b"\n")
            process.stdin.flush()
            is_late = not select.select([process.stdout], [], [], seconds)[0]
            if not is_late and (line := process.stdout.readline()):
                return float(json.loads(line)), False
        self.close()
        return None, is_late

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def compare_formulas() -> None:
    """Read pairs of formulas, one per line, and print the result of math-verify for each."""
    from math_verify import LatexExtractionConfig, parse, verify

    die_with_parent(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))

    def read(text: str) -> list[object]:
        expressions: list[object] = parse(
            f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
        )
        return expressions

    for line in sys.stdin:
        result = math.nan
        try:
            left, right = json.loads(line)
            gold = read(right)
            if gold:
                result = 0.0
                result = float(verify(gold, read(left), timeout_seconds=None))
        except Exception:
            pass
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
