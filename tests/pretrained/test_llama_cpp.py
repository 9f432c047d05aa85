"""llama.cpp itself: the weights that xtk reads from its files, and its server as a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llama_cpp_server import served, write_single_precision
from transformers import AutoModelForCausalLM

from xtk.artifacts.model_resolver import resolve_model_folder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.quickstart.demo_pipeline import find_pretrained_teacher
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.tokens.tokenizer import Tokenizer

TOP = 8
# llama.cpp writes one entry for the two to four tokens of an emoji or of a character of Chinese.
PROMPTS = {
    "chat": ["What is 2+2?", "Write ten emoji 🎉🎁 for a party.", "Write 你好 and explain it.", "Name a cheese."],
    "text": ["The capital of France is", "🎉🎁🎉🎁🎉🎁🎉", "日本語の", "1, 2, 3,"],
}


@pytest.fixture(scope="module")
def model() -> tuple[Tokenizer, torch.nn.Module]:
    folder = resolve_model_folder(str(find_pretrained_teacher()), with_weights=True)
    return Tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server in single precision: llama.cpp rounds activations for quantized weights."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    exact = write_single_precision(find_pretrained_teacher(), folder / "model.gguf")
    with served(exact, folder / "log", "--exact") as url:
        yield url
    exact.unlink()


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_weights_of_a_gguf_file_give_the_log_probabilities_of_llama_cpp(run, model, service, tmp_path):
    """On 20 texts, 4 tokens after each: measured 2e-4 (2026-11-26)."""
    tokenizer, net = model
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
        truth = logprobs_of(net, ids + [entry["id"] for entry in entries])
        for at, entry in enumerate(entries):
            assert len(entry["top_logprobs"]) == 20
            for one in entry["top_logprobs"]:
                worst = max(worst, abs(one["logprob"] - float(truth[len(ids) - 1 + at, one["id"]])))
    assert worst < 2e-3


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_answers_of_its_server_become_the_models_own_log_probabilities(run, model, service, tmp_path, mode):
    tokenizer, net = model
    prompts: list[dict] = [
        {"messages": [{"role": "user", "content": one}]} if mode == "chat" else {"text": one} for one in PROMPTS[mode]
    ]
    data, answers = write(tmp_path / "prompts.jsonl", prompts), tmp_path / "answers.jsonl"
    run("query-teacher", f"{service}#teacher", data, "--mode", mode, "--top-logprobs", TOP, "--temperature", "0",
        "--max-completion-length", "40", "-o", answers)  # fmt: skip
    rows = [json.loads(line)["response"] for line in answers.read_text().splitlines()]
    assert any(row["usage"]["completion_tokens"] > len(row["choices"][0]["logprobs"]["content"]) for row in rows)
    source = find_pretrained_teacher()
    # An answer that is no UTF-8 is invalid.
    options = ["--precision", "float32", "--skip-invalid"]
    said = run("import-cache", answers, "--tokenizer", source, *options, "-o", tmp_path / "ids").stderr
    assert "characters are not trained" in said
    run("import-cache", answers, *options, "-o", tmp_path / "bytes")
    cache, by_bytes, checked = TeacherCache(tmp_path / "ids"), TeacherCache(tmp_path / "bytes"), 0
    assert len(cache) > 2
    for number in range(len(cache)):
        stored = cache.read_document(number, None)
        segments = stored.document.segments
        (prompt,) = [one for one in PROMPTS[mode] if one == segments[0].text]
        if mode == "chat":
            messages = [{"role": "user", "content": prompt}]
            rendered = tokenizer.chat_template.render(messages, add_generation_prompt=True)
            content = rendered.rindex(prompt)
            start = tokenizer.encode_rendered([rendered], [[(content, content + len(prompt))]])[0].ids.tolist()
        else:
            start = tokenizer.encode([segments[0].text])[0].ids.tolist()
        # In the cache a joined character is tokens of one byte; the model sampled the tokens of the tokenizer.
        answer = tokenizer.encode([segments[-1].text])[0]
        ids, ends = answer.ids.tolist(), answer.byte_ends.tolist()
        place_of_start = {before: at for at, before in enumerate([0, *ends[:-1]])}
        truth = logprobs_of(net, start + ids)
        first = len(segments[0].text.encode()) if mode == "text" else stored.tokens.byte_ends[0]
        one = stored.teacher_logprobs
        for at, position in enumerate(one.positions.tolist()):
            place = place_of_start.get(int(stored.tokens.byte_ends[position - 1]) - first)
            if place is None or place >= len(ids) or ids[place] != stored.tokens.ids[position]:
                break  # sampled in other pieces than the tokenizer writes; the context of what follows is another one
            entries = slice(one.offsets[at], one.offsets[at + 1])
            for token, value in zip(one.ids[entries].tolist(), one.logprobs[entries].tolist(), strict=True):
                assert value == pytest.approx(float(truth[len(start) + place - 1, token]), abs=5e-3)
            checked += 1
        # Without the tokenizer the same positions are scored, with the same values.
        other = by_bytes.read_document(number, None)
        assert other.document.segments == segments
        assert other.teacher_logprobs.observed_logprobs.tolist() == one.observed_logprobs.tolist()
    assert checked > 40
