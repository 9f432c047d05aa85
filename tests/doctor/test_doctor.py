"""The doctor finds what was made wrong, and nothing in what is right; what it forecasts is what a model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import small_inputs
import tokenizers
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.doctor import CHECKS
from xtk.doctor.all_checks import run_checks
from xtk.doctor.cache_and_loss_checks import auto_loss, cache_identity, projection
from xtk.doctor.chat_template_checks import duplicate_start_token, template_content
from xtk.doctor.data_checks import compression, conversations, document_lengths, special_tokens_in_text
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding, RunPlan
from xtk.doctor.environment_checks import library_versions
from xtk.doctor.fake_tensor_memory import measure_footprint
from xtk.doctor.library_memory import library_bytes
from xtk.doctor.memory_disk_and_time_estimates import (
    disk,
    estimate_training_memory,
    max_pass_tokens,
    memory,
)
from xtk.doctor.vocabulary_checks import embedding_rows, special_tokens
from xtk.doctor.weight_checks import attention, dtypes, weight_tensors
from xtk.errors import CorruptError, XtkError
from xtk.losses.loss_spec import parse_losses
from xtk.models.causal_lm import load_causal_lm
from xtk.models.packed_attention import ATTENTION_NAME, register_attention
from xtk.tokens.token_sequence import tokenize_documents
from xtk.training.losses_per_teacher import assign_losses, open_teachers
from xtk.training.parallel_config import parse_parallel

PLAIN = (
    "{% for message in messages %}<|pad|>{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)
DROPPING = PLAIN.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1].strip() }}")


def side(role: str, folder: Path) -> DoctorModel:
    return DoctorModel.read(role, folder, folder.name)


def case_of(pair, corpus: Path | None = None, cache: Path | None = None, **plan) -> DoctorInputs:
    return DoctorInputs(
        side("student", pair.student),
        side("teacher", pair.teacher),
        RunPlan(**plan),
        TeacherCache(cache) if cache else None,
        Corpus([str(corpus)]) if corpus else None,
    )


@pytest.fixture
def wrong(pair, tmp_path):
    """A copy of the pair, for making it wrong."""
    return small_inputs.Pair(
        shutil.copytree(pair.student, tmp_path / "student"), shutil.copytree(pair.teacher, tmp_path / "teacher")
    )


def rewrite(path: Path, **changes: object) -> None:
    """Change values of a JSON file; None takes one away."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def found(findings, level: str, says: str) -> Finding:
    """Return the one finding of a level that says something."""
    every = list(findings)
    (one,) = [finding for finding in every if finding.level == level and says in finding.what]
    return one


@pytest.mark.slow
def test_a_clean_pair_ends_with_0_and_a_wrong_one_with_1(run, pair, wrong, corpus, cache, tmp_path):
    done = run("doctor", pair.student, pair.teacher, corpus, "--json", "-o", tmp_path / "out")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["level"] for one in told} <= {"ok", "note", "warning"}
    # These speak where there is a template, a cache, conversations, or something wrong.
    silent = {
        "duplicate_start_token", "cache_identity", "conversations", "special_tokens_in_text", "weight_tensors",
        "regions", "reasoning_and_tools",
    }  # fmt: skip
    assert {one["check"] for one in told} >= {place.partition(":")[2] for place in CHECKS} - silent
    assert run("doctor", pair.student, pair.teacher, cache, corpus).stdout.splitlines()[-1].endswith("0 errors")
    assert run("doctor", pair.student, pair.teacher).returncode == 0
    rewrite(wrong.student / "config.json", vocab_size=700)
    done = run("doctor", wrong.student, wrong.teacher, corpus, "--json", code=1)
    (error,) = [one for one in map(json.loads, done.stdout.splitlines()) if one["level"] == "error"]
    assert error["check"] == "embedding_rows"
    assert "656 rows, but vocab_size in config.json is 700" in error["message"]
    assert not (tmp_path / "out").exists()


def test_rows(wrong):
    assert {one.level for one in embedding_rows(case_of(wrong))} == {"ok"}
    small = {"model.embed_tokens.weight": np.zeros((600, 4), np.float32)}
    safetensors.numpy.save_file(small, wrong.student / "model.safetensors")
    rewrite(wrong.student / "config.json", vocab_size=600)
    assert (
        "--resize-vocabulary"
        in found(embedding_rows(case_of(wrong)), "error", "600 rows, but the tokenizer has 640 tokens").hint
    )
    (wrong.teacher / "model.safetensors").unlink()
    assert found(embedding_rows(case_of(wrong)), "note", "the folder has no weights").where.startswith(
        "teacher"
    )  # by its name a model of the hub
    path = wrong.student / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptError, match="bytes, but its safetensors header requires"):
        case_of(wrong)


