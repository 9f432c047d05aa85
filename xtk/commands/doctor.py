"""`xtk doctor`: checks and cost estimates before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import shared_options

if TYPE_CHECKING:
    from xtk.doctor.doctor_inputs import Finding

LEVEL_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def doctor(
    student: Annotated[str, typer.Argument(help="Student model: a folder or hub id.", metavar="STUDENT")],
    teacher: Annotated[str, typer.Argument(help="Teacher model: a folder or hub id.", metavar="TEACHER")],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Teacher cache, documents, or both. Without them, only the two models are checked.",
            metavar="[CACHE] [DATA...]",
            show_default=False,
        ),
    ] = None,
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Planned output path of cache and student; its free disk space is checked."
        ),
    ] = ".",
    num_processes: Annotated[int, typer.Option(help="Planned number of training processes.", min=1)] = 1,
    parallel: Annotated[
        str, typer.Option(help="Planned --parallel of distill, such as fsdp=2,tp=4.", metavar="NAME=N,...")
    ] = "",
    per_device_train_batch_size: Annotated[
        int, typer.Option(help="Planned documents per forward pass and process.", min=1)
    ] = 8,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Planned forward passes per optimizer step and process.", min=1)
    ] = 1,
    max_batch_tokens: Annotated[
        int, typer.Option(help="Planned maximum tokens per forward pass and process; 0: by documents only.", min=0)
    ] = 0,
    max_length: Annotated[
        int,
        typer.Option(
            help="Planned maximum tokens per document, of cache-teacher and distill; 0: the context length.", min=0
        ),
    ] = 0,
    long_documents: Annotated[
        str,
        typer.Option(
            help="Planned handling of documents longer than the context.", metavar="[refuse|truncate|split|skip]"
        ),
    ] = "refuse",
    dtype: Annotated[
        str,
        typer.Option(
            help="Planned data type of the student's weights in memory (distill --dtype).", metavar="[float32|bfloat16]"
        ),
    ] = "float32",
    mixed_precision: Annotated[
        str, typer.Option(help="Planned mixed precision of the training.", metavar="[no|bf16]")
    ] = "no",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Plan with gradient checkpointing.")
    ] = False,
    attn_implementation: Annotated[
        str, typer.Option(help="Planned attention implementation. Default: chosen by transformers.", metavar="NAME")
    ] = "",
    lora_r: Annotated[int, typer.Option(help="Planned LoRA rank; 0: train the full model.", min=0)] = 0,
    lora_target_modules: Annotated[
        str, typer.Option(help="Planned modules with LoRA adapters.", metavar="NAME,...")
    ] = "all-linear",
    ema_decay: Annotated[
        float, typer.Option(help="Planned decay of the moving average of the weights; 0: none.")
    ] = 0.0,
    save_total_limit: Annotated[int, typer.Option(help="Planned number of checkpoints kept.", min=1)] = 2,
    teacher_dtype: Annotated[
        str, typer.Option(help="Planned data type of the teacher.", metavar="[float32|bfloat16|float16]")
    ] = "float32",
    batch_tokens: Annotated[int, typer.Option(help="Planned tokens per forward pass of the teacher.", min=1)] = 8192,
    top_k: Annotated[
        int, typer.Option(help="Planned number of stored tokens per position; 0: the default of cache-teacher.", min=0)
    ] = 0,
    tokens_per_second: Annotated[
        float,
        typer.Option(
            help="Teacher speed that cache-teacher --estimate prints, to estimate its time; 0: no estimate.", min=0
        ),
    ] = 0.0,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Find problems and costs of a planned run.

    Loads no weights. Exits with code 1 if the run would fail.

    Examples:
        xtk doctor ./student ./teacher corpus.jsonl
        xtk doctor ./student ./teacher cache --num-processes 4 --parallel fsdp=4 --dtype bfloat16
    """
    import dataclasses
    from pathlib import Path

    from xtk.artifacts.corpus_reader import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import resolve_model_folder
    from xtk.artifacts.teacher_cache import TeacherCache, is_cache
    from xtk.doctor.all_checks import run_checks
    from xtk.doctor.doctor_inputs import LEVELS, DoctorInputs, DoctorModel, RunPlan
    from xtk.models.causal_lm import DTYPES, silence_transformers
    from xtk.name_registry import load_registered, unknown_name_error
    from xtk.training.parallel_config import parse_parallel

    given = dict(locals())
    terminal.set_quiet(quiet)
    for name in (dtype, teacher_dtype):
        load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), name, "dtype")
    if long_documents not in (ways := ("refuse", "truncate", "split", "skip")):
        raise unknown_name_error("value of --long-documents", long_documents, ways)
    if mixed_precision not in ("no", "bf16"):
        raise unknown_name_error("value of --mixed-precision", mixed_precision, ("no", "bf16"))
    silence_transformers()
    caches = [place for place in data or [] if is_cache(place)]
    if len(caches) > 1:
        raise typer.BadParameter("xtk doctor takes one cache; run it once for each cache")
    others = [place for place in data or [] if place not in caches]
    own = {field.name: given[field.name] for field in dataclasses.fields(RunPlan) if field.name in given}
    plan = RunPlan(
        **own
        | {
            "parallel": parse_parallel(parallel, num_processes),
            "output": Path(output),
            "tokens_per_second": tokens_per_second,
            "lora_target_modules": tuple(filter(None, lora_target_modules.split(","))),
        }
    )
    case = DoctorInputs(
        DoctorModel.read("student", resolve_model_folder(student, with_weights=False), student),
        DoctorModel.read("teacher", resolve_model_folder(teacher, with_weights=False), teacher),
        plan,
        TeacherCache(caches[0]) if caches else None,
        Corpus(others, parse_columns_option(columns), max_document_bytes) if others else None,
    )
    findings = []
    for finding in run_checks(case):
        findings.append(finding)
        if as_json:
            terminal.result_json({"kind": "finding", **finding.to_json()})
    if not as_json:
        _print_findings(findings)
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    if LEVELS[worst] == "error":
        raise typer.Exit(1)


def _print_findings(findings: list[Finding]) -> None:
    """Print the findings: a table on a terminal, lines elsewhere."""
    if not terminal.stdout_is_terminal():
        for one in findings:
            next_step = f"\n  try:   {one.hint}" if one.hint else ""
            where = f"\n  where: {one.where}" if one.where else ""
            terminal.result_line(f"{one.level:8} {one.check}: {one.what}{where}{next_step}")
        terminal.result_line(_summary(findings))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    for head in ("level", "check", "finding", "where", "next step"):
        table.add_column(head, overflow="fold")
    for one in findings:
        texts = [terminal.printable(text or "") for text in (one.check, one.what, one.where, one.hint)]
        cells: list[Any] = [Text(one.level, LEVEL_STYLES[one.level]), *map(Text, texts)]
        table.add_row(*cells)
    console = Console(file=terminal.result_stream())
    console.print(table)
    terminal.result_line(_summary(findings))


def _summary(findings: list[Finding]) -> str:
    counts = {level: sum(one.level == level for one in findings) for level in LEVEL_STYLES}
    return ", ".join(f"{count} {level}{'s' if count != 1 and level != 'ok' else ''}" for level, count in counts.items())
