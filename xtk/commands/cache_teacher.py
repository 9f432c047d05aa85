"""`xtk cache-teacher`: the teacher reads a corpus once, for every student."""

from __future__ import annotations

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
    declared_options,
    flags_of_set_options,
    option,
)
from xtk.options.shared import (
    ConfigOption,
    CorpusOptions,
    DocumentColumnOptions,
    ForceOption,
    JsonOption,
    QuietOption,
    ServerOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
)
from xtk.teachers import BACKENDS

if TYPE_CHECKING:
    from xtk.teachers.cache_build_config import CacheRequest


@dataclass(frozen=True, kw_only=True)
class CacheTeacherOptions(
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
    """Options of `xtk cache-teacher`."""

    HEADINGS = (
        Heading("Data", (CorpusOptions, DocumentColumnOptions, "long_documents", "max_length")),
        Heading(
            "Stored log-probabilities",
            ("support", "top_k", "top_p", "num_samples", "num_sample_sets", "seed", "precision", "shard_tokens"),
        ),
        Heading(
            "Teacher", ("backend", "engine", ServerOptions, "dtype", "start_token", "batch_tokens", "trust_remote_code")
        ),
        Heading("Parallelism", ("num_processes", "num_machines", "machine_rank")),
        Heading("Merge and estimate", ("merge", "rows", "estimate")),
    )

    teacher: str = argument(
        REQUIRED, "Teacher model: a folder, a GGUF file or a hub id. With --merge: the first cache.", metavar="TEACHER"
    )
    output: str = option(
        REQUIRED,
        "Output folder of the cache, or a URL of an object store such as s3://BUCKET/NAME.",
        flags=("--output", "-o"),
        metavar="FOLDER|URL",
    )
    data: tuple[str, ...] = argument(
        (),
        "Documents: files, a folder, a quoted glob, a hub dataset, a URL, or - for documents from stdin. "
        "docs/how-to/data.md lists the formats; with --merge: more caches.",
        metavar="DATA...",
        show_default=False,
    )
    merge: bool = option(
        False,
        "Merge finished caches, given in place of TEACHER and DATA, into one, in this order. They need the same "
        "teacher and --support; nothing is scored again.",
    )
    rows: str = option(
        "", "With --merge: range of documents to keep, counted over all caches, such as 100:200.", metavar="START:STOP"
    )
    support: str = option(
        "",
        "Tokens stored besides the observed one; candidates: from rollout --top-logprobs; none: no other. Default: "
        "the kind that --top-k, --top-p or --num-samples imply, else top-k+sample.",
        metavar="[top-k|top-p|sample|top-k+sample|candidates|none]",
        show_default=False,
    )
    top_k: str = option(
        "",
        "Number of most likely tokens stored per position, or all. Default: 64, or 16 with --support top-k+sample.",
        metavar="N|all",
        show_default=False,
    )
    top_p: float | None = option(
        None, "With --support top-p: total probability of the stored tokens. Default: 0.99.", show_default=False
    )
    num_samples: int | None = option(
        None, "With --support sample or top-k+sample: sampled tokens per position. Default: 16.", show_default=False
    )
    num_sample_sets: int = option(
        1,
        "With --support sample or top-k+sample: independent sample sets, used in turn by epoch.",
        min=1,
        max=1000,
    )
    seed: int = option(0, "Random seed of the sampled tokens.")
    precision: str = option(
        "standard",
        "Precision of stored log-probabilities: float32 is exact, the others are quantized. Maximum error in nats, "
        "at very small probabilities: fine 0.13, standard 0.53, coarse 1.06.",
        metavar="[float32|fine|standard|coarse]",
    )
    dtype: str = option(
        "float32",
        "Data type of the teacher's weights and computation; bfloat16 needs half the memory of float32.",
        metavar="[float32|bfloat16|float16]",
    )
    backend: str = option(
        "transformers",
        "Engine that runs the teacher: transformers or vllm (started by this command), or a vLLM server. With the "
        "vLLM engines, only --support top-k, top-p and none.",
        metavar=f"[{'|'.join(BACKENDS)}]",
    )
    engine: tuple[str, ...] = option(
        (),
        "Engine argument, such as tensor_parallel_size=4 (vllm) or device_map=auto (transformers). Repeatable; "
        "tp_size=4 starts 4 processes that share one transformers teacher.",
        metavar="NAME=VALUE",
    )
    long_documents: str = option(
        "refuse",
        "Handling of documents above --max-length or the context: refuse the data, truncate, split or skip.",
        choices=("refuse", "truncate", "split", "skip"),
    )
    max_length: int = option(
        0, "Maximum number of tokens per document; --long-documents handles longer ones. 0: the context length."
    )
    batch_tokens: int = option(
        8192, "Tokens per forward pass, padding included; more is faster and needs more memory.", min=1
    )
    shard_tokens: int = option(
        65536,
        "Tokens per shard file; an interrupted run loses at most two per process.",
        min=1,
    )
    num_processes: int = option(
        1, "Number of processes on this machine, each with its own teacher and device, that write one cache.", min=1
    )
    machine_rank: int = option(0, "Index of this machine, from 0, when --num-machines is above 1.", min=0)
    num_machines: int = option(
        1, "Number of machines that write one cache in a shared folder, each with its own --machine-rank.", min=1
    )
    estimate: bool = option(
        False, "Print positions, bytes, time and memory, estimated from a small sample, and write no cache."
    )


def cache_teacher(options: CacheTeacherOptions) -> None:
    """Store a teacher's log-probabilities for a data set.

    After an interruption, the same command resumes. With --merge, finished caches become one.

    Examples:
        xtk cache-teacher ./teacher corpus.jsonl --top-k 64 -o cache
        xtk cache-teacher --merge cache-1 cache-2 -o cache
    """
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered

    terminal.set_quiet(options.quiet)
    if options.merge:
        _merge(options)
        return
    if not options.data:
        raise typer.BadParameter("DATA is missing; give the documents that the teacher scores after TEACHER")
    if options.rows:
        raise typer.BadParameter("--rows needs --merge; use xtk cache-teacher --merge CACHE --rows START:STOP -o PATH")
    backend = load_registered(BACKENDS, options.backend, "backend")
    corpus = Corpus(
        options.data,
        parse_columns_option(options.columns, weight=options.weight_column, route=options.route_column),
        options.max_document_bytes,
    )
    folder, adapter = base_model_and_adapter(
        resolve_model_folder(options.teacher, with_weights=not backend.uses_servers)
    )
    request = _cache_request(options, folder, adapter)
    if options.estimate:
        from xtk.teachers.cache_resource_estimate import estimate_cache_cost

        _print_estimate(
            {"path": options.output, "kind": "teacher-cache-estimate", **estimate_cache_cost(request, corpus)},
            as_json=options.as_json,
        )
        return
    from xtk.teachers.cache_building import CachePartition
    from xtk.teachers.cache_building import cache_teacher as cache

    figures = cache(
        request,
        corpus,
        options.output,
        force=options.force,
        partition=CachePartition(options.num_processes, options.machine_rank, options.num_machines),
    )
    if figures is not None:  # None: other machines have not finished yet
        _print_cache(options, figures)


def _print_cache(options: CacheTeacherOptions, figures: dict[str, Any]) -> None:
    """Print the path of a finished cache, and the teacher's bits per byte."""
    bits = figures["teacher_bits_per_byte"]
    if bits is not None:
        terminal.note(f"cache-teacher: the teacher has {bits:.4f} bits per byte on the text that it scored")
    terminal.result_artifact({"path": options.output, "kind": "teacher-cache", **figures}, as_json=options.as_json)


def _cache_request(options: CacheTeacherOptions, folder: Path, adapter: Path | None) -> CacheRequest:
    """Return the request of a cache after checking names and support.

    Args:
        adapter: LoRA adapter of the teacher, if it has one.
    """
    from xtk.cache.codec.shard_codec_registry import codec_for_precision
    from xtk.cache.teacher_logprobs import make_support
    from xtk.engines.backend import backend_options
    from xtk.models.causal_lm import DTYPES
    from xtk.models.resolver import ModelRef
    from xtk.name_registry import load_registered
    from xtk.teachers.cache_build_config import CacheRequest

    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), options.dtype, "dtype")
    codec_for_precision(options.precision)
    backend = load_registered(BACKENDS, options.backend, "backend")
    wanted = make_support(
        options.support,
        top_k=_read_top_k(options.top_k, folder),
        top_p=options.top_p,
        num_samples=options.num_samples,
        num_sample_sets=options.num_sample_sets,
        seed=options.seed,
        available_kinds=backend.support_kinds,
    )
    return CacheRequest(
        ModelRef(folder, adapter, options.dtype, options.trust_remote_code, options.teacher),
        support=wanted,
        precision=options.precision,
        backend=options.backend,
        start_token=options.start_token,
        long_documents=options.long_documents,
        max_length=options.max_length or None,
        batch_tokens=options.batch_tokens,
        shard_tokens=options.shard_tokens,
        backend_options=backend_options(
            BACKENDS,
            options.backend,
            engine=options.engine,
            servers=options.server,
            concurrency=options.concurrency,
            adapter=adapter,
        ),
    )


