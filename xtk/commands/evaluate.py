"""`xtk evaluate`: bits per byte, rewards of generated answers, or lm-evaluation-harness tasks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import shared_options
from xtk.commands.config_file import config_name
from xtk.commands.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from xtk.artifacts.corpus_reader import Corpus
    from xtk.evaluation.generated_answers import AnswerScores


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


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Model to evaluate: a folder or hub id; - reads its path from standard input.", metavar="MODEL"
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Documents, one teacher cache, or, with --reward, prompts; none with --tasks. docs/how-"
            "to/data.md lists the formats.",
            metavar="DATA...",
        ),
    ] = None,
    compare_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Another model to evaluate on the same data; reports MODEL minus OTHER, paired by document. "
            "Repeatable.",
            metavar="OTHER",
        ),
    ] = None,
    teacher: Annotated[
        str,
        typer.Option(
            help="Teacher to compare with: adds top-1 agreement and divergences; options as in distill --teacher. A "
            "teacher cache as DATA does the same without scoring again.",
            metavar="MODEL[:KEY=VALUE,...]",
        ),
    ] = "",
    by_category: Annotated[
        bool,
        typer.Option(
            "--by-category",
            help="Also print the bits per byte of digits, spaces, punctuation, code and each writing system.",
        ),
    ] = False,
    reward: Annotated[
        str,
        typer.Option(
            help="Generate answers and score them: exact, boxed, regex, json, tests or a Python function. "
            "docs/reference/rewards.md lists the options.",
            metavar="NAME[:KEY=VALUE,...]|FILE.py:FUNCTION",
        ),
    ] = "",
    num_generations: Annotated[
        int,
        typer.Option(help="Answers per problem, for avg@n and pass@n; above 1 needs --temperature above 0.", min=1),
    ] = 1,
    temperature: shared_options.Temperature = 0.0,
    top_p: shared_options.TopP = 1.0,
    top_k: shared_options.TopK = 0,
    max_completion_length: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 512,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop string that ends an answer. Repeatable.", metavar="TEXT"),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of sampling and few-shot examples. With --tasks, 0 is the default seed of the harness."
        ),
    ] = 0,
    max_prompts: Annotated[
        int, typer.Option(help="Maximum number of problems (per task), taken from the start; 0: all.", min=0)
    ] = 0,
    prompt_template: shared_options.PromptTemplate = "",
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Wrap plain-text prompts as user messages in the model's chat template.",
        ),
    ] = False,
    chat_template_kwargs: shared_options.ChatTemplateKwargs = "",
    backend: Annotated[
        str, typer.Option(help="Engine that generates, in this process.", metavar="[transformers|vllm]")
    ] = "transformers",
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine argument of --backend vllm. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="Output file for the answers, one per line as JSON.", metavar="FILE.jsonl"),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks of lm-evaluation-harness, such as mmlu,gsm8k; they bring their own data. NAME=FOLDER "
            "reads local files of mmlu, humaneval_plus and mbpp_plus.",
            metavar="NAME[=FOLDER],...",
        ),
    ] = "",
    include_path: Annotated[
        str,
        typer.Option(help="Folder with additional tasks, as YAML files of lm-evaluation-harness.", metavar="FOLDER"),
    ] = "",
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Number of few-shot examples per problem. Default: that of the task.", min=0),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests per forward pass.", min=1)] = 8,
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the model's weights and computation; losses are summed in float64.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "float32",
    max_length: Annotated[
        int, typer.Option(help="Maximum number of tokens per window, up to the context length; 0: the context length.")
    ] = 0,
    batch_tokens: Annotated[
        int,
        typer.Option(help="Tokens per forward pass, padding included; more is faster and needs more memory.", min=1),
    ] = 8192,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Measure bits per byte, answer rewards or task scores.

    Bits per byte of a text are comparable between tokenizers. Documents longer than the context are scored in windows
    that overlap by half.

    Examples:
        xtk evaluate ./student heldout.jsonl --compare-to ./baseline
        xtk evaluate ./student gsm8k.jsonl --reward exact --num-generations 4 --temperature 1
    """
    from xtk.artifacts.corpus_reader import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.commands.load_models import check_models
    from xtk.errors import XtkError
    from xtk.name_registry import load_registered

    given = {name: value for name, value in locals().items() if name in context.params}
    terminal.set_quiet(quiet)
    data = data or []
    if bool(data) == bool(tasks):
        raise typer.BadParameter(
            "--tasks has its own data; remove DATA"
            if tasks
            else "DATA is missing; give documents or prompts after MODEL, or use --tasks"
        )
    if tasks and reward:
        raise typer.BadParameter("--tasks has its own metrics; remove --reward")
    _check_mode_options(context, TASKS_MODE if tasks else REWARD_MODE if reward else BITS_MODE)
    if [model, *(compare_to or []), *data].count("-") > 1:
        raise typer.BadParameter("only one of MODEL, --compare-to and DATA can be read from standard input (-)")
    names = [terminal.path_argument(name) for name in (model, *(compare_to or []))]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise XtkError("MODEL and --compare-to name the same model", where=twice, hint="give each model once")
    folders = {name: base_model_and_adapter(resolve_model_folder(name, with_weights=True)) for name in names}

    from xtk.models.causal_lm import DTYPES

    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    check_models(folders, given)
    if tasks:
        from xtk.commands.evaluate_tasks import evaluate_tasks

        evaluate_tasks(folders, given, as_json=as_json)
        return
    if reward:
        _answers(folders, Corpus(data, parse_columns_option(columns), max_document_bytes), given, as_json=as_json)
        return
    from xtk.commands.evaluate_bits_per_byte import evaluate_bits_per_byte

    evaluate_bits_per_byte(folders, data, given, as_json=as_json)


