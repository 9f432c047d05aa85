"""What `xtk inspect` prints about paths that are not artifacts of xtk: data, GGUF models, folders with several."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from xtk.commands.path_kinds import DATA, FILES_OF_A_FOLDER, GGUF, PAGE, WEIGHT_SUFFIXES, path_kind
from xtk.errors import XtkError

ANSWERS_KIND, EXPORT_KIND = "answers of xtk query-teacher", "an exported teacher cache"


def describe_other_file(path: Path) -> dict[str, Any]:
    """Return the description of a file that is not an artifact: a GGUF model, data, or input of `cache import`."""
    from xtk.importers.cache_export import EXPORT
    from xtk.importers.service_answers import ANSWERS

    kind = path_kind(str(path))
    if kind == GGUF:
        return _describe_gguf(path)
    if path.suffix == ".jsonl" and ANSWERS.is_own(path):
        return _file_record(path, ANSWERS_KIND, {}, [f"cache import {shlex.quote(str(path))} -o CACHE"])
    if kind == DATA and EXPORT.is_own(path):
        return _file_record(path, EXPORT_KIND, {}, [f"cache import {shlex.quote(str(path))} -o CACHE"])
    if kind == DATA:
        return _describe_data(path)
    raise _other_file_error(path)


def _file_record(path: Path, kind: str, statistics: dict[str, Any], commands: list[str]) -> dict[str, Any]:
    figures = {"bytes": path.stat().st_size, **statistics, "commands": [f"xtk {command}" for command in commands]}
    return {"path": str(path), "kind": kind, "header": {}, "statistics": figures}


def _describe_gguf(path: Path) -> dict[str, Any]:
    from xtk.models.gguf_header import read_gguf_header

    header = read_gguf_header(path)
    parameters = sum(header.tensor_sizes.values())
    name = shlex.quote(str(path))
    record = _file_record(
        path,
        "gguf-model",
        {
            "parameters": parameters,
            "tensors": len(header.tensor_sizes),
            "bits_per_parameter": round(8 * path.stat().st_size / max(parameters, 1), 3),
        },
        [f"evaluate {name} DATA", f"cache-teacher {name} DATA -o CACHE", f"distill {name} CACHE -o RUN"],
    )
    record["header"] = {
        "architecture": header.architecture,
        "tokenizer": header.tokenizer,
        "pre_tokenizer": header.pre_tokenizer,
        "rope_scaling": header.rope_scaling,
    }
    return record


def _describe_data(path: Path) -> dict[str, Any]:
    """Return the description of a data file: the columns of its first record, and the commands that read it."""
    from xtk.data.corpus_reader import Corpus
    from xtk.data.record_to_document import CONTENT_FIELDS

    record, _ = next(iter(Corpus([str(path)]).records()))
    name = shlex.quote(str(path))
    has_content = any(all(field in record for field in fields) for fields in CONTENT_FIELDS.values())
    columns = "" if has_content else " --columns text=COLUMN"
    commands = [
        f"align STUDENT TEACHER {name} --stats{columns}",
        f"cache-teacher TEACHER {name}{columns} -o CACHE",
        f"distill STUDENT {name} --teacher TEACHER{columns} -o RUN",
        f"evaluate MODEL {name}{columns}",
        f"doctor STUDENT TEACHER {name}{columns}",
    ]
    return _file_record(path, "data", {"columns": list(record)}, commands)


def _other_file_error(path: Path) -> XtkError:
    """Return the error for a file of another kind."""
    if path.name in FILES_OF_A_FOLDER or path.suffix in WEIGHT_SUFFIXES:
        what = f"this file is {path_kind(str(path))}, which is inspected with its folder"
        return XtkError(what, where=str(path), hint=f"xtk inspect {shlex.quote(str(path.parent))}")
    return XtkError(
        "this file is not of a kind that xtk knows",
        where=str(path),
        hint="give a teacher cache, projection, rollout file, run, model or data file",
    )


def describe_folder(path: Path) -> dict[str, Any]:
    """Return what is inside of a folder that is not an artifact itself, such as the folder of a quickstart."""
    kinds = {child.name: path_kind(str(child)) for child in sorted(path.iterdir()) if not child.name.startswith(".")}
    is_quickstart = kinds.pop("quickstart.json", None) is not None
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    if not known:
        raise XtkError(
            "the folder is neither an artifact of xtk nor a model or tokenizer, and contains none",
            where=str(path),
            hint="give a teacher cache, projection, rollout file, run, model or tokenizer",
        )
    statistics = {
        "contents": known,
        "commands": [f"xtk inspect {shlex.quote(str(path / name))}" for name in known if known[name] != PAGE][:3],
    }
    kind = "quickstart" if is_quickstart else "folder"
    return {"path": str(path), "kind": kind, "header": {}, "statistics": statistics}
