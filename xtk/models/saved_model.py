"""Writing of models that transformers 4 reads too, and the tokens at which they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xtk.untrusted_json import parse_json

GENERATION_CONFIG = "generation_config.json"


def save_model(model: Any, folder: Path, **options: Any) -> None:
    """Write a model as `save_pretrained` does, with its generation configuration as it is, and keys of transformers 4.

    `save_pretrained` refuses a changed configuration with a sampling setting but without `do_sample`, as published
    models have it.
    """
    from transformers import GenerationConfig

    settings = model.generation_config
    model.generation_config = None if settings is None else GenerationConfig()
    try:
        model.save_pretrained(folder, **options)
    finally:
        model.generation_config = settings
    add_transformers_4_keys(folder)
    if settings is not None and (folder / GENERATION_CONFIG).is_file():
        settings.to_json_file(folder / GENERATION_CONFIG, use_diff=True, keys_to_pop=["compile_config"])


def stop_token_ids(model: Any) -> set[int]:
    """Return the ids at which a model's configurations end a text."""
    parts = (model.generation_config, model.config.get_text_config())
    configured = [ids for part in parts if (ids := getattr(part, "eos_token_id", None)) is not None]
    return {token for ids in configured for token in (ids if isinstance(ids, list) else [ids])}


# Models whose layers differ in the rotary embedding: the keys of the base of local layers, and of global ones.
_BASES_BY_LAYER = {
    "gemma3_text": ("rope_local_base_freq", "rope_theta"),
    "gemma3n_text": ("rope_local_base_freq", "rope_theta"),
    "modernbert-decoder": ("local_rope_theta", "global_rope_theta"),
    "olmo3": ("", "rope_theta"),
}
_GPT_NEOX = ("gpt_neox", "gpt_neox_japanese")
_PHI_LONG_ROPE = ("short_factor", "long_factor")  # and "type": transformers 4 refuses other keys in Phi 3's scaling
_OWN_KEYS = ("rope_theta", "partial_rotary_factor")  # of the configuration in transformers 4, not of the scaling
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # reads tokenizer.json as it is, in both versions
_LOADING_ARGUMENTS = ("is_local", "local_files_only")  # of the call that loaded the tokenizer


def add_transformers_4_keys(folder: Path) -> None:
    """Add the keys of transformers 4 to config.json of a folder, and make tokenizer_config.json readable for it."""
    for name, change in (("config.json", with_model_keys), ("tokenizer_config.json", with_tokenizer_keys)):
        path = folder / name
        if not path.is_file():
            continue
        content = parse_json(path.read_text(encoding="utf-8"), what=name, where=str(path))
        if isinstance(content, dict) and (changed := change(content)) != content:
            path.write_text(json.dumps(changed, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def with_model_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration, and those of its parts, with the keys of both versions."""
    config = {
        key: with_model_keys(value) if isinstance(value, dict) and "model_type" in value else value
        for key, value in config.items()
    }
    if isinstance(config.get("dtype"), str):
        config["torch_dtype"] = config["dtype"]
    if str(config.get("model_type", "")).startswith("qwen3_") and "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    rope = config.get("rope_parameters")
    if "auto_map" in config or not isinstance(rope, dict):  # a model with its own code reads its own keys
        return config
    return config | _rope_keys(rope, str(config.get("model_type", "")))


def _rope_keys(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return the keys of transformers 4 for the rotary embedding."""
    local_base, base = "", "rope_theta"
    local: dict[str, Any] = {}
    if isinstance(rope.get("full_attention"), dict):
        if model_type not in _BASES_BY_LAYER:  # transformers 4 has no such model
            return {}
        local_base, base = _BASES_BY_LAYER[model_type]
        rope, local = rope["full_attention"], rope.get("sliding_attention") or {}
    if "rope_theta" not in rope:
        return {}
    keys = {base: rope["rope_theta"]}
    if local_base:
        keys[local_base] = local.get("rope_theta", rope["rope_theta"])
    if base == "rope_theta":
        scaling = {key: value for key, value in rope.items() if key not in _OWN_KEYS}
        keys["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if "partial_rotary_factor" in rope:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if model_type in _GPT_NEOX:
        keys |= {"rotary_emb_base": keys.pop("rope_theta"), "rotary_pct": keys.pop("partial_rotary_factor")}
    if rope.get("rope_type") == "longrope":
        keys["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        if model_type.startswith("phi"):
            keys["rope_scaling"] = {"type": "longrope"} | {key: rope[key] for key in _PHI_LONG_ROPE}
    return keys


def with_tokenizer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration that both versions read."""
    config = {key: value for key, value in config.items() if key not in _LOADING_ARGUMENTS}
    if config.get("tokenizer_class") == "TokenizersBackend":  # the name of transformers 5
        config["tokenizer_class"] = TOKENIZER_CLASS
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 refuses a list
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config
