"""`xtk report`: a page about runs, to look at and to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xtk import terminal
from xtk.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xtk.commands.report_page import Shown
    from xtk.tokens.tokenizer import Tokenizer

DOCUMENTS = 3  # that are shown span by span


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="What xtk distill wrote, finished or not; the others are compared with the first. - for a pipe.",
            metavar="RUN...",
        ),
    ],
    output: options.Output,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            help="Results for a table: what xtk evaluate --json printed, or a results file of lm-evaluation-harness. "
            "Repeat it for more.",
            metavar="FILE",
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="A model of these results with which the others are compared, by its name there; left out: the first. "
            "Repeat it for more: the untrained student, and one that cross-entropy taught.",
            metavar="MODEL",
        ),
    ] = None,
    samples: Annotated[
        list[str] | None,
        typer.Option(
            help="What a model wrote, of xtk rollout -o or xtk evaluate --reward -o. Repeat it: the student before and "
            "after stand side by side, prompt by prompt.",
            metavar="FILE",
        ),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            help="A teacher cache: what it keeps, how its text aligns with the student's tokens, and the audit of the "
            "projection between them.",
            metavar="CACHE",
        ),
    ] = "",
    projection: Annotated[
        str, typer.Option(help="Its audit is shown; left out: with --cache, that of multitoken.", metavar="PROJECTION")
    ] = "",
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Write a page about one run, or several over one another: curves, numbers, recipes, samples.

    The page is one file that fetches nothing and runs no scripts. Of a run that goes on, the same command writes it
    anew.
    """
    import json
    from pathlib import Path

    from xtk.artifacts.files import read_json_lines, sha256
    from xtk.commands import alignment_page, audit_page, cache_page
    from xtk.commands.page import check_page, write_page
    from xtk.commands.report_page import page
    from xtk.commands.samples_page import read_samples
    from xtk.errors import XtkError
    from xtk.evaluation.results import read_results, short_names

    terminal.set_quiet(quiet)
    named = [str(one["path"]) for run in runs for one in (terminal.piped_records() if run == "-" else [{"path": run}])]
    # FOLDER/* of a sweep names the logs of its runs too.
    named = [path for path in named if not (path.endswith(".log") and Path(path).is_file())]
    if not named:
        raise XtkError("there are logs here, and no run", where=", ".join(runs))
    evaluations, texts, baselines = (list(some or ()) for some in (evaluation, samples, baseline))
    if baselines and not evaluations:
        raise typer.BadParameter("--baseline goes with --evaluation")
    asked = {"runs": named, "evaluations": evaluations, "baselines": baselines, "samples": texts}
    request = sha256(json.dumps({**asked, "cache": cache, "projection": projection}))
    check_page(Path(output), request, force=force)
    named = _begun(named, told=set(runs))
    places = {path: str(Path(path).resolve()) for path in named}
    resolved = [places[path] for path in named]
    if twice := next((path for at, path in enumerate(named) if places[path] in resolved[:at]), None):
        raise XtkError("this run is named twice", where=twice)
    names = short_names(places.values())
    shown = [_read(Path(path), names[place]) for path, place in places.items()]
    results = [result for file in evaluations for result in read_results(Path(file))]
    written = read_samples([(Path(file), read_json_lines(Path(file))) for file in texts])
    pictures = [*(_pair(cache, Path(named[0]), projection) if cache or projection else ())]
    pictures += _cache(cache) if cache else []
    style = alignment_page.STYLE + cache_page.STYLE + audit_page.STYLE
    write_page(Path(output), "".join(page(shown, results, baselines, written, pictures, style, request)))
    told = [{"path": run.path, "state": run.state, "metrics": run.last()} for run in shown]
    terminal.result_artifact({"path": output, "kind": "report", "runs": told}, as_json=as_json)


def _begun(named: list[str], told: set[str]) -> list[str]:
    """Return the folders that hold a run; of several, those of runs that died before they began are left out.

    Args:
        named: all.
        told: those that the user named; a sweep also tells of runs that have no folder.

    Raises:
        XtkError: there is none, or one that the user named does not exist.
    """
    from pathlib import Path

    from xtk.errors import XtkError

    begun = [path for path in named if (Path(path) / "recipe.json").is_file()]
    for path in named:
        if path in begun:
            continue
        if not begun or (path in told and not Path(path).is_dir()):
            raise XtkError("this is no run of xtk distill (recipe.json)", where=path)
        terminal.note(f"report: {path} is left out: there is no run in it (recipe.json)")
    return begun


