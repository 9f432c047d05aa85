"""Rollouts as JSON Lines, input data for `cache-teacher` and `distill`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.data.record_to_document import (
    RECORD_FIELDS,
    ROLLOUT_CHECKSUM,
    check_rollout_checksum,
    json_value,
    rollout_checksum,
)
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import nan_to_none
from xtk.files.output import OutputKind
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.text.document import Document
from xtk.untrusted_json import parse_json

MAX_LINE_BYTES = 1 << 28  # bytes


def rollout_to_json(rollout: Rollout, prompt: Prompt, columns: Mapping[str, str], request: str) -> dict[str, Any]:
    """Return a rollout as a record: document, sampled tokens, rewards, and the other fields of the prompt's record.

    `number_line` makes it a line of a file.
    `columns`: {field: column} for fields with another name in the prompt's record.
    """
    document, tokens = rollout.document, rollout.document.sampled_tokens
    assert tokens is not None
    taken = {*RECORD_FIELDS, *(columns[name] for name in RECORD_FIELDS if name in columns)}
    record = json_value({key: value for key, value in prompt.record.items() if key not in taken})
    if rollout.top_ids is not None:
        record["candidate_ids"] = [sorted(ids) for ids in rollout.top_ids.tolist()]
    return {
        **record,
        **document_fields(document),
        "complete": document.is_complete,
        "student_ids": tokens.ids.tolist(),
        "sampled_mask": tokens.sampled_mask.astype(int).tolist(),
        "student_logprobs": [float(f"{logprob:.9g}") for logprob in tokens.logprobs.tolist()],
        "student_tokenizer": tokens.tokenizer_fingerprint,
        "student_template": tokens.template_fingerprint,
        "advantage": tokens.advantage,
        "prompt_number": rollout.prompt,
        "sample": rollout.sample,
        "finish_reason": rollout.finish_reason,
        "turns": rollout.num_turns,
        "reward": nan_to_none(rollout.reward),
        "rewards": {name: nan_to_none(value) for name, value in rollout.rewards.items()},
        "request": request,
    }


def number_line(record: Mapping[str, Any], number: int, *, is_last: bool) -> dict[str, Any]:
    """Return a record of `rollout_to_json` with its index in the file, and its checksum."""
    line = {**record, "line_number": number, "is_last_line": is_last}
    # The checksum covers the values after parsing, as a reader of the line gets them.
    return {**line, ROLLOUT_CHECKSUM: rollout_checksum(json.loads(json_line(line)))}


def document_fields(document: Document) -> dict[str, Any]:
    """Return a document as the fields of a record."""
    fields: dict[str, Any] = {}
    if document.teacher_prompt is not None:
        prompt = document.teacher_prompt
        fields["teacher_prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if document.conversation is not None:
        fields["messages"] = [
            {**message, "train": train}
            for message, train in zip(document.conversation.messages, document.trained_messages, strict=True)
        ]
        tools = document.conversation.tools
        return fields if tools is None else {**fields, "tools": list(tools)}
    if [segment.role for segment in document.segments] == ["prompt", "completion"]:
        return {**fields, **{segment.role: segment.text for segment in document.segments}}
    parts = [{"role": part.role, "text": part.text, "train": part.train} for part in document.segments]
    return {**fields, "segments": parts}


def read_request_fingerprint(path: Path) -> str | None:
    """Return the request fingerprint in the first line of a rollout file; None if it is another file."""
    with path.open("rb") as stream:
        line = stream.readline(MAX_LINE_BYTES)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    request = record.get("request") if isinstance(record, dict) and "student_ids" in record else None
    return request if isinstance(request, str) else None


def read_statistics(path: Path) -> RolloutStatistics:
    """Return the statistics of a rollout file after checking every line against its checksum (CorruptError)."""
    figures, lines = RolloutStatistics(), list[tuple[Any, Any]]()
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), ""), start=1):
            where = f"{path}, line {number}"
            record = parse_json(line, what="a line of the rollout file", where=where)
            try:
                check_rollout_checksum(record, where)
                figures.add_record(record)
                lines.append((record.get("line_number"), record.get("is_last_line")))
            except (KeyError, TypeError, ValueError, AttributeError):
                raise CorruptError(
                    "a line of the rollout file is not a rollout written by `xtk rollout`",
                    where=where,
                    hint="run the same `xtk rollout` command again with --force",
                ) from None
    figures.has_all_lines = lines == [(at, at + 1 == len(lines)) for at in range(len(lines))]
    return figures


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as a JSON line; values without a JSON type (such as timestamps of parquet) become strings."""
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


@dataclass
class RolloutStatistics:
    """Summary statistics of rollouts, printed when they are written."""

    rollouts: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # number of rollouts that were not written, by reason
    has_all_lines: bool = True  # whether a file that was read has all its lines, in the order of writing
    _read: int = 0
    _turns: int = 0
    _truncated: int = 0
    _rewards: list[float] = field(default_factory=list)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Add a rollout record."""
        mask = record["sampled_mask"]
        self.rollouts += 1
        self.tokens += sum(mask)
        self._read += len(mask) - mask.index(1) - sum(mask)
        self._turns += record["turns"]
        self._truncated += record["finish_reason"] == "length"
        if record["reward"] is not None:
            self._rewards.append(record["reward"])

    def summary(self) -> dict[str, Any]:
        """Return the statistics by name; lengths are in sampled tokens, fractions are in [0, 1]."""
        count = max(self.rollouts, 1)
        return {
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "mean_length": self.tokens / count,
            "truncated_fraction": self._truncated / count,
            "mean_turns": self._turns / count,
            "environment_token_fraction": self._read / max(self.tokens + self._read, 1),
            "mean_reward": sum(self._rewards) / len(self._rewards) if self._rewards else None,
        }


def _finished_rollouts(path: Path, request: str) -> RolloutStatistics:
    """Return the statistics of finished rollouts."""
    if read_request_fingerprint(path) != request:
        raise XtkError(
            "the output file has rollouts that were made from other inputs or options",
            where=str(path),
            hint="use another -o, or --force to replace them",
        )
    statistics = read_statistics(path)
    if not statistics.has_all_lines:
        raise XtkError(
            "lines of the output file were removed, repeated or reordered since it was written",
            where=str(path),
            hint="use another -o, or --force to replace the file",
        )
    return statistics


ROLLOUTS = OutputKind("a file of rollouts", lambda path: read_request_fingerprint(path) is not None, _finished_rollouts)
