"""`xtk build-projection`: build a projection from two tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option
from xtk.options.shared import ConfigOption, CorpusOptions, ForceOption, JsonOption, QuietOption
from xtk.progress import Progress

if TYPE_CHECKING:
    from xtk.files.output import Output
    from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class BuildProjectionOptions(CorpusOptions, ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk build-projection`."""

    student: str = argument(
        REQUIRED, "Student tokenizer: a folder with tokenizer.json, or a Hugging Face hub id.", metavar="STUDENT"
    )
    teacher: str = argument(
        REQUIRED, "Teacher tokenizer: a folder with tokenizer.json, or a Hugging Face hub id.", metavar="TEACHER"
    )
    output: str = output_option("Output file (safetensors); nothing is added to its name.", "FILE")
    method: str = option(
        "multitoken",
        "exact: equal tokens only; first-token: first teacher token; multitoken: up to 4, falling weights. "
        "partition: groups of tokens; cooccurrence: counts in --corpus.",
        metavar="[exact|first-token|multitoken|partition|cooccurrence]",
    )
    special_tokens: str = option(
        "role",
        "Special-token matching: by role (eos, bos, ...), none, or a file of {student token: teacher token}.",
        metavar="[role|none|FILE]",
    )
    max_tokens_per_entry: int | None = option(
        None,
        "With --method multitoken: maximum teacher tokens per student token; longer ones are unmapped. [default: 4]",
        show_default=False,
    )
    decay: float | None = option(
        None,
        "With --method multitoken: weight of each teacher token relative to the one before. [default: 0.1]",
        show_default=False,
    )
    reverse_pass: bool = option(
        False,
        "With --method multitoken: also map teacher tokens through the student tokens that spell them. Use it if "
        "the printed audit shows many unreachable teacher tokens.",
    )
    corpus: tuple[str, ...] = option(
        (),
        "With --method cooccurrence: data in which both tokenizers' aligned tokens are counted. Repeatable.",
        metavar="DATA",
    )
    smoothing: float | None = option(
        None,
        "With --method cooccurrence: pseudo-count of the first-token mapping, in spans. [default: 1]",
        show_default=False,
    )


def build_projection(options: BuildProjectionOptions) -> None:
    """Map the student's vocabulary to the teacher's.

    The projection is a sparse matrix with a row for each student token and a column for each teacher token.

    Examples:
        xtk build-projection ./student ./teacher -o projection.safetensors
        xtk build-projection ./student ./teacher --method cooccurrence --corpus data.jsonl -o p.safetensors
    """
    from pathlib import Path

    from xtk.errors import XtkError
    from xtk.files.output import Output
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.projection.build import build_projection as build
    from xtk.projection.build import check_method_options, projection_header
    from xtk.projection.coverage_audit import audit_warning
    from xtk.projection.file import PROJECTION, write_projection
    from xtk.text.tokenizer import Tokenizer

    terminal.set_quiet(options.quiet)
    matching = _matching(options.special_tokens)
    names = ("max_tokens_per_entry", "decay", "reverse_pass", "smoothing")
    given = {name: getattr(options, name) for name in names}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None and value is not False}
    given_data = [name for name, value in (("corpus", options.corpus), ("columns", options.columns)) if value]
    check_method_options(options.method, [*chosen, *given_data] if options.method != "cooccurrence" else chosen)
    if options.method == "cooccurrence" and not options.corpus:
        raise XtkError(
            "--method cooccurrence needs --corpus",
            hint="add --corpus DATA: a file, a quoted glob, a hub dataset, or - for standard input",
        )
    path = Path(options.output)
    output = Output(path, PROJECTION, force=options.force, inputs=[*options.corpus, options.special_tokens])
    output.find_finished()

    def read_tokenizer(name: str) -> Tokenizer:
        folder, adapter = base_model_and_adapter(resolve_model_folder(name, with_weights=False), with_weights=False)
        return Tokenizer(folder, name=name, adapter=adapter)

    student, teacher = read_tokenizer(options.student), read_tokenizer(options.teacher)
    if options.method == "cooccurrence":
        from xtk.data.corpus_reader import Corpus, parse_columns_option

        data = Corpus(options.corpus, parse_columns_option(options.columns), options.max_document_bytes)
        projection = _counts_projection(student, teacher, data, chosen, matching, output)
    else:
        header = projection_header(student, teacher, options.method, matching, **chosen)
        projection = output.find_finished(header)
        if projection is None:
            projection = build(student, teacher, options.method, special_tokens=matching, **chosen)
            write_projection(projection, path)
    warned = audit_warning(projection.header.get("audit", {}))
    if warned:
        terminal.note(warned)
    terminal.result_artifact(
        {"path": options.output, "kind": "projection", **projection.summary()}, as_json=options.as_json
    )


def _matching(value: str) -> Any:
    """Return the parsed `--special-tokens`: role, none, or a dict of pairs from a file."""
    from pathlib import Path

    from xtk.errors import XtkError, path_exists
    from xtk.untrusted_json import parse_json

    if value in ("role", "none"):
        return value
    if not path_exists(value) or not Path(value).is_file():
        raise XtkError("--special-tokens is not role, none or an existing file", where=value,
                       hint="use role, none, or a JSON file {student token: teacher token}")  # fmt: skip
    text = Path(value).read_text(encoding="utf-8", errors="replace")
    pairs = parse_json(text, what="the file of --special-tokens", where=value, refuse_duplicate_keys=True)
    if not isinstance(pairs, dict) or not all(isinstance(token, str) for token in pairs.values()):
        raise XtkError(
            "the file of --special-tokens is not a mapping of student tokens to teacher tokens",
            where=value,
            hint='write pairs such as {"<|im_end|>": "</s>"}, the student token first',
        )
    return pairs


def _counts_projection(
    student: Tokenizer, teacher: Tokenizer, data: Any, chosen: dict[str, Any], matching: Any, output: Output[Any]
) -> Any:
    """Return the projection from co-occurrence counts: the finished one, or a new one."""
    import numpy as np

    from xtk.projection.build import build_projection as build
    from xtk.projection.build import projection_header
    from xtk.projection.corpus_cooccurrence_counts import corpus_fingerprint, count_corpus_cooccurrences
    from xtk.projection.file import write_projection
    from xtk.projection.methods.cooccurrence import CooccurrenceCounts, CooccurrenceMethod

    path, nothing = output.path, np.zeros(0, np.int32)
    CooccurrenceMethod(
        CooccurrenceCounts(nothing, nothing, np.zeros(0, np.int64)), **chosen
    )  # checks the options before counting
    if path.exists():
        empty_counts = CooccurrenceCounts(nothing, nothing, np.zeros(0, np.int64), *corpus_fingerprint(data))
        header = projection_header(student, teacher, "cooccurrence", matching, counts=empty_counts, **chosen)
        projection = output.find_finished(header)
        if projection is not None:
            return projection
    with Progress("build-projection", None, "documents") as progress:
        counts = count_corpus_cooccurrences(student, teacher, data, progress.advance)
    projection = build(student, teacher, "cooccurrence", special_tokens=matching, counts=counts, **chosen)
    write_projection(projection, path)
    return projection
