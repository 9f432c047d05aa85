"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

STUDENT_HELP = "Student tokenizer: a folder with tokenizer.json, or a Hugging Face hub id."
TEACHER_HELP = "Teacher tokenizer: a folder with tokenizer.json, or a Hugging Face hub id."

Json = Annotated[bool, typer.Option("--json", help="Print results as JSON, one object per line.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Suppress progress lines and notes; errors are still printed.")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace an artifact of xtk at the output path that was made with other settings. Other files"
        " are never removed.",
    ),
]
Config = Annotated[
    str,
    typer.Option(
        "--config",
        help="YAML or JSON file with values of these options; options on the command line override it.",
        metavar="FILE",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Execute Python code shipped with the model; read that code first.")
]
Columns = Annotated[
    str,
    typer.Option(
        help="Data columns by field, such as text=body or prompt=question,completion=answer. docs/how-"
        "to/data.md lists the fields.",
        metavar="FIELD=COLUMN,...",
    ),
]
MaxDocumentBytes = Annotated[
    int,
    typer.Option(
        help="Maximum size of a document in bytes, as stored in its file; a larger document is an error.", min=1
    ),
]
MAX_DOCUMENT_BYTES = 16_000_000  # as in `xtk.artifacts.data_file_readers`, which is slow to import
WeightColumn = Annotated[
    str,
    typer.Option(
        help="Data column with the weight of each document in training: 2 counts twice, 0 not at all.",
        metavar="NAME",
    ),
]
RouteColumn = Annotated[
    str,
    typer.Option(
        help="Data column that names each document's teacher by the last part of its path or hub id. Used by "
        "distill --combine-teachers route.",
        metavar="NAME",
    ),
]
Server = Annotated[
    list[str] | None,
    typer.Option(
        help="With --backend server: server URL such as http://localhost:8000/v1, or URL#MODEL. Repeatable.",
        metavar="URL",
    ),
]
Concurrency = Annotated[
    int, typer.Option(help="With --backend server: maximum number of concurrent requests, over all servers.", min=1)
]

# --- generation

Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy decoding.")]
TopP = Annotated[
    float, typer.Option(help="Nucleus sampling: sample from the fewest tokens with this total probability.")
]
TopK = Annotated[int, typer.Option(help="Sample from the K most likely tokens only; 0: from the whole vocabulary.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Stop string that ends a completion or turn, and is kept in its text. Repeatable.", metavar="TEXT"
    ),
]
ChatTemplateKwargs = Annotated[
    str,
    typer.Option(
        help="Chat template arguments as JSON, such as '{\"enable_thinking\": false}'.",
        metavar="JSON",
    ),
]
PromptTemplate = Annotated[
    str,
    typer.Option(
        help="Jinja template of the prompt, text or .jinja file; variables: fields of a row.",
        metavar="TEXT|FILE.jinja",
    ),
]
ApplyChatTemplate = Annotated[
    bool,
    typer.Option(
        "--apply-chat-template", help="Wrap plain-text prompts as user messages in the model's chat template."
    ),
]
MaxPrompts = Annotated[
    int, typer.Option(help="Maximum number of prompts, taken from the start of the data; 0: all.", min=0)
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        help="Reward of a completion: exact, boxed, regex, json, tests or a Python function. Repeatable: "
        "weighted sum; docs/reference/rewards.md lists the options.",
        metavar="NAME[:KEY=VALUE,...]|FILE.py:FUNCTION",
    ),
]
ScaleRewards = Annotated[
    bool,
    typer.Option(
        "--scale-rewards/--no-scale-rewards",
        help="Divide advantages by the prompt's standard deviation of rewards, as in GRPO.",
    ),
]
Environment = Annotated[
    str,
    typer.Option(
        help="Python class that replies to the student (a tool, a game); its file is executed. "
        "docs/how-to/tools.md describes its methods.",
        metavar="FILE.py:CLASS",
    ),
]
MaxTurns = Annotated[
    int, typer.Option(help="Maximum number of student turns per rollout in the environment (--environment).", min=1)
]
