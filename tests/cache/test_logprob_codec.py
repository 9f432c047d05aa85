"""The packed codec: errors within the documented bounds, agreement with the reference decoder, corrupt bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cache.reference_packed_codec import ReferenceDecoder
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.cache.codec.packed_shard_codec import PackedCodec
from xtk.cache.codec.quantization_levels import QUANTIZATION_STEPS, level_logprobs
from xtk.cache.codec.token_packing import TokenDecoder, pack_tokens
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.errors import CorruptError, XtkError
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

KINDS = ("top-k", "top-p", "sample", "top-k+sample", "none", "candidates")


def codec_options(
    precision: str = "standard", num_sample_sets: int = 0, num_samples: int = 0, *, sample_logprobs: bool = True
) -> dict:
    return {
        "precision": precision,
        "num_sample_sets": num_sample_sets,
        "num_samples": num_samples,
        "sample_logprobs": sample_logprobs,
    }


def document(rng, kind, width, length, *, num_sample_sets=0, num_samples=0, spread=3.0, ruled_out=0.0):
    """Return token ids, trained positions, full log-probabilities [P, width] and stored ones of a random document."""
    ids = rng.integers(0, width, length).astype(np.int32)
    trained = rng.random(length) < 0.8
    trained[:1] = False
    positions = np.flatnonzero(trained).astype(np.int32)
    logits = rng.normal(size=(len(positions), width)) * spread * rng.random((len(positions), 1))
    logits[rng.random(logits.shape) < ruled_out] = -np.inf
    logits[np.isneginf(logits).all(1), 0] = 0.0
    highest = logits.max(1, keepdims=True)
    full_logprobs = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
    return (
        ids,
        positions,
        full_logprobs,
        stored_logprobs_of(rng, kind, full_logprobs, ids[positions], positions, num_sample_sets, num_samples),
    )


def stored_logprobs_of(rng, kind, full_logprobs, observed_ids, positions, num_sample_sets, num_samples):
    exact, sample_ids, sample_counts, remainder_masses, sample_logprobs = [], [], [], [], []
    for row, token in zip(full_logprobs, observed_ids, strict=True):
        order = np.argsort(-row, kind="stable")
        kept_ids = {
            "top-k": order[:5],
            "top-p": order[: int((np.exp(row[order]).cumsum() < 0.9).sum()) + 1],
            "top-k+sample": order[:2],
            "candidates": rng.permutation(len(row))[: rng.integers(0, len(row) + 1)],
        }.get(kind, order[:0])
        exact.append(np.union1d(kept_ids, token).astype(np.int32))
        remainder = np.exp(row)
        remainder[exact[-1]] = 0
        remainder_masses.append(remainder.sum())
        for _ in range(num_sample_sets):
            samples = np.zeros(0, np.int64)
            if remainder.sum() > 0:
                samples = rng.choice(len(row), num_samples, p=remainder / remainder.sum())
            ids, counts = np.unique(samples, return_counts=True)
            sample_ids.append(ids)
            sample_counts.append(counts)
            sample_logprobs.append(row[ids])
    sizes = np.array([len(part) for part in exact], np.int64)
    owners = np.repeat(np.arange(len(exact)), sizes)
    ids = np.concatenate([np.zeros(0, np.int32), *exact])
    with np.errstate(invalid="ignore", divide="ignore"):
        entropy = -np.where(np.isneginf(full_logprobs), 0.0, full_logprobs * np.exp(full_logprobs)).sum(1)
    return StoredLogprobs(
        positions=positions,
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        ids=ids,
        logprobs=full_logprobs[owners, ids].astype(np.float32),
        sample_offsets=np.concatenate([[0], np.cumsum([len(part) for part in sample_ids])]).astype(np.int64),
        sample_ids=np.concatenate([np.zeros(0, np.int32), *sample_ids]).astype(np.int32),
        sample_counts=np.concatenate([np.zeros(0, np.int32), *sample_counts]).astype(np.int32),
        remainder_mass=np.array(remainder_masses, np.float32),
        observed_logprobs=full_logprobs[np.arange(len(observed_ids)), observed_ids].astype(np.float32),
        entropy=entropy.astype(np.float32),
        sample_logprobs=np.concatenate([np.zeros(0), *sample_logprobs]).astype(np.float32),
    )


def sequence_of(rng, ids, lengths):
    """Return a sequence in which most tokens have the number of bytes that the vocabulary states."""
    num_bytes = lengths[ids] + rng.integers(0, 3, len(ids)) * (rng.random(len(ids)) < 0.1)
    return TokenSequence(
        ids,
        np.cumsum(num_bytes).astype(np.int32),
        np.zeros(len(ids), np.bool_),
        np.zeros((0, 3), np.int32),
        np.zeros(0, np.int32),
    )


def shard(seed, kind, width, lengths, *, precision="standard", sets=0, draws=0, with_logprobs=True, **more):
    """Return rows, their full log-probabilities, codec options and the vocabulary order of a random shard."""
    rng = np.random.default_rng(seed)
    token_bytes = rng.integers(1, 9, width).astype(np.int32)
    rows, full_logprobs = [], []
    for length in lengths:
        ids, _, document_logprobs, scores = document(
            rng, kind, width, length, num_sample_sets=sets, num_samples=draws, **more
        )
        rows.append((sequence_of(rng, ids, token_bytes), scores))
        full_logprobs.append(document_logprobs)
    counts = np.bincount(np.concatenate([row.ids for row, _ in rows]), minlength=width)
    vocabulary_order = VocabularyOrder.from_counts(counts, token_bytes)
    options = codec_options(precision, sets, draws, sample_logprobs=with_logprobs)
    return rows, full_logprobs, options, vocabulary_order


def packed(rows, options, vocabulary_order):
    tables, tokens, logprob_blobs = PackedCodec.pack(rows, options, vocabulary_order)
    return PackedCodec(options, tables, vocabulary_order), tables, tokens, logprob_blobs


shards = st.builds(
    lambda seed, kind, width, lengths, precision, sets, draws, ruled_out, with_logprobs: (
        (seed, kind, width, lengths),
        {
            "precision": precision,
            "ruled_out": ruled_out,
            **({"sets": sets, "draws": draws, "with_logprobs": with_logprobs} if "sample" in kind else {}),
        },
    ),
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.integers(2, 40),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from(sorted(QUANTIZATION_STEPS)),
    st.integers(1, 3),
    st.sampled_from((1, 2, 7, 40)),
    st.sampled_from((0.0, 0.3)),
    st.booleans(),
)


@given(shards)
@settings(deadline=None)
def test_ids_samples_and_byte_ends_are_decoded_exactly(case):
    rows, _, options, vocabulary_order = shard(*case[0], **case[1])
    codec, _, token_blobs, logprob_blobs = packed(rows, options, vocabulary_order)
    for (row, scores), token_blob, logprob_blob in zip(rows, token_blobs, logprob_blobs, strict=True):
        ids, ends = codec.unpack_tokens(memoryview(token_blob), len(row))
        assert np.array_equal(ids, row.ids)
        assert np.array_equal(ends, row.byte_ends)
        decoded = codec.unpack_stored_logprobs(memoryview(logprob_blob), ids, scores.positions)
        assert np.array_equal(decoded.positions, scores.positions)
        assert np.array_equal(decoded.offsets, scores.offsets)
        assert np.array_equal(decoded.ids, scores.ids)
        assert np.array_equal(decoded.sample_offsets, scores.sample_offsets)
        assert np.array_equal(decoded.sample_ids, scores.sample_ids)
        assert np.array_equal(decoded.sample_counts, scores.sample_counts)


@given(shards)
@settings(deadline=None)
def test_quantization_errors_are_bounded_and_probabilities_sum_to_one(case):
    rows, _, options, vocabulary_order = shard(*case[0], **case[1])
    codec, _, _, logprob_blobs = packed(rows, options, vocabulary_order)
    precision = QUANTIZATION_STEPS[options["precision"]]
    depths = -level_logprobs(precision)
    half_steps = np.diff(depths) / 2
    for (row, scores), logprob_blob in zip(rows, logprob_blobs, strict=True):
        decoded = codec.unpack_stored_logprobs(logprob_blob, row.ids, scores.positions)
        assert np.allclose(decoded.entropy, scores.entropy, atol=precision.entropy_step / 2 + 1e-4)
        impossible = np.isneginf(scores.observed_logprobs)
        assert np.array_equal(np.isneginf(decoded.observed_logprobs), impossible)
        assert np.allclose(
            decoded.observed_logprobs[~impossible],
            scores.observed_logprobs[~impossible],
            atol=precision.odds_step / 2 + 1e-4,
        )
        owners = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
        total = (
            np.bincount(owners, np.exp(decoded.logprobs.astype(np.float64)), minlength=len(scores))
            + decoded.remainder_mass
        )
        assert np.allclose(total, 1, atol=1e-5)
        finite = ~np.isneginf(scores.logprobs)
        assert np.array_equal(~np.isneginf(decoded.logprobs), finite)
        entry_half_steps = half_steps[
            np.minimum(np.searchsorted(depths, -scores.logprobs[finite]), len(half_steps) - 1)
        ]
        # The error that all entries of a position share is at most their widest half step, plus that of the odds.
        with np.errstate(divide="ignore"):
            remainder_half_steps = half_steps[
                np.minimum(np.searchsorted(depths, -np.log(scores.remainder_mass)), len(half_steps) - 1)
            ]
        widest_half_steps = np.where(scores.remainder_mass > 0, remainder_half_steps, 0)
        np.maximum.at(widest_half_steps, owners[finite], entry_half_steps)
        if options["num_sample_sets"] and options["sample_logprobs"]:
            # The depth below the remainder has an error of half a step; equal remainders, equal errors.
            at = np.repeat(np.arange(len(scores.sample_offsets) - 1), np.diff(scores.sample_offsets))
            at //= options["num_sample_sets"]
            exact_depths, stored_depths = (
                np.log(one.remainder_mass.astype(np.float64)[at]) - one.sample_logprobs for one in (scores, decoded)
            )
            assert np.allclose(stored_depths, np.maximum(exact_depths, 0), rtol=0, atol=precision.depth_step / 2 + 1e-4)
        else:
            assert decoded.sample_logprobs is None or not options["num_sample_sets"]
        errors = np.abs(decoded.logprobs[finite] - scores.logprobs[finite])
        assert (errors <= entry_half_steps + widest_half_steps[owners[finite]] + precision.odds_step / 2 + 1e-4).all()


@given(shards)
@settings(max_examples=40, deadline=None)
def test_reference_decoder_returns_the_same_values(case):
    rows, _, options, vocabulary_order = shard(*case[0], **case[1])
    codec, tables, token_blobs, logprob_blobs = packed(rows, options, vocabulary_order)
    reference = ReferenceDecoder(
        tables, vocabulary_order.ids_by_frequency.tolist(), vocabulary_order.token_bytes.tolist(), *options.values()
    )
    for (row, scores), token_blob, logprob_blob in zip(rows, token_blobs, logprob_blobs, strict=True):
        assert reference.tokens(token_blob, len(row)) == (row.ids.tolist(), row.byte_ends.tolist())
        reference_positions = reference.positions(logprob_blob, row.ids[scores.positions].tolist())
        decoded = codec.unpack_stored_logprobs(logprob_blob, row.ids, scores.positions)
        for at, position in enumerate(reference_positions):
            entries = slice(decoded.offsets[at], decoded.offsets[at + 1])
            assert sorted(position.exact) == decoded.ids[entries].tolist()
            assert np.array_equal(
                np.array([position.exact[token] for token in decoded.ids[entries]], np.float32),
                decoded.logprobs[entries],
            )
            assert np.float32(position.remainder_mass) == decoded.remainder_mass[at]
            assert np.float32(position.observed_logprob) == decoded.observed_logprobs[at]
            assert np.float32(position.entropy) == decoded.entropy[at]
            for number, sample_set in enumerate(position.sample_sets):
                index = at * options["num_sample_sets"] + number
                samples = slice(decoded.sample_offsets[index], decoded.sample_offsets[index + 1])
                assert sample_set == dict(
                    zip(decoded.sample_ids[samples].tolist(), decoded.sample_counts[samples].tolist(), strict=True)
                )
                if decoded.sample_logprobs is not None:
                    found = [position.sample_logprobs[number][token] for token in decoded.sample_ids[samples].tolist()]
                    assert np.allclose(found, decoded.sample_logprobs[samples], rtol=0, atol=1e-6)


@given(shards, st.integers(0, 5) | st.none())
@settings(deadline=None)
def test_teacher_logprobs_equal_those_made_from_the_stored_logprobs(case, sample_set):
    from xtk.cache.teacher_logprobs import StoredLogprobs

    rows, _, options, vocabulary_order = shard(*case[0], **case[1])
    codec, _, _, logprob_blobs = packed(rows, options, vocabulary_order)
    for (row, scores), logprob_blob in zip(rows, logprob_blobs, strict=True):
        found = codec.unpack_teacher_logprobs(memoryview(logprob_blob), row.ids, scores.positions, sample_set)
        expected = StoredLogprobs.to_teacher_logprobs(
            codec.unpack_stored_logprobs(logprob_blob, row.ids, scores.positions), sample_set
        )
        for name in ("positions", "offsets", "remainder_mass", "observed_logprobs", "entropy"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        for at in range(len(scores)):
            entries = slice(found.offsets[at], found.offsets[at + 1])
            by_id = np.argsort(found.ids[entries])
            expected_by_id = np.argsort(expected.ids[entries])
            assert np.array_equal(found.ids[entries][by_id], expected.ids[entries][expected_by_id])
            assert np.allclose(
                found.logprobs[entries][by_id], expected.logprobs[entries][expected_by_id], rtol=1e-6, atol=1e-6
            )
        assert len(found) == 0 or (found.token_logprobs is None) == (expected.token_logprobs is None)
        if found.token_logprobs is not None and len(found):
            order, expected_order = (
                np.lexsort((one.ids, np.repeat(np.arange(len(one)), np.diff(one.offsets)))) for one in (found, expected)
            )
            assert np.allclose(found.token_logprobs[order], expected.token_logprobs[expected_order], atol=1e-6)


@given(shards)
@settings(max_examples=30, deadline=None)
def test_packing_the_same_rows_twice_gives_the_same_bytes(case):
    first, second = (
        PackedCodec.pack(rows, options, vocabulary_order)
        for rows, _, options, vocabulary_order in [shard(*case[0], **case[1])] * 2
    )
    assert first == second


@given(shards, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_corrupt_bytes_raise_a_corrupt_error_or_are_decoded(case, rng):
    rows, _, options, vocabulary_order = shard(*case[0], **case[1])
    codec, tables, token_blobs, logprob_blobs = packed(rows, options, vocabulary_order)
    for (row, scores), token_blob, logprob_blob in zip(rows, token_blobs, logprob_blobs, strict=True):
        for content, decode in (
            (token_blob, lambda data, row=row: codec.unpack_tokens(data, len(row))),
            (
                logprob_blob,
                lambda data, row=row, scores=scores: codec.unpack_stored_logprobs(data, row.ids, scores.positions),
            ),
            (
                logprob_blob,
                lambda data, row=row, scores=scores: codec.unpack_teacher_logprobs(data, row.ids, scores.positions, 0),
            ),
        ):
            try:
                decode(corrupted(content, rng))
            except CorruptError:
                continue
    try:
        other = PackedCodec(options, corrupted(tables, rng), vocabulary_order)
        for (row, scores), logprob_blob in zip(rows, logprob_blobs, strict=True):
            other.unpack_teacher_logprobs(logprob_blob, row.ids, scores.positions, 0)
    except CorruptError:
        pass


def corrupted(content: bytes, rng) -> bytes:
    """Return a corrupt copy of bytes: truncated, extended, random, or with flipped bits."""
    kind = rng.randrange(4)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        return content + bytes(rng.randrange(256) for _ in range(rng.randrange(9)))
    if kind == 2:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    return bytes(byte ^ (1 << rng.randrange(8)) if rng.random() < 0.1 else byte for byte in content)


def one_position(logprobs, observed_id, remainder_mass=0.0):
    """Return the stored log-probabilities of one position with the exact ids 0, 1, ... ."""
    logprobs = np.array(logprobs, np.float32)
    return StoredLogprobs(
        positions=np.array([1], np.int32),
        offsets=np.array([0, len(logprobs)], np.int64),
        ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=logprobs,
        sample_offsets=np.zeros(1, np.int64),
        sample_ids=np.zeros(0, np.int32),
        sample_counts=np.zeros(0, np.int32),
        remainder_mass=np.array([remainder_mass], np.float32),
        observed_logprobs=logprobs[[observed_id]],
        entropy=np.zeros(1, np.float32),
    )


def roundtrip(scores, observed_id, width=2, precision="standard"):
    ids = np.array([0, observed_id], np.int32)
    row = TokenSequence(
        ids, np.array([0, 1], np.int32), np.array([False, True]), np.zeros((0, 3), np.int32), np.zeros(0, np.int32)
    )
    vocabulary_order = VocabularyOrder.from_counts(np.bincount(ids, minlength=width), np.ones(width, np.int32))
    codec, _, _, logprob_blobs = packed([(row, scores)], codec_options(precision), vocabulary_order)
    return codec.unpack_stored_logprobs(logprob_blobs[0], ids, scores.positions)


def test_observed_token_with_all_mass_is_decoded_exactly():
    decoded = roundtrip(one_position([0.0, -math.inf], 0), 0)
    assert decoded.logprobs.tolist() == [0.0, -math.inf]
    assert decoded.remainder_mass.tolist() == [0.0]


def test_observed_token_without_mass_is_decoded_exactly():
    decoded = roundtrip(one_position([-math.inf, 0.0], 0), 0)
    assert decoded.logprobs.tolist() == [-math.inf, 0.0]
    assert decoded.observed_logprobs.tolist() == [-math.inf]


def test_probability_of_the_others_next_to_a_nearly_certain_token_is_kept():
    other_prob = 1e-6
    decoded = roundtrip(one_position([math.log1p(-other_prob), math.log(other_prob)], 0), 0)
    assert decoded.logprobs[0] == pytest.approx(-other_prob, rel=0.05)
    assert decoded.logprobs[1] == pytest.approx(math.log(other_prob), abs=0.05)


def test_log_probabilities_that_underflow_in_float32_are_kept():
    decoded = roundtrip(one_position([0.0, -300.0], 0), 0)
    assert decoded.logprobs[1] == pytest.approx(-300, abs=5)
    decoded = roundtrip(one_position([-300.0, 0.0], 0), 0)
    assert decoded.observed_logprobs[0] == pytest.approx(-300, abs=0.1)


def test_full_vocabulary_of_151646_ids_is_decoded():
    width = 151_646
    rng = np.random.default_rng(0)
    logits = rng.normal(size=width) * 3
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    decoded = roundtrip(one_position(logprobs, width - 1), width - 1, width)
    assert np.array_equal(decoded.ids, np.arange(width))
    assert np.abs(decoded.logprobs - logprobs).max() < 0.5
    assert decoded.remainder_mass[0] == 0


def test_logprobs_without_the_observed_token_are_refused():
    scores = one_position([-0.1, -3.0], 0, remainder_mass=0.05)
    with pytest.raises(ValueError, match="must contain its observed token exactly once"):
        roundtrip(scores, 2, width=3)


def test_sample_counts_with_another_sum_than_num_samples_are_refused():
    rows, _, options, vocabulary_order = shard(0, "sample", 9, [12], sets=1, draws=4)
    with pytest.raises(ValueError, match="sum to 5"):
        PackedCodec.pack(rows, {**options, "num_samples": 5}, vocabulary_order)


def test_position_clusters_separate_positions_with_different_ids():
    """Positions of two groups with different ids; in separate clusters, an id costs less than half as much."""
    rng = np.random.default_rng(0)
    from xtk.cache.codec.position_clusters import cluster_positions

    groups = rng.integers(0, 2, 400)
    ids = np.concatenate([np.sort(rng.choice(50, 20, replace=False)) + 50 * group for group in groups]).astype(np.int32)
    clusters = cluster_positions(np.arange(401) * 20, ids, 2, 100)
    assert len(np.unique(clusters)) == 2
    assert len({(group, cluster) for group, cluster in zip(groups.tolist(), clusters.tolist(), strict=True)}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_shard_file_returns_what_the_codec_packed(tmp_path, kind):
    """Through a file: the bytes are memory-mapped, and sizes take several digits in base 128."""
    sample_options = {"sets": 2, "draws": 6} if "sample" in kind else {}
    rows, _, options, vocabulary_order = shard(7, kind, 40, [90, 0, 200, 17], **sample_options)
    codec, _, _, logprob_blobs = packed(rows, options, vocabulary_order)
    assert any(len(content) > 128 for content in logprob_blobs)
    header = {"codec": {"name": "packed", "vocabulary_order": vocabulary_order.file_name, **options}}
    (tmp_path / vocabulary_order.file_name).write_bytes(vocabulary_order.file_content)
    documents = [
        TeacherDocument(Document.from_text("x" * max([0, *row.byte_ends.tolist()])), row, scores)
        for row, scores in rows
    ]
    write_shard(tmp_path / "shard.arrow", header, ShardPosition(0, 0, len(documents)), documents, vocabulary_order)
    found = CacheShard(tmp_path / "shard.arrow")
    for number, ((row, scores), logprob_blob) in enumerate(zip(rows, logprob_blobs, strict=True)):
        stored = found.read_document(number, sample_set=1)
        assert np.array_equal(stored.tokens.ids, row.ids)
        assert np.array_equal(stored.stored_logprobs.ids, scores.ids)
        assert np.array_equal(stored.stored_logprobs.sample_counts, scores.sample_counts)
        expected = codec.unpack_teacher_logprobs(logprob_blob, row.ids, scores.positions, 1)
        assert np.array_equal(stored.teacher_logprobs.logprobs, expected.logprobs)
        assert np.array_equal(stored.teacher_logprobs.ids, expected.ids)


@pytest.mark.parametrize(("gap", "fits"), [(524_288, True), (524_290, False), (1 << 21, False)])
def test_text_without_tokens_is_packed_or_refused(gap, fits):
    """The bytes of a prompt that a teacher_prompt replaces belong to the token before it."""
    order, lengths = np.arange(10, dtype=np.int32), np.ones(10, np.int32)
    ids, ends = np.array([1, 2, 3], np.int32), np.array([1, gap, gap + 1], np.int32)
    if not fits:
        with pytest.raises(XtkError, match="belong to no token"):
            pack_tokens([(ids, ends)], order, lengths)
        return
    tables, (packed,) = pack_tokens([(ids, ends)], order, lengths)
    found = TokenDecoder(tables, order, lengths).decode(packed, 3)
    assert np.array_equal(found[0], ids)
    assert np.array_equal(found[1], ends)
