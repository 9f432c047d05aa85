"""`xtk doctor`: findings for valid and faulty inputs, and estimates of memory, disk space and time."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import small_inputs
import torch
from pseudo_terminal import frames, run_in_terminal
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.batches.losses_per_teacher import assign_losses, open_teachers
from xtk.cache.reader import TeacherCache
from xtk.commands.doctor import _print_findings, _shorten_path
from xtk.data.corpus_reader import Corpus
from xtk.doctor import CHECKS
from xtk.doctor.all_checks import run_checks
from xtk.doctor.cache_and_loss_checks import auto_loss, cache_identity, projection
from xtk.doctor.conversation_checks import template_content
from xtk.doctor.data_checks import compression, conversations, document_lengths, special_tokens_in_text
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding, RunPlan
from xtk.doctor.environment_checks import library_versions
from xtk.doctor.memory_and_disk_estimates import ModelSizes, disk, estimate_training_memory, memory
from xtk.doctor.model_checks import attention, dtypes, embedding_rows, special_tokens, weight_tensors
from xtk.errors import CorruptError
from xtk.losses.spec import parse_losses
from xtk.models.causal_lm import load_causal_lm
from xtk.models.packed_attention import ATTENTION_NAME, register_attention
from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import parse_parallel
from xtk.text.token_sequence import tokenize_documents

PLAIN_TEMPLATE = (
    "{% for message in messages %}<|pad|>{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)
TEMPLATE_WITHOUT_REASONING = PLAIN_TEMPLATE.replace(
    "{{ message.content }}", "{{ message.content.split('</think>')[-1].strip() }}"
)


def doctor_model(role: str, folder: Path) -> DoctorModel:
    return DoctorModel.read(role, folder, folder.name)


def doctor_inputs(pair, corpus: Path | None = None, cache: Path | None = None, **plan) -> DoctorInputs:
    return DoctorInputs(
        doctor_model("student", pair.student),
        doctor_model("teacher", pair.teacher),
        RunPlan(**plan),
        TeacherCache(cache) if cache else None,
        Corpus([str(corpus)]) if corpus else None,
    )


@pytest.fixture
def faulty(pair, tmp_path):
    """Return a copy of the pair that a test can make faulty."""
    return small_inputs.Pair(
        shutil.copytree(pair.student, tmp_path / "student"), shutil.copytree(pair.teacher, tmp_path / "teacher")
    )


def update_json(path: Path, **changes: object) -> None:
    """Change values of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def found(findings, level: str, text: str) -> Finding:
    """Return the only finding of a level whose message contains a text."""
    every = list(findings)
    (one,) = [finding for finding in every if finding.level == level and text in finding.what]
    return one


def printed_findings(capsys, findings, *names, all_of_them=False) -> list[str]:
    _print_findings(findings, names, all_of_them=all_of_them)
    return capsys.readouterr().out.splitlines()


