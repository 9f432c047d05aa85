"""Run folders of `xtk distill`: recipe, checkpoints, and the manifest with sizes and checksums of all files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import xxhash

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json, parse_json_object, sha256, write_json
from xtk.files.json_validation import check_json
from xtk.files.output import OutputKind, fsync_folder
from xtk.files.run_names import CHECKPOINT, RECIPE_FILE, list_checkpoints
from xtk.files.safe_artifact_files import check_file_name, regular_file

RUN_MANIFEST, METRICS_FILE, CARD_FILE, ROLLOUTS_FILE = "xtk.json", "metrics.jsonl", "README.md", "rollouts.jsonl"
TRAINER_FOLDER, ADAPTER_FOLDER = "trainer", "adapter"
VERSION, RECIPE_KIND, RECIPE_VERSION = 4, "recipe", 3
RECIPE_KEYS = ("kind", "version", "identity")  # the rest of a recipe is options
EVALUATION_KEY = "evaluation"  # of the identity in a recipe: what the run is evaluated on, not a part of what it is
# Files that transformers, peft or vLLM read from a model folder by their names alone.
MODEL_FILE_NAMES = re.compile(
    r".+\.(safetensors|safetensors\.index\.json|bin|model|tiktoken|jinja|py)|(config|generation_config|adapter_config|"
    r"tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken|chat_template)\.json|merges\.txt"
)
_LISTED_FILE_NAMES = re.compile(r"(?!xtk\.json$).+\.(safetensors|json|jsonl|jinja|model|tiktoken|txt|py|md)")
_TRAINER_FILE_NAMES = re.compile(r"rank-[0-9]{5}-of-[0-9]{5}\.safetensors")
_SUBFOLDER_FILE_NAMES = {TRAINER_FOLDER: _TRAINER_FILE_NAMES, ADAPTER_FOLDER: _LISTED_FILE_NAMES}
_HASH_THREADS = 4
_CHANGED_FILE_HINT = "restore the original file from a copy; to edit a student, first copy it with xtk export"
_Count = Annotated[int, 0, 2**63 - 1]


# What is checked of `recipe.json` and `xtk.json`; other keys may have any JSON value.
class _Student(TypedDict):
    weights: str
    tokenizer: str
    adapter: NotRequired[str]


class _Inputs(TypedDict):
    student: _Student


class _Identity(TypedDict):
    losses: list[str]
    inputs: _Inputs
    max_steps: NotRequired[_Count]
    documents_per_step: NotRequired[_Count]
    student_model: NotRequired[dict[str, Any]]
    on_policy: NotRequired[dict[str, object]]


class _Recipe(TypedDict):
    identity: _Identity


class _FileEntry(TypedDict):
    bytes: _Count
    checksum: str


class _Best(TypedDict):
    step: _Count


class _Manifest(TypedDict):
    kind: str
    files: dict[str, _FileEntry]
    folders: dict[str, dict[str, _FileEntry]]
    step: NotRequired[_Count]
    steps: NotRequired[_Count]
    num_processes: NotRequired[_Count]
    run_fingerprint: NotRequired[str]
    parallel: NotRequired[str]
    best: NotRequired[_Best]
    recipe: NotRequired[_Identity]
    metrics: NotRequired[dict[str, float]]


class _StudentManifest(TypedDict):
    steps: _Count
    recipe: _Identity
    metrics: dict[str, float]


def run_and_step_of_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Return the run folder and the step of a checkpoint; None if a folder is not a checkpoint of a run."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100 (a link to a checkpoint is not a checkpoint)
    step = next((step for step, one in list_checkpoints(path.parent) if one == path), None)
    return (folder.parent, step) if step is not None and (path.parent / RECIPE_FILE).is_file() else None


# --- the recipe


def write_recipe(
    folder: Path,
    options: Mapping[str, Any],  # by their names in a configuration file
    identity: Mapping[str, Any],  # the values and fingerprints that identify a run; no paths
    # fingerprints of what the run is evaluated on, by option; they do not affect the student
    evaluation: Mapping[str, str] | None = None,
) -> None:
    """Write `recipe.json`: the options of a run in the form of `--config`, and the identity of the run."""
    stated = {**identity, EVALUATION_KEY: dict(evaluation or {})}
    write_json(folder / RECIPE_FILE, {**options, "kind": RECIPE_KIND, "version": RECIPE_VERSION, "identity": stated})


def read_evaluation(folder: Path) -> dict[str, str] | None:
    """Return the fingerprints of what a run is evaluated on, by option; None if its recipe does not state them."""
    identity = _read_json_object(folder / RECIPE_FILE).get("identity")
    recorded = identity.get(EVALUATION_KEY) if isinstance(identity, dict) else None
    return {str(key): str(value) for key, value in recorded.items()} if isinstance(recorded, dict) else None


def add_evaluation(folder: Path, evaluation: Mapping[str, str]) -> None:
    """Add fingerprints to those in the recipe of a run that is not finished."""
    stated = read_evaluation(folder)
    merged = {**(stated or {}), **evaluation}
    if merged != stated:
        content = _read_json_object(folder / RECIPE_FILE)
        write_json(folder / RECIPE_FILE, {**content, "identity": {**content["identity"], EVALUATION_KEY: merged}})


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the run identity in a recipe; `path`: of the run folder, or of the recipe."""
    file = path / RECIPE_FILE if path.is_dir() else path
    if not file.is_file():
        raise XtkError(
            "this is not a run of xtk distill: recipe.json is missing",
            where=str(path),
            hint="use the output folder of xtk distill",
        )
    return identity_in_recipe(_read_json_object(file), str(file))


