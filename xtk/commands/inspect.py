"""`xtk inspect`: header, statistics and checksums of an artifact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xtk import terminal
from xtk.commands.inspect_printing import print_description
from xtk.commands.projection_rows import print_projection_rows
from xtk.errors import XtkError
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option
from xtk.options.shared import ConfigOption, ForceOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk inspect`."""

    artifacts: tuple[str, ...] = argument(
        REQUIRED,
        "Projections, caches, shards, rollouts, runs, models or tokenizers; - for standard input.",
        metavar="ARTIFACT...",
    )
    token: tuple[str, ...] = option(
        (),
        "Print a student token's row of a projection. Give PROJECTION STUDENT TEACHER to see the tokens' text. "
        "Repeatable.",
        metavar="ID|text:TEXT",
    )
    verify: bool = option(
        False, "Read all data: verify the checksums of projections and caches, and the weights of models."
    )
    html: str = option("", "Also write an HTML page about a cache: charts and its first documents.", metavar="FILE")


def inspect(options: InspectOptions) -> None:
    """Print the header and statistics of an artifact.

    Examples:
        xtk inspect cache --verify
        xtk inspect projection.safetensors ./student ./teacher --token 1465
    """
    terminal.set_quiet(options.quiet)
    paths = [path for given in options.artifacts for path in terminal.path_arguments(given)]
    if options.html and len(paths) > 1:
        raise typer.BadParameter("--html takes one teacher cache; run xtk inspect once for each cache")
    if options.token:
        print_projection_rows(paths, options.token, as_json=options.as_json)
        return
    for number, path in enumerate(paths):
        record = _describe(path, options)
        if options.as_json:
            terminal.result_json(record)
        else:
            if number:
                terminal.result_line("")
            print_description(record)


def _describe(place: str, options: InspectOptions) -> dict[str, Any]:
    """Return path, kind, header and statistics of the artifact at a path."""
    from xtk.errors import path_exists
    from xtk.files.storage_folders import is_remote

    if is_remote(place):
        return _describe_cache(place, options)
    path = Path(place)
    if not path_exists(place):
        raise XtkError(
            "the path to inspect does not exist", where=place, hint="give the path of an artifact that xtk wrote"
        )
    is_cache = path.is_dir() and ((path / "manifest.json").is_file() or any(path.glob("shard-*.arrow")))
    if is_cache:
        return _describe_cache(place, options)
    if options.html:
        raise XtkError(
            "--html needs a teacher cache, but this path is not one",
            where=place,
            hint="remove --html, or give the folder of a teacher cache",
        )
    if path.is_file():
        return _describe_file(path)
    if (path / "recipe.json").is_file() or (path / "xtk.json").is_file():
        return _describe_run(path, verify=options.verify)
    if any((path / name).is_file() for name in ("config.json", "tokenizer.json", "tokenizer.model", "tekken.json")):
        return _describe_model(path, verify=options.verify)
    raise _unknown_kind("folder", path)


def _unknown_kind(noun: str, path: Path) -> XtkError:
    return XtkError(
        f"this {noun} is not of a kind that xtk inspects",
        where=str(path),
        hint="give a teacher cache, projection, rollout file, run, model or tokenizer; "
        "instead of a file inside, its folder",
    )


def _describe_file(path: Path) -> dict[str, Any]:
    """Return the description of a file, which its name and its first bytes identify."""
    from xtk.cache.manifest import SHARD_NAME, VOCABULARY_ORDER_NAME
    from xtk.cache.shard_writing import has_shard_checksum
    from xtk.projection.file import HEADER_PREFIX, has_projection_metadata
    from xtk.rollouts.rollout_jsonl import read_request_fingerprint

    with path.open("rb") as stream:
        start = stream.read(8 + len(HEADER_PREFIX))
    if VOCABULARY_ORDER_NAME.fullmatch(path.name):
        return _describe_vocabulary_order(path)
    if SHARD_NAME.fullmatch(path.name) or (start.startswith(b"ARROW1") and has_shard_checksum(path)):
        return _describe_shard(path)
    if path.suffix == ".jsonl" and read_request_fingerprint(path) is not None:
        return _describe_rollouts(path)
    is_truncated = len(start) > 8 and HEADER_PREFIX.startswith(start[8:])
    if is_truncated or has_projection_metadata(path):
        return _describe_projection(path)
    raise _unknown_kind("file", path)


def _describe_vocabulary_order(path: Path) -> dict[str, Any]:
    from xtk.cache.token_ids_by_frequency import VocabularyOrder

    content = path.read_bytes()
    order = VocabularyOrder.from_file_content(path.name, content, str(path))
    statistics = {"tokens": len(order.ids_by_frequency), "bytes": len(content), "verified": True}
    return {"path": str(path), "kind": "teacher-cache-vocabulary-order", "header": {}, "statistics": statistics}


def _describe_projection(path: Path) -> dict[str, Any]:
    import numpy as np

    from xtk.projection.file import read_projection

    projection = read_projection(path)
    sizes = np.diff(projection.row_offsets)
    statistics = {
        **projection.summary(),
        "bytes": path.stat().st_size,
        "rows_by_entries": {str(size): int(count) for size, count in enumerate(np.bincount(sizes)) if count},
        "widest_column": int(np.bincount(projection.teacher_ids, minlength=1).max()),
    }
    return {"path": str(path), "kind": "projection", "header": dict(projection.header), "statistics": statistics}


