"""`xtk cache-teacher`: the teacher reads a corpus once, for every student."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xtk import terminal
from xtk.commands import options


def cache_teacher(
    teacher: Annotated[str, typer.Argument(help="The teacher: a model folder, or a hub id.", metavar="TEACHER")],
    data: Annotated[
        list[str],
        typer.Argument(
            help=".jsonl, .parquet, .arrow, .txt (a document each), a glob in quotes, a hub dataset, or - for a pipe.",
            metavar="DATA...",
        ),
    ],
    output: options.Output,
    support: Annotated[
        str,
        typer.Option(
            help="Tokens that are kept at each position, beside the one that stands there. top-k: the likeliest, and a "
            "sum of the rest; top-p: as many as carry the mass, --top-k at most; sample: draws, unbiased at a few "
            "bytes, for forward KL only; top-k+sample: the likeliest, and draws from the rest; given: the data's "
            "given_ids; none.",
            metavar="[top-k|top-p|sample|top-k+sample|given|none]",
        ),
    ] = "top-k",
    top_k: Annotated[int, typer.Option(help="Likeliest tokens kept; 0: 64, or 16 beside draws.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of --support top-p: the mass that is kept.")] = 0.99,
    draws: Annotated[int, typer.Option(help="Draws a position, of the supports that draw.")] = 16,
    draw_sets: Annotated[
        int, typer.Option(help="Independent sets of draws; training takes another one each epoch.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    columns: options.Columns = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the teacher's arithmetic. float32 is exact; bfloat16 takes half the memory.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "float32",
    backend: Annotated[str, typer.Option(help="Who runs the teacher.", metavar="[transformers]")] = "transformers",
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
    trust_remote_code: options.TrustRemoteCode = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Cache nothing; tell positions, bytes, time and memory, from a small sample of the documents.",
        ),
    ] = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Precompute a teacher's log-probabilities; interrupted, the same command goes on."""
    from xtk.artifacts.corpus import Corpus, columns_option
    from xtk.artifacts.hub import local_folder
    from xtk.lookup import lookup, unknown
    from xtk.teachers import BACKENDS

    terminal.set_quiet(quiet)
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    corpus = Corpus(data, columns_option(columns))
    folder = local_folder(teacher, weights=True)

    from xtk.models.causal_lm import DTYPES
    from xtk.teachers.caching import LONG_DOCUMENTS, CacheRequest, Share
    from xtk.teachers.caching import cache_teacher as cache
    from xtk.tokens.signal import support_of

    lookup(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    if long_documents not in LONG_DOCUMENTS:
        raise unknown("way with long documents", long_documents, LONG_DOCUMENTS)
    request = CacheRequest(
        teacher=folder,
        name=teacher,
        support=support_of(support, top_k=top_k, top_p=top_p, draws=draws, sets=draw_sets, seed=seed),
        dtype=dtype,
        backend=backend,
        long_documents=long_documents,
        max_length=max_length or None,
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        trust_remote_code=trust_remote_code,
    )
    if plan:
        from xtk.teachers.forecast import forecast

        _show_plan({"path": output, "kind": "teacher-cache-plan", **forecast(request, corpus)}, as_json=as_json)
        return
    figures = cache(request, corpus, output, force=force, share=Share(num_processes, machine_rank, num_machines))
    if figures is not None:  # a path is printed once it leads to a finished cache
        terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)


def _show_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.result_json(plan)
        return
    for name, value in plan.items():
        terminal.result_line(f"{name:24} {value:,}" if isinstance(value, int | float) else f"{name:24} {value}")
