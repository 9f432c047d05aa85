"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path

from xtk.artifacts.atomic_files import read_json
from xtk.artifacts.run_folders import RECIPE_FILE, list_checkpoints
from xtk.errors import CorruptError, XtkError, path_exists
from xtk.tokens.model_config import read_model_config

ADAPTER_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"^(hf://)?[\w.-]+/[\w.-]+(@[\w./-]+)?$")
_TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "chat_template*", "config.json", "*.model", "vocab.*",
                    "tekken.json", "*.tiktoken"]  # fmt: skip
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "generation_config.json", "*.py",
                ADAPTER_CONFIG]  # fmt: skip
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 16, 64
HUB_TIMEOUT_SECONDS = 8.0


def resolve_model_folder(source: str, *, with_weights: bool) -> Path:
    """Return the folder of a model: a local one as it is, a hub id (`owner/name`, `@revision`) after download.

    Args:
        source: a folder, `owner/name`, `owner/name@revision` or `hf://owner/name`.
        with_weights: also the weights, else the tokenizer and configuration alone.

    Raises:
        XtkError: there is neither such a folder nor such an id, or a run that is not finished.
    """
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # there is no such user
        path = Path(source)
    if path_exists(str(path)):
        if path.is_dir():
            _check_run_finished(path)
            return path
        raise XtkError("a model is a folder, and this is a file", where=source)
    if not _HUB_ID.match(source) or source.startswith(("./", "../", "/")):
        raise XtkError(
            "there is no such model folder", where=source, hint="a local folder, or a hub id such as owner/name"
        )
    from huggingface_hub import snapshot_download

    name, _, revision = source.removeprefix("hf://").partition("@")
    patterns = _MODEL_FILES if with_weights else _TOKENIZER_FILES
    unreachable = _hub_error(name, "model")
    try:
        # Without network a copy that was downloaded before is as good.
        local = unreachable is not None
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns, local_files_only=local))
    except Exception as wrong:  # the hub's client has dozens of errors, all of which mean the same here
        reason = unreachable or next(iter(str(wrong).splitlines()), type(wrong).__name__)
        raise XtkError(
            f"there is no such folder, and the hub does not give it: {reason}",
            where=source,
            hint="check the spelling, the network, and whether the model asks for an account (hf auth login)",
        ) from None


def check_dataset_reachable(dataset: str) -> None:
    """Refuse a dataset of the hub (`owner/name`) that cannot be reached, after SECONDS_TO_ANSWER at most.

    Raises:
        XtkError: the hub does not answer, or has no such dataset for this user.
    """
    reason = _hub_error(dataset, "dataset")
    if reason is not None:
        raise XtkError(
            f"there is no such file or folder, and the hub does not give it: {reason}",
            where=dataset,
            hint="check the spelling, the network, HF_ENDPOINT, and whether it asks for an account (hf auth login)",
        )


def _hub_error(name: str, kind: str) -> str | None:
    """Return why the hub does not give a repository; None where it answers, or HF_HUB_OFFLINE asks for copies alone.

    The request has a thread, as looking up an address may take minutes, which no timeout of a client limits.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    found: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT_SECONDS / 2)
            found.append(None)
        except Exception as wrong:  # the hub's client has dozens of errors
            found.append(next(iter(str(wrong).splitlines()), "") or type(wrong).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return found[0] if found else f"{constants.ENDPOINT} does not answer within {HUB_TIMEOUT_SECONDS:.0f} seconds"


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder is one of `xtk distill`, finished or not."""
    return (folder / RECIPE_FILE).is_file()


def _check_run_finished(folder: Path) -> None:
    """Refuse a run that has written no student yet.

    Raises:
        XtkError: names its last checkpoint.
    """
    if not is_run_folder(folder) or any(
        (folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG, "tokenizer.json")
    ):
        return
    there = "".join(f"{path}, or " for _, path in list_checkpoints(folder)[-1:])
    raise XtkError(
        "this run is not finished", where=str(folder), hint=f"{there}the same xtk distill command, which goes on"
    )


def base_model_and_adapter(folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of a model, and that of an adapter of it if this is one of peft's.

    Args:
        folder: of a model or of an adapter.

    Raises:
        XtkError: an adapter does not say, or nobody has, the model that it belongs to.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return folder, None
    base = str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    if not base:
        raise XtkError("this adapter does not say which model it belongs to", where=str(folder / ADAPTER_CONFIG))
    try:
        return resolve_model_folder(base, with_weights=True), folder
    except XtkError as wrong:
        where = f"{base}, the model to which the adapter in {folder} belongs"
        raise XtkError(wrong.what, where=where, hint=wrong.hint) from None


def weights_fingerprint(folder: Path) -> str:
    """Return "sha256:..." that names the weights in a folder.

    Reads the configuration, the names and sizes of the weight files and 64 blocks of 64 KiB spread over each
    (the whole of small files): training changes every block, and a hash of hundreds of gigabytes would take minutes.

    Raises:
        Damaged: there is a pipe or a device in place of a file.
    """
    digest = hashlib.sha256()
    for content in (
        read_model_config(folder),
        read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {},
    ):
        if content:
            for name in ("transformers_version", "base_model_name_or_path"):  # a path, of the same weights
                content.pop(name, None)
            digest.update(json.dumps(content, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for file in files:
        if not file.is_file():  # a pipe would be waited for
            raise CorruptError("this is not a regular file", where=str(file))
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for offset in sorted({max(0, size - _BLOCK_BYTES) * at // (_NUM_BLOCKS - 1) for at in range(_NUM_BLOCKS)}):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK_BYTES))
    return "sha256:" + digest.hexdigest()