def test_findings_are_printed_as_problems_costs_counts_and_a_verdict(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    findings = [
        Finding("ok", "4,000 tokens", f"student {model}", check="embedding_rows"),
        Finding("ok", "3,000 tokens", "teacher t", check="embedding_rows"),
        Finding("note", "no GPU was found", check="library_versions"),
        Finding("ok", "distill: 0.82 of 23.5 GiB", "x", check="memory"),
        Finding("warning", "the teacher is not better", "teacher t", "check it", check="teacher_level"),
    ]
    warning = ["warning teacher_level: the teacher is not better", "  where: teacher t", "  try:   check it"]
    cost = "ok      memory: distill: 0.82 of 23.5 GiB"
    printed = [*warning, cost, "3 checks passed, 1 note (-v prints them)"]
    assert printed_findings(capsys, findings) == [*printed, "ready: 1 warning to read before a long run"]
    assert printed_findings(capsys, findings[:4])[-1] == "ready: no problem was found"
    bad = Finding(
        "error", "600 rows, but 640 tokens", f"student {model}", "use another tokenizer", check="embedding_rows"
    )
    lines = printed_findings(capsys, [*findings, bad], str(model))
    assert lines[:3] == [
        "error   embedding_rows: 600 rows, but 640 tokens",
        "  where: student a/model",
        "  try:   use another tokenizer",
    ]
    assert lines[-2:] == [
        "2 checks passed, 1 note (-v prints them)",
        "1 error, 1 warning: the run would fail; do what is after try:",
    ]
    every = printed_findings(capsys, findings, all_of_them=True)
    assert [line.split()[0] for line in every if not line.startswith("  ")] == [
        "warning",
        "note",
        "ok",
        "ok",
        "ok",
        "3",
        "ready:",
    ]
    assert every[-2] == "3 checks passed, 1 note"


def test_paths_are_shortened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    (tmp_path.parent / "models" / "small").mkdir(parents=True)
    far = Path("/usr/share/zoneinfo/America/Argentina/Buenos_Aires")
    for name, short in [
        ("HuggingFaceTB/SmolLM2", "HuggingFaceTB/SmolLM2"),
        (str(tmp_path.parent / "models" / "small"), "~/models/small"),
        (str(far), ".../Argentina/Buenos_Aires" if far.exists() else str(far)),
    ]:
        assert _shorten_path(name) == short


@pytest.mark.slow
def test_doctor_fits_a_terminal_of_80_columns(pair, cache):
    folders = [str(place) for place in (pair.student, pair.teacher, cache)]
    code, written = run_in_terminal([sys.executable, "-m", "xtk", "doctor", *folders], pair.student.parent)
    lines = [line for line in frames(written) if not line.startswith("doctor: running, ")]
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert "checks passed" in lines[-2]
    assert lines[-1].startswith("ready: ")
    problems = sum(line.startswith("warning") for line in lines)
    assert len(lines) <= 15 + 6 * problems
    assert str(pair.student.parent) not in "".join(lines)


@pytest.mark.slow
def test_doctor_exits_with_0_for_a_valid_pair_and_with_1_for_an_invalid_one(run, pair, faulty, corpus, cache, tmp_path):
    done = run("doctor", pair.student, pair.teacher, corpus, "--json", "-o", tmp_path / "out")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["level"] for one in findings} <= {"ok", "note", "warning"}
    # These checks have findings only with a template, a cache, conversations or an error.
    conditional = {
        "cache_identity", "conversations", "special_tokens_in_text", "weight_tensors",
        "regions", "reasoning_and_tools",
    }  # fmt: skip
    assert {one["check"] for one in findings} >= {check.partition(":")[2] for check in CHECKS} - conditional
    assert run("doctor", pair.student, pair.teacher, cache, corpus).stdout.splitlines()[-1].startswith("ready: ")
    assert run("doctor", pair.student, pair.teacher).returncode == 0
    update_json(faulty.student / "config.json", vocab_size=700)
    done = run("doctor", faulty.student, faulty.teacher, corpus, "--json", code=1)
    (error,) = [one for one in map(json.loads, done.stdout.splitlines()) if one["level"] == "error"]
    assert error["check"] == "embedding_rows"
    assert "656 rows, but vocab_size in config.json is 700" in error["message"]
    assert not (tmp_path / "out").exists()


def test_embedding_rows(faulty):
    assert {one.level for one in embedding_rows(doctor_inputs(faulty))} == {"ok"}
    small = {"model.embed_tokens.weight": np.zeros((600, 4), np.float32)}
    safetensors.numpy.save_file(small, faulty.student / "model.safetensors")
    update_json(faulty.student / "config.json", vocab_size=600)
    assert (
        "resize_token_embeddings"
        in found(embedding_rows(doctor_inputs(faulty)), "error", "600 rows, but the tokenizer has 640 tokens").hint
    )
    (faulty.teacher / "model.safetensors").unlink()
    assert found(embedding_rows(doctor_inputs(faulty)), "note", "the folder has no weights").where.startswith(
        "teacher"
    )  # by its name, it could be a Hub model
    path = faulty.student / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptError, match="the weight file cannot be read"):
        doctor_inputs(faulty)


def test_missing_weight_files_and_tensors_are_errors(faulty):
    assert not list(weight_tensors(doctor_inputs(faulty)))
    model, weights_file = load_causal_lm(ModelRef(faulty.teacher)), faulty.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(weights_file)
    remaining = {name: one for name, one in stored.items() if "layers.1" not in name}
    safetensors.numpy.save_file(remaining, weights_file)
    one = found(weight_tensors(doctor_inputs(faulty)), "error", "missing tensors of the model")
    assert (one.where, one.figures) == ("teacher teacher", {"missing_tensors": len(stored) - len(remaining)})
    safetensors.numpy.save_file({**stored, "model.norm.weight": np.ones(3, np.float32)}, weights_file)
    assert found(
        weight_tensors(doctor_inputs(faulty)), "error", "whose shape does not match config.json: 1 (model.norm.weight)"
    )
    weights_file.unlink()
    model.save_pretrained(faulty.teacher, max_shard_size="60KB")
    assert not list(weight_tensors(doctor_inputs(faulty)))
    files = sorted(faulty.teacher.glob("*.safetensors"))
    files[1].unlink()
    assert found(
        weight_tensors(doctor_inputs(faulty)), "error", f"missing weight files: 1 of {len(files)} ({files[1].name})"
    ).hint
    update_json(faulty.student / "config.json", quantization_config={"quant_method": "fp8"}, num_hidden_layers=9)
    assert {one.where for one in weight_tensors(doctor_inputs(faulty))} == {"teacher teacher"}, (
        "no finding about packed weights"
    )


