"""Partition of both vocabularies into cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.projection.build import build_projection
from xtk.projection.methods.byte_partition import connected_components
from xtk.projection.special_tokens import match_special_tokens
from xtk.text.tokenizer import Tokenizer

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.permutations(FAMILIES, 2))


def reference_cells(student: Tokenizer, teacher: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the cells of both vocabularies, by a reference implementation: union-find in plain Python."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def find(node):
        parent.setdefault(node, node)
        while parent[node] != node:
            node = parent[node]
        return node

    def union(one, other):
        parent[find(one)] = find(other)

    for name, tokenizer, other_name, other in (("s", student, "t", teacher), ("t", teacher, "s", student)):
        for token, spelling in enumerate(tokenizer.vocabulary.bytes_by_id):
            if not spelling:
                continue
            find((name, token))
            ids = other.encode_bytes([spelling])[0]
            if spelling in other.vocabulary.token_of_bytes:
                union((name, token), (other_name, other.vocabulary.token_of_bytes[spelling]))
            elif ids is not None:
                union((name, token), (other_name, int(ids[0])))
    for one, other in zip(*match_special_tokens(student, teacher), strict=True):
        union(("s", int(one)), ("t", int(other)))
    cell_numbers: dict[tuple[str, int], int] = {}
    results = []
    for name, tokenizer in (("s", student), ("t", teacher)):
        cells = []
        for token in range(tokenizer.embedding_rows):
            node = (name, token)
            cells.append(cell_numbers.setdefault(find(node), len(cell_numbers)) if node in parent else -1)
        results.append(cells)
    return results[0], results[1]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_cells_agree_with_a_reference_union_find(tokenizer_of, student, teacher):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    projection = build_projection(student_tokenizer, teacher_tokenizer, "partition")
    expected = reference_cells(student_tokenizer, teacher_tokenizer)
    assert projection.student_cells.tolist() == expected[0]
    assert projection.teacher_cells.tolist() == expected[1]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_partition_has_the_weights_of_first_token_and_no_entry_crosses_cells(tokenizer_of, student, teacher):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    partition, first_token = (
        build_projection(student_tokenizer, teacher_tokenizer, method) for method in ("partition", "first-token")
    )
    for name in ("row_offsets", "teacher_ids", "weights"):
        assert getattr(partition, name).tobytes() == getattr(first_token, name).tobytes()
    assert (partition.student_cells[partition.entry_rows] == partition.teacher_cells[partition.teacher_ids]).all()
    assert (first_token.student_cells == -1).all()


def test_swapping_student_and_teacher_swaps_the_cells(tokenizer_of):
    student_tokenizer, teacher_tokenizer = tokenizer_of["student"], tokenizer_of["teacher"]
    forward, backward = (
        build_projection(student_tokenizer, teacher_tokenizer, "partition"),
        build_projection(teacher_tokenizer, student_tokenizer, "partition"),
    )
    backward_cell_of: dict[int, int] = {}
    for forward_cells, backward_cells in (
        (forward.student_cells, backward.teacher_cells),
        (forward.teacher_cells, backward.student_cells),
    ):
        for cell, backward_cell in zip(forward_cells.tolist(), backward_cells.tolist(), strict=True):
            assert backward_cell_of.setdefault(cell, backward_cell) == backward_cell
    assert len(set(backward_cell_of.values())) == len(backward_cell_of)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_tokenizers_have_a_cell_per_token(tokenizer_of, name):
    tokenizer = tokenizer_of[name]
    cells = build_projection(tokenizer, Tokenizer(tokenizer.folder), "partition")
    assert cells.student_cells.tolist() == cells.teacher_cells.tolist() == list(range(len(tokenizer)))


@given(edges=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_connected_components_agree_with_label_propagation(edges):
    left_nodes, right_nodes = (np.array([edge[side] for edge in edges], np.int64) for side in (0, 1))
    expected = list(range(31))
    for _ in range(31):
        for left, right in edges:
            expected[left] = expected[right] = min(expected[left], expected[right])
    assert connected_components(left_nodes, right_nodes, 31).tolist() == expected


@pytest.mark.slow
def test_real_pair_has_the_cells_of_the_documentation(real_data):
    student, teacher = (Tokenizer(real_data / "tokenizers" / name) for name in ("llama3", "qwen"))
    projection = build_projection(student, teacher, "partition")
    sizes = np.stack([np.bincount(side[side >= 0], minlength=109_600)
                      for side in (projection.student_cells, projection.teacher_cells)])  # fmt: skip
    not_empty = sizes.sum(0) > 0
    assert int(not_empty.sum()) == 109_568
    assert int((sizes == 1).all(0).sum()) == 101_680
    assert int(sizes.sum(0).max()) == 873
    assert (sizes[:, not_empty] > 0).all()
    cell = projection.student_cells[student.vocabulary.token_of_bytes[b"201"]]
    cell_bytes = {
        student.vocabulary.bytes_of(token) for token in np.flatnonzero(projection.student_cells == cell).tolist()
    }
    assert len(cell_bytes) == 111
    assert all(spelling.startswith(b"2") for spelling in cell_bytes)
    (only,) = np.flatnonzero(projection.teacher_cells == cell).tolist()
    assert teacher.vocabulary.bytes_of(only) == b"2"
    assert (projection.student_cells[student.vocabulary.special_tokens["<|reserved_special_token_7|>"]]) == -1
