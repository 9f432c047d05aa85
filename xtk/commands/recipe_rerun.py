"""Recipes as configuration files: the options that a run keeps, and whether its inputs are unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.artifacts.run_folders import RECIPE_FILE, RECIPE_KEYS, read_recipe, recipe_version
from xtk.artifacts.storage import is_remote
from xtk.errors import MismatchError, path_exists

# What is about one execution of a run, not about the run.
_NOT_KEPT = ("output", "config", "force", "as_json", "quiet", "max_seconds", "machine_rank")
# Options that change neither the student nor the identity of a run.
_HARMLESS = {
    "logging_steps", "save_steps", "save_total_limit", "report_to", "dataloader_num_workers", "ddp_timeout",
    "eval_on_start", "eval_tasks", "trust_remote_code",
}  # fmt: skip
# Options that decide what a run reads, or how that is read.
_OF_INPUTS = {
    "student", "cache", "teacher", "projection", "loss", "columns", "weight_column", "route_column", "on_policy",
    "prompt_template", "apply_chat_template", "long_documents", "max_length", "eval_data", "combine_teachers",
}  # fmt: skip
_PATHS = ("student", "cache", "projection", "eval_data")
_USERS_CODE = re.compile(r"(?P<place>.+\.py)(?P<rest>:.*)", re.DOTALL)
_WITH_OPTIONS = re.compile(r"(?P<place>.*?)(?P<rest>:[a-z][a-z_.-]*=.*)?", re.DOTALL)
_SCHEMA = re.compile(r"(?<=[:,]schema=)[^,]+")


def recipe_options(options: Mapping[str, Any], piped: str = "", num_processes: int = 0) -> dict[str, Any]:
    """Return the options of a run as `recipe.json` keeps them: absolute paths, and nothing that is left empty.

    Args:
        options: the options, by the names of the parameters of `xtk distill`.
        piped: the path that `-` stands for.
        num_processes: on each machine; 0: as many as the options state.
    """
    kept = {}
    for name, value in options.items():
        if name in _NOT_KEPT or value is None or value in ("", []):
            continue
        several = isinstance(value, list | tuple)
        values = [_absolute(name, piped if one == "-" else one) for one in (value if several else [value])]
        kept[name] = values if several else values[0]
    return {**kept, "num_processes": num_processes or options["num_processes"]}


def _absolute(name: str, value: Any) -> Any:
    """Return the value of an option with absolute paths for files and folders that exist."""
    if name in _PATHS:
        return _absolute_path(value)
    if name == "prompt_template":
        return _absolute_path(value) if value.endswith(".jinja") else value
    if name in ("reward", "environment"):
        value = _SCHEMA.sub(lambda found: _absolute_path(found[0]), value)
        found = _USERS_CODE.fullmatch(value)
    elif name in ("teacher", "eval_tasks"):
        found = _WITH_OPTIONS.fullmatch(value)
    else:
        return value
    if found is None or (name, found["place"]) == ("teacher", "self"):
        return value
    return _absolute_path(found["place"]) + (found["rest"] or "")


def _absolute_path(path: str) -> str:
    """Return an absolute path to what exists; a hub id, a URL and what does not exist as they are."""
    if is_remote(path):
        return path
    expanded = os.path.expanduser(path)  # noqa: PTH111 (a user that does not exist is no error here)
    return os.path.abspath(expanded) if path_exists(expanded) else path  # noqa: PTH100 (links stay)


def check_rerun(config: str, options: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Compare a run with the recipe that was passed to `--config`, if it is one.

    Options on the command line win over the recipe, and what follows from them may differ.

    Args:
        config: the file; "": there is none.
        options: of `recipe_options`, of this run.
        identity: of this run.

    Raises:
        Mismatch: names what differs though its options are those of the recipe: inputs that were changed since.
    """
    content = _recipe(config)
    if content is None:
        return
    stated = read_recipe(Path(config))
    kept = {name.replace("-", "_"): value for name, value in content.items() if name not in RECIPE_KEYS}
    changed = {name for name in {*options, *kept} if options.get(name) != kept.get(name)} - _HARMLESS
    ours, theirs = (
        dict(_flatten_identity(one if not changed else {"inputs": one["inputs"]})) for one in (identity, stated)
    )
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if not differing:
        return
    if changed & _OF_INPUTS:
        terminal.note(f"distill: not the inputs of {config}: {', '.join(differing)}")
        return
    shown = [f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here" for name in differing[:3]]
    raise MismatchError(
        f"this would not be the run of the recipe: {', '.join(differing)} differ"
        + ("s" if len(differing) == 1 else ""),
        where=f"{config} ({'; '.join(shown)})",
        hint="restore what was changed since; or remove kind, version and identity from a copy of the recipe: the "
        "rest is options, as in any configuration file",
    )


def _recipe(config: str) -> dict[str, Any] | None:
    """Return the content of a recipe; None of any other file of options, which `--config` has read."""
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8")) if config else None
    except ValueError:
        return None
    return content if isinstance(content, dict) and recipe_version(content) is not None else None


def _flatten_identity(content: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in content.items():
        found += (
            _flatten_identity(value, f"{before}{name}.")
            if isinstance(value, dict)
            else [(before + name, json.dumps(value))]
        )
    return found


def rerun_command(run: Path) -> str:
    """Return the command that makes a run again, into a folder that the reader names."""
    return shlex.join(["xtk", "distill", "--config", str(run / RECIPE_FILE), "-o", "NEW"])
