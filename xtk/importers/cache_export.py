"""Teacher caches as Parquet files for other tools: token ids with log-probabilities."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.api.cache_from_arrays import EXACT_SUPPORTS
from xtk.cache.columns import OPTIONAL_COLUMNS, optional_columns
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.data.record_to_document import OPT_IN_FIELDS
from xtk.errors import XtkError
from xtk.files.output import Output, OutputKind, write_output
from xtk.rollouts.rollout_jsonl import document_fields
from xtk.text.teacher_tokenization import teacher_views

CONTENT_COLUMNS = ("messages", "tools", "segments", "prompt", "completion")
SAMPLING_COLUMNS = ("num_samples", "num_sample_sets")
_ROWS_PER_GROUP, _MARK = 256, b"xtk-export"


def _is_export(path: Path) -> bool:
    with path.open("rb") as stream:
        if stream.read(4) != b"PAR1":
            return False
    import pyarrow.parquet as pq

    return _MARK in (pq.read_schema(path).metadata or {})


def _check_export(path: Path, request: str) -> None:
    hint = "use another output path (-o), or --force to replace it"
    raise XtkError("the output file exists", where=str(path), hint=hint)


EXPORT = OutputKind[None]("an exported cache", _is_export, _check_export)


def export_cache(cache: TeacherCache, path: Path, *, force: bool = False) -> int:
    """Write the documents of a cache as rows; return their number.

    A row has the `support` of its exact entries (with `top_k`, the number of the most likely tokens that each position
    has, for `top-k`), `token_ids` [T], `logprobs` [T] (null where a token is not trained),
    `top_ids` and `top_logprobs` [T] (the exact entries of each position, most likely first), `sampled_ids` and
    `sampled_logprobs` [T] (for each sample set of a position the sampled ids, with repetitions; not from older caches),
    `complete`, the document in `CONTENT_COLUMNS`, and `weight` and `route` where the cache has them, as `import_cache`
    reads it. `force` moves aside a file at this path.
    """
    Output(path, EXPORT, force=force).find_finished("")
    if cache.header["options"].get("support") == "sample" and not _has_samples(cache):
        raise XtkError(
            "this cache has only sampled tokens, whose log-probabilities it lacks",
            where=cache.folder.name,
            hint="run cache-teacher again with this version of xtk",
        )
    has_other_tokens: list[bool] = []  # of `teacher_prompt`, and of given or sampled tokens
    with write_output(path) as temporary:
        rows = _rows(cache, has_other_tokens)
        _write_parquet(rows, temporary, _optional_fields(cache), with_samples=_has_samples(cache))
    if any(has_other_tokens):
        terminal.note(
            f"cache export: warning: {sum(has_other_tokens):,} of {len(cache):,} documents have teacher tokens that "
            "are not those of their text; cache import reads the tokens as text"
        )
    return len(cache)


def _has_samples(cache: TeacherCache) -> bool:
    """Return whether a cache has sampled tokens with their log-probabilities."""
    return bool(cache.header["codec"].get("sample_logprobs"))


def _optional_fields(cache: TeacherCache) -> list[str]:
    """Return which of `OPT_IN_FIELDS` the documents of a cache have."""
    present = optional_columns(cache.header)
    return [name for name in OPT_IN_FIELDS if name in present]


def _rows(cache: TeacherCache, has_other_tokens: list[bool]) -> Iterator[dict[str, Any]]:
    """Yield the rows, and append whether a document's teacher tokens are not those of its text."""
    tokenizer, fields = cache.teacher_tokenizer, _optional_fields(cache)
    kind = str(cache.header["options"].get("support"))
    with_samples = _has_samples(cache)
    # top-p, and top-k+sample without the samples, is top-k.
    support = kind if kind in EXACT_SUPPORTS or with_samples else "top-k"
    codec = cache.header["codec"]
    sampling = {name: codec[name] for name in SAMPLING_COLUMNS} if with_samples else {}
    top_k = 1 if kind == "top-p" else cache.header["options"].get("top_k")
    for number in range(len(cache)):
        stored = cache.read_document(number, None)
        try:
            ((_, tokens),) = teacher_views(tokenizer, [stored.document])
            has_other_tokens.append(not np.array_equal(tokens.ids, stored.tokens.ids))
        except XtkError:
            has_other_tokens.append(True)
        values = {"weight": stored.document.weight, "route": stored.document.teacher_name}
        row = (
            {"support": support, "top_k": top_k} | sampling | _row(stored) | (_samples(stored) if with_samples else {})
        )
        yield row | {name: values[name] for name in fields}


