"""`xtk report`: a page about runs, to look at and to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xtk.commands.report_page import Shown


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
    cache: Annotated[
        str, typer.Option(help="A teacher cache, of which the page shows what it keeps.", metavar="CACHE")
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

    from xtk.artifacts.files import sha256
    from xtk.commands.cache_page import STYLE
    from xtk.commands.page import check_page, write_page
    from xtk.commands.report_page import page
    from xtk.errors import XtkError
    from xtk.evaluation.results import read_results

    terminal.set_quiet(quiet)
    named = [str(one["path"]) for run in runs for one in (terminal.piped_records() if run == "-" else [{"path": run}])]
    # FOLDER/* of a sweep names the logs of its runs too.
    named = [path for path in named if not (path.endswith(".log") and Path(path).is_file())]
    if not named:
        raise XtkError("there are logs here, and no run", where=", ".join(runs))
    evaluations = list(evaluation or ())
    request = sha256(json.dumps({"runs": named, "evaluations": evaluations, "cache": cache}))
    check_page(Path(output), request, force=force)
    if twice := next((one for at, one in enumerate(named) if one in named[:at]), None):
        raise XtkError("this run is named twice", where=twice)
    shown = [_read(Path(path), name) for path, name in zip(named, _names(named), strict=True)]
    results = [result for file in evaluations for result in read_results(Path(file))]
    pictures = _cache(cache) if cache else []
    write_page(Path(output), "".join(page(shown, results, pictures, STYLE, request)))
    told = [{"path": run.path, "state": run.state, "metrics": run.last()} for run in shown]
    terminal.result_artifact({"path": output, "kind": "report", "runs": told}, as_json=as_json)


def _names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths by which they are told apart."""
    from pathlib import Path

    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(some[-length:]) for some in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _read(path: Path, name: str) -> Shown:
    """Read a run, finished or not.

    Raises:
        XtkError: this is none.
        Damaged: one of its files is no JSON.
    """
    from xtk.artifacts.files import canonical_json, read_json, sha256
    from xtk.commands.report_page import Shown
    from xtk.errors import XtkError

    if not (path / "recipe.json").is_file():
        raise XtkError("this is no run of xtk distill (recipe.json)", where=str(path))
    recipe = read_json(path / "recipe.json")
    if not {"losses", "inputs"} <= set(recipe):
        raise XtkError("this recipe is none of xtk distill", where=str(path / "recipe.json"))
    metrics = [one for one in _lines(path / "metrics.jsonl") if isinstance(one.get("step"), int)]
    at = metrics[-1]["step"] if metrics else 0
    state = f"unfinished, at step {at:,}" + (f" of {recipe['max_steps']:,}" if recipe.get("max_steps") else "")
    if (path / "xtk.json").is_file():
        content = read_json(path / "xtk.json")
        state = f"finished, {content.get('steps', at):,} steps"
        if best := content.get("best"):
            state += f", the best at {best['step']:,}"
    samples = _lines(path / "rollouts.jsonl")
    return Shown(name, str(path), state, sha256(canonical_json(recipe)), recipe, metrics, samples)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, a line each; none if there is no file. A last line may be cut short by a kill.

    Raises:
        Damaged: another line is no JSON object.
    """
    import json

    from xtk.errors import Damaged

    if not path.is_file():
        return []
    # Not splitlines, which would cut at U+2028 too, which texts may hold.
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            if number + 1 < len(lines):
                raise Damaged("this line is no JSON object", where=f"{path}, line {number + 1}") from None
    return found


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
