"""`xtk cache`: caches from other caches, from files, and as a file for other tools."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from xtk import terminal
from xtk.commands.cache_teacher import CacheTeacherOptions, print_cache
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option, redeclared
from xtk.options.shared import MAX_ROW_BYTES, ConfigOption, ForceOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class MergeOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk cache merge`."""

    caches: tuple[str, ...] = argument(
        REQUIRED,
        "Finished caches of one teacher and with one --support; - reads paths from standard input.",
        metavar="CACHE...",
    )
    output: str = redeclared(CacheTeacherOptions, "output")
    rows: str = option(
        "", "Range of documents to keep, counted over all caches, such as 100:200.", metavar="START:STOP"
    )


def merge(options: MergeOptions) -> None:
    """Merge teacher caches into one, in the given order.

    Nothing is scored again.

    Examples:
        xtk cache merge cache-1 cache-2 -o cache
        xtk cache merge cache --rows 0:1000 -o first
    """
    from xtk.cache.merging import merge_caches

    terminal.set_quiet(options.quiet)
    if options.caches.count("-") > 1:
        raise typer.BadParameter("only one argument can be read from standard input (-)")
    places = [place for given in options.caches for place in terminal.path_arguments(given)]
    figures = merge_caches(places, options.output, rows=options.rows, force=options.force)
    print_cache(options.output, figures, as_json=options.as_json)


@dataclass(frozen=True, kw_only=True)
class ImportCacheOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk cache import`."""

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
        xtk cache import answers.jsonl -o cache
        xtk cache import logprobs.parquet --tokenizer Qwen/Qwen3-8B -o cache
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
        terminal.note(f"cache import: {num_skipped:,} invalid rows were skipped")
    figures = {"documents": len(cache), "invalid_rows": num_skipped}
    terminal.result_artifact({"path": options.output, "kind": "teacher-cache", **figures}, as_json=options.as_json)


@dataclass(frozen=True, kw_only=True)
class ExportCacheOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk cache export`."""

    cache: str = argument(REQUIRED, "Teacher cache; - reads its path from standard input.", metavar="CACHE")
    output: str = output_option("Output file, in Parquet.", "FILE")


def export_cache(options: ExportCacheOptions) -> None:
    """Write a teacher cache as a Parquet file for other tools.

    A row is a document with token ids and log-probabilities, which cache import reads. Sampled tokens are left out.

    Examples:
        xtk cache export cache -o cache.parquet
        xtk cache export s3://bucket/cache -o cache.parquet
    """
    from pathlib import Path

    from xtk.cache.reader import TeacherCache
    from xtk.importers.cache_export import export_cache as export

    terminal.set_quiet(options.quiet)
    cache = TeacherCache(terminal.path_argument(options.cache))
    documents = export(cache, Path(options.output), force=options.force)
    terminal.result_artifact(
        {"path": options.output, "kind": "exported-cache", "documents": documents}, as_json=options.as_json
    )
