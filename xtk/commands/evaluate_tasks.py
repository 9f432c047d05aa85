"""`xtk evaluate-tasks`: tasks of lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from xtk import terminal
from xtk.commands.evaluate import EvaluateOptions
from xtk.commands.evaluate_answers import EvaluateAnswersOptions
from xtk.commands.evaluated_models import (
    MODEL_OPTIONS,
    EvaluatedModelOptions,
    answers_file,
    difference_heading,
    load_model_and_tokenizer,
    models_to_evaluate,
)
from xtk.options.declaration import REQUIRED, Heading, argument, option, redeclared
from xtk.options.shared import PromptOptions
from xtk.terminal_tables import format_with_error, print_table


@dataclass(frozen=True, kw_only=True)
class EvaluateTasksOptions(EvaluatedModelOptions):
    """Options of `xtk evaluate-tasks`."""

    HEADINGS = (
        Heading(
            "Tasks",
            ("include_path", "num_fewshot", "max_prompts", "apply_chat_template", "chat_template_kwargs", "seed"),
        ),
        Heading("Model", (*MODEL_OPTIONS, "max_length", "batch_size")),
    )

    tasks: tuple[str, ...] = argument(
        REQUIRED,
        "Tasks of lm-evaluation-harness, such as mmlu,gsm8k; they bring their own data.",
        metavar="TASK...",
    )
    include_path: str = option(
        "", "Folder with additional tasks, as YAML files of lm-evaluation-harness.", metavar="FOLDER"
    )
    num_fewshot: int | None = option(None, "Number of few-shot examples per problem. Default: that of the task.", min=0)
    batch_size: int = option(8, "Requests per forward pass.", min=1)
    max_prompts: int = redeclared(
        EvaluateAnswersOptions, "max_prompts", help="Maximum number of problems per task, from the start; 0: all."
    )
    apply_chat_template: bool = redeclared(PromptOptions, "apply_chat_template")
    chat_template_kwargs: str = redeclared(PromptOptions, "chat_template_kwargs")
    seed: int = option(0, "Random seed of sampling and few-shot examples; 0: the default seed of the harness.")
    max_length: int = redeclared(EvaluateOptions, "max_length")
    output: str = redeclared(EvaluateAnswersOptions, "output")


def evaluate_tasks(options: EvaluateTasksOptions) -> None:
    """Measure scores on tasks of lm-evaluation-harness.

    Examples:
        xtk evaluate-tasks ./student mmlu,gsm8k --compare-to ./baseline
        xtk evaluate-tasks ./student own_task --include-path ./tasks --max-prompts 100 -o answers.jsonl
    """
    from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig, HarnessResults, parse_task_names
    from xtk.models.causal_lm import free_device_memory, max_context_length
    from xtk.rollouts.prompts import read_template_arguments

    terminal.set_quiet(options.quiet)
    text = ",".join(options.tasks)
    tasks = parse_task_names(text)
    if not tasks:
        raise typer.BadParameter(f"{text!r} has no task; give names, such as gsm8k,mmlu")
    models = models_to_evaluate(options)
    config = HarnessConfig(
        tasks=tasks,
        include_path=options.include_path,
        num_fewshot=options.num_fewshot,
        limit=options.max_prompts,
        batch_size=options.batch_size,
        apply_chat_template=options.apply_chat_template,
        template_arguments=read_template_arguments(options.chat_template_kwargs),
        seed=options.seed,
    )
    results: dict[str, HarnessResults] = {}
    with answers_file(options.output) as write:
        harness = Harness(config)
        for name, places in models.items():
            model, tokenizer = load_model_and_tokenizer(name, places, options)
            limits = [limit for limit in (max_context_length(model.config), options.max_length) if limit]
            results[name] = harness.evaluate(model, tokenizer, max_length=min(limits, default=None))
            for sample in results[name].samples:
                write({"model": name, **sample})
            del model
            free_device_memory()  # for the next one
    _print_task_results(results, config.tasks, options)


def _print_task_results(results: dict[str, Any], tasks: tuple[str, ...], options: EvaluateTasksOptions) -> None:
    first = next(iter(results))
    lines = {name: result.to_json(results[first] if name != first else None) for name, result in results.items()}
    if options.as_json:
        for name, line in lines.items():
            record: dict[str, Any] = {"model": name, "data": list(tasks), "seed": options.seed}
            if name != first:
                record["difference_of"] = difference_heading([first, name])
            terminal.result_json(record | {"limit": options.max_prompts, "results": line})
        return
    rows = []
    for task in results[first].top_level_tasks:
        for metric in dict.fromkeys(metric for result in results.values() for metric in result.metrics.get(task, {})):
            for name, line in lines.items():
                scores = line.get(task, {})
                gain = scores.get(f"{metric}_difference")
                rows.append([
                    task, metric, name, format_with_error(scores.get(metric), scores.get(f"{metric}_error")),
                    "" if gain is None else format_with_error(gain, scores[f"{metric}_difference_error"], "+"),
                    str(scores.get("num_fewshot", "")), f"{scores['problems']:,}" if "problems" in scores else "",
                ])  # fmt: skip
    heads = ["task", "metric", "model", "value", difference_heading(list(results)), "few-shot examples", "problems"]
    print_table(f"lm-evaluation-harness: {', '.join(tasks)}", heads, rows)
