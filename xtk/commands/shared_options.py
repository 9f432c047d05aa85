"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

STUDENT_HELP = "The student: a folder with tokenizer.json, or a hub id."
TEACHER_HELP = "The teacher: a folder with tokenizer.json, or a hub id."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of a path.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes; errors stay.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace what xtk wrote for another request at the same path; other files are never removed."
    ),
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
MaxDocumentBytes = Annotated[
    int,
    typer.Option(
        help="Largest document that is read, in bytes as the file has it; one above is refused, not loaded.", min=1
    ),
]
MAX_DOCUMENT_BYTES = 16_000_000  # of `xtk.artifacts.data_file_readers`, whose import --help does not wait for
WeightColumn = Annotated[
    str,
    typer.Option(
        help="A column with a number for each document, how much it counts in training: 2 as if it came twice, 0 as if "
        "it did not come. A cache keeps it.",
        metavar="NAME",
    ),
]
RouteColumn = Annotated[
    str,
    typer.Option(
        help="A column with the name of the teacher that teaches a document, for distill --combine-teachers route.",
        metavar="NAME",
    ),
]
Server = Annotated[
    list[str] | None,
    typer.Option(
        help="Of --backend server: an address, such as http://localhost:8000/v1; #MODEL behind it. Repeat it for more.",
        metavar="URL",
    ),
]
Concurrency = Annotated[int, typer.Option(help="Of --backend server: requests in flight on all servers.", min=1)]

# --- how a model writes

Temperature = Annotated[float, typer.Option(help="Of the draws; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens that carry this mass.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens at most; 0: from all.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="A text that ends a turn once it is written; it belongs to it. Repeat it for more.", metavar="TEXT"
    ),
]
ChatTemplateKwargs = Annotated[
    str,
    typer.Option(
        help="What the chat template is told beside the messages, such as '{\"enable_thinking\": false}'.",
        metavar="JSON",
    ),
]
PromptTemplate = Annotated[
    str,
    typer.Option(
        help="What is asked, where a row has no prompt as it is to be put: Jinja with the row's fields, such as "
        "'{{problem}} Answer in \\boxed{}.', or a file of it.",
        metavar="TEXT|FILE.jinja",
    ),
]
ApplyChatTemplate = Annotated[
    bool,
    typer.Option("--apply-chat-template", help="A prompt that is text is what a user says, in the chat template."),
]
MaxPrompts = Annotated[int, typer.Option(help="Only so many prompts, the first ones; 0: all.", min=0)]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        help="What a completion is worth: exact, boxed, regex, json, tests or a function of yours, with options behind "
        "a colon. Repeat it for a sum. docs/reference/rewards.md lists them.",
        metavar="NAME[:KEY=VALUE,...]|FILE.py:FUNCTION",
    ),
]
ScaleRewards = Annotated[
    bool,
    typer.Option(
        "--scale-rewards/--no-scale-rewards",
        help="Advantages are divided by the deviation of a prompt's rewards, as in GRPO.",
    ),
]
Environment = Annotated[
    str,
    typer.Option(
        help="A Python class that answers the student's turns (a tool, a game). Its file is run.",
        metavar="FILE.py:CLASS",
    ),
]
MaxTurns = Annotated[int, typer.Option(help="Of --environment: turns of the student at most.", min=1)]
