"""`xtk quickstart`: the whole way on a corpus that every Python carries, on a CPU, in minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import shared_options


def quickstart(
    output: shared_options.Output,
    seeds: Annotated[int, typer.Option(help="Pairs of students; each takes about two minutes more.", min=1)] = 1,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Distil a small student across tokenizers, from nothing, and compare it.

    Trains two tokenizers and a teacher on Python's own documentation, then runs the four commands, which it prints, and
    ends with a table: held-out bits per byte of the teacher, of a student trained with cross-entropy alone, and of the
    same student distilled. About five minutes on two CPU cores.
    """
    from pathlib import Path

    from xtk.quickstart.demo_pipeline import run_quickstart as run

    terminal.set_quiet(quiet)
    figures = run(Path(output), seeds)
    terminal.result_artifact({"path": output, "kind": "quickstart", "bits_per_byte": figures}, as_json=as_json)
