"""Rows of other tools with token ids and log-probabilities: TRL, axolotl and DistillKit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.api.cache_from_arrays import to_array
from xtk.errors import XtkError
from xtk.importers.completion_logprobs import MAX_LOGPROB
from xtk.importers.distillkit_codec import DistillKitCodec

MESSAGE_COLUMNS = ("messages", "messages_combined")
_VLLM_TOKEN = "token_id:"
# Lists of which at least this share has the token of the text are taken as belonging to the tokens.
MIN_LISTED_SHARE = 0.3
LOWEST_LOGPROB = -1e8
_MAX_TOKENS_AFTER = 8  # of the template, after the last token with log-probabilities
_HINT = "docs/how-to/import.md lists the formats"
_ROW_HINT = "remove this row, or use --skip-invalid"


# Ids and log-probabilities that are listed at a position; None: nothing is listed.
Listed = tuple[NDArray[np.int64], NDArray[np.float64]] | None


@dataclass(frozen=True)
class ListedRow:
    """A row of another tool.

    Attributes:
        format_name: of the tool, for messages.
        lists: of each position, (ids, log-probabilities); None: nothing is listed.
        token_ids: [T], the tokens; None: those of `messages` with the teacher's chat template.
        messages: the conversation, if the row has no tokens.
        tools: its tools.
        first: index of the token that the first list is about; None: it is searched.
        trained: [T], whether a token is trained; None: all that have a list.
    """

    format_name: str
    lists: list[Listed]
    token_ids: NDArray[np.int64] | None = None
    messages: Any = None
    tools: Any = None
    first: int | None = None
    trained: NDArray[np.bool_] | None = None


def listed_row(record: Mapping[str, Any], codec: DistillKitCodec | None, where: str) -> ListedRow | None:
    """Return a row of another tool; None: the columns are of none of them.

    Args:
        record: {column: value}.
        where: name of the row in errors.
    """
    if _has(record, "input_ids", "bytepacked_indices", "compressed_logprobs"):
        return _read_compressed(record, codec, where)
    for columns, read in _READERS:
        if _has(record, *columns):
            return read(record, where)
    return _read_vllm_lists(record, where)


def _has(record: Mapping[str, Any], *columns: str) -> bool:
    return all(record.get(name) is not None for name in columns)


def fitted_row(row: ListedRow, token_ids: NDArray[np.int64], where: str) -> tuple[list[Listed], NDArray[np.bool_]]:
    """Return the lists at the tokens that they are about, and which tokens are trained.

    Tools differ in whether list i is about token i or i + 1, and templates end with tokens that have no list. So the
    lists are put where most of them have the token of the text.

    Args:
        token_ids: [T], its tokens.
        where: name of the row in errors.
    """
    if token_ids.ndim != 1 or not len(token_ids) or (row.trained is not None and row.trained.ndim != 1):
        raise XtkError("the token ids or labels of the row are not a list of integers", where=where, hint=_ROW_HINT)
    size, count = len(token_ids), len(row.lists)
    if row.first is not None:
        firsts: Sequence[int] = (row.first,)
    elif row.token_ids is not None:
        firsts = (1, 0)
    else:
        firsts = range(size - count, max(size - count - _MAX_TOKENS_AFTER, -count), -1)
    best, share = max(((first, _listed_share(row.lists, token_ids, first)) for first in firsts), key=lambda one: one[1])
    if share < MIN_LISTED_SHARE:
        raise XtkError(
            f"only {share:.0%} of the {count:,} lists have the token of the text, so they are of other tokens",
            where=where,
            hint="use the teacher's own --tokenizer, with the chat template that the other tool used",
        )
    placed: list[Listed] = [None] * size
    for at, entries in enumerate(row.lists):
        if 0 < at + best < size:
            placed[at + best] = entries
    trained = np.array([item is not None for item in placed], np.bool_)
    if row.trained is not None:
        trained &= row.trained[:size] if len(row.trained) >= size else np.zeros(size, np.bool_)
    return placed, trained


def _listed_share(lists: Sequence[Listed], token_ids: NDArray[np.int64], first: int) -> float:
    """Return the share of lists that have the token `first` places later."""
    pairs = [(entries[0], first + at) for at, entries in enumerate(lists) if entries is not None and first + at > 0]
    hits = [token < len(token_ids) and token_ids[token] in ids for ids, token in pairs]
    return float(np.mean(hits)) if hits else 0.0


def _pairs(ids: Any, logprobs: Any, names: tuple[str, str], where: str) -> list[Listed]:
    """Return lists of ids and log-probabilities without entries that fill them up."""
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        raise XtkError(f"{names[0]} and {names[1]} are not lists of the same length", where=where, hint=_HINT)
    listed_pairs: list[Listed] = []
    for some, values in zip(ids, logprobs, strict=True):
        if some is None or values is None:
            listed_pairs.append(None)
            continue
        if not isinstance(some, list) or not isinstance(values, list) or len(some) != len(values):
            raise XtkError(f"{names[0]} and {names[1]} have different shapes", where=where, hint=_HINT)
        # TRL writes None for NaN of its server; -inf and -1e9 fill up.
        pairs = [(token, value) for token, value in zip(some, values, strict=True) if value is not None]
        numbers = to_array(names[0], [token for token, _ in pairs], np.int64, where)
        amounts = to_array(names[1], [value for _, value in pairs], np.float64, where)
        if numbers.ndim != 1 or amounts.ndim != 1:
            raise XtkError(f"{names[0]} and {names[1]} have different shapes", where=where, hint=_HINT)
        kept = ~(amounts <= LOWEST_LOGPROB)
        if not (amounts <= MAX_LOGPROB).all() or (numbers[kept] < 0).any():
            what = f"{names[0]} has an id below 0, or {names[1]} a value that is not a log-probability"
            raise XtkError(what, where=where, hint=_ROW_HINT)
        listed_pairs.append((numbers[kept], amounts[kept]) if kept.any() else None)
    return listed_pairs


def _read_trl(record: Mapping[str, Any], where: str) -> ListedRow:
    """Read what TRL's VLLMClient returns, a row for each completion."""
    prompt = to_array("prompt_ids", record["prompt_ids"], np.int64, where)
    completion = to_array("completion_ids", record["completion_ids"], np.int64, where)
    lists = _pairs(record["logprob_token_ids"], record["logprobs"], ("logprob_token_ids", "logprobs"), where)
    if prompt.ndim != 1 or completion.ndim != 1 or len(lists) != len(completion):
        what = f"the row has {len(lists):,} lists for {len(completion):,} tokens of the completion"
        raise XtkError(what, where=where, hint=_HINT)
    observed = record.get("actual_logprobs")
    if observed is not None:
        lists = _with_observed(lists, completion, observed, where)
    return ListedRow("TRL", lists, token_ids=np.concatenate([prompt, completion]), first=len(prompt))


