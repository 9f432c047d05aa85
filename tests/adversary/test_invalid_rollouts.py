"""Rollouts with invalid UTF-8: a teacher with the student's tokenizer scores every sampled token."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch

from xtk.batches.data_sources import DocumentsFromCaches
from xtk.batches.losses_per_teacher import assign_losses, open_teachers
from xtk.batches.micro_batches import BatchBuilder
from xtk.losses.head import fused_loss
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.text.alignment import align_sequences
from xtk.text.document import Document, Segment
from xtk.text.document_token_ids import SampledTokens
from xtk.text.rollout_tokens import decode_tokens
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

LOSSES = ["forward-kl", "reverse-kl", "jsd", "p-kl", "byte-kl", "boundary-kl", "alm"]


def sampled_completions(tokenizer: Tokenizer) -> list[list[int]]:
    """Return completions with invalid UTF-8 in the middle, at the start or at the end, or with a control token."""
    token_of_byte = tokenizer.vocabulary.token_of_bytes
    lead_byte, letters = token_of_byte["é".encode()[:1]], [token_of_byte[bytes([letter])] for letter in b"ab 12"]
    end, start = tokenizer.end_id, tokenizer.start_ids[0]
    return [
        [*letters, lead_byte, *letters, end],
        [lead_byte, *letters],
        [*letters, lead_byte],
        [*letters, start, *letters, end],
    ]


def rollout_line(tokenizer: Tokenizer, turns: list[list[int]]) -> tuple[dict[str, object], list[bool]]:
    """Return the line of a rollout of several turns, and which of its tokens were sampled."""
    ids, mask, segments = [tokenizer.start_ids[0]], [0], []
    for prompt, completion in zip(("Anna", " = 15.", " and"), turns, strict=False):
        prompt_ids = tokenizer.encode([prompt])[0].ids.tolist()
        ids, mask = [*ids, *prompt_ids, *completion], [*mask, *[0] * len(prompt_ids), *[1] * len(completion)]
        text = decode_tokens(tokenizer, np.array(completion, np.int32)).text
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


def rollout_document(tokenizer: Tokenizer, turns: list[list[int]]) -> Document:
    line, mask = rollout_line(tokenizer, turns)
    sampled_tokens = SampledTokens.from_lists(
        line["student_ids"], mask, line["student_logprobs"], tokenizer.fingerprint
    )
    return Document(tuple(Segment(**segment) for segment in line["segments"]), sampled_tokens=sampled_tokens)


def test_teacher_with_the_same_tokenizer_aligns_every_sampled_token(pair):
    student, teacher = Tokenizer(pair.student), Tokenizer(pair.teacher)
    completions = sampled_completions(student)
    for turns in ([one] for one in completions), (completions[:2], completions[1:], completions[2:]):
        for document in (rollout_document(student, list(one)) for one in turns):
            (student_sequence,), ((_, teacher_sequence),) = (
                tokenize_documents(student, [document]),
                teacher_views(student, [document]),
            )
            spans = align_sequences(student_sequence, teacher_sequence)
            assert (spans[:, 1] - spans[:, 0] == 1).all()
            np.testing.assert_array_equal(spans[:, :2], spans[:, 2:])
            assert set(np.flatnonzero(student_sequence.train_mask).tolist()) <= set(spans[:, 0].tolist())
            truncated_spans = align_sequences(student_sequence, teacher_sequence.truncate(len(teacher_sequence) - 3))
            np.testing.assert_array_equal(truncated_spans, spans[spans[:, 3] <= len(teacher_sequence) - 3])
            # A teacher with another tokenizer gets only the text as input.
            ((_, other_sequence),) = teacher_views(teacher, [document])
            assert not other_sequence.undecodable_mask.any()
            undecodable = set(np.flatnonzero(student_sequence.undecodable_mask).tolist())
            assert undecodable
            assert not undecodable & set(align_sequences(student_sequence, other_sequence)[:, 0].tolist())


def test_teacher_with_another_prompt_scores_every_sampled_token(pair):
    tokenizer = Tokenizer(pair.student)
    for completion in sampled_completions(tokenizer):
        document = rollout_document(tokenizer, [completion]).with_teacher_prompt("The answer is 12.\nAnna")
        (student_sequence,), ((_, teacher_sequence),) = (
            tokenize_documents(tokenizer, [document]),
            teacher_views(tokenizer, [document]),
        )
        spans = align_sequences(student_sequence, teacher_sequence)
        spans = spans[student_sequence.train_mask[spans[:, 0]]]
        np.testing.assert_array_equal(student_sequence.ids[spans[:, 0]], completion)
        np.testing.assert_array_equal(teacher_sequence.ids[spans[:, 2]], completion)
        assert teacher_sequence.train_mask.sum() == len(completion)


@pytest.fixture(scope="module")
def cached_rollouts(run, pair, tmp_path_factory) -> tuple[Path, list[list[bool]]]:
    """Return a folder with a cache of rollouts with invalid UTF-8, by a teacher with the same tokenizer, and masks."""
    folder, student = tmp_path_factory.mktemp("rollouts"), Tokenizer(pair.student)
    completions = sampled_completions(student)
    lines = [rollout_line(student, turns) for turns in (completions[:2], completions[1:], completions[:1])]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line, _ in lines))
    small_inputs.make_student(folder / "alike", seed=7)
    run("cache-teacher", "alike", "rollouts.jsonl", "--top-k", 640, "--precision", "float32", "-o", "cache", "-q",
        cwd=folder)  # fmt: skip
    return folder, [mask for _, mask in lines]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_sampled_token_carries_loss(cached_rollouts, pair, loss):
    folder, masks = cached_rollouts
    student = Tokenizer(pair.student)
    (teacher,) = open_teachers([str(folder / "cache")], [], student)
    ((assigned,), _) = assign_losses(parse_losses([loss]), [teacher])
    loss_term = LossTerm(
        assigned.rule, assigned.loss.make_divergence(), teacher.comparison_space(assigned.rule.comparison_space)
    )
    batch = BatchBuilder(DocumentsFromCaches(teacher.source), student, [loss_term], 256).build([0, 1, 2])
    (term,) = batch.terms
    torch.manual_seed(0)
    documents, length = batch.input_ids.shape
    logits = torch.randn(documents * length, student.embedding_rows, dtype=torch.float64, requires_grad=True)
    fused_loss(logits[batch.loss_positions], OutputHead(None), [term.to(torch.device("cpu"), 1.0)], 16)[0].backward()
    assert documents == len(masks)
    positions_with_gradient = np.flatnonzero(logits.grad.abs().sum(1) > 0).tolist()
    expected = [
        number * length + position - 1
        for number, mask in enumerate(masks)
        for position in np.flatnonzero(mask).tolist()
    ]
    assert positions_with_gradient == expected


@pytest.mark.parametrize("offset", [0, 10**8])
def test_rollout_token_ids_outside_of_the_vocabulary_are_refused(pair, run, tmp_path, offset):
    student = Tokenizer(pair.student)
    line, _ = rollout_line(student, sampled_completions(student)[:1])
    line["student_ids"][-1] = len(student.vocabulary) + offset
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    command = ("cache-teacher", pair.student, tmp_path / "rollouts.jsonl", "-o", tmp_path / "cache")
    assert (
        f"student_ids of a rollout contains token id {len(student.vocabulary) + offset}, but this tokenizer"
        in run(*command, code=1).stderr
    )


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([1, -1], [0.0, -1.0], "negative token id -1"),
        ([1, 2], [0.0, -math.inf], "finite and at most 0"),
        ([1, 2], ["0", "-1"], "must be numbers"),
        ([1, 2], [0.0, math.nan], "finite and at most 0"),
    ],
)
def test_invalid_sampled_tokens_and_log_probabilities_are_refused(ids, logprobs, message):
    with pytest.raises(ValueError, match=message):
        SampledTokens.from_lists(ids, [0, 1], logprobs, "tokenizer")
