"""Teachers with layers on disk, quantization or adapters match the plain teacher."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import Support
from xtk.models.causal_lm import load_causal_lm, quantized_placement
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


def test_stored_quantized_weights_are_loaded_on_the_gpu_of_the_model():
    quantized = LlamaConfig(quantization_config={"quant_method": "compressed-tensors"})
    gpu = torch.device("cuda", 1)
    assert quantized_placement(quantized, {}, gpu) == {"device_map": {"": gpu}}
    assert quantized_placement(LlamaConfig(), {"quantization_config": {"quant_method": "fp8"}}, gpu)
    for configuration, options, device in (
        (LlamaConfig(), {}, gpu),
        (quantized, {"device_map": "auto"}, gpu),
        (quantized, {}, torch.device("cpu")),
        (quantized, {}, None),
    ):
        assert quantized_placement(configuration, options, device) == {}


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "dtype=float16"], "the engine option dtype is not allowed: xtk sets this argument"),
        (["--engine", "tp_plan=auto"], "use --engine device_map=auto, or --backend vllm"),
        (["--engine", "tp_size=2"], "use --engine device_map=auto, or --backend vllm"),
        (["--engine", "nonsense=1"], "nonsense"),
    ],
)
def test_invalid_engine_options_are_refused(run, pair, corpus, tmp_path, options, message):
    result = run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
