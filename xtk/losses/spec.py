"""Parsing of `--loss NAME:key=value,...`: names, weights and options of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xtk.errors import XtkError
from xtk.losses import AUTO_LOSS, LOSSES
from xtk.losses.divergences import DIVERGENCES, Divergence, divergence_options, make_divergence
from xtk.losses.interface import ALL_POSITIONS, Loss
from xtk.name_registry import load_registered, unknown_name_error
from xtk.options.spec_parsing import OptionSpec, from_pairs, option_names, parse_pairs, parse_weight


@dataclass(frozen=True)
class LossSpec(OptionSpec):
    """One term of the total loss; its name is a key of `LOSSES`, or `AUTO_LOSS`.

    The options are those of the loss and of its divergence, and `divergence` if the name does not imply it.
    """

    def make_loss(self) -> Loss:
        """Return the loss with its options."""
        rule = load_registered(LOSSES, self.name, "loss")
        own = option_names(rule)
        loss: Loss = from_pairs(rule, (pair for pair in self.options if pair[0] in own), f"the loss {self}")
        if rule.comparison_space == "text" and loss.where != ALL_POSITIONS:
            raise XtkError(
                f"where={loss.where} does not fit the loss {self.name}: it has no teacher, so no boundary is shared",
                hint=f"remove where={loss.where}",
            )
        return loss

    def make_divergence(self) -> Divergence:
        """Return the divergence that the loss applies to its cells."""
        options = dict(self.options)
        rule: type[Loss] = load_registered(LOSSES, self.name, "loss")
        own = option_names(rule)
        name, known = rule.default_divergence, own
        if self.name in DIVERGENCES:
            name, known = self.name, [*divergence_options(self.name), *own]
        elif rule.takes_divergence:
            name = options.get("divergence", name)
            known = list(dict.fromkeys(["divergence", *own, *divergence_options(name)]))
        for key in options:
            if key not in known:
                raise unknown_name_error(f"option of the loss {self.name}", key, ["weight", *known])
        others = {key: text for key, text in options.items() if key not in ("divergence", *own)}
        return make_divergence(name, others, str(self))


def parse_losses(texts: Sequence[str]) -> list[LossSpec]:
    """Parse specifications such as `p-kl` or `ce:weight=0.5`."""
    results: list[LossSpec] = []
    for text in texts:
        name, _, options = text.partition(":")
        if name == AUTO_LOSS and options:
            raise XtkError(
                f"--loss {AUTO_LOSS} takes no options",
                hint="name a loss to give it options, such as --loss byte-kl:weight=0.5",
            )
        if name not in LOSSES and name != AUTO_LOSS:
            raise unknown_name_error("loss", name, LOSSES)
        if name in [result.name for result in results]:
            hint = f"use it once, with a weight: --loss {name}:weight=0.5"
            raise XtkError(f"--loss {name} is given twice", hint=hint)
        pairs = dict(parse_pairs(options, f"--loss {text}"))
        weight = parse_weight(pairs.pop("weight"), name, "loss") if "weight" in pairs else 1.0
        loss = LossSpec(name, weight, tuple(sorted(pairs.items())))
        if pairs:
            loss.make_divergence()  # report errors now
            loss.make_loss()
        results.append(loss)
    return results
