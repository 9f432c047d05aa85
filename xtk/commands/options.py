"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

STUDENT = "The student: a folder with tokenizer.json, or a hub id."
TEACHER = "The teacher: a folder with tokenizer.json, or a hub id."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of a path.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes; errors stay.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace what xtk wrote for another request at the same path, and nothing else.")
]
Config = Annotated[
    str,
    typer.Option(
        "--config",
        help="A YAML file of these options, values as on the command line; flags win over it.",
        metavar="FILE",
    ),
]
Output = Annotated[str, typer.Option("--output", "-o", help="Where the artifact goes, to the letter.", metavar="PATH")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model. Read it first.")
]
Columns = Annotated[
    str,
    typer.Option(
        help="Names of the data's columns, where they are not those of the fields: text=COLUMN, messages=COLUMN, "
        "prompt=COLUMN,completion=COLUMN, teacher_prompt=COLUMN, input_ids=COLUMN... docs/how-to/data.md lists them.",
        metavar="FIELD=COLUMN,...",
    ),
]
WeightColumn = Annotated[
    str,
    typer.Option(
        help="A column with a number for each document, how much it counts in training: 2 as if it came twice, 0 as if "
        "it did not come. A cache keeps it.",
        metavar="NAME",
    ),
]
