"""Construction of projections: the entries and weights of each method."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from xtk.errors import XtkError
from xtk.projection.build import METHODS, assemble_projection, build_projection
from xtk.projection.file import read_projection, write_projection
from xtk.projection.projection import SparseProjection
from xtk.text.tokenizer import Tokenizer

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.permutations(FAMILIES, 2))
# X-Token, arXiv 2605.21699: 0.9 * 0.1^i over the pieces, normalized.
DECAYING_WEIGHTS = {
    1: [1.0],
    2: [1 / 1.1, 0.1 / 1.1],
    3: [1 / 1.11, 0.1 / 1.11, 0.01 / 1.11],
    4: [1 / 1.111, 0.1 / 1.111, 0.01 / 1.111, 0.001 / 1.111],
}


def entries_of(projection: SparseProjection) -> list[tuple[int, int, float]]:
    return list(
        zip(
            projection.entry_rows.tolist(),
            projection.teacher_ids.tolist(),
            projection.weights.tolist(),
            strict=True,
        )
    )


def row_of(projection: SparseProjection, token: int) -> dict[int, float]:
    span = slice(projection.row_offsets[token], projection.row_offsets[token + 1])
    return dict(zip(projection.teacher_ids[span].tolist(), projection.weights[span].tolist(), strict=True))


def dense_matrix(projection: SparseProjection) -> np.ndarray:
    matrix = np.zeros((projection.student_width, projection.teacher_width))
    for token, teacher_id, weight in entries_of(projection):
        matrix[token, teacher_id] = weight
    return matrix


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_rows_sum_to_at_most_one_and_share_bytes_with_their_token(
    tokenizer_of, method_options, student, teacher, method
):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(
        student_tokenizer, teacher_tokenizer, method, **method_options(method, student, teacher)
    )
    projection.validate()
    assert (projection.row_masses <= 1 + 1e-6).all()
    assert ((projection.weights > 0) & (projection.weights <= 1)).all()
    for token, teacher_id, _ in entries_of(projection):
        spelling, piece = (
            student_tokenizer.vocabulary.bytes_of(token),
            teacher_tokenizer.vocabulary.bytes_of(teacher_id),
        )
        if student_tokenizer.vocabulary.special_mask[token]:
            assert teacher_tokenizer.vocabulary.special_mask[teacher_id]
        elif method == "cooccurrence":  # first tokens after a shared boundary: one is a prefix of the other
            assert piece
            assert piece.startswith(spelling) or spelling.startswith(piece)
        else:
            assert piece
            assert piece in spelling


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_tokens_of_equal_bytes_have_exact_rows_except_with_cooccurrence(
    tokenizer_of, method_options, student, teacher, method
):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(
        student_tokenizer, teacher_tokenizer, method, **method_options(method, student, teacher)
    )
    equal_tokens = [token for token, spelling in enumerate(student_tokenizer.vocabulary.bytes_by_id)
                    if spelling in teacher_tokenizer.vocabulary.token_of_bytes]  # fmt: skip
    rows = {token: row_of(projection, token) for token in equal_tokens}
    if method == "cooccurrence":  # a prefix of longer teacher tokens rarely occurs as a separate teacher token
        rows = {token: entries for token, entries in rows.items() if len(entries) == 1}
    assert rows
    for token, entries in rows.items():
        assert entries == {
            teacher_tokenizer.vocabulary.token_of_bytes[student_tokenizer.vocabulary.bytes_of(token)]: 1.0
        }


@pytest.mark.parametrize("method", METHODS)
def test_projection_built_twice_has_the_same_bytes(families, method_options, method, tmp_path):
    for name in ("once", "twice"):
        tokenizers = Tokenizer(families["student"]), Tokenizer(families["metaspace"])
        built = build_projection(*tokenizers, method, **method_options(method, "student", "metaspace"))
        write_projection(built, tmp_path / name)
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@pytest.mark.parametrize(("max_tokens_per_entry", "decay"), [(1, 0.1), (3, 0.5), (9, 0.0), (4, 1.0)])
def test_multitoken_weights_follow_max_tokens_per_entry_and_decay(
    tokenizer_of, student, teacher, max_tokens_per_entry, decay
):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(
        student_tokenizer, teacher_tokenizer, "multitoken", max_tokens_per_entry=max_tokens_per_entry, decay=decay
    )
    exact = build_projection(student_tokenizer, teacher_tokenizer, "exact")
    pieces = teacher_tokenizer.encode_bytes(student_tokenizer.vocabulary.bytes_by_id)
    for token in np.flatnonzero(student_tokenizer.vocabulary.byte_lengths > 0).tolist():
        ids = [] if pieces[token] is None or len(pieces[token]) > max_tokens_per_entry else pieces[token].tolist()
        unnormalized = [decay**position for position in range(len(ids))]
        expected: dict[int, float] = {}
        for teacher_id, weight in zip(ids, unnormalized, strict=True):
            if weight:
                expected[teacher_id] = expected.get(teacher_id, 0) + weight / sum(unnormalized)
        assert row_of(projection, token) == pytest.approx(row_of(exact, token) or expected, rel=1e-6)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_reverse_pass_adds_teacher_tokens_to_the_rows_of_their_pieces(tokenizer_of, student, teacher):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    forward = build_projection(student_tokenizer, teacher_tokenizer, "multitoken")
    both = build_projection(student_tokenizer, teacher_tokenizer, "multitoken", reverse_pass=True)
    both.validate()
    student_token_of_bytes = student_tokenizer.vocabulary.token_of_bytes
    unnormalized = [dict(row_of(forward, token)) for token in range(forward.student_width)]
    for teacher_id, spelling in enumerate(teacher_tokenizer.vocabulary.bytes_by_id):
        ids = (
            None
            if not spelling or spelling in student_token_of_bytes
            else student_tokenizer.encode_bytes([spelling])[0]
        )
        ids = [] if ids is None else ids.tolist()
        for piece, weight in zip(ids, DECAYING_WEIGHTS.get(len(ids), []), strict=False):
            if student_tokenizer.vocabulary.bytes_of(piece) not in teacher_tokenizer.vocabulary.token_of_bytes:
                unnormalized[piece][teacher_id] = unnormalized[piece].get(teacher_id, 0) + weight
    for token in range(len(student_tokenizer)):
        scale = max(1.0, sum(unnormalized[token].values()))
        expected = {teacher_id: weight / scale for teacher_id, weight in unnormalized[token].items()}
        assert row_of(both, token) == pytest.approx(expected, rel=1e-5)
        for teacher_id in row_of(both, token):
            if student_tokenizer.vocabulary.byte_lengths[token]:
                pair = student_tokenizer.vocabulary.bytes_of(token), teacher_tokenizer.vocabulary.bytes_of(teacher_id)
                assert pair[0] in pair[1] or pair[1] in pair[0]


def test_reverse_pass_increases_the_reachable_teacher_tokens(tokenizer_of):
    pair = tokenizer_of["student"], tokenizer_of["composing"]
    forward, both = (build_projection(*pair, reverse_pass=value) for value in (False, True))
    assert both.summary()["reachable_teacher_tokens"] > forward.summary()["reachable_teacher_tokens"]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("multitoken", {"max_tokens_per_entry": 0}, "--max-tokens-per-entry is 0"),
        ("multitoken", {"decay": 1.5}, "--decay is 1.5"),
        ("multitoken", {"decay": float("nan")}, "--decay is nan"),
        ("first-token", {"decay": 0.5}, "--method first-token does not support --decay"),
        ("cooccurrence", {}, "the method cooccurrence of build_projection needs the arguments counts"),
    ],
)
def test_invalid_and_missing_method_options_are_refused(tokenizer_of, method, options, message):
    with pytest.raises(XtkError, match=message):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], method, **options)


def test_header_contains_the_options(tokenizer_of):
    built = build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "multitoken", decay=0.3)
    assert built.header["options"] == {"max_tokens_per_entry": 4, "decay": 0.3, "reverse_pass": False}
    assert (built.header["special_tokens"], built.header["prunings"], built.header["merges"]) == ("role", [], [])


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_exact_method_maps_only_tokens_of_equal_bytes(tokenizer_of, student, teacher):
    student_vocabulary, teacher_vocabulary = tokenizer_of[student].vocabulary, tokenizer_of[teacher].vocabulary
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher], "exact")
    expected = {
        token
        for token, spelling in enumerate(student_vocabulary.bytes_by_id)
        if spelling in teacher_vocabulary.token_of_bytes
    }
    ordinary_entries = [entry for entry in entries_of(projection) if not student_vocabulary.special_mask[entry[0]]]
    assert {token for token, _, _ in ordinary_entries} == expected
    assert all(weight == 1 for _, _, weight in ordinary_entries)
    assert all(
        student_vocabulary.bytes_of(token) == teacher_vocabulary.bytes_of(teacher_id)
        for token, teacher_id, _ in ordinary_entries
    )


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_first_token_method_puts_all_weight_on_the_first_piece(tokenizer_of, student, teacher):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(student_tokenizer, teacher_tokenizer, "first-token")
    exact = build_projection(student_tokenizer, teacher_tokenizer, "exact")
    pieces = teacher_tokenizer.encode_bytes(student_tokenizer.vocabulary.bytes_by_id)
    for token in range(len(student_tokenizer)):
        if row_of(exact, token):
            assert row_of(projection, token) == row_of(exact, token)
        elif not student_tokenizer.vocabulary.byte_lengths[token] or pieces[token] is None:
            assert row_of(projection, token) == {}
        else:
            assert row_of(projection, token) == {int(pieces[token][0]): 1.0}


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_multitoken_weights_decay_by_a_tenth_and_long_spellings_are_unmapped(tokenizer_of, student, teacher):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(student_tokenizer, teacher_tokenizer, "multitoken")
    exact = build_projection(student_tokenizer, teacher_tokenizer, "exact")
    pieces = teacher_tokenizer.encode_bytes(student_tokenizer.vocabulary.bytes_by_id)
    for token in np.flatnonzero(student_tokenizer.vocabulary.byte_lengths > 0).tolist():
        if row_of(exact, token):
            assert row_of(projection, token) == row_of(exact, token)
            continue
        expected: dict[int, float] = {}
        ids = [] if pieces[token] is None else pieces[token].tolist()
        for teacher_id, weight in zip(ids, DECAYING_WEIGHTS.get(len(ids), []), strict=False):
            expected[teacher_id] = expected.get(teacher_id, 0) + weight  # "88" consists of the same piece twice
        assert row_of(projection, token) == pytest.approx(expected, rel=1e-6)


def test_family_vocabularies_contain_spellings_of_one_to_five_pieces(tokenizer_of):
    pieces = tokenizer_of["teacher"].encode_bytes(tokenizer_of["metaspace"].vocabulary.bytes_by_id)
    sizes = {len(ids) for ids in pieces if ids is not None}
    assert {1, 2, 3, 4, 5} <= sizes


@pytest.mark.parametrize(
    ("student", "teacher", "pairs"),
    [
        ("student", "teacher", {"<|end_of_text|>": "<|im_end|>", "<|pad|>": "<|endoftext|>"}),
        ("teacher", "student", {"<|im_end|>": "<|end_of_text|>", "<|endoftext|>": "<|pad|>"}),
        ("student", "metaspace", {"<|begin_of_text|>": "<s>", "<|end_of_text|>": "</s>"}),
        ("teacher", "composing", {"<|im_end|>": "<|endoftext|>", "<|endoftext|>": "<|endoftext|>"}),
        ("word-piece", "metaspace", {"[CLS]": "<s>", "[SEP]": "</s>", "[UNK]": "<unk>"}),
    ],
)
def test_special_tokens_are_matched_by_role_then_by_name(tokenizer_of, student, teacher, pairs):
    student_vocabulary, teacher_vocabulary = tokenizer_of[student].vocabulary, tokenizer_of[teacher].vocabulary
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher])
    name_of = {token: name for name, token in teacher_vocabulary.special_tokens.items()}
    found = {
        name: name_of[teacher_id]
        for name, token in student_vocabulary.special_tokens.items()
        for teacher_id in row_of(projection, token)
    }
    assert found == pairs


def test_role_of_an_ordinary_token_is_not_matched(families, tokenizer_of, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "copy")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "eos_token": "."}))
    teacher = Tokenizer(folder)
    assert "eos" in teacher.special_token_ids
    assert not teacher.vocabulary.special_mask[teacher.special_token_ids["eos"]]
    projection = build_projection(tokenizer_of["student"], teacher)
    assert row_of(projection, tokenizer_of["student"].special_token_ids["eos"]) == {}


def test_tokens_that_split_a_character_are_mapped_by_bytes(tokenizer_of):
    student_vocabulary, teacher_vocabulary = tokenizer_of["student"].vocabulary, tokenizer_of["metaspace"].vocabulary
    projection = build_projection(tokenizer_of["student"], tokenizer_of["metaspace"])
    lone_byte = student_vocabulary.token_of_bytes[b"\xe6"]
    assert row_of(projection, lone_byte) == {teacher_vocabulary.token_of_bytes[b"\xe6"]: 1.0}
    split = student_vocabulary.token_of_bytes[b"\xe6\x97"]  # the first two bytes of 日
    assert row_of(projection, split) == pytest.approx(
        {teacher_vocabulary.token_of_bytes[b"\xe6"]: 1 / 1.1, teacher_vocabulary.token_of_bytes[b"\x97"]: 0.1 / 1.1}
    )


def test_padding_rows_are_empty_and_not_counted_as_unmapped(families, tmp_path):
    student = shutil.copytree(families["student"], tmp_path / "student")
    teacher = shutil.copytree(families["teacher"], tmp_path / "teacher")
    (student / "config.json").write_text('{"vocab_size": 656}')
    (teacher / "config.json").write_text('{"vocab_size": 512}')
    projection = build_projection(Tokenizer(student), Tokenizer(teacher))
    assert (projection.student_width, projection.teacher_width) == (656, 512)
    assert (projection.row_masses[640:] == 0).all()
    assert projection.teacher_ids.max() < 445
    # Padding rows are not tokens, so they do not count as unmapped mass.
    assert projection.summary()["unmapped_mass"] == pytest.approx(1 - projection.row_masses[:640].mean(), abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_projection_of_a_tokenizer_onto_itself_is_the_identity(tokenizer_of, method_options, name, method):
    tokenizer = tokenizer_of[name]
    projection = build_projection(tokenizer, Tokenizer(tokenizer.folder), method, **method_options(method, name, name))
    identity = SparseProjection.identity(len(tokenizer))
    assert projection.row_offsets.tolist() == identity.row_offsets.tolist()
    assert projection.teacher_ids.tolist() == identity.teacher_ids.tolist()
    assert projection.weights.tolist() == identity.weights.tolist()
    assert projection.summary()["unmapped_mass"] == 0


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_unmapped_mass_is_between_zero_and_one(tokenizer_of, student, teacher):
    summary = build_projection(tokenizer_of[student], tokenizer_of[teacher]).summary()
    assert 0 <= summary["unmapped_mass"] <= 1
    assert not json.dumps(summary["unmapped_mass"]).startswith("-")


@pytest.mark.parametrize(("student", "teacher"), [("student", "teacher"), ("metaspace", "student")])
def test_columns_contain_the_same_matrix(tokenizer_of, student, teacher):
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher])
    matrix = dense_matrix(projection)
    columns = projection.columns.pad_columns(projection.teacher_width + 3)
    assert len(columns.offsets) == projection.teacher_width + 4
    for teacher_id in range(projection.teacher_width + 3):
        span = slice(columns.offsets[teacher_id], columns.offsets[teacher_id + 1])
        column = np.zeros(projection.student_width)
        column[columns.student_ids[span]] = np.exp(columns.log_weights[span])
        reference = matrix[:, teacher_id] if teacher_id < projection.teacher_width else 0
        np.testing.assert_allclose(column, np.broadcast_to(reference, column.shape), rtol=1e-6)


def test_unknown_method_is_refused_with_the_nearest_name(tokenizer_of):
    with pytest.raises(XtkError, match=r"no method called 'multi_token'; did you mean multitoken\?"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "multi_token")


def projection_with(**changes: object) -> SparseProjection:
    valid = {
        "row_offsets": np.array([0, 1, 2], np.int64),
        "teacher_ids": np.array([0, 1], np.int32),
        "weights": np.array([1, 0.5], np.float32),
        "student_cells": np.array([-1, -1], np.int32),
        "teacher_cells": np.array([-1, -1], np.int32),
    }
    return SparseProjection(**{**valid, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_offsets": np.array([0, 1], np.int64)}, "row offsets do not match"),
        ({"row_offsets": np.array([0, 1, 3], np.int64)}, "row offsets do not match"),
        ({"row_offsets": np.array([1, 1, 2], np.int64)}, "row offsets do not match"),
        ({"row_offsets": np.array([0, 3, 2], np.int64)}, "weights do not match"),
        ({"weights": np.array([1], np.float32)}, "weights do not match"),
        ({"teacher_ids": np.array([0, 2], np.int32)}, "a token id that is not in the teacher's vocabulary"),
        ({"teacher_ids": np.array([-1, 1], np.int32)}, "a token id that is not in the teacher's vocabulary"),
        ({"weights": np.array([1, np.nan], np.float32)}, "a weight that is not above 0"),
        ({"weights": np.array([1, -0.5], np.float32)}, "a weight that is not above 0"),
        ({"weights": np.array([1, 0], np.float32)}, "a weight that is not above 0"),
        ({"weights": np.array([1.5, 0.5], np.float32)}, "a weight that is not above 0"),
        ({"row_offsets": np.array([0, 2, 2], np.int64)}, "weights sum to more than 1"),
        (
            {"row_offsets": np.array([0, 2, 2], np.int64), "teacher_ids": np.array([1, 0], np.int32)},
            "not strictly increasing",
        ),
        (
            {"row_offsets": np.array([0, 0, 2], np.int64), "teacher_ids": np.array([1, 1], np.int32)},
            "not strictly increasing",
        ),
        ({"student_cells": np.array([-2, 0], np.int32)}, "numbers of its cells are out of range"),
        ({"teacher_cells": np.array([0, 4], np.int32)}, "numbers of its cells are out of range"),
    ],
)
def test_invalid_projection_arrays_are_refused(changes, message):
    projection_with().validate()
    with pytest.raises(XtkError, match=message):
        projection_with(**changes).validate()


BUILD_SCRIPT = """
import sys
from pathlib import Path
from xtk.projection.file import write_projection
from xtk.projection.build import build_projection
from xtk.text.tokenizer import Tokenizer
projection = build_projection(Tokenizer(sys.argv[1]), Tokenizer(sys.argv[2]))
write_projection(projection, Path(sys.argv[3]))
# Not its rusage, which begins with what the process that started it held.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_real_pair_is_built_within_1_gb_and_201_is_composed_of_its_digits(real_data, tmp_path):
    llama, qwen = real_data / "tokenizers/llama3", real_data / "tokenizers/qwen"
    process = subprocess.run(
        [sys.executable, "-c", BUILD_SCRIPT, llama, qwen, tmp_path / "p"], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) * 1024 < 1_000_000_000
    projection = read_projection(tmp_path / "p")
    student, teacher = Tokenizer(llama), Tokenizer(qwen)
    numeral = student.vocabulary.token_of_bytes[b"201"]
    digits = [teacher.vocabulary.token_of_bytes[digit] for digit in (b"2", b"0", b"1")]
    assert row_of(projection, numeral) == pytest.approx(dict(zip(digits, DECAYING_WEIGHTS[3], strict=True)))
    assert projection.summary()["unmapped_mass"] < 0.05
    end = student.special_token_ids["eos"]
    assert row_of(projection, end) == {teacher.special_token_ids["eos"]: 1.0}


def test_weights_that_underflow_in_float32_are_not_entries():
    rows, columns = np.array([0, 0, 1, 1], np.int32), np.array([0, 1, 1, 1], np.int32)
    projection = assemble_projection(rows, columns, np.array([1.0, 1e-60, 1e-45, 0.25]), (3, 2), {})
    projection.validate()
    assert projection.teacher_ids.tolist() == [0, 1]
    assert projection.row_offsets.tolist() == [0, 1, 2, 2]
