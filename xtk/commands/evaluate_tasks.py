"""`xtk evaluate --tasks`: tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.commands.load_models import load_model_and_tokenizer
from xtk.errors import XtkError
from xtk.files.output import check_output_path
from xtk.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    from xtk.commands.evaluate_options import EvaluateOptions


def evaluate_tasks(folders: dict[str, tuple[Path, Path | None]], options: EvaluateOptions) -> None:
    """Evaluate each model on the tasks, and print the scores.

    Args:
        folders: {name: (model, adapter)}.
    """
    from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig, HarnessResults
    from xtk.evaluation.local_task_data import parse_tasks
    from xtk.files.output import write_output, writer_lock
    from xtk.models.causal_lm import max_context_length
    from xtk.rollouts.prompts import read_template_arguments

    tasks, local = parse_tasks(options.tasks)
    config = HarnessConfig(
        tasks=tasks,
        task_folders=local,
        include_path=options.include_path,
        num_fewshot=options.num_fewshot,
        limit=options.max_prompts,
        batch_size=options.batch_size,
        apply_chat_template=options.apply_chat_template,
        template_arguments=read_template_arguments(options.chat_template_kwargs),
        seed=options.seed,
    )
    path = answers_path(options.output)
    harness = Harness(config)
    results: dict[str, HarnessResults] = {}
    with contextlib.ExitStack() as held:
        stream = None
        if path is not None:
            held.enter_context(writer_lock(path, "file"))
            answers_path(options.output)  # another command may have written it since
            temporary = held.enter_context(write_output(path))
            stream = held.enter_context(temporary.open("w", encoding="utf-8"))
        for name, places in folders.items():
            model, tokenizer = load_model_and_tokenizer(name, places, options)
            limits = [limit for limit in (max_context_length(model.config), options.max_length) if limit]
            evaluated = harness.evaluate(model, tokenizer, max_length=min(limits, default=None))
            results[name] = evaluated
            for sample in evaluated.samples if stream is not None else ():
                assert stream is not None
                stream.write(json.dumps({"model": name, **sample}, ensure_ascii=False) + "\n")
            del model
        if stream is not None:
            stream.flush()
    _print_task_results(results, config.tasks, options)


def _print_task_results(results: dict[str, Any], tasks: tuple[str, ...], options: EvaluateOptions) -> None:
    first = next(iter(results))
    lines = {name: result.to_json(results[first] if name != first else None) for name, result in results.items()}
    if options.as_json:
        for name, line in lines.items():
            record: dict[str, Any] = {"model": name, "data": list(tasks), "seed": options.seed}
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
    heads = ["task", "metric", "model", "value", f"{first} minus this", "few-shot examples", "problems"]
    print_table(f"lm-evaluation-harness: {', '.join(tasks)}", heads, rows)


def answers_path(output: str) -> Path | None:
    """Return the output file for answers; None if there is none."""
    if not output:
        return None
    path = Path(output)
    check_output_path(path)
    if path.suffix != ".jsonl" or path.exists() or path.is_symlink():
        exists = path.exists() or path.is_symlink()
        what = "the output file exists already" if exists else "the name of the output file must end in .jsonl"
        raise XtkError(what, where=str(path), hint="use -o with a new file name" if exists else "use -o FILE.jsonl")
    return path