def _check_mode_options(context: typer.Context, mode: str) -> None:
    """Refuse options that have no effect in this mode.

    Raises:
        BadParameter: such options are set.
    """
    wrong = []
    for parameter in context.command.params:
        modes = [one for one, names in OPTIONS_BY_MODE.items() if parameter.name in names]
        source = context.get_parameter_source(str(parameter.name))
        if modes and mode not in modes and source is not None and source.name != "DEFAULT":
            wrong.append(f"--{config_name(parameter)} applies only to {' or '.join(modes)}")
    if wrong:
        raise typer.BadParameter(f"{'; '.join(wrong)}; this command measures {mode}: remove the option")


def _answers(
    folders: dict[str, tuple[Path, Path | None]], corpus: Corpus, given: dict[str, Any], *, as_json: bool
) -> None:
    """Generate answers with each model, score them and print the results."""
    import contextlib
    import json

    from xtk.artifacts.atomic_files import atomic_write
    from xtk.artifacts.write_locks import only_writer_of_path
    from xtk.commands.evaluate_tasks import answers_path
    from xtk.errors import XtkError
    from xtk.evaluation.generated_answers import check_rewards_apply, evaluate_answers
    from xtk.name_registry import load_registered
    from xtk.rewards.reward_spec import WeightedRewards, parse_reward
    from xtk.rollouts import GENERATORS
    from xtk.rollouts.generator_interface import GeneratorConfig, SamplingConfig
    from xtk.rollouts.prompts import PromptFormat, read_prompt_template, read_prompts, read_template_arguments
    from xtk.rollouts.rollout_record import Prompt, Rollout
    from xtk.teachers.backend_cli_options import backend_options
    from xtk.tokens.tokenizer import Tokenizer

    backend = given["backend"]
    if backend == "server":
        raise XtkError(
            "xtk evaluate does not support --backend server", hint="use --backend transformers or --backend vllm"
        )
    writers = load_registered(GENERATORS, backend, "backend")
    sampling = SamplingConfig(
        given["temperature"], given["top_p"], given["top_k"], given["max_completion_length"], tuple(given["stop"] or ())
    )
    rewards = WeightedRewards([parse_reward(given["reward"])])
    arguments = read_template_arguments(given["chat_template_kwargs"])
    form = PromptFormat(read_prompt_template(given["prompt_template"]), as_chat=given["apply_chat_template"])
    prompts = read_prompts(corpus, given["max_prompts"] or None, form)
    check_rewards_apply(rewards, prompts)
    path = answers_path(given["output"])
    results: dict[str, AnswerScores] = {}
    with contextlib.ExitStack() as held:
        stream = None
        if path is not None:
            held.enter_context(only_writer_of_path(path.resolve(), "file"))
            answers_path(given["output"])  # another command may have written it since
            temporary = held.enter_context(atomic_write(path, keep_others=True))
            stream = held.enter_context(temporary.open("w", encoding="utf-8"))
        for name, (folder, adapter) in folders.items():

            def keep(prompt: Prompt, one: Rollout, name: str = name) -> None:
                if stream is not None:
                    text = "".join(segment.text for segment in one.document.segments if segment.train)
                    read = "\n".join(segment.text for segment in prompt.document.segments)
                    worth = None if math.isnan(one.reward) else one.reward
                    line = {"model": name, "problem": prompt.number, "sample": one.sample, "prompt": read,
                            "answer": text, "reward": worth, "finish_reason": one.finish_reason}  # fmt: skip
                    stream.write(json.dumps(line, ensure_ascii=False) + "\n")

            tokenizer = Tokenizer(folder, name=name)
            own = backend_options(backend, given["engine"] or [], [], 1, adapter)
            request = GeneratorConfig(
                folder, name, tokenizer, given["dtype"], given["batch_tokens"], given["trust_remote_code"], own
            )
            results[name] = evaluate_answers(
                prompts, writers.open(request), tokenizer, sampling, rewards,
                num_generations=given["num_generations"], seed=given["seed"], template_arguments=arguments,
                    on_answer=keep,
            )  # fmt: skip
        if stream is not None:
            stream.flush()
    _print_reward_results(results, corpus, given, as_json=as_json)


def _print_reward_results(
    results: dict[str, AnswerScores], corpus: Corpus, given: dict[str, Any], *, as_json: bool
) -> None:
    """Print a JSON line per model, or a table."""
    data = corpus.sources
    first = next(iter(results))
    lines: list[dict[str, Any]] = []
    for name, found in results.items():
        line: dict[str, Any] = {"model": name, "data": data[0] if len(data) == 1 else data, "reward": given["reward"]}
        line |= {"temperature": given["temperature"], "seed": given["seed"], "limit": given["max_prompts"]}
        line |= found.to_json()
        if name != first:
            gain = results[first].difference(found)
            line["difference"] = gain.value
            line["difference_error"] = None if math.isnan(gain.error) else gain.error
        lines.append(line)
    if as_json:
        for line in lines:
            terminal.result_json(line)
        return
    measures = [name for name in lines[0] if "@" in name and not name.endswith("_error")]
    rows = [
        [str(line["model"]), *(format_with_error(line[name], line[f"{name}_error"]) for name in measures),
         format_with_error(line["difference"], line["difference_error"], "+") if "difference" in line else "",
         f"{line['problems']:,}", f"{line['mean_length']:.1f}", f"{line['truncated_fraction']:.1%}"]
        for line in lines
    ]  # fmt: skip
    heads = ["model", *measures, f"{first} minus this", "problems", "mean tokens", "truncated"]
    print_table(f"{given['reward']} on {', '.join(data)}", heads, rows)
