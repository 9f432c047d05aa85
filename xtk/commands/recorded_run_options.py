"""recipe.json: the stored options of a run, and the check of its inputs when it is repeated."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.commands.distill_options import DistillOptions, OnPolicyDistillOptions, distill_command
from xtk.errors import MismatchError, path_exists
from xtk.files.run_names import RECIPE_FILE
from xtk.files.storage_folders import is_remote
from xtk.options.declaration import INPUTS, REPORTING, Option, declared_options
from xtk.runs.folder import RECIPE_KEYS, is_recipe, read_recipe

ON_POLICY_KEY = "on_policy"  # of a recipe: which of the two commands repeats the run
_USERS_CODE = re.compile(r"(?P<place>.+\.py)(?P<rest>:.*)", re.DOTALL)
_WITH_OPTIONS = re.compile(r"(?P<place>.*?)(?P<rest>:[a-z][a-z_.-]*=.*)?", re.DOTALL)
_SCHEMA = re.compile(r"(?<=[:,]schema=)[^,]+")


def recipe_options(options: DistillOptions, piped: str = "", num_processes: int = 0) -> dict[str, Any]:
    """Return the options of a run for `recipe.json`: absolute paths, without empty values.

    `piped` replaces `-`, and `num_processes` that in `options` unless it is 0.
    """
    kept: dict[str, Any] = {}
    for field, declared in declared_options(type(options)):
        value = getattr(options, field.name)
        if not declared.is_recorded or value is None or value in ("", ()):
            continue
        if declared.comma_separated:
            kept[field.name] = ",".join(value)
        elif isinstance(value, tuple):
            kept[field.name] = [_absolute(field.name, declared, piped if item == "-" else item) for item in value]
        else:
            kept[field.name] = _absolute(field.name, declared, piped if value == "-" else value)
    kept[ON_POLICY_KEY] = isinstance(options, OnPolicyDistillOptions)
    return {**kept, "num_processes": num_processes or options.num_processes}


def _absolute(name: str, declared: Option, value: Any) -> Any:
    """Return the value of an option, with absolute paths of existing files and folders."""
    if declared.is_path:
        return _absolute_path(value)
    if name == "prompt_template":
        return _absolute_path(value) if value.endswith(".jinja") else value
    if name in ("reward", "environment"):
        value = _SCHEMA.sub(lambda match: _absolute_path(match[0]), value)
        match = _USERS_CODE.fullmatch(value)
    elif name in ("teacher", "reference", "eval_tasks"):
        match = _WITH_OPTIONS.fullmatch(value)
    else:
        return value
    if match is None or (name, match["place"]) == ("teacher", "self"):
        return value
    return _absolute_path(match["place"]) + (match["rest"] or "")


def _absolute_path(path: str) -> str:
    """Return the absolute path of an existing file or folder; hub ids, URLs and other text unchanged."""
    if is_remote(path):
        return path
    expanded = os.path.expanduser(path)  # noqa: PTH111 (an unknown user is not an error here)
    return os.path.abspath(expanded) if path_exists(expanded) else path  # noqa: PTH100 (keeps symbolic links)


def check_rerun(options: DistillOptions, kept: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Compare a run with the recipe that was passed to `--config`, if the file is a recipe.

    Options on the command line override the recipe, and may change what follows from them. `kept` is the result of
    `recipe_options`.
    """
    config = options.config
    content = _recipe(config)
    if content is None:
        return
    stated = read_recipe(Path(config))
    given = {name.replace("-", "_"): value for name, value in content.items() if name not in RECIPE_KEYS}
    effects = {field.name: declared.effect for field, declared in declared_options(type(options))}
    changed = {effect for name, effect in effects.items() if kept.get(name) != given.get(name)} - {REPORTING}
    ours, theirs = (
        dict(_flatten_identity(one if not changed else {"inputs": one["inputs"]})) for one in (identity, stated)
    )
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if not differing:
        return
    if INPUTS in changed:
        terminal.note(f"distill: inputs differ from {config}: {', '.join(differing)}")
        return
    shown = [
        f"{name}: {theirs.get(name, 'none')} in the recipe, {ours.get(name, 'none')} now" for name in differing[:3]
    ]
    raise MismatchError(
        f"the inputs have changed since this recipe was written: {', '.join(differing)}",
        where=f"{config} ({'; '.join(shown)})",
        hint="restore the inputs; or, to use the options only, remove kind, version and identity from a copy of the "
        "recipe",
    )


def _recipe(config: str) -> dict[str, Any] | None:
    """Return the content of a recipe; None for any other configuration file."""
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8")) if config else None
    except ValueError:
        return None
    return content if isinstance(content, dict) and is_recipe(content) else None


def _flatten_identity(content: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    entries = []
    for name, value in content.items():
        entries += (
            _flatten_identity(value, f"{before}{name}.")
            if isinstance(value, dict)
            else [(before + name, json.dumps(value))]
        )
    return entries


def rerun_command(run: Path) -> str:
    """Return the command that repeats a run into a new folder, NEW."""
    recipe = run / RECIPE_FILE
    command = distill_command(on_policy=(_recipe(str(recipe)) or {}).get(ON_POLICY_KEY) is True)
    return shlex.join(["xtk", command, "--config", str(recipe), "-o", "NEW"])
