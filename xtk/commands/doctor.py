"""`xtk doctor`: checks and cost estimates before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from xtk import terminal
from xtk.commands.cache_teacher import CacheTeacherOptions
from xtk.commands.distill_options import DistillOptions
from xtk.options.declaration import (
    REQUIRED,
    CommandOptions,
    Heading,
    argument,
    option,
    options_of,
    output_option,
    redeclared,
)
from xtk.options.shared import MODEL_DTYPES, ConfigOption, CorpusOptions, ForceOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from pathlib import Path

    from xtk.doctor.doctor_inputs import DoctorInputs, Finding


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CorpusOptions, ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk doctor`."""

    HEADINGS = (
        Heading("Data", (CorpusOptions, "long_documents", "max_length", "html")),
        Heading("Planned cache", ("teacher_dtype", "top_k", "batch_tokens", "tokens_per_second")),
        Heading(
            "Planned training run",
            (
                "output", "num_processes", "parallel", "per_device_train_batch_size", "gradient_accumulation_steps",
                "max_batch_tokens", "dtype", "mixed_precision", "gradient_checkpointing", "attn_implementation",
                "lora_r", "lora_target_modules", "ema_decay", "save_total_limit",
            ),
        ),
    )  # fmt: skip

    student: str = argument(REQUIRED, "Student model: a folder, a GGUF file or a hub id.", metavar="STUDENT")
    teacher: str = argument(REQUIRED, "Teacher model: a folder, a GGUF file or a hub id.", metavar="TEACHER")
    data: tuple[str, ...] = argument(
        (),
        "Teacher cache, documents, or both. Without them, only the two models are checked.",
        metavar="[CACHE] [DATA...]",
        show_default=False,
    )
    html: str = option(
        "",
        "Write a page of the first documents as both models read them, colored by region, to this file.",
        metavar="FILE",
    )
    long_documents: str = redeclared(CacheTeacherOptions, "long_documents")
    max_length: int = redeclared(DistillOptions, "max_length")
    teacher_dtype: str = redeclared(CacheTeacherOptions, "dtype")
    top_k: int = option(0, "Number of stored tokens per position; 0: the default of cache-teacher.", min=0)
    batch_tokens: int = redeclared(CacheTeacherOptions, "batch_tokens", help="Tokens per forward pass of the teacher.")
    tokens_per_second: float = option(
        0.0, "Teacher speed that cache-teacher --estimate prints, to estimate its time; 0: no estimate.", min=0
    )
    output: str = output_option("Output path of cache and student; its free disk space is checked.", "PATH", ".")
    num_processes: int = redeclared(DistillOptions, "num_processes")
    parallel: str = redeclared(DistillOptions, "parallel")
    per_device_train_batch_size: int = redeclared(DistillOptions, "per_device_train_batch_size")
    gradient_accumulation_steps: int = redeclared(DistillOptions, "gradient_accumulation_steps")
    max_batch_tokens: int | None = redeclared(DistillOptions, "max_batch_tokens")
    dtype: str = redeclared(DistillOptions, "dtype", choices=MODEL_DTYPES)
    mixed_precision: str = redeclared(DistillOptions, "mixed_precision")
    gradient_checkpointing: bool = redeclared(DistillOptions, "gradient_checkpointing")
    attn_implementation: str = redeclared(DistillOptions, "attn_implementation")
    lora_r: int = redeclared(DistillOptions, "lora_r")
    lora_target_modules: tuple[str, ...] = redeclared(DistillOptions, "lora_target_modules")
    ema_decay: float = redeclared(DistillOptions, "ema_decay")
    save_total_limit: int = redeclared(DistillOptions, "save_total_limit")


def doctor(options: DoctorOptions) -> None:
    """Find problems and costs of a planned run.

    Loads weights only of models below a billion parameters, to compare start tokens on a few texts. Exits with code 1
    if the run would fail.

    Examples:
        xtk doctor ./student ./teacher corpus.jsonl
        xtk doctor ./student ./teacher cache --num-processes 4 --parallel fsdp=4 --dtype bfloat16
    """
    from pathlib import Path

    from xtk.cache.output import is_cache
    from xtk.cache.reader import TeacherCache
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.doctor.all_checks import run_checks
    from xtk.doctor.doctor_inputs import LEVELS, DoctorInputs, DoctorModel, RunPlan
    from xtk.models.causal_lm import silence_transformers
    from xtk.models.precision import resolve_batch_tokens, resolve_dtype, resolve_mixed_precision
    from xtk.models.resolver import resolve_model_folder
    from xtk.parallel.parallel_config import parse_parallel

    terminal.set_quiet(options.quiet)
    silence_transformers()
    caches = [place for place in options.data if is_cache(place)]
    if len(caches) > 1:
        raise typer.BadParameter("xtk doctor takes one cache; run it once for each cache")
    others = [place for place in options.data if place not in caches]
    teacher = resolve_model_folder(options.teacher, with_weights=False)
    plan = options_of(
        RunPlan, options, parallel=parse_parallel(options.parallel, options.num_processes), output=Path(options.output),
        teacher_dtype=resolve_dtype(options.teacher_dtype, teacher),
        mixed_precision=resolve_mixed_precision(options.mixed_precision),
        max_batch_tokens=resolve_batch_tokens(options.max_batch_tokens),
    )  # fmt: skip
    case = DoctorInputs(
        DoctorModel.read("student", resolve_model_folder(options.student, with_weights=False), options.student),
        DoctorModel.read("teacher", teacher, options.teacher),
        plan,
        TeacherCache(caches[0]) if caches else None,
        Corpus(others, parse_columns_option(options.columns), options.max_document_bytes) if others else None,
    )
    if options.html:
        _write_page(case, Path(options.html), force=options.force)
    findings = []
    for finding in run_checks(case):
        findings.append(finding)
        if options.as_json:
            terminal.result_json({"kind": "finding", **finding.to_json()})
    if not options.as_json:
        _print_findings(findings)
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    if LEVELS[worst] == "error":
        raise typer.Exit(1)


def _write_page(inputs: DoctorInputs, path: Path, *, force: bool) -> None:
    """Write the page of the first documents."""
    from itertools import islice

    from xtk.data.corpus_reader import CorpusFingerprint
    from xtk.files.atomic_files import canonical_json, sha256
    from xtk.files.output import Output
    from xtk.pages.html_page import PAGE, write_page
    from xtk.pages.regions_html import SHOWN_DOCUMENTS, regions_page

    documents = list(islice(inputs.documents(), SHOWN_DOCUMENTS))
    if not documents:
        raise typer.BadParameter("--html shows documents; add a cache or data")
    names = [(side.name, side.tokenizer) for side in inputs.models]
    parts = [(tokenizer.fingerprint, tokenizer.template_fingerprint) for _, tokenizer in names]
    request = sha256(canonical_json([*parts, str(CorpusFingerprint.of(documents))]))
    Output(path, PAGE, force=force).find_finished(request)
    write_page(path, regions_page(documents, names, request))


def _print_findings(findings: list[Finding]) -> None:
    """Print the findings, and how many there are of each level."""
    from xtk.doctor.doctor_inputs import LEVELS

    for finding in findings:
        where = f"\n  where: {finding.where}" if finding.where else ""
        next_step = f"\n  try:   {finding.hint}" if finding.hint else ""
        terminal.result_line(f"{finding.level:8} {finding.check}: {finding.what}{where}{next_step}")
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    terminal.result_line(
        ", ".join(f"{count} {level}{'s' if count != 1 and level != 'ok' else ''}" for level, count in counts.items())
    )
