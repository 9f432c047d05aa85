"""The model card of a student: from what it was distilled and how, without paths of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xtk import __version__
from xtk.evaluation.results import Result, rows_of, short_names, shown

_OF_THE_HUB = re.compile(r"^models--([\w.-]+?)--([\w.-]+)$")
# What of a recipe stands on lines of its own.
_APART = ("losses", "inputs")


@dataclass(frozen=True)
class Lineage:
    """What a student comes from.

    Attributes:
        student: the name of the folder that it began as, or its id on the hub.
        teachers: what caches tell of each.
        data: fingerprints of the documents.
    """

    student: str = ""
    teachers: Sequence[Mapping[str, Any]] = ()
    data: Sequence[str] = ()


def name_of(folder: Path) -> str:
    """Return the hub id of a model that the hub's client has downloaded, else the name of its folder."""
    for part in reversed(folder.resolve().parts):
        if found := _OF_THE_HUB.match(part):
            return f"{found[1]}/{found[2]}"
    return folder.resolve().name


def model_card(origin: Lineage, content: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return a card for `README.md`.

    Args:
        origin: what the student comes from.
        content: what `xtk.json` says.
        before: the first metrics of the run.
    """
    recipe, after = content["recipe"], content["metrics"]
    per_step = content.get("documents_per_step", recipe["documents_per_step"])
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation",
                            "tags": ["distillation", "xtk"]}  # fmt: skip
    if "/" in origin.student:
        head["base_model"] = origin.student
    teachers = [f"`{teacher['name']}` (weights {_code(teacher['weights'])})" for teacher in origin.teachers]
    weights = recipe["inputs"]["student"]["weights"]
    before_it = f"`{origin.student}` (weights {_code(weights)})" if origin.student else f"weights {_code(weights)}"
    facts = [
        ("Student before", before_it),
        ("Teachers" if len(teachers) > 1 else "Teacher", ", ".join(teachers) or _by_fingerprint(recipe["inputs"])),
        ("Losses", ", ".join(f"`{loss}`" for loss in recipe["losses"])),
        ("Data", ", ".join(_code(one) for one in origin.data)),
        ("Steps", f"{content['steps']:,} of {per_step:,} documents"),
        ("Tokens", f"{int(after['tokens']):,}" if "tokens" in after else ""),
        ("Skipped steps", f"{after['skipped_steps']:,}" if after.get("skipped_steps") else ""),
        ("Weights", _which(content)),
        ("Trained by", f"xtk {__version__}"),
    ]
    told = sorted((key, value) for key, value in recipe.items() if key not in _APART)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=True).strip(),
            "---",
            "",
            f"# {origin.student.rpartition('/')[2] or 'A student'}, distilled",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in facts if value),
            "",
            "## Metrics",
            "",
            f"| metric | step {before.get('step', '?')} | step {after.get('step', '?')} |",
            "| --- | --- | --- |",
            *(f"| {name} | {_number(before.get(name))} | {_number(after[name])} |" for name in _compared(after)),
            "",
            "## Recipe",
            "",
            "| option | value |",
            "| --- | --- |",
            *(f"| `{key}` | `{value}` |" for key, value in told),
            "",
        ]
    )


def with_evaluation(card: str, results: Sequence[Result]) -> str:
    """Return a card with a table of evaluations before its recipe; of several models, a column for each.

    Raises:
        XtkError: two results of one name differ.
    """
    if not results:
        return card
    models = list(dict.fromkeys(one.model for one in results))
    called = short_names(models)  # no folders of a machine
    rows = [
        f"| {row.data} | {row.metric} | "
        f"{' | '.join(shown(row.of[model]) if model in row.of else '' for model in models)} |"
        for row in rows_of(results)
    ]
    heads = " | ".join(["data", "metric", *(["value"] if len(models) == 1 else called.values())])
    table = "\n".join(["## Evaluation", "", f"| {heads} |", "| --- " * (2 + len(models)) + "|", *rows, "", ""])
    head, recipe, rest = card.partition("## Recipe\n")
    return head + table + recipe + rest


def _by_fingerprint(inputs: Mapping[str, Any]) -> str:
    """Return what is known of teachers whose names are not."""
    found = [inputs[key] for key in ("cache", "caches", "teacher", "teachers") if inputs.get(key)]
    named = [one for some in found for one in (some if isinstance(some, list) else [some])]
    return ", ".join(_code(one) for one in named) or "none: it learnt from text alone"


def _which(content: Mapping[str, Any]) -> str:
    parts = []
    if decay := content["recipe"].get("ema_decay"):
        parts.append(f"the moving average of all steps (decay {decay})")
    if best := content.get("best"):
        parts.append(f"those after step {best['step']:,}, with {best['eval_bits_per_byte']:.4f} bits a byte")
    return "; ".join(parts)


def _compared(after: Mapping[str, Any]) -> list[str]:
    """Return the metrics that say how good the student is: not clocks, counts and rates."""
    others = ("step", "learning_rate", "gradient_norm", "tokens", "tokens_per_second", "seconds", "skipped_steps",
              "waiting", "memory")  # fmt: skip
    return [name for name, value in after.items() if name not in others and isinstance(value, int | float)]


def _code(fingerprint: str) -> str:
    return f"`{fingerprint[:23]}`"


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
