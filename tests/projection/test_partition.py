"""The partition of both vocabularies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.projection.build import build_projection
from xtk.projection.methods.byte_partition import connected_components
from xtk.projection.special_tokens import match_special_tokens
from xtk.tokens.tokenizer import Tokenizer

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.permutations(FAMILIES, 2))


def readable_cells(student: Tokenizer, teacher: Tokenizer) -> tuple[list[int], list[int]]:
    """Slow twin: a union-find over names, in plain Python."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def find(node):
        parent.setdefault(node, node)
        while parent[node] != node:
            node = parent[node]
        return node

    def union(one, other):
        parent[find(one)] = find(other)

    for name, side, foreign, other in (("s", student, "t", teacher), ("t", teacher, "s", student)):
        for token, spelling in enumerate(side.vocabulary.bytes_by_id):
            if not spelling:
                continue
            find((name, token))
            ids = other.encode_bytes([spelling])[0]
            if spelling in other.vocabulary.token_of_bytes:
                union((name, token), (foreign, other.vocabulary.token_of_bytes[spelling]))
            elif ids is not None:
                union((name, token), (foreign, int(ids[0])))
    for one, other in zip(*match_special_tokens(student, teacher), strict=True):
        union(("s", int(one)), ("t", int(other)))
    numbers: dict[tuple[str, int], int] = {}
    results = []
    for name, side in (("s", student), ("t", teacher)):
        cells = []
        for token in range(side.embedding_rows):
            node = (name, token)
            cells.append(numbers.setdefault(find(node), len(numbers)) if node in parent else -1)
        results.append(cells)
    return results[0], results[1]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_cells_agree_with_a_readable_union_find(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(one, other, "partition")
    expected = readable_cells(one, other)
    assert projection.student_cells.tolist() == expected[0]
    assert projection.teacher_cells.tolist() == expected[1]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_w_beside_the_cells_is_first_and_no_entry_crosses_a_cell(tokenizer_of, student, teacher):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    cells, first = (build_projection(one, other, method) for method in ("partition", "first-token"))
    for name in ("row_offsets", "teacher_ids", "weights"):
        assert getattr(cells, name).tobytes() == getattr(first, name).tobytes()
    assert (cells.student_cells[cells.entry_rows] == cells.teacher_cells[cells.teacher_ids]).all()
    assert (first.student_cells == -1).all()


def test_swapping_sides_swaps_the_partition(tokenizer_of):
    one, other = tokenizer_of["student"], tokenizer_of["teacher"]
    forth, back = build_projection(one, other, "partition"), build_projection(other, one, "partition")
    names: dict[int, int] = {}
    for mine, theirs in ((forth.student_cells, back.teacher_cells), (forth.teacher_cells, back.student_cells)):
        for cell, name in zip(mine.tolist(), theirs.tolist(), strict=True):
            assert names.setdefault(cell, name) == name
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_tokenizers_have_a_cell_for_each_token(tokenizer_of, name):
    tokenizer = tokenizer_of[name]
    cells = build_projection(tokenizer, Tokenizer(tokenizer.folder), "partition")
    assert cells.student_cells.tolist() == cells.teacher_cells.tolist() == list(range(len(tokenizer)))


@given(edges=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_components_agree_with_spreading_labels(edges):
    one, other = (np.array([edge[side] for edge in edges], np.int64) for side in (0, 1))
    expected = list(range(31))
    for _ in range(31):
        for left, right in edges:
            expected[left] = expected[right] = min(expected[left], expected[right])
    assert connected_components(one, other, 31).tolist() == expected


def test_the_real_pair_has_the_cells_that_the_documentation_tells(real_data):
    student, teacher = (Tokenizer(real_data / "tokenizers" / name) for name in ("llama3", "qwen"))
    projection = build_projection(student, teacher, "partition")
    sizes = np.stack([np.bincount(side[side >= 0], minlength=109_600)
                      for side in (projection.student_cells, projection.teacher_cells)])  # fmt: skip
    filled = sizes.sum(0) > 0
    assert int(filled.sum()) == 109_568
    assert int((sizes == 1).all(0).sum()) == 101_680
    assert int(sizes.sum(0).max()) == 873
    assert (sizes[:, filled] > 0).all()
    cell = projection.student_cells[student.vocabulary.token_of_bytes[b"201"]]
    begins = {student.vocabulary.bytes_of(token) for token in np.flatnonzero(projection.student_cells == cell).tolist()}
    assert len(begins) == 111
    assert all(spelling.startswith(b"2") for spelling in begins)
    (only,) = np.flatnonzero(projection.teacher_cells == cell).tolist()
    assert teacher.vocabulary.bytes_of(only) == b"2"
    assert (projection.student_cells[student.vocabulary.special_tokens["<|reserved_special_token_7|>"]]) == -1
