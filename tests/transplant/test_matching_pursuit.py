"""Orthogonal matching pursuit: against a slow implementation, and exact recovery of sparse combinations."""

from __future__ import annotations

import numpy as np
import pytest

from xtk.tokens.tokenizer import Tokenizer
from xtk.transplant.matching_pursuit_numba import pursue_batch
from xtk.transplant.orthogonal_matching_pursuit import combine_donor_rows
from xtk.transplant.row_methods import DonorCombination
from xtk.transplant.token_sources import TokenSources


def slow_pursuit(atoms: np.ndarray, target: np.ndarray, limit: int) -> dict[int, float]:
    """Return {atom: weight}, with a least-squares fit at every step."""
    chosen: list[int] = []
    weights = np.zeros(0)
    for _ in range(limit):
        residual = target - weights @ atoms[chosen] if chosen else target
        products = np.abs(atoms @ residual)
        products[chosen] = 0
        chosen.append(int(products.argmax()))
        weights = np.linalg.lstsq(atoms[chosen].T, target, rcond=None)[0]
    return dict(zip(chosen, weights.tolist(), strict=True))


def test_the_kernel_agrees_with_a_slow_implementation():
    generator = np.random.default_rng(0)
    atoms = generator.normal(size=(7, 40, 24))
    atoms /= np.linalg.norm(atoms, axis=2, keepdims=True)
    targets = generator.normal(size=(7, 24))
    chosen, weights = pursue_batch(atoms @ atoms.transpose(0, 2, 1), np.einsum("bcg,bg->bc", atoms, targets), 6, 1e-7)
    for number in range(7):
        expected = slow_pursuit(atoms[number], targets[number], 6)
        found = dict(zip(chosen[number].tolist(), weights[number].tolist(), strict=True))
        assert found == pytest.approx(expected)


def test_sparse_combinations_are_recovered_and_stop_early():
    generator = np.random.default_rng(1)
    donor = generator.normal(size=(300, 128)).astype(np.float32)
    shared = np.arange(200)
    parts = generator.permuted(np.tile(shared, (100, 1)), axis=1)[:, :3]
    weights = generator.uniform(0.5, 1.5, (100, 3))
    donor[200:] = np.einsum("nk,nkg->ng", weights, donor[parts])
    found = combine_donor_rows(donor, np.arange(200, 300), shared)
    dense = np.zeros((300, 300))
    dense[found.rows, found.columns] = found.weights
    expected = np.zeros((300, 300))
    expected[np.arange(200, 300)[:, None], parts] = weights
    recovered = np.isclose(dense, expected, atol=1e-3).all(1)[200:]
    assert recovered.mean() > 0.9  # a first atom that is none of the three is possible
    assert (np.bincount(found.rows, minlength=300)[200:][recovered] <= 4).all()
    np.testing.assert_allclose(dense @ donor, donor * (np.arange(300) >= 200)[:, None], atol=1e-2)


def test_repeated_atoms_are_used_once():
    donor = np.ones((5, 8), np.float32)
    donor[0, 0] = 3
    found = combine_donor_rows(donor, np.array([4]), np.arange(4))
    dense = np.zeros(5)
    dense[found.columns] = found.weights
    np.testing.assert_allclose(dense @ donor, donor[4], atol=1e-5)


def test_a_donor_that_is_a_linear_image_of_the_model_gives_the_rows_of_the_model(pair):
    """Rows of new tokens are combinations of shared ones, in the donor and, unknown to the method, in the model."""
    new, old = Tokenizer(pair.student), Tokenizer(pair.teacher)
    sources = TokenSources(new, old)
    generator = np.random.default_rng(2)
    model_rows = generator.normal(size=(len(new), 128))
    shared = np.flatnonzero(sources.pair.equal_ids >= 0)
    missing = np.flatnonzero((sources.copied < 0) & (new.vocabulary.byte_lengths > 0))
    for token in missing:
        model_rows[token] = generator.uniform(0.5, 1, 2) @ model_rows[generator.choice(shared, 2, replace=False)]
    donor = (model_rows @ np.linalg.qr(generator.normal(size=(128, 128)))[0]).astype(np.float32)
    entries = DonorCombination(donor).weights(sources)
    table = np.zeros((len(old), 128))
    table[sources.pair.equal_ids[shared]] = model_rows[shared]
    made = np.zeros((len(new), 128))
    np.add.at(made, entries.rows, entries.weights[:, None] * table[entries.columns])
    errors = np.linalg.norm(made[missing] - model_rows[missing], axis=1)
    assert np.median(errors) < 1e-3
