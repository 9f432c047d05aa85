"""Pruning of projections."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.errors import XtkError
from xtk.projection.build import assemble_projection, build_projection
from xtk.projection.file import write_projection
from xtk.projection.projection import SparseProjection
from xtk.projection.prune import prune_projection
from xtk.text.tokenizer import Tokenizer

quick = settings(max_examples=60, deadline=None)
ROWS, COLUMNS = 6, 5


@st.composite
def projections(draw) -> SparseProjection:
    """Return any projection [6, 5]: weights are multiples of 1/16 or smaller, with ties and empty rows."""
    integers = np.array(
        draw(st.lists(st.lists(st.integers(0, 16), min_size=COLUMNS, max_size=COLUMNS), min_size=ROWS, max_size=ROWS))
    )
    matrix = integers / np.maximum(integers.sum(1, keepdims=True), draw(st.sampled_from([16, 40])))
    rows, columns = np.nonzero(matrix)
    return assemble_projection(
        rows.astype(np.int32), columns.astype(np.int32), matrix[rows, columns].astype(np.float32), (ROWS, COLUMNS), {}
    )


OPTIONS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([None, 1, 2, 3]),
        "min_weight": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        "mass": st.sampled_from([1.0, 0.9, 0.5, 0.05]),
        "renormalize": st.booleans(),
    }
)


def rows_of(projection: SparseProjection) -> list[dict[int, float]]:
    ends = projection.row_offsets.tolist()
    return [
        dict(zip(projection.teacher_ids[a:b].tolist(), projection.weights[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(ends)
    ]


def reference_prune(row: dict[int, float], top_k: int | None, min_weight: float, mass: float) -> dict[int, float]:
    """Return the kept entries of one row, by a slow reference implementation."""
    heaviest_first = sorted(row, key=lambda teacher_id: (-row[teacher_id], teacher_id))
    kept, mass_so_far = {}, 0.0
    for teacher_id in heaviest_first[:top_k]:
        if row[teacher_id] >= np.float32(min_weight) and (
            mass == 1 or mass_so_far < mass * sum(row.values()) * (1 - 1e-9)
        ):
            kept[teacher_id] = row[teacher_id]
        mass_so_far += row[teacher_id]
    return dict(sorted(kept.items()))


@given(projection=projections(), options=OPTIONS)
@quick
def test_heaviest_entries_of_each_row_are_kept(projection, options):
    pruned = prune_projection(projection, **{**options, "renormalize": False})
    pruned.validate()
    expected = [
        reference_prune(row, options["top_k"], options["min_weight"], options["mass"]) for row in rows_of(projection)
    ]
    assert rows_of(pruned) == expected
    assert (np.diff(pruned.row_offsets) <= (options["top_k"] or COLUMNS)).all()
    assert (pruned.weights >= np.float32(options["min_weight"])).all()


@given(projection=projections(), mass=st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0]))
@quick
def test_kept_entries_have_the_requested_mass_and_are_as_few_as_possible(projection, mass):
    pruned = prune_projection(projection, mass=mass)
    assert (pruned.row_masses >= mass * projection.row_masses * (1 - 1e-6)).all()
    for before, after in zip(rows_of(projection), rows_of(pruned), strict=True):
        if mass < 1 and after:
            assert sum(after.values()) - min(after.values()) < mass * sum(before.values())


@given(projection=projections(), options=OPTIONS)
@quick
def test_renormalized_rows_keep_their_mass_and_other_pruned_rows_lose_it(projection, options):
    renormalized = prune_projection(projection, **{**options, "renormalize": True})
    plain = prune_projection(projection, **{**options, "renormalize": False})
    renormalized.validate()
    assert renormalized.teacher_ids.tolist() == plain.teacher_ids.tolist()
    not_empty = np.diff(renormalized.row_offsets) > 0
    np.testing.assert_allclose(renormalized.row_masses[not_empty], projection.row_masses[not_empty], rtol=1e-6)
    assert (renormalized.row_masses[~not_empty] == 0).all()
    lost = [sum(before.values()) - sum(after.values()) for before, after in
            zip(rows_of(projection), rows_of(plain), strict=True)]  # fmt: skip
    np.testing.assert_allclose(projection.row_masses - plain.row_masses, lost, atol=1e-6)


@given(projection=projections(), options=OPTIONS)
@quick
def test_pruning_twice_with_the_same_options_changes_nothing(projection, options):
    once = prune_projection(projection, **options)
    twice = prune_projection(once, **options)
    for name in ("row_offsets", "teacher_ids", "weights"):
        assert getattr(once, name).tobytes() == getattr(twice, name).tobytes()
    assert once.header == twice.header
    # Also without the record in the header; with a mass below 1, a second pruning would remove more entries.
    if options["mass"] == 1:
        without_header = prune_projection(replace(once, header={}), **options)
        assert without_header.teacher_ids.tolist() == once.teacher_ids.tolist()
        np.testing.assert_allclose(without_header.weights, once.weights, rtol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_pruning_twice_with_the_same_options_writes_the_same_bytes(families, tmp_path, renormalize):
    projection = build_projection(Tokenizer(families["metaspace"]), Tokenizer(families["teacher"]))
    once = prune_projection(projection, top_k=2, min_weight=0.01, renormalize=renormalize)
    assert len(once.teacher_ids) < len(projection.teacher_ids)
    write_projection(once, tmp_path / "once")
    write_projection(prune_projection(once, top_k=2, min_weight=0.01, renormalize=renormalize), tmp_path / "twice")
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


def test_header_lists_every_pruning_in_order_and_the_original_is_unchanged(families):
    projection = build_projection(Tokenizer(families["student"]), Tokenizer(families["teacher"]))
    before = projection.weights.copy()
    pruned = prune_projection(prune_projection(projection, top_k=2), min_weight=0.5, renormalize=True)
    assert pruned.header["prunings"] == [
        {"top_k": 2, "min_weight": 0.0, "mass": 1.0, "renormalize": False},
        {"top_k": None, "min_weight": 0.5, "mass": 1.0, "renormalize": True},
    ]
    assert projection.header["prunings"] == []
    assert projection.weights.tobytes() == before.tobytes()
    assert pruned.header["student"] == projection.header["student"]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"min_weight": -0.1},
        {"min_weight": 1.1},
        {"min_weight": np.nan},
        {"mass": 0},
        {"mass": 1.1},
        {"mass": np.nan},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(XtkError, match="--"):
        prune_projection(SparseProjection.identity(3), **options)
