"""Arrow files made to cause out-of-bounds memory access: each is refused with an error, or read as it is."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import small_caches
from forged_arrow_process import buffer_ranges_of

from xtk.cache import shard_writing
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.token_ids_by_frequency import VocabularyOrder, vocabulary_order_file_name
from xtk.cache.writer import ShardedCacheWriter
from xtk.errors import CorruptError
from xtk.files.storage_folders import LocalFolder
from xtk.text.token_sequence import TokenSequence

WORKER = Path(__file__).parent / "forged_arrow_process.py"


@pytest.fixture(scope="module")
def caches(run, pair, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    return {kind: small_caches.make_cache(run, pair, folder, kind) for kind in ("packed", "raw")}


def forged(*arguments: object) -> dict[str, int]:
    """Run the worker process; if it crashes, the test fails and shows the last forgery."""
    result = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=1800, env=dict(os.environ),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    counts = json.loads(result.stdout)
    print(arguments[0], counts)
    assert counts["tracebacks"] == 0, [line for line in result.stderr.splitlines() if line.startswith("TRACEBACK")]
    return counts


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["packed", "raw"])
def test_forged_shards_with_matching_checksums_do_not_crash_the_process(caches, kind, count):
    assert forged("shards", caches[kind], count, 1)["refused"] > count / 4


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.long)])
def test_forged_data_files_do_not_crash_the_process(tmp_path, count):
    assert forged("data", tmp_path, count, 2)["refused"] > count / 4


@pytest.mark.parametrize("value", [-1, -(1 << 31), (1 << 31) - 1, 1 << 20])
def test_data_file_with_invalid_offsets_is_refused(run, pair, tmp_path, value):
    path = tmp_path / "texts.arrow"
    batch = pa.record_batch({"text": [f"text {number}" for number in range(50)]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = bytearray(path.read_bytes())
    start, size = max(buffer_ranges_of(path)[:1])
    content[start + 4 : start + 8] = struct.pack("<i", value)
    path.unlink()
    path.write_bytes(content)
    assert size >= 4 * 51
    result = run("cache-teacher", pair.teacher, path, "-o", tmp_path / "cache", code=1)
    assert "this data file cannot be read completely" in result.stderr
    assert str(path) in result.stderr


def with_changed_tokens(row: TeacherDocument, **changed: object) -> TeacherDocument:
    fields = {
        name: getattr(row.tokens, name)
        for name in ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens")
    }
    return TeacherDocument(row.document, TokenSequence(**{**fields, **changed}), row.stored_logprobs)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("token", "token id 300000000 is outside of the teacher's vocabulary"),
        ("negative token", "token id -5"),
        ("entry", "token id 300000000"),
        ("ends", "token or byte positions lie outside of the document"),
        ("text_runs", "token or byte positions lie outside of the document"),
        ("segment_end_tokens", "token or byte positions lie outside of the document"),
        ("positions", "trained tokens lie outside of the document"),
    ],
)
def test_out_of_range_values_in_a_shard_with_matching_checksums_are_refused(
    caches, tmp_path, monkeypatch, field, message
):
    cache = TeacherCache(caches["raw"])
    row = cache.read_document(0)
    row = TeacherDocument(row.document, row.tokens, row.stored_logprobs)
    ids, ends = row.tokens.ids.copy(), row.tokens.byte_ends.copy()
    if field == "entry":
        entries = row.stored_logprobs.ids.copy()
        entries[-1] = 300_000_000
        row = TeacherDocument(row.document, row.tokens, dataclasses.replace(row.stored_logprobs, ids=entries))
    elif field == "positions":
        positions = row.stored_logprobs.positions.copy()
        positions[-1] = 1 << 30
        row = TeacherDocument(row.document, row.tokens, dataclasses.replace(row.stored_logprobs, positions=positions))
    elif field == "ends":
        ends[-1] = 1 << 30
        row = with_changed_tokens(row, byte_ends=ends)
    elif field in ("text_runs", "segment_end_tokens"):
        changed = getattr(row.tokens, field).copy()
        changed[...] = 1 << 30
        row = with_changed_tokens(row, **{field: changed})
    else:
        ids[0] = 300_000_000 if field == "token" else -5
        row = with_changed_tokens(row, ids=ids)
    writer = ShardedCacheWriter(
        LocalFolder(tmp_path / "forged"), {**cache.header, "data": {**cache.header["data"], "documents": 1}}, [1]
    )
    # The counts of a forged shard: the writer itself would fail on such a row.
    monkeypatch.setattr(shard_writing, "count_text_bits", lambda _: {"text_bits": 1.0, "text_bytes": 1})
    writer.write_shard(0, [row])
    writer.finish()
    with pytest.raises(CorruptError, match=message) as raised:
        _ = TeacherCache(tmp_path / "forged").read_document(0).stored_logprobs
    assert raised.value.where.endswith("shard-00000.arrow, row 0")


@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 1, 3], [-1, 0, 1], [0, 1, 300_000_000]])
def test_vocabulary_order_that_is_not_a_permutation_of_the_ids_is_refused(ids):
    content = VocabularyOrder(np.array([0, 1, 2], np.int32), np.zeros(3, np.int32)).file_content
    batch = pa.record_batch({"id": pa.array(ids, pa.int32()), "num_bytes": pa.array([0, 0, 0], pa.int32())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    forged = bytes(sink.getvalue())
    VocabularyOrder.from_file_content(vocabulary_order_file_name(content), content, "order")
    with pytest.raises(CorruptError, match="must list every token id exactly once"):
        VocabularyOrder.from_file_content(vocabulary_order_file_name(forged), forged, "order")
    for size in (0, 9, len(content) // 2):
        with pytest.raises(CorruptError, match="is not a valid Arrow file"):
            VocabularyOrder.from_file_content(vocabulary_order_file_name(content[:size]), content[:size], "order")


@pytest.mark.parametrize("line", ['{"input_ids": [5, 6, 300000000, 8]}', '{"input_ids": [5, 6, -7, 8]}'])
def test_out_of_range_token_id_in_pretokenized_data_is_refused(run, pair, tmp_path, line):
    path = tmp_path / "ids.jsonl"
    path.write_text(line + "\n")
    result = run("cache-teacher", pair.teacher, path, "-o", tmp_path / "cache", code=1)
    assert "Traceback" not in result.stderr
    assert str(path) in result.stderr
