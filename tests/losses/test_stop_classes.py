"""The stop tokens of each side are one event: a class counts as one token that has the sum of their probabilities."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import small_inputs
import torch
from reference_losses import make_teacher_logprobs
from test_loss_contract import DISTRIBUTIONS, LOSS_INSTANCES

from xtk.batches.losses_per_teacher import PAIR_PROJECTION_METHOD, cached_next_bytes, cached_projection
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.stop_classes import StopClasses, merge_stop_tokens
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.spec import LossSpec
from xtk.losses.term import LossTerm, make_loss_inputs
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

STUDENT_SPECIALS = ["<|begin_of_text|>", "<|endoftext|>", "<|im_end|>"]
TEACHER_SPECIALS = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]


def make_tokenizer(folder, specials, eos, split=small_inputs.STUDENT_SPLIT, stop_ids=()) -> Tokenizer:
    if stop_ids:
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    backend = small_inputs.byte_level_tokenizer(split, 320, specials, small_inputs.sentences(60))
    return Tokenizer(small_inputs.save_tokenizer(backend, folder, bos_token=specials[0], eos_token=eos))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    student = make_tokenizer(folder / "student", STUDENT_SPECIALS, "<|endoftext|>")
    teacher = make_tokenizer(folder / "teacher", TEACHER_SPECIALS, "<|eot_id|>", small_inputs.TEACHER_SPLIT)
    chat = make_tokenizer(folder / "chat", STUDENT_SPECIALS, "<|endoftext|>", stop_ids=[2, 1])
    return student, teacher, chat


def plain_space_of(name, student, teacher):
    kind = LOSS_INSTANCES[name].comparison_space
    if kind == "bytes":
        return cached_next_bytes(student, teacher)
    if kind == "spans":
        return None
    projection = cached_projection(student, teacher, PAIR_PROJECTION_METHOD)
    projection = SparseProjection.identity(len(student)) if kind == "tokens" else projection
    return projection.columns.pad_columns(len(teacher))


def space_of(name, student, teacher, stops):
    return stops.in_space(plain_space_of(name, student, teacher))


def inputs_of(student, teacher, logprobs_PU, top_k, merged=()) -> LossInputs:
    """Return the inputs of one document; the teacher's observed tokens in `merged` are the first of these."""
    document = Document.from_text(small_inputs.sentences(1, seed=5)[0])
    own, theirs = (tokenize_documents(side, [document])[0] for side in (student, teacher))
    theirs.ids[np.isin(theirs.ids, merged)] = min(merged, default=0)
    positions = np.flatnonzero(theirs.train_mask)
    logprobs = make_teacher_logprobs(logprobs_PU[: len(positions)], positions, theirs.ids[positions], top_k)
    inputs = make_loss_inputs(own, document, TeacherDocument(document, theirs).with_teacher_logprobs(logprobs))
    return dataclasses.replace(inputs, sampling_logprobs=np.full(len(inputs.positions), -2.0, np.float32))


def value_and_gradient(term: LossTerm, inputs: LossInputs, logits: torch.Tensor):
    leaf = logits.detach().clone().requires_grad_()
    total, _ = fused_loss(leaf, OutputHead(None), [term.build_cells(inputs)], 16)
    total.backward()
    return total.detach(), leaf.grad


def merged_logits(logits: torch.Tensor, stops: np.ndarray) -> torch.Tensor:
    """Return logits in which the first stop token has the mass of all, differentiable."""
    merged = logits.clone()
    merged[:, stops] = -1e4
    merged[:, stops[0]] = logits[:, stops].logsumexp(1)
    return merged


