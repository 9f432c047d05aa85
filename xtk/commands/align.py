"""`xtk align`: text in, spans out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xtk.tokens.document import Document
    from xtk.tokens.rewriting import Rewriting
    from xtk.tokens.statistics import Aligned, Statistics
    from xtk.tokens.tokenizer import Tokenizer

COLOURS = ("black on bright_cyan", "black on bright_yellow")
ORDERS = ("worst", "first")
DATA = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst", ".xz")


def align(
    student: Annotated[str, typer.Argument(help=options.STUDENT, metavar="STUDENT")],
    teacher: Annotated[str, typer.Argument(help=options.TEACHER, metavar="TEACHER")],
    text: Annotated[
        str,
        typer.Argument(
            help="A data file, a folder of them, - for a pipe (as left out), or the text itself. Text that is the name "
            "of a file is that file; a folder without data files is one only with / at its end.",
            metavar="[TEXT]",
        ),
    ] = "-",
    teacher_text: Annotated[
        str,
        typer.Option(
            help="What the teacher reads, where it is another text than TEXT: what both have in common is aligned, and "
            "each span says how similar its two texts are.",
            metavar="TEXT",
        ),
    ] = "",
    columns: options.Columns = "",
    max_document_bytes: options.MaxDocumentBytes = options.MAX_DOCUMENT_BYTES,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Count over all documents instead: spans by kind, bytes in each, the worst."),
    ] = False,
    html: Annotated[
        bool,
        typer.Option("--html", help="Write these statistics and the documents, span by span, as a page to -o."),
    ] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="Where the page goes.", metavar="FILE")] = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Documents on the page; long ones, and the page, are cut at a size it tells.")
    ] = 20,
    order: Annotated[
        str,
        typer.Option(
            help="worst: the documents with most of their bytes in n:m spans or in none; first: those that come first.",
            metavar="|".join(ORDERS),
        ),
    ] = "worst",
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Show the smallest spans of equal bytes in two tokenisations of a text.

    Prints a JSON line for each document; on a terminal, the tokens of both sides above each other in colours.
    """
    from pathlib import Path

    from xtk.artifacts.corpus import Corpus, columns_option
    from xtk.artifacts.counting import fingerprint_of_corpus
    from xtk.artifacts.files import canonical_json, sha256
    from xtk.artifacts.hub import local_folder
    from xtk.commands.alignment_page import page
    from xtk.commands.page import check_page, write_page
    from xtk.lookup import unknown
    from xtk.tokens.document import Document
    from xtk.tokens.tokenizer import Tokenizer

    terminal.set_quiet(quiet)
    if html != bool(output):
        raise typer.BadParameter("--html and -o FILE go together")
    if teacher_text and (html or stats or text == "-"):
        raise typer.BadParameter("--teacher-text stands beside one TEXT, without --stats or --html")
    if order not in ORDERS:
        raise unknown("--order", order, ORDERS)
    if teacher_text:
        _show_different(text, teacher_text, [student, teacher], as_json=as_json)
        return
    documents: Iterable[Document]
    documents = [Document.of_text(_readable(text))]
    if _is_data(text):
        documents = Corpus([text], columns_option(columns), max_document_bytes)
    one, other = (Tokenizer(local_folder(side, weights=False), name=side) for side in (student, teacher))
    if html:
        _, content = fingerprint_of_corpus(documents)
        request = sha256(canonical_json([one.fingerprint, other.fingerprint, content, limit, order]))
        check_page(Path(output), request, force=force)
        statistics, shown = _counted(documents, one, other, **{order: limit})
        record = statistics.record()
        write_page(Path(output), "".join(page(record, shown, one, other, order=order, request=request)))
        terminal.result_artifact({**record, "path": output, "kind": "alignment-page"}, as_json=as_json)
    elif stats:
        _show_statistics(_counted(documents, one, other)[0], as_json=as_json)
    else:
        _show_spans(documents, one, other, as_json=as_json)


def _is_data(text: str) -> bool:
    """Say whether TEXT names data: a pipe, a file, a folder of data, a remote path; or else is the text itself.

    A text such as "notes" may be a word and a folder beside it. It is the folder where that holds data, or where the
    text ends in / as no word does.
    """
    from pathlib import Path

    from xtk.errors import exists

    if not text:
        return False
    if text == "-" or "://" in text[:12]:
        return True
    if exists(text):
        path = Path(text)
        return not path.is_dir() or text.endswith("/") or any(file.suffix in DATA for file in path.iterdir())
    return not any(map(str.isspace, text)) and Path(text).suffix in DATA


