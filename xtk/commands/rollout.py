"""`xtk rollout`: sample completions from a student, with tokens and log-probabilities."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import shared_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xtk.rollouts.rollout_jsonl import RolloutStatistics
    from xtk.rollouts.rollout_record import Prompt, Rollout

COMPLETIONS_PER_BATCH = 256


def rollout(
    student: Annotated[
        str,
        typer.Argument(
            help="Student model: a folder or hub id; - reads its path from standard input.", metavar="STUDENT"
        ),
    ],
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="Data with a prompt, text (all of it is the prompt) or messages (the last answer is dropped). "
            "- reads rows or a path from standard input.",
            metavar="PROMPTS...",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Output file, one rollout per line as JSON.", metavar="FILE.jsonl")
    ],
    num_generations: Annotated[int, typer.Option(help="Number of rollouts per prompt.", min=1)] = 1,
    max_completion_length: Annotated[int, typer.Option(help="Maximum number of sampled tokens per rollout.")] = 256,
    temperature: shared_options.Temperature = 1.0,
    top_p: shared_options.TopP = 1.0,
    top_k: shared_options.TopK = 0,
    stop: shared_options.Stop = None,
    seed: Annotated[
        int, typer.Option(help="Random seed; a rollout depends only on the seed, its prompt's index and its own index.")
    ] = 0,
    top_logprobs: Annotated[
        int,
        typer.Option(
            help="Also store the student's K most likely tokens per position, as candidate_ids; 0: none. A "
            "teacher with the same tokenizer scores them: cache-teacher --support candidates.",
            metavar="K",
        ),
    ] = 0,
    reward: shared_options.Rewards = None,
    scale_rewards: shared_options.ScaleRewards = True,
    environment: shared_options.Environment = "",
    max_turns: shared_options.MaxTurns = 8,
    prompt_template: shared_options.PromptTemplate = "",
    apply_chat_template: shared_options.ApplyChatTemplate = False,
    chat_template_kwargs: shared_options.ChatTemplateKwargs = "",
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    weight_column: shared_options.WeightColumn = "",
    route_column: shared_options.RouteColumn = "",
    max_prompts: shared_options.MaxPrompts = 0,
    backend: Annotated[
        str,
        typer.Option(
            help="Engine that generates: transformers or vllm (both in this process), or a vLLM server.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="With --backend vllm: engine argument, such as gpu_memory_utilization=0.5. Repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    server: shared_options.Server = None,
    concurrency: shared_options.Concurrency = 32,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the student's weights and computation; bfloat16 needs half the memory of float32.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "float32",
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts and completions generated at once, padding included.", min=1)
    ] = 8192,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Sample completions of prompts from a student.

    Each line of the output has a prompt, a completion, the sampled tokens and their log-probabilities; with --reward
    also rewards and advantages. It is data for cache-teacher.

    Examples:
        xtk rollout ./student prompts.jsonl --num-generations 4 -o rollouts.jsonl
        xtk rollout ./student prompts.jsonl -o r.jsonl | xtk cache-teacher ./teacher - -o cache
    """
    from xtk.artifacts.corpus_reader import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.artifacts.write_locks import only_writer_of_path
    from xtk.name_registry import unknown_name_error
    from xtk.rollouts import GENERATORS

    terminal.set_quiet(quiet)
    if backend not in GENERATORS:
        raise unknown_name_error("backend", backend, GENERATORS)
    if student == "-" and "-" in prompts:
        raise typer.BadParameter("only one of STUDENT and PROMPTS can be read from standard input (-)")
    student = terminal.path_argument(student)
    path = _checked_output(output, [student, *prompts])
    corpus = Corpus(
        prompts, parse_columns_option(columns, weight=weight_column, route=route_column), max_document_bytes
    )
    folder, adapter = base_model_and_adapter(resolve_model_folder(student, with_weights=backend != "server"))

    from xtk.models.causal_lm import DTYPES
    from xtk.name_registry import load_registered
    from xtk.rewards.reward_spec import WeightedRewards, parse_reward
    from xtk.rollouts.environments import load_environment
    from xtk.rollouts.generator_interface import GeneratorConfig, SamplingConfig
    from xtk.rollouts.prompts import PromptFormat, read_prompt_template, read_prompts, read_template_arguments
    from xtk.rollouts.rollout_generation import generate_rollouts
    from xtk.teachers.backend_cli_options import backend_options
    from xtk.tokens.tokenizer import Tokenizer

    if engine and backend == "transformers":
        raise typer.BadParameter("--engine needs --backend vllm; add it, or remove --engine")
    own_options = backend_options(backend, engine or [], server or [], concurrency, adapter)
    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    sampling = SamplingConfig(temperature, top_p, top_k, max_completion_length, tuple(stop or ()), top_logprobs)
    rewards = WeightedRewards([parse_reward(text) for text in reward or []])
    played = load_environment(environment) if environment else None
    template_arguments = read_template_arguments(chat_template_kwargs)
    tokenizer = Tokenizer(folder, name=student)
    form = PromptFormat(read_prompt_template(prompt_template), as_chat=apply_chat_template)
    read = read_prompts(corpus, max_prompts or None, form)
    request = _request_fingerprint(
        {
            "student": _student_identity(folder, adapter, backend, server or [], tokenizer),
            "prompts": _prompts_fingerprint(read),
            "sampling": repr(sampling),
            "num_generations": num_generations,
            "seed": seed,
            "rewards": [[text, _file_of(text)] for text in reward or []],
            "scale_rewards": scale_rewards,
            "environment": [environment, _file_of(environment), max_turns] if environment else None,
            "template_arguments": template_arguments,
            "backend": [backend, sorted(engine or []), dtype, batch_tokens],
        }
    )
    with only_writer_of_path(path.resolve(), "file"):
        _checked_output(output, [student, *prompts])  # again: a file may have appeared since the first check
        figures = None if force else _finished_rollouts(path, request)
        if figures is None:
            writer = load_registered(GENERATORS, backend, "backend").open(
                GeneratorConfig(
                    folder=folder,
                    name=student,
                    tokenizer=tokenizer,
                    dtype=dtype,
                    batch_tokens=batch_tokens,
                    trust_remote_code=trust_remote_code,
                    options=own_options,
                )
            )

            def written() -> Iterator[tuple[Prompt, list[Rollout]]]:
                size = max(1, COMPLETIONS_PER_BATCH // num_generations)
                for start in range(0, len(read), size):
                    group = read[start : start + size]
                    found = generate_rollouts(
                        group, writer, tokenizer, sampling, num_generations=num_generations, seed=seed,
                        rewards=rewards if rewards.specs else None, environment=played, max_turns=max_turns,
                        scale_rewards=scale_rewards, template_arguments=template_arguments,
                    )  # fmt: skip
                    for prompt in group:
                        yield prompt, [one for one in found if one.prompt == prompt.number]

            figures = _write_rollouts(path, written(), len(read), corpus.columns, request)
            for name, count in rewards.unscored.items():
                terminal.note(f"rollout: {count:,} rollouts have no {name} reward; their data lacks what it needs")
    summary = figures.summary()
    terminal.note(
        f"{summary['rollouts']:,} rollouts, {summary['mean_length']:.1f} tokens each, "
        f"{summary['truncated_fraction']:.1%} cut off"
        + (
            f", {summary['mean_turns']:.1f} turns, {summary['environment_token_fraction']:.1%} from tools"
            if environment
            else ""
        )
        + ("" if summary["mean_reward"] is None else f", mean reward {summary['mean_reward']:.4f}")
    )
    terminal.result_artifact({"path": output, "kind": "rollouts", **summary}, as_json=as_json)


def _checked_output(output: str, inputs: list[str]) -> Path:
    """Return the output path.

    Raises:
        XtkError: it does not end in .jsonl, or is a folder, an input or another file.
    """
    from xtk.artifacts.output_path_checks import check_output_file
    from xtk.errors import XtkError
    from xtk.rollouts.rollout_jsonl import read_request_fingerprint

    path = Path(output)
    if path.suffix != ".jsonl":
        raise XtkError("the name of the output file must end in .jsonl", where=output, hint="use -o FILE.jsonl")
    check_output_file(path, "rollouts", lambda found: read_request_fingerprint(found) is not None, inputs)
    return path


def _finished_rollouts(path: Path, request: str) -> RolloutStatistics | None:
    """Return the statistics of finished rollouts; None if there are none.

    Raises:
        XtkError: the file has rollouts made from other inputs or options.
    """
    from xtk.errors import XtkError
    from xtk.rollouts.rollout_jsonl import read_request_fingerprint, read_statistics

    if not path.exists():
        return None
    if read_request_fingerprint(path) != request:
        raise XtkError(
            "the output file has rollouts that were made from other inputs or options",
            where=str(path),
            hint="use another -o, or --force to replace them",
        )
    found = read_statistics(path)
    if not found.has_all_lines:
        raise XtkError(
            "lines of the output file were removed, repeated or reordered since it was written",
            where=str(path),
            hint="use another -o, or --force to replace the file",
        )
    return found


def _write_rollouts(
    path: Path,
    groups: Iterator[tuple[Prompt, list[Rollout]]],
    count: int,
    columns: dict[str, str],
    request: str,
) -> RolloutStatistics:
    from xtk.artifacts.atomic_files import atomic_write
    from xtk.errors import XtkError
    from xtk.rollouts.rollout_jsonl import RolloutStatistics, json_line, number_line, rollout_to_json

    figures, waiting = RolloutStatistics(), list[dict[str, Any]]()
    with (
        atomic_write(path, keep_others=True) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
        terminal.Progress("rollout", count, "prompts") as progress,
    ):
        for prompt, rollouts in groups:
            for one in rollouts:
                if one.unusable_reason:
                    figures.dropped[one.unusable_reason] = figures.dropped.get(one.unusable_reason, 0) + 1
                    continue
                if waiting:
                    stream.write(json_line(number_line(waiting.pop(), figures.rollouts - 1, is_last=False)))
                waiting.append(rollout_to_json(one, prompt, columns, request))
                figures.add_record(waiting[0])
            progress.advance(1, f"{figures.tokens:,} tokens")
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


def _student_identity(
    folder: Path, adapter: Path | None, backend: str, servers: list[str], tokenizer: Any
) -> list[Any]:
    """Return what identifies a student: weights or servers, tokenizer and chat template."""
    from xtk.artifacts.model_resolver import weights_fingerprint

    weights = servers if backend == "server" else [weights_fingerprint(place) for place in (folder, adapter) if place]
    return [weights, tokenizer.fingerprint, tokenizer.template_fingerprint]


def _prompts_fingerprint(prompts: list[Prompt]) -> str:
    from xtk.rollouts.rollout_jsonl import document_fields

    digest = hashlib.sha256()
    for prompt in prompts:
        found = [dict(prompt.record), document_fields(prompt.document)]
        digest.update(json.dumps(found, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _file_of(place: str) -> str:
    """Return the fingerprint of the Python file that an option names; "" if it names none."""
    from xtk.artifacts.atomic_files import sha256_of_file

    path = Path(place.partition(".py:")[0] + ".py")
    return sha256_of_file(path) if ".py:" in place and path.is_file() else ""


def _request_fingerprint(request: dict[str, Any]) -> str:
    from xtk.artifacts.atomic_files import canonical_json, sha256

    return sha256(canonical_json(request))[: len("sha256:") + 16]
