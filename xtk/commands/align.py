"""`xtk align`: spans of equal bytes between two tokenizations of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.commands.align_printing import print_boxes
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option
from xtk.options.shared import ConfigOption, CorpusOptions, ForceOption, QuietOption
from xtk.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xtk.text.alignment_statistics import AlignedDocument, AlignmentStatistics
    from xtk.text.document import Document
    from xtk.text.normalization_changes import NormalizationLoss
    from xtk.text.tokenizer import Tokenizer

ORDERS = ("worst", "first")
COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class AlignOptions(CorpusOptions, ForceOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk align`."""

    student: str = argument(
        REQUIRED, "Student tokenizer: a folder with tokenizer.json, or a Hugging Face hub id.", metavar="STUDENT"
    )
    teacher: str = argument(
        REQUIRED, "Teacher tokenizer: a folder with tokenizer.json, or a Hugging Face hub id.", metavar="TEACHER"
    )
    text: str = argument(
        "-",
        "Data file, folder (ending in /), - for standard input (default), or the text itself. An existing file "
        "name is read as that file.",
        metavar="[TEXT]",
    )
    stats: bool = option(
        False, "Print span statistics over all documents: counts and bytes by kind, and the worst documents."
    )
    html: str = option("", "Write the statistics and the aligned documents as an HTML page.", metavar="FILE")
    limit: int = option(
        20, "With --html: maximum number of documents on the page; long documents are shortened.", min=0
    )
    order: str = option(
        "worst",
        "With --html: worst (most bytes in n:m spans or unaligned first), or first (order of the data).",
        metavar="|".join(ORDERS),
    )
    as_json: bool = option(
        False,
        "Print JSON lines instead of tables; pipes and files get them anyway, except with --stats.",
        flags=("--json",),
    )


def align(options: AlignOptions) -> None:
    """Show how two tokenizers split the same text.

    Prints the shortest spans of equal bytes: boxes on a terminal, a JSON line per document elsewhere.

    Examples:
        xtk align ./student ./teacher "It costs 1234 euros."
        xtk align ./student ./teacher data.jsonl --stats
    """
    from pathlib import Path

    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.files.atomic_files import canonical_json, sha256
    from xtk.files.output import Output
    from xtk.models.resolver import resolve_model_folder
    from xtk.name_registry import unknown_name_error
    from xtk.pages.alignment_html import alignment_page
    from xtk.pages.alignment_tables import print_alignment_tables
    from xtk.pages.html_page import PAGE, write_page
    from xtk.projection.corpus_cooccurrence_counts import corpus_fingerprint
    from xtk.text.document import Document
    from xtk.text.tokenizer import Tokenizer

    terminal.set_quiet(options.quiet)
    if options.order not in ORDERS:
        raise unknown_name_error("value of --order", options.order, ORDERS)
    one, other = (
        Tokenizer(resolve_model_folder(side, with_weights=False), name=side)
        for side in (options.student, options.teacher)
    )
    documents: Iterable[Document]
    documents = [Document.from_text(_decode_argument(options.text))]
    if _is_data(options.text):
        documents = Corpus([options.text], parse_columns_option(options.columns), options.max_document_bytes)
    if options.html:
        _, content = corpus_fingerprint(documents)
        request = sha256(canonical_json([one.fingerprint, other.fingerprint, content, options.limit, options.order]))
        Output(Path(options.html), PAGE, force=options.force).find_finished(request)
        statistics, shown = _align_all(documents, one, other, **{options.order: options.limit})
        record = statistics.to_json()
        page = alignment_page(record, shown, one, other, order=options.order, request=request)
        write_page(Path(options.html), page)
        terminal.result_artifact({**record, "path": options.html, "kind": "alignment-page"}, as_json=options.as_json)
    elif options.stats:
        record = _align_all(documents, one, other)[0].to_json()
        if options.as_json:
            terminal.result_json(record)
        else:
            print_alignment_tables(record)
    else:
        _print_all_spans(documents, one, other, as_json=options.as_json)


def _is_data(text: str) -> bool:
    """Return whether TEXT names data (a pipe, a file, a folder with data, a URL) instead of being the text itself.

    A word such as "notes" may also be the name of a folder. It is read as a folder if the folder has data files, or if
    the text ends in /.
    """
    from pathlib import Path

    from xtk.data.data_file_readers import FORMATS
    from xtk.errors import path_exists

    suffixes = (*FORMATS, *COMPRESSED_SUFFIXES)
    if not text:
        return False
    if text == "-" or "://" in text[:12]:
        return True
    if path_exists(text):
        path = Path(text)
        return not path.is_dir() or text.endswith("/") or any(file.suffix in suffixes for file in path.iterdir())
    return not any(map(str.isspace, text)) and Path(text).suffix in suffixes


def _decode_argument(text: str) -> str:
    """Return a command line argument with invalid UTF-8 replaced, as in text from a pipe."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _align_all(
    documents: Iterable[Document], student: Tokenizer, teacher: Tokenizer, *, first: int = 0, worst: int = 0
) -> tuple[AlignmentStatistics, list[AlignedDocument]]:
    """Return the statistics of all documents, and the first or the worst aligned documents."""
    from xtk.text.alignment_statistics import AlignmentStatistics, align_documents

    statistics = AlignmentStatistics(student, teacher, num_worst=worst)
    begin: list[AlignedDocument] = []
    with Progress("align", None, "documents") as progress:
        for group in align_documents(documents, student, teacher):
            statistics.add(group)
            begin += group[: first - len(begin)]
            progress.advance(len(group), f"{statistics.num_bytes / 1e6:,.1f} MB")
    for lost in statistics.normalization_losses:
        _warn(lost)
    return statistics, begin or statistics.worst_documents[:worst]


def _print_all_spans(documents: Iterable[Document], student: Tokenizer, teacher: Tokenizer, *, as_json: bool) -> None:
    from xtk.text.alignment_statistics import align_documents
    from xtk.text.normalization_changes import NormalizationLoss, count_normalization_loss

    as_boxes = terminal.result_stream().isatty() and not as_json
    lost = [NormalizationLoss(side.name) for side in (student, teacher)]
    for group in align_documents(documents, student, teacher):
        for document in group:
            if as_boxes:
                print_boxes(_alignment_record(document), student, teacher)
            else:
                terminal.result_json(_alignment_record(document))
            if document.is_text:
                lost[0] += count_normalization_loss(student, [document.text], [document.student])
                lost[1] += count_normalization_loss(teacher, [document.text], [document.teacher])
    for loss in lost:
        _warn(loss)


def _warn(lost: NormalizationLoss) -> None:
    if warning := lost.warning():
        terminal.note(f"align: {warning}")


def _alignment_record(document: AlignedDocument) -> dict[str, Any]:
    return {
        "text": document.text,
        "student_ids": document.student.ids.tolist(),
        "teacher_ids": document.teacher.ids.tolist(),
        "spans": document.spans.tolist(),
        "exact": document.student.exact and document.teacher.exact,
    }
