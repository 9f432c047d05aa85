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
        typer.Argument(help="The teacher: a model folder, or a hub id. With --merge: a cache.", metavar="TEACHER"),
    ],
    output: shared_options.Output,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Documents: .jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt, a folder of these or of save_to_disk, "
            "a glob in quotes, a hub dataset (owner/name[:split]), a URL (hf://, s3://), or - for a pipe. "
            "With --merge: more caches.",
            metavar="DATA...",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="All arguments are caches of one teacher with one support; they become one cache, in their order. "
            "Shards are linked or copied, no row is read.",
        ),
    ] = False,
    rows: Annotated[
        str, typer.Option(help="Of --merge: only these rows of all of them, one after the other.", metavar="START:STOP")
    ] = "",
    support: Annotated[
        str,
        typer.Option(
            help="Tokens that are kept at each position, beside the one that stands there. top-k: the likeliest, and a "
            "sum of the rest; top-p: as many as carry the mass, --top-k at most; sample: draws, unbiased at a few "
            "bytes, for forward KL only; top-k+sample: the likeliest, and draws from the rest; candidates: the data's "
            "candidate_ids; none. Left out: what --top-k, --top-p or --num-samples ask for, else top-k+sample (top-k "
            "of backends that cannot draw).",
            metavar="[top-k|top-p|sample|top-k+sample|candidates|none]",
            show_default=False,
        ),
    ] = "",
    top_k: Annotated[
        str,
        typer.Option(
            help="Most likely tokens kept, or all; 64 if left out, 16 with samples.",
            metavar="N|all",
            show_default=False,
        ),
    ] = "",
    top_p: Annotated[
        float | None,
        typer.Option(help="Of --support top-p: the mass that is kept; 0.99 if left out.", show_default=False),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(help="Draws a position, of the supports that draw; 16 if left out.", show_default=False),
    ] = None,
    num_sample_sets: Annotated[
        int, typer.Option(help="Independent sets of draws; training takes another one each epoch.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="Of what is kept. float32: as it is, in plain arrays. Packed, each log-probability is within so many "
            "nats, likely ones much nearer: fine, 0.13; standard, 0.53 (a two-thousandth of the entropy is lost); "
            "coarse, 1.06.",
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
            help="Of the teacher's arithmetic. float32 is exact; bfloat16 takes half the memory.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "float32",
    backend: Annotated[
        str,
        typer.Option(
            help="Who runs the teacher: transformers in this process; vLLM in this process; a server of vLLM. "
            "vLLM gives top-k, top-p and none.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Of --backend vllm: an option of its engine, such as tensor_parallel_size=4. Of transformers: an "
            "argument of from_pretrained, such as device_map=auto; or tp_size=4, which cuts the teacher over as many "
            "processes.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    server: shared_options.Server = None,
    concurrency: shared_options.Concurrency = 32,
    long_documents: Annotated[
        str,
        typer.Option(
            help="Documents longer than the teacher's context: refuse the corpus, truncate, split into pieces, "
            "or skip them. They are counted and told.",
            metavar="[refuse|truncate|split|skip]",
        ),
    ] = "refuse",
    max_length: Annotated[
        int, typer.Option(help="Tokens a document at most, if less than the context; 0: the context.")
    ] = 0,
    batch_tokens: Annotated[
        int, typer.Option(help="Padded tokens in a forward pass: more is faster and takes memory.")
    ] = 8192,
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens in a shard: a kill loses at most one shard's work.")
    ] = 65536,
    num_processes: Annotated[
        int, typer.Option(help="Processes on this machine, a teacher and a device each, that write one cache.", min=1)
    ] = 1,
    machine_rank: Annotated[int, typer.Option(help="Which of --num-machines this one is, from 0.", min=0)] = 0,
    num_machines: Annotated[
        int,
        typer.Option(
            help="Machines that share the folder of -o and run the same command, each for its part of the shards; "
            "the one that ends last finishes the cache.",
            min=1,
        ),
    ] = 1,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Cache nothing; tell positions, bytes, time and memory, from a small sample of the documents.",
        ),
    ] = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Precompute a teacher's log-probabilities; interrupted, the same command goes on.

    xtk cache-teacher --merge CACHE... -o PATH makes one cache of many.
    """
    from xtk.artifacts.corpus import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.registry import load_registered, unknown_name_error
    from xtk.teachers import BACKENDS

    terminal.set_quiet(quiet)
    if merge:
        _merge(context, [teacher, *(data or [])], output, rows, force=force, as_json=as_json)
        return
    if not data:
        raise typer.BadParameter("DATA is missing: what the teacher is to read")
    if rows:
        raise typer.BadParameter("--rows goes with --merge: xtk cache-teacher --merge CACHE --rows START:STOP -o PATH")
    if backend not in BACKENDS:
        raise unknown_name_error("backend", backend, BACKENDS)
    corpus = Corpus(data, parse_columns_option(columns, weight=weight_column, route=route_column), max_document_bytes)
    folder, adapter = base_model_and_adapter(resolve_model_folder(teacher, with_weights=backend != "server"))

    from xtk.artifacts.shard_codecs import codec_for_precision
    from xtk.models.causal_lm import DTYPES
    from xtk.teachers.backend_options import backend_options
    from xtk.teachers.cache_building import CachePartition
    from xtk.teachers.cache_building import cache_teacher as cache
    from xtk.teachers.cache_request import CacheRequest
    from xtk.teachers.shard_planning import LONG_DOCUMENTS
    from xtk.tokens.teacher_logprobs import make_support

    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    codec_for_precision(precision)
    if long_documents not in LONG_DOCUMENTS:
        raise unknown_name_error("way with long documents", long_documents, LONG_DOCUMENTS)
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
        from xtk.teachers.cache_cost_estimate import estimate_cache_cost

        _print_estimate(
            {"path": output, "kind": "teacher-cache-estimate", **estimate_cache_cost(request, corpus)}, as_json=as_json
        )
        return
    figures = cache(
        request, corpus, output, force=force, partition=CachePartition(num_processes, machine_rank, num_machines)
    )
    if figures is not None:  # a path is printed once it leads to a finished cache
        terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)


def _read_top_k(text: str, teacher: Path) -> int | None:
    """Return how many tokens --top-k keeps; None if it is left out."""
    if text == "all":
        from xtk.tokens.tokenizer import Tokenizer

        return Tokenizer(teacher).embedding_rows
    if text and not (text.isascii() and text.removeprefix("-").isdecimal()):
        raise typer.BadParameter(f"{text!r} is not a number of tokens, or all", param_hint="--top-k")
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
        raise typer.BadParameter(f"{named}: --merge takes rows as they are; it scores nothing")
    if caches.count("-") > 1:
        raise typer.BadParameter("only one - can be read from the pipe")
    places = [
        place
        for given_place in caches
        for place in (
            [str(record["path"]) for record in terminal.piped_records()] if given_place == "-" else [given_place]
        )
    ]
    figures = merge_caches(places, output, rows=rows, force=force)
    terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)