def test_files_and_tensors_that_are_not_there(wrong):
    assert not list(weight_tensors(case_of(wrong)))
    model, whole = load_causal_lm(wrong.teacher), wrong.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(whole)
    lost = {name: one for name, one in stored.items() if "layers.1" not in name}
    safetensors.numpy.save_file(lost, whole)
    one = found(weight_tensors(case_of(wrong)), "error", "missing tensors of the model")
    assert (one.where, one.figures) == ("teacher teacher", {"missing_tensors": len(stored) - len(lost)})
    safetensors.numpy.save_file({**stored, "model.norm.weight": np.ones(3, np.float32)}, whole)
    assert found(
        weight_tensors(case_of(wrong)), "error", "whose shape does not match config.json: 1 (model.norm.weight)"
    )
    whole.unlink()
    model.save_pretrained(wrong.teacher, max_shard_size="60KB")
    assert not list(weight_tensors(case_of(wrong)))
    files = sorted(wrong.teacher.glob("*.safetensors"))
    files[1].unlink()
    assert found(
        weight_tensors(case_of(wrong)), "error", f"missing weight files: 1 of {len(files)} ({files[1].name})"
    ).hint
    rewrite(wrong.student / "config.json", quantization_config={"quant_method": "fp8"}, num_hidden_layers=9)
    assert {one.where for one in weight_tensors(case_of(wrong))} == {"teacher teacher"}, (
        "of packed weights nothing is said"
    )


def test_special_tokens(wrong):
    assert found(special_tokens(case_of(wrong)), "ok", "matched special tokens").figures["matched"] >= 2
    rewrite(wrong.teacher / "generation_config.json", eos_token_id=[0])
    assert found(special_tokens(case_of(wrong)), "warning", "eos_token_id is").figures == {"eos_token_id": [0]}
    rewrite(wrong.student / "tokenizer_config.json", pad_token="<|end_of_text|>")
    assert found(special_tokens(case_of(wrong)), "note", "pad and eos are the same token").where.startswith("student")
    rewrite(wrong.student / "tokenizer_config.json", eos_token=None)
    findings = list(special_tokens(case_of(wrong)))
    assert found(findings, "warning", "the tokenizer has no eos token").where.startswith("student")
    assert (
        "--special-tokens"
        in found(findings, "warning", "the end-of-text tokens of student and teacher do not match").hint
    )


