"""Teacher caches from files of log-probabilities that services and other tools have written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.api.cache_from_arrays import EXACT_SUPPORTS, SAMPLED_SUPPORTS, CacheWriter, to_array
from xtk.api.tokenizer_argument import store_files
from xtk.cache.codec.shard_codec_registry import DEFAULT_PRECISION
from xtk.cache.manifest import MAX_TOKEN_ID
from xtk.cache.reader import TeacherCache
from xtk.data.corpus_reader import Corpus
from xtk.data.record_to_document import OPT_IN_FIELDS
from xtk.errors import XtkError
from xtk.importers.cache_export import SAMPLING_COLUMNS
from xtk.importers.completion_logprobs import (
    ScoredAnswer,
    is_completion_record,
    read_answer,
    row_errors,
    upper_bound,
)
from xtk.importers.foreign_logprobs import CONFIG, DistillKitCodec, Listed, ListedRow, fitted_row, listed_row
from xtk.options.shared import MAX_ROW_BYTES
from xtk.text.tokenizer import Tokenizer
from xtk.text.vocabulary import BYTE_LEVEL_ENCODER
from xtk.untrusted_json import parse_json

ID_COLUMNS = ("token_ids", "logprobs", "top_ids", "top_logprobs")
_CONTENT_COLUMNS = ("messages", "tools", "segments", "text", "prompt", "completion")
_DOCUMENT_COLUMNS = (("messages",), ("segments",), ("text",), ("prompt", "completion"))  # each alone is a document
MAX_NOTES = 3
_START_TOKEN, _END_TOKEN = "<|xtk-start|>", "<|xtk-end|>"
_SUPPORT_ORDER = ("none", "top-k", "candidates")  # of rows with several, the last: it promises the least of its tokens

Row = ScoredAnswer | ListedRow | Mapping[str, Any]


def import_cache(
    # files of `Corpus`. A row is an answer of a service (see `read_answer`), has `ID_COLUMNS`, or is of DistillKit (see
    # `listed_row`).
    sources: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str = "",  # the teacher's; "": the tokens of answers are known by their bytes
    name: str = "",  # the teacher's name; "": that of the model in the first answer, or of the tokenizer
    precision: str = DEFAULT_PRECISION,  # as in `CacheWriter`
    skip_invalid: bool = False,  # skip rows that are invalid, with a note on the first ones
    force: bool = False,  # replace an existing cache; without it, the cache of an equal import is kept
    max_document_bytes: int = MAX_ROW_BYTES,  # maximum size of a row, as stored in its file
) -> tuple[TeacherCache, int]:
    """Write a cache from files; return it, and the number of rows that were skipped."""
    rows = _Rows(
        Corpus(sources, max_document_bytes=max_document_bytes), _find_codec(sources), skip_invalid=skip_invalid
    )
    known: set[bytes] = set()
    model, fingerprints, support = "", set[str](), "none"
    top_k = set[int | None]()
    samplings = set[tuple[str, int, int] | None]()
    for row in rows:
        samplings.add(_sampling_of(row))
        support = max(support, _support_of(row), key=_SUPPORT_ORDER.index)
        top_k.add(_top_k_of(row))
        if isinstance(row, ScoredAnswer):
            model = model or row.model
            fingerprints.add(row.fingerprint)
            if not tokenizer:
                known.update(row.spellings)
        elif not tokenizer:
            raise XtkError(
                "token ids need the teacher's tokenizer", where=", ".join(sources), hint="use --tokenizer FOLDER"
            )
    rows.expected_model = model
    if len(fingerprints) > 1:
        terminal.note(
            f"cache import: the answers have {len(fingerprints)} values of system_fingerprint: the service changed its "
            "configuration between them"
        )
    place = tokenizer or _write_byte_tokenizer(known)
    if len(samplings) == 1 and (common := next(iter(samplings))) is not None:  # else samples are left out
        support = common[0]
    with CacheWriter(
        output, place, name=name or Path(model).name, support=support,
        top_k=next(iter(top_k)) if len(top_k) == 1 and support in ("top-k", "top-k+sample") else None,
        precision=precision, force=force, exist_ok=True, is_vocabulary_complete=bool(tokenizer),
    ) as writer:  # fmt: skip
        rows.with_samples = support in SAMPLED_SUPPORTS
        for row in rows:
            rows.add(writer, row)
    rows.counts.print_notes()
    return TeacherCache(output), rows.num_skipped


def _support_of(row: Row) -> str:
    """Return the support that a row needs: `none` if it lists observed tokens only."""
    if isinstance(row, ScoredAnswer):
        lists_others = any(other.spelling != token.spelling for token in row.tokens for other in token.top)
    elif isinstance(row, ListedRow):
        lists_others = True
    else:
        if row.get("support") in EXACT_SUPPORTS:
            return str(row["support"])
        # Rows that are not lists of the same length are refused when they are added.
        columns = [row[name] if isinstance(row[name], list) else [] for name in ("token_ids", "top_ids")]
        pairs_of_ids = zip(*columns, strict=False)
        lists_others = any(isinstance(ids, list) and set(map(str, ids)) - {str(own)} for own, ids in pairs_of_ids)
    return "top-k" if lists_others else "none"


def _sampling_of(row: Row) -> tuple[str, int, int] | None:
    """Return the support, the samples of a set and the sample sets of an exported row; None: it has no samples."""
    if not isinstance(row, Mapping) or row.get("support") not in SAMPLED_SUPPORTS:
        return None
    sizes = [row.get(name) for name in SAMPLING_COLUMNS]
    if not all(isinstance(size, int) and 0 < size <= MAX_TOKEN_ID for size in sizes) or not isinstance(
        row.get("sampled_ids"), list
    ):
        return None
    return str(row["support"]), int(sizes[0] or 0), int(sizes[1] or 0)


def _top_k_of(row: Row) -> int | None:
    """Return how many of the most likely tokens each position of an exported row has; None: the row has no number."""
    if not isinstance(row, Mapping) or row.get("support") not in ("top-k", "top-k+sample"):
        return None
    top_k = row.get("top_k")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 0 <= top_k <= MAX_TOKEN_ID:
        return None
    return top_k


def _find_codec(sources: Sequence[str]) -> DistillKitCodec | None:
    """Return the codec of DistillKit that is described next to the files; None: there is no description."""
    folders = {path if path.is_dir() else path.parent for path in map(Path, sources)}
    codecs = {DistillKitCodec.load(path) for folder in sorted(folders) if (path := folder / CONFIG).is_file()}
    if len(codecs) > 1:
        raise XtkError(
            f"the folders have different {CONFIG}", where=", ".join(sources), hint="import each folder into a cache"
        )
    return next(iter(codecs), None)


@dataclass
class _ImportCounts:
    """What the log-probabilities of files lack: numbers of positions, of characters and of rows."""

    listed: int = 0  # all positions
    bounded: int = 0  # the token of the text is not listed, and an upper bound of its log-probability is stored
    unknown: int = 0  # it is not listed, and the listed tokens have all probability: the position is not trained
    joined: int = 0  # characters of several tokens, whose log-probabilities a service did not write
    other_text: int = 0  # rows with a text or messages that have other tokens than the row

    def print_notes(self) -> None:
        """Print what the cache lacks."""
        share = f"of {self.listed:,} positions"
        for count, note in (
            (self.other_text, f"warning: {self.other_text:,} rows have token ids that are not those of their text or "
             "messages; the tokens are read as text"),
            (self.joined, f"{self.joined:,} characters are not trained: the service wrote each of them for several "
             "tokens, without the log-probabilities of these"),
            (self.bounded, f"at {self.bounded:,} {share} the token of the text is not listed; an upper bound of its "
             "log-probability is stored"),
            (self.unknown, f"{self.unknown:,} {share} are not trained: the token of the text is not listed, and the "
             "listed probabilities have the sum 1"),
        ):  # fmt: skip
            if count:
                terminal.note(f"cache import: {note}")


class _Rows:
    """The rows of files, in two passes; an invalid one is an error, or skipped. `codec`: of DistillKit, if any."""

    def __init__(self, corpus: Corpus, codec: DistillKitCodec | None, *, skip_invalid: bool) -> None:
        self._corpus, self._codec, self._skip, self.num_skipped = corpus, codec, skip_invalid, 0
        self.counts = _ImportCounts()
        self.expected_model, self.with_samples = "", False
        self._where, self._num_passes = "", 0

    def __iter__(self) -> Iterator[Row]:
        self.num_skipped = 0
        self._num_passes += 1
        for record, where in self._corpus.records():
            self._where = where
            try:
                with row_errors(where):
                    row = self._read(record)
            except XtkError as failure:
                self._refuse(failure)
                continue
            yield row

    def _read(self, record: Mapping[str, Any]) -> Row:
        if is_completion_record(record):
            answer = read_answer(record)
            if self.expected_model and answer.model != self.expected_model:
                raise XtkError(
                    f"the answer is of another model: {answer.model}, not {self.expected_model}",
                    hint="import the answers of each model into a separate cache",
                )
            return answer
        if all(record.get(column) is not None for column in ID_COLUMNS):
            return record
        if (row := listed_row(record, self._codec)) is not None:
            return row
        raise XtkError(
            f"the row has neither an answer with choices nor the columns {', '.join(ID_COLUMNS)}",
            hint="docs/how-to/import.md lists the formats",
        )

    def add(self, writer: CacheWriter, row: Row) -> None:
        """Add a row to a cache."""
        try:
            with row_errors(self._where):
                if isinstance(row, ScoredAnswer):
                    _add_answer(writer, row)
                    self.counts.joined += row.num_joined
                    self.counts.bounded += row.num_bounded
                    self.counts.unknown += row.num_unknown
                    self.counts.listed += len(row.tokens)
                elif isinstance(row, ListedRow):
                    _add_listed(writer, row, self.counts)
                else:
                    _add_columns(writer, row, self.counts, with_samples=self.with_samples)
        except XtkError as failure:
            self._refuse(failure)

    def _refuse(self, failure: XtkError) -> None:
        if not self._skip:
            raise failure
        self.num_skipped += 1
        if self.num_skipped <= MAX_NOTES and self._num_passes == 2:
            terminal.note(f"cache import: skipping {failure.where}: {failure.what}")


def _write_byte_tokenizer(spellings: Iterable[bytes]) -> Path:
    """Write a tokenizer with a token for each byte string and for each byte, and return its folder.

    It has no merges, so that a text is encoded as bytes; caches store token ids, which it only decodes.
    """
    singles = {bytes([byte]) for byte in range(256)}
    names = ["".join(map(BYTE_LEVEL_ENCODER.__getitem__, one)) for one in sorted(singles | set(spellings))]
    special = [_START_TOKEN, _END_TOKEN]
    vocabulary = {name: number for number, name in enumerate([*special, *names])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, text in enumerate(special)
    ]  # fmt: skip
    content: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    roles = {"bos_token": _START_TOKEN, "eos_token": _END_TOKEN}
    files = {"tokenizer.json": json.dumps(content, ensure_ascii=False), "tokenizer_config.json": json.dumps(roles)}
    return store_files("tokenizers", files)


def _add_answer(writer: CacheWriter, row: ScoredAnswer) -> None:
    tokenizer = writer.tokenizer
    known = tokenizer.vocabulary.token_of_bytes
    # The token in front only holds a place: the prompt of an answer is not in the cache.
    start = tokenizer.start_ids[-1] if tokenizer.start_ids else tokenizer.special_token_ids.get("bos", 0)
    end = -1 if tokenizer.end_id is None else tokenizer.end_id
    tokens = row.tokenized(lambda spelling: known.get(spelling, -1), start, end)
    if (tokens.ids < 0).any():
        raise XtkError("a token of the answer is not in the tokenizer", hint="use the teacher's own --tokenizer")
    scored = [token for token in row.tokens if token.logprob is not None]
    width = max((len(token.top) for token in scored), default=0)
    ids, logprobs = np.full((len(scored), width), -1, np.int64), np.full((len(scored), width), -np.inf, np.float32)
    for number, token in enumerate(scored):
        logprob_of: dict[int, float] = {}  # tokens without bytes stay in the remainder
        for other in token.top:
            if other.spelling in known:
                logprob_of.setdefault(known[other.spelling], -np.inf if other.logprob is None else other.logprob)
        ids[number, : len(logprob_of)], logprobs[number, : len(logprob_of)] = [*logprob_of], [*logprob_of.values()]
    writer.add_tokenized(row.document, tokens, ids, logprobs, [token.logprob or 0.0 for token in scored])


def _add_listed(writer: CacheWriter, row: ListedRow, counts: _ImportCounts) -> None:
    token_ids = _without_padding(row.token_ids, writer.tokenizer)
    lists, trained = fitted_row(row, token_ids)
    columns: dict[str, list[Any]] = {name: [None] * len(token_ids) for name in ID_COLUMNS}
    columns["token_ids"] = token_ids.tolist()
    for at in np.flatnonzero(trained).tolist():
        listed = lists[at]
        assert listed is not None
        columns["logprobs"][at] = _observed_logprob(int(token_ids[at]), listed, counts)
        columns["top_ids"][at], columns["top_logprobs"][at] = listed[0].tolist(), listed[1].tolist()
    _add_columns(writer, columns, counts)


def _without_padding(token_ids: NDArray[np.int64], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return tokens without padding at the end; an end token is none."""
    pad = tokenizer.special_token_ids.get("pad")
    if pad is None or pad == tokenizer.end_id:
        return token_ids
    others = np.flatnonzero(token_ids != pad)
    return token_ids[: others[-1] + 1] if len(others) else token_ids[:0]


