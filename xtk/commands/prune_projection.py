"""`xtk prune-projection`: keep the heaviest entries of each row."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option
from xtk.options.shared import ConfigOption, ForceOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class PruneProjectionOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk prune-projection`."""

    projection: str = argument(REQUIRED, "Projection file; - reads its path from standard input.", metavar="PROJECTION")
    output: str = output_option("Output file (safetensors); nothing is added to its name.", "FILE")
    top_k: int = option(0, "Maximum number of teacher tokens per student token; 0: all.", min=0)
    min_weight: float = option(0.0, "Minimum weight of an entry; smaller ones are removed.")
    mass: float = option(1.0, "Fraction of each row's weight to keep, largest entries first; 1: all.")
    renormalize: bool = option(
        False, "Scale each row back to the sum that it had before pruning; without it, removed weight is lost."
    )
    merge: tuple[str, ...] = option(
        (),
        "Another projection of the same tokenizers and its weight in the average, taken before pruning. "
        "Repeatable; PROJECTION has the remaining weight.",
        metavar="OTHER=WEIGHT",
    )


def prune_projection(options: PruneProjectionOptions) -> None:
    """Make a projection smaller, or average several.

    Examples:
        xtk prune-projection projection.safetensors --top-k 4 -o pruned.safetensors
        xtk prune-projection a.safetensors --merge b.safetensors=0.5 -o average.safetensors
    """
    from pathlib import Path

    from xtk.files.output import Output
    from xtk.projection.file import PROJECTION, read_projection, write_projection
    from xtk.projection.merge_projections import merge_projections
    from xtk.projection.prune import prune_projection as prune

    terminal.set_quiet(options.quiet)
    first, path = terminal.path_argument(options.projection), Path(options.output)
    others = [_parse_merge(value) for value in options.merge or ()]
    output = Output(path, PROJECTION, force=options.force, inputs=[first, *(name for name, _ in others)])
    output.find_finished()
    source = read_projection(Path(first))
    if others:
        source = merge_projections(source, [(read_projection(Path(name)), weight) for name, weight in others])
    pruned = prune(
        source,
        top_k=options.top_k or None,
        min_weight=options.min_weight,
        mass=options.mass,
        renormalize=options.renormalize,
    )
    if output.find_finished(dict(pruned.header)) is None:
        write_projection(pruned, path)
    terminal.result_artifact(
        {"path": options.output, "kind": "projection", **pruned.summary()}, as_json=options.as_json
    )


def _parse_merge(value: str) -> tuple[str, float]:
    """Return path and weight of `--merge OTHER=WEIGHT`."""
    from xtk.errors import XtkError
    from xtk.options.spec_parsing import parse_number

    name, _, number = value.rpartition("=")
    example = "for example --merge other.safetensors=0.5"
    if not name:
        raise XtkError(f"--merge is {value!r}, but must be OTHER=WEIGHT", hint=f"use {example}")
    return name, parse_number(number, float, f"the weight of --merge {value}", example)
