"""Every loss trains from one cache, and says what it cannot train from."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from recorded_training_steps import inputs_of, recipe_of

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.losses import COMPARISON_SPACES, LOSSES, SURROGATE_LOSSES
from xtk.losses.byte_kl import ByteKL
from xtk.losses.divergences import ForwardKLDivergence
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm, TeacherOutput
from xtk.name_registry import load_registered
from xtk.projection.vocabulary_byte_partition import build_byte_partition
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import CacheSource
from xtk.training.losses_per_teacher import open_teachers
from xtk.training.metrics_file import read_metrics
from xtk.training.micro_batches import BatchBuilder

ACROSS = [
    name
    for name in LOSSES
    if name not in SURROGATE_LOSSES and load_registered(LOSSES, name, "loss").comparison_space not in ("text", "tokens")
]


def from_any_support(name: str) -> str:
    """The loss in a form that a top-k+sample cache can serve."""
    candidates = load_registered(LOSSES, name, "loss").requires == "candidates"
    return f"{name}:divergence=forward-kl" if candidates else name


def test_every_loss_stands_on_something():
    assert {load_registered(LOSSES, name, "loss").comparison_space for name in LOSSES} == set(COMPARISON_SPACES)


@pytest.mark.parametrize("name", ACROSS)
def test_a_student_learns_from_a_teacher_with_another_tokenizer(run, pair, cache, tmp_path, name):
    options = ["--max-steps", 12, "--learning-rate", 0.01, "--warmup-ratio", 0, "--logging-steps", 1, "--quiet"]
    run("distill", pair.student, cache, "--loss", from_any_support(name), *options, "-o", "out", cwd=tmp_path)
    values = [line[name] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert min(values) > 0
    assert np.mean(values[-3:]) < 0.9 * np.mean(values[:3])


def test_it_learns_from_all_of_them_at_once_in_other_forms_and_beside_ce(run, pair, cache, tmp_path):
    """With the divergence that lies between both directions, and in the form that was published where it is another."""
    forms = [
        from_any_support(name) if name in ("uld", "strict") else f"{name}:divergence=jsd,beta=0.7" for name in ACROSS
    ]
    published = [f"{name}:published=true" for name in ("p-kl", "gold", "h-kl")]
    for output, losses in (("forms", forms), ("published", published)):
        asked = [word for loss in (*losses, "ce:weight=0.5") for word in ("--loss", loss)]
        run("distill", pair.student, cache, *asked, "--max-steps", 3, "--learning-rate", 0.01, "--warmup-ratio", 0,
            "--logging-steps", 1, "--quiet", "-o", output, cwd=tmp_path)  # fmt: skip
        lines = read_metrics(tmp_path / output / "metrics.jsonl")
        assert lines[-1]["loss"] < lines[0]["loss"]
        for loss in losses:
            assert min(line[loss.split(":")[0]] for line in lines) > 0
    told = json.loads((tmp_path / "published" / "xtk.json").read_text())["recipe"]["losses"]
    assert sum("published=true" in loss for loss in told) == 3


def test_draws_are_for_the_divergence_that_has_no_bias(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--support", "sample", "-o", "drawn", cwd=tmp_path)
    done = run(
        "distill", pair.student, "drawn", "--loss", "byte-kl:divergence=tvd", "-o", "out", cwd=tmp_path, code=None
    )
    assert done.returncode == 1
    assert "byte-kl:divergence=tvd would be biased: with sampled tokens" in done.stderr
    assert "--support top-k" in done.stderr
    run("distill", pair.student, "drawn", "--loss", "byte-kl", "--max-steps", 1, "-o", "out", cwd=tmp_path)


@pytest.mark.slow
def test_a_support_that_does_not_hold_what_a_loss_asks_for_is_refused(run, pair, corpus, tmp_path):
    for support in ("none", "sample"):
        run("cache-teacher", pair.teacher, corpus, "--support", support, "-o", support, cwd=tmp_path)
    for support, name in [
        *(("none", name) for name in ACROSS if name != "alm"),
        *(("sample", name) for name in ("uld", "gold", "h-kl", "simct", "strict")),
    ]:
        with pytest.raises(XtkError) as refused:
            inputs_of(pair.student, [tmp_path / support], recipe_of([name]))
        told = str(refused.value)
        assert f"the loss {name} needs" in told
        assert f"has the support {support}" in told
        assert "--support top-k" in told
    for support in ("none", "sample"):
        options = ("--max-steps", 1, "-o", f"from-{support}")
        run("distill", pair.student, support, "--loss", "alm:divergence=jsd", *options, cwd=tmp_path)


@pytest.mark.slow
def test_strict_needs_the_students_most_likely_tokens_but_for_the_forward_kl(run, pair, corpus, tmp_path):
    for name, options in (("head", ["--top-k", 8]), ("whole", ["--top-k", "all"])):
        run("cache-teacher", pair.teacher, corpus, *options, "--support", "top-k", "-o", name, cwd=tmp_path)
    with pytest.raises(XtkError) as refused:
        inputs_of(pair.student, [tmp_path / "head"], recipe_of(["strict"]))
    told = str(refused.value)
    assert "the loss strict needs the teacher's probabilities of the student's most likely tokens" in told
    assert "has the support top-k" in told
    assert "use --loss strict:divergence=forward-kl" in told
    inputs_of(pair.student, [tmp_path / "head"], recipe_of(["strict:divergence=forward-kl"]))
    inputs_of(pair.student, [tmp_path / "whole"], recipe_of(["strict"]))


@pytest.mark.parametrize("text", ["byte-kl:divergence=jsd", "uld", "gold", "simct"])
def test_a_loss_that_cannot_take_draws_reads_what_is_exact_beside_them(run, pair, corpus, tmp_path, text):
    common = ("--top-k", 8, "--precision", "float32")
    run("cache-teacher", pair.teacher, corpus, *common, "--support", "top-k", "-o", "head", cwd=tmp_path)
    run("cache-teacher", pair.teacher, corpus, *common, "--support", "top-k+sample", "-o", "both", cwd=tmp_path)
    (loss,), tokenizer = parse_losses([text]), Tokenizer(pair.student)
    found = []
    for place in ("head", "both"):
        cache = TeacherCache(str(tmp_path / place))
        ground = open_teachers([str(tmp_path / place)], [], tokenizer)[0].comparison_space(
            loss.make_loss().comparison_space
        )
        own = LossTerm(loss.make_loss(), loss.make_divergence(), ground)
        beside = LossTerm(ByteKL(), ForwardKLDivergence(), build_byte_partition(tokenizer, cache.teacher_tokenizer))
        found.append(BatchBuilder(CacheSource(cache), tokenizer, [beside, own], 256).build([0, 1, 2]).terms)
    (draws_unread, of_head), (draws_read, of_both) = found
    # simct divides by a sum with the remainder, which one cache stores and the other computes from float32 entries.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if text == "simct" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(of_head.teacher_probs, of_both.teacher_probs, **tolerance)
    assert torch.equal(of_head.tokens, of_both.tokens)
    torch.testing.assert_close(of_head.remainder_probs, of_both.remainder_probs, **tolerance)
    assert len(draws_read.teacher_probs) > len(draws_unread.teacher_probs)


class Mumbling(CacheSource):
    """A teacher who says NaN now and then, and names tokens that there are not."""

    def teacher_outputs(self, number, sample_set=0):
        (word,) = super().teacher_outputs(number, sample_set)
        signal = word.logprobs
        logprobs, ids = signal.logprobs.copy(), signal.ids.copy()
        logprobs[signal.offsets[5]] = np.nan
        ids[signal.offsets[8] : signal.offsets[9]][-1] = 10_000
        return (TeacherOutput(word.tokens, dataclasses.replace(signal, logprobs=logprobs, ids=ids)),)


def test_a_position_of_which_the_teacher_said_nan_is_left_out_and_counted(pair, cache):
    tokenizer, source = Tokenizer(pair.student), TeacherCache(cache)
    byte_kl = LossTerm(ByteKL(), ForwardKLDivergence(), build_byte_partition(tokenizer, source.teacher_tokenizer))
    made = [BatchBuilder(kind(source), tokenizer, [byte_kl], 256).build([0, 1, 2]) for kind in (CacheSource, Mumbling)]
    assert [batch.nan_positions for batch in made] == [0, 3]
    assert 0 < made[1].terms[0].num_items < made[0].terms[0].num_items
    assert np.isfinite(made[1].terms[0].teacher_probs.numpy()).all()
