"""Invalid log-probabilities of a teacher are refused before they are written to a cache; finished shards stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_inputs

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers import BACKENDS
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import cache_teacher
from xtk.teachers.transformers import TransformersTeacher

SUPPORT = Support("top-k+sample", top_k=4, num_samples=5, num_sample_sets=2, seed=1)
POSITION = 3  # the position of the invalid value
VOCAB_SIZE = 496


class Misbehaving(TransformersTeacher):
    """The real teacher, with invalid log-probabilities of the fifth document that it scores."""

    spoil = staticmethod(lambda scores: scores)
    calls = 0

    def score(self, documents, candidate_ids=None):
        found = super().score(documents, candidate_ids)
        for at in range(len(found)):
            type(self).calls += 1
            if self.calls == 5:
                found[at] = type(self).spoil(found[at])
        return found


def changed(scores: StoredLogprobs, **values: object) -> StoredLogprobs:
    return dataclasses.replace(scores, **values)


def with_value(name: str, value: float, at: int = POSITION) -> Callable[[StoredLogprobs], StoredLogprobs]:
    def spoil(scores: StoredLogprobs) -> StoredLogprobs:
        array = getattr(scores, name).copy()
        array[at] = value
        return changed(scores, **{name: array})

    return spoil


def swapped(name: str, offsets: str) -> Callable[[StoredLogprobs], StoredLogprobs]:
    """Return a function that swaps the first two ids of the first range with at least two ids."""

    def spoil(scores: StoredLogprobs) -> StoredLogprobs:
        starts = getattr(scores, offsets)
        first = int(starts[np.flatnonzero(np.diff(starts) > 1)[0]])
        array = getattr(scores, name).copy()
        array[[first, first + 1]] = array[[first + 1, first]]
        return changed(scores, **{name: array})

    return spoil


def with_duplicate_id(scores: StoredLogprobs) -> StoredLogprobs:
    ids = scores.ids.copy()
    ids[1] = ids[0]
    return changed(scores, ids=ids)


def without_observed_id(scores: StoredLogprobs) -> StoredLogprobs:
    """Replace the observed id of the first position by another id."""
    (index,) = np.flatnonzero(scores.logprobs[: scores.offsets[1]] == scores.observed_logprobs[0])[:1]
    ids = scores.ids.copy()
    others = np.setdiff1d(np.arange(VOCAB_SIZE), ids[: scores.offsets[1]])
    ids[index] = others[(others > (ids[index - 1] if index else -1))][0]
    order = np.argsort(ids[: scores.offsets[1]])
    ids[: scores.offsets[1]] = ids[: scores.offsets[1]][order]
    logprobs = scores.logprobs.copy()
    logprobs[: scores.offsets[1]] = logprobs[: scores.offsets[1]][order]
    return changed(scores, ids=ids, logprobs=logprobs)


def with_exact_id_among_samples(scores: StoredLogprobs) -> StoredLogprobs:
    """Replace the samples of the first set by one of the exact ids."""
    size = int(scores.sample_offsets[1])
    offsets = scores.sample_offsets - (size - 1)
    offsets[0] = 0
    ids = np.concatenate([scores.ids[:1], scores.sample_ids[size:]])
    counts = np.concatenate([np.array([5], np.int32), scores.sample_counts[size:]])
    return changed(scores, sample_offsets=offsets, sample_ids=ids, sample_counts=counts, sample_logprobs=None)


def with_mass_above_1(scores: StoredLogprobs) -> StoredLogprobs:
    """Make the probabilities of a position's exact ids sum to more than 1."""
    logprobs = scores.logprobs.copy()
    first, stop = scores.offsets[POSITION : POSITION + 2]
    other = next(at for at in range(first, stop) if logprobs[at] != scores.observed_logprobs[POSITION])
    logprobs[other] = 0.0
    return changed(scores, logprobs=logprobs)


