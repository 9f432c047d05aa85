"""llama.cpp: the weights that xtk loads from its files, and its server as a teacher service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from installed_smollm2 import find_smollm2
from llama_cpp_server import run_server, write_single_precision
from transformers import AutoModelForCausalLM

from xtk.cache.reader import TeacherCache
from xtk.models.resolver import resolve_model_folder
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.text.tokenizer import Tokenizer

TOP_K = 8
# llama.cpp returns one entry for the two to four tokens of an emoji or of a Chinese character.
PROMPTS = {
    "chat": ["What is 2+2?", "Write ten emoji 🎉🎁 for a party.", "Write 你好 and explain it.", "Name a cheese."],
    "text": ["The capital of France is", "🎉🎁🎉🎁🎉🎁🎉", "日本語の", "1, 2, 3,"],
}


@pytest.fixture(scope="module")
def model() -> tuple[Tokenizer, torch.nn.Module]:
    folder = resolve_model_folder(str(find_smollm2()), with_weights=True)
    return Tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the server in single precision, because llama.cpp quantizes activations for quantized weights."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    exact = write_single_precision(find_smollm2(), folder / "model.gguf")
    with run_server(exact, folder / "log", "--exact") as url:
        yield url
    exact.unlink()


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_weights_of_a_gguf_file_have_the_log_probabilities_of_llama_cpp(run, model, service, tmp_path):
    """On 20 texts with 4 generated tokens each; measured difference: 2e-4 (2026-11-26)."""
    tokenizer, network = model
    texts = [text[:200] for text in train_test_split(python_documents())[0] if text.isascii()][:20]
    data, answers = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts]), tmp_path / "answers.jsonl"
    run("query-teacher", f"{service}#teacher", data, "--mode", "text", "--temperature", "0", "--top-logprobs", "20",
        "--max-completion-length", "4", "-o", answers)  # fmt: skip
    worst = 0.0
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        ids = tokenizer.encode([row["request"]["prompt"]])[0].ids.tolist()
        entries = row["response"]["choices"][0]["logprobs"]["content"]
        expected = logprobs_of(network, ids + [entry["id"] for entry in entries])
        for at, entry in enumerate(entries):
            assert len(entry["top_logprobs"]) == 20
            for candidate in entry["top_logprobs"]:
                worst = max(worst, abs(candidate["logprob"] - float(expected[len(ids) - 1 + at, candidate["id"]])))
    assert worst < 2e-3


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_imported_answers_of_llama_cpp_have_the_models_log_probabilities(run, model, service, tmp_path, mode):
    tokenizer, network = model
    prompts: list[dict] = [
        {"messages": [{"role": "user", "content": one}]} if mode == "chat" else {"text": one} for one in PROMPTS[mode]
    ]
    data, answers = write(tmp_path / "prompts.jsonl", prompts), tmp_path / "answers.jsonl"
    run("query-teacher", f"{service}#teacher", data, "--mode", mode, "--top-logprobs", TOP_K, "--temperature", "0",
        "--max-completion-length", "40", "-o", answers)  # fmt: skip
    rows = [json.loads(line)["response"] for line in answers.read_text().splitlines()]
    assert any(row["usage"]["completion_tokens"] > len(row["choices"][0]["logprobs"]["content"]) for row in rows)
    source = find_smollm2()
    # Answers that are not valid UTF-8 are skipped.
    options = ["--precision", "float32", "--skip-invalid"]
    stderr = run("cache", "import", answers, "--tokenizer", source, *options, "-o", tmp_path / "ids").stderr
    assert "characters are not trained" in stderr
    run("cache", "import", answers, *options, "-o", tmp_path / "bytes")
    cache, bytes_cache, num_checked = TeacherCache(tmp_path / "ids"), TeacherCache(tmp_path / "bytes"), 0
    assert len(cache) > 2
    for number in range(len(cache)):
        stored = cache.read_document(number, None)
        segments = stored.document.segments
        (prompt,) = [one for one in PROMPTS[mode] if one == segments[0].text]
        if mode == "chat":
            messages = [{"role": "user", "content": prompt}]
            rendered = tokenizer.chat_template.render(messages, add_generation_prompt=True)
            content_start = rendered.rindex(prompt)
            prompt_ids = tokenizer.encode_rendered([rendered], [[(content_start, content_start + len(prompt))]])[
                0
            ].ids.tolist()
        else:
            prompt_ids = tokenizer.encode([segments[0].text])[0].ids.tolist()
        # A joined character is stored as tokens of one byte each; the model sampled the tokenizer's tokens.
        answer = tokenizer.encode([segments[-1].text])[0]
        ids, byte_ends = answer.ids.tolist(), answer.byte_ends.tolist()
        index_of_byte = {byte: at for at, byte in enumerate([0, *byte_ends[:-1]])}
        expected = logprobs_of(network, prompt_ids + ids)
        answer_start = len(segments[0].text.encode()) if mode == "text" else stored.tokens.byte_ends[0]
        one = stored.teacher_logprobs
        for at, position in enumerate(one.positions.tolist()):
            index = index_of_byte.get(int(stored.tokens.byte_ends[position - 1]) - answer_start)
            if index is None or index >= len(ids) or ids[index] != stored.tokens.ids[position]:
                break  # sampled as other tokens than the tokenizer encodes; the following context differs
            entries = slice(one.offsets[at], one.offsets[at + 1])
            for token, value in zip(one.ids[entries].tolist(), one.logprobs[entries].tolist(), strict=True):
                assert value == pytest.approx(float(expected[len(prompt_ids) + index - 1, token]), abs=5e-3)
            num_checked += 1
        # Without the tokenizer the same positions are scored, with the same values.
        without_tokenizer = bytes_cache.read_document(number, None)
        assert without_tokenizer.document.segments == segments
        assert without_tokenizer.teacher_logprobs.observed_logprobs.tolist() == one.observed_logprobs.tolist()
    assert num_checked > 40
