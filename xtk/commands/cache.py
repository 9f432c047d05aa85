"""`xtk cache`: caches from other caches, from files, as a file for other tools, and compared with their teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.commands.cache_teacher import CacheTeacherOptions, print_cache
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option, redeclared
from xtk.options.shared import MAX_ROW_BYTES, ConfigOption, ForceOption, JsonOption, QuietOption, TrustRemoteCodeOption

if TYPE_CHECKING:
    from xtk.cache.reader import TeacherCache


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
    output: str = output_option("Output file.", "FILE")
    format: str = option("parquet", "Format of the file.", choices=("parquet", "jsonl"))


def export_cache(options: ExportCacheOptions) -> None:
    """Write a teacher cache as a file for other tools.

    A row is a document with token ids and log-probabilities, which cache import reads. Sampled tokens are left out.

    Examples:
        xtk cache export cache -o cache.parquet
        xtk cache export cache --format jsonl -o cache.jsonl
    """
    from pathlib import Path

    from xtk.cache.reader import TeacherCache
    from xtk.importers.cache_export import export_cache as export

    terminal.set_quiet(options.quiet)
    cache = TeacherCache(terminal.path_argument(options.cache))
    documents = export(cache, Path(options.output), options.format, force=options.force)
    terminal.result_artifact(
        {"path": options.output, "kind": "exported-cache", "documents": documents}, as_json=options.as_json
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(TrustRemoteCodeOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk cache verify`."""

    cache: str = argument(REQUIRED, "Teacher cache; - reads its path from standard input.", metavar="CACHE")
    teacher: str = argument(
        "", "Teacher model of the cache: some documents are scored again.", metavar="[TEACHER]", show_default=False
    )
    sample: int = option(8, "Number of documents that TEACHER scores again.", min=1)


def verify(options: VerifyOptions) -> None:
    """Verify the checksums of a teacher cache, and compare it with its teacher.

    Log-probabilities that differ from those of the teacher by more than the precision of the cache are an error.

    Examples:
        xtk cache verify cache
        xtk cache verify cache ./teacher --sample 16
    """
    terminal.set_quiet(options.quiet)
    place = terminal.path_argument(options.cache)
    cache = open_verified(place)
    record: dict[str, Any] = {"path": place, "kind": "teacher-cache", "documents": len(cache), "verified": True}
    if options.teacher:
        from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
        from xtk.teachers.cache_rescoring import verify_cache

        folder, adapter = base_model_and_adapter(resolve_model_folder(options.teacher, with_weights=True))
        teacher = ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code, name=options.teacher)
        figures = verify_cache(cache, teacher, documents=options.sample)
        record["scored_again"] = figures
        terminal.note(
            f"cache verify: {figures['documents']:,} documents were scored again: log-probabilities differ by at most "
            f"{figures['largest_logprob_difference']:g} nats, and {figures['allowed_logprob_difference']:.3g} is "
            f"allowed; quantization adds {figures['quantization_kl_nats']:g} nats to KL(teacher || student)"
        )
    else:
        terminal.note("cache verify: all checksums match; give TEACHER to score documents again")
    terminal.result_artifact(record, as_json=options.as_json)


def open_verified(place: str) -> TeacherCache:
    """Return a cache whose files all match their checksums; of an unfinished one, check the shards first."""
    from xtk.cache.reader import TeacherCache, check_unfinished_cache
    from xtk.files.storage_folders import open_folder

    check_unfinished_cache(open_folder(place))
    cache = TeacherCache(place)
    cache.verify()
    cache.teacher_tokenizer  # noqa: B018 (its fingerprint is compared)
    return cache
