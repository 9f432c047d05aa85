"""Removal of runs and exports for `--force`: only files that xtk wrote are removed, all others are refused."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.errors import CorruptError
from xtk.files.atomic_files import TEMPORARY_PREFIX, has_same_content, next_free_path, read_json
from xtk.files.output_claims import foreign_files_error
from xtk.files.run_names import RECIPE_FILE
from xtk.files.write_locks import LOCK_PREFIX
from xtk.runs.folder import CARD_FILE, ROLLOUTS_FILE, RUN_MANIFEST

MAX_MANIFEST_BYTES = 1 << 24
_CARD_BEGINNING = 96  # bytes: up to the tag xtk
# Files that xtk, transformers and peft write into a model folder.
_MODEL_FILE_NAMES = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken)"
    r"\.json|(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|model\.gguf|merges\.txt"
    r"|chat_template\.jinja|(tokenizer|spiece|sentencepiece\.bpe)\.model|[\w.-]+\.tiktoken|xtk\.json|README\.md"
)
_RUN_FILE_NAMES = re.compile(r"recipe\.json|metrics\.jsonl")
_TRAINER_FILE_NAMES = re.compile(r"(trainer|rank)-\d{5}-of-\d{5}\.safetensors")
_MODEL_CODE_NAMES = re.compile(r"(configuration|modeling|tokenization)_\w+\.py")
# Of subfolders, if no manifest lists their files.
_SUBFOLDER_FILE_NAMES = {
    "trainer": _TRAINER_FILE_NAMES,
    "adapter": re.compile(r"adapter_config\.json|adapter_model(-\d{5}-of-\d{5})?\.safetensors"),
}
_STEP_FOLDER_NAMES = re.compile(r"(checkpoint|best)-[1-9]\d*|best-0")
ROLLOUT_BATCHES, _TRACKERS = "rollout_batches", "trackers"
COMPARISON_FILE = "comparison.json"
SCORE_FILE_NAMES = re.compile(r"scores-(\d{5})-(\d{5})\.arrow")
ROLLOUT_FILE_NAMES = re.compile(r"rollouts-(\d{5})-of-(\d{5})\.jsonl")
# `name` holds the name of the run; the others are what TensorBoard (through Accelerate), Weights & Biases and Trackio
# write below the folder of trackers.
_OF_TRACKERS = re.compile(r"(.*/)?(events\.out\.tfevents[^/]*|hparams\.yml)|name|(.*/)?(wandb|trackio)/.*")


def refuse_foreign_files_in_run(folder: Path, *, is_export: bool = False) -> None:
    """Refuse the folder of a run or an export that contains files which xtk did not write.

    Args:
        is_export: only the files of a model are allowed, none of a run.
    """
    if foreign := _foreign_files(folder, run=not is_export):
        raise foreign_files_error(foreign, str(folder))


def remove_run(folder: Path) -> None:
    """Remove the folder of a run; the recipe, which identifies a run, is removed last."""
    refuse_foreign_files_in_run(folder)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RECIPE_FILE):
        if path.name.startswith(LOCK_PREFIX):  # the process that holds the lock removes it
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_run_subfolder(folder: Path) -> None:
    """Remove a checkpoint or best weights of a run; a folder with other files is renamed instead.

    Checkpoints and best weights of xtk have a manifest, since they get their final name only when they are complete.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    foreign = _foreign_files(folder, run=False)
    if not foreign and (folder / RUN_MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        return
    _keep(folder, f"contains files that xtk did not write ({', '.join(foreign[:3])})" if foreign else "has no manifest")


def replace_run_subfolder(new: Path, final: Path) -> None:
    """Rename a folder of the student, such as its adapter, to its final path in an unfinished run.

    A folder there is removed if it has the same content, as after a kill at this point, and renamed otherwise.
    """
    if final.is_symlink() or final.exists():
        same = final.is_dir() and not final.is_symlink() and _has_same_files(new, final)
        if same:
            shutil.rmtree(final)
        else:
            _keep(final, "was not written by this run")
    new.replace(final)


def _has_same_files(one: Path, other: Path) -> bool:
    names = [{path.relative_to(folder).as_posix() for path in folder.rglob("*")} for folder in (one, other)]
    files = [name for name in names[0] if (one / name).is_file()]
    return names[0] == names[1] and all(has_same_content(one / name, other / name) for name in files)


def remove_rollout_batch(folder: Path) -> None:
    """Remove the stored rollouts of a batch; a folder with other files is renamed instead."""
    if not folder.is_dir() or folder.is_symlink():
        return
    foreign = [file for file in _foreign_batch_files(folder.parent) if file.startswith(f"{folder.name}/")]
    if foreign:
        _keep(folder, f"contains files that xtk did not write ({', '.join(foreign[:3])})")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _foreign_batch_files(folder: Path) -> list[str]:
    """Return the relative paths of files that xtk did not write, in the folder of all rollout batches of a run."""
    foreign = []
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if path.is_dir() and not path.is_symlink():
            continue
        is_own = (
            not path.is_symlink()
            and all(name.isdecimal() for name in names[:-1])
            and len(names) == 2
            and bool(
                names[1] == COMPARISON_FILE
                or ROLLOUT_FILE_NAMES.fullmatch(names[1])
                or SCORE_FILE_NAMES.fullmatch(names[1])
            )
        )
        if not is_own and not names[-1].startswith(TEMPORARY_PREFIX):
            foreign.append("/".join(names))
    return foreign


def _keep(path: Path, what: str) -> None:
    kept = next_free_path(path, ".kept-")
    path.replace(kept)
    terminal.note(f"{path} {what}; kept as {kept.name}")


def keep_file_of_user(path: Path, new: Path) -> None:
    """Rename a file of the user at a path where a run is about to write a file of the student.

    Files of an earlier run that was killed meanwhile are equal to the new ones and are not renamed; for a model card,
    which contains times, only the beginning is compared.

    Args:
        path: output path; usually there is no file.
        new: the new file of the student.
    """
    if not path.exists() and not path.is_symlink():
        return
    if has_same_content(new, path):
        return
    if new.name == CARD_FILE and path.is_file() and not path.is_symlink():
        with path.open("rb") as there, new.open("rb") as here:
            if there.read(_CARD_BEGINNING) == here.read(_CARD_BEGINNING):
                return
    _keep(path, "was not written by xtk")


def keep_manifest_of_user(path: Path) -> None:
    """Rename a file at the path of the manifest that an unfinished run is about to write."""
    if path.exists() or path.is_symlink():
        _keep(path, "was not written by xtk")


def _foreign_files(folder: Path, *, run: bool, prefix: str = "") -> list[str]:
    """Return the relative paths in a folder of files that xtk did not write."""
    listed, subfolders = (_read_value(folder / RUN_MANIFEST, key) for key in ("files", "folders"))
    listed, subfolders = (one if isinstance(one, dict) else None for one in (listed, subfolders))
    code = str(_read_value(folder / "config.json", "auto_map"))
    on_policy = run and _read_value(folder / RECIPE_FILE, "on_policy") is True
    foreign = []
    for path in sorted(folder.iterdir()):
        name, is_folder = path.name, path.is_dir() and not path.is_symlink()
        if name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)):
            continue
        if is_folder and run and _STEP_FOLDER_NAMES.fullmatch(name):
            is_complete = (path / RUN_MANIFEST).is_file()  # xtk's have a manifest
            files = _foreign_files(path, run=False) if is_complete else sorted(entry.name for entry in path.iterdir())
            foreign += [f"{prefix}{name}/{file}" for file in files] or ([] if is_complete else [f"{prefix}{name}"])
        elif is_folder and name in _SUBFOLDER_FILE_NAMES:
            own = None if subfolders is None else set(subfolders.get(name) or ())
            files = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
            foreign += [
                f"{prefix}{name}/{file}"
                for file in files
                if (path / file).is_symlink()
                or not (_SUBFOLDER_FILE_NAMES[name].fullmatch(file) if own is None else file in own)
            ]
        elif is_folder and run and name == _TRACKERS:
            files = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
            foreign += [f"{prefix}{name}/{file}" for file in files if not _OF_TRACKERS.fullmatch(file)]
        elif on_policy and name == ROLLOUT_BATCHES and is_folder:
            foreign += [f"{prefix}{name}/{file}" for file in _foreign_batch_files(path)]
        elif on_policy and name == ROLLOUTS_FILE and not is_folder:
            continue
        elif (
            is_folder
            or path.is_symlink()
            or not _is_xtk_file(name, listed, code, run=run)
            or (name == RUN_MANIFEST and not _looks_like_manifest(path))
        ):
            foreign.append(prefix + name)
    return foreign


def _is_xtk_file(name: str, listed: dict[str, Any] | None, code: str, *, run: bool) -> bool:
    if name == RUN_MANIFEST or (run and _RUN_FILE_NAMES.fullmatch(name)) or _TRAINER_FILE_NAMES.fullmatch(name):
        return True
    if listed is not None:
        return name in listed or name == CARD_FILE
    return bool(_MODEL_FILE_NAMES.fullmatch(name)) or (
        bool(_MODEL_CODE_NAMES.fullmatch(name)) and Path(name).stem in code
    )


def _looks_like_manifest(path: Path) -> bool:
    """Return whether a file has keys of `xtk.json`, also of a corrupt one."""
    with path.open("rb") as stream:
        content = stream.read(MAX_MANIFEST_BYTES)
    return b'"checksum"' in content or b'"files"' in content


def _read_value(path: Path, key: str) -> Any:
    """Return the value of a key in a JSON file; None if there is no such file or key."""
    with contextlib.suppress(OSError, CorruptError):
        return read_json(path).get(key)
    return None
