"""Options of `xtk evaluate`, by heading of its help, and the modes that read them."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.options.declaration import (
    REQUIRED,
    CommandOptions,
    Heading,
    argument,
    option,
    redeclared,
)
from xtk.options.shared import (
    MAX_COUNT,
    MAX_GENERATIONS,
    ConfigOption,
    CorpusOptions,
    JsonOption,
    PromptOptions,
    QuietOption,
    SamplingOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
)

BITS_MODE, REWARD_MODE, TASKS_MODE = "bits per byte (without --reward and --tasks)", "--reward", "--tasks"
# Options that only some modes read. In other modes they are an error instead of being ignored silently.
OPTIONS_BY_MODE = {
    BITS_MODE: {"teacher", "by_category", "columns", "max_document_bytes", "max_length", "batch_tokens"},
    REWARD_MODE: {
        "reward", "num_generations", "temperature", "top_p", "top_k", "max_completion_length", "stop", "seed",
        "max_prompts", "prompt_template", "apply_chat_template", "chat_template_kwargs", "backend", "engine", "output",
        "columns", "max_document_bytes", "batch_tokens",
    },
    TASKS_MODE: {
        "tasks", "include_path", "num_fewshot", "batch_size", "max_prompts", "apply_chat_template",
        "chat_template_kwargs", "seed", "output", "max_length",
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    SamplingOptions,
    PromptOptions,
    CorpusOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
    JsonOption,
    QuietOption,
    ConfigOption,
    CommandOptions,
):
    """Options of `xtk evaluate`."""

    HEADINGS = (
        Heading("Bits per byte", ("teacher", "by_category")),
        Heading("Generated answers", ("reward",)),
        Heading(
            "Generated answers",
            (
                "num_generations", "temperature", "top_p", "top_k", "max_completion_length", "stop", "prompt_template",
                "backend", "engine",
            ),
            condition="--reward",
        ),
        Heading("Tasks of lm-evaluation-harness", ("tasks",)),
        Heading(
            "Tasks of lm-evaluation-harness", ("include_path", "num_fewshot", "batch_size"), condition="--tasks"
        ),
        Heading(
            "Generated answers and tasks",
            ("max_prompts", "apply_chat_template", "chat_template_kwargs", "seed", "output"),
            condition="--reward or --tasks",
        ),
        Heading(
            "Model and data",
            ("compare_to", CorpusOptions, "max_length", "start_token", "dtype", "batch_tokens", "trust_remote_code"),
        ),
    )  # fmt: skip

    model: str = argument(
        REQUIRED,
        "Model to evaluate: a folder, a GGUF file or a hub id; - reads its path from standard input.",
        metavar="MODEL",
    )
    data: tuple[str, ...] = argument(
        (),
        "Documents, one teacher cache, or, with --reward, prompts; none with --tasks. docs/how-to/data.md lists "
        "the formats.",
        metavar="DATA...",
    )
    compare_to: tuple[str, ...] = option(
        (),
        "Another model to evaluate on the same data; reports MODEL minus OTHER, paired by document. Repeatable.",
        metavar="OTHER",
    )
    teacher: str = option(
        "",
        "Teacher to compare with: adds top-1 agreement and divergences; options as in distill --teacher. A teacher "
        "cache as DATA does the same without scoring again.",
        metavar="MODEL[:KEY=VALUE,...]",
    )
    by_category: bool = option(
        False, "Also print the bits per byte of digits, spaces, punctuation, code and each writing system."
    )
    reward: str = option(
        "",
        "Generate answers and score them: exact, boxed, regex, json, tests or a Python function. "
        "docs/reference/rewards.md lists the options.",
        metavar="NAME[:KEY=VALUE,...]|FILE.py:FUNCTION",
    )
    temperature: float = redeclared(SamplingOptions, "temperature", 0.0)
    max_completion_length: int = redeclared(
        SamplingOptions, "max_completion_length", 512, help="Maximum number of tokens per answer."
    )
    stop: tuple[str, ...] = redeclared(SamplingOptions, "stop", (), help="Stop string that ends an answer. Repeatable.")
    num_generations: int = option(
        1, "Answers per problem, for avg@n and pass@n; above 1 needs --temperature above 0.", min=1, max=MAX_GENERATIONS
    )
    seed: int = option(
        0, "Random seed of sampling and few-shot examples. With --tasks, 0 is the default seed of the harness."
    )
    max_prompts: int = option(
        0, "Maximum number of problems (per task), taken from the start; 0: all.", min=0, max=MAX_COUNT
    )
    backend: str = option("transformers", "Engine that generates, in this process.", metavar="[transformers|vllm]")
    engine: tuple[str, ...] = option((), "Engine argument of --backend vllm. Repeatable.", metavar="NAME=VALUE")
    output: str = option(
        "",
        "Output file for the answers, one per line as JSON.",
        flags=("--output", "-o"),
        metavar="FILE.jsonl",
    )
    tasks: str = option(
        "",
        "Tasks of lm-evaluation-harness, such as mmlu,gsm8k; they bring their own data. NAME=FOLDER reads local "
        "files of mmlu, humaneval_plus and mbpp_plus.",
        metavar="NAME[=FOLDER],...",
    )
    include_path: str = option(
        "", "Folder with additional tasks, as YAML files of lm-evaluation-harness.", metavar="FOLDER"
    )
    num_fewshot: int | None = option(None, "Number of few-shot examples per problem. Default: that of the task.", min=0)
    batch_size: int = option(8, "Requests per forward pass.", min=1)
    dtype: str = option(
        "float32",
        "Data type of the model's weights and computation; losses are summed in float64.",
        metavar="[float32|bfloat16|float16]",
    )
    max_length: int = option(
        0, "Maximum number of tokens per window, up to the context length; 0: the context length.", min=0
    )
    batch_tokens: int = option(
        8192, "Tokens per forward pass, padding included; more is faster and needs more memory.", min=1
    )
