"""Resolution of model names (local folders, hub ids, adapters) to local folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from xtk.errors import XtkError, path_exists
from xtk.files.atomic_files import read_json
from xtk.files.hub_access import hub_error
from xtk.files.run_names import is_run_folder, list_checkpoints
from xtk.models.gguf_models import find_gguf, gguf_fingerprint, gguf_model_folder, gguf_name
from xtk.models.weight_hash import hash_weights
from xtk.text.model_config_json import ADAPTER_CONFIG

_HUB_ID = re.compile(r"^(hf://)?[\w.-]+/[\w.-]+(@[\w./-]+)?$")
_HUB_CACHE_FOLDER = re.compile(r"^models--([\w.-]+?)--([\w.-]+)$")
_TOKENIZER_FILES = ["tokenizer*.json", "added_tokens.json", "special_tokens_map.json", "chat_template*", "config.json",
                    "additional_chat_templates/*", "*.model", "vocab.*", "tekken.json", "*.tiktoken"]  # fmt: skip
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "generation_config.json", "*.py",
                ADAPTER_CONFIG]  # fmt: skip


@dataclass(frozen=True)
class ModelRef:
    """A model on disk, and how it is loaded."""

    folder: Path  # configuration, tokenizer, and weights unless servers run the model
    adapter: Path | None = None  # folder of a peft adapter of this model; None: none
    dtype: str = "float32"  # of weights and computation, a dtype of torch
    trust_remote_code: bool = False  # run Python code that comes with the model; needs the user's consent
    name: str = ""  # in messages; "": the folder


def hub_id(folder: Path) -> str:
    """Return the hub id of a model in the Hugging Face cache; "" for other folders."""
    for part in reversed(folder.resolve().parts):
        if match := _HUB_CACHE_FOLDER.match(part):
            return f"{match[1]}/{match[2]}"
    return ""


def model_name(folder: Path) -> str:
    """Return the last part of a model's hub id if it is in the Hugging Face cache, else its file's or folder's name."""
    return hub_id(folder).rpartition("/")[2] or gguf_name(folder) or folder.resolve().name


def resolve_model_folder(source: str, *, with_weights: bool) -> Path:
    """Return the local folder of a model; a hub model is downloaded.

    Args:
        source: a folder, a GGUF file or a folder with one, `owner/name`, `owner/name@revision` or `hf://owner/name`.
        with_weights: download the weights too, not only tokenizer and configuration.
    """
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~user of an unknown user
        path = Path(source)
    if path_exists(str(path)):
        if path.is_dir():
            _check_run_finished(path)
        if (gguf := find_gguf(path)) is not None:
            return gguf_model_folder(gguf)
        if path.is_dir():
            return path
        raise XtkError(
            "a model must be a folder or a GGUF file, but this is another file",
            where=source,
            hint="use the folder with config.json",
        )
    if not _HUB_ID.match(source) or source.startswith(("./", "../", "/")):
        raise XtkError(
            f"this {'model' if with_weights else 'tokenizer'} folder does not exist",
            where=source,
            hint="use a local folder, or a hub id such as owner/name",
        )
    from huggingface_hub import snapshot_download

    name, _, revision = source.removeprefix("hf://").partition("@")
    patterns = _MODEL_FILES if with_weights else _TOKENIZER_FILES
    unreachable = hub_error(name, "model")
    try:
        # Without network, use an earlier download.
        local = unreachable is not None
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns, local_files_only=local))
    except Exception as failure:  # the hub client has dozens of error types
        reason = unreachable or next(iter(str(failure).splitlines()), type(failure).__name__)
        raise XtkError(
            f"this model is not a local folder, and loading it from the Hugging Face hub failed: {reason}",
            where=source,
            hint="check the spelling and the network; for a gated or private model, run hf auth login",
        ) from None


def _check_run_finished(folder: Path) -> None:
    """Refuse a run that has not written its student yet."""
    is_written = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG, "tokenizer.json"))
    if is_written or not is_run_folder(folder):
        return
    checkpoint = "".join(f"use its last checkpoint {path}, or " for _, path in list_checkpoints(folder)[-1:])
    raise XtkError(
        "this run is not finished",
        where=str(folder),
        hint=f"{checkpoint}run the same xtk distill command again to finish it",
    )


def base_model_and_adapter(folder: Path, *, with_weights: bool = True) -> tuple[Path, Path | None]:
    """Return the folder of the base model, and the adapter folder if `folder` is a PEFT adapter."""
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return folder, None
    base = str(read_json((folder / ADAPTER_CONFIG).resolve()).get("base_model_name_or_path") or "")
    if not base:
        raise XtkError(
            "this PEFT adapter does not name its base model",
            where=str(folder / ADAPTER_CONFIG),
            hint="set base_model_name_or_path in this file to a model folder or a hub id",
        )
    try:
        return resolve_model_folder(base, with_weights=with_weights), folder
    except XtkError as failure:
        where = f"{base}, the base model of the adapter in {folder}"
        raise XtkError(failure.what, where=where, hint=failure.hint) from None


def weights_fingerprint(folder: Path) -> str:
    """Return "sha256:..." that identifies the weights in a folder; of a converted GGUF model, the file's checksum."""
    digest = hash_weights(folder)
    return gguf_fingerprint(folder, digest) or digest
