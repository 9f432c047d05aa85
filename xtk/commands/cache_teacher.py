"""`xtk cache-teacher`: the teacher reads a corpus once, for every student."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xtk import terminal
from xtk.commands import shared_options


def cache_teacher(
    context: typer.Context,
    teacher: Annotated[
        str,
        typer.Argument(help="Teacher model: a folder or hub id. With --merge: the first cache.", metavar="TEACHER"),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Output folder of the cache, or a URL of an object store such as s3://BUCKET/NAME.",
            metavar="FOLDER|URL",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Documents: files, a folder, a quoted glob, a hub dataset, a URL, or - for documents from stdin. "
            "docs/how-to/data.md lists the formats; with --merge: more caches.",
            metavar="DATA...",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Merge finished caches, given in place of TEACHER and DATA, into one, in this order. They need the "
            "same teacher and --support; nothing is scored again.",
        ),
    ] = False,
    rows: Annotated[
        str,
        typer.Option(
            help="With --merge: range of documents to keep, counted over all caches, such as 100:200.",
            metavar="START:STOP",
        ),
    ] = "",
    support: Annotated[
        str,
        typer.Option(
            help="Tokens stored besides the observed one; candidates: from rollout --top-logprobs; none: no other. "
            "Default: the kind that --top-k, --top-p or --num-samples imply, else top-k+sample.",
            metavar="[top-k|top-p|sample|top-k+sample|candidates|none]",
            show_default=False,
        ),
    ] = "",
    top_k: Annotated[
        str,
        typer.Option(
            help="Number of most likely tokens stored per position, or all. Default: 64, or 16 with --support "
            "top-k+sample.",
            metavar="N|all",
            show_default=False,
        ),
    ] = "",
    top_p: Annotated[
        float | None,
        typer.Option(
            help="With --support top-p: total probability of the stored tokens. Default: 0.99.", show_default=False
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            help="With --support sample or top-k+sample: sampled tokens per position. Default: 16.", show_default=False
        ),
    ] = None,
    num_sample_sets: Annotated[
        int, typer.Option(help="With --support sample or top-k+sample: independent sample sets, used in turn by epoch.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed of the sampled tokens.")] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of stored log-probabilities: float32 is exact, the others are quantized. Maximum "
            "error in nats, at very small probabilities: fine 0.13, standard 0.53, coarse 1.06.",
            metavar="[float32|fine|standard|coarse]",
        ),
    ] = "standard",
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    weight_column: shared_options.WeightColumn = "",
    route_column: shared_options.RouteColumn = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the teacher's weights and computation; bfloat16 needs half the memory of float32.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "float32",
    backend: Annotated[
        str,
        typer.Option(
            help="Engine that runs the teacher: transformers or vllm (both in this process), or a vLLM server."
            " With the vLLM engines, only --support top-k, top-p and none.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine argument, such as tensor_parallel_size=4 (vllm) or device_map=auto (transformers). "
            "Repeatable; tp_size=4 starts 4 processes that share one transformers teacher.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    server: shared_options.Server = None,
    concurrency: shared_options.Concurrency = 32,
    long_documents: Annotated[
        str,
        typer.Option(
            help="Handling of documents above --max-length or the context: refuse the data, truncate, split or skip.",
            metavar="[refuse|truncate|split|skip]",
        ),
    ] = "refuse",
    max_length: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens per document; --long-documents handles longer ones. 0: the context length."
        ),
    ] = 0,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens per forward pass, padding included; more is faster and needs more memory.")
    ] = 8192,
    shard_tokens: Annotated[
        int,
        typer.Option(help="Tokens per shard file; an interrupted run loses at most one unfinished shard per process."),
    ] = 65536,
    num_processes: Annotated[
        int,
        typer.Option(
            help="Number of processes on this machine, each with its own teacher and device, that write one cache.",
            min=1,
        ),
    ] = 1,
    machine_rank: Annotated[
        int, typer.Option(help="Index of this machine, from 0, when --num-machines is above 1.", min=0)
    ] = 0,
    num_machines: Annotated[
        int,
        typer.Option(
            help="Number of machines that write one cache in a shared folder, each with its own --machine-rank.",
            min=1,
        ),
    ] = 1,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Print positions, bytes, time and memory, estimated from a small sample, and write no cache.",
        ),
    ] = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Store a teacher's log-probabilities for a data set.

    After an interruption, the same command resumes. With --merge, finished caches become one.

    Examples:
        xtk cache-teacher ./teacher corpus.jsonl --top-k 64 -o cache
        xtk cache-teacher --merge cache-1 cache-2 -o cache
    """
    from xtk.artifacts.corpus_reader import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered, unknown_name_error
    from xtk.teachers import BACKENDS

    terminal.set_quiet(quiet)
    if merge:
        _merge(context, [teacher, *(data or [])], output, rows, force=force, as_json=as_json)
        return
    if not data:
        raise typer.BadParameter("DATA is missing; give the documents that the teacher scores after TEACHER")
    if rows:
        raise typer.BadParameter("--rows needs --merge; use xtk cache-teacher --merge CACHE --rows START:STOP -o PATH")
    if backend not in BACKENDS:
        raise unknown_name_error("backend", backend, BACKENDS)
    corpus = Corpus(data, parse_columns_option(columns, weight=weight_column, route=route_column), max_document_bytes)
    folder, adapter = base_model_and_adapter(resolve_model_folder(teacher, with_weights=backend != "server"))

    from xtk.artifacts.shard_codec_registry import codec_for_precision
    from xtk.models.causal_lm import DTYPES
    from xtk.teachers.backend_cli_options import backend_options
    from xtk.teachers.cache_build_config import CacheRequest
    from xtk.teachers.cache_building import CachePartition
    from xtk.teachers.cache_building import cache_teacher as cache
    from xtk.teachers.cache_shard_planning import LONG_DOCUMENTS
    from xtk.tokens.teacher_logprobs import make_support

    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    codec_for_precision(precision)
    if long_documents not in LONG_DOCUMENTS:
        raise unknown_name_error("value of --long-documents", long_documents, LONG_DOCUMENTS)
    able = load_registered(BACKENDS, backend, "backend").support_kinds
    size = _read_top_k(top_k, folder)
    wanted = make_support(
        support,
        top_k=size,
        top_p=top_p,
        num_samples=num_samples,
        num_sample_sets=num_sample_sets,
        seed=seed,
        available_kinds=able,
    )
    request = CacheRequest(
        teacher_folder=folder,
        teacher_name=teacher,
        support=wanted,
        dtype=dtype,
        precision=precision,
        backend=backend,
        long_documents=long_documents,
        max_length=max_length or None,
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        trust_remote_code=trust_remote_code,
        backend_options=backend_options(backend, engine or [], server or [], concurrency, adapter, num_processes),
    )
    if estimate:
        from xtk.teachers.cache_resource_estimate import estimate_cache_cost

        _print_estimate(
            {"path": output, "kind": "teacher-cache-estimate", **estimate_cache_cost(request, corpus)}, as_json=as_json
        )
        return
    figures = cache(
        request, corpus, output, force=force, partition=CachePartition(num_processes, machine_rank, num_machines)
    )
    if figures is not None:  # None: other machines have not finished yet
        terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)


