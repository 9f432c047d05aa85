"""The end of a turn is one event, even if a chat template has several tokens for it."""

import numpy as np
import pytest
import torch
from chat_families import write_family

from xtk.batches.losses_per_teacher import PAIR_PROJECTION_METHOD, cached_next_bytes, cached_projection
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses import LOSSES
from xtk.losses.divergences import FORWARD_KL
from xtk.losses.head import fused_loss
from xtk.losses.term import LossTerm, make_loss_inputs
from xtk.models.output_head import OutputHead
from xtk.name_registry import load_registered
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CALLING = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
ANSWERING = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sunny."}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    return Tokenizer(write_family("qwen2_5", folder)), Tokenizer(write_family("gptoss", folder))


def observed_only_logprobs(sequence, share: float) -> TeacherLogprobs:
    """Return log-probabilities in which only the observed token, of probability `share`, is stored."""
    positions = np.flatnonzero(sequence.train_mask).astype(np.int32)
    observed = np.full(len(positions), np.log(share), np.float32)
    return TeacherLogprobs(
        positions, np.arange(len(positions) + 1, dtype=np.int64), sequence.ids[positions].astype(np.int32), observed,
        np.full(len(positions), 1 - share, np.float32), observed, np.zeros(len(positions), np.float32),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("messages", [CALLING, ANSWERING], ids=["after a call", "after an answer"])
@pytest.mark.parametrize("name", ["byte-kl", "bpm", "p-kl", "strict", "boundary-kl", "escd", "simct", "gold"])
def test_gradient_raises_only_the_end_token_where_the_teacher_stops(tokenizers, name, messages):
    student, teacher = tokenizers
    document = Document.from_messages(messages)
    (student_tokens,), (teacher_tokens,) = (
        tokenize_documents(student, [document]),
        tokenize_documents(teacher, [document]),
    )
    expected_end = "<|call|>" if messages is CALLING else "<|return|>"
    assert teacher.special_token_names[int(teacher_tokens.ids[-1])] == expected_end
    logprobs = observed_only_logprobs(teacher_tokens, 0.9)
    teacher_document = TeacherDocument(document, teacher_tokens).with_teacher_logprobs(logprobs)
    inputs = make_loss_inputs(student_tokens, document, teacher_document)
    assert inputs.is_end.sum() == 1
    loss = load_registered(LOSSES, name, "loss")()
    if loss.comparison_space == "bytes":
        space = cached_next_bytes(student, teacher)
    else:
        space = cached_projection(student, teacher, PAIR_PROJECTION_METHOD).columns.pad_columns(teacher.embedding_rows)
    term = LossTerm(loss, FORWARD_KL, space).build_cells(inputs)
    logits = torch.zeros(len(inputs.positions), student.embedding_rows, dtype=torch.float64, requires_grad=True)
    fused_loss(logits, OutputHead(None), [term], 16)[0].backward()
    row = int(np.flatnonzero(inputs.positions + 1 == student_tokens.segment_end_tokens[-1])[0])
    end = student.end_id
    # The gradient raises the end token there, and no other special token.
    assert logits.grad[row, end] < 0
    others = [token for token in student.special_token_names if token != end]
    assert (logits.grad[row, others] >= -1e-12).all()
