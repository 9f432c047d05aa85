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


def prune_projection(options: PruneProjectionOptions) -> None:
    """Make a projection smaller.

    Examples:
        xtk prune-projection projection.safetensors --top-k 4 -o pruned.safetensors
        xtk prune-projection projection.safetensors --mass 0.9 --renormalize -o pruned.safetensors
    """
    from pathlib import Path

    from xtk.files.output import Output
    from xtk.projection.file import PROJECTION, read_projection, write_projection
    from xtk.projection.prune import prune_projection as prune

    terminal.set_quiet(options.quiet)
    source, path = terminal.path_argument(options.projection), Path(options.output)
    output = Output(path, PROJECTION, force=options.force, inputs=[source])
    output.find_finished()
    pruned = prune(
        read_projection(Path(source)),
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
