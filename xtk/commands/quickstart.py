"""`xtk quickstart`: a complete distillation on a CPU, in minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import shared_options


def quickstart(
    output: Annotated[
        str, typer.Option("--output", "-o", help="Output folder of the models, caches and report.", metavar="FOLDER")
    ],
    seeds: Annotated[
        int,
        typer.Option(help="Number of random seeds; each trains two students and takes about two minutes more.", min=1),
    ] = 1,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Distill a small student across tokenizers on a CPU.

    Trains two tokenizers and a teacher on Python's documentation and runs four commands, which are printed. Ends with
    a table of held-out bits per byte: teacher, student trained with cross-entropy only, and distilled student. Takes
    about five minutes on two CPU cores.

    Examples:
        xtk quickstart -o quickstart
        xtk quickstart --seeds 3 --json -o quickstart
    """
    from pathlib import Path

    from xtk.quickstart.demo_pipeline import run_quickstart as run

    terminal.set_quiet(quiet)
    figures = run(Path(output), seeds)
    terminal.result_artifact({"path": output, "kind": "quickstart", "bits_per_byte": figures}, as_json=as_json)
