"""The doctor finds what was made wrong, and nothing in what is right; what it forecasts is what a model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import material
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.doctor import CHECKS
from xtk.doctor.case import Case, Finding, Plan, Side
from xtk.doctor.costs import _libraries, disk, memory, of_training, pass_tokens
from xtk.doctor.data import compression, conversations, lengths, spelled_tokens
from xtk.doctor.examine import examine
from xtk.doctor.footprint import footprint
from xtk.doctor.losses import caches, chosen, projection
from xtk.doctor.machine import versions
from xtk.doctor.templates import contents, starts
from xtk.doctor.vocabularies import rows, special_tokens
from xtk.doctor.weights import attention, dtypes, tensors
from xtk.errors import Damaged, XtkError
from xtk.losses import parse_losses
from xtk.models.attention import NAME, register
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.sequence import sequences
from xtk.training.layout import read_layout
from xtk.training.teachers import open_teachers, take_losses

PLAIN = (
    "{% for message in messages %}<|pad|>{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)
DROPPING = PLAIN.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1].strip() }}")


def side(role: str, folder: Path) -> Side:
    return Side.read(role, folder, folder.name)


def case_of(pair, corpus: Path | None = None, cache: Path | None = None, **plan) -> Case:
    return Case(
        side("student", pair.student),
        side("teacher", pair.teacher),
        Plan(**plan),
        TeacherCache(cache) if cache else None,
        Corpus([str(corpus)]) if corpus else None,
    )


@pytest.fixture
def wrong(pair, tmp_path):
    """A copy of the pair, for making it wrong."""
    return material.Pair(
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
    silent = {"starts", "caches", "conversations", "spelled_tokens", "tensors"}
    assert {one["check"] for one in told} >= {place.partition(":")[2] for place in CHECKS} - silent
    assert run("doctor", pair.student, pair.teacher, cache, corpus).stdout.splitlines()[-1].endswith("0 errors")
    assert run("doctor", pair.student, pair.teacher).returncode == 0
    rewrite(wrong.student / "config.json", vocab_size=700)
    done = run("doctor", wrong.student, wrong.teacher, corpus, "--json", code=1)
    (error,) = [one for one in map(json.loads, done.stdout.splitlines()) if one["level"] == "error"]
    assert error["check"] == "rows"
    assert "656 rows, and the configuration says 700" in error["what"]
    assert not (tmp_path / "out").exists()


def test_rows(wrong):
    assert {one.level for one in rows(case_of(wrong))} == {"ok"}
    small = {"model.embed_tokens.weight": np.zeros((600, 4), np.float32)}
    safetensors.numpy.save_file(small, wrong.student / "model.safetensors")
    rewrite(wrong.student / "config.json", vocab_size=600)
    assert "--resize-vocabulary" in found(rows(case_of(wrong)), "error", "600 rows; its tokenizer names 640").hint
    (wrong.teacher / "model.safetensors").unlink()
    assert found(rows(case_of(wrong)), "note", "no weights").where.startswith(
        "teacher"
    )  # by its name a model of the hub
    path = wrong.student / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Damaged, match="cut short"):
        case_of(wrong)


def test_files_and_tensors_that_are_not_there(wrong):
    assert not list(tensors(case_of(wrong)))
    model, whole = load_causal_lm(wrong.teacher), wrong.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(whole)
    lost = {name: one for name, one in stored.items() if "layers.1" not in name}
    safetensors.numpy.save_file(lost, whole)
    one = found(tensors(case_of(wrong)), "error", "missing tensors of the model")
    assert (one.where, one.figures) == ("teacher teacher", {"tensors": len(stored) - len(lost)})
    safetensors.numpy.save_file({**stored, "model.norm.weight": np.ones(3, np.float32)}, whole)
    assert found(
        tensors(case_of(wrong)), "error", "other shapes than the configuration gives them: 1 (model.norm.weight)"
    )
    whole.unlink()
    model.save_pretrained(wrong.teacher, max_shard_size="60KB")
    assert not list(tensors(case_of(wrong)))
    files = sorted(wrong.teacher.glob("*.safetensors"))
    files[1].unlink()
    assert found(
        tensors(case_of(wrong)), "error", f"missing files of weights: 1 of {len(files)} ({files[1].name})"
    ).hint
    rewrite(wrong.student / "config.json", quantization_config={"quant_method": "fp8"}, num_hidden_layers=9)
    assert {one.where for one in tensors(case_of(wrong))} == {"teacher teacher"}, "of packed weights nothing is said"


def test_special_tokens(wrong):
    assert found(special_tokens(case_of(wrong)), "ok", "they meet").figures["matched"] >= 2
    rewrite(wrong.teacher / "generation_config.json", eos_token_id=[0])
    assert found(special_tokens(case_of(wrong)), "warning", "the model stops at").figures == {"eos_token_id": [0]}
    rewrite(wrong.student / "tokenizer_config.json", pad_token="<|end_of_text|>")
    assert found(special_tokens(case_of(wrong)), "note", "pad is the token that eos is").where.startswith("student")
    rewrite(wrong.student / "tokenizer_config.json", eos_token=None)
    findings = list(special_tokens(case_of(wrong)))
    assert found(findings, "warning", "no token has the role eos").where.startswith("student")
    assert "--special-tokens" in found(findings, "warning", "no token that ends a text meets").hint


def test_a_start_token_that_is_written_twice(wrong):
    (wrong.student / "chat_template.jinja").write_text("{{ bos_token }}" + PLAIN)
    assert "the chat template writes" in found(starts(case_of(wrong)), "ok", "start token").what
    backend = tokenizers.Tokenizer.from_file(str(wrong.student / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    backend.save(str(wrong.student / "tokenizer.json"))
    assert "add_special_tokens=False" in found(starts(case_of(wrong)), "warning", "has two").hint


def test_templates_that_rewrite(wrong, tmp_path):
    talk = {"messages": [{"role": "user", "content": "Two?"},
                         {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nYes, two."}]}  # fmt: skip
    data = tmp_path / "talks.jsonl"
    data.write_text(json.dumps(talk) + "\n")
    assert {one.level for one in contents(case_of(wrong))} == {"ok"}
    assert found([*contents(case_of(wrong, data))][:1], "error", "no chat template").where.startswith("student")
    for folder in (wrong.student, wrong.teacher):
        (folder / "chat_template.jinja").write_text(PLAIN)
    whole = case_of(wrong, data)
    assert {one.level for one in (*contents(whole), *conversations(whole))} == {"ok"}
    (wrong.student / "chat_template.jinja").write_text(DROPPING)
    dropping = case_of(wrong, data)
    assert {one.where.split()[0] for one in contents(dropping) if one.level == "note"} == {"student"}
    assert found(contents(dropping), "note", "drops thoughts from answers").figures["bytes"] > 20
    assert found(contents(dropping), "note", "changes white space")
    assert found(conversations(dropping), "warning", "carry no loss").figures["bytes"] > 20
    thinking = PLAIN.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    (wrong.student / "chat_template.jinja").write_text(thinking)
    assert found(contents(case_of(wrong)), "note", "writes a thought by itself")
    (wrong.student / "chat_template.jinja").write_text("{{ raise_exception('not so') }}")
    assert "not so" in found(contents(case_of(wrong, data)), "error", "refuses").what


def test_attention_and_dtypes(wrong):
    assert {one.level for one in attention(case_of(wrong))} == {"ok"}
    rewrite(wrong.student / "config.json", model_type="bloom")
    assert found(attention(case_of(wrong)), "warning", "square of a row's length")
    assert found(attention(case_of(wrong, attn_implementation="sdpa")), "error", "has no sdpa").hint
    rewrite(wrong.student / "config.json", model_type="nobody-knows")
    assert found(attention(case_of(wrong)), "error", "the type nobody-knows")
    rewrite(wrong.student / "config.json", auto_map={"AutoModelForCausalLM": "model.Own"})
    assert "--trust-remote-code" in found(attention(case_of(wrong)), "warning", "Python code").hint
    assert found(dtypes(case_of(wrong, dtype="bfloat16")), "warning", "lose updates")
    assert found(dtypes(case_of(wrong, dtype="float16")), "error", "no student is trained in float16")
    rewrite(wrong.student / "config.json", quantization_config={"quant_method": "fp8"})
    assert found(dtypes(case_of(wrong)), "error", "packed weights are not trained")


def test_lengths(pair, tmp_path):
    texts = [*material.sentences(8), " ".join(material.sentences(30))]
    data = material.write_jsonl(tmp_path / "data.jsonl", texts)
    findings = list(lengths(case_of(pair, data)))
    assert [one.level for one in findings] == ["error", "error"]
    assert [one.hint.split()[1] for one in findings] == ["distill", "cache-teacher"]
    case = case_of(pair, data, long_documents="truncate")
    assert [one.level for one in lengths(case)] == ["warning", "warning"]
    sizes = [len(one) for one in sequences(case.student.tokenizer, list(case.corpus))]
    figures = next(iter(lengths(case))).figures
    assert figures == {"longest": max(sizes), "limit": 256, "too_long": sum(size > 256 for size in sizes)}
    assert pass_tokens(case) == sum(sorted((min(size, 256) for size in sizes), reverse=True)[:8])
    assert pass_tokens(case_of(pair, data, max_batch_tokens=300)) == 300
    short = material.write_jsonl(tmp_path / "short.jsonl", texts[:8])
    assert [one.level for one in lengths(case_of(pair, short))] == ["ok", "ok"]


def test_data_that_spells_special_tokens(pair, corpus, tmp_path):
    assert not list(spelled_tokens(case_of(pair, corpus)))
    texts = ["One.<|im_end|>", *material.sentences(3)]
    case = case_of(pair, material.write_jsonl(tmp_path / "data.jsonl", texts))
    assert found(spelled_tokens(case), "warning", "<|im_end|>").figures == {"share": 0.25}


def test_compression_and_alignment(pair, corpus):
    case = case_of(pair, corpus)
    figures = found(compression(case), "ok", "bytes a token").figures
    texts = [document.text for document in case.corpus]
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(len(one) for one in sequences(case.teacher.tokenizer, list(case.corpus)))
    assert figures["bytes"] == size
    assert figures["teacher_bytes_per_token"] == pytest.approx(size / tokens, abs=1e-4)
    assert found(compression(case), "ok", "are aligned").figures["aligned_share_of_bytes"] == 1.0
    assert found(compression(case_of(pair)), "note", "without a cache or data")


def test_projection_and_loss(pair, cache, corpus):
    figures = found(projection(case_of(pair)), "warning", "critical tokens").figures
    assert figures["critical"] == ["digits"]
    assert sum(figures["rows"].values()) == 656
    alone = material.Pair(pair.student, pair.student)
    assert found(projection(case_of(alone)), "ok", "one tokenizer")
    assert found(chosen(case_of(alone)), "ok", "auto takes").figures["losses"] == ["ce", "forward-kl"]
    case = case_of(pair, cache=cache)
    teachers = open_teachers([str(cache)], (), case.student.tokenizer)
    _, told = take_losses(parse_losses(["auto"]), teachers)
    one = found(chosen(case), "ok", "auto takes")
    assert " and ".join(one.figures["losses"]) in told
    assert one.what.partition(", for ")[2] == told.partition(", for ")[2]
    assert found(caches(case), "ok", "support top-k").where == "cache of teacher"
    other = Case(case.teacher, case.student, Plan(), TeacherCache(cache))
    assert found(caches(other), "error", "teacher with another tokenizer").hint


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_cache_or_data_where_a_model_should_be_is_told_at_once(run, pair, cache, corpus, role):
    for wrong, told in ((cache, f"the {role} is a model, and this is a teacher cache"), (corpus, "this is a file")):
        models = {"student": pair.student, "teacher": pair.teacher, role: wrong}
        done = run("doctor", models["student"], models["teacher"], corpus, code=1)
        assert told in done.stderr
        assert f"where: {wrong}" in done.stderr
        assert done.stdout == ""


def test_a_cache_of_other_weights(wrong, cache):
    assert found(caches(case_of(wrong, cache=cache)), "ok", "of these very weights")
    whole = wrong.teacher / "model.safetensors"
    stored = safetensors.numpy.load_file(whole)
    safetensors.numpy.save_file({name: one + 1 for name, one in stored.items()}, whole)
    assert "cache-teacher" in found(caches(case_of(wrong, cache=cache)), "warning", "other weights").hint
    whole.unlink()
    assert found(caches(case_of(wrong, cache=cache)), "ok", "were not compared: no weights of the teacher are here")


def test_a_pass_on_tensors_without_content_holds_what_a_real_one_does(pair):
    """What is kept for the backward pass, and the peak, against tensors that are there."""
    model = load_causal_lm(pair.student)
    register()
    model.set_attn_implementation(NAME)
    told = footprint(pair.student, 200)
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(held.values()) <= told.weights <= sum(held.values()) + 4096  # and the angles of positions
    assert told.head == 4 * 656 * 32
    assert told.width == 656
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(input_ids=torch.zeros(1, 200, dtype=torch.int64), use_cache=False).last_hidden_state
    saved[states.untyped_storage().data_ptr()] = states
    own = sum(one.untyped_storage().nbytes() for place, one in saved.items() if place not in held)
    assert told.kept == pytest.approx(own, rel=0.1)
    assert told.backward >= told.kept
    # Twice the tokens keep twice as much; checkpoints keep less, and nothing is kept of what is not trained.
    assert footprint(pair.student, 400).kept == pytest.approx(2 * told.kept, rel=0.02)
    assert footprint(pair.student, 200, gradient_checkpointing=True).kept < told.kept / 2
    assert footprint(pair.student, 200, backward=False).kept < told.kept / 4


@pytest.mark.slow
def test_memory_and_layouts(pair, corpus):
    said = [one.figures["command"] for one in memory(case_of(pair, corpus))]
    assert said == ["cache-teacher", "distill"]
    one = of_training(case_of(pair, corpus))
    small = footprint(pair.student, 1)
    weights = small.weights
    assert one.parts["weights"] == weights
    assert one.parts["AdamW"] == 2 * small.trained
    adapted = of_training(case_of(pair, corpus, lora_r=4))
    assert 0 < adapted.parts["AdamW"] < small.trained
    assert adapted.parts["merging"] > weights
    # A second pass of a step has the gradients of the first beside its own.
    steps = of_training(case_of(pair, corpus, gradient_accumulation_steps=2))
    more = steps.parts["gradients and activations"] - one.parts["gradients and activations"]
    assert small.trained / 2 < more < 2 * small.trained
    shared = of_training(case_of(pair, corpus, layout=read_layout("fsdp=4", 4)))
    assert shared.parts["weights"] == weights // 4
    assert shared.parts["gathered weights"] > 0
    replicas = of_training(case_of(pair, corpus, layout=read_layout("", 2)))
    assert replicas.parts["buckets of DDP"] == small.trained
    huge = case_of(pair, None, max_batch_tokens=0, per_device_train_batch_size=10**9)
    assert found(memory(huge), "error", "distill").hint


def test_disk_hours_and_versions(pair, corpus, cache):
    case = case_of(pair, corpus, rate=100.0)
    tokens = sum(len(one) for one in sequences(case.teacher.tokenizer, list(case.corpus)))
    assert found(disk(case), "ok", "tokens a second").figures["seconds"] == pytest.approx(tokens / 100)
    assert found(disk(case_of(pair, corpus)), "note", "nobody said how many").hint
    assert found(disk(case), "ok", "the cache: about").figures["positions"] < tokens
    parameters = sum(one.numel() for one in load_causal_lm(pair.student).parameters())
    assert found(disk(case), "ok", "checkpoints take").figures["checkpoints"] == 4 * parameters * 10
    assert found(disk(case_of(pair, cache=cache)), "ok", "a position").figures["documents"] == 40
    assert found(disk(case_of(pair, save_total_limit=10**9)), "error", "checkpoints take").hint
    assert found(versions(case), "ok", "Python").figures["torch"] == torch.__version__


def test_the_cache_of_another_top_k_is_about_as_large_as_was_forecast(run, wrong, tmp_path):
    configuration = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(wrong.teacher)
    data = material.write_jsonl(tmp_path / "data.jsonl", material.sentences(20))
    run("cache-teacher", wrong.teacher, data, "--top-k", 512, "-o", tmp_path / "cache")
    written = found(disk(case_of(wrong, cache=tmp_path / "cache")), "ok", "a position").figures["bytes"]
    one = found(disk(case_of(wrong, data, top_k=512)), "ok", "estimated from caches of 64 ids")
    assert written / 1.5 < one.figures["bytes"] < 1.5 * written


def test_libraries_that_end_without_a_word_are_told(monkeypatch, tmp_path):
    """As the kernel ends a process when there is no memory: by a signal, with nothing said."""
    (tmp_path / "silent.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(XtkError, match=r"(?s)cannot be imported.*SIGKILL"):
        _libraries("", "silent")


def test_what_libraries_take_is_measured_once_for_what_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("xtk.doctor.costs.IMPORTS", "from xtk.doctor.costs import resident")  # the rest takes seconds
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "counted.py").write_text(
        f"with open({str(tmp_path / 'log')!r}, 'a') as log:\n    log.write('once\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def measured() -> tuple[int, int]:
        _libraries.cache_clear()  # as another process
        return _libraries("", "counted"), len((tmp_path / "log").read_text().splitlines())

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
    _libraries.cache_clear()


def test_one_cause_is_told_once(pair, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    talk = {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    for name, told, sides in (("empty", "no document", 1), ("talks", "no chat template", 2)):
        findings = list(examine(case_of(pair, tmp_path / f"{name}.jsonl")))
        assert [one.level for one in findings if told in one.what] == sides * ["error"]


def test_a_check_that_cannot_be_made_is_an_error(pair, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    findings = list(examine(case_of(pair, broken)))
    assert len([one for one in findings if one.level == "error" and str(broken) in one.where]) == 1
    assert {one.check for one in findings} >= {"rows", "versions"}
