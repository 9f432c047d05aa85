"""Scoring and training of the space token that a metaspace tokenizer prepends to a text."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import small_inputs
import tokenizers
import torch
from tokenizers import pre_tokenizers

from xtk.batches.micro_batches import _unaligned
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.losses.interface import span_ranges
from xtk.losses.term import make_loss_inputs
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.alignment import align_sequences
from xtk.text.document import Document
from xtk.text.document_token_ids import SampledTokens
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}"
    "{{ eos_token }}{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
)
TEXTS = ["201 apples", "日本語", "\nhello", "(a)", "Anna has", " Anna", "  201", "é", ""]
ANSWERS = ["201", "It is 201.", "日本", "(a)", "\nhello", " 201"]
CONVERSATIONS = [[{"role": "user", "content": "12+5?"}, {"role": "assistant", "content": answer}] for answer in ANSWERS]


def with_logprobs(document: Document, tokens: TokenSequence, logprobs: TeacherLogprobs) -> TeacherDocument:
    """Return a document with a teacher's tokens and log-probabilities."""
    return TeacherDocument(document, tokens).with_teacher_logprobs(logprobs)


def make_model(folder, seed: int):
    """Write a small Llama with a tokenizer like Mistral's first one, where digits are separate tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small_inputs.make_metaspace_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [backend.pre_tokenizer, pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=700, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metaspace")
    return make_model(folder / "student", 0), make_model(folder / "teacher", 1)


@pytest.fixture(scope="module")
def tokenizer(models):
    return Tokenizer(models[0])


@pytest.fixture(scope="module")
def cache(run, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    rows = [{"text": "201 apples"}, {"messages": CONVERSATIONS[0]}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("cache-teacher", models[1], "data.jsonl", "--top-k", 4, "-q", "-o", "cache", cwd=folder)
    return TeacherCache(folder / "cache")


def token_ids(folder, text: str) -> list[int]:
    """Return the token ids of a text or a rendered conversation, from the tokenizers library only."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return backend.encode(text, add_special_tokens=False).ids


def log_softmax(folder, ids: list[int]) -> torch.Tensor:
    model = load_causal_lm(ModelRef(folder, dtype="float64")).eval()
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)


def trained_bytes(tokenizer: Tokenizer, document: Document) -> list[bytes]:
    (sequence,) = tokenize_documents(tokenizer, [document])
    return [tokenizer.vocabulary.bytes_of(token) for token in sequence.ids[sequence.train_mask].tolist()]


def test_bits_per_byte_sum_over_all_tokens_of_a_text(models, tokenizer):
    folder = models[0]
    assert tokenizer.vocabulary.bytes_of(token_ids(folder, "201")[0]) == b" "
    for text in filter(None, TEXTS):
        ids = [1, *token_ids(folder, text)]
        logprobs = log_softmax(folder, ids)
        bits = -sum(float(logprobs[at, ids[at + 1]]) for at in range(len(ids) - 1)) / math.log(2)
        model = BackboneWithHead(load_causal_lm(ModelRef(folder)))
        found = evaluate_bits_per_byte(model, tokenizer, [Document.from_text(text)], by_category=True)
        assert (found.num_tokens, found.bytes) == (len(ids) - 1, len(text.encode())), text
        assert found.bits == pytest.approx(bits, rel=1e-5), text
        assert sum(ratio.sums.sum() for ratio in found.per_category.values()) == pytest.approx(bits, rel=1e-5), text


def test_prepended_space_token_is_trained_with_the_token_after_it(tokenizer, models, cache, tmp_path):
    assert trained_bytes(tokenizer, Document.from_text("20")) == [b" ", b"2", b"0", b""]
    assert trained_bytes(tokenizer, Document.from_completion("20", "17")) == [b"1", b"7", b""]
    assert trained_bytes(tokenizer, Document.from_completion("", "17")) == [b" ", b"1", b"7", b""]
    assert trained_bytes(tokenizer, Document.from_text("")) == []
    folder_without_bos = shutil.copytree(models[0], tmp_path / "plain")
    (folder_without_bos / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))
    tokenizer_without_bos = Tokenizer(folder_without_bos, start_token="none")
    assert tokenizer_without_bos.start_ids == ()
    for text, expected in (("20", [b"2", b"0"]), ("Anna 2", [b" ", b"2"])):  # no position predicts the first token
        document = Document.from_text(text)
        assert trained_bytes(tokenizer_without_bos, document) == expected
        (sequence,) = tokenize_documents(tokenizer_without_bos, [document])
        logprobs = cache.read_document(0).teacher_logprobs
        inputs = make_loss_inputs(sequence, document, with_logprobs(document, sequence, logprobs))
        assert _unaligned([inputs], [sequence]) == (0, 2)


