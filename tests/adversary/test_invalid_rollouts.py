"""Rollouts with invalid UTF-8: a teacher with the student's tokenizer scores every sampled token."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch

from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document, Segment
from xtk.tokens.document_token_ids import SampledTokens
from xtk.tokens.rollout_tokens import decode_tokens
from xtk.tokens.teacher_tokenization import teacher_views
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import CacheSource
from xtk.training.losses_per_teacher import assign_losses, open_teachers
from xtk.training.micro_batches import BatchBuilder

LOSSES = ["forward-kl", "reverse-kl", "jsd", "p-kl", "byte-kl", "boundary-kl", "alm"]


def sampled(tokenizer: Tokenizer) -> list[list[int]]:
    """Completions: invalid in the middle, from the first token on, cut inside a character, with a control token."""
    byte = tokenizer.vocabulary.token_of_bytes
    lead, letters = byte["é".encode()[:1]], [byte[bytes([one])] for one in b"ab 12"]
    end, start = tokenizer.end_id, tokenizer.start_id
    return [[*letters, lead, *letters, end], [lead, *letters], [*letters, lead], [*letters, start, *letters, end]]


def line_of(tokenizer: Tokenizer, turns: list[list[int]]) -> tuple[dict[str, object], list[bool]]:
    """Return the line of a rollout of several turns, and which of its tokens were sampled."""
    ids, mask, segments = [tokenizer.start_id], [0], []
    for prompt, own in zip(("Anna", " = 15.", " and"), turns, strict=False):
        read = tokenizer.encode([prompt])[0].ids.tolist()
        ids, mask = [*ids, *read, *own], [*mask, *[0] * len(read), *[1] * len(own)]
        text = decode_tokens(tokenizer, np.array(own, np.int32)).text
        segments += [{"role": "prompt", "text": prompt, "train": False}]
        segments += [{"role": "completion", "text": text, "train": True}]
    line = {
        "segments": segments,
        "student_ids": ids,
        "sampled_mask": mask,
        "student_logprobs": (-3.0 * np.array(mask)).tolist(),
        "student_tokenizer": tokenizer.fingerprint,
    }
    return line, list(map(bool, mask))


def document_of(tokenizer: Tokenizer, turns: list[list[int]]) -> Document:
    line, mask = line_of(tokenizer, turns)
    drawn = SampledTokens.from_lists(line["student_ids"], mask, line["student_logprobs"], tokenizer.fingerprint)
    return Document(tuple(Segment(**one) for one in line["segments"]), sampled_tokens=drawn)


def test_the_same_tokenizer_on_both_sides_aligns_every_sampled_token(pair):
    student, teacher = Tokenizer(pair.student), Tokenizer(pair.teacher)
    completions = sampled(student)
    for turns in ([one] for one in completions), (completions[:2], completions[1:], completions[2:]):
        for document in (document_of(student, list(one)) for one in turns):
            (ours,), ((_, theirs),) = tokenize_documents(student, [document]), teacher_views(student, [document])
            spans = align_sequences(ours, theirs)
            assert (spans[:, 1] - spans[:, 0] == 1).all()
            np.testing.assert_array_equal(spans[:, :2], spans[:, 2:])
            assert set(np.flatnonzero(ours.train_mask).tolist()) <= set(spans[:, 0].tolist())
            short = align_sequences(ours, theirs.truncate(len(theirs) - 3))
            np.testing.assert_array_equal(short, spans[spans[:, 3] <= len(theirs) - 3])
            # A teacher with another tokenizer reads the text alone.
            ((_, read),) = teacher_views(teacher, [document])
            assert not read.undecodable_mask.any()
            beyond = set(np.flatnonzero(ours.undecodable_mask).tolist())
            assert beyond
            assert not beyond & set(align_sequences(ours, read)[:, 0].tolist())


def test_a_teacher_with_another_prompt_scores_every_sampled_token_too(pair):
    tokenizer = Tokenizer(pair.student)
    for own in sampled(tokenizer):
        document = document_of(tokenizer, [own]).with_teacher_prompt("The answer is 12.\nAnna")
        (ours,), ((_, theirs),) = tokenize_documents(tokenizer, [document]), teacher_views(tokenizer, [document])
        spans = align_sequences(ours, theirs)
        spans = spans[ours.train_mask[spans[:, 0]]]
        np.testing.assert_array_equal(ours.ids[spans[:, 0]], own)
        np.testing.assert_array_equal(theirs.ids[spans[:, 2]], own)
        assert theirs.train_mask.sum() == len(own)


@pytest.fixture(scope="module")
def rollouts(run, pair, tmp_path_factory) -> tuple[Path, list[list[bool]]]:
    """A cache of a teacher that reads as the student does, of rollouts with invalid UTF-8."""
    folder, student = tmp_path_factory.mktemp("rollouts"), Tokenizer(pair.student)
    completions = sampled(student)
    lines = [line_of(student, turns) for turns in (completions[:2], completions[1:], completions[:1])]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line, _ in lines))
    small_inputs.make_student(folder / "alike", seed=7)
    run("cache-teacher", "alike", "rollouts.jsonl", "--top-k", 640, "--precision", "float32", "-o", "cache", "-q",
        cwd=folder)  # fmt: skip
    return folder, [mask for _, mask in lines]


@pytest.mark.parametrize("text", LOSSES)
def test_every_sampled_token_carries_loss(rollouts, pair, text):
    folder, masks = rollouts
    student = Tokenizer(pair.student)
    (teacher,) = open_teachers([str(folder / "cache")], [], student)
    ((taken,), _) = assign_losses(parse_losses([text]), [teacher])
    objective = LossTerm(
        taken.rule, taken.loss.make_divergence(), teacher.comparison_space(taken.rule.comparison_space)
    )
    batch = BatchBuilder(CacheSource(teacher.source), student, [objective], 256).build([0, 1, 2])
    (term,) = batch.terms
    torch.manual_seed(0)
    documents, length = batch.input_ids.shape
    logits = torch.randn(documents * length, student.embedding_rows, dtype=torch.float64, requires_grad=True)
    fused_loss(logits[batch.loss_positions], OutputHead(None), [term.to(torch.device("cpu"), 1.0)], 16)[0].backward()
    assert documents == len(masks)
    moved = np.flatnonzero(logits.grad.abs().sum(1) > 0).tolist()
    wanted = [number * length + at - 1 for number, mask in enumerate(masks) for at in np.flatnonzero(mask).tolist()]
    assert moved == wanted


@pytest.mark.parametrize("beyond", [0, 10**8])
def test_ids_beyond_the_vocabulary_are_refused(pair, run, tmp_path, beyond):
    student = Tokenizer(pair.student)
    line, _ = line_of(student, sampled(student)[:1])
    line["student_ids"][-1] = len(student.vocabulary) + beyond
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    command = ("cache-teacher", pair.student, tmp_path / "rollouts.jsonl", "-o", tmp_path / "cache")
    assert (
        f"student_ids of a rollout contains token id {len(student.vocabulary) + beyond}, but this tokenizer"
        in run(*command, code=1).stderr
    )


@pytest.mark.parametrize(
    ("ids", "logprobs", "what"),
    [
        ([1, -1], [0.0, -1.0], "negative token id -1"),
        ([1, 2], [0.0, -math.inf], "finite and at most 0"),
        ([1, 2], ["0", "-1"], "must be numbers"),
        ([1, 2], [0.0, math.nan], "finite and at most 0"),
    ],
)
def test_impossible_tokens_and_log_probabilities_are_refused(ids, logprobs, what):
    with pytest.raises(ValueError, match=what):
        SampledTokens.from_lists(ids, [0, 1], logprobs, "tokenizer")
