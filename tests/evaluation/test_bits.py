"""Bits per byte are the model's, not the batch's, the window's or the tokenizer's numbering."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte, split_into_windows
from xtk.evaluation.standard_errors import Estimate, Ratio
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

TEXTS = [*small_inputs.sentences(12, seed=5), *small_inputs.ODD, "a", ""]
LONG = [
    " ".join(small_inputs.sentences(40, seed=6)),
    " ".join(small_inputs.sentences(33, seed=7)),
    "Anna has 12 apples.",
]


def documents(texts: list[str]) -> list[Document]:
    return [Document.from_text(text) for text in texts]


def plain_bits(folder: Path, texts: list[str]) -> tuple[float, int, int]:
    """Bits, bytes and tokens of short documents, one by one, in float64."""
    model = load_causal_lm(folder, dtype=torch.float64).eval()
    bits, size, count = 0.0, 0, 0
    for text, sequence in zip(texts, tokenize_documents(Tokenizer(folder), documents(texts)), strict=True):
        ids = torch.from_numpy(sequence.ids[: sequence.text_runs[:, 1].max(initial=1)].astype(np.int64))
        size += len(text.encode())
        if len(ids) < 2:
            continue
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        bits -= float(logprobs[torch.arange(len(ids) - 1), ids[1:]].sum()) / math.log(2)
        count += len(ids) - 1
    return bits, size, count


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_bits_per_byte_are_those_of_a_plain_float64_computation(pair, side):
    folder = getattr(pair, side)
    bits, size, count = plain_bits(folder, TEXTS)
    found = evaluate_bits_per_byte(BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder), documents(TEXTS))
    assert (found.bytes, found.num_tokens, found.num_documents) == (size, count, len(TEXTS))
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.num_windows == len(TEXTS) - 1  # nothing is read for the empty one
    assert found.bits == pytest.approx(bits, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(bits / size, rel=1e-6)


def test_bits_per_byte_do_not_depend_on_the_batch(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(pair.student)), Tokenizer(pair.student)
    corpus = documents(TEXTS + LONG)
    results = [
        evaluate_bits_per_byte(model, tokenizer, corpus, batch_tokens=tokens) for tokens in (1, 300, 8192, 10**9)
    ]
    for result in results[1:]:
        assert result.bits == pytest.approx(results[0].bits, rel=1e-6)
        assert (result.bytes, result.num_tokens, result.num_windows) == (
            results[0].bytes,
            results[0].num_tokens,
            results[0].num_windows,
        )


def test_more_documents_than_are_read_at_once_add_up(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(pair.student)), Tokenizer(pair.student)
    corpus = documents(small_inputs.sentences(300, seed=2))

    def stream() -> Iterator[Document]:
        yield from corpus

    parts = [evaluate_bits_per_byte(model, tokenizer, corpus[at : at + 100]) for at in (0, 100, 200)]
    whole = evaluate_bits_per_byte(model, tokenizer, stream())
    assert whole.bits == pytest.approx(sum(part.bits for part in parts), rel=1e-6)
    assert (whole.num_documents, whole.bytes) == (300, sum(part.bytes for part in parts))


def renumbered(folder: Path, other: Path, seed: int) -> Path:
    """The same model with the ids of its tokens, its embedding's and its head's rows permuted alike."""
    content = json.loads((folder / "tokenizer.json").read_text())
    model = load_causal_lm(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    new_id = np.random.default_rng(seed).permutation(rows)
    content["model"]["vocab"] = {token: int(new_id[number]) for token, number in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = int(new_id[token["id"]])
    order = torch.from_numpy(np.argsort(new_id))
    with torch.no_grad():
        for matrix in {
            id(layer.weight): layer.weight for layer in (model.get_input_embeddings(), model.lm_head)
        }.values():
            matrix.copy_(matrix[order].clone())
    model.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(content))
    (other / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return other


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_renumbered_vocabulary_is_the_same_model(pair, side, tmp_path):
    folder = getattr(pair, side)
    other = renumbered(folder, tmp_path / "other", seed=1)
    one = Tokenizer(folder).encode([TEXTS[0]])[0].ids
    assert one.tolist() != Tokenizer(other).encode([TEXTS[0]])[0].ids.tolist()
    results = [
        evaluate_bits_per_byte(BackboneWithHead(load_causal_lm(place)), Tokenizer(place), documents(TEXTS + LONG))
        for place in (folder, other)
    ]
    assert results[1].bits == pytest.approx(results[0].bits, rel=1e-6)
    assert results[1].bytes == results[0].bytes


@settings(deadline=None)
@given(length=st.integers(1, 200), limit=st.integers(2, 50))
def test_windows_score_every_token_once_with_half_a_context_before_it(length, limit):
    ids = np.arange(length, dtype=np.int32)
    counted = np.ones(length, np.bool_)
    counted[0] = False
    times = np.zeros(length, np.int64)
    for number, window in enumerate(split_into_windows(ids, counted, limit)):
        assert len(window.ids) <= limit
        assert not window.is_scored[0]  # nothing predicts the first token of a window
        times[window.ids[window.is_scored]] += 1
        if number:
            assert np.flatnonzero(window.is_scored).min() >= limit // 2
    assert times.tolist() == counted.astype(int).tolist()


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("max_length", [None, 100, 17, 2])
def test_of_long_documents_every_byte_counts_once(pair, side, max_length):
    folder = getattr(pair, side)
    tokenizer = Tokenizer(folder)
    read = [sequence.text_runs[:, 1].max(initial=1) for sequence in tokenize_documents(tokenizer, documents(LONG))]
    limit = max_length or 256
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(folder)), tokenizer, documents(LONG), max_length=max_length
    )
    assert max(read) > limit
    assert found.bytes == sum(len(text.encode()) for text in LONG)
    assert found.num_tokens == sum(read) - len(LONG)
    assert found.num_windows == sum(1 + max(0, math.ceil((length - limit) / (limit // 2))) for length in read)
    assert 0 < found.bits_per_byte < 12


def test_a_window_scores_its_tokens_as_if_it_were_the_whole_text(pair):
    """The plain computation over the same windows, in float64."""
    tokenizer = Tokenizer(pair.student)
    (sequence,) = tokenize_documents(tokenizer, documents(LONG[:1]))
    model = load_causal_lm(pair.student, dtype=torch.float64).eval()
    ids = torch.from_numpy(sequence.ids[: sequence.text_runs[:, 1].max(initial=1)].astype(np.int64))
    bits, done, limit = 0.0, 1, 64
    while done < len(ids):
        stop = min(limit if done == 1 else done + limit // 2, len(ids))
        start = max(0, stop - limit)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None, start:stop]).logits[0], -1)
        bits -= sum(float(logprobs[at - 1 - start, ids[at]]) for at in range(done, stop)) / math.log(2)
        done = stop
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(pair.student)), tokenizer, documents(LONG[:1]), max_length=limit
    )
    assert found.bits == pytest.approx(bits, rel=1e-6)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_of_a_prompt_with_its_completion_the_completion_counts(pair, side):
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder)
    prompt, completion = "Anna has 12 apples. Bert has 4 pears.", " Now Anna has 8 apples left — café."
    both = evaluate_bits_per_byte(model, tokenizer, documents([prompt + completion]))
    first = evaluate_bits_per_byte(model, tokenizer, documents([prompt]))
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion(prompt, completion)])
    assert found.bytes == len(completion.encode())
    assert found.num_tokens == both.num_tokens - first.num_tokens
    assert found.bits == pytest.approx(both.bits - first.bits, rel=1e-5)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_an_empty_prompt_is_no_prompt(pair, side):
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder)
    text = evaluate_bits_per_byte(model, tokenizer, documents([TEXTS[0]]))
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion("", TEXTS[0])])
    assert (found.bytes, found.num_tokens) == (text.bytes, text.num_tokens)
    assert found.bits == pytest.approx(text.bits, rel=1e-6)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_documents_sum_to_the_whole_and_do_not_depend_on_each_other(pair, side):
    """Windows are a document's own: packing, batches and neighbours change nothing, and the stride is told."""
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder)
    texts = LONG + TEXTS
    for max_length, told in ((None, (256, 128)), (64, (64, 32))):
        whole = evaluate_bits_per_byte(model, tokenizer, documents(texts), max_length=max_length)
        assert (whole.window_tokens, whole.stride) == told
        assert whole.per_document.counts.tolist() == [len(text.encode()) for text in texts]
        for at in (0, 1, len(texts) - 2):
            alone = evaluate_bits_per_byte(model, tokenizer, documents(texts[at : at + 1]), max_length=max_length)
            assert whole.per_document.sums[at] == pytest.approx(alone.bits, rel=1e-6)