def _readable(text: str) -> str:
    """Return an argument that is no UTF-8 as a pipe would be read."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _counted(
    documents: Iterable[Document], student: Tokenizer, teacher: Tokenizer, *, first: int = 0, worst: int = 0
) -> tuple[Statistics, list[Aligned]]:
    """Return the counts over all documents, and the first or the worst of them."""
    from xtk.tokens.statistics import Statistics, aligned

    statistics = Statistics(student, teacher, keep=worst)
    begin: list[Aligned] = []
    with terminal.Progress("align", None, "documents") as progress:
        for group in aligned(documents, student, teacher):
            statistics.add(group)
            begin += group[: first - len(begin)]
            progress.advance(len(group), f"{statistics.bytes / 1e6:,.1f} MB")
    for lost in statistics.lost:
        _warn(lost)
    return statistics, begin or statistics.worst[:worst]


def _show_statistics(statistics: Statistics, *, as_json: bool) -> None:
    from xtk.commands.alignment_tables import show

    if as_json:
        terminal.result_json(statistics.record())
    else:
        show(statistics.record())


def _show_spans(documents: Iterable[Document], student: Tokenizer, teacher: Tokenizer, *, as_json: bool) -> None:
    from xtk.tokens.rewriting import Rewriting, rewriting
    from xtk.tokens.statistics import aligned

    coloured = terminal.results_are_seen_by_a_person() and not as_json
    lost = [Rewriting(side.name) for side in (student, teacher)]
    for group in aligned(documents, student, teacher):
        for document in group:
            if coloured:
                _show(_record(document, student, teacher), student, teacher)
            else:
                terminal.result_json(_record(document, student, teacher))
            if document.is_text:
                lost[0] += rewriting(student, [document.text], [document.student])
                lost[1] += rewriting(teacher, [document.text], [document.teacher])
    for found in lost:
        _warn(found)


def _show_different(text: str, teacher_text: str, sides: list[str], *, as_json: bool) -> None:
    """Show the spans of two texts that differ."""
    from xtk.artifacts.hub import local_folder
    from xtk.tokens.difference import align_different
    from xtk.tokens.tokenizer import Tokenizer

    one, other = (Tokenizer(local_folder(side, weights=False), name=side) for side in sides)
    texts = _readable(text), _readable(teacher_text)
    (student,), (teacher,) = one.encode(texts[:1]), other.encode(texts[1:])
    found = align_different(texts[0], student.ends, texts[1], teacher.ends)
    record = {
        "text": texts[0],
        "teacher_text": texts[1],
        "student_ids": student.ids.tolist(),
        "teacher_ids": teacher.ids.tolist(),
        "spans": found.spans.tolist(),
        "exact": bool(found.equal.all()),
        "equal": found.equal.tolist(),
        "similarity": [round(value, 4) for value in found.similarity.tolist()],
    }
    if terminal.results_are_seen_by_a_person() and not as_json:
        _show(record, one, other)
    else:
        terminal.result_json(record)


def _warn(lost: Rewriting) -> None:
    if warning := lost.warning():
        terminal.note(f"align: {warning}")


def _record(document: Aligned, student: Tokenizer, teacher: Tokenizer) -> dict[str, Any]:
    record = {
        "text": document.text,
        "student_ids": document.student.ids.tolist(),
        "teacher_ids": document.teacher.ids.tolist(),
        "spans": document.spans.tolist(),
        "exact": document.student.exact and document.teacher.exact,
    }
    if not record["exact"]:
        from xtk.tokens.difference import compare

        one = _spelled(student, document.student.ids, document.spans[:, :2])
        other = _spelled(teacher, document.teacher.ids, document.spans[:, 2:])
        record["similarity"] = [round(value, 4) for value in compare(one, other)[0].tolist()]
    return record


def _spelled(tokenizer: Tokenizer, ids: Any, ranges: Any) -> list[str]:
    spell = tokenizer.vocabulary.spelling
    return [b"".join(map(spell, ids[low:high].tolist())).decode("utf-8", "replace") for low, high in ranges.tolist()]


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
                piece = side.control_names.get(ids[at]) or side.vocabulary.spelling(ids[at]).decode("utf-8", "replace")
                line.append(_visible(piece), style=COLOURS[number % 2])
                line.append("·" if at + 1 < span[edges[1]] else "")
        console.print(line, soft_wrap=True)
    one = sum(1 for span in record["spans"] if span[1] - span[0] == 1 == span[3] - span[2])
    console.print(
        f"[dim]{len(record['spans'])} spans, {one} of one token on each side; "
        f"{len(record['student_ids'])} student and {len(record['teacher_ids'])} teacher tokens[/dim]"
    )


def _visible(piece: str) -> str:
    return terminal.printable(piece.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍"))
