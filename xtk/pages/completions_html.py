"""Completions of models for the same prompts, and of a student during an on-policy run, for the page of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.evaluation.evaluation_result_files import finite_number, shorten_names
from xtk.pages.html_page import format_number

MAX_PROMPTS = 6  # shown


@dataclass(frozen=True)
class GeneratedSample:
    """A completion of a prompt."""

    model: str  # unique name of the model; the name of the file if the file has none
    prompt_number: int
    prompt: str  # "": unknown
    text: str  # the completion
    reward: float | None = None  # None: not scored
    is_truncated: bool = False  # it reached the maximum length

    def facts(self) -> str:
        """Return model, reward and truncation as text."""
        reward = [] if self.reward is None else [f"reward {format_number(self.reward)}"]
        return ", ".join([self.model, *reward, *(["truncated"] if self.is_truncated else [])])


def read_samples(files: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> list[GeneratedSample]:
    """Return the first completion of each prompt from output files of `xtk rollout` or `xtk evaluate-answers`.

    Args:
        files: (path, parsed lines).
    """
    places = [str(path.resolve()).removesuffix(".jsonl") for path, _ in files]
    if twice := next((at for at, place in enumerate(places) if place in places[:at]), None):
        raise XtkError("--samples names the same file twice", where=str(files[twice][0]), hint="give each file once")
    names = shorten_names(places)
    read = {
        names[place]: _read_sample_file(path, lines, names[place])
        for place, (path, lines) in zip(places, files, strict=True)
    }
    holders: dict[str, set[str]] = {}
    for name, written in read.items():
        for sample in written:
            holders.setdefault(sample.model, set()).add(name)
    called = shorten_names(holders)  # no folders of a machine
    return [
        replace(sample, model=called[sample.model] + (f", {name}" if len(holders[sample.model]) > 1 else ""))
        for name, written in read.items()
        for sample in written
    ]


def _read_sample_file(path: Path, lines: Sequence[Mapping[str, Any]], name: str) -> list[GeneratedSample]:
    """Return the completions of a file; `name` is the model's name if the file has none."""
    samples: dict[tuple[str, int, str], GeneratedSample] = {}
    for line in lines:
        number, prompt, text = _prompt_and_completion(line)
        if number is None:
            break
        reward, is_truncated = finite_number(line.get("reward")), line.get("finish_reason") == "length"
        model = str(line["model"]) if "problem" in line and line.get("model") else name
        sample = GeneratedSample(model, number, prompt, text, reward, is_truncated)
        samples.setdefault((model, number, prompt), sample)
    if not samples:
        raise XtkError(
            "the file of --samples has no completions",
            where=str(path),
            hint="use the output of xtk rollout -o FILE.jsonl or xtk evaluate-answers -o FILE.jsonl",
        )
    return list(samples.values())


def _prompt_and_completion(line: Mapping[str, Any]) -> tuple[int | None, str, str]:
    """Return the index of the prompt, the prompt and the completion."""
    if isinstance(line.get("problem"), int):
        return line["problem"], str(line.get("prompt", "")), str(line.get("answer", ""))
    if not isinstance(line.get("prompt_number"), int):
        return None, "", ""
    if "completion" in line:
        return line["prompt_number"], str(line.get("prompt", "")), str(line["completion"])
    given = line.get("messages") or line.get("segments") or []
    if not isinstance(given, list) or not all(isinstance(part, Mapping) for part in given):
        return None, "", ""
    parts = [
        (bool(part.get("train")), str(part.get("content", part.get("text", ""))), str(part.get("role", "")))
        for part in given
    ]
    begun = next((at for at, part in enumerate(parts) if part[0]), len(parts))
    read = "\n".join(text for _, text, _ in parts[:begun])
    # Messages of tools and environments are shown with their roles.
    completion = "".join(text if train else f"\n[{role}] {text}\n" for train, text, role in parts[begun:])
    return line["prompt_number"], read, completion


def samples_by_prompt(samples: Sequence[GeneratedSample]) -> list[tuple[int, str, list[GeneratedSample]]]:
    """Return (index, prompt, a completion of each model); an unknown prompt is the one that all others share."""
    models = list(dict.fromkeys(sample.model for sample in samples))
    prompts: dict[int, set[str]] = {}
    for sample in samples:
        prompts.setdefault(sample.prompt_number, set()).update(filter(None, [sample.prompt]))
    blocks: dict[tuple[int, str], dict[str, GeneratedSample]] = {}
    for sample in samples:
        shared = prompts[sample.prompt_number]
        prompt = sample.prompt or (next(iter(shared)) if len(shared) == 1 else "")
        blocks.setdefault((sample.prompt_number, prompt), {}).setdefault(sample.model, sample)
    return [
        (number, prompt, sorted(block.values(), key=lambda sample: models.index(sample.model)))
        for (number, prompt), block in sorted(blocks.items(), key=lambda item: item[0][0])
    ]


def evenly_spaced(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first, the last and some records between them."""
    places = {round(place * (len(records) - 1) / (MAX_PROMPTS - 1)) for place in range(MAX_PROMPTS)}
    return [records[place] for place in sorted(places)]