def test_a_ratio_over_equal_documents_is_a_mean():
    random = np.random.default_rng(4)
    one, other = random.normal(3, 1, 40), random.normal(3, 1, 40)
    size = np.full(40, 7.0)
    ours, theirs = Ratio(7 * one, size), Ratio(7 * other, size)
    for found, expected in (
        (ours.estimate(), Estimate.mean_of(one)),
        (ours.difference(theirs), Estimate.mean_of(one - other)),
        (ours.difference(ours), Estimate(0.0, 0.0)),
    ):
        assert found.value == pytest.approx(expected.value, abs=1e-12)
        assert found.error == pytest.approx(expected.error, abs=1e-12)
    assert math.isnan(Ratio(one[:1], size[:1]).estimate().error)
    assert Ratio(one[:1], size[:1]).estimate().finite_error is None
    # Who has no part says nothing about the error.
    with_nothing = Ratio(np.append(7 * one, np.zeros(9)), np.append(size, np.zeros(9)))
    assert with_nothing.estimate() == ours.estimate()
    assert Ratio(np.array([3.0, 0.0]), np.array([1.0, 0.0])).estimate().finite_error is None


def test_the_error_of_a_ratio_is_how_far_it_strays():
    """Over many samples of documents of many lengths, whose bits depend on their length; so of paired differences."""
    random = np.random.default_rng(5)
    sizes = random.integers(20, 400, (3000, 80)).astype(np.float64)
    hard = random.normal(2, 0.5, sizes.shape)
    one = sizes * hard * (1 + 20 / sizes)
    other = sizes * (hard + random.normal(0.1, 0.05, sizes.shape))
    ours, theirs = ([Ratio(*sample) for sample in zip(sums, sizes, strict=True)] for sums in (one, other))
    spread = np.std([ratio.value for ratio in ours])
    assert np.mean([ratio.estimate().error for ratio in ours]) == pytest.approx(spread, rel=0.05)
    gains = [a.difference(b) for a, b in zip(ours, theirs, strict=True)]
    assert np.mean([gain.error for gain in gains]) == pytest.approx(np.std([gain.value for gain in gains]), rel=0.05)
    assert np.mean([gain.error for gain in gains]) < spread / 3


