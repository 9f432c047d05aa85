"""`xtk import-cache`: a teacher cache from log-probabilities in files."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.commands.cache_teacher import CacheTeacherOptions
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, redeclared
from xtk.options.shared import MAX_ROW_BYTES, ConfigOption, ForceOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class ImportCacheOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk import-cache`."""

    data: tuple[str, ...] = argument(
        REQUIRED, "Files with answers of services, or token ids, and their log-probabilities.", metavar="FILE..."
    )
    output: str = redeclared(CacheTeacherOptions, "output")
    tokenizer: str = option(
        "",
        "Teacher's tokenizer: a folder or hub id. Without it, tokens of answers are known by their bytes.",
        metavar="FOLDER",
    )
    name: str = option("", "Teacher's name in metrics. Default: that of the model in the answers, or of the tokenizer.")
    precision: str = redeclared(CacheTeacherOptions, "precision")
    max_document_bytes: int = option(
        MAX_ROW_BYTES, "Maximum size of a row in bytes, as stored in its file; a larger row is an error.", min=1
    )
    skip_invalid: bool = option(False, "Skip invalid rows and print their number, instead of ending with an error.")


def import_cache(options: ImportCacheOptions) -> None:
    """Write a teacher cache from log-probabilities in files.

    A row is a chat or text completion of an OpenAI-compatible service with its request, or has the columns token_ids,
    logprobs, top_ids and top_logprobs.

    Examples:
        xtk import-cache answers.jsonl -o cache
        xtk import-cache logprobs.parquet --tokenizer Qwen/Qwen3-8B -o cache
    """
    from xtk.importers.cache_import import import_cache as import_files

    terminal.set_quiet(options.quiet)
    cache, num_skipped = import_files(
        [terminal.path_argument(path) if path == "-" else path for path in options.data],
        options.output,
        tokenizer=options.tokenizer,
        name=options.name,
        precision=options.precision,
        skip_invalid=options.skip_invalid,
        force=options.force,
        max_document_bytes=options.max_document_bytes,
    )
    if num_skipped:
        terminal.note(f"import-cache: {num_skipped:,} invalid rows were skipped")
    figures = {"documents": len(cache), "invalid_rows": num_skipped}
    terminal.result_artifact({"path": options.output, "kind": "teacher-cache", **figures}, as_json=options.as_json)