def _row(stored: TeacherDocument) -> dict[str, Any]:
    """Return a stored document as a row, without weight and route."""
    tokens, stored_logprobs = stored.tokens, stored.teacher_logprobs
    size = len(tokens)
    logprobs: list[float | None] = [None] * size
    top_ids: list[list[int] | None] = [None] * size
    top_logprobs: list[list[float] | None] = [None] * size
    for at, position in enumerate(stored_logprobs.positions.tolist()):
        entries = slice(int(stored_logprobs.offsets[at]), int(stored_logprobs.offsets[at + 1]))
        order = np.argsort(-stored_logprobs.logprobs[entries], kind="stable")
        logprobs[position] = float(stored_logprobs.observed_logprobs[at])
        top_ids[position] = stored_logprobs.ids[entries][order].tolist()
        top_logprobs[position] = stored_logprobs.logprobs[entries][order].astype(float).tolist()
    document = stored.document
    fields = document_fields(document)
    content = {name: fields.get(name) for name in CONTENT_COLUMNS}
    return {
        **content, "complete": document.is_complete, "token_ids": tokens.ids.tolist(), "logprobs": logprobs,
        "top_ids": top_ids, "top_logprobs": top_logprobs,
    }  # fmt: skip


def _samples(document: TeacherDocument) -> dict[str, Any]:
    """Return the sampled ids of a stored document, and their log-probabilities, as columns of a row."""
    stored = document.stored_logprobs
    assert stored.sample_logprobs is not None
    ids: list[list[list[int]] | None] = [None] * len(document.tokens)
    logprobs: list[list[list[float]] | None] = [None] * len(document.tokens)
    sets = stored.num_sample_sets
    for at, position in enumerate(stored.positions.tolist()):
        edges = stored.sample_offsets[at * sets : (at + 1) * sets + 1].tolist()
        of_sets = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        counts = [stored.sample_counts[one] for one in of_sets]
        ids[position] = [np.repeat(stored.sample_ids[one], n).tolist() for one, n in zip(of_sets, counts, strict=True)]
        logprobs[position] = [
            np.repeat(stored.sample_logprobs[one], n).tolist() for one, n in zip(of_sets, counts, strict=True)
        ]
    return {"sampled_ids": ids, "sampled_logprobs": logprobs}


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path, fields: list[str], *, with_samples: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    samples = [
        *((name, pa.int32()) for name in SAMPLING_COLUMNS),
        ("sampled_ids", pa.list_(pa.list_(pa.list_(pa.int32())))),
        ("sampled_logprobs", pa.list_(pa.list_(pa.list_(pa.float32())))),
    ]
    schema = pa.schema(
        [
            ("support", pa.string()), ("top_k", pa.int32()), *((name, pa.string()) for name in CONTENT_COLUMNS),
            ("complete", pa.bool_()),
            ("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32())),
            ("top_ids", pa.list_(pa.list_(pa.int32()))), ("top_logprobs", pa.list_(pa.list_(pa.float32()))),
            *(samples if with_samples else ()),
            *((name, OPTIONAL_COLUMNS[name]) for name in fields),
        ],
        metadata={_MARK: b"1"},
    )  # fmt: skip
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            lists = {name: row[name] for name in CONTENT_COLUMNS if isinstance(row[name], list)}
            group.append(row | {name: json.dumps(value, ensure_ascii=False) for name, value in lists.items()})
            if len(group) == _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(group, schema))
                group = []
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema))
