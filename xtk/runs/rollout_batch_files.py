"""Files of a rollout batch: the rollouts of each process, stored in the run folder until a later checkpoint exists."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from xtk.errors import CorruptError
from xtk.files.atomic_files import TEMPORARY_PREFIX, atomic_write
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.text.document import Segment
from xtk.text.document_token_ids import SampledTokens

ROLLOUT_BATCHES, COMPARISON_FILE = "rollout_batches", "comparison.json"
_ROLLOUT_FILE_NAMES = re.compile(r"rollouts-(\d{5})-of-(\d{5})\.jsonl")
_BATCH_FILE_NAMES = re.compile(rf"{_ROLLOUT_FILE_NAMES.pattern}|scores-\d{{5}}-\d{{5}}\.arrow|{COMPARISON_FILE}")


def rollout_file_name(rank: int, ranks: int) -> str:
    """Return the name of the file with the rollouts of one process."""
    return f"rollouts-{rank:05d}-of-{ranks:05d}.jsonl"


def complete_rollout_files(folder: Path) -> list[Path] | None:
    """Return the rollout files of a batch, if those of all processes exist."""
    by_ranks: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("rollouts-*.jsonl")):
        if match := _ROLLOUT_FILE_NAMES.fullmatch(path.name):
            by_ranks.setdefault(int(match[2]), {})[int(match[1])] = path
    for ranks, parts in sorted(by_ranks.items()):
        if len(parts) == ranks and max(parts) < ranks:
            return [parts[rank] for rank in range(ranks)]
    return None


def remove_rollout_batch(folder: Path) -> None:
    """Remove the stored rollouts of a batch and their scores; other files stay."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if _BATCH_FILE_NAMES.fullmatch(path.name) or path.name.startswith(TEMPORARY_PREFIX):
            with contextlib.suppress(OSError):  # a folder of the user
                path.unlink()
    with contextlib.suppress(OSError):  # files of the user are left in it
        folder.rmdir()


def write_rollouts(path: Path, rollouts: Sequence[Rollout], run: str) -> None:
    """Write rollouts to a file, each with a checksum."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for number, rollout in enumerate(rollouts):
            sampled, top_ids = rollout.document.sampled_tokens, rollout.top_ids
            record = {
                "prompt": rollout.prompt,
                "sample": rollout.sample,
                "finish_reason": rollout.finish_reason,
                "turns": rollout.num_turns,
                "reward": None if math.isnan(rollout.reward) else rollout.reward,
                "rewards": {name: None if math.isnan(value) else value for name, value in rollout.rewards.items()},
                "complete": rollout.document.is_complete,
                "segments": [[part.role, part.text, part.train] for part in rollout.document.segments],
                "messages": None
                if rollout.document.conversation is None
                else list(rollout.document.conversation.messages),
                "sampled_tokens": None if sampled is None else base64.b64encode(sampled.to_bytes()).decode(),
                "top_ids": None if top_ids is None else np.asarray(top_ids).tolist(),
            }
            place = _record_place(path, run, number, len(rollouts))
            stream.write(json.dumps({**record, "checksum": _rollout_checksum(place, record)}) + "\n")


def _record_place(path: Path, run: str, number: int, count: int) -> str:
    """Return what a record's checksum covers besides its content, so that no record is lost, added or moved."""
    return f"{run} {path.parent.name}/{path.name} {number} of {count}"


def _rollout_checksum(place: str, record: Mapping[str, Any]) -> str:
    """Return the xxh3 checksum of a rollout record and its place."""
    return "xxh3:" + xxhash.xxh3_64_hexdigest(f"{place} {json.dumps(record)}".encode())


def read_rollouts(path: Path, run: str, prompts: Sequence[Prompt]) -> list[Rollout]:
    """Return the rollouts in a file that the run of fingerprint `run` wrote."""
    try:
        records = [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        stated = [record.pop("checksum") for record in records]
    except (ValueError, TypeError, KeyError, RecursionError):
        records, stated = [{}], [""]
    places = [_record_place(path, run, number, len(records)) for number in range(len(records))]
    if stated != list(map(_rollout_checksum, places, records)):
        raise CorruptError("a file of the run's stored rollouts does not match its checksums")
    return [_rollout_of_record(record, prompts) for record in records]


def _rollout_of_record(record: Mapping[str, Any], prompts: Sequence[Prompt]) -> Rollout:
    prompt_document = prompts[record["prompt"]].document
    conversation = prompt_document.conversation
    document = replace(
        prompt_document,
        segments=tuple(Segment(*part) for part in record["segments"]),
        is_complete=record["complete"],
        conversation=None if conversation is None else replace(conversation, messages=tuple(record["messages"])),
        sampled_tokens=None
        if record["sampled_tokens"] is None
        else SampledTokens.from_bytes(base64.b64decode(record["sampled_tokens"])),
    )
    return Rollout(
        document,
        prompt=record["prompt"],
        sample=record["sample"],
        finish_reason=record["finish_reason"],
        num_turns=record["turns"],
        reward=math.nan if record["reward"] is None else record["reward"],
        rewards={name: math.nan if value is None else value for name, value in record["rewards"].items()},
        top_ids=None if record["top_ids"] is None else np.array(record["top_ids"], np.int32),
    )