def _read(path: Path, name: str) -> Shown:
    """Read a run, finished or not.

    Raises:
        XtkError: its recipe is none.
        Damaged: one of its files is no JSON.
    """
    from xtk.artifacts.files import canonical_json, read_json, read_json_lines, sha256
    from xtk.artifacts.owned import check_recipe, check_run
    from xtk.commands.report_page import Shown
    from xtk.errors import XtkError

    recipe = read_json(path / "recipe.json")
    if not {"losses", "inputs"} <= set(recipe):
        raise XtkError("this recipe is none of xtk distill", where=str(path / "recipe.json"))
    check_recipe(recipe, str(path / "recipe.json"))
    metrics = [one for one in read_json_lines(path / "metrics.jsonl") if isinstance(one.get("step"), int)]
    at = metrics[-1]["step"] if metrics else 0
    state = f"unfinished, at step {at:,}" + (f" of {recipe['max_steps']:,}" if recipe.get("max_steps") else "")
    if (path / "xtk.json").is_file():
        content = check_run(read_json(path / "xtk.json"), str(path / "xtk.json"))
        state = f"finished, {content.get('steps', at):,} steps"
        if best := content.get("best"):
            state += f", the best at {best['step']:,}"
    samples = read_json_lines(path / "rollouts.jsonl")
    return Shown(name, str(path), state, sha256(canonical_json(recipe)), recipe, metrics, samples)


def _cache(place: str) -> list[str]:
    """Return the pictures of a cache."""
    from html import escape

    from xtk.artifacts import cache_statistics
    from xtk.artifacts.teacher_cache import TeacherCache
    from xtk.commands.cache_page import pictures

    cache = TeacherCache(place)
    positions = cache_statistics.sampled(cache)
    documents = len(cache_statistics.spread(cache, cache_statistics.SAMPLE))
    record = {
        "path": place,
        "header": cache.header,
        "statistics": cache_statistics.statistics(cache, positions, documents),
    }
    return [f"<section>\n<h2>Cache {escape(place)}</h2>\n", *pictures(record, positions), "</section>\n"]


def _pair(cache: str, run: Path, projection: str) -> Iterator[str]:
    """Yield how the student's tokens and the teacher's meet: their alignment, and the audit of a projection.

    Args:
        cache: of the teacher; "": there is none.
        run: of the student.
        projection: whose audit is shown; "": that of the pair's multitoken.
    """
    from pathlib import Path

    from xtk.artifacts import cache_statistics
    from xtk.artifacts.projection_file import read_projection
    from xtk.artifacts.projection_store import projection_for
    from xtk.artifacts.teacher_cache import TeacherCache
    from xtk.commands import alignment_page, audit_page
    from xtk.tokens.statistics import Statistics, aligned

    audited = read_projection(Path(projection)).header["audit"] if projection else None
    student = _tokenizer(run) if cache else None
    if student is not None:
        opened = TeacherCache(cache)
        teacher = opened.teacher
        yield "<section>\n<h2>Alignment</h2>\n"
        if student.fingerprint == teacher.fingerprint:
            yield "<p>Student and teacher have one tokenizer.</p>\n"
        else:
            statistics = Statistics(student, teacher)
            documents = [opened.row(at).document for at in cache_statistics.spread(opened, cache_statistics.SAMPLE)]
            for group in aligned(documents, student, teacher):
                statistics.add(group)
            yield from alignment_page.pictures(statistics.record(), statistics.worst[:DOCUMENTS], student, teacher)
            audited = audited or projection_for(student, teacher).header["audit"]
        yield "</section>\n"
    if audited:
        yield "<section>\n<h2>Audit of the projection</h2>\n"
        yield from audit_page.pictures(audited)
        yield "</section>\n"


def _tokenizer(run: Path) -> Tokenizer | None:
    """Return the tokenizer of a run, or of its last checkpoint; None if there is none yet."""
    from contextlib import suppress

    from xtk.errors import XtkError
    from xtk.tokens.tokenizer import Tokenizer

    for folder in (run, *sorted(run.glob("checkpoint-*"), reverse=True)):
        with suppress(XtkError):
            return Tokenizer(folder, name="student")
    return None
