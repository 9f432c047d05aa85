"""The teacher cache: exact roundtrip, resumed writers, corrupt files, and caches of another request."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from xtk.cache.manifest import cache_totals
from xtk.cache.output import find_finished_cache
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CacheShard
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.cache.writer import ShardedCacheWriter
from xtk.errors import CorruptError, XtkError
from xtk.files.storage_folders import LocalFolder
from xtk.text.document import Document, Segment
from xtk.text.token_sequence import TokenSequence

HEADER = {
    "codec": {"name": "raw", "precision": "float32", "num_samples": 5, "num_sample_sets": 2, "sample_logprobs": True},
    "teacher": {
        "name": "qwen",
        "tokenizer": "sha256:one",
        "weights": "sha256:two",
        "template": None,
        "special_tokens": {},
        "embedding_rows": 151_936,
        "space_ids": [],
        "start_ids": [],
    },
    "data": {"fingerprint": "sha256:three"},
    "options": {"support": "top-k", "dtype": "float32", "top_k": 4, "max_length": 128},
}
SIZES = [3, 1, 4, 2]  # documents per shard
DOCUMENTS = [
    Document.from_text("Anna has 12 apples."),
    Document.from_completion("2 + 2 =", " 4"),
    Document.from_text(""),
    Document.from_text("日本語 😀 \x00 e\u0301"),
    Document.from_completion("", "all of it"),
    Document.from_text("a piece of a longer text").byte_slice(0, 7),
    Document((Segment("prompt", "nothing here is trained", False),)),
    Document.from_text("x" * 300),
    Document.from_text("the last but one"),
    Document.from_messages(
        [
            {"role": "user", "content": "12 + 5?", "name": "Anna"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 12}}}]},
            {"role": "tool", "content": "17"},
            {"role": "assistant", "content": "It is 17."},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    ),
]


def random_row(document: Document, num_ids: int, rng: np.random.Generator) -> TeacherDocument:
    """Return a row with a token per byte and random log-probabilities."""
    text = document.text.encode()
    ends = np.arange(len(text) + 1, dtype=np.int32)
    tokens = TokenSequence(
        ids=rng.integers(0, 151_646, len(ends), dtype=np.int32),
        byte_ends=ends,
        train_mask=document.trained_mask(ends),
        text_runs=np.array([[1, len(ends), 0]] if text else [], np.int32).reshape(-1, 3),
        segment_end_tokens=np.full(len(document.segments), -1, np.int32),
    )
    positions = np.flatnonzero(tokens.train_mask).astype(np.int32)
    exact = [np.unique([*rng.integers(0, 151_646, num_ids), tokens.ids[at]]) for at in positions]
    samples = [np.unique(rng.integers(151_646, 151_936, 5), return_counts=True) for _ in range(2 * len(positions))]
    logprobs = [-rng.exponential(size=len(ids)) for ids in exact]
    scores = StoredLogprobs(
        positions=positions,
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.concatenate([np.zeros(0), *exact]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(0), *logprobs]).astype(np.float32),
        sample_offsets=np.cumsum([0, *(len(ids) for ids, _ in samples)]),
        sample_ids=np.concatenate([np.zeros(0), *(ids for ids, _ in samples)]).astype(np.int32),
        sample_counts=np.concatenate([np.zeros(0), *(counts for _, counts in samples)]).astype(np.int32),
        remainder_mass=rng.random(len(positions), np.float32),
        observed_logprobs=np.array(
            [row[ids == tokens.ids[at]][0] for at, ids, row in zip(positions, exact, logprobs, strict=True)], np.float32
        ),
        entropy=rng.exponential(size=len(positions)).astype(np.float32),
        sample_logprobs=-rng.exponential(size=sum(len(ids) for ids, _ in samples)).astype(np.float32),
    )
    return TeacherDocument(document, tokens, scores)


@pytest.fixture(scope="module")
def rows() -> list[TeacherDocument]:
    rng = np.random.default_rng(0)
    return [random_row(document, 4, rng) for document in DOCUMENTS]


def write(folder: Path, rows: list[TeacherDocument], numbers: list[int] | None = None) -> ShardedCacheWriter:
    writer = ShardedCacheWriter(LocalFolder(folder), HEADER, SIZES)
    first_rows = np.cumsum([0, *SIZES]).tolist()
    for number in range(len(SIZES)) if numbers is None else numbers:
        writer.write_shard(number, rows[first_rows[number] : first_rows[number + 1]])
    return writer


@pytest.fixture
def cache(rows, tmp_path) -> Path:
    folder = tmp_path / "cache"
    write(folder, rows).finish()
    return folder


def assert_equal(found: TeacherDocument, expected: TeacherDocument) -> None:
    assert found.document == expected.document
    assert found.document.is_complete == expected.document.is_complete
    assert found.document.conversation == expected.document.conversation
    for name in ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens"):
        found_array, expected_array = getattr(found.tokens, name), getattr(expected.tokens, name)
        assert found_array.dtype == expected_array.dtype
        assert found_array.tolist() == expected_array.tolist()
    assert len(found.stored_logprobs) == len(expected.stored_logprobs)
    for name, expected_array in vars(expected.stored_logprobs).items():
        found_array = getattr(found.stored_logprobs, name)
        if expected_array is None:
            assert found_array is None, name
            continue
        assert found_array.dtype == expected_array.dtype
        assert found_array.tobytes() == expected_array.tobytes()
        assert found_array.shape == expected_array.shape


def test_rows_are_read_back_exactly_in_any_order(cache, rows):
    found = TeacherCache(cache)
    assert len(found) == len(rows)
    for number in np.random.default_rng(1).permutation(len(rows)).tolist():
        assert_equal(found.read_document(number), rows[number])
    for found_row, expected_row in zip(found, rows, strict=True):
        assert_equal(found_row, expected_row)
    for number in (-1, len(rows)):
        with pytest.raises(IndexError):
            found.read_document(number)


def test_infinite_and_nan_values_are_read_back_exactly(tmp_path):
    row = random_row(Document.from_text("Anna"), 2, np.random.default_rng(0))
    row.stored_logprobs.logprobs[:2] = [-np.inf, np.nan]
    writer = ShardedCacheWriter(LocalFolder(tmp_path / "cache"), HEADER, [1])
    writer.write_shard(0, [row])
    writer.finish()
    assert_equal(TeacherCache(tmp_path / "cache").read_document(0), row)


def test_text_sizes_are_the_utf8_bytes_of_the_documents(cache):
    sizes = TeacherCache(cache).text_sizes().tolist()
    assert sizes == [len(document.text.encode()) for document in DOCUMENTS]


def test_manifest_counts_match_the_shards(cache, rows):
    manifest = TeacherCache(cache).manifest
    assert [shard["documents"] for shard in manifest["shards"]] == SIZES
    assert cache_totals(manifest) == {
        "documents": len(rows),
        "positions": sum(len(row.stored_logprobs) for row in rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "bytes": sum(path.stat().st_size for path in cache.glob("*.arrow")),
    }


def test_shard_is_readable_with_pyarrow_alone(cache, rows):
    with pa.memory_map(str(cache / "shard-00002.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        header = json.loads(table.schema.metadata[b"xtk"])
        records = table.to_pylist()
    assert header == HEADER
    for record, row in zip(records, rows[4:8], strict=True):
        P, T, R = record["num_positions"], record["num_tokens"], header["codec"]["num_sample_sets"]
        assert "".join(segment["text"] for segment in record["segments"]) == row.document.text
        assert list(struct.unpack(f"<{2 * T}i", record["tokens"])) == [*row.tokens.ids, *row.tokens.byte_ends]
        ranges = record["trained_ranges"]
        trained = [at for start, stop in zip(ranges[::2], ranges[1::2], strict=True) for at in range(start, stop)]
        assert trained == row.stored_logprobs.positions.tolist()
        num_exact = struct.unpack_from(f"<{P}i", record["teacher_logprobs"])
        num_sampled = struct.unpack_from(f"<{P * R}i", record["teacher_logprobs"], 4 * P)
        assert list(num_exact) == np.diff(row.stored_logprobs.offsets).tolist()
        assert sum(num_exact) + sum(num_sampled) == record["num_entries"]
        ids = struct.unpack_from(f"<{sum(num_exact)}i", record["teacher_logprobs"], 4 * P * (1 + R))
        logprobs = struct.unpack_from(
            f"<{sum(num_exact)}f", record["teacher_logprobs"], 4 * (P * (1 + R) + sum(num_exact))
        )
        assert list(ids) == row.stored_logprobs.ids.tolist()
        assert list(logprobs) == row.stored_logprobs.logprobs.tolist()
        assert (
            list(struct.unpack(f"<{P}f", record["teacher_logprobs"][len(record["teacher_logprobs"]) - 4 * P :]))
            == row.stored_logprobs.entropy.tolist()
        )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_cache_bytes_do_not_depend_on_the_order_of_writing_shards(cache, rows, tmp_path):
    write(tmp_path / "other", rows, numbers=[3, 0, 2, 1]).finish()
    assert files_of(tmp_path / "other") == files_of(cache)
    assert sorted(files_of(cache)) == ["manifest.json", *(f"shard-{number:05d}.arrow" for number in range(4))]


def test_resumed_writer_writes_only_missing_shards_and_the_same_bytes(cache, rows, tmp_path):
    folder = tmp_path / "interrupted"
    assert write(folder, rows, numbers=[0, 2]).missing_shards() == [1, 3]
    (folder / ".xtk-tmp-123-shard-00001.arrow").write_bytes(b"killed while writing")
    missing = ShardedCacheWriter(LocalFolder(folder), HEADER, SIZES).missing_shards()
    assert missing == [1, 3]
    write(folder, rows, numbers=missing).finish()
    assert files_of(folder) == files_of(cache)


def failure_of(folder: Path) -> XtkError:
    """Return the error of opening a cache and reading all of it."""
    with pytest.raises(XtkError) as raised:
        for _ in TeacherCache(folder):
            pass
    assert str(folder) in raised.value.where
    assert raised.value.hint
    return raised.value


def test_unfinished_cache_is_refused(rows, tmp_path):
    write(tmp_path / "cache", rows, numbers=[0, 1])
    failure = failure_of(tmp_path / "cache")
    assert failure.what == "this teacher cache is unfinished"
    assert "again" in failure.hint
    assert find_finished_cache(LocalFolder(tmp_path / "cache"), HEADER) is None


def test_folder_without_a_cache_is_not_reported_as_unfinished(tmp_path):
    assert failure_of(tmp_path).what == "this folder contains no teacher cache"
    assert failure_of(tmp_path / "missing").what == "this folder contains no teacher cache"


def test_missing_shard_is_reported_when_the_cache_is_opened(cache):
    (cache / "shard-00001.arrow").unlink()
    with pytest.raises(CorruptError, match="a shard of this cache is missing") as raised:
        TeacherCache(cache)
    assert raised.value.where.endswith("shard-00001.arrow")


@pytest.mark.parametrize("change", [-1, -500, 1])
def test_shard_of_another_size_is_reported_when_the_cache_is_opened(cache, change):
    path = cache / "shard-00002.arrow"
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(CorruptError, match=f"has {len(raw) + change} bytes, but must have {len(raw)}") as raised:
        TeacherCache(cache)
    assert raised.value.where.endswith("shard-00002.arrow")


@pytest.mark.slow
def test_flipped_byte_in_a_shard_is_reported_with_shard_and_row(cache, rows):
    path = cache / "shard-00002.arrow"
    raw = path.read_bytes()
    with pa.memory_map(str(path)) as source:
        blobs = pa.ipc.open_file(source).get_batch(0).column("teacher_logprobs").to_pylist()
    owner = {raw.index(blob) + at: row for row, blob in enumerate(blobs) for at in range(len(blob))}
    num_with_row = 0
    for position in np.linspace(0, len(raw) - 1, 300).astype(int).tolist():
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 0x10]) + raw[position + 1 :])
        opened = TeacherCache(cache)
        assert_equal(opened.read_document(0), rows[0])  # the other shards are intact
        for read in (opened.verify, lambda opened=opened: [opened.read_document(number) for number in range(4, 8)]):
            with pytest.raises(CorruptError) as raised:
                read()
            assert str(path) in raised.value.hint
            assert raised.value.where.startswith(str(path))
            if position in owner:
                assert raised.value.where == f"{path}, row {owner[position]}"
                num_with_row += 1
    assert num_with_row > 100


def test_a_flipped_byte_anywhere_in_the_manifest_is_refused(cache):
    path = cache / "manifest.json"
    raw = path.read_bytes()
    for position in range(0, len(raw), 3):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 0x01]) + raw[position + 1 :])
        failure_of(cache)


def test_truncated_manifest_is_refused(cache):
    path = cache / "manifest.json"
    raw = path.read_bytes()
    for size in range(0, len(raw) - 1, 25):
        path.write_bytes(raw[:size])
        failure_of(cache)


def test_a_shard_of_another_cache_is_refused(cache, rows, tmp_path):
    other = ShardedCacheWriter(
        LocalFolder(tmp_path / "other"), {**HEADER, "options": {"top_k": 4, "max_length": 129}}, SIZES
    )
    other.write_shard(1, rows[3:4])
    shutil.copy(tmp_path / "other/shard-00001.arrow", cache)
    assert failure_of(cache).where.endswith("shard-00001.arrow")


def test_later_version_is_refused_with_its_number(cache):
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "version": 7}))
    with pytest.raises(XtkError, match="this teacher cache has version 7; this xtk reads version 6"):
        TeacherCache(cache)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("teacher", "weights", "sha256:others"), ("data", "fingerprint", "sha256:others"), ("options", "top_k", 8)],
)
def test_cache_of_another_request_is_refused_with_the_difference(cache, rows, tmp_path, section, key, value):
    requested_header = {**HEADER, section: {**HEADER[section], key: value}}
    assert find_finished_cache(LocalFolder(cache), HEADER) == TeacherCache(cache).manifest
    unfinished = tmp_path / "unfinished"
    write(unfinished, rows, numbers=[0])
    for operation in (
        lambda: find_finished_cache(LocalFolder(cache), requested_header),
        lambda: ShardedCacheWriter(LocalFolder(cache), requested_header, SIZES),
        lambda: ShardedCacheWriter(LocalFolder(unfinished), requested_header, SIZES),
    ):
        with pytest.raises(
            XtkError, match="the output folder contains a cache with different inputs or options"
        ) as raised:
            operation()
        assert f"{section}.{key}: {HEADER[section][key]} there, {value} in this command" in raised.value.where


def test_corrupt_shard_of_an_unfinished_cache_is_reported_and_rewritten(cache, rows, tmp_path, capsys):
    folder = tmp_path / "cache-2"
    write(folder, rows, numbers=[0, 1])
    path = folder / "shard-00001.arrow"
    raw = path.read_bytes()
    for size in (0, 7, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        assert ShardedCacheWriter(LocalFolder(folder), HEADER, SIZES).missing_shards() == [1, 2, 3]
        assert f"{path}: this shard " in capsys.readouterr().err
    write(folder, rows, numbers=[1, 2, 3]).finish()
    assert files_of(folder) == files_of(cache)


def test_folder_with_foreign_files_is_not_written(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(XtkError, match=r"this folder contains files that xtk did not write \(thesis.tex\)"):
        ShardedCacheWriter(LocalFolder(tmp_path), HEADER, SIZES)
    assert files_of(tmp_path) == {"thesis.tex": b"precious"}


def test_file_in_place_of_the_cache_folder_is_refused(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(XtkError, match="a cache must be a folder"):
        ShardedCacheWriter(LocalFolder(tmp_path / "cache"), HEADER, [1])


# --- weights and routes of documents


def with_weights_and_routes(rows: list[TeacherDocument]) -> list[TeacherDocument]:
    """Return the same rows with a weight and a route for each document."""
    return [
        TeacherDocument(
            dataclasses.replace(row.document, weight=at / 4, teacher_name=f"té{at % 3}"),
            row.tokens,
            row.stored_logprobs,
        )
        for at, row in enumerate(rows)
    ]


def write_weighted_cache(folder: Path, rows: list[TeacherDocument]) -> Path:
    header = {**HEADER, "data": {**HEADER["data"], "optional_columns": ["weight", "route"]}}
    writer = ShardedCacheWriter(LocalFolder(folder), header, [5, 5])
    writer.write_shard(0, rows[:5])
    writer.write_shard(1, rows[5:])
    writer.finish()
    return folder


def test_weights_and_routes_are_read_back(cache, rows, tmp_path):
    weighted_rows = with_weights_and_routes(rows)
    found, plain = TeacherCache(write_weighted_cache(tmp_path / "requested", weighted_rows)), TeacherCache(cache)
    for found_row, expected_row in zip(found, weighted_rows, strict=True):
        assert_equal(found_row, expected_row)
    assert found.document_weights().tolist() == [row.document.weight for row in weighted_rows]
    assert found.routes() == [row.document.teacher_name for row in weighted_rows]
    assert (found.manifest["version"], plain.manifest["version"]) == (6, 6)
    assert plain.document_weights().tolist() == [1] * len(rows)
    assert plain.routes() == [""] * len(rows)


def test_document_fingerprints_do_not_depend_on_weights_and_routes(cache, rows, tmp_path):
    weighted = TeacherCache(write_weighted_cache(tmp_path / "requested", with_weights_and_routes(rows)))
    fingerprints = TeacherCache(cache).fingerprints()
    assert fingerprints.tolist() == weighted.fingerprints().tolist()
    assert len(set(fingerprints.tolist())) == len(rows)


def test_flipped_bit_in_a_weight_or_a_route_is_detected(rows, tmp_path):
    folder = write_weighted_cache(tmp_path / "requested", with_weights_and_routes(rows))
    path = folder / "shard-00001.arrow"
    raw = path.read_bytes()
    for stored_bytes in (struct.pack("<d", 6 / 4), "té1té2".encode()):
        at = raw.index(stored_bytes)
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert isinstance(failure_of(folder), CorruptError)
        assert not all(CacheShard(path).is_intact(row) for row in range(5))
        path.write_bytes(raw)
    TeacherCache(folder).verify()