def identity_in_recipe(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the run identity in the content of a recipe, also if it was written as YAML."""
    if not is_recipe(content):
        raise XtkError(
            "this recipe.json was not written by xtk distill",
            where=where,
            hint="use the recipe.json of a run folder",
        )
    if content.get("version") != RECIPE_VERSION:
        raise XtkError(
            f"this recipe of xtk distill has version {content.get('version', 'unknown')!s:.20}; this xtk reads version "
            f"{RECIPE_VERSION}",
            where=where,
            hint="train it again: xtk distill ... -o FOLDER --force",
        )
    identity: Any = content.get("identity")
    check_json({"identity": identity}, _Recipe, where, "restore the original file, or train again into another folder")
    return {key: value for key, value in identity.items() if key != EVALUATION_KEY}


def is_recipe(content: Mapping[str, Any]) -> bool:
    """Return whether the content of a file is a recipe of `xtk distill`, of any version."""
    return content.get("kind") == RECIPE_KIND


def run_fingerprint(identity: Mapping[str, Any]) -> str:
    """Return "sha256:..." of a run identity; equal runs have equal fingerprints."""
    return sha256(canonical_json(identity))


# --- the manifest


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and checksum of files directly inside a folder, by name; several threads read them."""
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        listed = sorted(names)
        return dict(zip(listed, threads.map(lambda name: _file_entry(folder, name), listed), strict=True))


def listed_file_names(folder: Path, kind: re.Pattern[str] = _LISTED_FILE_NAMES) -> list[str]:
    """Return the names of the files in a folder that belong into its manifest."""
    names = []
    for path in folder.iterdir():
        if path.is_file():
            try:
                names.append(check_file_name(path.name, [kind], where=""))
            except CorruptError:
                continue
    return names


def fsync_and_hash(folder: Path) -> dict[str, dict[str, Any]]:
    """Fsync a folder; return size and checksum of its files, which are hashed while the disk writes."""
    with ThreadPoolExecutor(1) as thread:
        entries = thread.submit(file_entries, folder, listed_file_names(folder))
        fsync_folder(folder)
        return entries.result()


def _file_entry(folder: Path, name: str) -> dict[str, Any]:
    with regular_file(folder, name).open("rb", buffering=0) as stream:
        algorithm: Any = xxhash.xxh3_64
        checksum = hashlib.file_digest(stream, algorithm).hexdigest()
        return {"bytes": stream.tell(), "checksum": f"xxh3:{checksum}"}


def write_run_manifest(
    folder: Path,
    content: Mapping[str, Any],  # `kind` and other fields
    files: Mapping[str, Mapping[str, Any]],  # size and checksum of each file in the folder, from `file_entries`
    folders: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Write `xtk.json`, the last file of a folder, and return its content; a folder without it is unfinished."""
    whole = {**content, "version": VERSION, "files": files, "folders": folders or {}}
    whole["checksum"] = sha256(canonical_json(whole))
    write_json(folder / RUN_MANIFEST, whole)
    return whole


def read_run_manifest(folder: Path, kinds: Collection[str] = ()) -> dict[str, Any]:
    """Return the content of `xtk.json` after checking its checksum and the types of all fields."""
    path = folder / RUN_MANIFEST
    try:
        content = _read_json_object(path)
    except FileNotFoundError:
        raise CorruptError(
            "this folder has no manifest: it is unfinished, or xtk did not write it",
            where=str(path),
            hint="use a finished checkpoint or model folder; to finish a run, run the same xtk distill command again",
        ) from None
    if content.get("version") != VERSION:
        raise XtkError(
            f"this {content.get('kind') or 'folder'!s:.40} has version {content.get('version', 'unknown')!s:.20}; "
            f"this xtk reads version {VERSION}",
            where=str(path),
            hint="make it again: xtk distill ... -o FOLDER --force (an export: xtk export RUN -o FOLDER --force)",
        )
    stated = {key: value for key, value in content.items() if key != "checksum"}
    if content.get("checksum") != sha256(canonical_json(stated)):
        raise CorruptError(
            "the manifest of this folder does not match its checksum", where=str(path), hint=_CHANGED_FILE_HINT
        )
    if not isinstance(content.get("kind"), str) or (kinds and content["kind"] not in kinds):
        raise CorruptError(
            f"this is the manifest of a {content.get('kind')!s:.40}, not of a {' or '.join(kinds) or 'run'}",
            where=str(path),
            hint=f"use the folder of a {' or '.join(kinds) or 'run'} of xtk distill",
        )
    check_json(content, _Manifest, str(path), _CHANGED_FILE_HINT)
    if content["kind"] == "student":
        check_json(content, _StudentManifest, str(path), _CHANGED_FILE_HINT)
    for name in content["folders"]:
        check_file_name(name, list(_SUBFOLDER_FILE_NAMES), where=str(path))
    for files, pattern in (
        (content["files"], _LISTED_FILE_NAMES),
        *((files, _SUBFOLDER_FILE_NAMES[name]) for name, files in content["folders"].items()),
    ):
        for name in files:
            check_file_name(name, [pattern], where=str(path))
    return content


def verify_files(
    folder: Path, content: Mapping[str, Any], *, excluded: Collection[str] = (), subset: tuple[int, int] = (0, 1)
) -> None:
    """Check that a folder contains exactly the files of its manifest, with the same sizes and checksums.

    Args:
        content: returned by `read_run_manifest`.
        excluded: names of files that are not checked.
        subset: (n, of): compare checksums only of every `of`-th file from the n-th, the largest files first.
    """
    listed = [(folder, name, entry) for name, entry in content["files"].items() if name not in excluded]
    for name, files in content["folders"].items():
        if (folder / name).is_symlink() or not (folder / name).is_dir():
            raise CorruptError(
                "this folder is listed in the manifest, but it is missing",
                where=str(folder / name),
                hint="restore this folder from a copy, or make the artifact again",
            )
        listed += [(folder / name, file, entry) for file, entry in files.items()]
    for place, name, entry in listed:
        _check_size(place, name, entry)
    for path in _unlisted_files(folder, content):
        raise CorruptError(
            "this file is not listed in the manifest of its folder, but would be loaded with it",
            where=str(path),
            hint="move it to another folder",
        )
    listed.sort(key=lambda one: (-one[2]["bytes"], str(one[0]), one[1]))
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        list(threads.map(lambda one: _check_checksum(*one), listed[subset[0] :: subset[1]]))


def check_listed_files(folder: Path, content: Mapping[str, Any]) -> None:
    """Check that the files of a manifest exist, and that weights have their sizes, without reading them."""
    for name, entry in content["files"].items():
        if name.endswith(".safetensors") or not (folder / name).is_file():
            _check_size(folder, name, entry)


def model_folder_kind(kind: str, name: str) -> OutputKind[dict[str, Any]]:
    """Return a kind of output: model folders with a manifest of this kind, which contains their request."""

    def is_own(folder: Path) -> bool:
        return (folder / RUN_MANIFEST).is_file() and _read_json_object(folder / RUN_MANIFEST).get("kind") == kind

    def finished(output: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        content = read_run_manifest(output, (kind,))
        previous = content.get("request") or {}
        if different := [key for key, value in request.items() if previous.get(key) != value]:
            raise XtkError(
                f"the output folder has {name} with other options or inputs",
                where=f"{output} (different: {', '.join(different)})",
                hint="use another -o, or --force to replace it",
            )
        check_listed_files(output, content)
        return content

    return OutputKind(name, is_own, finished, is_folder=True)


def _unlisted_files(folder: Path, content: Mapping[str, Any]) -> Iterator[Path]:
    """Yield files that would be loaded with a model or a trainer state but are not listed in the manifest."""
    places: Sequence[tuple[str, Mapping[str, Any]]] = [("", content["files"]), *content["folders"].items()]
    for name, files in places:
        for path in sorted((folder / name).iterdir()):
            read = name == TRAINER_FOLDER or MODEL_FILE_NAMES.fullmatch(path.name)
            if read and path.name not in files and not path.name.startswith("."):
                yield path
    if TRAINER_FOLDER not in content["folders"] and content["kind"] == CHECKPOINT:
        yield folder / TRAINER_FOLDER


def _check_size(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    try:
        size = regular_file(folder, name).stat().st_size
    except FileNotFoundError:
        raise CorruptError(
            "this file is listed in the manifest, but it is missing",
            where=str(folder / name),
            hint=_CHANGED_FILE_HINT,
        ) from None
    if size != entry["bytes"]:
        raise CorruptError(
            f"this file has {size:,} bytes, but must have {entry['bytes']:,} according to the manifest",
            where=str(folder / name),
            hint=_CHANGED_FILE_HINT,
        )


def _check_checksum(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    if _file_entry(folder, name) != {key: entry[key] for key in ("bytes", "checksum")}:
        raise CorruptError("this file does not match its checksum", where=str(folder / name), hint=_CHANGED_FILE_HINT)


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return parse_json_object(regular_file(path.parent, path.name).read_bytes(), str(path), _CHANGED_FILE_HINT)
