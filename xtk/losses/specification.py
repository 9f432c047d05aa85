"""`--loss NAME:key=value,...`: which losses, with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xtk.errors import XtkError
from xtk.lookup import lookup, unknown
from xtk.options import Specification, filled, names_of, positive

if TYPE_CHECKING:
    from xtk.losses.cells import Loss
    from xtk.losses.divergences import Divergence

# The divergence from a teacher who is certain, a sum of differences, and what is none: nothing can take their place.
WITHOUT_DIVERGENCE = ("ce", "uld", "policy-gradient")


AUTO = "auto"  # in the place of a loss: one that suits the pair and the cache


@dataclass(frozen=True)
class LossSpecification(Specification):
    """One term of the total.

    Attributes:
        name: a name of the table, or `AUTO`.
        weight: its factor in the sum.
        options: its own, those of its divergence, and the divergence's name where the loss is not called after it.
    """

    def rule(self) -> Loss:
        """Return the loss, with its own options.

        Raises:
            XtkError: an option's value makes no sense.
        """
        from xtk.losses import LOSSES

        rule = lookup(LOSSES, self.name, "loss")
        loss: Loss = filled(rule, {key: text for key, text in self.options if key in names_of(rule)}, str(self))
        return loss

    def divergence(self) -> Divergence:
        """Return what the loss takes between both sides.

        Raises:
            XtkError: an unknown divergence, or an option that it does not have, or whose value makes no sense.
        """
        from xtk.losses import LOSSES
        from xtk.losses.divergences import DIVERGENCES, make_divergence, options_of

        options = dict(self.options)
        own = names_of(lookup(LOSSES, self.name, "loss"))
        name, known = "forward-kl", own
        if self.name in DIVERGENCES:
            name, known = self.name, options_of(self.name)
        elif self.name not in WITHOUT_DIVERGENCE:
            name = options.get("divergence", name)
            known = list(dict.fromkeys(["divergence", *own, *options_of(name)]))
        for key in options:
            if key not in known:
                raise unknown(f"option of the loss {self.name}", key, ["weight", *known])
        return make_divergence(
            name, {key: text for key, text in options.items() if key not in ("divergence", *own)}, str(self)
        )


def parse_losses(texts: Sequence[str]) -> list[LossSpecification]:
    """Read `p-kl`, `ce:weight=0.5`, ....

    Raises:
        XtkError: an unknown loss or option, a weight that is no positive number, a loss named twice.
    """
    from xtk.losses import LOSSES

    results: list[LossSpecification] = []
    for text in texts:
        name, _, options = text.partition(":")
        if name == AUTO and options:
            raise XtkError(f"the loss {AUTO} has no options", hint="name the loss: --loss byte-kl:weight=0.5")
        if name not in LOSSES and name != AUTO:
            raise unknown("loss", name, LOSSES)
        if name in [result.name for result in results]:
            raise XtkError(f"the loss {name} is asked for twice", hint="one --loss for each, with its weight")
        pairs = [option.partition("=")[::2] for option in filter(None, options.split(","))]
        weights = [value for key, value in pairs if key == "weight"]
        others = {key.replace("_", "-"): value for key, value in pairs if key != "weight"}
        weight = positive(weights[-1], name, "loss") if weights else 1.0
        loss = LossSpecification(name, weight, tuple(sorted(others.items())))
        if others:
            loss.divergence()  # what is wrong with it is told now
            loss.rule()
        results.append(loss)
    return results
