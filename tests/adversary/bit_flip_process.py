"""A process that flips bytes of artifacts and reads them: `python bit_flip_process.py FOLDER FLIPS SEED`.

FOLDER has finished caches and projections, `*.safetensors`. Printed as JSON: of each kind how many flips there were
(`flips`), and how many of them gave wrong numbers without an error (`wrong`), passed verification (`certified`), or
ended in anything but one sentence (`tracebacks`). It is a process so that one that ends itself is seen.
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

from xtk.artifacts.projection_file import read_projection
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError

Figures = dict[str, int]


def tried(work: Callable[[], object], figures: Figures, what: str) -> object:
    """Return what a call gives; None after an error that is a sentence."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return work()
    except XtkError:
        return None
    except Exception as wrong:
        figures["tracebacks"] += 1
        sys.stderr.write(f"{what}: {wrong!r}\n")
        return None


def flip(path: Path, draw: np.random.Generator) -> str:
    """Flip one to eight bits of one byte."""
    position = int(draw.integers(path.stat().st_size))
    mask = 1 << int(draw.integers(8)) if draw.random() < 0.5 else int(draw.integers(1, 256))
    with path.open("r+b") as stream:
        stream.seek(position)
        found = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([found ^ mask]))
    return f"{path.name}, byte {position} ^ {mask}"


def finished(cache: Path, copy: Path, draw: np.random.Generator, figures: Figures) -> None:
    """Flip a byte in any file of a finished cache; read all of it, then verify it."""
    files = sorted(copy.iterdir())
    file = files[int(draw.integers(len(files)))]
    where = flip(file, draw)
    read = tried(lambda: small_caches.numbers(TeacherCache(copy)), figures, where)
    figures["wrong"] += read is not None and read != expected(cache)
    figures["certified"] += tried(lambda: TeacherCache(copy).verify() or True, figures, where) is True
    shutil.copyfile(cache / file.name, file)


def unfinished(cache: Path, copy: Path, draw: np.random.Generator, figures: Figures) -> None:
    """Flip a byte in any shard of an unfinished cache; the writer that goes on has to miss that shard."""
    whole = TeacherCache(cache)
    number = int(draw.integers(len(whole.manifest["shards"])))
    file = copy / whole.manifest["shards"][number]["file"]
    where = flip(file, draw)
    missing = tried(lambda: small_caches.resumed(whole, copy).missing_shards(), figures, where)
    figures["certified"] += missing != [number]
    shutil.copyfile(cache / file.name, file)


def projection(path: Path, copy: Path, draw: np.random.Generator, figures: Figures) -> None:
    """Flip a byte in a projection and read it."""
    where = flip(copy, draw)
    found = tried(lambda: read_projection(copy), figures, where)
    figures["certified"] += found is not None
    shutil.copyfile(path, copy)


_expected: dict[Path, list[bytes]] = {}


def expected(cache: Path) -> list[bytes]:
    """Return the numbers of a cache."""
    if cache not in _expected:
        _expected[cache] = small_caches.numbers(TeacherCache(cache))
    return _expected[cache]


def main(folder: Path, flips: int, seed: int) -> None:
    """Flip bytes of every artifact in turn."""
    draw = np.random.default_rng(seed)
    caches = sorted(path.parent for path in folder.glob("*/manifest.json"))
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        work = []
        for cache in caches:
            copy = Path(shutil.copytree(cache, Path(name) / "finished" / cache.name))
            work.append((f"finished cache, {cache.name}", finished, cache, copy))
            copy = small_caches.unfinished(cache, Path(name) / "unfinished" / cache.name)
            work.append((f"unfinished cache, {cache.name}", unfinished, cache, copy))
        projections = sorted(folder.glob("*.safetensors"))
        work += [("projection", projection, path, Path(shutil.copy(path, name))) for path in projections]
        for number in range(flips):
            kind, damage, whole, copy = work[number % len(work)]
            figures = found.setdefault(kind, {"flips": 0, "wrong": 0, "certified": 0, "tracebacks": 0})
            figures["flips"] += 1
            damage(whole, copy, draw, figures)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