def _with_observed(lists: list[Listed], tokens: NDArray[np.int64], observed: Any, where: str) -> list[Listed]:
    values = to_array("actual_logprobs", observed, np.float64, where).reshape(-1)
    if len(values) != len(tokens):
        raise XtkError("actual_logprobs has not one value per token of the completion", where=where, hint=_HINT)
    completed = []
    for one, token, value in zip(lists, tokens, values, strict=True):
        if one is not None and token not in one[0] and np.isfinite(value):
            one = (np.append(one[0], token), np.append(one[1], value))
        completed.append(one)
    return completed


def _read_axolotl_prepared(record: Mapping[str, Any], where: str) -> ListedRow:
    """Read a row of a dataset that axolotl has prepared."""
    names = ("target_token_ids", "target_logprobs")
    lists = _pairs(record[names[0]], record[names[1]], names, where)
    ids = to_array("input_ids", record["input_ids"], np.int64, where)
    labels = record.get("labels")
    trained = None if labels is None else to_array("labels", labels, np.int64, where) != -100
    masks = record.get("target_mask")
    if isinstance(masks, list) and len(masks) == len(lists):
        is_used = [not isinstance(mask, list) or any(mask) for mask in masks]
        lists = [one if used else None for one, used in zip(lists, is_used, strict=True)]
    return ListedRow("axolotl", lists, token_ids=ids, trained=trained)


def _read_axolotl_lists(record: Mapping[str, Any], where: str) -> ListedRow:
    """Read a row of a dataset for axolotl: a conversation, and lists of its last tokens."""
    names = ("target_token_ids", "logprobs")
    return _of_conversation(record, _pairs(record[names[0]], record[names[1]], names, where), where)


def _read_vllm_lists(record: Mapping[str, Any], where: str) -> ListedRow | None:
    """Read such a row with lists of vLLM: [{"token": "token_id:7", "logprob": -0.5}, ...]."""
    for name, value in record.items():
        first = next((item for item in value if item), None) if isinstance(value, list) else None
        if not isinstance(first, list) or not isinstance(first[0], Mapping):
            continue
        if not str(first[0].get("token", "")).startswith(_VLLM_TOKEN):
            continue
        try:
            ids = [
                [str(entry["token"]).removeprefix(_VLLM_TOKEN) for entry in item] if item else None for item in value
            ]
            logprobs = [[entry["logprob"] for entry in item] if item else None for item in value]
        except (KeyError, TypeError):
            what = f"{name} has an entry that is not a token with its log-probability"
            raise XtkError(what, where=where, hint=_ROW_HINT) from None
        return _of_conversation(record, _pairs(ids, logprobs, (name, name), where), where)
    return None


def _of_conversation(record: Mapping[str, Any], lists: list[Listed], where: str) -> ListedRow:
    messages = next((record[name] for name in MESSAGE_COLUMNS if record.get(name) is not None), None)
    if messages is None:
        raise XtkError(
            f"the row has log-probabilities, but no conversation in {' or '.join(MESSAGE_COLUMNS)}",
            where=where,
            hint="rename the column with the conversation to messages",
        )
    return ListedRow("axolotl", lists, messages=messages, tools=record.get("tools"))


def _read_top_values(record: Mapping[str, Any], where: str) -> ListedRow:
    """Read a row of DistillKit without compression."""
    lists = _pairs(record["token_ids"], record["top_values"], ("token_ids", "top_values"), where)
    return ListedRow("DistillKit", lists, token_ids=to_array("input_ids", record["input_ids"], np.int64, where))


def _read_compressed(record: Mapping[str, Any], codec: DistillKitCodec | None, where: str) -> ListedRow:
    """Read a row of DistillKit; list i is about token i + 1."""
    if codec is None:
        raise XtkError(
            "columns of DistillKit need its compression_config.yaml",
            where=where,
            hint="keep the file in the folder of the Parquet files, as DistillKit writes it",
        )
    ids, logprobs = codec.decode(record["bytepacked_indices"], record["compressed_logprobs"], where)
    lists: list[Listed] = list(zip(ids, logprobs, strict=True))
    tokens = to_array("input_ids", record["input_ids"], np.int64, where)
    return ListedRow("DistillKit", lists, token_ids=tokens, first=1)


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], ListedRow]], ...] = (
    (("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"), _read_trl),
    (("input_ids", "target_token_ids", "target_logprobs"), _read_axolotl_prepared),
    (("target_token_ids", "logprobs"), _read_axolotl_lists),
    (("input_ids", "token_ids", "top_values"), _read_top_values),
)