def test_special_tokens(faulty):
    assert found(special_tokens(doctor_inputs(faulty)), "ok", "matched special tokens").figures["matched"] >= 2
    update_json(faulty.teacher / "generation_config.json", eos_token_id=[0, 200])
    findings = list(special_tokens(doctor_inputs(faulty)))
    what = "stop tokens, one event: student <|end_of_text|>; teacher <|endoftext|>, <|im_end|>"
    assert found(findings, "ok", what).figures == {"stop_tokens": {"student": [1], "teacher": [0, 1]}}
    assert found(findings, "warning", "names stop tokens that are not special tokens and are ignored: 200")
    update_json(faulty.teacher / "generation_config.json", eos_token_id=[0])
    assert found(special_tokens(doctor_inputs(faulty)), "warning", "eos_token_id is").figures == {"eos_token_id": [0]}
    update_json(faulty.student / "tokenizer_config.json", eos_token=None)
    findings = list(special_tokens(doctor_inputs(faulty)))
    assert found(findings, "warning", "the tokenizer has no eos token").where.startswith("student")
    assert (
        "--special-tokens"
        in found(findings, "warning", "the end-of-text tokens of student and teacher do not match").hint
    )


def test_chat_templates_that_change_the_content_are_reported(faulty, tmp_path):
    answer = {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nYes, two. "}
    conversation = {"messages": [{"role": "user", "content": "Two?"}, answer]}
    data = tmp_path / "talks.jsonl"
    data.write_text(json.dumps(conversation) + "\n")
    assert {one.level for one in template_content(doctor_inputs(faulty))} == {"ok"}
    assert found([*template_content(doctor_inputs(faulty, data))][:1], "error", "no chat template").where.startswith(
        "student"
    )
    for folder in (faulty.student, faulty.teacher):
        (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    plain = doctor_inputs(faulty, data)
    assert {one.level for one in (*template_content(plain), *conversations(plain))} == {"ok"}
    (faulty.student / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_REASONING)
    without_reasoning = doctor_inputs(faulty, data)
    assert {one.where.split()[0] for one in template_content(without_reasoning) if one.level == "note"} == {"student"}
    assert found(template_content(without_reasoning), "note", "removes thoughts from answers").figures["bytes"] > 20
    assert found(template_content(without_reasoning), "note", "changes white space")
    assert found(conversations(without_reasoning), "warning", "are not trained").figures["bytes"] > 20
    adding_think = PLAIN_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    (faulty.student / "chat_template.jinja").write_text(adding_think)
    assert found(template_content(doctor_inputs(faulty, data)), "note", "adds <think> to answers without one")
    (faulty.student / "chat_template.jinja").write_text("{{ raise_exception('not so') }}")
    assert "not so" in found(template_content(doctor_inputs(faulty, data)), "error", "refuses").what


def test_attention_and_dtypes(faulty):
    assert {one.level for one in attention(doctor_inputs(faulty))} == {"ok"}
    update_json(faulty.student / "config.json", model_type="bloom")
    assert found(attention(doctor_inputs(faulty)), "warning", "square of the sequence length")
    assert found(attention(doctor_inputs(faulty, attn_implementation="sdpa")), "error", "does not support sdpa").hint
    assert found(attention(doctor_inputs(faulty, attn_implementation="eagr")), "error", "does not support eagr").hint
    update_json(faulty.student / "config.json", model_type="nobody-knows")
    assert found(attention(doctor_inputs(faulty)), "error", "of type nobody-knows")
    update_json(faulty.student / "config.json", auto_map={"AutoModelForCausalLM": "model.Own"})
    assert "--trust-remote-code" in found(attention(doctor_inputs(faulty)), "warning", "Python code").hint
    assert found(memory(doctor_inputs(faulty)), "note", "distill: the memory that the model needs cannot be estimated")
    assert found(dtypes(doctor_inputs(faulty, dtype="bfloat16")), "warning", "lose updates")
    assert found(dtypes(doctor_inputs(faulty, dtype="float16")), "error", "--dtype float16 cannot be trained")
    update_json(faulty.student / "config.json", quantization_config={"quant_method": "fp8"})
    assert found(dtypes(doctor_inputs(faulty)), "error", "the student has quantized weights, which cannot be trained")


def test_document_lengths(pair, tmp_path):
    texts = [*small_inputs.sentences(8), " ".join(small_inputs.sentences(30))]
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", texts)
    findings = list(document_lengths(doctor_inputs(pair, data)))
    assert [one.level for one in findings] == ["error", "error"]
    assert [one.hint.split()[2] for one in findings] == ["distill", "cache-teacher"]
    inputs = doctor_inputs(pair, data, long_documents="truncate")
    assert [one.level for one in document_lengths(inputs)] == ["warning", "warning"]
    lengths = [len(one) for one in tokenize_documents(inputs.student.tokenizer, list(inputs.corpus))]
    figures = next(iter(document_lengths(inputs))).figures
    assert figures == {
        "longest_tokens": max(lengths),
        "limit_tokens": 256,
        "documents_too_long": sum(length > 256 for length in lengths),
    }
    short = small_inputs.write_jsonl(tmp_path / "short.jsonl", texts[:8])
    assert [one.level for one in document_lengths(doctor_inputs(pair, short))] == ["ok", "ok"]


def test_data_with_special_tokens_in_its_text_is_a_warning(pair, corpus, tmp_path):
    assert not list(special_tokens_in_text(doctor_inputs(pair, corpus)))
    texts = ["One.<|im_end|>", *small_inputs.sentences(3)]
    inputs = doctor_inputs(pair, small_inputs.write_jsonl(tmp_path / "data.jsonl", texts))
    assert found(special_tokens_in_text(inputs), "warning", "<|im_end|>").figures == {"document_fraction": 0.25}


def test_compression_and_alignment(pair, corpus):
    inputs = doctor_inputs(pair, corpus)
    figures = found(compression(inputs), "ok", "bytes per token").figures
    texts = [document.text for document in inputs.corpus]
    num_bytes = sum(len(text.encode()) for text in texts)
    tokens = sum(len(one) for one in tokenize_documents(inputs.teacher.tokenizer, list(inputs.corpus)))
    assert figures["bytes"] == num_bytes
    assert figures["teacher_bytes_per_token"] == pytest.approx(num_bytes / tokens, abs=1e-4)
    assert found(compression(inputs), "ok", "are aligned").figures["aligned_byte_fraction"] == 1.0
    assert found(compression(doctor_inputs(pair)), "note", "without a cache or data")


def test_projection_auto_loss_and_cache_identity(pair, cache, corpus):
    figures = found(projection(doctor_inputs(pair)), "note", "no counterpart with equal bytes").figures
    assert figures["poorly_matched_categories"] == ["digits"]
    assert sum(figures["rows"].values()) == 656
    one_tokenizer = small_inputs.Pair(pair.student, pair.student)
    assert found(projection(doctor_inputs(one_tokenizer)), "ok", "the same tokenizer")
    assert found(auto_loss(doctor_inputs(one_tokenizer)), "ok", "auto chooses").figures["losses"] == [
        "ce",
        "forward-kl",
    ]
    inputs = doctor_inputs(pair, cache=cache)
    teachers = open_teachers([str(cache)], (), inputs.student.tokenizer)
    _, message = assign_losses(parse_losses(["auto"]), teachers)
    one = found(auto_loss(inputs), "ok", "auto chooses")
    assert " and ".join(one.figures["losses"]) in message
    assert one.what.partition(", because ")[2] == message.partition(", because ")[2]
    assert found(cache_identity(inputs), "ok", "support top-k").where == "cache of teacher"
    swapped = DoctorInputs(inputs.teacher, inputs.student, RunPlan(), TeacherCache(cache))
    assert found(cache_identity(swapped), "error", "teacher with another tokenizer").hint


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_cache_or_data_file_in_place_of_a_model_is_refused(run, pair, cache, corpus, role):
    for faulty, message in (
        (cache, f"the {role} must be a model, and this is a teacher cache"),
        (corpus, "a model must be a folder or a GGUF file, but this is another file"),
    ):
        models = {"student": pair.student, "teacher": pair.teacher, role: faulty}
        done = run("doctor", models["student"], models["teacher"], corpus, code=1)
        assert message in done.stderr
        assert f"where: {faulty}" in done.stderr
        assert done.stdout == ""


def test_a_cache_of_other_teacher_weights_is_a_warning(faulty, cache):
    assert found(cache_identity(doctor_inputs(faulty, cache=cache)), "ok", "same weights as this teacher")
    weights_file = faulty.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(weights_file)
    safetensors.numpy.save_file({name: one + 1 for name, one in stored.items()}, weights_file)
    assert "cache-teacher" in found(cache_identity(doctor_inputs(faulty, cache=cache)), "warning", "other weights").hint
    weights_file.unlink()
    assert found(
        cache_identity(doctor_inputs(faulty, cache=cache)), "ok", "weights not compared: the teacher's folder has none"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_covers_the_tensors_of_a_pass(tmp_path, pair, tied):
    """Compare the weights, and the values that layers keep for the backward pass, with those of real tensors."""
    folder = shutil.copytree(pair.student, tmp_path / "model")
    configuration = LlamaConfig(
        vocab_size=656, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    model = load_causal_lm(ModelRef(folder))
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    sizes = ModelSizes.read(folder)
    assert sizes.num_weights == sum(one.numel() for one in model.parameters())
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(input_ids=torch.zeros(1, 200, dtype=torch.int64), use_cache=False).last_hidden_state
    saved[states.untyped_storage().data_ptr()] = states
    activation_bytes = sum(
        one.untyped_storage().nbytes() for pointer, one in saved.items() if pointer not in parameters
    )
    models = doctor_model("student", folder), doctor_model("teacher", pair.teacher)
    estimate = estimate_training_memory(DoctorInputs(*models, RunPlan(max_length=200, per_device_train_batch_size=1)))
    logits_and_states = 200 * (4 * 656 + 3 * 4 * 64)
    assert estimate["activations"] - logits_and_states == pytest.approx(activation_bytes, rel=0.2)


@pytest.mark.slow
def test_memory_estimates_with_lora_and_parallelism(pair, corpus):
    commands = [finding.figures["command"] for finding in memory(doctor_inputs(pair, corpus))]
    assert commands == ["cache-teacher", "distill"]
    estimate = estimate_training_memory(doctor_inputs(pair, corpus))
    weights = 4 * ModelSizes.read(pair.student).num_weights
    assert estimate["weights"] == weights
    assert estimate["gradients and AdamW"] == 3 * weights
    with_lora = estimate_training_memory(doctor_inputs(pair, corpus, lora_r=4))
    assert 0 < with_lora["gradients and AdamW"] < weights
    assert with_lora["weights"] + with_lora["activations"] >= 2 * weights, "two copies"
    sharded = estimate_training_memory(doctor_inputs(pair, corpus, parallel=parse_parallel("fsdp=4", 4)))
    assert sharded["weights"] == weights // 4
    assert sharded["gathered weights"] > 0
    checkpointed = estimate_training_memory(doctor_inputs(pair, corpus, gradient_checkpointing=True))
    assert checkpointed["activations"] < estimate["activations"]
    huge = doctor_inputs(pair, None, max_batch_tokens=0, per_device_train_batch_size=10**9)
    assert found(memory(huge), "error", "distill").hint


def test_disk_and_library_versions(pair, corpus, cache):
    inputs = doctor_inputs(pair, corpus)
    tokens = sum(len(one) for one in tokenize_documents(inputs.teacher.tokenizer, list(inputs.corpus)))
    assert found(disk(inputs), "ok", "cache size: about").figures["positions"] < tokens
    parameters = sum(one.numel() for one in load_causal_lm(ModelRef(pair.student)).parameters())
    assert found(disk(inputs), "ok", "checkpoints: at most").figures["checkpoint_bytes"] == 4 * parameters * 10
    lora_checkpoint_bytes = found(disk(doctor_inputs(pair, lora_r=2)), "ok", "checkpoints: at most").figures[
        "checkpoint_bytes"
    ]
    assert 4 * parameters < lora_checkpoint_bytes < 8 * parameters  # the merged student plus small adapters
    assert found(disk(doctor_inputs(pair, cache=cache)), "ok", "checkpoints").figures["cache_bytes"] == 0
    assert found(disk(doctor_inputs(pair, save_total_limit=10**9)), "error", "checkpoints: at most").hint
    assert found(library_versions(inputs), "ok", "Python").figures["torch"] == torch.__version__


def test_one_cause_is_reported_once(pair, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    conversation = {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(conversation) + "\n")
    for name, text, num_models in (("empty", "no document", 1), ("talks", "no chat template", 2)):
        findings = list(run_checks(doctor_inputs(pair, tmp_path / f"{name}.jsonl")))
        assert [one.level for one in findings if text in one.what] == num_models * ["error"]


def test_a_check_that_cannot_run_is_an_error(pair, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    findings = list(run_checks(doctor_inputs(pair, broken)))
    assert len([one for one in findings if one.level == "error" and str(broken) in one.where]) == 1
    assert {one.check for one in findings} >= {"embedding_rows", "library_versions"}
