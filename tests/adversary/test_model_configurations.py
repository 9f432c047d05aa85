"""Invalid config.json files: an error message before memory is allocated, never a traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_inputs import sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.errors import XtkError
from xtk.models.causal_lm import check_loadable, load_causal_lm, load_model_config
from xtk.models.resolver import ModelRef
from xtk.text.model_config_json import hub_kernel_repositories, read_model_config
from xtk.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

KERNEL = "the model needs the attention kernel evil/kernel, which is code from the Hugging Face hub"
# {name: (changed keys of config.json, or its whole text, the error message; "": any or none, None: it loads)}
ATTACKS: dict[str, tuple[Any, str]] = {
    "nested": ('{"a":' + "[" * 10_000 + "]" * 10_000 + "}", "nested more than 100"),
    "open": ("[" * 10_000, "this config.json is "),
    "list": ("[1, 2]", "config.json must contain a JSON object"),
    "text": ('"model"', "config.json must contain a JSON object"),
    "latin": (b'{"model_type": "\xe9"}', "config.json is not UTF-8"),
    "cut": ('{"model_type": "llama"', "this config.json is not valid JSON"),
    "digits": ('{"vocab_size": ' + "9" * 5_000 + "}", "this config.json is not valid JSON"),
    "layers text": ({"num_hidden_layers": "two"}, ""),
    "layers fraction": ({"num_hidden_layers": 2.5}, ""),
    "vocabulary": ({"vocab_size": 10_000_001}, ""),
    "vocabulary 1e12": ({"vocab_size": 10**12}, ""),
    "negative": ({"vocab_size": -1}, ""),
    "inside": ({"text_config": {"vocab_size": 3 * 10**8}}, ""),
    "infinite": ('{"model_type": "llama", "hidden_size": Infinity}', ""),
    "kernel": ({"_attn_implementation": "evil/kernel"}, KERNEL),
    "kernel, plain": ({"attn_implementation": "evil/kernel"}, KERNEL),
    "kernel, version": ({"_attn_implementation": "flash|evil/kernel@main:f"}, "evil/kernel"),
    "kernel, by part": ({"_attn_implementation": {"": "sdpa", "text": "evil/kernel"}}, KERNEL),
    "kernel, inside": ({"text_config": {"_attn_implementation_internal": "evil/kernel"}}, KERNEL),
    "kernel, experts": ({"_experts_implementation": "evil/kernel"}, KERNEL),
    "own code": ({"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}, "--trust-remote-code"),
    "unknown": ({"model_type": "nosuch"}, "transformers cannot load the model"),
    "type": ({"model_type": 5}, "transformers cannot load the model"),
    "width text": ({"hidden_size": "32"}, ""),
    "width 0": ({"hidden_size": 0}, ""),
    "heads 0": ({"num_attention_heads": 0}, ""),
    "activation": ({"hidden_act": "nosuch"}, ""),
    "rope": ({"rope_theta": "x", "rope_scaling": {"rope_type": "nosuch"}}, ""),
    "dtype": ({"dtype": "nosuch", "torch_dtype": "nosuch"}, ""),
    "quantized": ({"quantization_config": {"quant_method": "nosuch"}}, ""),
    "fewer layers": ({"num_hidden_layers": 1}, None),
    "more layers": ({"num_hidden_layers": 3}, "the model's files lack 9 of its weights: model.layers.2."),
}


def copy_with_config(model: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(model, folder)
    path = folder / "config.json"
    if isinstance(change, dict):
        change = json.dumps({**json.loads(path.read_text()), **change})
    path.write_bytes(change if isinstance(change, bytes) else change.encode())
    return folder


@pytest.mark.parametrize("name", ATTACKS)
def test_invalid_configuration_is_refused_before_a_model_is_built(name, pair, tmp_path):
    change, expected = ATTACKS[name]
    folder = copy_with_config(pair.student, tmp_path / "model", change)
    if expected is None:  # unused weights are only reported
        load_causal_lm(ModelRef(folder))
        return
    for load in (load_causal_lm, lambda model: check_loadable(model, Tokenizer(model.folder))):
        with pytest.raises(XtkError) if expected else contextlib.suppress(XtkError) as raised:
            load(ModelRef(folder))
        assert not expected or expected in str(raised.value)


def test_names_of_attention_implementations_are_not_hub_kernels(pair, tmp_path):
    for name in ("sdpa", "eager", "flash_attention_2", "paged|sdpa", None):
        folder = copy_with_config(pair.student, tmp_path / str(name), {"_attn_implementation": name})
        assert hub_kernel_repositories(read_model_config(folder)) == []
        load_model_config(ModelRef(folder))


@pytest.mark.parametrize("name", ["nested", "list", "vocabulary", "vocabulary 1e12", "kernel"])
def test_commands_refuse_invalid_configurations(name, pair, corpus, cache, tmp_path):
    change, expected = ATTACKS[name]
    folder = copy_with_config(pair.student, tmp_path / "model", change)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sentences(2, seed=7))
    for arguments in (
        ["evaluate", folder, corpus],
        ["distill", folder, cache, "-o", tmp_path / "run"],
        ["distill", pair.student, corpus, "--teacher", folder, "-o", tmp_path / "run"],
        ["cache-teacher", folder, corpus, "-o", tmp_path / "cache"],
        ["rollout", folder, prompts, "-o", tmp_path / "rollouts.jsonl"],
        ["doctor", folder, pair.teacher],
        ["align", folder, pair.teacher, "a text"],
    ):
        result = run_xtk(*arguments, code=None)
        assert "Traceback" not in result.stderr
        if arguments[0] == "align" and name == "kernel":  # align reads only the tokenizer
            continue
        assert result.returncode == 1
        assert expected in result.stderr + result.stdout
