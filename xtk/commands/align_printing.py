"""The terminal view of `xtk align`: spans as boxes, the student's tokens above the teacher's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from xtk import terminal

if TYPE_CHECKING:
    from xtk.text.tokenizer import Tokenizer

SPAN_STYLES, UNALIGNED_STYLE = ("first_span", "second_span"), "unaligned"
LABELS = ("student ", "teacher ")
BETWEEN_TOKENS, BORDER, SPACE = "┊", "│", "·"
LEGEND = f"{BORDER} between spans, {BETWEEN_TOKENS} between the tokens of a span, {SPACE} space"
_BYTES = re.compile("([\udc80-\udcff]+)")


@dataclass(frozen=True)
class _Box:
    """A span, or tokens in no span: what is printed of both sides, and its style."""

    texts: tuple[str, str]
    style: str

    @property
    def width(self) -> int:
        """Columns that the box takes."""
        from rich.cells import cell_len

        return max(1, *map(cell_len, self.texts))


def print_boxes(record: dict[str, Any], student: Tokenizer, teacher: Tokenizer) -> None:
    """Print the spans of a document as boxes, two lines at a time, in the width of the terminal."""
    boxes = list(_boxes(record, student, teacher))
    width = shutil.get_terminal_size().columns - len(LABELS[0]) - 1
    for number, line in enumerate(_wrap([part for box in boxes for part in _split(box, width - 1)], width)):
        if number:
            terminal.result_line("")
        for side, label in enumerate(LABELS):
            terminal.result_styled([(label, "bold"), (BORDER, "dim"), *_cells(line, side)])
    terminal.result_line("")
    terminal.result_styled([(_legend(boxes), "dim")])
    terminal.result_styled([(_counts(record), "dim")])


def _cells(line: list[_Box], side: int) -> Iterator[tuple[str, str]]:
    """Yield (text, style) of one side of boxes, each padded to the width of the box and followed by a border."""
    from rich.cells import cell_len

    for box in line:
        text = box.texts[side]
        yield text + " " * (box.width - cell_len(text)), box.style
        yield BORDER, "dim"


def _wrap(boxes: list[_Box], width: int) -> Iterator[list[_Box]]:
    """Yield the boxes of each pair of lines; a box takes its width and a border."""
    line: list[_Box] = []
    used = 0
    for box in boxes:
        if line and used + box.width + 1 > width:
            yield line
            line, used = [], 0
        line.append(box)
        used += box.width + 1
    if line:
        yield line


def _split(box: _Box, width: int) -> list[_Box]:
    """Return a box as several that are at most `width` columns wide."""
    if box.width <= width:
        return [box]
    from rich.cells import chop_cells

    student_lines, teacher_lines = (chop_cells(text, max(width, 2)) for text in box.texts)
    pairs = zip_longest(student_lines, teacher_lines, fillvalue="")
    return [_Box(pair, box.style) for pair in pairs]


def _boxes(record: dict[str, Any], student: Tokenizer, teacher: Tokenizer) -> Iterator[_Box]:
    """Yield all tokens of both sides in order: spans, and tokens between spans."""
    s_end = t_end = 0
    last = [len(record["student_ids"])] * 2 + [len(record["teacher_ids"])] * 2
    for number, (s_start, s_stop, t_start, t_stop) in enumerate([*record["spans"], last]):
        for style, ranges in (
            (UNALIGNED_STYLE, (s_end, s_start, t_end, t_start)),
            (SPAN_STYLES[number % 2], (s_start, s_stop, t_start, t_stop)),
        ):
            of_student = _token_texts(student, record["student_ids"][ranges[0] : ranges[1]])
            of_teacher = _token_texts(teacher, record["teacher_ids"][ranges[2] : ranges[3]])
            if of_student or of_teacher:
                yield _Box((of_student, of_teacher), style)
        s_end, t_end = s_stop, t_stop


def _token_texts(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = tokenizer.special_token_names
    return BETWEEN_TOKENS.join(names.get(token) or visible_token(tokenizer.vocabulary.bytes_of(token)) for token in ids)


def visible_token(spelling: bytes) -> str:
    """Return a token's bytes as text; parts of characters in hexadecimal, invisible characters as symbols."""
    from xtk.pages.alignment_tables import visible_symbol

    parts = _BYTES.split(spelling.decode("utf-8", "surrogateescape"))  # characters, bytes, characters, ...
    for at, part in enumerate(parts):
        letters = (SPACE if letter == " " else visible_symbol(letter) or letter for letter in part)
        parts[at] = f"<{os.fsencode(part).hex(' ').upper()}>" if at % 2 else "".join(letters)
    return "".join(parts)


def _legend(boxes: list[_Box]) -> str:
    """Return what the signs of these boxes mean."""
    shown = "".join(text for box in boxes for text in box.texts)
    return ", ".join([
        LEGEND,
        *(["⏎ newline"] if "⏎" in shown else []),
        *(["⇥ tab"] if "⇥" in shown else []),
        *(["<E2 82> bytes of a part of a character"] if re.search("<[0-9A-F]{2}[ >]", shown) else []),
        *(["red: in no span"] if any(box.style == UNALIGNED_STYLE for box in boxes) else []),
    ])  # fmt: skip


def _counts(record: dict[str, Any]) -> str:
    one_to_one = sum(1 for span in record["spans"] if span[1] - span[0] == 1 == span[3] - span[2])
    return (
        f"{terminal.count(len(record['spans']), 'span')}, {one_to_one:,} of one token on each side; "
        f"{terminal.count(len(record['student_ids']), 'student token')}, "
        f"{terminal.count(len(record['teacher_ids']), 'teacher token')}"
    )
