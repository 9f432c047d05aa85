"""Completions of models as HTML: for the same prompts side by side, and during an on-policy run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.evaluation.evaluation_result_files import shorten_names
from xtk.pages.alignment_html import text_direction

MAX_PROMPTS, MAX_CHARACTERS = 6, 1200  # shown; characters per text

SAMPLES_STYLE = """
.sample { font: 0.95rem/1.6 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  border: 1px solid var(--line); border-radius: 0.3rem; padding: 0.6rem; margin: 0.3rem 0 1rem; }
.prompt { border-style: none none none solid; border-radius: 0; border-width: 0.25rem; }
.facts { color: var(--faint); margin-bottom: 0; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 0 1.5rem; }
"""


@dataclass(frozen=True)
class GeneratedSample:
    """A completion of a prompt.

    Attributes:
        model: unique name of the model; the name of the file if the file has none.
        prompt_number: index of the prompt.
        prompt: text of the prompt; "" if unknown.
        text: the completion.
        reward: its reward; None if it was not scored.
        is_truncated: whether it reached the maximum length.
    """

    model: str
    prompt_number: int
    prompt: str
    text: str
    reward: float | None = None
    is_truncated: bool = False


def read_samples(files: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> list[GeneratedSample]:
    """Return the first completion of each prompt from output files of `xtk rollout` or `xtk evaluate --reward`.

    Args:
        files: (path, parsed lines).

    Raises:
        XtkError: a file has no completions, or is given twice.
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
        for one in written:
            holders.setdefault(one.model, set()).add(name)
    called = shorten_names(holders)  # no folders of a machine
    return [
        replace(one, model=called[one.model] + (f", {name}" if len(holders[one.model]) > 1 else ""))
        for name, written in read.items()
        for one in written
    ]


def _read_sample_file(path: Path, lines: Sequence[Mapping[str, Any]], name: str) -> list[GeneratedSample]:
    """Return the completions of a file; `name` is the model's name if the file has none."""
    found: dict[tuple[str, int, str], GeneratedSample] = {}
    for line in lines:
        number, prompt, text = _prompt_and_completion(line)
        if number is None:
            break
        finish = line.get("finish_reason")
        reward = line.get("reward")
        worth = float(reward) if isinstance(reward, int | float) and abs(reward) <= sys.float_info.max else None
        model = str(line["model"]) if "problem" in line and line.get("model") else name
        key = (model, number, prompt)
        found.setdefault(key, GeneratedSample(model, number, prompt, text, worth, finish == "length"))
    if not found:
        raise XtkError(
            "the file of --samples has no completions",
            where=str(path),
            hint="use the output of xtk rollout -o FILE.jsonl or xtk evaluate --reward NAME -o FILE.jsonl",
        )
    return list(found.values())


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


def samples_section(generated: Sequence[GeneratedSample], format_number: Any) -> Iterator[str]:
    """Yield the completions of the first prompts, as HTML.

    Args:
        generated: completions of all models.
        format_number: function that formats rewards.
    """
    if not generated:
        return
    models = list(dict.fromkeys(one.model for one in generated))
    prompts: dict[int, set[str]] = {}
    for one in generated:
        prompts.setdefault(one.prompt_number, set()).update(filter(None, [one.prompt]))
    blocks: dict[tuple[int, str], dict[str, GeneratedSample]] = {}
    for one in generated:
        prompt = _prompt_of(one, prompts[one.prompt_number])
        blocks.setdefault((one.prompt_number, prompt), {}).setdefault(one.model, one)
    places = sorted(blocks, key=lambda place: place[0])
    yield "<section>\n<h2>Samples</h2>\n"
    if len(places) > MAX_PROMPTS:
        yield f"<p>The first {MAX_PROMPTS} of {len(places):,} prompts.</p>\n"
    for place in places[:MAX_PROMPTS]:
        (at, prompt), here = place, blocks[place]
        yield f"<h3>Prompt {at:,}</h3>\n" + (_sample_html(prompt, "sample prompt") if prompt else "")
        yield '<div class="side">\n'
        for model in models:
            if model in here:
                one = here[model]
                facts = [model, *([] if one.reward is None else [f"reward {format_number(one.reward)}"])]
                facts += ["truncated"] if one.is_truncated else []
                yield f'<div><p class="facts">{escape(", ".join(facts))}</p>\n{_sample_html(one.text)}</div>\n'
        yield "</div>\n"
    yield "</section>\n"


def _prompt_of(one: GeneratedSample, prompts: Collection[str]) -> str:
    """Return the prompt of a completion; if unknown, the prompt that all others of this index share."""
    return one.prompt or (next(iter(prompts)) if len(prompts) == 1 else "")


def samples_over_time(records: Sequence[Mapping[str, Any]], format_number: Any) -> Iterator[str]:
    """Yield completions of a student during an on-policy run, as HTML.

    Args:
        records: one record per batch of rollouts.
        format_number: function that formats rewards.
    """
    places = sorted({round(place * (len(records) - 1) / max(MAX_PROMPTS - 1, 1)) for place in range(MAX_PROMPTS)})
    for place in places:
        one = records[place]
        facts = [f"before step {one.get('step', 0) + 1:,}", f"prompt {one.get('prompt', '?')}"]
        facts += [f"reward {format_number(one['reward'])}"] if isinstance(one.get("reward"), int | float) else []
        facts += ["truncated"] if one.get("finish_reason") == "length" else []
        yield f'<p class="facts">{escape(", ".join(facts))}</p>\n{_sample_html(str(one.get("text", "")))}'


def _sample_html(text: str, kind: str = "sample") -> str:
    more = "…" if len(text) > MAX_CHARACTERS else ""
    shown = escape(text[:MAX_CHARACTERS]) + more
    return f'<p class="{kind}" lang="" translate="no" dir="{text_direction(text)}">{shown or "<i>∅</i>"}</p>\n'
