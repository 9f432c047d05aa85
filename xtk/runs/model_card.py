"""The model card (README.md) of a student: base model, teachers, data, options and metrics, without local paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xtk import __version__
from xtk.models.resolver import hub_id, model_name

# Parts of the recipe that the first table of the card shows.
_IN_FIRST_TABLE = ("losses", "inputs")


@dataclass(frozen=True)
class Provenance:
    """Base model, teachers and data of a student."""

    student: str = ""  # Hugging Face Hub id or folder name of the base model
    teachers: Sequence[Mapping[str, Any]] = ()  # metadata of each teacher, as in cache headers
    data: Sequence[str] = ()  # fingerprints of the data


def public_model_name(folder: Path) -> str:
    """Return the Hub id of a model in the Hugging Face cache, else the name of its GGUF file or folder."""
    return hub_id(folder) or model_name(folder)


def model_card(provenance: Provenance, manifest: Mapping[str, Any], first_metrics: Mapping[str, Any]) -> str:
    """Return the model card, in Markdown with YAML front matter."""
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
    base_model = (
        f"`{provenance.student}` (weights {_short_fingerprint(weights)})"
        if provenance.student
        else f"weights {_short_fingerprint(weights)}"
    )
    facts = [
        ("Base model", base_model),
        ("Teachers" if len(teachers) > 1 else "Teacher", ", ".join(teachers) or _by_fingerprint(recipe["inputs"])),
        ("Losses", ", ".join(f"`{loss}`" for loss in recipe["losses"])),
        ("Data", ", ".join(_short_fingerprint(path) for path in provenance.data)),
        ("Training", f"{manifest['steps']:,} steps of {per_step:,} documents"),
        ("Training tokens", f"{int(after['tokens']):,}" if "tokens" in after else ""),
        ("Skipped steps", f"{after['skipped_steps']:,}" if after.get("skipped_steps") else ""),
        ("Weights", _weights_description(manifest)),
        ("Trained with", f"xtk {__version__}"),
    ]
    options = sorted((key, value) for key, value in recipe.items() if key not in _IN_FIRST_TABLE)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=True).strip(),
            "---",
            "",
            f"# {provenance.student.rpartition('/')[2] or 'Student'}, distilled",
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
            *(f"| `{key}` | `{value}` |" for key, value in options),
            "",
        ]
    )


def _by_fingerprint(inputs: Mapping[str, Any]) -> str:
    """Return the fingerprints of teachers whose names are not known."""
    listed = [inputs[key] for key in ("cache", "caches", "teacher", "teachers") if inputs.get(key)]
    fingerprints = [entry for some in listed for entry in (some if isinstance(some, list) else [some])]
    return ", ".join(_short_fingerprint(fingerprint) for fingerprint in fingerprints) or "none (trained on text only)"


def _weights_description(content: Mapping[str, Any]) -> str:
    parts = []
    if decay := content["recipe"].get("ema_decay"):
        parts.append(f"exponential moving average of all steps (decay {decay})")
    if best := content.get("best"):
        parts.append(f"best evaluation: step {best['step']:,}, {best['eval_bits_per_byte']:.4f} bits per byte")
    return "; ".join(parts)


def _quality_metrics(after: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics of quality: without times, counts and rates."""
    others = ("step", "learning_rate", "gradient_norm", "tokens", "tokens_per_second", "training_seconds",
              "skipped_steps", "data_wait_fraction", "peak_memory_gib", "kd_scale", "teacher_seconds",
              "generation_seconds", "staleness_steps")  # fmt: skip
    first_step = ("teacher_bits_per_byte", "student_bits_per_byte")
    return [
        name
        for name, value in after.items()
        if name not in others and not name.startswith(first_step) and isinstance(value, int | float)
    ]


def _short_fingerprint(fingerprint: str) -> str:
    return f"`{fingerprint[:23]}`"


def _format_value(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
