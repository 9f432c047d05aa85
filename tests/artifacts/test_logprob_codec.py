"""The packed codec: what goes in comes out as near as is told, the plain twin reads the same, damage is noticed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from artifacts.reference_packed_codec import PlainCodec
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.artifacts.cache_shard import CacheShard
from xtk.artifacts.codec.packed_shard_codec import PackedCodec
from xtk.artifacts.codec.quantization_levels import QUANTIZATION_STEPS, level_logprobs
from xtk.artifacts.codec.token_packing import TokenDecoder, pack_tokens
from xtk.artifacts.shard_writing import ScoredDocument, ShardPosition, write_shard
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.errors import CorruptError, XtkError
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import StoredLogprobs
from xtk.tokens.token_sequence import TokenSequence

KINDS = ("top-k", "top-p", "sample", "top-k+sample", "none", "candidates")


def options_of(precision: str = "standard", sets: int = 0, draws: int = 0) -> dict:
    return {"precision": precision, "num_sample_sets": sets, "num_samples": draws}


def document(random, kind, width, length, *, sets=0, draws=0, spread=3.0, ruled_out=0.0):
    """Tokens and scores of distributions over a small vocabulary, the whole of each known."""
    ids = random.integers(0, width, length).astype(np.int32)
    trained = random.random(length) < 0.8
    trained[:1] = False
    positions = np.flatnonzero(trained).astype(np.int32)
    logits = random.normal(size=(len(positions), width)) * spread * random.random((len(positions), 1))
    logits[random.random(logits.shape) < ruled_out] = -np.inf
    logits[np.isneginf(logits).all(1), 0] = 0.0
    highest = logits.max(1, keepdims=True)
    whole = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
    return ids, positions, whole, scores_of(random, kind, whole, ids[positions], positions, sets, draws)


def scores_of(random, kind, whole, realised, positions, sets, draws):
    exact, drawn, counts, tails = [], [], [], []
    for row, token in zip(whole, realised, strict=True):
        likely = np.argsort(-row, kind="stable")
        kept = {
            "top-k": likely[:5],
            "top-p": likely[: int((np.exp(row[likely]).cumsum() < 0.9).sum()) + 1],
            "top-k+sample": likely[:2],
            "candidates": random.permutation(len(row))[: random.integers(0, len(row) + 1)],
        }.get(kind, likely[:0])
        exact.append(np.union1d(kept, token).astype(np.int32))
        rest = np.exp(row)
        rest[exact[-1]] = 0
        tails.append(rest.sum())
        for _ in range(sets):
            found = np.zeros(0, np.int64)
            if rest.sum() > 0:
                found = random.choice(len(row), draws, p=rest / rest.sum())
            names, times = np.unique(found, return_counts=True)
            drawn.append(names)
            counts.append(times)
    sizes = np.array([len(part) for part in exact], np.int64)
    owners = np.repeat(np.arange(len(exact)), sizes)
    names = np.concatenate([np.zeros(0, np.int32), *exact])
    with np.errstate(invalid="ignore", divide="ignore"):
        entropy = -np.where(np.isneginf(whole), 0.0, whole * np.exp(whole)).sum(1)
    return StoredLogprobs(
        positions=positions,
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        ids=names,
        logprobs=whole[owners, names].astype(np.float32),
        sample_offsets=np.concatenate([[0], np.cumsum([len(part) for part in drawn])]).astype(np.int64),
        sample_ids=np.concatenate([np.zeros(0, np.int32), *drawn]).astype(np.int32),
        sample_counts=np.concatenate([np.zeros(0, np.int32), *counts]).astype(np.int32),
        remainder_mass=np.array(tails, np.float32),
        observed_logprobs=whole[np.arange(len(realised)), realised].astype(np.float32),
        entropy=entropy.astype(np.float32),
    )


def sequence_of(random, ids, lengths):
    """Tokens of which most have the bytes that the vocabulary says."""
    own = lengths[ids] + random.integers(0, 3, len(ids)) * (random.random(len(ids)) < 0.1)
    return TokenSequence(
        ids,
        np.cumsum(own).astype(np.int32),
        np.zeros(len(ids), np.bool_),
        np.zeros((0, 3), np.int32),
        np.zeros(0, np.int32),
    )


def shard(seed, kind, width, lengths, *, precision="standard", sets=0, draws=0, **more):
    """A codec, what it packed, and the ranks of its cache."""
    random = np.random.default_rng(seed)
    token_bytes = random.integers(1, 9, width).astype(np.int32)
    rows, wholes = [], []
    for length in lengths:
        ids, _, whole, scores = document(random, kind, width, length, sets=sets, draws=draws, **more)
        rows.append((sequence_of(random, ids, token_bytes), scores))
        wholes.append(whole)
    counts = np.bincount(np.concatenate([row.ids for row, _ in rows]), minlength=width)
    ranks = VocabularyOrder.from_counts(counts, token_bytes)
    return rows, wholes, options_of(precision, sets, draws), ranks


def packed(rows, options, ranks):
    tables, tokens, signals = PackedCodec.pack(rows, options, ranks)
    return PackedCodec(options, tables, ranks), tables, tokens, signals


shards = st.builds(
    lambda seed, kind, width, lengths, precision, sets, draws, ruled_out: (
        (seed, kind, width, lengths),
        {
            "precision": precision,
            "ruled_out": ruled_out,
            **({"sets": sets, "draws": draws} if "sample" in kind else {}),
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
)


@given(shards)
@settings(deadline=None)
def test_ids_draws_and_byte_ends_come_back_as_they_were(case):
    rows, _, options, ranks = shard(*case[0], **case[1])
    codec, _, tokens, signals = packed(rows, options, ranks)
    for (row, scores), token_bytes, signal_bytes in zip(rows, tokens, signals, strict=True):
        ids, ends = codec.unpack_tokens(memoryview(token_bytes), len(row))
        assert np.array_equal(ids, row.ids)
        assert np.array_equal(ends, row.byte_ends)
        back = codec.unpack_stored_logprobs(memoryview(signal_bytes), ids, scores.positions)
        assert np.array_equal(back.positions, scores.positions)
        assert np.array_equal(back.offsets, scores.offsets)
        assert np.array_equal(back.ids, scores.ids)
        assert np.array_equal(back.sample_offsets, scores.sample_offsets)
        assert np.array_equal(back.sample_ids, scores.sample_ids)
        assert np.array_equal(back.sample_counts, scores.sample_counts)


@given(shards)
@settings(deadline=None)
def test_errors_are_within_their_bounds_and_probabilities_sum_to_one(case):
    rows, _, options, ranks = shard(*case[0], **case[1])
    codec, _, _, signals = packed(rows, options, ranks)
    precision = QUANTIZATION_STEPS[options["precision"]]
    depths = -level_logprobs(precision)
    half_steps = np.diff(depths) / 2
    for (row, scores), signal_bytes in zip(rows, signals, strict=True):
        back = codec.unpack_stored_logprobs(signal_bytes, row.ids, scores.positions)
        assert np.allclose(back.entropy, scores.entropy, atol=precision.entropy_step / 2 + 1e-4)
        impossible = np.isneginf(scores.observed_logprobs)
        assert np.array_equal(np.isneginf(back.observed_logprobs), impossible)
        assert np.allclose(
            back.observed_logprobs[~impossible],
            scores.observed_logprobs[~impossible],
            atol=precision.odds_step / 2 + 1e-4,
        )
        owners = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
        total = (
            np.bincount(owners, np.exp(back.logprobs.astype(np.float64)), minlength=len(scores)) + back.remainder_mass
        )
        assert np.allclose(total, 1, atol=1e-5)
        finite = ~np.isneginf(scores.logprobs)
        assert np.array_equal(~np.isneginf(back.logprobs), finite)
        own = half_steps[np.minimum(np.searchsorted(depths, -scores.logprobs[finite]), len(half_steps) - 1)]
        # What all entries of a position share is at most the widest half step among them, and the odds' own.
        with np.errstate(divide="ignore"):
            of_tails = half_steps[
                np.minimum(np.searchsorted(depths, -np.log(scores.remainder_mass)), len(half_steps) - 1)
            ]
        widest = np.where(scores.remainder_mass > 0, of_tails, 0)
        np.maximum.at(widest, owners[finite], own)
        errors = np.abs(back.logprobs[finite] - scores.logprobs[finite])
        assert (errors <= own + widest[owners[finite]] + precision.odds_step / 2 + 1e-4).all()


@given(shards)
@settings(max_examples=40, deadline=None)
def test_the_plain_twin_reads_the_same_bits(case):
    rows, _, options, ranks = shard(*case[0], **case[1])
    codec, tables, tokens, signals = packed(rows, options, ranks)
    twin = PlainCodec(tables, ranks.ids_by_frequency.tolist(), ranks.token_bytes.tolist(), *options.values())
    for (row, scores), token_bytes, signal_bytes in zip(rows, tokens, signals, strict=True):
        assert twin.tokens(token_bytes, len(row)) == (row.ids.tolist(), row.byte_ends.tolist())
        plain = twin.positions(signal_bytes, row.ids[scores.positions].tolist())
        back = codec.unpack_stored_logprobs(signal_bytes, row.ids, scores.positions)
        for at, position in enumerate(plain):
            entries = slice(back.offsets[at], back.offsets[at + 1])
            assert sorted(position.exact) == back.ids[entries].tolist()
            assert np.array_equal(
                np.array([position.exact[name] for name in back.ids[entries]], np.float32), back.logprobs[entries]
            )
            assert np.float32(position.tail_mass) == back.remainder_mass[at]
            assert np.float32(position.realised) == back.observed_logprobs[at]
            assert np.float32(position.entropy) == back.entropy[at]
            for number, drawn in enumerate(position.draws):
                place = at * options["num_sample_sets"] + number
                names = slice(back.sample_offsets[place], back.sample_offsets[place + 1])
                assert drawn == dict(
                    zip(back.sample_ids[names].tolist(), back.sample_counts[names].tolist(), strict=True)
                )


@given(shards, st.integers(0, 5) | st.none())
@settings(deadline=None)
def test_a_signal_is_what_its_scores_tell(case, draw):
    from xtk.artifacts.shard_codec_registry import to_teacher_logprobs

    rows, _, options, ranks = shard(*case[0], **case[1])
    codec, _, _, signals = packed(rows, options, ranks)
    for (row, scores), signal_bytes in zip(rows, signals, strict=True):
        signal = codec.unpack_teacher_logprobs(memoryview(signal_bytes), row.ids, scores.positions, draw)
        wanted = to_teacher_logprobs(codec.unpack_stored_logprobs(signal_bytes, row.ids, scores.positions), draw)
        for name in ("positions", "offsets", "remainder_mass", "observed_logprobs", "entropy"):
            assert np.array_equal(getattr(signal, name), getattr(wanted, name)), name
        for at in range(len(scores)):
            entries = slice(signal.offsets[at], signal.offsets[at + 1])
            by_id = np.argsort(signal.ids[entries])
            wanted_by_id = np.argsort(wanted.ids[entries])
            assert np.array_equal(signal.ids[entries][by_id], wanted.ids[entries][wanted_by_id])
            assert np.allclose(
                signal.logprobs[entries][by_id], wanted.logprobs[entries][wanted_by_id], rtol=1e-6, atol=1e-6
            )


@given(shards)
@settings(max_examples=30, deadline=None)
def test_the_same_scores_give_the_same_bytes(case):
    first, second = (
        PackedCodec.pack(rows, options, ranks) for rows, _, options, ranks in [shard(*case[0], **case[1])] * 2
    )
    assert first == second


@given(shards, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_altered_bytes_are_noticed_or_read_as_something_else(case, random):
    rows, _, options, ranks = shard(*case[0], **case[1])
    codec, tables, tokens, signals = packed(rows, options, ranks)
    for (row, scores), token_bytes, signal_bytes in zip(rows, tokens, signals, strict=True):
        for content, read in (
            (token_bytes, lambda some, row=row: codec.unpack_tokens(some, len(row))),
            (
                signal_bytes,
                lambda some, row=row, scores=scores: codec.unpack_stored_logprobs(some, row.ids, scores.positions),
            ),
            (
                signal_bytes,
                lambda some, row=row, scores=scores: codec.unpack_teacher_logprobs(some, row.ids, scores.positions, 0),
            ),
        ):
            try:
                read(altered(content, random))
            except CorruptError:
                continue
    try:
        other = PackedCodec(options, altered(tables, random), ranks)
        for (row, scores), signal_bytes in zip(rows, signals, strict=True):
            other.unpack_teacher_logprobs(signal_bytes, row.ids, scores.positions, 0)
    except CorruptError:
        pass


def altered(content: bytes, random) -> bytes:
    """Bytes of which some are others, or that end too soon, or go on."""
    kind = random.randrange(4)
    if kind == 0:
        return content[: random.randrange(len(content) + 1)]
    if kind == 1:
        return content + bytes(random.randrange(256) for _ in range(random.randrange(9)))
    if kind == 2:
        return bytes(random.randrange(256) for _ in range(random.randrange(60)))
    return bytes(byte ^ (1 << random.randrange(8)) if random.random() < 0.1 else byte for byte in content)


def one_position(logprobs, realised, tail=0.0, width=2):
    """Scores of a single position with exact entries 0, 1, ... ."""
    logprobs = np.array(logprobs, np.float32)
    return StoredLogprobs(
        positions=np.array([1], np.int32),
        offsets=np.array([0, len(logprobs)], np.int64),
        ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=logprobs,
        sample_offsets=np.zeros(1, np.int64),
        sample_ids=np.zeros(0, np.int32),
        sample_counts=np.zeros(0, np.int32),
        remainder_mass=np.array([tail], np.float32),
        observed_logprobs=logprobs[[realised]],
        entropy=np.zeros(1, np.float32),
    )


def back_of(scores, realised, width=2, precision="standard"):
    ids = np.array([0, realised], np.int32)
    row = TokenSequence(
        ids, np.array([0, 1], np.int32), np.array([False, True]), np.zeros((0, 3), np.int32), np.zeros(0, np.int32)
    )
    ranks = VocabularyOrder.from_counts(np.bincount(ids, minlength=width), np.ones(width, np.int32))
    codec, _, _, signals = packed([(row, scores)], options_of(precision), ranks)
    return codec.unpack_stored_logprobs(signals[0], ids, scores.positions)


def test_all_mass_on_the_token_that_stands_there():
    back = back_of(one_position([0.0, -math.inf], 0), 0)
    assert back.logprobs.tolist() == [0.0, -math.inf]
    assert back.remainder_mass.tolist() == [0.0]


def test_all_mass_on_another_token():
    back = back_of(one_position([-math.inf, 0.0], 0), 0)
    assert back.logprobs.tolist() == [-math.inf, 0.0]
    assert back.observed_logprobs.tolist() == [-math.inf]


def test_a_token_that_is_nearly_certain_keeps_what_the_others_have():
    rest = 1e-6
    back = back_of(one_position([math.log1p(-rest), math.log(rest)], 0), 0)
    assert back.logprobs[0] == pytest.approx(-rest, rel=0.05)
    assert back.logprobs[1] == pytest.approx(math.log(rest), abs=0.05)


def test_log_probabilities_far_below_what_a_float_can_tell():
    back = back_of(one_position([0.0, -300.0], 0), 0)
    assert back.logprobs[1] == pytest.approx(-300, abs=5)
    back = back_of(one_position([-300.0, 0.0], 0), 0)
    assert back.observed_logprobs[0] == pytest.approx(-300, abs=0.1)


def test_the_whole_vocabulary_of_real_width():
    width = 151_646
    random = np.random.default_rng(0)
    logits = random.normal(size=width) * 3
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    back = back_of(one_position(logprobs, width - 1), width - 1, width)
    assert np.array_equal(back.ids, np.arange(width))
    assert np.abs(back.logprobs - logprobs).max() < 0.5
    assert back.remainder_mass[0] == 0


def test_scores_without_the_token_that_stands_there_are_refused():
    scores = one_position([-0.1, -3.0], 0, tail=0.05)
    with pytest.raises(ValueError, match="must contain its observed token exactly once"):
        back_of(scores, 2, width=3)


def test_counts_that_are_not_a_set_of_draws_are_refused():
    rows, _, options, ranks = shard(0, "sample", 9, [12], sets=1, draws=4)
    with pytest.raises(ValueError, match="sum to 5"):
        PackedCodec.pack(rows, {**options, "num_samples": 5}, ranks)


def test_kinds_of_positions_make_signals_smaller():
    """Positions of two sorts that keep different ids: told apart, an id costs less than half of what it did."""
    random = np.random.default_rng(0)
    from xtk.artifacts.codec.position_clusters import cluster_positions

    sorts = random.integers(0, 2, 400)
    ids = np.concatenate([np.sort(random.choice(50, 20, replace=False)) + 50 * sort for sort in sorts]).astype(np.int32)
    kinds = cluster_positions(np.arange(401) * 20, ids, 2, 100)
    assert len(np.unique(kinds)) == 2
    assert len({(sort, kind) for sort, kind in zip(sorts.tolist(), kinds.tolist(), strict=True)}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_gives_back_what_its_codec_packed(tmp_path, kind):
    """Through the file: its memory is another kind of bytes than those of a test, and sizes take several digits."""
    draws = {"sets": 2, "draws": 6} if "sample" in kind else {}
    rows, _, options, ranks = shard(7, kind, 40, [90, 0, 200, 17], **draws)
    codec, _, _, signals = packed(rows, options, ranks)
    assert any(len(content) > 128 for content in signals)
    header = {"codec": {"name": "packed", "vocabulary_order": ranks.file_name, **options}}
    (tmp_path / ranks.file_name).write_bytes(ranks.file_content)
    documents = [
        ScoredDocument(Document.from_text("x" * max([0, *row.byte_ends.tolist()])), row, scores) for row, scores in rows
    ]
    write_shard(tmp_path / "shard.arrow", header, ShardPosition(0, 0, len(documents)), documents, ranks)
    found = CacheShard(tmp_path / "shard.arrow")
    for number, ((row, scores), signal_bytes) in enumerate(zip(rows, signals, strict=True)):
        stored = found.read_document(number, sample_set=1)
        assert np.array_equal(stored.tokens.ids, row.ids)
        assert np.array_equal(stored.stored_logprobs.ids, scores.ids)
        assert np.array_equal(stored.stored_logprobs.sample_counts, scores.sample_counts)
        wanted = codec.unpack_teacher_logprobs(signal_bytes, row.ids, scores.positions, 1)
        assert np.array_equal(stored.teacher_logprobs.logprobs, wanted.logprobs)
        assert np.array_equal(stored.teacher_logprobs.ids, wanted.ids)


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