def test_a_start_token_that_is_written_twice(wrong):
    (wrong.student / "chat_template.jinja").write_text("{{ bos_token }}" + PLAIN)
    assert "the chat template adds" in found(duplicate_start_token(case_of(wrong)), "ok", "start token").what
    backend = tokenizers.Tokenizer.from_file(str(wrong.student / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    backend.save(str(wrong.student / "tokenizer.json"))
    assert "add_special_tokens=False" in found(duplicate_start_token(case_of(wrong)), "warning", "get it twice").hint


def test_templates_that_rewrite(wrong, tmp_path):
    talk = {"messages": [{"role": "user", "content": "Two?"},
                         {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nYes, two."}]}  # fmt: skip
    data = tmp_path / "talks.jsonl"
    data.write_text(json.dumps(talk) + "\n")
    assert {one.level for one in template_content(case_of(wrong))} == {"ok"}
    assert found([*template_content(case_of(wrong, data))][:1], "error", "no chat template").where.startswith("student")
    for folder in (wrong.student, wrong.teacher):
        (folder / "chat_template.jinja").write_text(PLAIN)
    whole = case_of(wrong, data)
    assert {one.level for one in (*template_content(whole), *conversations(whole))} == {"ok"}
    (wrong.student / "chat_template.jinja").write_text(DROPPING)
    dropping = case_of(wrong, data)
    assert {one.where.split()[0] for one in template_content(dropping) if one.level == "note"} == {"student"}
    assert found(template_content(dropping), "note", "removes thoughts from answers").figures["bytes"] > 20
    assert found(template_content(dropping), "note", "changes white space")
    assert found(conversations(dropping), "warning", "are not trained").figures["bytes"] > 20
    thinking = PLAIN.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    (wrong.student / "chat_template.jinja").write_text(thinking)
    assert found(template_content(case_of(wrong)), "note", "adds <think> to answers without one")
    (wrong.student / "chat_template.jinja").write_text("{{ raise_exception('not so') }}")
    assert "not so" in found(template_content(case_of(wrong, data)), "error", "refuses").what


def test_attention_and_dtypes(wrong):
    assert {one.level for one in attention(case_of(wrong))} == {"ok"}
    rewrite(wrong.student / "config.json", model_type="bloom")
    assert found(attention(case_of(wrong)), "warning", "square of the sequence length")
    assert found(attention(case_of(wrong, attn_implementation="sdpa")), "error", "does not support sdpa").hint
    rewrite(wrong.student / "config.json", model_type="nobody-knows")
    assert found(attention(case_of(wrong)), "error", "of type nobody-knows")
    rewrite(wrong.student / "config.json", auto_map={"AutoModelForCausalLM": "model.Own"})
    assert "--trust-remote-code" in found(attention(case_of(wrong)), "warning", "Python code").hint
    assert found(dtypes(case_of(wrong, dtype="bfloat16")), "warning", "lose updates")
    assert found(dtypes(case_of(wrong, dtype="float16")), "error", "--dtype float16 cannot be trained")
    rewrite(wrong.student / "config.json", quantization_config={"quant_method": "fp8"})
    assert found(dtypes(case_of(wrong)), "error", "the student has quantized weights, which cannot be trained")


def test_lengths(pair, tmp_path):
    texts = [*small_inputs.sentences(8), " ".join(small_inputs.sentences(30))]
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", texts)
    findings = list(document_lengths(case_of(pair, data)))
    assert [one.level for one in findings] == ["error", "error"]
    assert [one.hint.split()[2] for one in findings] == ["distill", "cache-teacher"]
    case = case_of(pair, data, long_documents="truncate")
    assert [one.level for one in document_lengths(case)] == ["warning", "warning"]
    sizes = [len(one) for one in tokenize_documents(case.student.tokenizer, list(case.corpus))]
    figures = next(iter(document_lengths(case))).figures
    assert figures == {
        "longest_tokens": max(sizes),
        "limit_tokens": 256,
        "documents_too_long": sum(size > 256 for size in sizes),
    }
    assert max_pass_tokens(case) == sum(sorted((min(size, 256) for size in sizes), reverse=True)[:8])
    assert max_pass_tokens(case_of(pair, data, max_batch_tokens=300)) == 300
    short = small_inputs.write_jsonl(tmp_path / "short.jsonl", texts[:8])
    assert [one.level for one in document_lengths(case_of(pair, short))] == ["ok", "ok"]


def test_data_that_spells_special_tokens(pair, corpus, tmp_path):
    assert not list(special_tokens_in_text(case_of(pair, corpus)))
    texts = ["One.<|im_end|>", *small_inputs.sentences(3)]
    case = case_of(pair, small_inputs.write_jsonl(tmp_path / "data.jsonl", texts))
    assert found(special_tokens_in_text(case), "warning", "<|im_end|>").figures == {"document_fraction": 0.25}


def test_compression_and_alignment(pair, corpus):
    case = case_of(pair, corpus)
    figures = found(compression(case), "ok", "bytes per token").figures
    texts = [document.text for document in case.corpus]
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(len(one) for one in tokenize_documents(case.teacher.tokenizer, list(case.corpus)))
    assert figures["bytes"] == size
    assert figures["teacher_bytes_per_token"] == pytest.approx(size / tokens, abs=1e-4)
    assert found(compression(case), "ok", "are aligned").figures["aligned_byte_fraction"] == 1.0
    assert found(compression(case_of(pair)), "note", "without a cache or data")


def test_projection_and_loss(pair, cache, corpus):
    figures = found(projection(case_of(pair)), "warning", "no counterpart with equal bytes").figures
    assert figures["poorly_matched_categories"] == ["digits"]
    assert sum(figures["rows"].values()) == 656
    alone = small_inputs.Pair(pair.student, pair.student)
    assert found(projection(case_of(alone)), "ok", "the same tokenizer")
    assert found(auto_loss(case_of(alone)), "ok", "auto chooses").figures["losses"] == ["ce", "forward-kl"]
    case = case_of(pair, cache=cache)
    teachers = open_teachers([str(cache)], (), case.student.tokenizer)
    _, told = assign_losses(parse_losses(["auto"]), teachers)
    one = found(auto_loss(case), "ok", "auto chooses")
    assert " and ".join(one.figures["losses"]) in told
    assert one.what.partition(", because ")[2] == told.partition(", because ")[2]
    assert found(cache_identity(case), "ok", "support top-k").where == "cache of teacher"
    other = DoctorInputs(case.teacher, case.student, RunPlan(), TeacherCache(cache))
    assert found(cache_identity(other), "error", "teacher with another tokenizer").hint


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_cache_or_data_where_a_model_should_be_is_told_at_once(run, pair, cache, corpus, role):
    for wrong, told in (
        (cache, f"the {role} must be a model, and this is a teacher cache"),
        (corpus, "this is another file"),
    ):
        models = {"student": pair.student, "teacher": pair.teacher, role: wrong}
        done = run("doctor", models["student"], models["teacher"], corpus, code=1)
        assert told in done.stderr
        assert f"where: {wrong}" in done.stderr
        assert done.stdout == ""


def test_a_cache_of_other_weights(wrong, cache):
    assert found(cache_identity(case_of(wrong, cache=cache)), "ok", "same weights as this teacher")
    whole = wrong.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(whole)
    safetensors.numpy.save_file({name: one + 1 for name, one in stored.items()}, whole)
    assert "cache-teacher" in found(cache_identity(case_of(wrong, cache=cache)), "warning", "other weights").hint
    whole.unlink()
    assert found(
        cache_identity(case_of(wrong, cache=cache)), "ok", "weights not compared: the teacher's folder has none"
    )


def test_a_pass_on_tensors_without_content_holds_what_a_real_one_does(pair):
    """What is kept for the backward pass, and the peak, against tensors that are there."""
    model = load_causal_lm(pair.student)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    told = measure_footprint(pair.student, 200)
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(held.values()) <= told.weights <= sum(held.values()) + 4096  # and the angles of positions
    assert told.head_bytes == 4 * 656 * 32
    assert told.vocab_size == 656
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(input_ids=torch.zeros(1, 200, dtype=torch.int64), use_cache=False).last_hidden_state
    saved[states.untyped_storage().data_ptr()] = states
    own = sum(one.untyped_storage().nbytes() for place, one in saved.items() if place not in held)
    assert told.kept_activations == pytest.approx(own, rel=0.1)
    assert told.backward_peak >= told.kept_activations
    # Twice the tokens keep twice as much; checkpoints keep less, and nothing is kept of what is not trained.
    assert measure_footprint(pair.student, 400).kept_activations == pytest.approx(2 * told.kept_activations, rel=0.02)
    assert (
        measure_footprint(pair.student, 200, gradient_checkpointing=True).kept_activations < told.kept_activations / 2
    )
    assert measure_footprint(pair.student, 200, train=False).kept_activations < told.kept_activations / 4


def test_the_margin_for_the_heap_is_0_where_freed_memory_is_returned(pair, corpus, monkeypatch):
    def margin(**plan: object) -> float:
        parts = estimate_training_memory(case_of(pair, corpus, **plan)).bytes_by_purpose
        return parts["heap fragmentation"] / parts["gradients and activations"]

    assert margin() == pytest.approx(0.2, rel=1e-3)
    assert margin(gradient_checkpointing=True) == pytest.approx(1, rel=1e-3)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    assert margin() == 0


@pytest.mark.slow
def test_memory_and_layouts(pair, corpus):
    said = [one.figures["command"] for one in memory(case_of(pair, corpus))]
    assert said == ["cache-teacher", "distill"]
    one = estimate_training_memory(case_of(pair, corpus))
    small = measure_footprint(pair.student, 1)
    weights = small.weights
    assert one.bytes_by_purpose["weights"] == weights
    assert one.bytes_by_purpose["AdamW"] == 2 * small.trained_weights
    adapted = estimate_training_memory(case_of(pair, corpus, lora_r=4))
    assert 0 < adapted.bytes_by_purpose["AdamW"] < small.trained_weights
    assert adapted.bytes_by_purpose["adapter merging"] > weights
    # A second pass of a step has the gradients of the first beside its own.
    steps = estimate_training_memory(case_of(pair, corpus, gradient_accumulation_steps=2))
    more = steps.bytes_by_purpose["gradients and activations"] - one.bytes_by_purpose["gradients and activations"]
    assert small.trained_weights / 2 < more < 2 * small.trained_weights
    shared = estimate_training_memory(case_of(pair, corpus, parallel=parse_parallel("fsdp=4", 4)))
    assert shared.bytes_by_purpose["weights"] == weights // 4
    assert shared.bytes_by_purpose["gathered weights"] > 0
    replicas = estimate_training_memory(case_of(pair, corpus, parallel=parse_parallel("", 2)))
    assert replicas.bytes_by_purpose["DDP buckets"] == small.trained_weights
    huge = case_of(pair, None, max_batch_tokens=0, per_device_train_batch_size=10**9)
    assert found(memory(huge), "error", "distill").hint


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--lora-r", 4, "--lora-target-modules", "nope"), "no module of the student called 'nope'"),
        (("--attn-implementation", "nope"), 'attn_implementation="nope"'),
    ],
)
def test_options_that_distill_refuses_are_errors(run, pair, corpus, options, what):
    done = run("doctor", pair.student, pair.teacher, corpus, *options, "--json", code=1)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    (error,) = (one for one in found if one.get("level") == "error")
    assert what in error["message"]


def test_disk_hours_and_versions(pair, corpus, cache):
    case = case_of(pair, corpus, tokens_per_second=100.0)
    tokens = sum(len(one) for one in tokenize_documents(case.teacher.tokenizer, list(case.corpus)))
    assert found(disk(case), "ok", "tokens per second").figures["teacher_seconds"] == pytest.approx(tokens / 100)
    assert found(disk(case_of(pair, corpus)), "note", "the teacher's time is not estimated").hint
    assert found(disk(case), "ok", "cache size: about").figures["positions"] < tokens
    parameters = sum(one.numel() for one in load_causal_lm(pair.student).parameters())
    assert found(disk(case), "ok", "checkpoints: at most").figures["checkpoint_bytes"] == 4 * parameters * 10
    adapted = found(disk(case_of(pair, lora_r=2)), "ok", "checkpoints: at most").figures["checkpoint_bytes"]
    assert 4 * parameters < adapted < 8 * parameters  # the merged student, and small adapters
    assert found(disk(case_of(pair, cache=cache)), "ok", "per position").figures["documents"] == 40
    assert found(disk(case_of(pair, save_total_limit=10**9)), "error", "checkpoints: at most").hint
    assert found(library_versions(case), "ok", "Python").figures["torch"] == torch.__version__


def test_the_cache_of_another_top_k_is_about_as_large_as_was_forecast(run, wrong, tmp_path):
    configuration = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(wrong.teacher)
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(20))
    run("cache-teacher", wrong.teacher, data, "--top-k", 512, "-o", tmp_path / "cache")
    written = found(disk(case_of(wrong, cache=tmp_path / "cache")), "ok", "per position").figures["bytes"]
    one = found(disk(case_of(wrong, data, top_k=512)), "ok", "extrapolated from caches with 64 ids")
    assert written / 1.5 < one.figures["bytes"] < 1.5 * written


def test_libraries_that_end_without_a_word_are_told(monkeypatch, tmp_path):
    """As the kernel ends a process when there is no memory: by a signal, with nothing said."""
    (tmp_path / "silent.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(XtkError, match=r"(?s)cannot import.*SIGKILL"):
        library_bytes("", "silent")


def test_what_libraries_take_is_measured_once_for_what_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "xtk.doctor.library_memory.IMPORT_CODE", "from xtk.doctor.library_memory import resident"
    )  # the rest takes seconds
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "counted.py").write_text(
        f"with open({str(tmp_path / 'log')!r}, 'a') as log:\n    log.write('once\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def measured() -> tuple[int, int]:
        library_bytes.cache_clear()  # as another process
        return library_bytes("", "counted"), len((tmp_path / "log").read_text().splitlines())

    first, times = measured()
    assert times == 1
    assert measured() == (first, 1)
    (kept,) = (tmp_path / "cache" / "libraries").iterdir()
    kept.write_text("damaged")
    assert measured()[1] == 2
    (tmp_path / "another-1.0.dist-info").mkdir()
    assert measured()[1] == 3
    monkeypatch.setenv("XTK_CACHE", "/proc/nowhere")
    assert measured()[1] == 4  # nothing can be kept there
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LD_SOMETHING", "\udcff")  # no UTF-8
    assert measured()[1] == 5
    library_bytes.cache_clear()


def test_one_cause_is_told_once(pair, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    talk = {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    for name, told, sides in (("empty", "no document", 1), ("talks", "no chat template", 2)):
        findings = list(run_checks(case_of(pair, tmp_path / f"{name}.jsonl")))
        assert [one.level for one in findings if told in one.what] == sides * ["error"]


def test_a_check_that_cannot_be_made_is_an_error(pair, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    findings = list(run_checks(case_of(pair, broken)))
    assert len([one for one in findings if one.level == "error" and str(broken) in one.where]) == 1
    assert {one.check for one in findings} >= {"embedding_rows", "library_versions"}
