"""Random bit flips in the files of an artifact and how readers handle them; `nox -s long` covers every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError


@dataclass
class Tally:
    """Outcomes of a number of bit flips.

    Attributes:
        flips: number of flips.
        refused: flips that a reader refused with an XtkError.
        same: flips after which the same values were read.
        wrong: file, byte and bit of each flip after which other values were read.
        tracebacks: file, byte, bit and exception of each flip that caused another exception.
    """

    flips: int = 0
    refused: int = 0
    same: int = 0
    wrong: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.flips + other.flips, self.refused + other.refused, self.same + other.same,
            self.wrong + other.wrong, self.tracebacks + other.tracebacks,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.flips} flips: {self.refused} refused, {self.same} read with the same values, "
            f"{len(self.wrong)} wrong values, {len(self.tracebacks)} tracebacks"
        )


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))


def flip_randomly(files: Sequence[Path], use: Callable[[], Any], count: int, seed: int) -> Tally:
    """Flip one random bit at a time, equally often in each file, use the artifact, and flip the bit back.

    Args:
        files: files of the artifact; empty ones are skipped.
        use: reads the artifact as its users do; returns the values that it found, or raises.
        count: number of flips.
        seed: seed of the random flips.
    """
    rng, tally, expected = random.Random(seed), Tally(), use()
    present = [path for path in files if path.stat().st_size]
    for number in range(count):
        path = present[number % len(present)]
        offset, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, offset, bit)
        location = f"{path.name}, byte {offset}, bit {bit}"
        tally.flips += 1
        try:
            found = use()
        except XtkError:
            tally.refused += 1
        except Exception as error:
            tally.tracebacks.append(f"{location}: {error!r}")
        else:
            if found == expected:
                tally.same += 1
            else:
                tally.wrong.append(location)
        finally:
            flip(path, offset, bit)
    return tally
