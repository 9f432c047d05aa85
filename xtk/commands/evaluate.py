"""`xtk evaluate`: bits per byte, rewards of generated answers, or lm-evaluation-harness tasks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.commands.evaluate_options import BITS_MODE, OPTIONS_BY_MODE, REWARD_MODE, TASKS_MODE, EvaluateOptions
from xtk.options.declaration import (
    flags_of_set_options,
    options_of,
)
from xtk.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from xtk.data.corpus_reader import Corpus
    from xtk.evaluation.generated_answers import AnswerScores


def evaluate(options: EvaluateOptions) -> None:
    """Measure bits per byte, answer rewards or task scores.

    Bits per byte of a text are comparable between tokenizers. Documents longer than the context are scored in windows
    that overlap by half.

    Examples:
        xtk evaluate ./student heldout.jsonl --compare-to ./baseline
        xtk evaluate ./student gsm8k.jsonl --reward exact --num-generations 4 --temperature 1
    """
    from xtk.commands.load_models import check_models
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.errors import XtkError
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered

    terminal.set_quiet(options.quiet)
    if bool(options.data) == bool(options.tasks):
        raise typer.BadParameter(
            "--tasks has its own data; remove DATA"
            if options.tasks
            else "DATA is missing; give documents or prompts after MODEL, or use --tasks"
        )
    if options.tasks and options.reward:
        raise typer.BadParameter("--tasks has its own metrics; remove --reward")
    if options.tasks and not options.tasks.strip(", "):
        raise typer.BadParameter(f"--tasks {options.tasks!r} has no task; give names, such as gsm8k,mmlu")
    if options.reward and options.temperature == 0 and (flags := flags_of_set_options(options, ["top_p", "top_k"])):
        raise typer.BadParameter(f"--temperature 0 does not sample; remove {' and '.join(flags)}")
    _check_mode_options(options, TASKS_MODE if options.tasks else REWARD_MODE if options.reward else BITS_MODE)
    if [options.model, *options.compare_to, *options.data].count("-") > 1:
        raise typer.BadParameter("only one of MODEL, --compare-to and DATA can be read from standard input (-)")
    names = [terminal.path_argument(name) for name in (options.model, *options.compare_to)]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise XtkError("MODEL and --compare-to name the same model", where=twice, hint="give each model once")
    folders = {name: base_model_and_adapter(resolve_model_folder(name, with_weights=True)) for name in names}

    from xtk.models.causal_lm import DTYPES

    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), options.dtype, "dtype")
    check_models(folders, options)
    if options.tasks:
        from xtk.commands.evaluate_tasks import evaluate_tasks

        evaluate_tasks(folders, options)
        return
    if options.reward:
        corpus = Corpus(options.data, parse_columns_option(options.columns), options.max_document_bytes)
        _answers(folders, corpus, options)
        return
    from xtk.commands.evaluate_bits_per_byte import evaluate_bits_per_byte

    evaluate_bits_per_byte(folders, options)


def _check_mode_options(options: EvaluateOptions, mode: str) -> None:
    """Refuse options that have no effect in this mode.

    Raises:
        BadParameter: such options are set.
    """
    known = sorted(set().union(*OPTIONS_BY_MODE.values()) - OPTIONS_BY_MODE[mode])
    failure = [
        f"{flag} applies only to {' or '.join(one for one, names in OPTIONS_BY_MODE.items() if name in names)}"
        for name in known
        for flag in flags_of_set_options(options, [name], including_defaults=True)
    ]
    if failure:
        raise typer.BadParameter(f"{'; '.join(failure)}; this command measures {mode}: remove the option")


def _answers(folders: dict[str, tuple[Path, Path | None]], corpus: Corpus, options: EvaluateOptions) -> None:
    """Generate answers with each model, score them and print the results."""
    import contextlib
    import json

    from xtk.commands.evaluate_tasks import answers_path
    from xtk.engines.backend import BackendConfig, backend_options
    from xtk.errors import XtkError
    from xtk.evaluation.generated_answers import evaluate_answers
    from xtk.files.output import write_output, writer_lock
    from xtk.name_registry import load_registered
    from xtk.rewards.reward_spec import WeightedRewards, parse_reward
    from xtk.rollouts import GENERATORS
    from xtk.rollouts.generator_interface import SamplingConfig
    from xtk.rollouts.prompts import (
        PromptFormat,
        check_rewards_apply,
        read_prompt_template,
        read_prompts,
        read_template_arguments,
    )
    from xtk.rollouts.rollout_record import Prompt, Rollout
    from xtk.text.tokenizer import Tokenizer

    writers = load_registered(GENERATORS, options.backend, "backend")
    if writers.uses_servers:
        raise XtkError(
            f"xtk evaluate does not support --backend {options.backend}",
            hint="use --backend transformers or --backend vllm",
        )
    sampling = options_of(SamplingConfig, options)
    rewards = WeightedRewards([parse_reward(options.reward)])
    arguments = read_template_arguments(options.chat_template_kwargs)
    form = PromptFormat(read_prompt_template(options.prompt_template), as_chat=options.apply_chat_template)
    prompts = read_prompts(corpus, options.max_prompts or None, form)
    check_rewards_apply(rewards, prompts)
    path = answers_path(options.output)
    results: dict[str, AnswerScores] = {}
    with contextlib.ExitStack() as held:
        stream = None
        if path is not None:
            held.enter_context(writer_lock(path, "file"))
            answers_path(options.output)  # another command may have written it since
            temporary = held.enter_context(write_output(path))
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

            tokenizer = Tokenizer(folder, name=name, start_token=options.start_token)
            own = backend_options(GENERATORS, options.backend, engine=options.engine, adapter=adapter)
            request = BackendConfig(
                folder, name, tokenizer, options.dtype, options.batch_tokens, options.trust_remote_code, own
            )
            # An engine keeps the memory of a GPU, which the next model needs.
            with contextlib.closing(writers.open(request)) as writer:
                results[name] = evaluate_answers(
                    prompts, writer, tokenizer, sampling, rewards, num_generations=options.num_generations,
                    seed=options.seed, template_arguments=arguments, on_answer=keep,
                )  # fmt: skip
        if stream is not None:
            stream.flush()
    _print_reward_results(results, corpus, options)


def _print_reward_results(results: dict[str, AnswerScores], corpus: Corpus, options: EvaluateOptions) -> None:
    """Print a JSON line per model, or a table."""
    data = corpus.sources
    first = next(iter(results))
    lines: list[dict[str, Any]] = []
    for name, result in results.items():
        line: dict[str, Any] = {"model": name, "data": data[0] if len(data) == 1 else data, "reward": options.reward}
        line |= {"temperature": options.temperature, "seed": options.seed, "limit": options.max_prompts}
        line |= result.to_json()
        if name != first:
            gain = results[first].difference(result)
            line["difference"] = gain.value
            line["difference_error"] = None if math.isnan(gain.error) else gain.error
        lines.append(line)
    if options.as_json:
        for line in lines:
            terminal.result_json(line)
        return
    measures = [name for name in lines[0] if "@" in name and not name.endswith("_error")]
    rows = [
        [str(line["model"]), *(format_with_error(line[name], line[f"{name}_error"]) for name in measures),
         format_with_error(line["difference"], line["difference_error"], "+") if "difference" in line else "",
         f"{line['problems']:,}", str(line["unscored"] or ""), str(line["prompts_too_long"] or ""),
         f"{line['mean_length']:.1f}", f"{line['truncated_fraction']:.1%}"]
        for line in lines
    ]  # fmt: skip
    heads = ["model", *measures, f"{first} minus this", "problems", "not scored", "too long (wrong)",
             "mean tokens", "truncated"]  # fmt: skip
    print_table(f"{options.reward} on {', '.join(data)}", heads, rows)
