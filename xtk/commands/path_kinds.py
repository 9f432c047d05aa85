"""What a local path is, by its name and its first bytes: a model, a teacher cache, data; without reading all of it."""

from __future__ import annotations

from pathlib import Path

from xtk.errors import path_exists

CACHE, RUN, MODEL, TOKENIZER = "a teacher cache", "a run of xtk distill", "a model", "a tokenizer"
PROJECTION, DATA, GGUF, PAGE = "a projection", "a data file", "a GGUF model", "an HTML page"
ADAPTER, DATA_FOLDER, TEMPLATE = "a PEFT adapter", "a folder with data files", "a chat template"
# Files of folders that are described as a whole.
FILES_OF_A_FOLDER = {
    "manifest.json": "the manifest of a teacher cache",
    "recipe.json": "the recipe of a run of xtk distill",
    "xtk.json": "the manifest of a run of xtk distill",
    "metrics.jsonl": "the metrics of a run of xtk distill",
    "config.json": "the configuration of a model",
    "generation_config.json": "the generation settings of a model",
    "tokenizer.json": "the file of a tokenizer",
    "tokenizer_config.json": "the settings of a tokenizer",
    "tokenizer.model": "the file of a tokenizer",
    "tekken.json": "the file of a tokenizer",
    "special_tokens_map.json": "the special tokens of a tokenizer",
    "added_tokens.json": "the added tokens of a tokenizer",
    "chat_template.jinja": TEMPLATE,
}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")


def path_kind(location: str) -> str | None:
    """Return what a local file or folder is, as a phrase such as "a teacher cache".

    Returns:
        None: it does not exist, or is none of these.
    """
    if not path_exists(location):
        return None
    path = Path(location)
    try:
        return _folder_kind(path) if path.is_dir() else _file_kind(path) if path.is_file() else None
    except OSError:  # it cannot be read
        return None


def _folder_kind(path: Path) -> str | None:
    from xtk.data.data_file_readers import FORMATS
    from xtk.data.text_streams import file_extension

    if (path / "manifest.json").is_file() or any(path.glob("shard-*.arrow")):
        return CACHE
    if (path / "recipe.json").is_file() or (path / "xtk.json").is_file():
        return RUN
    if (path / "adapter_config.json").is_file():
        return ADAPTER
    if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
        return MODEL
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        return TOKENIZER
    if any(path.glob("*.gguf")):
        return GGUF
    if any(file_extension(file.name) in FORMATS for file in path.iterdir() if file.is_file()):
        return DATA_FOLDER
    return None


def _file_kind(path: Path) -> str | None:
    from xtk.data.data_file_readers import FORMATS
    from xtk.data.text_streams import file_extension
    from xtk.projection.file import has_projection_metadata

    with path.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"GGUF"):
        return GGUF
    if path.name in FILES_OF_A_FOLDER:
        return FILES_OF_A_FOLDER[path.name]
    if has_projection_metadata(path):
        return PROJECTION
    if path.suffix in WEIGHT_SUFFIXES:
        return "a file of weights"
    if start.lower().startswith((b"<!doctype html", b"<html")):
        return PAGE
    return DATA if file_extension(path.name) in FORMATS else None
