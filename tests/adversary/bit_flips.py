"""Random bit flips in the files of an artifact, and what a reader makes of each: for `nox -s long`, of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError


@dataclass
class Tally:
    """What came of some flips.

    Attributes:
        flips: how many.
        refused: ended in a sentence.
        same: were read, with the same values as before.
        wrong: were read, with other values; file, byte and bit of each.
        tracebacks: ended in another exception; file, byte, bit and exception of each.
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


def flip(path: Path, place: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


def flip_randomly(files: Sequence[Path], use: Callable[[], Any], count: int, seed: int) -> Tally:
    """Flip one random bit at a time, each file as often as any other, use the artifact, and flip it back.

    Args:
        files: of the artifact; empty ones are left out.
        use: reads the artifact as its users do; returns the values that it found, or raises.
        count: how many flips.
        seed: of the draw.
    """
    draw, tally, expected = random.Random(seed), Tally(), use()
    present = [path for path in files if path.stat().st_size]
    for number in range(count):
        path = present[number % len(present)]
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, place, bit)
        told = f"{path.name}, byte {place}, bit {bit}"
        tally.flips += 1
        try:
            found = use()
        except XtkError:
            tally.refused += 1
        except Exception as wrong:
            tally.tracebacks.append(f"{told}: {wrong!r}")
        else:
            if found == expected:
                tally.same += 1
            else:
                tally.wrong.append(told)
        finally:
            flip(path, place, bit)
    return tally
