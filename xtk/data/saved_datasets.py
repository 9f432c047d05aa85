"""Folders of `datasets.save_to_disk`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from xtk.data.text_streams import decode_utf8
from xtk.errors import XtkError
from xtk.files.safe_artifact_files import check_file_name, regular_file
from xtk.name_registry import nearest_name
from xtk.untrusted_json import parse_json

DEFAULT_SPLIT = "train"  # of a dataset with several splits
_STATE_FILE, _SPLITS_FILE = "state.json", "dataset_dict.json"  # of `datasets.save_to_disk`
_ARROW_FILE = re.compile(r"[\w.-]+\.arrow")


def saved_dataset_files(
    folder: Path,  # written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`
    split: str,  # split of a DatasetDict; "": `train`, or the only one
) -> list[Path] | None:
    """Return the files of a folder of `datasets.save_to_disk`, in order; None for any other folder."""
    if (folder / _SPLITS_FILE).is_file():
        splits = _read_json_file(folder, _SPLITS_FILE).get("splits")
        names = splits if isinstance(splits, list) and all(isinstance(name, str) for name in splits) else []
        chosen = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in names else names[0] if len(names) == 1 else "")
        if chosen not in names:
            near = nearest_name(chosen, names)
            raise XtkError(
                f"this saved dataset has no split {chosen or DEFAULT_SPLIT!r}"
                + (f"; did you mean {near}?" if near else ""),
                where=str(folder),
                hint=f"use {folder}:SPLIT, with one of the splits {', '.join(names)}",
            )
        return saved_dataset_files(
            folder / check_file_name(chosen, [re.compile(r"[\w.-]+")], where=str(folder / _SPLITS_FILE)), ""
        )
    if not (folder / _STATE_FILE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    if split:
        raise XtkError(
            f"this dataset was saved without splits, so that {split!r} cannot be selected",
            where=str(folder),
            hint=f"remove :{split} and use {folder}",
        )
    state = _read_json_file(folder, _STATE_FILE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise XtkError(
            "this dataset was saved with an indices mapping (from select, filter or shuffle), which is not supported",
            where=str(folder), hint="save it again: dataset.flatten_indices().save_to_disk(...)",
        )  # fmt: skip
    listed = state.get("_data_files")
    files = [entry.get("filename") if isinstance(entry, dict) else entry for entry in listed if entry] if listed else []
    return [folder / check_file_name(file, [_ARROW_FILE], where=str(folder / _STATE_FILE)) for file in files]


def _read_json_file(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    content = parse_json(decode_utf8(regular_file(folder, name).read_bytes(), 0, where), what="this file", where=where)
    return content if isinstance(content, dict) else {}
