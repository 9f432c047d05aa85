"""Rollouts as JSON lines, which `cache-teacher` reads as any other data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.artifacts.dataset_records import RECORD_FIELDS, ROLLOUT_CHECKSUM, check_rollout_checksum, rollout_checksum
from xtk.errors import CorruptError
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.safe_json import parse_json
from xtk.tokens.document import Document

MAX_LINE_BYTES = 1 << 28  # bytes


def rollout_record(rollout: Rollout, prompt: Prompt, columns: Mapping[str, str], request: str) -> dict[str, Any]:
    """Return a rollout as a record: a document's fields, the tokens that were drawn, and what else its row held.

    Args:
        rollout: what a student wrote.
        prompt: what it went on from.
        columns: {field: column} where the prompt's record has another name for a field.
        request: names what was asked for.
    """
    document, tokens = rollout.document, rollout.document.sampled_tokens
    assert tokens is not None
    taken = {*RECORD_FIELDS, *(columns[name] for name in RECORD_FIELDS if name in columns)}
    record = {key: value for key, value in prompt.record.items() if key not in taken}
    if rollout.top_ids is not None:
        record["candidate_ids"] = [sorted(ids) for ids in rollout.top_ids.tolist()]
    line = {
        **record,
        **document_fields(document),
        "ends": document.is_complete,
        "student_ids": tokens.ids.tolist(),
        "student_mask": tokens.sampled_mask.astype(int).tolist(),
        "student_logprobs": [float(f"{logprob:.9g}") for logprob in tokens.logprobs.tolist()],
        "student_tokenizer": tokens.tokenizer_fingerprint,
        "student_template": tokens.template_fingerprint,
        "advantage": tokens.advantage,
        "prompt_number": rollout.prompt,
        "sample": rollout.sample,
        "finish_reason": rollout.finish_reason,
        "turns": rollout.num_turns,
        "reward": _nan_to_none(rollout.reward),
        "rewards": {name: _nan_to_none(value) for name, value in rollout.rewards.items()},
        "request": request,
    }
    # Of what a reader of the line will find: numbers and texts as JSON holds them.
    return {**line, ROLLOUT_CHECKSUM: rollout_checksum(json.loads(json_line(line)))}


def document_fields(document: Document) -> dict[str, Any]:
    """Return a document as the fields of a record."""
    found: dict[str, Any] = {}
    if document.teacher_prompt is not None:
        prompt = document.teacher_prompt
        found["teacher_prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if document.conversation is not None:
        found["messages"] = [
            {**message, "train": segment.train}
            for message, segment in zip(document.conversation.messages, document.segments, strict=True)
        ]
        return {
            **found,
            **({} if document.conversation.tools is None else {"tools": list(document.conversation.tools)}),
        }
    if [segment.role for segment in document.segments] == ["prompt", "completion"]:
        return {**found, **{segment.role: segment.text for segment in document.segments}}
    parts = [{"role": part.role, "text": part.text, "train": part.train} for part in document.segments]
    return {**found, "segments": parts}


def read_request_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the request that a file of rollouts answers; None if it is another file."""
    with path.open("rb") as stream:
        line = stream.readline(MAX_LINE_BYTES)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    request = record.get("request") if isinstance(record, dict) and "student_ids" in record else None
    return request if isinstance(request, str) else None


def read_statistics(path: Path) -> RolloutStatistics:
    """Return the figures of a file of rollouts, every line of it compared with its checksum.

    Raises:
        XtkError: a line is not JSON.
        Damaged: a line does not match its checksum, or is not a rollout.
    """
    figures = RolloutStatistics()
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), ""), start=1):
            where = f"{path}, line {number}"
            record = parse_json(line, what="this line", where=where)
            try:
                check_rollout_checksum(record, where)
                figures.add_record(record)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise CorruptError("this line is not a rollout", where=where) from None
    return figures


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record on a line; what JSON has no form for (a time of a parquet file, say) is its text."""
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


@dataclass
class RolloutStatistics:
    """What rollouts were like, told when they are written.

    Attributes:
        dropped: how many were not written, by the reason.
    """

    rollouts: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    _read: int = 0
    _turns: int = 0
    _truncated: int = 0
    _rewards: list[float] = field(default_factory=list)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Count one line."""
        mask = record["student_mask"]
        self.rollouts += 1
        self.tokens += sum(mask)
        self._read += len(mask) - mask.index(1) - sum(mask)
        self._turns += record["turns"]
        self._truncated += record["finish_reason"] == "length"
        if record["reward"] is not None:
            self._rewards.append(record["reward"])

    def summary(self) -> dict[str, Any]:
        """Return them by name; lengths are tokens that were drawn, `tool_share` is of all behind the prompt."""
        count = max(self.rollouts, 1)
        return {
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "mean_length": self.tokens / count,
            "truncated": self._truncated / count,
            "mean_turns": self._turns / count,
            "tool_share": self._read / max(self.tokens + self._read, 1),
            "mean_reward": sum(self._rewards) / len(self._rewards) if self._rewards else None,
        }
