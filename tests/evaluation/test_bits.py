"""Bits per byte do not depend on the batch, on windows, or on the numbering of the vocabulary."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk import progress
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte, split_into_windows
from xtk.evaluation.standard_errors import Estimate, Ratio
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEXTS = [*small_inputs.sentences(12, seed=5), *small_inputs.ODD_TEXTS, "a", ""]
LONG_TEXTS = [
    " ".join(small_inputs.sentences(40, seed=6)),
    " ".join(small_inputs.sentences(33, seed=7)),
    "Anna has 12 apples.",
]


def make_documents(texts: list[str]) -> list[Document]:
    return [Document.from_text(text) for text in texts]


def reference_bits(folder: Path, texts: list[str]) -> tuple[float, int, int]:
    """Return bits, bytes and tokens of short documents, scored one by one in float64."""
    model = load_causal_lm(ModelRef(folder, dtype="float64")).eval()
    bits, size, count = 0.0, 0, 0
    for text, sequence in zip(texts, tokenize_documents(Tokenizer(folder), make_documents(texts)), strict=True):
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
def test_bits_per_byte_equal_the_float64_reference(pair, side):
    folder = getattr(pair, side)
    bits, size, count = reference_bits(folder, TEXTS)
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder), make_documents(TEXTS)
    )
    assert (found.bytes, found.num_tokens, found.num_documents) == (size, count, len(TEXTS))
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.num_windows == len(TEXTS) - 1  # the empty document has no window
    assert found.bits == pytest.approx(bits, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(bits / size, rel=1e-6)


def test_progress_moves_with_every_batch(pair, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    model = BackboneWithHead(load_causal_lm(ModelRef(pair.student)))
    documents = make_documents([*TEXTS, *LONG_TEXTS])
    evaluate_bits_per_byte(model, Tokenizer(pair.student), documents, batch_tokens=40, max_length=32)
    done = [int(count) for count in re.findall(r"evaluate: (\d+)/\d+ documents  ", capsys.readouterr().err)]
    assert done == sorted(done)
    assert len(set(done)) > len(documents) // 3
    assert done[-1] == len(documents)


def test_bits_per_byte_do_not_depend_on_the_batch_size(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(pair.student))), Tokenizer(pair.student)
    corpus = make_documents(TEXTS + LONG_TEXTS)
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


def test_bits_of_many_documents_are_the_sum_of_the_parts(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(pair.student))), Tokenizer(pair.student)
    corpus = make_documents(small_inputs.sentences(300, seed=2))

    def stream() -> Iterator[Document]:
        yield from corpus

    parts = [evaluate_bits_per_byte(model, tokenizer, corpus[start : start + 100]) for start in (0, 100, 200)]
    whole = evaluate_bits_per_byte(model, tokenizer, stream())
    assert whole.bits == pytest.approx(sum(part.bits for part in parts), rel=1e-6)
    assert (whole.num_documents, whole.bytes) == (300, sum(part.bytes for part in parts))


def renumber_tokens(folder: Path, output: Path, seed: int) -> Path:
    """Save the same model with permuted token ids and embedding and output rows permuted in the same way."""
    content = json.loads((folder / "tokenizer.json").read_text())
    model = load_causal_lm(ModelRef(folder))
    rows = model.get_input_embeddings().weight.shape[0]
    new_id = np.random.default_rng(seed).permutation(rows)
    content["model"]["vocab"] = {token: int(new_id[number]) for token, number in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = int(new_id[token["id"]])
    for start in content["post_processor"]["special_tokens"].values():
        start["ids"] = new_id[start["ids"]].tolist()
    old_ids = torch.from_numpy(np.argsort(new_id))
    with torch.no_grad():
        for matrix in {
            id(layer.weight): layer.weight for layer in (model.get_input_embeddings(), model.lm_head)
        }.values():
            matrix.copy_(matrix[old_ids].clone())
    model.save_pretrained(output)
    (output / "tokenizer.json").write_text(json.dumps(content))
    (output / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return output


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_permuted_token_ids_give_the_same_bits(pair, side, tmp_path):
    folder = getattr(pair, side)
    permuted = renumber_tokens(folder, tmp_path / "other", seed=1)
    token_ids = Tokenizer(folder).encode([TEXTS[0]])[0].ids
    assert token_ids.tolist() != Tokenizer(permuted).encode([TEXTS[0]])[0].ids.tolist()
    results = [
        evaluate_bits_per_byte(
            BackboneWithHead(load_causal_lm(ModelRef(model_folder))),
            Tokenizer(model_folder),
            make_documents(TEXTS + LONG_TEXTS),
        )
        for model_folder in (folder, permuted)
    ]
    assert results[1].bits == pytest.approx(results[0].bits, rel=1e-6)
    assert results[1].bytes == results[0].bytes


@settings(deadline=None)
@given(length=st.integers(1, 200), limit=st.integers(2, 50), num_start=st.integers(0, 1))
def test_windows_score_every_token_once_after_half_a_context_and_the_start_token(length, limit, num_start):
    ids = np.arange(length, dtype=np.int32)
    start_ids = ids[:num_start].tolist()
    is_counted = np.ones(length, np.bool_)
    is_counted[0] = False
    score_counts = np.zeros(length, np.int64)
    for number, window in enumerate(split_into_windows(ids, is_counted, limit, start_ids)):
        assert len(window.ids) <= limit
        assert window.ids[:num_start].tolist() == start_ids
        assert not window.is_scored[0]  # nothing predicts the first token of a window
        scored = np.flatnonzero(window.is_scored)
        assert (window.ids[scored] == window.first_token + scored).all()
        score_counts[window.ids[scored]] += 1
        if number:
            assert scored.min() >= limit // 2
    assert score_counts.tolist() == is_counted.astype(int).tolist()


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("max_length", [None, 100, 17, 2])
def test_every_byte_of_long_documents_is_counted_once(pair, side, max_length):
    folder = getattr(pair, side)
    tokenizer = Tokenizer(folder)
    token_counts = [
        sequence.text_runs[:, 1].max(initial=1)
        for sequence in tokenize_documents(tokenizer, make_documents(LONG_TEXTS))
    ]
    limit = max_length or 256
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(folder))), tokenizer, make_documents(LONG_TEXTS), max_length=max_length
    )
    assert max(token_counts) > limit
    assert found.bytes == sum(len(text.encode()) for text in LONG_TEXTS)
    assert found.num_tokens == sum(token_counts) - len(LONG_TEXTS)
    assert found.num_windows == sum(1 + max(0, math.ceil((length - limit) / (limit // 2))) for length in token_counts)
    assert 0 < found.bits_per_byte < 12


@pytest.mark.parametrize("start_token", ["bos", "eos", "none"])
def test_windows_are_scored_independently_each_after_the_start_token(pair, start_token):
    """The reference computes the same windows in float64."""
    tokenizer = Tokenizer(pair.student, start_token=start_token)
    (sequence,) = tokenize_documents(tokenizer, make_documents(LONG_TEXTS[:1]))
    model = load_causal_lm(ModelRef(pair.student, dtype="float64")).eval()
    ids = torch.from_numpy(sequence.ids[: sequence.text_runs[:, 1].max(initial=1)].astype(np.int64))
    front = torch.tensor(tokenizer.start_ids, dtype=torch.int64)
    bits, next_index, limit = 0.0, 1, 64
    while next_index < len(ids):
        stop = min(limit if next_index == 1 else next_index + limit // 2, len(ids))
        start = max(len(front), stop - limit + len(front))
        window = torch.cat([front, ids[start:stop]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=window[None]).logits[0], -1)
        rows = range(next_index - start + len(front), stop - start + len(front))
        bits -= sum(float(logprobs[row - 1, window[row]]) for row in rows) / math.log(2)
        next_index = stop
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(pair.student))),
        tokenizer,
        make_documents(LONG_TEXTS[:1]),
        max_length=limit,
    )
    assert found.bits == pytest.approx(bits, rel=1e-6)


def test_compared_models_score_the_same_bytes_from_a_shared_boundary_on(pair):
    """The reference sums the float64 log-probabilities of all tokens after the first shared boundary."""
    tokenizers = [Tokenizer(pair.student, start_token="bos"), Tokenizer(pair.teacher, start_token="none")]
    texts = ["Anna has 201 apples.", "2019 is a year.", "x", "", *TEXTS[:6]]
    documents = make_documents(texts)
    sequences = [tokenize_documents(tokenizer, documents) for tokenizer in tokenizers]
    starts = []
    for text, *both in zip(texts, *sequences, strict=True):
        ends = [set(sequence.byte_ends[sequence.text_mask].tolist()) for sequence in both]
        first = int(both[1].byte_ends[0]) if text else 0
        starts.append(min((byte for byte in ends[0] & ends[1] if byte >= first), default=len(text.encode())))
    assert starts[1] > 1  # "2019" are one or more tokens of the student, and single digits of the teacher
    for at, (folder, tokenizer) in enumerate(zip((pair.student, pair.teacher), tokenizers, strict=True)):
        model = load_causal_lm(ModelRef(folder, dtype="float64")).eval()
        bits = 0.0
        for sequence, start in zip(sequences[at], starts, strict=True):
            ids = torch.from_numpy(sequence.ids.astype(np.int64))
            if not len(ids):
                continue
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
            begins = [0, *sequence.byte_ends.tolist()]
            rows = [row for row in np.flatnonzero(sequence.text_mask).tolist() if row and begins[row] >= start]
            bits -= sum(float(logprobs[row - 1, ids[row]]) for row in rows) / math.log(2)
        network = BackboneWithHead(load_causal_lm(ModelRef(folder)))
        scored = evaluate_bits_per_byte(
            network, tokenizer, documents, by_category=True, compared_with=tokenizers, max_length=None
        )
        assert scored.bytes == sum(len(text.encode()) - start for text, start in zip(texts, starts, strict=True))
        assert scored.num_skipped_bytes == sum(starts)
        assert scored.bits == pytest.approx(bits, rel=1e-5)
        assert sum(ratio.counts.sum() for ratio in scored.per_category.values()) == scored.bytes
        assert sum(ratio.sums.sum() for ratio in scored.per_category.values()) == pytest.approx(scored.bits, rel=1e-5)


@pytest.mark.slow
def test_evaluate_reports_the_bytes_that_all_models_predict(pair, tmp_path, run):
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12 apples.", "Bert has 4."])
    command = ("evaluate", pair.student, data, "--compare-to", pair.teacher, "--json", "--max-length", 64)
    result = run(*command)
    assert [json.loads(line)["skipped_bytes"] for line in result.stdout.splitlines()] == [0, 0]
    assert "are scored" not in result.stderr
    result = run(*command, "--start-token", "none")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    scored = lines[0]["bytes"]
    assert [(line["bytes"], line["skipped_bytes"]) for line in lines] == [(scored, 30 - scored)] * 2
    assert f"{scored} of 30 bytes are scored, those that all compared models predict" in result.stderr


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_only_the_completion_of_a_prompt_is_counted(pair, side):
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    prompt, completion = "Anna has 12 apples. Bert has 4 pears.", " Now Anna has 8 apples left — café."
    both = evaluate_bits_per_byte(model, tokenizer, make_documents([prompt + completion]))
    first = evaluate_bits_per_byte(model, tokenizer, make_documents([prompt]))
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion(prompt, completion)])
    assert found.bytes == len(completion.encode())
    assert found.num_tokens == both.num_tokens - first.num_tokens
    assert found.bits == pytest.approx(both.bits - first.bits, rel=1e-5)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_empty_prompt_equals_plain_text(pair, side):
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    text = evaluate_bits_per_byte(model, tokenizer, make_documents([TEXTS[0]]))
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion("", TEXTS[0])])
    assert (found.bytes, found.num_tokens) == (text.bytes, text.num_tokens)
    assert found.bits == pytest.approx(text.bits, rel=1e-6)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_bits_per_document_are_independent_and_stride_is_reported(pair, side):
    """Windows belong to one document: packing, batches and neighboring documents do not change the result."""
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    texts = LONG_TEXTS + TEXTS
    for max_length, expected_window in ((None, (256, 128)), (64, (64, 32))):
        whole = evaluate_bits_per_byte(model, tokenizer, make_documents(texts), max_length=max_length)
        assert (whole.window_tokens, whole.stride) == expected_window
        assert whole.per_document.counts.tolist() == [len(text.encode()) for text in texts]
        for i in (0, 1, len(texts) - 2):
            alone = evaluate_bits_per_byte(model, tokenizer, make_documents(texts[i : i + 1]), max_length=max_length)
            assert whole.per_document.sums[i] == pytest.approx(alone.bits, rel=1e-6)


def test_ratio_over_documents_of_equal_size_is_a_mean():
    rng = np.random.default_rng(4)
    one, other = rng.normal(3, 1, 40), rng.normal(3, 1, 40)
    sizes = np.full(40, 7.0)
    first, second = Ratio(7 * one, sizes), Ratio(7 * other, sizes)
    for found, expected in (
        (first.estimate(), Estimate.mean_of(one)),
        (first.difference(second), Estimate.mean_of(one - other)),
        (first.difference(first), Estimate(0.0, 0.0)),
    ):
        assert found.value == pytest.approx(expected.value, abs=1e-12)
        assert found.error == pytest.approx(expected.error, abs=1e-12)
    assert math.isnan(Ratio(one[:1], sizes[:1]).estimate().error)
    assert Ratio(one[:1], sizes[:1]).estimate().finite_error is None
    # Empty documents do not change the error.
    with_empty_documents = Ratio(np.append(7 * one, np.zeros(9)), np.append(sizes, np.zeros(9)))
    assert with_empty_documents.estimate() == first.estimate()
    assert Ratio(np.array([3.0, 0.0]), np.array([1.0, 0.0])).estimate().finite_error is None


def test_standard_error_of_a_ratio_is_its_standard_deviation_over_samples():
    """Over many samples of documents whose bits depend on their length; the same for paired differences."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(20, 400, (3000, 80)).astype(np.float64)
    bits_per_byte = rng.normal(2, 0.5, sizes.shape)
    one = sizes * bits_per_byte * (1 + 20 / sizes)
    other = sizes * (bits_per_byte + rng.normal(0.1, 0.05, sizes.shape))
    first, second = ([Ratio(*sample) for sample in zip(sums, sizes, strict=True)] for sums in (one, other))
    standard_deviation = np.std([ratio.value for ratio in first])
    assert np.mean([ratio.estimate().error for ratio in first]) == pytest.approx(standard_deviation, rel=0.05)
    differences = [a.difference(b) for a, b in zip(first, second, strict=True)]
    assert np.mean([difference.error for difference in differences]) == pytest.approx(
        np.std([difference.value for difference in differences]), rel=0.05
    )
    assert np.mean([difference.error for difference in differences]) < standard_deviation / 3