def _observed_logprob(token: int, listed: Listed, counts: _ImportCounts) -> float | None:
    """Return the log-probability of a text's token, or its upper bound; None: it is unknown."""
    assert listed is not None
    ids, logprobs = listed
    counts.listed += 1
    places = np.flatnonzero(ids == token)
    if len(places):
        return float(logprobs[places[0]])
    bound = upper_bound(logprobs)
    counts.unknown += bound is None
    counts.bounded += bound is not None
    return bound


def _has_tokens(
    writer: CacheWriter, content: Mapping[str, Any], token_ids: NDArray[np.int64], scored: NDArray[np.bool_]
) -> bool:
    """Return whether columns are a whole document whose teacher tokens are those of the row."""
    is_document = any(all(name in content for name in names) for names in _DOCUMENT_COLUMNS)
    is_conversation = "messages" in content or isinstance(content.get("prompt"), list)
    if not is_document or (is_conversation and not writer.tokenizer.template_fingerprint):
        return False
    tokenized, positions = writer.tokenize(content)
    return np.array_equal(tokenized, token_ids) and np.array_equal(positions, np.flatnonzero(scored))


def _samples(row: Mapping[str, Any], positions: NDArray[np.int64]) -> dict[str, Any]:
    """Return the arguments of `CacheWriter.add` for the samples of an exported row; sets may be empty."""
    sampling = _sampling_of(row)
    assert sampling is not None
    arrays: dict[str, Any] = {}
    for name, empty, dtype in (("sampled_ids", -1, np.int64), ("sampled_logprobs", -np.inf, np.float32)):
        values = arrays[name] = np.full((len(positions), sampling[2], sampling[1]), empty, dtype)
        for number, position in enumerate(positions.tolist()):
            for at, one in enumerate(row[name][position]):
                if one:
                    values[number, at] = to_array(name, one, dtype, "")
    return arrays


