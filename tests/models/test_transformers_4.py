"""What xtk writes with transformers 5 is the same model and tokenizer for transformers 4."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import small_inputs
import torch
from test_families import FAMILIES, SIZES
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from xtk.models.saved_model import add_transformers_4_keys
from xtk.models.student_model_setup import save_trainable

OTHER_PYTHON = os.environ.get("XTK_TRANSFORMERS_4", "")
TEXTS = ["Anna has 2017 apples.", "a  1\n\n2", "x = 3.14159;\n\n\n  7", "日本語の文 😀", *small_inputs.sentences(8)]
# Each scaling of the rotary embedding, where it changes positions below 48.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 5.0]}
SCALED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
    "llama-dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": 16}),
    "llama-yarn": ("llama", YARN, {}),
    "llama-yarn-attention-factor": ("llama", {**YARN, "attention_factor": 1.5}, {}),
    "llama-llama3": ("llama", LLAMA3, {}),
    "qwen2-yarn": ("qwen2", YARN, {}),
    "qwen3-linear": ("qwen3", {"rope_type": "linear", "factor": 2.0}, {}),
    "phi3-longrope": ("phi3", LONG, {"original_max_position_embeddings": 16}),
    "gemma3_text-linear": ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, {"sliding_window": 8}),
}
# Families with a part of the configuration that the tests of other families leave at its default.
PARTIAL = {
    "llama": {}, "granite": {}, "mistral": {"sliding_window": 8}, "gemma2": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    **{family: {"partial_rotary_factor": 0.5} for family in ("phi", "phi3", "glm")},
}  # fmt: skip


# The two versions compute different logits with any configuration; version 4 cannot read mamba2's infinite limit.
DIFFERENT = ("apertus", "modernbert-decoder", "recurrent_gemma", "mamba2")


def make_config(family: str, scaling: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a small configuration whose base of the rotary frequencies is not the default, of each kind of layer."""
    values = {**SIZES, **FAMILIES.get(family, {}), **PARTIAL.get(family, {}), "max_position_embeddings": 64, **options}
    config = AutoConfig.for_model(family, **{key: value for key, value in values.items() if value is not None})
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return config
    layers = [rope["full_attention"], rope["sliding_attention"]] if "full_attention" in rope else [rope]
    for layer, theta in zip(layers, (77.0, 77.0 if family == "olmo3" else 33.0), strict=False):
        layer["rope_theta"] = theta
    layers[0].update(scaling or {})
    content = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    return AutoConfig.for_model(family, **content)


def write_model(config: Any, folder: Path) -> np.ndarray:
    """Write a random model as a checkpoint of xtk, with ids; return its logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    save_trainable(model, folder)
    ids = np.random.default_rng(0).integers(3, 61, (2, 48))
    np.save(folder / "ids.npy", ids)
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def all_cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    return {**{name: (name, {}, {}) for name in sorted({*FAMILIES, *PARTIAL} - {*DIFFERENT})}, **SCALED}


@pytest.mark.parametrize("name", SCALED)
def test_this_version_reads_the_same_rotary_embedding_with_the_keys_of_both(name, tmp_path):
    family, scaling, options = SCALED[name]
    config = make_config(family, scaling, **options)
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path)
    add_transformers_4_keys(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["rope_theta"] == 77.0
    assert content["rope_scaling"].get("rope_type", content["rope_scaling"].get("type")) == scaling["rope_type"]
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters.items() >= before.rope_parameters.items()


@pytest.mark.slow
def test_this_version_reads_the_same_configuration_of_every_model_with_the_keys_of_both(tmp_path):
    changed = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if family == "gemma4_assistant":  # has no default configuration
            continue
        CONFIG_MAPPING[family]().save_pretrained(tmp_path)
        before = CONFIG_MAPPING[family].from_pretrained(tmp_path).to_dict()
        add_transformers_4_keys(tmp_path)
        after = CONFIG_MAPPING[family].from_pretrained(tmp_path).to_dict()
        if any(after.get(key) != value for key, value in before.items()):
            changed.append(family)
    assert not changed


def test_tokenizer_settings_of_this_version_become_those_of_both(tmp_path):
    folder = small_inputs.make_student_tokenizer(tmp_path / "t")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|one|>", "<|two|>"]})
    tokenizer.save_pretrained(tmp_path / "saved")
    before = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert before["tokenizer_class"] == "TokenizersBackend"
    assert isinstance(before["extra_special_tokens"], list)
    add_transformers_4_keys(tmp_path / "saved")
    after = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"local_files_only", "is_local", "extra_special_tokens"} & after.keys()
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert [again(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


@pytest.fixture(scope="module")
def read_by_version_4(tmp_path_factory, corpus, run) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a folder of models that transformers 4 has read, and their logits here."""
    if not Path(OTHER_PYTHON).is_file():
        pytest.skip("XTK_TRANSFORMERS_4 must be a Python with transformers 4 (nox -s compatibility)")
    root = tmp_path_factory.mktemp("models")
    logits = {
        name: write_model(make_config(family, scaling, **options), root / name)
        for name, (family, scaling, options) in all_cases().items()
    }
    write_export_of_a_gguf_student(root / "export", tmp_path_factory.mktemp("gguf"), corpus, run)
    script = Path(__file__).with_name("read_with_transformers_4.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([OTHER_PYTHON, script, root], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4.57")
    return root, logits


def write_export_of_a_gguf_student(folder: Path, work: Path, corpus: Path, run: Any) -> None:
    """Train a student from a GGUF file with a scaled rotary embedding for one step, and export it."""
    original = gguf_files.make_llama(work / "llama")
    fields = {f"llama.rope.scaling.{name}": value for name, value in
              {"type": "yarn", "factor": 4.0, "original_context_length": 64.0}.items()}  # fmt: skip
    file = gguf_files.write_gguf(original, work / "tiny.gguf", fields=fields)
    run("distill", file, corpus, "--loss", "ce", "--max-steps", 1, "-o", work / "run")
    run("export", work / "run", "-o", folder)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 480, (2, 200)))
    (folder / "texts.json").write_text(json.dumps(TEXTS), encoding="utf-8")


@pytest.mark.compatibility
@pytest.mark.parametrize("name", all_cases())
def test_version_4_reads_the_same_model(read_by_version_4, name):
    root, logits = read_by_version_4
    folder = root / name
    error = (folder / "error.txt").read_text() if (folder / "error.txt").is_file() else ""
    if "does not recognize this architecture" in error or "Unrecognized configuration class" in error:
        pytest.skip("transformers 4.57 does not have this architecture")
    assert not error, error
    np.testing.assert_allclose(np.load(folder / "logits.npy"), logits[name], rtol=0, atol=2e-5)


@pytest.mark.compatibility
def test_version_4_reads_the_export_of_a_student_from_a_gguf_file(read_by_version_4):
    folder = read_by_version_4[0] / "export"
    assert not (folder / "error.txt").is_file(), (folder / "error.txt").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.from_numpy(np.load(folder / "ids.npy"))).logits.numpy()
    np.testing.assert_allclose(np.load(folder / "logits.npy"), expected, rtol=0, atol=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert json.loads((folder / "tokens.json").read_text()) == [tokenizer(text).input_ids for text in TEXTS]