def save_without_start_token(folder: Path, output: Path) -> Path:
    load_causal_lm(ModelRef(folder)).save_pretrained(output)
    content = json.loads((folder / "tokenizer.json").read_text())
    (output / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    (output / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return output


def test_unpredicted_first_token_is_not_counted_without_a_start_token(pair, tmp_path):
    folder = save_without_start_token(pair.student, tmp_path)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    text = TEXTS[0]
    first_token_bytes = int(tokenizer.encode([text])[0].byte_ends[0])
    for document in (Document.from_text(text), Document.from_completion("", text)):
        found = evaluate_bits_per_byte(model, tokenizer, [document])
        assert found.bytes == len(text.encode()) - first_token_bytes
        assert found.num_tokens == len(tokenizer.encode([text])[0].ids) - 1


def test_unpredicted_first_token_may_span_prompt_and_completion(pair, tmp_path):
    folder = save_without_start_token(pair.student, tmp_path)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    first_token_bytes = int(tokenizer.encode(["Jakob has 12 apples."])[0].byte_ends[0])
    assert first_token_bytes > 2
    found = evaluate_bits_per_byte(model, tokenizer, [Document.from_completion("Ja", "kob has 12 apples.")])
    assert found.bytes == len("Jakob has 12 apples.") - first_token_bytes


def test_max_length_of_one_token_is_refused(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(pair.student))), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="--max-length must be at least 2, not 1"):
        evaluate_bits_per_byte(model, tokenizer, make_documents(TEXTS), max_length=1)


