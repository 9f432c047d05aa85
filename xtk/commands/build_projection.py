"""`xtk build-projection`: two tokenizers in, a projection out."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import options


def build_projection(
    student: Annotated[str, typer.Argument(help=options.STUDENT, metavar="STUDENT")],
    teacher: Annotated[str, typer.Argument(help=options.TEACHER, metavar="TEACHER")],
    output: options.Output,
    method: Annotated[
        str,
        typer.Option(
            help="What becomes of student tokens that the teacher does not have. exact: nothing. first: all weight on "
            "the first piece of their spelling. multitoken: over up to 4 pieces, each a tenth of the one before.",
            metavar="[exact|first|multitoken]",
        ),
    ] = "multitoken",
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Build the sparse matrix from the student's tokens to the teacher's."""
    from pathlib import Path

    from xtk.artifacts.hub import local_folder
    from xtk.artifacts.projection_file import write_projection
    from xtk.commands.reuse import reuse_projection
    from xtk.lookup import lookup
    from xtk.projection.build import METHODS, identity
    from xtk.projection.build import build_projection as build
    from xtk.tokens.tokenizer import Tokenizer

    terminal.set_quiet(quiet)
    lookup(METHODS, method, "method")
    student_tokenizer = Tokenizer(local_folder(student, weights=False), name=student)
    teacher_tokenizer = Tokenizer(local_folder(teacher, weights=False), name=teacher)
    path = Path(output)
    request = {
        "method": method,
        "student": identity(student_tokenizer),
        "teacher": identity(teacher_tokenizer),
        "prunings": [],
    }
    projection = reuse_projection(path, request, force=force)
    if projection is None:
        projection = build(student_tokenizer, teacher_tokenizer, method)
        write_projection(projection, path)
    terminal.result_artifact({"path": output, "kind": "projection", **projection.figures()}, as_json=as_json)
