"""`xtk prune-projection`: keep the heaviest entries of each row."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import shared_options


def prune_projection(
    projection: Annotated[
        str, typer.Argument(help="Projection file; - reads its path from standard input.", metavar="PROJECTION")
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="Output file (safetensors); nothing is added to its name.", metavar="FILE"),
    ],
    top_k: Annotated[int, typer.Option(help="Maximum number of teacher tokens per student token; 0: all.", min=0)] = 0,
    min_weight: Annotated[float, typer.Option(help="Minimum weight of an entry; smaller ones are removed.")] = 0.0,
    mass: Annotated[
        float, typer.Option(help="Fraction of each row's weight to keep, largest entries first; 1: all.")
    ] = 1.0,
    renormalize: Annotated[
        bool,
        typer.Option(
            "--renormalize",
            help="Scale each row back to the sum that it had before pruning; without it, removed weight is lost.",
        ),
    ] = False,
    merge: Annotated[
        list[str] | None,
        typer.Option(
            help="Another projection of the same tokenizers and its weight in the average, taken before "
            "pruning. Repeatable; PROJECTION has the remaining weight.",
            metavar="OTHER=WEIGHT",
        ),
    ] = None,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Make a projection smaller, or average several.

    Examples:
        xtk prune-projection projection.safetensors --top-k 4 -o pruned.safetensors
        xtk prune-projection a.safetensors --merge b.safetensors=0.5 -o average.safetensors
    """
    from pathlib import Path

    from xtk.artifacts.output_path_checks import check_output_file
    from xtk.artifacts.projection_file import looks_like_projection, read_projection, write_projection
    from xtk.commands.projection_reuse import reuse_projection
    from xtk.projection.merge_projections import merge_projections
    from xtk.projection.prune import prune_projection as prune

    terminal.set_quiet(quiet)
    first, path = terminal.path_argument(projection), Path(output)
    others = [_parse_merge(value) for value in merge or ()]
    check_output_file(path, "projections", looks_like_projection, [first, *(name for name, _ in others)])
    source = read_projection(Path(first))
    if others:
        source = merge_projections(source, [(read_projection(Path(name)), weight) for name, weight in others])
    pruned = prune(source, top_k=top_k or None, min_weight=min_weight, mass=mass, renormalize=renormalize)
    if reuse_projection(path, dict(pruned.header), force=force) is None:
        write_projection(pruned, path)
    terminal.result_artifact({"path": output, "kind": "projection", **pruned.summary()}, as_json=as_json)


def _parse_merge(value: str) -> tuple[str, float]:
    """Return path and weight of `--merge OTHER=WEIGHT`."""
    from xtk.errors import XtkError

    name, _, number = value.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        name = ""
    if not name:
        raise XtkError(
            f"--merge is {value!r}, but must be OTHER=WEIGHT", hint="use for example --merge other.safetensors=0.5"
        )
    return name, weight
