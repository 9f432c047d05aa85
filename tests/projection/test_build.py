"""Building a projection: what each rule puts where."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from xtk.artifacts.projection_file import read_projection, write_projection
from xtk.errors import XtkError
from xtk.projection.build import METHODS, assemble_projection, build_projection
from xtk.projection.projection import SparseProjection
from xtk.tokens.tokenizer import Tokenizer

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.permutations(FAMILIES, 2))
# X-Token, arXiv 2605.21699: 0.9 * 0.1^i over the pieces, normalised.
DECAYING = {
    1: [1.0],
    2: [1 / 1.1, 0.1 / 1.1],
    3: [1 / 1.11, 0.1 / 1.11, 0.01 / 1.11],
    4: [1 / 1.111, 0.1 / 1.111, 0.01 / 1.111, 0.001 / 1.111],
}


def entries(projection: SparseProjection) -> list[tuple[int, int, float]]:
    return list(
        zip(
            projection.entry_rows.tolist(),
            projection.teacher_ids.tolist(),
            projection.weights.tolist(),
            strict=True,
        )
    )


def row(projection: SparseProjection, token: int) -> dict[int, float]:
    place = slice(projection.row_offsets[token], projection.row_offsets[token + 1])
    return dict(zip(projection.teacher_ids[place].tolist(), projection.weights[place].tolist(), strict=True))


def dense(projection: SparseProjection) -> np.ndarray:
    matrix = np.zeros((projection.student_width, projection.teacher_width))
    for token, teacher_id, weight in entries(projection):
        matrix[token, teacher_id] = weight
    return matrix


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_rows_sum_to_at_most_one_and_share_bytes_with_their_token(tokenizer_of, options_of, student, teacher, method):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, method, **options_of(method, student, teacher))
    projection.validate()
    assert (projection.row_masses <= 1 + 1e-6).all()
    assert ((projection.weights > 0) & (projection.weights <= 1)).all()
    for token, teacher_id, _ in entries(projection):
        spelling, piece = one.vocabulary.bytes_of(token), other.vocabulary.bytes_of(teacher_id)
        if one.vocabulary.special_mask[token]:
            assert other.vocabulary.special_mask[teacher_id]
        elif method == "cooccurrence":  # what stands first at a common boundary: one is the beginning of the other
            assert piece
            assert piece.startswith(spelling) or spelling.startswith(piece)
        elif method != "embedding":
            assert piece
            assert piece in spelling


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_tokens_of_equal_bytes_stay_exact_but_for_counts(tokenizer_of, options_of, student, teacher, method):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, method, **options_of(method, student, teacher))
    equal = [token for token, spelling in enumerate(one.vocabulary.bytes_by_id)
             if spelling in other.vocabulary.token_of_bytes]  # fmt: skip
    rows = {token: row(projection, token) for token in equal}
    if method == "cooccurrence":  # a token that begins longer ones of the teacher is rarely itself there
        rows = {token: found for token, found in rows.items() if len(found) == 1}
    assert rows
    for token, found in rows.items():
        assert found == {other.vocabulary.token_of_bytes[one.vocabulary.bytes_of(token)]: 1.0}


@pytest.mark.parametrize("method", METHODS)
def test_built_twice_a_projection_has_the_same_bytes(families, options_of, method, tmp_path):
    for name in ("once", "twice"):
        sides = Tokenizer(families["student"]), Tokenizer(families["metaspace"])
        built = build_projection(*sides, method, **options_of(method, "student", "metaspace"))
        write_projection(built, tmp_path / name)
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@pytest.mark.parametrize(("max_tokens_per_entry", "decay"), [(1, 0.1), (3, 0.5), (9, 0.0), (4, 1.0)])
def test_multitoken_weighs_as_its_options_say(tokenizer_of, student, teacher, max_tokens_per_entry, decay):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, "multitoken", max_tokens_per_entry=max_tokens_per_entry, decay=decay)
    exact = build_projection(one, other, "exact")
    pieces = other.encode_bytes(one.vocabulary.bytes_by_id)
    for token in np.flatnonzero(one.vocabulary.byte_lengths > 0).tolist():
        ids = [] if pieces[token] is None or len(pieces[token]) > max_tokens_per_entry else pieces[token].tolist()
        raw = [decay**place for place in range(len(ids))]
        expected: dict[int, float] = {}
        for teacher_id, weight in zip(ids, raw, strict=True):
            if weight:
                expected[teacher_id] = expected.get(teacher_id, 0) + weight / sum(raw)
        assert row(projection, token) == pytest.approx(row(exact, token) or expected, rel=1e-6)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_the_reverse_pass_adds_teacher_tokens_to_the_rows_of_their_pieces(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    forward = build_projection(one, other, "multitoken")
    both = build_projection(one, other, "multitoken", reverse_pass=True)
    both.validate()
    table = one.vocabulary.token_of_bytes
    raw = [dict(row(forward, token)) for token in range(forward.student_width)]
    for teacher_id, spelling in enumerate(other.vocabulary.bytes_by_id):
        ids = None if not spelling or spelling in table else one.encode_bytes([spelling])[0]
        ids = [] if ids is None else ids.tolist()
        for piece, weight in zip(ids, DECAYING.get(len(ids), []), strict=False):
            if one.vocabulary.bytes_of(piece) not in other.vocabulary.token_of_bytes:
                raw[piece][teacher_id] = raw[piece].get(teacher_id, 0) + weight
    for token in range(len(one)):
        scale = max(1.0, sum(raw[token].values()))
        expected = {teacher_id: weight / scale for teacher_id, weight in raw[token].items()}
        assert row(both, token) == pytest.approx(expected, rel=1e-5)
        for teacher_id in row(both, token):
            if one.vocabulary.byte_lengths[token]:
                pair = one.vocabulary.bytes_of(token), other.vocabulary.bytes_of(teacher_id)
                assert pair[0] in pair[1] or pair[1] in pair[0]


def test_the_reverse_pass_reaches_more_teacher_tokens(tokenizer_of):
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
def test_options_that_a_method_cannot_use_are_refused(tokenizer_of, method, options, message):
    with pytest.raises(XtkError, match=message):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], method, **options)


def test_the_header_holds_the_request(tokenizer_of):
    built = build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "multitoken", decay=0.3)
    assert built.header["options"] == {"max_tokens_per_entry": 4, "decay": 0.3, "reverse_pass": False}
    assert (built.header["special_tokens"], built.header["prunings"], built.header["merges"]) == ("role", [], [])


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_exact_joins_tokens_of_equal_bytes_and_nothing_else(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student].vocabulary, tokenizer_of[teacher].vocabulary
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher], "exact")
    expected = {token for token, spelling in enumerate(one.bytes_by_id) if spelling in other.token_of_bytes}
    ordinary = [entry for entry in entries(projection) if not one.special_mask[entry[0]]]
    assert {token for token, _, _ in ordinary} == expected
    assert all(weight == 1 for _, _, weight in ordinary)
    assert all(one.bytes_of(token) == other.bytes_of(teacher_id) for token, teacher_id, _ in ordinary)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_first_puts_all_weight_on_the_first_piece(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, "first-token")
    exact = build_projection(one, other, "exact")
    pieces = other.encode_bytes(one.vocabulary.bytes_by_id)
    for token in range(len(one)):
        if row(exact, token):
            assert row(projection, token) == row(exact, token)
        elif not one.vocabulary.byte_lengths[token] or pieces[token] is None:
            assert row(projection, token) == {}
        else:
            assert row(projection, token) == {int(pieces[token][0]): 1.0}


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_multitoken_weights_fall_to_a_tenth_and_long_spellings_have_no_row(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, "multitoken")
    exact = build_projection(one, other, "exact")
    pieces = other.encode_bytes(one.vocabulary.bytes_by_id)
    for token in np.flatnonzero(one.vocabulary.byte_lengths > 0).tolist():
        if row(exact, token):
            assert row(projection, token) == row(exact, token)
            continue
        expected: dict[int, float] = {}
        ids = [] if pieces[token] is None else pieces[token].tolist()
        for teacher_id, weight in zip(ids, DECAYING.get(len(ids), []), strict=False):
            expected[teacher_id] = expected.get(teacher_id, 0) + weight  # "88" is twice the same piece
        assert row(projection, token) == pytest.approx(expected, rel=1e-6)


def test_long_spellings_are_met_in_this_test_material(tokenizer_of):
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
    one, other = tokenizer_of[student].vocabulary, tokenizer_of[teacher].vocabulary
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher])
    name_of = {token: name for name, token in other.special_tokens.items()}
    found = {
        name: name_of[teacher_id] for name, token in one.special_tokens.items() for teacher_id in row(projection, token)
    }
    assert found == pairs


def test_a_role_that_an_ordinary_word_plays_is_not_matched(families, tokenizer_of, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "copy")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "eos_token": "."}))
    teacher = Tokenizer(folder)
    assert "eos" in teacher.special_token_ids
    assert not teacher.vocabulary.special_mask[teacher.special_token_ids["eos"]]
    projection = build_projection(tokenizer_of["student"], teacher)
    assert row(projection, tokenizer_of["student"].special_token_ids["eos"]) == {}


def test_tokens_that_split_a_character_map_by_bytes(tokenizer_of):
    one, other = tokenizer_of["student"].vocabulary, tokenizer_of["metaspace"].vocabulary
    projection = build_projection(tokenizer_of["student"], tokenizer_of["metaspace"])
    lone = one.token_of_bytes[b"\xe6"]
    assert row(projection, lone) == {other.token_of_bytes[b"\xe6"]: 1.0}
    split = one.token_of_bytes[b"\xe6\x97"]  # the first two bytes of 日
    assert row(projection, split) == pytest.approx(
        {other.token_of_bytes[b"\xe6"]: 1 / 1.1, other.token_of_bytes[b"\x97"]: 0.1 / 1.1}
    )


def test_rows_above_the_tokenizer_are_empty(families, tmp_path):
    student = shutil.copytree(families["student"], tmp_path / "student")
    teacher = shutil.copytree(families["teacher"], tmp_path / "teacher")
    (student / "config.json").write_text('{"vocab_size": 656}')
    (teacher / "config.json").write_text('{"vocab_size": 512}')
    projection = build_projection(Tokenizer(student), Tokenizer(teacher))
    assert (projection.student_width, projection.teacher_width) == (656, 512)
    assert (projection.row_masses[640:] == 0).all()
    assert projection.teacher_ids.max() < 445
    # The padded rows are no tokens, so they are no missing mass.
    assert projection.summary()["unmapped_mass"] == pytest.approx(1 - projection.row_masses[:640].mean(), abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_tokenizer_projects_onto_itself_as_the_identity(tokenizer_of, options_of, name, method):
    tokenizer = tokenizer_of[name]
    projection = build_projection(tokenizer, Tokenizer(tokenizer.folder), method, **options_of(method, name, name))
    identity = SparseProjection.identity(len(tokenizer))
    assert projection.row_offsets.tolist() == identity.row_offsets.tolist()
    assert projection.teacher_ids.tolist() == identity.teacher_ids.tolist()
    assert projection.weights.tolist() == identity.weights.tolist()
    assert projection.summary()["unmapped_mass"] == 0


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_missing_mass_is_never_negative(tokenizer_of, student, teacher):
    figures = build_projection(tokenizer_of[student], tokenizer_of[teacher]).summary()
    assert 0 <= figures["unmapped_mass"] <= 1
    assert not json.dumps(figures["unmapped_mass"]).startswith("-")


@pytest.mark.parametrize(("student", "teacher"), [("student", "teacher"), ("metaspace", "student")])
def test_columns_are_the_same_matrix_seen_from_the_teacher(tokenizer_of, student, teacher):
    projection = build_projection(tokenizer_of[student], tokenizer_of[teacher])
    matrix = dense(projection)
    columns = projection.columns.pad_columns(projection.teacher_width + 3)
    assert len(columns.offsets) == projection.teacher_width + 4
    for teacher_id in range(projection.teacher_width + 3):
        place = slice(columns.offsets[teacher_id], columns.offsets[teacher_id + 1])
        found = np.zeros(projection.student_width)
        found[columns.student_ids[place]] = np.exp(columns.log_weights[place])
        reference = matrix[:, teacher_id] if teacher_id < projection.teacher_width else 0
        np.testing.assert_allclose(found, np.broadcast_to(reference, found.shape), rtol=1e-6)


def test_an_unknown_method_is_answered_with_the_nearest_one(tokenizer_of):
    with pytest.raises(XtkError, match=r"no method called 'multi_token'; did you mean multitoken\?"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "multi_token")


def bad(**changes: object) -> SparseProjection:
    good = {
        "row_offsets": np.array([0, 1, 2], np.int64),
        "teacher_ids": np.array([0, 1], np.int32),
        "weights": np.array([1, 0.5], np.float32),
        "student_cells": np.array([-1, -1], np.int32),
        "teacher_cells": np.array([-1, -1], np.int32),
    }
    return SparseProjection(**{**good, **changes})


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
def test_a_matrix_that_is_no_projection_is_refused(changes, message):
    bad().validate()
    with pytest.raises(XtkError, match=message):
        bad(**changes).validate()


BUILD = """
import sys
from pathlib import Path
from xtk.artifacts.projection_file import write_projection
from xtk.projection.build import build_projection
from xtk.tokens.tokenizer import Tokenizer
projection = build_projection(Tokenizer(sys.argv[1]), Tokenizer(sys.argv[2]))
write_projection(projection, Path(sys.argv[3]))
# Not its rusage, which begins with what the process that started it held.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_the_real_pair_builds_within_a_gigabyte_and_201_goes_to_2_first(real_data, tmp_path):
    llama, qwen = real_data / "tokenizers/llama3", real_data / "tokenizers/qwen"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, llama, qwen, tmp_path / "p"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 1_000_000_000
    projection = read_projection(tmp_path / "p")
    student, teacher = Tokenizer(llama), Tokenizer(qwen)
    numeral = student.vocabulary.token_of_bytes[b"201"]
    digits = [teacher.vocabulary.token_of_bytes[digit] for digit in (b"2", b"0", b"1")]
    assert row(projection, numeral) == pytest.approx(dict(zip(digits, DECAYING[3], strict=True)))
    assert projection.summary()["unmapped_mass"] < 0.05
    end = student.special_token_ids["eos"]
    assert row(projection, end) == {teacher.special_token_ids["eos"]: 1.0}


def test_weights_that_are_nothing_in_float32_are_no_entries():
    rows, columns = np.array([0, 0, 1, 1], np.int32), np.array([0, 1, 1, 1], np.int32)
    made = assemble_projection(rows, columns, np.array([1.0, 1e-60, 1e-45, 0.25]), (3, 2), {})
    made.validate()
    assert made.teacher_ids.tolist() == [0, 1]
    assert made.row_offsets.tolist() == [0, 1, 2, 2]