INVALID = {
    "a NaN among log-probabilities": (with_value("logprobs", np.nan), "NaN"),
    "NaN for the observed token": (with_value("observed_logprobs", np.nan), "NaN"),
    "an endless entropy": (with_value("entropy", np.inf), "not finite"),
    "an entropy below 0": (with_value("entropy", -1.0), "entropy below 0"),
    "a NaN for the rest": (with_value("remainder_mass", np.nan), "NaN"),
    "an endless log-probability": (with_value("logprobs", np.inf), "above 0"),
    "a log-probability above 0": (with_value("observed_logprobs", 0.5), "above 0"),
    "a mass above 1": (with_mass_above_1, "do not sum to 1"),
    "a rest that is not the rest": (with_value("remainder_mass", 1.5), "do not sum to 1"),
    "a rest below 0": (with_value("remainder_mass", -0.005), "do not sum to 1"),
    "a sampled token without a log-probability": (
        with_value("sample_logprobs", -np.inf, 0), "sampled tokens that are not finite"
    ),
    "an id below 0": (with_value("ids", -1, 0), "outside of its vocabulary"),
    "an id past the vocabulary": (with_value("ids", VOCAB_SIZE, 0), "outside of its vocabulary"),
    "a sampled id past the vocabulary": (
        with_value("sample_ids", VOCAB_SIZE, 0), "token ids outside of its vocabulary"
    ),
    "ids that fall": (swapped("ids", "offsets"), "not strictly increasing"),
    "an id twice": (with_duplicate_id, "not strictly increasing"),
    "sampled ids that decrease": (
        swapped("sample_ids", "sample_offsets"), "not strictly increasing"
    ),
    "no observed id": (without_observed_id, "no log-probability of the observed token"),
    "two values for the observed id": (
        lambda scores: with_value("observed_logprobs", scores.observed_logprobs[POSITION] - 0.5)(scores),
        "two different log-probabilities",
    ),
    "one sample too many": (
        lambda scores: with_value("sample_counts", scores.sample_counts[0] + 1, 0)(scores), "not return 5 samples"
    ),
    "a count of none": (with_value("sample_counts", 0, 0), "not return 5 samples"),
    "a sample of an exact id": (with_exact_id_among_samples, "whose exact log-probabilities it also returned"),
    "an offset that falls": (with_value("offsets", 0, 2), "do not fit together"),
    "offsets that end too early": (
        lambda scores: with_value("offsets", scores.offsets[-1] - 1, -1)(scores), "do not fit together"
    ),
    "offsets of fewer sets": (
        lambda scores: changed(scores, sample_offsets=scores.sample_offsets[:-1]), "do not fit together"
    ),
    "a position too few": (
        lambda scores: changed(scores, positions=scores.positions[:-1]), "do not fit together"
    ),
    "an entropy too few": (
        lambda scores: changed(scores, entropy=scores.entropy[:-1]), "do not fit together"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    return small_inputs.write_jsonl(folder / "texts.jsonl", small_inputs.sentences(8, seed=5))


def build_cache(pair, texts: Path, folder: Path, backend: str) -> dict:
    request = CacheRequest(
        ModelRef(pair.teacher, name="teacher"), SUPPORT, backend=backend, shard_tokens=1
    )  # one document per shard
    return cache_teacher(request, Corpus([str(texts)]), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "message"), INVALID.values(), ids=INVALID)
def test_invalid_log_probabilities_are_refused_and_finished_shards_stay(
    pair, texts, tmp_path, monkeypatch, spoil, message
):
    monkeypatch.setitem(BACKENDS, "misbehaving", f"{__name__}:Misbehaving")
    monkeypatch.setattr(Misbehaving, "spoil", staticmethod(spoil))
    monkeypatch.setattr(Misbehaving, "calls", 0)
    with pytest.raises(XtkError, match=message) as raised:
        build_cache(pair, texts, tmp_path / "c", "misbehaving")
    assert "shard 4, row 0" in raised.value.where
    assert sorted(path.name for path in (tmp_path / "c").glob("shard-*")) == [
        f"shard-0000{at}.arrow" for at in range(4)
    ]
    assert build_cache(pair, texts, tmp_path / "c", "misbehaving")["documents"] == 8  # valid from the sixth call on
    assert len(list(TeacherCache(tmp_path / "c"))) == 8


def test_backend_that_returns_too_few_documents_is_refused(pair, texts, tmp_path, monkeypatch):
    class Silent(TransformersTeacher):
        def score(self, documents, candidate_ids=None):
            return super().score(documents, candidate_ids)[:-1]

    monkeypatch.setitem(BACKENDS, "silent", f"{__name__}:Silent")
    monkeypatch.setitem(globals(), "Silent", Silent)
    with pytest.raises(XtkError, match="returned log-probabilities of 0 documents instead of 1"):
        build_cache(pair, texts, tmp_path / "c", "silent")
    assert not list((tmp_path / "c").glob("shard-*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["top-k", "top-p", "sample", "top-k+sample", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_log_probabilities_of_a_real_teacher_are_accepted(pair, texts, tmp_path, kind, dtype):
    sampled = {"num_samples": 5, "num_sample_sets": 2} if "sample" in kind else {}
    support = Support(
        kind, top_k=0 if kind in ("sample", "none") else 8, top_p=0.9 if kind == "top-p" else 1, **sampled
    )
    request = CacheRequest(ModelRef(pair.teacher, dtype=dtype, name="teacher"), support)
    assert cache_teacher(request, Corpus([str(texts)]), tmp_path / "c")["documents"] == 8