def _read_top_k(text: str, teacher: Path) -> int | None:
    """Return the number of tokens of --top-k; None if the option is not used."""
    if text == "all":
        from xtk.text.tokenizer import Tokenizer

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
        if name != "regions":
            terminal.result_line(f"{name:24} {value:,}" if isinstance(value, int | float) else f"{name:24} {value}")
    for region, figures in costs["regions"].items():
        unit = "tokens" if region == "end-of-turn" else "bytes"
        shown = f"{figures['size']:,} {unit} in the sample, {100 * figures['scored_fraction']:.1f} % scored"
        terminal.result_line(f"{region:24} {shown}")


def _merge(options: CacheTeacherOptions) -> None:
    from xtk.cache.merging import merge_caches

    of_merging = {"teacher", "data", "output", "merge", "rows", "force", "as_json", "quiet", "config"}
    names = [field.name for field, _ in declared_options(CacheTeacherOptions) if field.name not in of_merging]
    if given := flags_of_set_options(options, names):
        raise typer.BadParameter(f"--merge does not run a teacher; remove {' and '.join(given)}")
    caches = [options.teacher, *options.data]
    if caches.count("-") > 1:
        raise typer.BadParameter("only one argument can be read from standard input (-)")
    places = [
        place
        for given_place in caches
        for place in (
            [str(record["path"]) for record in terminal.piped_records()] if given_place == "-" else [given_place]
        )
    ]
    figures = merge_caches(places, options.output, rows=options.rows, force=options.force)
    _print_cache(options, figures)
