"""`xtk evaluate-answers`: rewards of generated answers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.commands.evaluate import EvaluateOptions
from xtk.commands.evaluated_models import (
    MODEL_OPTIONS,
    EvaluatedModelOptions,
    answers_file,
    difference_heading,
    models_to_evaluate,
)
from xtk.options.declaration import (
    REQUIRED,
    Heading,
    argument,
    flags_of_set_options,
    option,
    options_of,
    output_option,
    redeclared,
)
from xtk.options.shared import MAX_COUNT, MAX_GENERATIONS, CorpusOptions, PromptOptions, SamplingOptions
from xtk.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    from xtk.data.corpus_reader import Corpus
    from xtk.evaluation.generated_answers import AnswerScores


@dataclass(frozen=True, kw_only=True)
class EvaluateAnswersOptions(SamplingOptions, PromptOptions, CorpusOptions, EvaluatedModelOptions):
    """Options of `xtk evaluate-answers`."""

    MAIN_OPTIONS = (
        "reward", "output", "max_prompts", "num_generations", "max_completion_length", "temperature", "columns",
        "apply_chat_template", "compare_to", "as_json",
    )  # fmt: skip
    HEADINGS = (
        Heading("Problems", ("reward", CorpusOptions, "max_prompts", PromptOptions)),
        Heading("Generation", ("num_generations", SamplingOptions, "seed", "backend", "engine", "batch_tokens")),
        Heading("Model", MODEL_OPTIONS),
    )

    data: tuple[str, ...] = argument(
        REQUIRED, "Prompts with what the reward needs. docs/how-to/data.md lists the formats.", metavar="DATA..."
    )
    reward: str = option(
        REQUIRED,
        "Score of an answer: gsm8k (answer after ####), boxed, regex, json, tests or a Python function. "
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
    seed: int = option(0, "Random seed of sampling.")
    max_prompts: int = option(0, "Maximum number of problems, taken from the start; 0: all.", min=0, max=MAX_COUNT)
    backend: str = option("transformers", "Engine that generates, in this process.", metavar="[transformers|vllm]")
    engine: tuple[str, ...] = option((), "Engine argument of --backend vllm. Repeatable.", metavar="NAME=VALUE")
    batch_tokens: int = redeclared(EvaluateOptions, "batch_tokens")
    output: str = output_option("Output file for the answers, one per line as JSON.", "FILE.jsonl", "")


def evaluate_answers(options: EvaluateAnswersOptions) -> None:
    """Generate answers to problems, and score them with a reward.

    Examples:
        xtk evaluate-answers ./student gsm8k.jsonl --reward gsm8k --compare-to ./baseline
        xtk evaluate-answers ./student gsm8k.jsonl --reward gsm8k --num-generations 4 --temperature 1
    """
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.engines.backend import BackendConfig, backend_options
    from xtk.errors import XtkError
    from xtk.evaluation.generated_answers import evaluate_answers as evaluate_model
    from xtk.models.causal_lm import free_device_memory
    from xtk.models.precision import resolve_dtype
    from xtk.models.resolver import ModelRef
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

    terminal.set_quiet(options.quiet)
    if options.temperature == 0 and (flags := flags_of_set_options(options, ["top_p", "top_k"])):
        raise typer.BadParameter(f"--temperature 0 does not sample; remove {' and '.join(flags)}")
    models = models_to_evaluate(options, options.data, backend=options.backend)
    writers = load_registered(GENERATORS, options.backend, "backend")
    if writers.uses_servers:
        raise XtkError(
            f"xtk evaluate-answers does not support --backend {options.backend}",
            hint="use --backend transformers or --backend vllm",
        )
    corpus = Corpus(options.data, parse_columns_option(options.columns), options.max_document_bytes)
    sampling = options_of(SamplingConfig, options)
    rewards = WeightedRewards([parse_reward(options.reward)])
    arguments = read_template_arguments(options.chat_template_kwargs)
    form = PromptFormat(read_prompt_template(options.prompt_template), as_chat=options.apply_chat_template)
    prompts = read_prompts(corpus, options.max_prompts or None, form)
    check_rewards_apply(rewards, prompts)
    results: dict[str, AnswerScores] = {}
    with answers_file(options.output) as write:
        for name, (folder, adapter) in models.items():

            def keep(prompt: Prompt, one: Rollout, name: str = name) -> None:
                text = "".join(segment.text for segment in one.document.segments if segment.train)
                read = "\n".join(segment.text for segment in prompt.document.segments)
                worth = None if math.isnan(one.reward) else one.reward
                write({"model": name, "problem": prompt.number, "sample": one.sample, "prompt": read,
                       "answer": text, "reward": worth, "finish_reason": one.finish_reason})  # fmt: skip

            tokenizer = Tokenizer(folder, name=name, start_token=options.start_token, adapter=adapter)
            own = backend_options(GENERATORS, options.backend, engine=options.engine, adapter=adapter)
            dtype = resolve_dtype(options.dtype, folder)
            model = ModelRef(folder, adapter, dtype, options.trust_remote_code, name)
            request = BackendConfig(model, tokenizer, options.batch_tokens, own)
            # An engine keeps the memory of a GPU, which the next model needs.
            with contextlib.closing(writers.open(request)) as writer:
                results[name] = evaluate_model(
                    prompts, writer, tokenizer, sampling, rewards, num_generations=options.num_generations,
                    seed=options.seed, template_arguments=arguments, on_answer=keep,
                )  # fmt: skip
            del writer
            free_device_memory()  # for the next one
    _print_reward_results(results, corpus, options)


def _print_reward_results(results: dict[str, AnswerScores], corpus: Corpus, options: EvaluateAnswersOptions) -> None:
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
            line["difference_of"] = difference_heading([first, name])
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
    heads = ["model", *measures, difference_heading(list(results)), "problems", "not scored", "too long (wrong)",
             "mean tokens", "truncated"]  # fmt: skip
    print_table(f"{options.reward} on {', '.join(data)}", heads, rows)
