"""Mixing projections."""

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


def dense(projection) -> np.ndarray:
    matrix = np.zeros((projection.student_width, projection.teacher_width))
    matrix[projection.entry_rows, projection.teacher_ids] = projection.weights
    return matrix


def of_matrix(matrix):
    rows, columns = np.nonzero(matrix)
    return assemble_projection(rows.astype(np.int32), columns.astype(np.int32), matrix[rows, columns], matrix.shape, {})


matrices = st.lists(st.integers(0, 5), min_size=12, max_size=12).map(lambda cells: np.array(cells).reshape(4, 3) / 15)


@given(parts=st.lists(matrices, min_size=2, max_size=4), weight=st.sampled_from([0.1, 0.25, 0.3]))
@settings(max_examples=60, deadline=None)
def test_a_merge_is_the_convex_combination_of_dense_matrices(parts, weight):
    first, *others = parts
    merged = merge_projections(of_matrix(first), [(of_matrix(other), weight) for other in others])
    merged.validate()
    expected = (1 - weight * len(others)) * first + sum(weight * other for other in others)
    np.testing.assert_allclose(dense(merged), expected, atol=1e-6)


def test_the_header_tells_what_was_merged_and_cells_stay_only_where_they_are_the_same(tokenizer_of, counted):
    pair = tokenizer_of["student"], tokenizer_of["teacher"]
    counts = build_projection(*pair, "cooccurrence", counts=counted("student", "teacher"))
    cells, multitoken = build_projection(*pair, "partition"), prune_projection(build_projection(*pair), top_k=2)
    merged = merge_projections(cells, [(counts, 0.25), (multitoken, 0.25)])
    told = [(part["method"], part["weight"]) for part in merged.header["merges"]]
    assert told == [("partition", 0.5), ("cooccurrence", 0.25), ("multitoken", 0.25)]
    assert merged.header["merges"][2]["prunings"][0]["top_k"] == 2
    assert merged.header["method"] == "merge"
    assert merged.header["student"] == cells.header["student"]
    assert (merged.student_cells == -1).all()
    assert (merged.teacher_cells == -1).all()
    alike = merge_projections(cells, [(build_projection(*pair, "partition"), 0.5)])
    assert alike.student_cells.tolist() == cells.student_cells.tolist()
    np.testing.assert_allclose(alike.weights, cells.weights, atol=1e-6)


def test_projections_of_other_tokenizers_are_refused_naming_both(tokenizer_of):
    mine = build_projection(tokenizer_of["student"], tokenizer_of["teacher"])
    for sides in itertools.permutations(["student", "teacher", "metaspace"], 2):
        if sides == ("student", "teacher"):
            continue
        other = build_projection(*(tokenizer_of[name] for name in sides))
        with pytest.raises(MismatchError) as caught:
            merge_projections(mine, [(other, 0.5)])
        side = "student" if sides[0] != "student" else "teacher"
        for projection in (mine, other):
            assert projection.header[side]["tokenizer"][:15] in caught.value.where
    wider = dataclasses.replace(mine, teacher_cells=np.full(mine.teacher_width + 1, -1, np.int32))
    with pytest.raises(MismatchError, match="shapes"):
        merge_projections(mine, [(wider, 0.5)])


@pytest.mark.parametrize("weights", [[0], [1], [-0.5], [float("nan")], [0.5, 0.5], [0.7, 0.6]])
def test_weights_without_meaning_are_refused(tokenizer_of, weights):
    mine = build_projection(tokenizer_of["student"], tokenizer_of["teacher"])
    with pytest.raises(XtkError, match="--merge"):
        merge_projections(mine, [(mine, weight) for weight in weights])
