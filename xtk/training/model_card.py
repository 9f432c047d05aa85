"""The model card of a student: from what it was distilled and how, without paths of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xtk import __version__
from xtk.evaluation.result_tables import EvaluationResult, format_result, result_rows, shorten_names

_OF_THE_HUB = re.compile(r"^models--([\w.-]+?)--([\w.-]+)$")
# What of a recipe stands on lines of its own.
_APART = ("losses", "inputs")


@dataclass(frozen=True)
class Provenance:
    """What a student comes from.

    Attributes:
        student: the name of the folder that it began as, or its id on the hub.
        teachers: what caches tell of each.
        data: fingerprints of the documents.
    """

    student: str = ""
    teachers: Sequence[Mapping[str, Any]] = ()
    data: Sequence[str] = ()


def public_model_name(folder: Path) -> str:
    """Return the hub id of a model that the hub's client has downloaded, else the name of its folder."""
    for part in reversed(folder.resolve().parts):
        if found := _OF_THE_HUB.match(part):
            return f"{found[1]}/{found[2]}"
    return folder.resolve().name


def model_card(provenance: Provenance, manifest: Mapping[str, Any], first_metrics: Mapping[str, Any]) -> str:
    """Return a card for `README.md`.

    Args:
        provenance: what the student comes from.
        manifest: what `xtk.json` says.
        first_metrics: the first metrics of the run.
    """
    recipe, after = manifest["recipe"], manifest["metrics"]
    per_step = manifest.get("documents_per_step", recipe["documents_per_step"])
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation",
                            "tags": ["distillation", "xtk"]}  # fmt: skip
    if "/" in provenance.student:
        head["base_model"] = provenance.student
    teachers = [
        f"`{teacher['name']}` (weights {_short_fingerprint(teacher['weights'])})" for teacher in provenance.teachers
    ]
    weights = recipe["inputs"]["student"]["weights"]
    before_it = (
        f"`{provenance.student}` (weights {_short_fingerprint(weights)})"
        if provenance.student
        else f"weights {_short_fingerprint(weights)}"
    )
    facts = [
        ("Student before", before_it),
        ("Teachers" if len(teachers) > 1 else "Teacher", ", ".join(teachers) or _by_fingerprint(recipe["inputs"])),
        ("Losses", ", ".join(f"`{loss}`" for loss in recipe["losses"])),
        ("Data", ", ".join(_short_fingerprint(one) for one in provenance.data)),
        ("Steps", f"{manifest['steps']:,} of {per_step:,} documents"),
        ("Tokens", f"{int(after['tokens']):,}" if "tokens" in after else ""),
        ("Skipped steps", f"{after['skipped_steps']:,}" if after.get("skipped_steps") else ""),
        ("Weights", _which(manifest)),
        ("Trained by", f"xtk {__version__}"),
    ]
    told = sorted((key, value) for key, value in recipe.items() if key not in _APART)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=True).strip(),
            "---",
            "",
            f"# {provenance.student.rpartition('/')[2] or 'A student'}, distilled",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in facts if value),
            "",
            "## Metrics",
            "",
            f"| metric | step {first_metrics.get('step', '?')} | step {after.get('step', '?')} |",
            "| --- | --- | --- |",
            *(
                f"| {name} | {_format_value(first_metrics.get(name))} | {_format_value(after[name])} |"
                for name in _quality_metrics(after)
            ),
            "",
            "## Recipe",
            "",
            "| option | value |",
            "| --- | --- |",
            *(f"| `{key}` | `{value}` |" for key, value in told),
            "",
        ]
    )


def add_evaluation_table(card: str, results: Sequence[EvaluationResult]) -> str:
    """Return a card with a table of evaluations before its recipe; of several models, a column for each.

    Raises:
        XtkError: two results of one name differ.
    """
    if not results:
        return card
    models = list(dict.fromkeys(one.model for one in results))
    called = shorten_names(models)  # no folders of a machine
    rows = [
        f"| {row.data} | {row.metric} | "
        f"{' | '.join(format_result(row.by_model[model]) if model in row.by_model else '' for model in models)} |"
        for row in result_rows(results)
    ]
    heads = " | ".join(["data", "metric", *(["value"] if len(models) == 1 else called.values())])
    table = "\n".join(["## Evaluation", "", f"| {heads} |", "| --- " * (2 + len(models)) + "|", *rows, "", ""])
    head, recipe, rest = card.partition("## Recipe\n")
    return head + table + recipe + rest


def _by_fingerprint(inputs: Mapping[str, Any]) -> str:
    """Return what is known of teachers whose names are not."""
    found = [inputs[key] for key in ("cache", "caches", "teacher", "teachers") if inputs.get(key)]
    named = [one for some in found for one in (some if isinstance(some, list) else [some])]
    return ", ".join(_short_fingerprint(one) for one in named) or "none: it learnt from text alone"


def _which(content: Mapping[str, Any]) -> str:
    parts = []
    if decay := content["recipe"].get("ema_decay"):
        parts.append(f"the moving average of all steps (decay {decay})")
    if best := content.get("best"):
        parts.append(f"those after step {best['step']:,}, with {best['eval_bits_per_byte']:.4f} bits a byte")
    return "; ".join(parts)


def _quality_metrics(after: Mapping[str, Any]) -> list[str]:
    """Return the metrics that say how good the student is: not clocks, counts and rates."""
    others = ("step", "learning_rate", "gradient_norm", "tokens", "tokens_per_second", "training_seconds",
              "skipped_steps", "data_wait_fraction", "peak_memory_gib")  # fmt: skip
    return [name for name, value in after.items() if name not in others and isinstance(value, int | float)]


def _short_fingerprint(fingerprint: str) -> str:
    return f"`{fingerprint[:23]}`"


def _format_value(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
