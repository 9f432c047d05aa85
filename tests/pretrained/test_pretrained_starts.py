"""Start tokens and windows of pretrained models: Gemma reads <bos>, Qwen and SmolLM2 read none."""

from __future__ import annotations

import inspect
import json
import math
import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from xtk.data.corpus_reader import Corpus
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan
from xtk.doctor.start_token_checks import start_tokens
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef, resolve_model_folder
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("XTK_MODELS", "missing"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="set XTK_MODELS, as nox -s real does without --short")
GEMMA, QWEN, SMOLLM2 = "gemma-3-270m.gguf", "qwen2.5-coder-0.5b-instruct.gguf", "smollm2-135m-instruct.gguf"
FUNCTIONS = [inspect.getsource(function) for function in (textwrap.dedent, textwrap.indent, json.dumps, json.load,
                                                         inspect.cleandoc, inspect.getdoc)]  # fmt: skip


def bits_of_windows(folder: Path, texts: list[str], limit: int, *, repeat_start: bool = True) -> tuple[float, int]:
    """Return bits and bytes of texts, window by window: own code. Later windows begin with the start token or not."""
    tokenizer, model = Tokenizer(folder), load_causal_lm(ModelRef(folder)).eval()
    front, bits, size = list(tokenizer.start_ids), 0.0, 0
    for sequence in tokenize_documents(tokenizer, [Document.from_text(text) for text in texts]):
        ids = [*sequence.ids.tolist()[:-1]]  # without the end token
        size += int(sequence.byte_ends[-1]) - (0 if front else int(sequence.byte_ends[0]))
        done = max(1, len(front))
        while done < len(ids):
            stop = min(limit if done <= 1 else done + limit // 2, len(ids))
            start = front if repeat_start or done <= 1 else []
            window = [*start, *ids[max(len(front), stop - limit + len(start)) : stop]]
            with torch.no_grad():
                logprobs = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
            fresh = range(len(window) - (stop - done), len(window))
            bits -= sum(float(logprobs[row - 1, window[row]]) for row in fresh) / math.log(2)
            done = stop
    return bits, size


@pytest.mark.parametrize(("name", "start"), [(GEMMA, ["<bos>"]), (QWEN, []), (SMOLLM2, [])])
def test_ids_of_a_gguf_file_equal_those_of_transformers(name, start):
    tokenizer = Tokenizer(resolve_model_folder(str(FOLDER / name), with_weights=True))
    own = AutoTokenizer.from_pretrained(FOLDER, gguf_file=name)
    assert [tokenizer.special_token_names[token] for token in tokenizer.start_ids] == start
    for text in ("The capital of France is", *FUNCTIONS[:2]):
        (sequence,) = tokenize_documents(tokenizer, [Document.from_text(text)])
        assert sequence.ids.tolist()[:-1] == own(text).input_ids


@pytest.mark.parametrize(("name", "limit"), [(GEMMA, 512), (GEMMA, 64), (SMOLLM2, 64)])
def test_bits_per_byte_of_windows_equal_own_code(name, limit):
    folder = resolve_model_folder(str(FOLDER / name), with_weights=True)
    texts = [" ".join(FUNCTIONS[:2])]
    scored = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder),
        [Document.from_text(text) for text in texts],
        max_length=limit,
    )  # fmt: skip
    bits, size = bits_of_windows(folder, texts, limit)
    assert (scored.bits, scored.bytes) == (pytest.approx(bits, rel=1e-4), size)


def test_every_window_of_gemma_begins_with_its_start_token():
    """With <bos> in the first window only: 1.68 instead of 1.51 bits per byte at 512, 1.93 instead of 1.60 at 64."""
    folder = resolve_model_folder(str(FOLDER / GEMMA), with_weights=True)
    model, tokenizer, text = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder), "\n".join(FUNCTIONS)
    result = evaluate_bits_per_byte(model, tokenizer, [Document.from_text(text)], max_length=64)
    bits, size = bits_of_windows(folder, [text], 64, repeat_start=False)
    assert result.bytes == size
    assert result.bits < 0.95 * bits


def test_functions_cost_qwen_a_third_more_after_a_start_token():
    """First measured: 0.666 without, 0.942 after <|endoftext|>, on other functions."""
    folder = resolve_model_folder(str(FOLDER / QWEN), with_weights=True)
    model, documents = (
        BackboneWithHead(load_causal_lm(ModelRef(folder))),
        [Document.from_text(text[:600]) for text in FUNCTIONS],
    )
    without = Tokenizer(folder)
    bits = {
        name: evaluate_bits_per_byte(
            model, without.with_start_token(name), documents, compared_with=[without]
        ).bits_per_byte
        for name in ("auto", "bos")
    }
    assert bits["bos"] > 1.3 * bits["auto"], bits


def test_a_rollout_of_qwen_does_not_repeat_itself(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The capital of France is"}\n')
    run("rollout", FOLDER / QWEN, prompts, "--temperature", 0, "--max-completion-length", 12, "-o",
        tmp_path / "rollouts.jsonl", timeout=600)  # fmt: skip
    text = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[0])["completion"]
    assert "Paris" in text
    assert "the capital of the capital of" not in text


def test_doctor_compares_the_start_tokens_of_pretrained_models(tmp_path):
    """SmolLM2-135M-Instruct predicts texts better after <|endoftext|> than without a start token."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in FUNCTIONS))
    models = [
        DoctorModel.read(role, resolve_model_folder(str(FOLDER / name), with_weights=True), name)
        for role, name in (("student", SMOLLM2), ("teacher", GEMMA))
    ]
    first, second, level = start_tokens(DoctorInputs(models[0], models[1], RunPlan(), corpus=Corpus([str(data)])))
    bits = first.figures["bits_per_byte"]
    print(bits)
    assert min(bits, key=bits.__getitem__) == "<|endoftext|>"
    assert bits["<|endoftext|>"] < 0.99 * bits["no start token"]
    assert first.hint.startswith("use --start-token '<|endoftext|>' in every command")
    assert second.level == "ok"
    assert np.isfinite(list(second.figures["bits_per_byte"].values())).all()
    assert second.figures["bits_per_byte"]["no start token"] > 1.2 * second.figures["bits_per_byte"]["<bos>"]
    assert level.figures["bits_per_byte"]["all"]["teacher"] < level.figures["bits_per_byte"]["all"]["student"]
