"""`--loss NAME:key=value,...`: which losses, with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xtk.errors import XtkError


@dataclass(frozen=True)
class LossSpecification:
    """One term of the total.

    Attributes:
        name: a name of the table.
        weight: its factor in the sum.
    """

    name: str
    weight: float = 1.0

    def __str__(self) -> str:
        return self.name if self.weight == 1 else f"{self.name}:weight={self.weight!r}"


def parse_losses(texts: Sequence[str]) -> list[LossSpecification]:
    """Read `p-kl`, `ce:weight=0.5`, ....

    Raises:
        XtkError: an unknown loss or option, a weight that is no positive number, a loss named twice.
    """
    from xtk.lookup import unknown
    from xtk.losses import LOSSES

    results: list[LossSpecification] = []
    for text in texts:
        name, _, options = text.partition(":")
        if name not in LOSSES:
            raise unknown("loss", name, LOSSES)
        if name in [result.name for result in results]:
            raise XtkError(f"the loss {name} is asked for twice", hint="one --loss for each, with its weight")
        weight = 1.0
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key != "weight":
                raise unknown(f"option of the loss {name}", key, ["weight"])
            weight = _positive(value, name)
        results.append(LossSpecification(name, weight))
    return results


def _positive(value: str, name: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise XtkError(f"the weight of the loss {name} is {value!r}", hint=f"--loss {name}:weight=0.5")
    return number
