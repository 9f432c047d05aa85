"""`xtk cache-teacher`: the teacher reads a corpus once, for every student."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, Heading, argument, option, output_option
from xtk.options.shared import (
    MODEL_DTYPES,
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

    MAIN_OPTIONS = (
        "output", "columns", "support", "top_k", "max_length", "long_documents", "dtype", "batch_tokens", "backend",
        "estimate",
    )  # fmt: skip
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
        Heading("Estimate", ("estimate",)),
    )

    teacher: str = argument(REQUIRED, "Teacher model: a folder, a GGUF file or a hub id.", metavar="TEACHER")
    output: str = output_option(
        "Output folder of the cache, or a URL of an object store such as s3://BUCKET/NAME.", "FOLDER|URL"
    )
    data: tuple[str, ...] = argument(
        REQUIRED,
        "Documents: files, a folder, a quoted glob, a hub dataset, a URL, or - for documents from stdin. "
        "docs/how-to/data.md lists the formats.",
        metavar="DATA...",
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
        1, "With --support sample or top-k+sample: independent sample sets, used in turn by epoch.", min=1, max=1000
    )
    seed: int = option(0, "Random seed of the tokens that --support sample and top-k+sample draw.")
    precision: str = option(
        "standard",
        "Precision of stored log-probabilities: float32 is exact, the others are quantized. Maximum error in nats, "
        "at very small probabilities: fine 0.13, standard 0.53, coarse 1.06.",
        metavar="[float32|fine|standard|coarse]",
    )
    dtype: str = option(
        "auto",
        "Data type of the teacher; auto: that of the checkpoint on a GPU with bf16, float32 on a CPU.",
        choices=MODEL_DTYPES,
    )
    backend: str = option(
        "transformers",
        "Engine that runs the teacher: transformers or vllm (started by this command), or a vLLM server. With the "
        "vLLM engines, only --support top-k, top-p and none.",
        metavar=f"[{'|'.join(BACKENDS)}]",
    )
    engine: tuple[str, ...] = option(
        (),
        "Engine argument, such as tensor_parallel_size=4 (vllm) or device_map=auto (transformers). Repeatable.",
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
    shard_tokens: int = option(65536, "Tokens per shard file; an interrupted run loses at most two per process.", min=1)
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

    After an interruption, the same command resumes.

    Examples:
        xtk cache-teacher ./teacher corpus.jsonl --top-k 64 -o cache
        xtk cache-teacher ./teacher corpus.jsonl --top-k 64 -o cache --estimate
    """
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered

    terminal.set_quiet(options.quiet)
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
        print_cache(options.output, figures, as_json=options.as_json)


def print_cache(output: str, figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the path of a finished cache, and the teacher's bits per byte."""
    bits = figures["teacher_bits_per_byte"]
    if bits is not None:
        terminal.note(f"cache-teacher: the teacher has {bits:.4f} bits per byte on the text that it scored")
    terminal.result_artifact({"path": output, "kind": "teacher-cache", **figures}, as_json=as_json)


def _cache_request(options: CacheTeacherOptions, folder: Path, adapter: Path | None) -> CacheRequest:
    """Return the request of a cache, after checking names and support; `adapter` is a LoRA adapter of the teacher."""
    from xtk.cache.codec.shard_codec_registry import codec_for_precision
    from xtk.cache.teacher_logprobs import make_support
    from xtk.engines.backend import backend_options
    from xtk.models.precision import resolve_dtype
    from xtk.models.resolver import ModelRef
    from xtk.name_registry import load_registered
    from xtk.teachers.cache_build_config import CacheRequest

    codec_for_precision(options.precision)
    backend = load_registered(BACKENDS, options.backend, "backend")
    dtype = resolve_dtype(options.dtype, None if backend.uses_servers else folder)
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
        ModelRef(folder, adapter, dtype, options.trust_remote_code, options.teacher),
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
