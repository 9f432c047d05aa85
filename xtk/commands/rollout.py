"""`xtk rollout`: the student writes, and keeps the tokens as it drew them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xtk.rollouts.lines import Figures
    from xtk.rollouts.rollout import Prompt, Rollout

COMPLETIONS_AT_A_TIME = 256


def rollout(
    student: Annotated[
        str, typer.Argument(help="The student: a model folder, or a hub id; - for a pipe.", metavar="STUDENT")
    ],
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="Data with prompt (text or messages), or messages, of which the last answer is left out, or text: "
            ".jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt, a folder of these or of save_to_disk, "
            "a glob in quotes, a hub dataset (owner/name[:split]), a URL (hf://, s3://), or - for a pipe.",
            metavar="PROMPTS...",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where the rollouts go, a JSON line each.", metavar="FILE.jsonl")
    ],
    num_generations: Annotated[int, typer.Option(help="Rollouts of each prompt.", min=1)] = 1,
    max_completion_length: Annotated[
        int, typer.Option(help="Tokens that the student draws for a rollout at most.")
    ] = 256,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    stop: options.Stop = None,
    seed: Annotated[int, typer.Option(help="Of the draws: a function of it, the prompt's number and the sample.")] = 0,
    given: Annotated[
        int,
        typer.Option(
            help="Write given_ids too: so many of the student's likeliest tokens in each place, for cache-teacher "
            "--support given of a teacher with the same tokenizer. 0: none.",
            metavar="K",
        ),
    ] = 0,
    reward: options.Rewards = None,
    scale_rewards: options.ScaleRewards = True,
    environment: options.Environment = "",
    max_turns: options.MaxTurns = 8,
    prompt_template: options.PromptTemplate = "",
    apply_chat_template: options.ApplyChatTemplate = False,
    chat_template_kwargs: options.ChatTemplateKwargs = "",
    columns: options.Columns = "",
    max_document_bytes: options.MaxDocumentBytes = options.MAX_DOCUMENT_BYTES,
    weight_column: options.WeightColumn = "",
    route_column: options.RouteColumn = "",
    max_prompts: options.MaxPrompts = 0,
    backend: Annotated[
        str,
        typer.Option(
            help="Who runs the student: transformers in this process; vLLM in this process; a server of vLLM.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Of --backend vllm: an option of its engine, such as gpu_memory_utilization=0.5.", metavar="NAME=VALUE"
        ),
    ] = None,
    server: options.Server = None,
    concurrency: options.Concurrency = 32,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the student's arithmetic. bfloat16 takes half the memory.", metavar="[float32|bfloat16|float16]"
        ),
    ] = "float32",
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts and completions that are held at a time, padding among them.")
    ] = 8192,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Write what a student makes of prompts, with the tokens and log-probabilities that it drew.

    xtk rollout STUDENT PROMPTS -o r.jsonl | xtk cache-teacher TEACHER - -o cache
    """
    from xtk.artifacts.corpus import Corpus, columns_option
    from xtk.artifacts.hub import local_folder, with_adapter
    from xtk.artifacts.locks import only_writer_of_path
    from xtk.lookup import unknown
    from xtk.rollouts import WRITERS

    terminal.set_quiet(quiet)
    if backend not in WRITERS:
        raise unknown("backend", backend, WRITERS)
    if student == "-" and "-" in prompts:
        raise typer.BadParameter("only one of STUDENT and PROMPTS can come through the pipe")
    student = terminal.path_argument(student)
    path = _checked_output(output, [student, *prompts])
    corpus = Corpus(prompts, columns_option(columns, weight=weight_column, route=route_column), max_document_bytes)
    folder, adapter = with_adapter(local_folder(student, weights=backend != "server"))

    from xtk.lookup import lookup
    from xtk.models.causal_lm import DTYPES
    from xtk.rewards.specification import Rewards, parse_reward
    from xtk.rollouts.environments import environment_of
    from xtk.rollouts.prompts import PromptForm, read_prompts, read_template, read_template_arguments
    from xtk.rollouts.writer import Sampling, WriterRequest
    from xtk.rollouts.writing import write_rollouts
    from xtk.teachers.engine import backend_options
    from xtk.tokens.tokenizer import Tokenizer

    if engine and backend == "transformers":
        raise typer.BadParameter("--engine is for --backend vllm")
    own_options = backend_options(backend, engine or [], server or [], concurrency, adapter)
    lookup(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    sampling = Sampling(temperature, top_p, top_k, max_completion_length, tuple(stop or ()), given)
    rewards = Rewards([parse_reward(text) for text in reward or []])
    played = environment_of(environment) if environment else None
    template_arguments = read_template_arguments(chat_template_kwargs)
    tokenizer = Tokenizer(folder, name=student)
    form = PromptForm(read_template(prompt_template), chat=apply_chat_template)
    read = read_prompts(corpus, max_prompts or None, form)
    request = _fingerprint(
        {
            "student": _identity(folder, adapter, backend, server or [], tokenizer),
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
        figures = None if force else _found(path, request)
        if figures is None:
            writer = lookup(WRITERS, backend, "backend").open(
                WriterRequest(
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
                size = max(1, COMPLETIONS_AT_A_TIME // num_generations)
                for start in range(0, len(read), size):
                    group = read[start : start + size]
                    found = write_rollouts(
                        group, writer, tokenizer, sampling, num_generations=num_generations, seed=seed,
                        rewards=rewards if rewards.specifications else None, environment=played, max_turns=max_turns,
                        scale_rewards=scale_rewards, template_arguments=template_arguments,
                    )  # fmt: skip
                    for prompt in group:
                        yield prompt, [one for one in found if one.prompt == prompt.number]

            figures = _write(path, written(), len(read), corpus.columns, request)
            for name, count in rewards.unjudged.items():
                terminal.note(f"the reward {name} could not judge {count:,} rollouts")
    told = figures.record()
    terminal.note(
        f"{told['rollouts']:,} rollouts, {told['mean_length']:.1f} tokens each, {told['truncated']:.1%} cut off"
        + (f", {told['mean_turns']:.1f} turns, {told['tool_share']:.1%} from tools" if environment else "")
        + ("" if told["mean_reward"] is None else f", mean reward {told['mean_reward']:.4f}")
    )
    terminal.result_artifact({"path": output, "kind": "rollouts", **told}, as_json=as_json)


def _checked_output(output: str, inputs: list[str]) -> Path:
    """Refuse what no file of rollouts goes to.

    Raises:
        XtkError: the name is none of a data file of JSON lines, or there is something else.
    """
    from xtk.artifacts.outputs import check_file
    from xtk.errors import XtkError
    from xtk.rollouts.lines import request_of_rollouts

    path = Path(output)
    if path.suffix != ".jsonl":
        raise XtkError("rollouts are JSON lines, and data is read by its ending", where=output, hint="-o FILE.jsonl")
    check_file(path, "rollouts", lambda found: request_of_rollouts(found) is not None, inputs)
    return path


def _found(path: Path, request: str) -> Figures | None:
    """Return what is told of finished rollouts; None if there are none.

    Raises:
        XtkError: there are those of another request.
    """
    from xtk.errors import XtkError
    from xtk.rollouts.lines import read_figures, request_of_rollouts

    if not path.exists():
        return None
    if request_of_rollouts(path) != request:
        raise XtkError(
            "there are rollouts of another request", where=str(path), hint="another -o, or --force to replace them"
        )
    return read_figures(path)


def _write(
    path: Path, groups: Iterator[tuple[Prompt, list[Rollout]]], count: int, columns: dict[str, str], request: str
) -> Figures:
    from xtk.artifacts.files import written_whole
    from xtk.errors import XtkError
    from xtk.rollouts.lines import Figures, json_line, line_of

    figures = Figures()
    with (
        written_whole(path, keep_others=True) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
        terminal.Progress("rollout", count, "prompts") as progress,
    ):
        for prompt, rollouts in groups:
            for one in rollouts:
                if one.unusable:
                    figures.dropped[one.unusable] = figures.dropped.get(one.unusable, 0) + 1
                    continue
                record = line_of(one, prompt, columns, request)
                figures.add(record)
                stream.write(json_line(record))
            progress.advance(1, f"{figures.tokens:,} tokens")
        stream.flush()
        for why, number in figures.dropped.items():
            terminal.note(f"{number:,} rollouts are {why} and were left out")
        if not figures.rollouts:
            raise XtkError("there is no rollout to write", where=str(path), hint="the notes above tell why")
    return figures


def _identity(folder: Path, adapter: Path | None, backend: str, servers: list[str], tokenizer: Any) -> list[Any]:
    """Return what a student is told apart by."""
    from xtk.artifacts.hub import fingerprint_of_weights

    weights = (
        servers if backend == "server" else [fingerprint_of_weights(place) for place in (folder, adapter) if place]
    )
    return [weights, tokenizer.fingerprint, tokenizer.template_fingerprint]


def _prompts_fingerprint(prompts: list[Prompt]) -> str:
    from xtk.rollouts.lines import contents

    whole = hashlib.sha256()
    for prompt in prompts:
        found = [dict(prompt.record), contents(prompt.document)]
        whole.update(json.dumps(found, sort_keys=True, default=str).encode() + b"\n")
    return whole.hexdigest()


def _file_of(place: str) -> str:
    """Return the fingerprint of the user's own code that an option names; "" where it names none."""
    from xtk.artifacts.files import sha256_of_file

    path = Path(place.partition(".py:")[0] + ".py")
    return sha256_of_file(path) if ".py:" in place and path.is_file() else ""


def _fingerprint(request: dict[str, Any]) -> str:
    from xtk.artifacts.files import canonical_json, sha256

    return sha256(canonical_json(request))[: len("sha256:") + 16]