def _add_columns(
    writer: CacheWriter, row: Mapping[str, Any], counts: _ImportCounts, *, with_samples: bool = False
) -> None:
    """Add a row with token ids: of its text or messages if these have the same tokens, else of the ids alone."""
    for name in ID_COLUMNS:
        if not isinstance(row[name], list):
            raise ValueError(f"the column {name} is not a list")
    ids = to_array("token_ids", row["token_ids"], np.int64, "")
    scored = np.array([value is not None for value in row["logprobs"]], np.bool_)
    if len({len(row[name]) for name in ID_COLUMNS}) != 1:
        raise ValueError(f"{', '.join(ID_COLUMNS)} have different lengths; unknown values are null")
    scored[:1] = False
    content = {name: row[name] for name in (*_CONTENT_COLUMNS, "complete") if row.get(name) is not None}
    if isinstance(content.get("segments"), str):  # Parquet
        content["segments"] = parse_json(content["segments"], what="segments", where="")
    document: Mapping[str, Any] = {"input_ids": ids.tolist(), "completion_mask": scored.astype(int).tolist()}
    optional = {name: row[name] for name in OPT_IN_FIELDS if row.get(name) is not None}
    if content.keys() - {"complete"}:
        if _has_tokens(writer, content, ids, scored):
            document = content
        else:
            counts.other_text += 1
    numbers = np.flatnonzero(scored)
    lists = [(row["top_ids"][at] or [], row["top_logprobs"][at] or []) for at in numbers]
    if any(not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b) for a, b in lists):
        raise ValueError("top_ids and top_logprobs must be lists of the same length at each position, or null")
    width = max((len(listed) for listed, _ in lists), default=0)
    top_ids, top = np.full((len(numbers), width), -1, np.int64), np.full((len(numbers), width), -np.inf, np.float32)
    for number, (listed, logprobs) in enumerate(lists):
        top_ids[number, : len(listed)] = to_array("top_ids", listed, np.int64, "")
        top[number, : len(listed)] = to_array("top_logprobs", logprobs, np.float32, "")
    samples = _samples(row, numbers) if with_samples else {}
    writer.add({**document, **optional}, top_ids, top, [row["logprobs"][at] for at in numbers], **samples)
