"""`xtk rollout`: sample completions from a student, with tokens and log-probabilities."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.options.declaration import (
    REQUIRED,
    CommandOptions,
    Heading,
    argument,
    flags_of_set_options,
    option,
    options_of,
    output_option,
    redeclared,
)
from xtk.options.shared import (
    MAX_COUNT,
    MAX_GENERATIONS,
    MODEL_DTYPES,
    ConfigOption,
    CorpusOptions,
    DocumentColumnOptions,
    ForceOption,
    JsonOption,
    PromptOptions,
    QuietOption,
    RewardOptions,
    SamplingOptions,
    ServerOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
)
from xtk.progress import Progress
from xtk.rollouts import GENERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xtk.files.output import Output
    from xtk.rollouts.generator_interface import Generator
    from xtk.rollouts.rollout_jsonl import RolloutStatistics
    from xtk.rollouts.rollout_record import Prompt, Rollout
    from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(
    SamplingOptions,
    RewardOptions,
    PromptOptions,
    CorpusOptions,
    DocumentColumnOptions,
    ServerOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
    ForceOption,
    JsonOption,
    QuietOption,
    ConfigOption,
    CommandOptions,
):
    """Options of `xtk rollout`."""

    MAIN_OPTIONS = (
        "output", "num_generations", "max_completion_length", "temperature", "reward", "columns",
        "apply_chat_template", "max_prompts", "backend", "seed",
    )  # fmt: skip
    HEADINGS = (
        Heading("Data", (CorpusOptions, DocumentColumnOptions, "max_prompts", PromptOptions)),
        Heading("Sampling", ("num_generations", SamplingOptions, "seed", "top_logprobs")),
        Heading("Rewards and environment", (RewardOptions,)),
        Heading(
            "Student", ("backend", "engine", ServerOptions, "dtype", "start_token", "batch_tokens", "trust_remote_code")
        ),
    )

    student: str = argument(
        REQUIRED,
        "Student model: a folder, a GGUF file or a hub id; - reads its path from standard input.",
        metavar="STUDENT",
    )
    prompts: tuple[str, ...] = argument(
        REQUIRED,
        "Data with a prompt, text (all of it is the prompt) or messages (the last answer is dropped). - reads rows "
        "or a path from standard input.",
        metavar="PROMPTS...",
    )
    route_column: str = redeclared(
        DocumentColumnOptions,
        "route_column",
        help="Data column that names each prompt's teacher, copied to the output. For --combine-teachers route.",
    )
    output: str = output_option("Output file, one rollout per line as JSON.", "FILE.jsonl")
    num_generations: int = option(1, "Number of rollouts per prompt.", min=1, max=MAX_GENERATIONS)
    seed: int = option(0, "Random seed; a rollout depends only on the seed, its prompt's index and its own index.")
    top_logprobs: int = option(
        0,
        "Also store the student's K most likely tokens per position, as candidate_ids; 0: none. A teacher with the "
        "same tokenizer scores them: cache-teacher --support candidates.",
        metavar="K",
    )
    max_prompts: int = option(
        0, "Maximum number of prompts, taken from the start of the data; 0: all.", min=0, max=MAX_COUNT
    )
    backend: str = option(
        "transformers",
        "Engine that generates: transformers or vllm (both in this process), or a vLLM server.",
        metavar=f"[{'|'.join(GENERATORS)}]",
    )
    engine: tuple[str, ...] = option(
        (),
        "With --backend vllm: engine argument, such as gpu_memory_utilization=0.5. Repeatable.",
        metavar="NAME=VALUE",
    )
    dtype: str = option(
        "auto",
        "Data type of the student; auto: that of the checkpoint on a GPU with bf16, float32 on a CPU.",
        choices=MODEL_DTYPES,
    )
    batch_tokens: int = option(8192, "Tokens of prompts and completions generated at once, padding included.", min=1)


def rollout(options: RolloutOptions) -> None:
    """Sample completions of prompts from a student.

    Each line of the output has a prompt, a completion, the sampled tokens and their log-probabilities; with --reward
    also rewards and advantages. It is data for cache-teacher.

    Examples:
        xtk rollout ./student prompts.jsonl --num-generations 4 -o rollouts.jsonl
        xtk rollout ./student prompts.jsonl -o r.jsonl | xtk cache-teacher ./teacher - -o cache
    """
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.models.precision import resolve_dtype
    from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered

    terminal.set_quiet(options.quiet)
    _check_options(options)
    student = terminal.path_argument(options.student)
    output = _checked_output(options.output, [student, *options.prompts], force=options.force)
    corpus = Corpus(
        options.prompts,
        parse_columns_option(options.columns, weight=options.weight_column, route=options.route_column),
        options.max_document_bytes,
    )
    backend: type[Generator] = load_registered(GENERATORS, options.backend, "backend")
    folder, adapter = base_model_and_adapter(resolve_model_folder(student, with_weights=not backend.uses_servers))

    from xtk.engines.backend import BackendConfig, backend_options
    from xtk.rewards.reward_spec import WeightedRewards, parse_reward
    from xtk.rollouts.environments import load_environment
    from xtk.rollouts.generator_interface import SamplingConfig
    from xtk.rollouts.prompts import (
        PromptFormat,
        check_rewards_apply,
        read_prompt_template,
        read_prompts,
        read_template_arguments,
    )
    from xtk.rollouts.rollout_generation import generate_rollouts
    from xtk.text.tokenizer import Tokenizer

    options = dataclasses.replace(options, dtype=resolve_dtype(options.dtype, None if backend.uses_servers else folder))
    own_options = backend_options(
        GENERATORS,
        options.backend,
        engine=options.engine,
        servers=options.server,
        concurrency=options.concurrency,
        adapter=adapter,
    )
    sampling = options_of(SamplingConfig, options)
    rewards = WeightedRewards([parse_reward(text) for text in options.reward])
    environment = load_environment(options.environment) if options.environment else None
    template_arguments = read_template_arguments(options.chat_template_kwargs)
    tokenizer = Tokenizer(folder, name=student, start_token=options.start_token, adapter=adapter)
    form = PromptFormat(read_prompt_template(options.prompt_template), as_chat=options.apply_chat_template)
    prompts = read_prompts(corpus, options.max_prompts or None, form)
    check_rewards_apply(rewards, prompts)
    weights = options.server if backend.uses_servers else [place for place in (folder, adapter) if place]
    request = _request_fingerprint(options, weights, tokenizer, prompts, template_arguments)

    def generate(generator: Generator) -> Iterator[tuple[Prompt, list[Rollout]]]:
        size = max(1, backend.completions_at_once // options.num_generations)
        for start in range(0, len(prompts), size):
            group = prompts[start : start + size]
            generated = generate_rollouts(
                group, generator, tokenizer, sampling, num_generations=options.num_generations, seed=options.seed,
                rewards=rewards if rewards.specs else None, environment=environment, max_turns=options.max_turns,
                scale_rewards=options.scale_rewards, template_arguments=template_arguments,
            )  # fmt: skip
            for prompt in group:
                yield prompt, [sample for sample in generated if sample.prompt == prompt.number]

    with output.lock():
        figures = output.find_finished(request)  # a file may have appeared since the first check
        if figures is None:
            model = ModelRef(folder, adapter, options.dtype, options.trust_remote_code, student)
            config = BackendConfig(model, tokenizer, options.batch_tokens, own_options)
            generator = backend.open(config)
            rollouts = generate(generator)
            figures = _write_rollouts(output.path, rollouts, len(prompts), corpus.columns, request, generator)
            for name, count in rewards.unscored.items():
                terminal.note(f"rollout: {count:,} rollouts have no {name} reward; their data lacks what it needs")
    summary = figures.summary()
    terminal.note(_describe(summary, with_environment=bool(options.environment)))
    terminal.result_artifact({"path": options.output, "kind": "rollouts", **summary}, as_json=options.as_json)


def _check_options(options: RolloutOptions) -> None:
    if options.student == "-" and "-" in options.prompts:
        raise typer.BadParameter("only one of STUDENT and PROMPTS can be read from standard input (-)")
    if not options.environment and flags_of_set_options(options, ["max_turns"]):
        raise typer.BadParameter("--max-turns needs --environment; add it, or remove --max-turns")


def _describe(summary: dict[str, Any], *, with_environment: bool) -> str:
    """Return one line about rollouts."""
    text = (
        f"{summary['rollouts']:,} rollouts, {summary['mean_length']:.1f} tokens each, "
        f"{summary['truncated_fraction']:.1%} truncated"
    )
    if with_environment:
        text += f", {summary['mean_turns']:.1f} turns, {summary['environment_token_fraction']:.1%} from tools"
    return text if summary["mean_reward"] is None else f"{text}, mean reward {summary['mean_reward']:.4f}"


def _checked_output(path: str, inputs: list[str], *, force: bool) -> Output[RolloutStatistics]:
    """Return the output, whose request is not compared yet."""
    from xtk.errors import XtkError
    from xtk.files.output import Output
    from xtk.rollouts.rollout_jsonl import ROLLOUTS

    if Path(path).suffix != ".jsonl":
        raise XtkError("the name of the output file must end in .jsonl", where=path, hint="use -o FILE.jsonl")
    output = Output(Path(path), ROLLOUTS, force=force, inputs=inputs)
    output.find_finished()
    return output


def _write_rollouts(
    path: Path,
    groups: Iterator[tuple[Prompt, list[Rollout]]],
    count: int,
    columns: dict[str, str],
    request: str,
    generator: Generator,
) -> RolloutStatistics:
    from xtk.errors import XtkError
    from xtk.files.output import write_output
    from xtk.rollouts.rollout_jsonl import RolloutStatistics, json_line, number_line, rollout_to_json

    figures, waiting = RolloutStatistics(), list[dict[str, Any]]()
    with (
        write_output(path) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
        Progress("rollout", count, "prompts") as progress,
    ):
        progress.get_detail = lambda: f"{max(figures.tokens, generator.num_sampled):,} tokens"
        for prompt, rollouts in groups:
            for one in rollouts:
                if one.unusable_reason:
                    figures.dropped[one.unusable_reason] = figures.dropped.get(one.unusable_reason, 0) + 1
                    continue
                if waiting:
                    stream.write(json_line(number_line(waiting.pop(), figures.rollouts - 1, is_last=False)))
                waiting.append(rollout_to_json(one, prompt, columns, request))
                figures.add_record(waiting[0])
            progress.advance(1)
        if waiting:
            stream.write(json_line(number_line(waiting.pop(), figures.rollouts - 1, is_last=True)))
        stream.flush()
        for why, number in figures.dropped.items():
            terminal.note(f"rollout: left out {number:,} rollouts: {why}")
        if not figures.rollouts:
            raise XtkError(
                "nothing was written: no rollout can be used",
                where=str(path),
                hint="see the notes above, which give the reason for each rollout left out",
            )
    return figures


def _request_fingerprint(
    options: RolloutOptions,
    weights: Sequence[Path | str],
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    template_arguments: dict[str, Any],
) -> str:
    """Return the fingerprint of what decides the rollouts; `weights` are folders, or addresses of servers."""
    from xtk.files.atomic_files import canonical_json, sha256
    from xtk.models.resolver import weights_fingerprint
    from xtk.rewards.reward_spec import paths_as_checksums
    from xtk.rollouts.generator_interface import SamplingConfig

    identities = [weights_fingerprint(place) if isinstance(place, Path) else place for place in weights]
    request = {
        "student": [
            identities,
            tokenizer.fingerprint,
            tokenizer.template_fingerprint,
            dict(tokenizer.special_token_ids),
            list(tokenizer.start_ids),
        ],
        "prompts": _prompts_fingerprint(prompts),
        "sampling": dataclasses.asdict(options_of(SamplingConfig, options)),
        "num_generations": options.num_generations,
        "seed": options.seed,
        "rewards": [[text, paths_as_checksums(text)] for text in options.reward],
        "scale_rewards": options.scale_rewards,
        "environment": [options.environment, paths_as_checksums(options.environment), options.max_turns]
        if options.environment
        else None,
        "template_arguments": template_arguments,
        "backend": [options.backend, sorted(options.engine), options.dtype, options.batch_tokens],
    }
    return sha256(canonical_json(request))[: len("sha256:") + 16]


def _prompts_fingerprint(prompts: list[Prompt]) -> str:
    from xtk.rollouts.rollout_jsonl import document_fields

    digest = hashlib.sha256()
    for prompt in prompts:
        contents = [dict(prompt.record), document_fields(prompt.document)]
        digest.update(json.dumps(contents, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