def _read_top_k(text: str, teacher: Path) -> int | None:
    """Return the number of tokens of --top-k; None if the option is not used."""
    if text == "all":
        from xtk.tokens.tokenizer import Tokenizer

        return Tokenizer(teacher).embedding_rows
    if text and not (text.isascii() and text.removeprefix("-").isdecimal()):
        raise typer.BadParameter(
            f"{text!r} is neither a number of tokens nor 'all'; use for example --top-k 64", param_hint="--top-k"
        )
    return int(text) if text else None


def _print_estimate(costs: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.result_json(costs)
        return
    for name, value in costs.items():
        terminal.result_line(f"{name:24} {value:,}" if isinstance(value, int | float) else f"{name:24} {value}")


def _merge(context: typer.Context, caches: list[str], output: str, rows: str, *, force: bool, as_json: bool) -> None:
    from xtk.artifacts.cache_merging import merge_caches

    of_merging = {"teacher", "data", "output", "merge", "rows", "force", "as_json", "quiet", "config"}
    given = [
        name
        for name in context.params
        if name not in of_merging and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"--merge does not run a teacher, so {named} has no effect; remove it")
    if caches.count("-") > 1:
        raise typer.BadParameter("only one argument can be read from standard input (-)")
    places = [
        place
        for given_place in caches
        for place in (
            [str(record["path"]) for record in terminal.piped_records()] if given_place == "-" else [given_place]
        )
    ]
    figures = merge_caches(places, output, rows=rows, force=force)
    terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)
