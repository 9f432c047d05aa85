"""Every loss trains from one cache, and refuses a cache that lacks what it needs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.batches.data_sources import DocumentsFromCaches
from xtk.batches.losses_per_teacher import note_missing_sample_logprobs, open_teachers
from xtk.batches.micro_batches import BatchBuilder
from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.losses import COMPARISON_SPACES, LOSSES, SURROGATE_LOSSES
from xtk.losses.byte_kl import ByteKL
from xtk.losses.divergences import ForwardKLDivergence
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.name_registry import load_registered
from xtk.projection.vocabulary_byte_partition import build_byte_partition
from xtk.runs.metrics_file import read_metrics
from xtk.text.tokenizer import Tokenizer

CROSS_TOKENIZER_LOSSES = [
    name
    for name in LOSSES
    if name not in SURROGATE_LOSSES and load_registered(LOSSES, name, "loss").comparison_space not in ("text", "tokens")
]


def supported_form(name: str) -> str:
    """Return the loss with a divergence that works with a top-k+sample cache."""
    candidates = load_registered(LOSSES, name, "loss").requires == "candidates"
    return f"{name}:divergence=forward-kl" if candidates else name


def test_the_losses_use_exactly_the_known_comparison_spaces():
    assert {load_registered(LOSSES, name, "loss").comparison_space for name in LOSSES} == set(COMPARISON_SPACES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSS_TOKENIZER_LOSSES)
def test_every_loss_decreases_with_a_teacher_with_another_tokenizer(run, pair, cache, tmp_path, name):
    options = ["--max-steps", 12, "--learning-rate", 0.01, "--warmup-ratio", 0, "--logging-steps", 1, "--quiet"]
    run("distill", pair.student, cache, "--loss", supported_form(name), *options, "-o", "out", cwd=tmp_path)
    values = [line[name] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert min(values) > 0
    assert np.mean(values[-3:]) < 0.9 * np.mean(values[:3])


@pytest.mark.slow
def test_all_losses_together_with_ce_decrease_in_their_jsd_and_published_forms(run, pair, cache, tmp_path):
    """Train with JSD, which is between both directions of the KL, and with the published forms where they differ."""
    jsd_forms = [
        supported_form(name) if name in ("uld", "strict") else f"{name}:divergence=jsd,beta=0.7"
        for name in CROSS_TOKENIZER_LOSSES
    ]
    published_forms = [f"{name}:published=true" for name in ("p-kl", "gold", "h-kl")]
    for output, losses in (("forms", jsd_forms), ("published", published_forms)):
        options = [word for loss in (*losses, "ce:weight=0.5") for word in ("--loss", loss)]
        run("distill", pair.student, cache, *options, "--max-steps", 3, "--learning-rate", 0.01, "--warmup-ratio", 0,
            "--logging-steps", 1, "--quiet", "-o", output, cwd=tmp_path)  # fmt: skip
        lines = read_metrics(tmp_path / output / "metrics.jsonl")
        assert lines[-1]["loss"] < lines[0]["loss"]
        for loss in losses:
            assert min(line[loss.split(":")[0]] for line in lines) > 0
    recorded_losses = json.loads((tmp_path / "published" / "xtk.json").read_text())["recipe"]["losses"]
    assert sum("published=true" in loss for loss in recorded_losses) == 3


@pytest.mark.slow
def test_a_sampled_support_is_refused_for_a_biased_divergence(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--support", "sample", "-o", "drawn", cwd=tmp_path)
    done = run(
        "distill", pair.student, "drawn", "--loss", "byte-kl:divergence=tvd", "-o", "out", cwd=tmp_path, code=None
    )
    assert done.returncode == 1
    assert "byte-kl:divergence=tvd would be biased: with sampled tokens" in done.stderr
    assert "--support top-k" in done.stderr
    run("distill", pair.student, "drawn", "--loss", "byte-kl", "--max-steps", 1, "-o", "out", cwd=tmp_path)


@pytest.mark.slow
def test_a_support_without_the_tokens_that_a_loss_needs_is_refused(run, pair, corpus, tmp_path):
    for support in ("none", "sample"):
        run("cache-teacher", pair.teacher, corpus, "--support", support, "-o", support, cwd=tmp_path)
    for support, name in [
        *(("none", name) for name in CROSS_TOKENIZER_LOSSES if name != "alm"),
        *(("sample", name) for name in ("uld", "gold", "h-kl", "simct", "strict")),
    ]:
        with pytest.raises(XtkError) as raised:
            open_run_inputs(pair.student, [tmp_path / support], make_train_config([name]))
        message = str(raised.value)
        assert f"the loss {name} needs" in message
        assert f"has the support {support}" in message
        assert "--support top-k" in message
    for support in ("none", "sample"):
        options = ("--max-steps", 1, "-o", f"from-{support}")
        run("distill", pair.student, support, "--loss", "alm:divergence=jsd", *options, cwd=tmp_path)


@pytest.mark.slow
def test_strict_needs_the_students_most_likely_tokens_unless_it_uses_forward_kl(run, pair, corpus, tmp_path):
    for name, options in (("head", ["--top-k", 8]), ("whole", ["--top-k", "all"])):
        run("cache-teacher", pair.teacher, corpus, *options, "--support", "top-k", "-o", name, cwd=tmp_path)
    with pytest.raises(XtkError) as raised:
        open_run_inputs(pair.student, [tmp_path / "head"], make_train_config(["strict"]))
    message = str(raised.value)
    assert "the loss strict needs the teacher's probabilities of the student's most likely tokens" in message
    assert "has the support top-k" in message
    assert "use --loss strict:divergence=forward-kl" in message
    open_run_inputs(pair.student, [tmp_path / "head"], make_train_config(["strict:divergence=forward-kl"]))
    open_run_inputs(pair.student, [tmp_path / "whole"], make_train_config(["strict"]))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["byte-kl:divergence=jsd", "uld", "gold", "simct"])
def test_losses_that_ignore_sampled_tokens_use_the_exact_tokens_only(run, pair, corpus, tmp_path, text):
    options = ("--top-k", 8, "--precision", "float32")
    run("cache-teacher", pair.teacher, corpus, *options, "--support", "top-k", "-o", "head", cwd=tmp_path)
    run("cache-teacher", pair.teacher, corpus, *options, "--support", "top-k+sample", "-o", "both", cwd=tmp_path)
    (loss,), tokenizer = parse_losses([text]), Tokenizer(pair.student)
    tensors = []
    for cache_name in ("head", "both"):
        cache = TeacherCache(str(tmp_path / cache_name))
        comparison_space = open_teachers([str(tmp_path / cache_name)], [], tokenizer)[0].comparison_space(
            loss.make_loss().comparison_space
        )
        term = LossTerm(loss.make_loss(), loss.make_divergence(), comparison_space)
        byte_kl = LossTerm(ByteKL(), ForwardKLDivergence(), build_byte_partition(tokenizer, cache.teacher_tokenizer))
        tensors.append(BatchBuilder(DocumentsFromCaches(cache), tokenizer, [byte_kl, term], 256).build([0, 1, 2]).terms)
    (byte_kl_top_k, term_top_k), (byte_kl_sampled, term_sampled) = tensors
    # simct divides by a sum with the remainder, which one cache stores and the other computes from float32 entries.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if text == "simct" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(term_top_k.teacher_probs, term_sampled.teacher_probs, **tolerance)
    assert torch.equal(term_top_k.tokens, term_sampled.tokens)
    torch.testing.assert_close(term_top_k.remainder_probs, term_sampled.remainder_probs, **tolerance)
    assert len(byte_kl_sampled.teacher_probs) > len(byte_kl_top_k.teacher_probs)


class CacheWithNaN(TeacherCache):
    """A cache with a NaN log-probability and a token id outside of the vocabulary in each document."""

    def read_document(self, number, sample_set=0):
        stored = super().read_document(number, sample_set)
        teacher_logprobs = stored.teacher_logprobs
        logprobs, ids = teacher_logprobs.logprobs.copy(), teacher_logprobs.ids.copy()
        logprobs[teacher_logprobs.offsets[5]] = np.nan
        ids[teacher_logprobs.offsets[8] : teacher_logprobs.offsets[9]][-1] = 10_000
        return stored.with_teacher_logprobs(dataclasses.replace(teacher_logprobs, logprobs=logprobs, ids=ids))


def test_positions_with_nan_teacher_log_probabilities_are_skipped_and_counted(pair, cache):
    tokenizer, teacher_cache = Tokenizer(pair.student), TeacherCache(cache)
    byte_kl = LossTerm(
        ByteKL(), ForwardKLDivergence(), build_byte_partition(tokenizer, teacher_cache.teacher_tokenizer)
    )
    batches = [
        BatchBuilder(DocumentsFromCaches(cache_class(cache)), tokenizer, [byte_kl], 256).build([0, 1, 2])
        for cache_class in (TeacherCache, CacheWithNaN)
    ]
    assert [batch.nan_positions for batch in batches] == [0, 3]
    assert 0 < batches[1].terms[0].num_items < batches[0].terms[0].num_items
    assert np.isfinite(batches[1].terms[0].teacher_probs.numpy()).all()


@pytest.mark.slow
def test_sampled_tokens_without_log_probabilities_are_noted_or_refused(run, pair, corpus, tmp_path, capsys):
    """A cache of an older version: the flag of the codec is missing, and so are the values."""
    run("cache-teacher", pair.teacher, corpus, "--support", "sample", "-o", "drawn", cwd=tmp_path)
    (teacher,) = open_teachers([str(tmp_path / "drawn")], [], Tokenizer(pair.teacher))
    texts = ["reverse-kl", "forward-kl", "jsd:temperature=2", "byte-kl:divergence=tvd"]
    losses = parse_losses(texts)
    assert [bool(teacher.refusal(loss)) for loss in losses] == [False, False, True, True]
    assert "only temperature 1 is unbiased" in str(teacher.refusal(losses[2]))
    # The other teachers of a mixture have no known probability of a token that one of them sampled.
    in_mixture = [teacher.refusal(loss, in_mixture=True) for loss in losses]
    assert [bool(refusal) for refusal in in_mixture] == [True, False, True, True]
    assert "one teacher of a mixture sampled" in str(in_mixture[0])
    note_missing_sample_logprobs([teacher])
    assert "log-probabilities" not in capsys.readouterr().err
    teacher.source.header["codec"].pop("sample_logprobs")
    note_missing_sample_logprobs([teacher])
    assert "sampled tokens have no log-probabilities" in capsys.readouterr().err
    refusals = [str(teacher.refusal(loss)) for loss in losses]
    assert "reverse-kl would be biased: this cache, made by an older xtk, has no log-probabilities" in refusals[0]
    assert refusals[1] == "None"
    assert "made by an older xtk" in refusals[2]
