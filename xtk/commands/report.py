"""`xtk report`: an HTML page about one or several runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option
from xtk.options.shared import ConfigOption, ForceOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xtk.evaluation.evaluation_result_files import EvaluationResult
    from xtk.pages.report_html import ReportedRun


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk report`."""

    runs: tuple[str, ...] = argument(
        REQUIRED,
        "Output folders of xtk distill, finished or not; the first is the reference. - for standard input.",
        metavar="RUN...",
    )
    output: str = output_option("Output file, an HTML page.", "FILE")
    evaluation: tuple[str, ...] = option(
        (),
        "Results to show as a table: output of xtk evaluate --json or lm-evaluation-harness. Repeatable.",
        metavar="FILE",
    )
    baseline: tuple[str, ...] = option(
        (),
        "Name of a model in --evaluation that the others are compared with. Default: the first. Repeatable.",
        metavar="MODEL",
    )
    teacher: str = option(
        "", "Name of the teacher in --evaluation: its bits per byte are shown with those of the runs.", metavar="MODEL"
    )


def report(options: ReportOptions) -> None:
    """Write an HTML page about one or several runs.

    The page has curves, numbers, options, and completions of on-policy runs. It is one file without scripts or external
    resources. Run the same command again to update the page of an unfinished run.

    Examples:
        xtk report run -o report.html
        xtk report sweep/* --evaluation results.json -o report.html
    """
    import json
    from pathlib import Path

    from xtk.errors import XtkError
    from xtk.evaluation.evaluation_result_files import read_results, shorten_names
    from xtk.files.atomic_files import sha256
    from xtk.files.output import Output
    from xtk.pages.html_page import PAGE, write_page
    from xtk.pages.report_html import report_page

    terminal.set_quiet(options.quiet)
    named = [
        str(one["path"])
        for run in options.runs
        for one in (terminal.piped_records() if run == "-" else [{"path": run}])
    ]
    # The glob FOLDER/* of a sweep also matches the logs of its runs.
    named = [path for path in named if not (path.endswith(".log") and Path(path).is_file())]
    if not named:
        raise XtkError(
            "RUN names only log files of a sweep, not runs",
            where=", ".join(options.runs),
            hint="give output folders of xtk distill",
        )
    evaluations, baselines = list(options.evaluation), list(options.baseline)
    if baselines and not evaluations:
        raise typer.BadParameter(
            "--baseline needs --evaluation; add --evaluation FILE with the output of xtk evaluate --json"
        )
    inputs = {"runs": named, "evaluations": evaluations, "baselines": baselines, "teacher": options.teacher}
    request = sha256(json.dumps(inputs))
    Output(Path(options.output), PAGE, force=options.force, inputs=options.runs).find_finished(request)
    named = _started_runs(named, required=set(options.runs))
    places = {path: str(Path(path).resolve()) for path in named}
    resolved = [places[path] for path in named]
    if twice := next((path for at, path in enumerate(named) if places[path] in resolved[:at]), None):
        raise XtkError("RUN names the same run twice", where=twice, hint="give each run once")
    names = shorten_names(places.values())
    shown = [_read_run(Path(path), names[place]) for path, place in places.items()]
    results = [result for file in evaluations for result in read_results(Path(file))]
    page = report_page(shown, results, baselines, request, _teacher_bits(results, options.teacher))
    write_page(Path(options.output), page)
    records = [
        {"path": run.path, "state": run.state, "command": run.command, "metrics": run.last_values()} for run in shown
    ]
    if len({run.held_out for run in shown} - {""}) > 1:
        terminal.note("report: warning: the runs have different --eval-data; do not compare their eval_ metrics")
    for run in shown:
        terminal.note(f"report: to repeat {run.name}: {run.command}")
    terminal.result_artifact({"path": options.output, "kind": "report", "runs": records}, as_json=options.as_json)


def _teacher_bits(results: Sequence[EvaluationResult], teacher: str) -> float | None:
    """Return the bits per byte of the teacher; None without `--teacher`."""
    from xtk.errors import XtkError

    if not teacher:
        return None
    bits = [result.value for result in results if result.model == teacher and result.metric == "bits_per_byte"]
    if not bits:
        raise XtkError(
            "--evaluation has no bits per byte of the teacher",
            where=f"--teacher {teacher}",
            hint="add it with xtk evaluate MODEL DATA --compare-to TEACHER --json, and name it as there",
        )
    return bits[0]


def _started_runs(named: list[str], required: set[str]) -> list[str]:
    """Return the folders with a started run; a note names the others, unless the user gave them."""
    from pathlib import Path

    from xtk.errors import XtkError

    begun = [path for path in named if (Path(path) / "recipe.json").is_file()]
    for path in named:
        if path in begun:
            continue
        if not begun or (path in required and not Path(path).is_dir()):
            raise XtkError(
                "the folder is not a run of xtk distill: it has no recipe.json",
                where=path,
                hint="give the output folder (-o) of xtk distill",
            )
        terminal.note(f"report: left out {path}: no recipe.json in this folder")
    return begun


def _read_run(path: Path, name: str) -> ReportedRun:
    """Return a finished or unfinished run."""
    from xtk.commands.recorded_run_options import rerun_command
    from xtk.files.atomic_files import read_json_lines
    from xtk.pages.report_html import ReportedRun
    from xtk.runs.folder import RUN_MANIFEST, read_evaluation, read_recipe, read_run_manifest, run_fingerprint

    recipe = read_recipe(path)
    metrics = [one for one in read_json_lines(path / "metrics.jsonl") if isinstance(one.get("step"), int)]
    at = metrics[-1]["step"] if metrics else 0
    state = f"unfinished, at step {at:,}" + (f" of {recipe['max_steps']:,}" if recipe.get("max_steps") else "")
    best_step = None
    if (path / RUN_MANIFEST).is_file():
        content = read_run_manifest(path, ("student",))
        if not metrics:
            terminal.note(f"report: warning: {path} is finished, but its metrics.jsonl is missing or empty")
        state = f"finished, {content.get('steps', at):,} steps"
        if best := content.get("best"):
            best_step = best["step"]
            state += f", best at step {best_step:,}"
    samples = read_json_lines(path / "rollouts.jsonl")
    command = rerun_command(path)
    held_out = str((read_evaluation(path) or {}).get("--eval-data") or "")
    return ReportedRun(
        name, str(path), state, run_fingerprint(recipe), recipe, metrics, samples, command, held_out, best_step
    )