@pytest.mark.parametrize("answer", ANSWERS)
def test_template_space_before_an_answer_is_trained_as_separate_or_merged_token(tokenizer, models, answer):
    messages = [
        {"role": "user", "content": "5 apples "},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "12?"},
        {"role": "assistant", "content": answer},
    ]
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(messages)])
    first_turn = "<s>[INST] 5 apples  [/INST]"
    before_answer = f"{first_turn} 7</s>[INST] 12? [/INST]"
    assert sequence.ids.tolist() == token_ids(models[0], f"{before_answer} {answer}</s>")
    first, second, last = (
        len(token_ids(models[0], text)) for text in (first_turn, f"{first_turn} 7</s>", before_answer)
    )
    expected = [first <= at < second or at >= last for at in range(len(sequence))]
    assert sequence.train_mask.tolist() == expected


def test_template_space_token_is_not_trained_with_a_byte_level_tokenizer(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "byte-level")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("bos_token", "''"))
    document = Document.from_messages(CONVERSATIONS[0])
    assert trained_bytes(Tokenizer(folder), document) == [b"2", b"0", b"1", b""]


@pytest.mark.slow
def test_ce_and_forward_kl_are_averages_over_the_same_tokens(run, models, tokenizer, tmp_path):
    rows = [{"text": text} for text in TEXTS[:-1]]
    rows += [{"prompt": "12", "completion": "7 ("}, {"prompt": "", "completion": "7 ("}]
    rows += [{"messages": messages} for messages in CONVERSATIONS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exact = ("--top-k", "all", "--precision", "float32", "-q")
    run("cache-teacher", models[1], "data.jsonl", *exact, "-o", "cache", cwd=tmp_path)
    run(
        "distill", models[0], "cache", "--loss", "ce", "--loss", "forward-kl", "--max-steps", 1,
        "--per-device-train-batch-size", len(rows), "-o", "out", "-q", cwd=tmp_path,
    )  # fmt: skip
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    documents = [row.document for row in TeacherCache(tmp_path / "cache")]
    ce, kl = [], []
    for sequence in tokenize_documents(tokenizer, documents):
        student, teacher = (log_softmax(folder, sequence.ids.tolist()) for folder in models)
        for at in np.flatnonzero(sequence.train_mask).tolist():
            ce.append(-float(student[at - 1, sequence.ids[at]]))
            kl.append(float((teacher[at - 1].exp() * (teacher[at - 1] - student[at - 1])).sum()))
    assert metrics["unaligned_fraction"] == 0
    assert metrics["ce"] == pytest.approx(np.mean(ce), rel=1e-5)
    assert metrics["forward-kl"] == pytest.approx(np.mean(kl), rel=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_cache_without_the_space_position_omits_only_the_space(cache, tokenizer, number):
    """Older versions wrote such caches: one position fewer, and in a conversation a shorter text run."""
    row = cache.read_document(number)
    (student,) = tokenize_documents(tokenizer, [row.document])
    with_space = make_loss_inputs(student, row.document, row)
    space = int(row.teacher_logprobs.positions[0])
    runs = row.tokens.text_runs.copy()
    runs[-1, 0] += number
    mask = row.tokens.train_mask & (np.arange(len(row.tokens)) != space)
    tokens_without_space = TokenSequence(
        row.tokens.ids, row.tokens.byte_ends, mask, runs, row.tokens.segment_end_tokens
    )
    logprobs = row.teacher_logprobs
    observed = np.where(logprobs.positions == space, np.nan, logprobs.observed_logprobs)
    logprobs = replace(logprobs, observed_logprobs=observed)
    without_space = make_loss_inputs(
        student, row.document, with_logprobs(row.document, tokens_without_space, logprobs.drop_nan_positions())
    )
    assert len(without_space.teacher_logprobs) == len(with_space.teacher_logprobs) - 1
    ranges, ranges_without_space = span_ranges(with_space), span_ranges(without_space)
    assert ranges.row_start.tolist() == list(range(int(student.train_mask.sum())))
    assert ranges_without_space.row_start.tolist() == ranges.row_start[1:].tolist()
    assert (ranges_without_space.position_stop - ranges_without_space.position_start == 1).all()


def test_normalized_first_character_is_not_an_added_space_in_a_cache(run, models, pair, tmp_path):
    """NFKC normalizes `½` to three characters; the first two of their tokens have no bytes of the text."""
    folder = shutil.copytree(models[1], tmp_path / "normalizing")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.save(str(folder / "tokenizer.json"))
    documents = [Document.from_text(text) for text in ("½ apples", "½", "Anna ½")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": one.text}) + "\n" for one in documents))
    run("cache-teacher", folder, "data.jsonl", "--top-k", 4, "-q", "-o", "cache", cwd=tmp_path)
    teacher, student = Tokenizer(folder), Tokenizer(pair.teacher)
    for number, document in enumerate(documents):
        row = TeacherCache(tmp_path / "cache").read_document(number)
        (teacher_sequence,), (student_sequence,) = (tokenize_documents(one, [document]) for one in (teacher, student))
        assert row.tokens.byte_ends.tolist() == teacher_sequence.byte_ends.tolist()
        assert not teacher_sequence.exact
        cached, online = (
            make_loss_inputs(student_sequence, document, with_logprobs(document, tokens, row.teacher_logprobs)).spans
            for tokens in (row.tokens, teacher_sequence)
        )
        assert cached.tolist() == online.tolist()


@pytest.mark.parametrize("metaspace_student", [False, True])
@pytest.mark.parametrize("text", TEXTS[:5])
def test_other_tokenizer_is_aligned_from_the_first_byte(tokenizer, pair, cache, metaspace_student, text):
    other, document = Tokenizer(pair.teacher), Document.from_text(text)
    (metaspace_sequence,), (other_sequence,) = (tokenize_documents(one, [document]) for one in (tokenizer, other))
    student, teacher = (
        (metaspace_sequence, other_sequence) if metaspace_student else (other_sequence, metaspace_sequence)
    )
    logprobs = cache.read_document(0).teacher_logprobs
    inputs = make_loss_inputs(student, document, with_logprobs(document, teacher, logprobs))
    spans, aligned = inputs.spans, align_sequences(student, teacher)
    space = int(metaspace_sequence.byte_ends[1] == 0)
    assert (
        spans[0].tolist() == (aligned[0] + [space * metaspace_student, 0, space * (not metaspace_student), 0]).tolist()
    )
    assert spans[1:].tolist() == aligned[1:].tolist()
    assert _unaligned([inputs], [student]) == (space * metaspace_student, int(student.train_mask.sum()))


def test_sampled_tokens_of_an_answer_do_not_replace_the_space_before_it(tokenizer, models):
    """The student sampled `201` after a prompt that ends with the space; the teacher gets another prompt."""
    ids = token_ids(models[0], "<s>[INST] 12+5? [/INST] 201</s>")
    sampled = [False] * (len(ids) - 4) + [True] * 4
    document = replace(
        Document.from_messages(CONVERSATIONS[0]),
        sampled_tokens=SampledTokens.from_lists(
            ids, sampled, np.where(sampled, -1.0, 0.0), tokenizer.fingerprint, tokenizer.template_fingerprint
        ),
    )
    (student_sequence,) = tokenize_documents(tokenizer, [document])
    assert (student_sequence.ids.tolist(), student_sequence.train_mask.tolist()) == (ids, sampled)
    ((_, teacher_sequence),) = teacher_views(tokenizer, [document.with_teacher_prompt("Be exact.")])
    assert teacher_sequence.ids[-5:].tolist() == ids[-5:]
    assert teacher_sequence.train_mask.tolist() == [False] * (len(teacher_sequence) - 4) + [True] * 4
    assert align_sequences(student_sequence, teacher_sequence)[:, 1].tolist() == list(range(len(ids) - 3, len(ids) + 1))
