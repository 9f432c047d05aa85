"""Writing and reading of projection files."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest

from xtk.errors import CorruptError, XtkError
from xtk.projection.build import build_projection
from xtk.projection.file import TENSOR_DTYPES, read_projection, read_projection_header, write_projection
from xtk.projection.projection import SparseProjection
from xtk.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def built(families) -> SparseProjection:
    return build_projection(Tokenizer(families["student"]), Tokenizer(families["teacher"]))


def tokenizer_section(name: str, tokens: int) -> dict[str, object]:
    return {"tokenizer": f"sha256:{name}", "special_tokens": {"eos": 1}, "tokens": tokens, "embedding_rows": tokens}


@pytest.fixture(scope="module")
def small() -> SparseProjection:
    """Return a projection with seven entries, so that most bytes of its file belong to the header."""
    return SparseProjection(
        row_offsets=np.array([0, 2, 2, 5, 6, 7], np.int64),
        teacher_ids=np.array([0, 3, 1, 2, 3, 0, 2], np.int32),
        weights=np.array([0.75, 0.25, 0.5, 0.25, 0.125, 1, 1], np.float32),
        student_cells=np.array([-1, 0, 1, -1, 2], np.int32),
        teacher_cells=np.array([-1, 0, 1, 2], np.int32),
        header={"kind": "projection", "student": tokenizer_section("s", 5), "teacher": tokenizer_section("térmico", 4)},
    )


def flipped(raw: bytes, position: int, bits: int = 0xFF) -> bytes:
    return raw[:position] + bytes([raw[position] ^ bits]) + raw[position + 1 :]


def test_written_projection_is_read_back_exactly(built, small, tmp_path):
    for projection in (built, small):
        write_projection(projection, tmp_path / "p")
        read_back = read_projection(tmp_path / "p")
        for name in TENSOR_DTYPES:
            assert getattr(read_back, name).dtype == getattr(projection, name).dtype
            assert getattr(read_back, name).tobytes() == getattr(projection, name).tobytes()
        assert read_back.header == projection.header


def test_projection_bytes_do_not_depend_on_paths(families, built, tmp_path):
    write_projection(built, tmp_path / "one")
    (tmp_path / "elsewhere").mkdir()
    for name in ("student", "teacher"):
        shutil.copytree(families[name], tmp_path / "elsewhere" / f"another {name}")
    rebuilt = build_projection(
        Tokenizer(tmp_path / "elsewhere/another student", name="mine"),
        Tokenizer(tmp_path / "elsewhere/another teacher"),
    )
    write_projection(rebuilt, tmp_path / "elsewhere/another name.bin")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "elsewhere/another name.bin").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "one").read_bytes()


def test_header_and_weights_are_readable_with_the_standard_library(built, families, tmp_path):
    write_projection(built, tmp_path / "p")
    raw = (tmp_path / "p").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + size])
    header = json.loads(table["__metadata__"]["xtk"])
    assert list(table["__metadata__"]) == ["xtk"]
    assert (header["format"], header["version"], header["method"]) == ("xtk-projection", 2, "multitoken")
    assert header["student"]["tokenizer"] == Tokenizer(families["student"]).fingerprint
    assert header == read_projection_header(tmp_path / "p")
    start, stop = table["weights"]["data_offsets"]
    weights = struct.unpack(f"<{(stop - start) // 4}f", raw[8 + size + start : 8 + size + stop])
    assert weights == tuple(built.weights.tolist())


def test_writing_moves_an_old_file_aside_and_leaves_no_other_files(small, tmp_path):
    (tmp_path / "p").write_text("an older file")
    write_projection(small, tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "p.replaced-1"]
    assert (tmp_path / "p.replaced-1").read_text() == "an older file"
    assert read_projection(tmp_path / "p").header == small.header


def error_of(path) -> XtkError:
    with pytest.raises(XtkError) as raised:
        read_projection(path)
    assert raised.value.where == str(path)
    return raised.value


@pytest.mark.parametrize("bits", [0xFF, 0x01])
def test_a_flipped_byte_anywhere_is_refused(small, tmp_path, bits):
    path = tmp_path / "p"
    write_projection(small, path)
    raw = path.read_bytes()
    for position in range(bits % 2, len(raw), 5):
        path.write_bytes(flipped(raw, position, bits))
        error_of(path)


def test_a_flipped_byte_in_a_built_projection_is_refused(built, tmp_path):
    path = tmp_path / "p"
    write_projection(built, path)
    raw = path.read_bytes()
    for position in np.linspace(0, len(raw) - 1, 60).astype(int).tolist():
        path.write_bytes(flipped(raw, position))
        error_of(path)


def test_truncated_or_extended_file_is_refused(small, tmp_path):
    path = tmp_path / "p"
    write_projection(small, path)
    raw = path.read_bytes()
    for size in [*range(0, len(raw), 7), len(raw) - 1]:
        path.write_bytes(raw[:size])
        assert isinstance(error_of(path), CorruptError)
    path.write_bytes(raw + b"\0")
    assert isinstance(error_of(path), CorruptError)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 100,
        b"PK\x03\x04",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_file_that_is_not_a_projection_is_refused(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    assert isinstance(error_of(tmp_path / "p"), CorruptError)


def test_missing_file_is_reported_with_the_command_that_builds_one(tmp_path):
    assert "build-projection" in error_of(tmp_path / "p").hint


def test_another_version_is_refused_with_its_number(small, tmp_path, monkeypatch):
    monkeypatch.setattr("xtk.projection.file.VERSION", 7)
    write_projection(small, tmp_path / "p")
    monkeypatch.undo()
    failure = error_of(tmp_path / "p")
    assert failure.what == "this projection has version 7; this xtk reads version 2"
    assert failure.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.array([0.75, np.nan, 0.5, 0.25, 0.125, 1, 1], np.float32)}, "a weight that is not above 0"),
        ({"weights": np.array([0.75, -0.25, 0.5, 0.25, 0.125, 1, 1], np.float32)}, "a weight that is not above 0"),
        ({"weights": np.array([0.75, 0.75, 0.5, 0.25, 0.125, 1, 1], np.float32)}, "sum to more than 1"),
        ({"teacher_ids": np.array([0, 4, 1, 2, 3, 0, 2], np.int32)}, "not in the teacher's vocabulary"),
        ({"teacher_ids": np.array([0, -1, 1, 2, 3, 0, 2], np.int32)}, "not in the teacher's vocabulary"),
        ({"row_offsets": np.array([0, 2, 2, 5, 6, 8], np.int64)}, "row offsets"),
        ({"student_cells": np.array([-1, 0], np.int32)}, "row offsets"),
        ({"teacher_ids": np.array([3, 0, 1, 2, 3, 0, 2], np.int32)}, "not strictly increasing"),
        ({"teacher_ids": np.array([0, 3, 1, 1, 3, 0, 2], np.int32)}, "not strictly increasing"),
        ({"student_cells": np.array([-1, 0, 1, -2, 2], np.int32)}, "numbers of its cells are out of range"),
        ({"teacher_cells": np.array([-1, 0, 1, 9], np.int32)}, "numbers of its cells are out of range"),
        ({"weights": np.ones(7, np.float64)}, "lacks a 1-dimensional tensor weights of dtype float32"),
        ({"teacher_ids": np.zeros((7, 1), np.int32)}, "lacks a 1-dimensional tensor teacher_ids of dtype int32"),
    ],
)
def test_invalid_values_are_refused_despite_a_matching_checksum(small, tmp_path, monkeypatch, changes, message):
    invalid = replace(small, **changes)
    if not message.startswith("lacks a 1-dimensional tensor "):
        with pytest.raises((XtkError, ValueError)):
            write_projection(invalid, tmp_path / "p")
        assert not any(tmp_path.iterdir())
    monkeypatch.setattr(SparseProjection, "validate", lambda projection: None)
    write_projection(invalid, tmp_path / "p")
    monkeypatch.undo()
    failure = error_of(tmp_path / "p")
    assert isinstance(failure, CorruptError)
    assert message in failure.what


@pytest.mark.parametrize("name", ["student", "teacher"])
@pytest.mark.parametrize("section", [None, [], {}, {"tokenizer": "sha256:0", "embedding_rows": "many"}])
def test_projection_without_tokenizer_information_is_refused(small, tmp_path, name, section):
    header = {key: value for key, value in small.header.items() if key != name} | (
        {} if section is None else {name: section}
    )
    write_projection(replace(small, header=header), tmp_path / "p")
    failure = error_of(tmp_path / "p")
    assert isinstance(failure, CorruptError)
    assert name in failure.what
