"""A finished output is reused only for the same inputs, even if a changed input has the same size and timestamps."""

import json
import os
import shutil
from pathlib import Path

import answer_lookup_model
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.models import weight_hash

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "12 + 5?"}, {"role": "assistant", "content": "It is 17."}]}
SHORT_RUN = ["--max-steps", "2", "--per-device-train-batch-size", "2"]


def rewrite(path: Path, change) -> None:
    """Change a file but keep its timestamps."""
    times = path.stat()
    change(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rewrite_json(path: Path, **changes: object) -> None:
    rewrite(path, lambda one: one.write_text(json.dumps(json.loads(one.read_text()) | changes)))


@pytest.fixture
def student(pair, tmp_path):
    folder = shutil.copytree(pair.student, tmp_path / "student")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def conversations(tmp_path):
    (tmp_path / "chat.jsonl").write_text((json.dumps(CHAT) + "\n") * 4)
    return tmp_path / "chat.jsonl"


def change_template(folder: Path) -> None:
    rewrite(folder / "chat_template.jinja", lambda one: one.write_text(TEMPLATE.replace("role }}\n", "role }}: ")))


def change_end_token(folder: Path) -> None:
    rewrite_json(folder / "tokenizer_config.json", eos_token="<|pad|>")


def remove_start_token(folder: Path) -> None:
    rewrite_json(folder / "tokenizer_config.json", bos_token=None)


@pytest.mark.parametrize("change", [change_template, change_end_token, remove_start_token])
@pytest.mark.parametrize("kind", ["text", pytest.param("cache", marks=pytest.mark.slow), "rollout"])
def test_student_template_and_special_tokens_are_part_of_the_identity(
    run, pair, student, conversations, tmp_path, kind, change
):
    if kind == "rollout":
        arguments = ["rollout", student, conversations, "--max-completion-length", "8", "--apply-chat-template"]
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": CHAT["messages"][:1]}) + "\n")
        arguments[2] = tmp_path / "prompts.jsonl"
    elif kind == "text":
        arguments = ["distill", student, conversations, "--loss", "ce", *SHORT_RUN]
    else:
        teacher = shutil.copytree(pair.teacher, tmp_path / "teacher")
        (teacher / "chat_template.jinja").write_text(TEMPLATE)
        run("cache-teacher", teacher, conversations, "-o", tmp_path / "cache")
        arguments = ["distill", student, tmp_path / "cache", *SHORT_RUN]
    output = tmp_path / ("out.jsonl" if kind == "rollout" else "out")
    run(*arguments, "-o", output)
    written_at = output.stat().st_mtime_ns
    run(*arguments, "-o", output)
    assert output.stat().st_mtime_ns == written_at
    change(student)
    assert "other" in run(*arguments, "-o", output, code=1).stderr


def change_one_row(path: Path) -> None:
    tensors = load_file(path)
    row = tensors["model.embed_tokens.weight"][223]
    row *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def large_model(pair, tmp_path):
    """Return a model of 40 MB; one row of its embedding is between the blocks that a sampled hash would read."""
    folder = shutil.copytree(pair.teacher, tmp_path / "large")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = type(model.config)(**{
        **model.config.to_dict(), "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2, "tie_word_embeddings": False,
    })  # fmt: skip
    type(model)(config).save_pretrained(folder)
    return folder


def test_model_with_one_changed_weight_row_is_another_model(run, large_model, corpus, tmp_path):
    assert (large_model / "model.safetensors").stat().st_size > 16 << 20
    arguments = ["cache-teacher", large_model, corpus, "--top-k", "4", "-o", tmp_path / "cache"]
    run(*arguments)
    assert "finished" in run(*arguments).stderr
    rewrite(large_model / "model.safetensors", change_one_row)
    run(*arguments, code=1)


def test_loaded_model_with_one_changed_weight_row_is_another_model(large_model, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(large_model), AutoTokenizer.from_pretrained(large_model)
    arguments = (["Anna has 12 apples."], tmp_path / "cache")
    xtk.cache_teacher(model, *arguments, tokenizer=tokenizer)
    xtk.cache_teacher(model, *arguments, tokenizer=tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[223] *= 1.5
    with pytest.raises(xtk.XtkError):
        xtk.cache_teacher(model, *arguments, tokenizer=tokenizer)


def test_model_code_is_part_of_the_identity(run, corpus, tmp_path):
    model = answer_lookup_model.make_oracle(tmp_path / "oracle", {"a": "b"})
    arguments = ["cache-teacher", model, corpus, "--top-k", "4", "--trust-remote-code", "-o", tmp_path / "cache"]
    run(*arguments)
    assert "finished" in run(*arguments).stderr
    (code,) = model.glob("*.py")
    rewrite(code, lambda one: one.write_text(one.read_text().replace("1.0", "2.0", 1) + "\n# changed\n"))
    run(*arguments, code=1)


def test_normalizer_set_in_memory_is_used(pair):
    tokenizer = AutoTokenizer.from_pretrained(pair.student)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301 a\u0308 12"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert expected != AutoTokenizer.from_pretrained(pair.student)(text, add_special_tokens=False)["input_ids"]
    assert xtk.align(tokenizer, pair.teacher, text).student_ids.tolist() == expected


def test_hash_of_a_large_file_is_stored_until_it_changes_and_needs_no_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_hash, "MIN_REMEMBERED_BYTES", 100)
    hashed_files, read_hash = [], weight_hash._read_hash
    monkeypatch.setattr(
        weight_hash, "_read_hash", lambda file, size: hashed_files.append(file) or read_hash(file, size)
    )
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)

    def hash_folder() -> str:
        weight_hash._hash_of_version.cache_clear()  # as in another process
        return weight_hash.hash_weights(tmp_path)

    first_hash = hash_folder()
    assert hash_folder() == first_hash
    assert len(hashed_files) == 1
    status = Path.stat

    def stat_of_another_mount(path: Path, **options: bool) -> os.stat_result:
        fields = list(status(path, **options).__reduce__()[1][0])
        named = status(path, **options).__reduce__()[1][1]
        fields[2] += 1  # st_dev
        return os.stat_result(fields, named)

    with monkeypatch.context() as other_machine:
        other_machine.setattr(Path, "stat", stat_of_another_mount)
        assert hash_folder() == first_hash
    assert len(hashed_files) == 1
    times = file.stat()
    file.write_bytes(b"a" * 999 + b"b")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed_hash = hash_folder()
    assert changed_hash != first_hash
    assert len(hashed_files) == 2

    def fail_without_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(weight_hash, "user_cache_folder", fail_without_home)
    assert hash_folder() == changed_hash
    assert len(hashed_files) == 3