def _describe_cache(place: str, options: InspectOptions) -> dict[str, Any]:
    from xtk.cache import statistics as cache_statistics
    from xtk.cache.reader import TeacherCache, check_unfinished_cache
    from xtk.files.storage_folders import open_folder

    if options.verify:
        check_unfinished_cache(open_folder(place))
    cache = TeacherCache(place)
    if options.verify:
        cache.verify()
        cache.teacher_tokenizer  # noqa: B018 (its fingerprint is compared)
    page_request = ""
    if options.html:
        from xtk.files.atomic_files import canonical_json, sha256
        from xtk.files.output import Output
        from xtk.pages.html_page import PAGE

        page_request = sha256(canonical_json([str(place), cache.manifest["checksum"]]))
        Output(Path(options.html), PAGE, force=options.force, inputs=[place]).find_finished(page_request)
    positions = cache_statistics.sample_positions(cache)
    documents = len(cache_statistics.evenly_spaced_indices(cache, cache_statistics.SAMPLE_DOCUMENTS))
    statistics = {**cache_statistics.summarize_cache(cache, positions, documents), "verified": options.verify or None}
    record = {"path": place, "kind": "teacher-cache", "header": cache.header, "statistics": statistics}
    if options.html:
        from xtk.pages.html_page import write_page
        from xtk.pages.teacher_cache_html import cache_page

        write_page(Path(options.html), cache_page(record, cache, positions, page_request))
    return record


def _describe_rollouts(path: Path) -> dict[str, Any]:
    """Return the description of a file of rollouts, after verifying the checksum of every line."""
    from xtk.rollouts.rollout_jsonl import read_request_fingerprint, read_statistics

    request = read_request_fingerprint(path)
    summary = read_statistics(path)
    statistics = {**summary.summary(), "bytes": path.stat().st_size, "verified": True}
    statistics["has_all_lines"] = summary.has_all_lines
    return {"path": str(path), "kind": "rollouts", "header": {"request": request}, "statistics": statistics}


def _describe_shard(path: Path) -> dict[str, Any]:
    from xtk.cache.reader import read_shard_counts

    header, statistics = read_shard_counts(path)
    return {"path": str(path), "kind": "teacher-cache-shard", "header": header, "statistics": statistics}


def _describe_run(path: Path, *, verify: bool) -> dict[str, Any]:
    from xtk.files.run_names import RECIPE_FILE
    from xtk.runs.folder import RUN_MANIFEST, read_recipe, read_run_manifest
    from xtk.runs.folder import verify_files as compare

    finished = (path / RUN_MANIFEST).is_file()
    content: dict[str, Any] = read_run_manifest(path) if finished else {"kind": "unfinished student"}
    if verify and not finished:
        raise XtkError(
            "--verify needs a finished run", where=str(path), hint="run the same xtk distill command again to finish it"
        )
    recipe = content.get("recipe") or (read_recipe(path) if (path / RECIPE_FILE).is_file() else {})
    recipe = recipe or content.get("request", {})  # of a transplanted model
    steps = content.get("steps", content.get("step"))
    statistics: dict[str, Any] = {"steps": steps, "metrics": content.get("metrics", {})}
    if verify:
        compare(path, content)
        count = len(content["files"]) + sum(len(files) for files in content["folders"].values())
        statistics |= {**_weights(path), "files_verified": count}
    return {"path": str(path), "kind": content["kind"], "header": recipe, "statistics": statistics}


def _weights(path: Path) -> dict[str, Any]:
    from xtk.models.safetensors_headers import read_weight_headers

    return {"parameters": sum(math.prod(shape) for _, shape in read_weight_headers(path).values())}


def _check_weights(path: Path) -> None:
    """Read all weights of a model, and refuse values that are not finite."""
    from safetensors import safe_open

    from xtk.errors import CorruptError
    from xtk.models.safetensors_headers import weight_files

    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                weight = tensors.get_tensor(name)
                if weight.is_floating_point() and not bool(weight.float().isfinite().all()):
                    raise CorruptError(
                        f"the weight {name} has values that are not finite",
                        where=str(file),
                        hint="get this file again; its training may have diverged",
                    )


def _describe_model(path: Path, *, verify: bool) -> dict[str, Any]:
    from xtk.projection.build import tokenizer_identity
    from xtk.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(path)
    has_weights = any(path.glob("*.safetensors"))
    statistics = {
        "family": tokenizer.vocabulary.alphabet,
        "special_tokens": len(tokenizer.vocabulary.special_tokens),
        "mean_token_bytes": round(float(tokenizer.vocabulary.byte_lengths.mean()), 3),
    } | (_weights(path) if has_weights else {})
    if has_weights:
        if verify:
            _check_weights(path)
        statistics["verified"] = True if verify else None
    return {
        "path": str(path),
        "kind": "model" if has_weights else "tokenizer",
        "header": {**tokenizer_identity(tokenizer), "template": tokenizer.template_fingerprint},
        "statistics": statistics,
    }
