"""Reward `boxed`: compares the mathematical answer in the last box with the reference."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.rewards.answer_parsing import (
    answer_after_hashes,
    last_boxed_content,
    normalize_answer,
    parse_number,
    without_lone_names,
    without_thin_spaces,
)
from xtk.subprocesses import die_with_parent

COMPARISONS = ("math", "strings")
_MEMORY = 4 << 30
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from xtk.rewards.boxed_answer import compare_formulas; compare_formulas()"
)
_FIRST = 120.0  # seconds, includes the import of the library


@dataclass(frozen=True)
class BoxedReward:
    r"""boxed: 1 if the content of the last `\boxed{...}` or `\fbox{...}` equals the reference, else 0.

    Numbers are compared as in `gsm8k`, but units must be words or LaTeX text: `3x` is not 3. Words are compared as
    strings. Other answers with `compare=math` (the default): as formulas, by math-verify
    (`pip install '.[maths]'` in xtk's repository), in a subprocess with a time limit of `seconds` per comparison,
    after which the score is 0; with `compare=strings`: as strings, ignoring markup. Both ignore case, as math-verify
    does: `X` is `x`, and `\Delta` is `\delta`. The reference is the box in the row's field `column`, else the text
    after `####` there, else the whole field.
    """

    column: str = "answer"
    compare: str = "math"
    seconds: float = 5.0
    _symbols: MathComparer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise XtkError(
                f"compare={self.compare!r} is not a comparison of --reward boxed",
                hint=f"use compare=VALUE, one of: {', '.join(COMPARISONS)}",
            )
        if self.compare == "math":
            if importlib.util.find_spec("math_verify") is None:
                raise XtkError(
                    "--reward boxed needs the package math-verify",
                    hint="run pip install '.[maths]' in xtk's repository, or use --reward boxed:compare=strings",
                )
            object.__setattr__(self, "_symbols", MathComparer(self.seconds))

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row has no reference, or one that is not a formula."""
        if row.get(self.column) is None:
            return math.nan
        text = str(row[self.column])
        reference = last_boxed_content(text) or answer_after_hashes(text) or text.strip()
        if not reference:
            return math.nan
        answer = last_boxed_content(completion)
        if not answer:
            return 0.0
        left, right = (parse_number(one, in_formula=True) for one in without_lone_names(answer, reference))
        if left is not None and right is not None and left == right:
            return 1.0
        if _letters(answer) == _letters(reference):
            return 1.0
        if self._symbols is None or (_is_word(answer) and _is_word(reference)):
            return 0.0
        return self._symbols.equal(answer, reference)


def _is_word(text: str) -> bool:
    """Whether an answer is a word or a name, which computer algebra would take for a product: AB is BA."""
    plain = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text).strip()
    is_marked = plain != text.strip()
    return re.fullmatch(r"[^\W\d_]{2,}", plain) is not None and (is_marked or len(plain) > 3 or not plain.islower())


def _letters(text: str) -> str:
    text = re.sub(r"(?<!\w) | (?!\w)", "", normalize_answer(text))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


class MathComparer:
    """Compares LaTeX formulas with math-verify in a process that is killed on timeout: it can run for hours."""

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
