"""Weighted merging of projections."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.errors import MismatchError, XtkError
from xtk.projection.build import assemble_projection, build_projection
from xtk.projection.merge_projections import merge_projections
from xtk.projection.prune import prune_projection


def dense_matrix(projection) -> np.ndarray:
    matrix = np.zeros((projection.student_width, projection.teacher_width))
    matrix[projection.entry_rows, projection.teacher_ids] = projection.weights
    return matrix


def projection_of(matrix):
    rows, columns = np.nonzero(matrix)
    return assemble_projection(rows.astype(np.int32), columns.astype(np.int32), matrix[rows, columns], matrix.shape, {})


matrices = st.lists(st.integers(0, 5), min_size=12, max_size=12).map(lambda cells: np.array(cells).reshape(4, 3) / 15)


@given(parts=st.lists(matrices, min_size=2, max_size=4), weight=st.sampled_from([0.1, 0.25, 0.3]))
@settings(max_examples=60, deadline=None)
def test_merge_is_the_convex_combination_of_dense_matrices(parts, weight):
    first, *others = parts
    merged = merge_projections(projection_of(first), [(projection_of(other), weight) for other in others])
    merged.validate()
    expected = (1 - weight * len(others)) * first + sum(weight * other for other in others)
    np.testing.assert_allclose(dense_matrix(merged), expected, atol=1e-6)


def test_header_lists_the_merged_projections_and_only_equal_cells_are_kept(tokenizer_of, cooccurrence_counts):
    pair = tokenizer_of["student"], tokenizer_of["teacher"]
    cooccurrence = build_projection(*pair, "cooccurrence", counts=cooccurrence_counts("student", "teacher"))
    partition, multitoken = build_projection(*pair, "partition"), prune_projection(build_projection(*pair), top_k=2)
    merged = merge_projections(partition, [(cooccurrence, 0.25), (multitoken, 0.25)])
    methods_and_weights = [(part["method"], part["weight"]) for part in merged.header["merges"]]
    assert methods_and_weights == [("partition", 0.5), ("cooccurrence", 0.25), ("multitoken", 0.25)]
    assert merged.header["merges"][2]["prunings"][0]["top_k"] == 2
    assert merged.header["method"] == "merge"
    assert merged.header["student"] == partition.header["student"]
    assert (merged.student_cells == -1).all()
    assert (merged.teacher_cells == -1).all()
    merged_equal_cells = merge_projections(partition, [(build_projection(*pair, "partition"), 0.5)])
    assert merged_equal_cells.student_cells.tolist() == partition.student_cells.tolist()
    np.testing.assert_allclose(merged_equal_cells.weights, partition.weights, atol=1e-6)


def test_projections_of_different_tokenizers_are_refused_naming_both(tokenizer_of):
    first = build_projection(tokenizer_of["student"], tokenizer_of["teacher"])
    for names in itertools.permutations(["student", "teacher", "metaspace"], 2):
        if names == ("student", "teacher"):
            continue
        other = build_projection(*(tokenizer_of[name] for name in names))
        with pytest.raises(MismatchError) as raised:
            merge_projections(first, [(other, 0.5)])
        side = "student" if names[0] != "student" else "teacher"
        for projection in (first, other):
            assert projection.header[side]["tokenizer"][:15] in raised.value.where
    wider = dataclasses.replace(first, teacher_cells=np.full(first.teacher_width + 1, -1, np.int32))
    with pytest.raises(MismatchError, match="shapes"):
        merge_projections(first, [(wider, 0.5)])


@pytest.mark.parametrize("weights", [[0], [1], [-0.5], [float("nan")], [0.5, 0.5], [0.7, 0.6]])
def test_invalid_merge_weights_are_refused(tokenizer_of, weights):
    projection = build_projection(tokenizer_of["student"], tokenizer_of["teacher"])
    with pytest.raises(XtkError, match="--merge"):
        merge_projections(projection, [(projection, weight) for weight in weights])
