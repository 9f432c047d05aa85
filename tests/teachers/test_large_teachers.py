"""Teachers with layers on disk, tensor parallelism, quantization or adapters match the plain teacher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import cache_writer_processes
import numpy as np
import pytest
import torch

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import Support
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef, base_model_and_adapter, weights_fingerprint
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEXTS = ["Ada has 12 apples and gives 5 to Grace. Now Ada has 7 apples left.", "One.", "Ünïcödé 201 日本"]
SUPPORT = Support("top-k+sample", top_k=8, num_samples=4, num_sample_sets=1)


def score_texts(folder: Path, **options: object) -> list:
    tokenizer = Tokenizer(folder)
    teacher = TransformersTeacher(
        TeacherConfig(ModelRef(folder, name="t"), tokenizer, options=options, support=SUPPORT)
    )
    return teacher.score(tokenize_documents(tokenizer, [Document.from_text(text) for text in TEXTS]))


def assert_close(found: list, expected: list, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.sample_ids.tolist() == other.sample_ids.tolist()
        for name in ("logprobs", "observed_logprobs", "entropy", "remainder_mass"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance)


def device_map_of(folder: Path) -> dict[str, str]:
    """Return a device map with the last layer of a model on the disk and everything else in memory."""
    model = load_causal_lm(ModelRef(folder))
    body = dict(model.model.named_children())
    layers = {f"model.layers.{number}": "cpu" for number in range(len(model.model.layers))}
    last = f"model.layers.{len(model.model.layers) - 1}"
    return {**{f"model.{name}": "cpu" for name in body if name != "layers"}, **layers, last: "disk", "lm_head": "cpu"}


def test_teacher_with_a_layer_on_disk_matches_the_plain_teacher(pair, tmp_path):
    engine = {"device_map": device_map_of(pair.teacher), "offload_folder": str(tmp_path)}
    assert_close(score_texts(pair.teacher, engine=engine), score_texts(pair.teacher), 1e-6)


def test_quantized_teacher_matches_the_quantized_model_of_transformers(pair, tmp_path):
    from transformers import AutoModelForCausalLM

    configuration = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = score_texts(pair.teacher, engine={"quantization_config": dict(configuration)})
    model = AutoModelForCausalLM.from_pretrained(pair.teacher, quantization_config=configuration, dtype=torch.float32)
    for module in model.modules():  # packing for inference on some CPUs, which needs widths of 32
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    tokenizer = Tokenizer(pair.teacher)
    for scores, document in zip(
        found, tokenize_documents(tokenizer, [Document.from_text(text) for text in TEXTS]), strict=True
    ):
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0].double()
        expected = torch.log_softmax(logits, 1).numpy()[scores.positions - 1]
        observed_ids = document.ids[scores.positions]
        np.testing.assert_allclose(
            scores.observed_logprobs, expected[np.arange(len(observed_ids)), observed_ids], rtol=0, atol=2e-3
        )
    unquantized = score_texts(pair.teacher)
    assert max(float(np.abs(a.entropy - b.entropy).max()) for a, b in zip(found, unquantized, strict=True)) > 1e-3
    model.save_pretrained(tmp_path)
    for name, content in tokenizer.to_files().items():
        (tmp_path / name).write_bytes(content)
    assert_close(score_texts(tmp_path), found, 2e-3)


@pytest.fixture(scope="module")
def adapter(pair, tmp_path_factory) -> Path:
    """Write an adapter that changes the teacher's predictions, and the merged model."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses a deprecated interface of transformers
        model = get_peft_model(load_causal_lm(ModelRef(pair.teacher)), config)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder / "adapter")
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(pair.teacher)
    model.merge_and_unload().save_pretrained(folder / "merged")
    for name, content in Tokenizer(pair.teacher).to_files().items():
        (folder / "merged" / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_adapter_in_the_hub_cache_is_read(adapter, tmp_path):
    """Files in the cache of the Hub are links to files that are named by their checksums."""
    folder, files = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    files.mkdir()
    for number, file in enumerate(sorted((adapter / "adapter").iterdir())):
        (files / str(number)).write_bytes(file.read_bytes())
        (folder / file.name).symlink_to(files / str(number))
    assert base_model_and_adapter(folder)[1] == folder
    assert weights_fingerprint(folder) == weights_fingerprint(adapter / "adapter")


def test_adapter_folder_is_accepted_as_a_teacher(run, pair, corpus, adapter, tmp_path):
    exact = ("--top-k", 8, "--precision", "float32")
    for teacher, name in ((adapter / "adapter", "a"), (adapter / "merged", "m"), (pair.teacher, "t")):
        run("cache-teacher", teacher, corpus, *exact, "-o", tmp_path / name)
    adapted, merged, base = (TeacherCache(tmp_path / name) for name in "amt")
    assert_close([row.stored_logprobs for row in adapted], [row.stored_logprobs for row in merged], 1e-4)
    assert adapted.header["teacher"]["weights"] != base.header["teacher"]["weights"]
    assert (
        float(
            np.abs(
                adapted.read_document(0).stored_logprobs.entropy - base.read_document(0).stored_logprobs.entropy
            ).max()
        )
        > 1e-2
    )
    result = run("cache", "verify", tmp_path / "a", adapter / "adapter", "--json")
    assert json.loads(result.stdout)["scored_again"]["same_weights"]
    quantization = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    quantized = score_texts(pair.teacher, adapter=adapter / "adapter", engine=quantization)
    assert float(np.abs(quantized[0].entropy - score_texts(adapter / "merged")[0].entropy).max()) < 0.5


def test_adapter_with_a_missing_or_unnamed_base_model_is_refused(run, corpus, adapter, tmp_path):
    broken = Path(shutil.copytree(adapter / "adapter", tmp_path / "broken"))
    config = json.loads((broken / "adapter_config.json").read_text())
    for base, message in (
        (str(tmp_path / "gone"), "this model folder does not exist"),
        (None, "does not name its base model"),
    ):
        (broken / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
        result = run("cache-teacher", broken, corpus, "-o", tmp_path / "c", code=1)
        assert message in result.stderr
        assert str(broken) in result.stderr


@pytest.fixture(scope="module")
def tp_teacher(pair, tmp_path_factory) -> Path:
    """Write a teacher whose attention heads can be split over two processes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("even")
    tokenizer = Tokenizer(pair.teacher)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    torch.manual_seed(0)
    configuration = Qwen3Config(
        vocab_size=tokenizer.embedding_rows,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **shape,
    )
    Qwen3ForCausalLM(configuration).save_pretrained(folder)
    for name, content in tokenizer.to_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_teacher_with_two_tensor_parallel_processes_matches_one_process(run, tp_teacher, corpus, tmp_path):
    exact = ("--top-k", 8, "--precision", "float32")
    run("cache-teacher", tp_teacher, corpus, *exact, "-o", tmp_path / "one")
    run("cache-teacher", tp_teacher, corpus, *exact, "--engine", "tp_size=2", "-o", tmp_path / "two", timeout=600)
    one, two = TeacherCache(tmp_path / "one"), TeacherCache(tmp_path / "two")
    assert two.header == one.header
    assert_close([row.stored_logprobs for row in two], [row.stored_logprobs for row in one], 1e-4)


@pytest.mark.long
def test_killed_tensor_parallel_process_ends_the_command_which_can_resume(tp_teacher, corpus, tmp_path):
    command = [sys.executable, "-m", "xtk", "cache-teacher", tp_teacher, corpus, "--top-k", "8"]
    command += ["--engine", "tp_size=2", "--shard-tokens", "200", "-o", tmp_path / "c"]
    writer = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "c").glob("shard-*")) and writer.poll() is None:
        time.sleep(0.01)
    (follower,) = cache_writer_processes.child_processes(writer.pid)
    os.kill(follower, signal.SIGKILL)
    _, stderr = writer.communicate(timeout=60)
    assert writer.returncode == 1
    assert "was killed by SIGKILL" in stderr
    assert "tensor-parallel process 1 of 2 of the teacher" in stderr
    assert "Traceback" not in stderr
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=300)
    TeacherCache(tmp_path / "c").verify()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "dtype=float16"], "the engine option dtype is not allowed: xtk sets this argument"),
        (["--engine", "tp_plan=auto"], "use --engine tp_size=N"),
        (["--engine", "tp_size=none"], "tp_size is 'none'"),
        (["--engine", "tp_size=2", "--num-processes", 2], "cannot be combined"),
        (["--engine", "tp_size=2"], "which is not divisible by tp_size=2"),
        (["--engine", "nonsense=1"], "nonsense"),
    ],
)
def test_invalid_engine_options_are_refused(run, pair, corpus, tmp_path, options, message):
    result = run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
