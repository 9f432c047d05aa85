"""The options that choose regions of conversations."""

from __future__ import annotations

from xtk.errors import XtkError
from xtk.options.declaration import Option
from xtk.options.spec_parsing import parse_number, parse_pairs
from xtk.options.training_options import RegionOptions
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.chat.regions import RegionWeights

_WEIGHT, _BOUND = Option("", above=0, max=1e6), Option("", min=0)


def parse_region_options(options: RegionOptions) -> RegionWeights:
    """Return the weights of regions."""
    if not options.train_on:
        raise XtkError("--train-on has no region", hint=f"use one or more of {', '.join(REGIONS)}")
    weights = _parse_numbers(options.region_weights, "--region-weights", "weight", _WEIGHT)
    bounds = _parse_numbers(options.advantage_clip, "--advantage-clip", "bound", _BOUND)
    return RegionWeights(options.train_on, weights, bounds)


def _parse_numbers(text: str, flag: str, what: str, limits: Option) -> dict[str, float]:
    if not text:
        return {}
    known = [name.replace("-", "_") for name in REGIONS]
    pairs = parse_pairs(text, f"{flag} {text}", known, noun="region")
    return {
        name: float(parse_number(value, float, f"the {what} of {name} in {flag}", "for example answer=0.5", limits))
        for name, value in pairs
    }
