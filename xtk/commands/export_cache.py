"""`xtk export-cache`: a teacher cache as a file for other tools."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option
from xtk.options.shared import ConfigOption, ForceOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class ExportCacheOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk export-cache`."""

    cache: str = argument(REQUIRED, "Teacher cache; - reads its path from standard input.", metavar="CACHE")
    output: str = option(REQUIRED, "Output file.", flags=("--output", "-o"), metavar="FILE")
    format: str = option("parquet", "Format of the file.", choices=("parquet", "jsonl"))


def export_cache(options: ExportCacheOptions) -> None:
    """Write a teacher cache as a file for other tools.

    A row is a document with token ids and log-probabilities, which import-cache reads. Sampled tokens are left out.

    Examples:
        xtk export-cache cache -o cache.parquet
        xtk export-cache cache --format jsonl -o cache.jsonl
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
