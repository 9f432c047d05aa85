"""`xtk align`: text in, spans out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import options

if TYPE_CHECKING:
    from xtk.tokens.document import Document
    from xtk.tokens.tokenizer import Tokenizer

AT_ONCE = 256
COLOURS = ("black on bright_cyan", "black on bright_yellow")


def align(
    student: Annotated[str, typer.Argument(help=options.STUDENT, metavar="STUDENT")],
    teacher: Annotated[str, typer.Argument(help=options.TEACHER, metavar="TEACHER")],
    text: Annotated[
        str, typer.Argument(help="A data file, - for a pipe (as left out), or the text itself.", metavar="[TEXT]")
    ] = "-",
    columns: options.Columns = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Show the smallest spans of equal bytes in two tokenisations of a text.

    Prints a JSON line for each document; on a terminal, the tokens of both sides above each other in colours.
    """
    from xtk.artifacts.corpus import Corpus, columns_option
    from xtk.artifacts.hub import local_folder
    from xtk.tokens.document import Document
    from xtk.tokens.tokenizer import Tokenizer

    terminal.set_quiet(quiet)
    documents = Corpus([text], columns_option(columns)) if _is_data(text) else [Document.of_text(text)]
    sides = [Tokenizer(local_folder(side, weights=False), name=side) for side in (student, teacher)]
    coloured = terminal.results_are_seen_by_a_person() and not as_json
    for record in _records(documents, *sides):
        if coloured:
            _show(record, *sides)
        else:
            terminal.result_json(record)


def _is_data(text: str) -> bool:
    """Say whether TEXT names data: a pipe, a file, a glob or remote path; or else is the text itself."""
    from pathlib import Path

    if text == "-" or "://" in text[:12]:
        return True
    one_word = len(text) < 4096 and not any(character.isspace() for character in text)
    if len(text) < 4096 and "\n" not in text and "\0" not in text and Path(text).exists():
        return True
    return one_word and Path(text).suffix in (".jsonl", ".json", ".txt", ".parquet", ".arrow", ".gz")


def _records(documents: Any, student: Tokenizer, teacher: Tokenizer) -> Iterator[dict[str, Any]]:
    from xtk.tokens.alignment import align as spans_of

    def flush(group: list[Document]) -> Iterator[dict[str, Any]]:
        texts = [document.text for document in group]
        for content, left, right in zip(texts, student.encode(texts), teacher.encode(texts), strict=True):
            yield {
                "text": content,
                "student_ids": left.ids.tolist(),
                "teacher_ids": right.ids.tolist(),
                "spans": spans_of(left, right).tolist(),
            }

    group: list[Document] = []
    for document in documents:
        group.append(document)
        if len(group) == AT_ONCE:
            yield from flush(group)
            group = []
    yield from flush(group)


def _show(record: dict[str, Any], student: Tokenizer, teacher: Tokenizer) -> None:
    """Print each side's tokens, those of a span in one colour on both sides."""
    from rich.console import Console
    from rich.text import Text

    console = Console(force_terminal=True, highlight=False, file=terminal.results())
    for name, side, ids, edges in (
        ("student", student, record["student_ids"], (0, 1)),
        ("teacher", teacher, record["teacher_ids"], (2, 3)),
    ):
        line = Text(f"{name}  ", style="bold")
        for number, span in enumerate(record["spans"]):
            for at in range(span[edges[0]], span[edges[1]]):
                piece = side.vocabulary.spelling(ids[at]).decode("utf-8", "replace")
                line.append(_visible(piece), style=COLOURS[number % 2])
                line.append("·" if at + 1 < span[edges[1]] else "")
        console.print(line, soft_wrap=True)
    one = sum(1 for span in record["spans"] if span[1] - span[0] == 1 == span[3] - span[2])
    console.print(
        f"[dim]{len(record['spans'])} spans, {one} of one token on each side; "
        f"{len(record['student_ids'])} student and {len(record['teacher_ids'])} teacher tokens[/dim]"
    )


def _visible(piece: str) -> str:
    return piece.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