@pytest.mark.parametrize("top_k", [8, 999])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_class_counts_as_one_token_with_the_sum_of_its_probabilities(tokenizers, name, top_k):
    student, teacher, chat = tokenizers
    teacher = chat if LOSS_INSTANCES[name].comparison_space == "tokens" else teacher
    stops, loss = StopClasses.from_tokenizers(student, teacher), LOSS_INSTANCES[name]
    rng = np.random.default_rng(3)
    logits_PU = rng.normal(size=(99, len(teacher))) * 2
    logits_PU[:, stops.teacher] += 12  # all of them are in the support
    logprobs_PU = torch.from_numpy(logits_PU).log_softmax(1)
    inputs = by_hand = inputs_of(student, teacher, logprobs_PU.numpy(), top_k + len(stops.teacher) - 1)
    if loss.stop_class != "none":
        of_class = merged_logits(logprobs_PU, stops.teacher).numpy()
        num_listed = min(top_k, len(teacher) - len(stops.teacher) + 1)
        by_hand = inputs_of(student, teacher, of_class, num_listed, stops.teacher)
    logits = torch.from_numpy(rng.normal(size=(len(inputs.positions), len(student)))).requires_grad_()
    logits.data[:, stops.student] += 3
    expected_logits = logits
    if loss.stop_class == "both":
        expected_logits = merged_logits(logits, stops.student)
        by_hand.student_ids[np.isin(by_hand.student_ids, stops.student)] = stops.student[0]
    space = space_of(name, student, teacher, stops)
    term = LossTerm(loss, LossSpec(name).make_divergence(), space, stop_classes=stops)
    value, gradient = value_and_gradient(term, inputs, logits)
    expected, of_class = value_and_gradient(dataclasses.replace(term, stop_classes=None), by_hand, expected_logits)
    if loss.stop_class == "both":
        (of_class,) = torch.autograd.grad(expected_logits, logits, of_class)
    torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient, of_class, rtol=1e-4, atol=1e-5)
    assert float(gradient.abs().max()) > 1e-4


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if LOSS_INSTANCES[name].stop_class == "both"])
def test_a_stop_of_a_chat_teacher_leaves_the_stop_of_a_base_student(tokenizers, name):
    """Where both models stop with 0.8, each with its native token, nothing pushes the student's down (2609.20511)."""
    student, _, teacher = tokenizers  # one tokenizer: the student stops with <|endoftext|>, the teacher with <|im_end|>
    stops = StopClasses.from_tokenizers(student, teacher)
    base, chat = student.end_id, teacher.declared_stop_ids[0]
    logprobs_PU, logits = (np.full((99, len(student)), np.log(0.2 / (len(student) - 1))) for _ in range(2))
    logprobs_PU[:, chat] = logits[:, base] = np.log(0.8)
    inputs = inputs_of(student, teacher, logprobs_PU, 999)
    logits = torch.from_numpy(logits[: len(inputs.positions)])
    gradients = []
    for classes in (stops, None):
        space = space_of(name, student, teacher, stops) if classes else plain_space_of(name, student, teacher)
        term = LossTerm(LOSS_INSTANCES[name], LossSpec(name).make_divergence(), space, stop_classes=classes)
        gradients.append(value_and_gradient(term, inputs, logits)[1][:, base])
    # A positive gradient lowers the native stop token; alone, it costs the student its only stop token.
    assert float(gradients[0][-1]) < 1e-3 < float(gradients[1].max())


def test_a_sampled_stop_token_represents_its_part_of_the_class():
    """Three stop tokens, of which two were sampled: the ratio to the student's class is exact on average."""
    masses, probs = np.array([0.1, 0.05]), np.array([0.08, 0.04])
    logprobs = TeacherLogprobs(
        positions=np.array([1], np.int32),
        offsets=np.array([0, 4], np.int64),
        ids=np.array([5, 2, 3, 6], np.int32),
        logprobs=np.log([0.8, *masses, 0.05]).astype(np.float32),
        remainder_mass=np.zeros(1, np.float32),
        observed_logprobs=np.log([0.8]).astype(np.float32),
        entropy=np.ones(1, np.float32),
        exact_counts=np.array([1], np.int64),
        token_logprobs=np.log([0.8, *probs, 0.01]).astype(np.float32),
    )
    merged = merge_stop_tokens(logprobs, np.array([5, 5], np.int32), np.array([1, 2, 3], np.int32))
    assert merged.ids.tolist() == [5, 1, 6]
    expected = masses.sum() / (masses / (3 * probs)).sum()
    np.testing.assert_allclose(np.exp(merged.token_logprobs), [0.8, expected, 0.01], rtol=1e-6)
