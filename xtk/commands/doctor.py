"""`xtk doctor`: checks and cost estimates before a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from xtk.doctor.doctor_inputs import DoctorInputs, Finding

# Checks that print what the run costs and does: these findings are printed even if nothing is wrong.
COSTS = ("auto_loss", "teacher_level", "memory", "disk")
MAX_PATH = 40  # characters of a path that is printed in full


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CorpusOptions, ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk doctor`."""

    MAIN_OPTIONS = (
        "columns", "max_length", "output", "per_device_train_batch_size", "dtype", "lora_r", "num_processes", "html",
        "as_json",
    )  # fmt: skip
    HEADINGS = (
        Heading("Data", (CorpusOptions, "long_documents", "max_length", "html")),
        Heading("Planned cache", ("teacher_dtype", "batch_tokens")),
        Heading(
            "Planned training run",
            (
                "output", "num_processes", "parallel", "per_device_train_batch_size", "max_batch_tokens", "dtype",
                "mixed_precision", "gradient_checkpointing", "attn_implementation", "lora_r", "save_total_limit",
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
    verbose: bool = option(
        False, "Also print notes and the checks that passed.", flags=("--verbose", "-v"), is_recorded=False
    )
    long_documents: str = redeclared(CacheTeacherOptions, "long_documents")
    max_length: int = redeclared(DistillOptions, "max_length")
    teacher_dtype: str = redeclared(CacheTeacherOptions, "dtype")
    batch_tokens: int = redeclared(CacheTeacherOptions, "batch_tokens", help="Tokens per forward pass of the teacher.")
    output: str = output_option("Output path of cache and student; its free disk space is checked.", "PATH", ".")
    num_processes: int = redeclared(DistillOptions, "num_processes")
    parallel: str = redeclared(DistillOptions, "parallel")
    per_device_train_batch_size: int = redeclared(DistillOptions, "per_device_train_batch_size")
    max_batch_tokens: int | None = redeclared(DistillOptions, "max_batch_tokens")
    dtype: str = redeclared(DistillOptions, "dtype", choices=MODEL_DTYPES)
    mixed_precision: str = redeclared(DistillOptions, "mixed_precision")
    gradient_checkpointing: bool = redeclared(DistillOptions, "gradient_checkpointing")
    attn_implementation: str = redeclared(DistillOptions, "attn_implementation")
    lora_r: int = redeclared(DistillOptions, "lora_r")
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
        _print_findings(findings, (options.student, options.teacher, *options.data), all_of_them=options.verbose)
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


def _print_findings(findings: list[Finding], names: Sequence[str], *, all_of_them: bool) -> None:
    """Print errors, warnings and costs (`all_of_them`: all findings), with shortened paths of the inputs, a verdict."""
    from xtk.doctor.doctor_inputs import LEVELS

    shortened = {name: short for name in names if (short := _shorten_path(name)) != name}
    for finding in sorted(findings, key=lambda finding: -LEVELS.index(finding.level)):
        if all_of_them or finding.level in ("error", "warning"):
            _print_finding(finding, shortened)
        elif finding.level == "ok" and finding.check in COSTS:
            _print_finding(replace(finding, where=""), shortened)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    failed = {finding.check for finding in findings if finding.level in ("error", "warning")}
    passed = len({finding.check for finding in findings} - failed)
    notes = f", {terminal.count(counts['note'], 'note')}" if counts["note"] else ""
    terminal.result_line(f"{terminal.count(passed, 'check')} passed{notes}{'' if all_of_them else ' (-v prints them)'}")
    warnings = terminal.count(counts["warning"], "warning")
    verdict = f"ready: {warnings} to read before a long run" if counts["warning"] else "ready: no problem was found"
    if counts["error"]:
        more = f", {warnings}" if counts["warning"] else ""
        verdict = f"{terminal.count(counts['error'], 'error')}{more}: the run would fail; do what is after try:"
    terminal.result_line(verdict)


def _print_finding(finding: Finding, shortened: Mapping[str, str]) -> None:
    """Print a finding; on a terminal, its lines are wrapped between words and indented."""
    import textwrap

    texts = [f"{finding.level:8}{finding.check}: {finding.what}"]
    texts += [f"  where: {finding.where}"] if finding.where else []
    texts += [f"  try:   {finding.hint}"] if finding.hint else []
    for text in texts:
        for name, short in shortened.items():
            text = text.replace(name, short)
        width = terminal.stdout_width()
        wrap = partial(textwrap.wrap, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
        for line in wrap(text, width) if width else [text]:
            terminal.result_line(line)


def _shorten_path(name: str) -> str:
    """Return a path relative to the working directory or the home folder, or the last two parts of a long one."""
    from pathlib import Path

    path = Path(name).absolute()
    if "://" in name or not path.exists():  # a hub id
        return name
    for folder, prefix in ((Path.cwd(), "."), (Path.home(), "~")):
        if path.is_relative_to(folder) and path != folder:
            return min(str(Path(prefix) / path.relative_to(folder)), name, key=len)
    return name if len(name) <= MAX_PATH else "/".join(("...", *path.parts[-2:]))
