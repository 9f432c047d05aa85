"""Orthogonal matching pursuit: agreement with a reference implementation, and recovery of sparse combinations."""

from __future__ import annotations

import numpy as np
import pytest
import small_inputs

from xtk.text.tokenizer import Tokenizer
from xtk.transplant.row_methods import DonorCombination, combine_donor_rows, pursue_batch
from xtk.transplant.token_sources import TokenSources


def reference_pursuit(atoms: np.ndarray, target: np.ndarray, limit: int) -> dict[int, float]:
    """Return `{atom: weight}`, with a least-squares fit at every step."""
    chosen: list[int] = []
    weights = np.zeros(0)
    for _ in range(limit):
        residual = target - weights @ atoms[chosen] if chosen else target
        products = np.abs(atoms @ residual)
        products[chosen] = 0
        chosen.append(int(products.argmax()))
        weights = np.linalg.lstsq(atoms[chosen].T, target, rcond=None)[0]
    return dict(zip(chosen, weights.tolist(), strict=True))


@pytest.mark.slow
def test_kernel_agrees_with_the_reference_implementation():
    rng = np.random.default_rng(0)
    atoms = rng.normal(size=(7, 40, 24))
    atoms /= np.linalg.norm(atoms, axis=2, keepdims=True)
    targets = rng.normal(size=(7, 24))
    chosen, weights = pursue_batch(atoms @ atoms.transpose(0, 2, 1), np.einsum("bcg,bg->bc", atoms, targets), 6, 1e-7)
    for index in range(7):
        expected = reference_pursuit(atoms[index], targets[index], 6)
        found = dict(zip(chosen[index].tolist(), weights[index].tolist(), strict=True))
        assert found == pytest.approx(expected)


def test_sparse_combinations_are_recovered_with_few_atoms():
    rng = np.random.default_rng(1)
    donor = rng.normal(size=(300, 128)).astype(np.float32)
    shared = np.arange(200)
    atoms = rng.permuted(np.tile(shared, (100, 1)), axis=1)[:, :3]
    weights = rng.uniform(0.5, 1.5, (100, 3))
    donor[200:] = np.einsum("nk,nkg->ng", weights, donor[atoms])
    combination = combine_donor_rows(donor, np.arange(200, 300), shared)
    dense = np.zeros((300, 300))
    dense[combination.rows, combination.columns] = combination.weights
    expected = np.zeros((300, 300))
    expected[np.arange(200, 300)[:, None], atoms] = weights
    recovered = np.isclose(dense, expected, atol=1e-3).all(1)[200:]
    assert recovered.mean() > 0.9  # the first selected atom can be none of the three
    assert (np.bincount(combination.rows, minlength=300)[200:][recovered] <= 4).all()
    np.testing.assert_allclose(dense @ donor, donor * (np.arange(300) >= 200)[:, None], atol=1e-2)


def test_repeated_atoms_are_used_once():
    donor = np.ones((5, 8), np.float32)
    donor[0, 0] = 3
    combination = combine_donor_rows(donor, np.array([4]), np.arange(4))
    dense = np.zeros(5)
    dense[combination.columns] = combination.weights
    np.testing.assert_allclose(dense @ donor, donor[4], atol=1e-5)


def test_donor_that_is_a_rotation_of_the_model_recovers_the_rows_of_the_model(pair):
    """Rows of new tokens are combinations of shared rows in donor and model; the method gets only the donor."""
    new_tokenizer, old_tokenizer = Tokenizer(pair.student), Tokenizer(pair.teacher)
    sources = TokenSources(new_tokenizer, old_tokenizer)
    rng = np.random.default_rng(2)
    model_rows = rng.normal(size=(len(new_tokenizer), 128))
    shared = np.flatnonzero(sources.pair.equal_ids >= 0)
    missing = np.flatnonzero((sources.copied < 0) & (new_tokenizer.vocabulary.byte_lengths > 0))
    for token in missing:
        model_rows[token] = rng.uniform(0.5, 1, 2) @ model_rows[rng.choice(shared, 2, replace=False)]
    donor = (model_rows @ np.linalg.qr(rng.normal(size=(128, 128)))[0]).astype(np.float32)
    entries = DonorCombination(donor).weights(sources)
    old_rows = np.zeros((len(old_tokenizer), 128))
    old_rows[sources.pair.equal_ids[shared]] = model_rows[shared]
    new_rows = np.zeros((len(new_tokenizer), 128))
    np.add.at(new_rows, entries.rows, entries.weights[:, None] * old_rows[entries.columns])
    errors = np.linalg.norm(new_rows[missing] - model_rows[missing], axis=1)
    assert np.median(errors) < 1e-3


def test_byte_tokens_that_are_never_emitted_have_no_entries_and_are_not_combined(tmp_path):
    new = Tokenizer(small_inputs.make_metaspace_tokenizer(tmp_path / "new"))
    sources = TokenSources(new, Tokenizer(small_inputs.make_student_tokenizer(tmp_path / "old")))
    assert len(sources.unused_ids) > 10
    donor = np.random.default_rng(0).normal(size=(len(new), 32)).astype(np.float32)
    entries = DonorCombination(donor).weights(sources)
    assert len(entries.rows)
    assert not np.isin(entries.rows, sources.unused_ids).any()
