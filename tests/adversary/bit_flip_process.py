"""Script that flips bytes of artifacts and reads them: `python bit_flip_process.py FOLDER FLIPS SEED`.

FOLDER contains finished caches and projections (`*.safetensors`). The script prints JSON: for each kind of artifact the
number of flips (`flips`), and how many of them gave wrong values without an error (`wrong`), passed verification
(`certified`), or raised anything but an XtkError (`tracebacks`). It is a separate process so that a crash is detected.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import small_caches

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.projection.file import read_projection

Counts = dict[str, int]


def call_and_count(function: Callable[[], object], counts: Counts, location: str) -> object:
    """Return the result of a call, or None after an exception; count exceptions other than XtkError as tracebacks."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return function()
    except XtkError:
        return None
    except Exception as error:
        counts["tracebacks"] += 1
        sys.stderr.write(f"{location}: {error!r}\n")
        return None


def flip(path: Path, rng: np.random.Generator) -> str:
    """Flip one to eight bits of a random byte; return a description of the change."""
    position = int(rng.integers(path.stat().st_size))
    mask = 1 << int(rng.integers(8)) if rng.random() < 0.5 else int(rng.integers(1, 256))
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ mask]))
    return f"{path.name}, byte {position} ^ {mask}"


def flip_finished_cache(cache: Path, copy: Path, rng: np.random.Generator, counts: Counts) -> None:
    """Flip a byte in any file of a finished cache, read the whole cache, then verify it."""
    files = sorted(copy.iterdir())
    file = files[int(rng.integers(len(files)))]
    location = flip(file, rng)
    values = call_and_count(lambda: small_caches.stored_values(TeacherCache(copy)), counts, location)
    counts["wrong"] += values is not None and values != expected_values(cache)
    counts["certified"] += call_and_count(lambda: TeacherCache(copy).verify() or True, counts, location) is True
    shutil.copyfile(cache / file.name, file)


def flip_unfinished_cache(cache: Path, copy: Path, rng: np.random.Generator, counts: Counts) -> None:
    """Flip a byte in any shard of an unfinished cache; a resumed writer must report this shard as missing."""
    original = TeacherCache(cache)
    number = int(rng.integers(len(original.manifest["shards"])))
    file = copy / original.manifest["shards"][number]["file"]
    location = flip(file, rng)
    missing = call_and_count(lambda: small_caches.resume_writer(original, copy).missing_shards(), counts, location)
    counts["certified"] += missing != [number]
    shutil.copyfile(cache / file.name, file)


def flip_projection(path: Path, copy: Path, rng: np.random.Generator, counts: Counts) -> None:
    """Flip a byte in a projection and read it."""
    location = flip(copy, rng)
    found = call_and_count(lambda: read_projection(copy), counts, location)
    counts["certified"] += found is not None
    shutil.copyfile(path, copy)


_expected_values: dict[Path, list[bytes]] = {}


def expected_values(cache: Path) -> list[bytes]:
    """Return the values of an intact cache."""
    if cache not in _expected_values:
        _expected_values[cache] = small_caches.stored_values(TeacherCache(cache))
    return _expected_values[cache]


def main(folder: Path, flips: int, seed: int) -> None:
    """Flip bytes of every artifact in turn."""
    rng = np.random.default_rng(seed)
    caches = sorted(path.parent for path in folder.glob("*/manifest.json"))
    counts_by_kind: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory() as temporary:
        cases = []
        for cache in caches:
            copy = Path(shutil.copytree(cache, Path(temporary) / "finished" / cache.name))
            cases.append((f"finished cache, {cache.name}", flip_finished_cache, cache, copy))
            copy = small_caches.copy_without_manifest(cache, Path(temporary) / "unfinished" / cache.name)
            cases.append((f"unfinished cache, {cache.name}", flip_unfinished_cache, cache, copy))
        projections = sorted(folder.glob("*.safetensors"))
        cases += [("projection", flip_projection, path, Path(shutil.copy(path, temporary))) for path in projections]
        for number in range(flips):
            kind, flip_artifact, original, copy = cases[number % len(cases)]
            counts = counts_by_kind.setdefault(kind, {"flips": 0, "wrong": 0, "certified": 0, "tracebacks": 0})
            counts["flips"] += 1
            flip_artifact(original, copy, rng, counts)
    print(json.dumps(counts_by_kind))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