def without_start(folder: Path, other: Path) -> Path:
    load_causal_lm(folder).save_pretrained(other)
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return other


def test_without_a_start_token_the_bytes_that_nothing_predicts_do_not_count(pair, tmp_path):
    folder = without_start(pair.student, tmp_path)
    model, tokenizer = BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder)
    text = TEXTS[0]
    first = int(tokenizer.encode([text])[0].byte_ends[0])
    for document in (Document.from_text(text), Document.from_completion("", text)):
        found = evaluate_bits_per_byte(model, tokenizer, [document])
        assert found.bytes == len(text.encode()) - first
        assert found.num_tokens == len(tokenizer.encode([text])[0].ids) - 1


def test_a_first_token_that_nothing_predicts_may_end_in_the_completion(pair, tmp_path):
    folder = without_start(pair.student, tmp_path)
    model, tokenizer = BackboneWithHead(load_causal_lm(folder)), Tokenizer(folder)
    first = int(tokenizer.encode(["Jakob has 12 apples."])[0].byte_ends[0])
    assert first > 2
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion("Ja", "kob has 12 apples.")])
    assert found.bytes == len("Jakob has 12 apples.") - first


def test_a_context_of_one_token_is_refused(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(pair.student)), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="--max-length must be at least 2, not 1"):
        evaluate_bits_per_byte(model, tokenizer, documents(TEXTS), max_length=1)


def test_a_model_comes_back_in_the_mode_that_it_came_in(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(pair.student)), Tokenizer(pair.student)
    for training in (True, False):
        model.train(training)
        evaluate_bits_per_byte(model, tokenizer, documents(TEXTS[:2]))
        assert model.training is training


def test_nothing_has_no_bits_per_byte(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(pair.student)), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="the evaluation data has no text"):
        evaluate_bits_per_byte(model, tokenizer, documents([""]))


def test_what_is_not_a_number_is_told_as_such(run, pair, corpus, tmp_path):
    """In every category too: what a broken model says about any byte is nothing."""
    model = load_causal_lm(pair.student)
    torch.nn.init.constant_(model.model.norm.weight, 3e38)  # finite, as weights have to be; its logits are not
    model.save_pretrained(tmp_path / "broken")
    for name, content in Tokenizer(pair.student).to_files().items():
        (tmp_path / "broken" / name).write_bytes(content)
    alone = run("evaluate", "broken", corpus, "-q", cwd=tmp_path, code=1)
    assert alone.stdout.startswith("not a number bits per byte  broken")
    assert "log-probabilities of broken are not finite" in alone.stderr
    both = ["evaluate", pair.student, corpus, "--compare-to", "broken", "--by-category"]
    table = run(*both, cwd=tmp_path, code=1).stdout.splitlines()
    (of_broken,) = (line for line in table if line.startswith("broken"))
    assert "not a number" in of_broken
    digits = next(line for line in table if line.startswith("digits"))
    assert "\u00b1" in digits
    assert digits.endswith("not a number")
    told = run(*both, "--json", cwd=tmp_path, code=1).stdout
    assert "NaN" not in told
    line = json.loads(told.splitlines()[1])
    assert line["bits_per_byte"] is None
    assert {one["bits_per_byte"] for one in line["categories"].values()} == {None}