def test_train_mode_of_the_model_is_restored(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(pair.student))), Tokenizer(pair.student)
    for training in (True, False):
        model.train(training)
        evaluate_bits_per_byte(model, tokenizer, make_documents(TEXTS[:2]))
        assert model.training is training


def test_data_without_text_is_refused(pair):
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(pair.student))), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="the evaluation data has no text"):
        evaluate_bits_per_byte(model, tokenizer, make_documents([""]))


@pytest.mark.slow
def test_nonfinite_bits_per_byte_are_reported_as_not_a_number(run, pair, corpus, tmp_path):
    """Also for every category: a broken model has no finite value for any byte."""
    model = load_causal_lm(ModelRef(pair.student))
    torch.nn.init.constant_(model.model.norm.weight, 3e38)  # finite, as weights have to be; its logits are not
    model.save_pretrained(tmp_path / "broken")
    for name, content in Tokenizer(pair.student).to_files().items():
        (tmp_path / "broken" / name).write_bytes(content)
    single = run("evaluate", "broken", corpus, "-q", cwd=tmp_path, code=1)
    assert single.stdout.startswith("not a number bits per byte  broken")
    assert "log-probabilities of broken are not finite" in single.stderr
    arguments = ["evaluate", pair.student, corpus, "--compare-to", "broken", "--by-category"]
    table = run(*arguments, cwd=tmp_path, code=1).stdout.splitlines()
    (broken_line,) = (line for line in table if line.startswith("broken"))
    assert "not a number" in broken_line
    digits_line = next(line for line in table if line.startswith("digits"))
    assert "\u00b1" in digits_line
    assert digits_line.endswith("not a number")
    output = run(*arguments, "--json", cwd=tmp_path, code=1).stdout
    assert "NaN" not in output
    line = json.loads(output.splitlines()[1])
    assert line["bits_per_byte"] is None
    assert {one["bits_per_byte"] for one in line["categories"].values()} == {None}


def test_bytes_of_reasoning_marks_count_where_the_marks_are_text(pair, tmp_path):
    folder = Path(shutil.copytree(pair.student, tmp_path / "student"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    answer = {"role": "assistant", "reasoning_content": "Two and two.", "content": "Anna has 12 apples."}
    document = Document.from_messages([{"role": "user", "content": "Hi"}, answer])
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    found = evaluate_bits_per_byte(model, tokenizer, [document], by_category=True)
    assert found.bytes == len("Two and two.</think>Anna has 12 apples.")
    assert sum(one.counts.sum() for one in found.per_category.values()) == found.bytes
    assert sum(one.sums.sum() for one in found.per_category.values()) == pytest.approx(found.bits)
