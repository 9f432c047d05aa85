"""Writing models, and the tokens at which they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xtk.models.transformers_4_keys import add_transformers_4_keys

GENERATION_CONFIG = "generation_config.json"


def save_model(model: Any, folder: Path, **options: Any) -> None:
    """Write a model as `save_pretrained` does, with its generation configuration as it is, and keys of transformers 4.

    `save_pretrained` refuses a changed configuration with a sampling setting but without `do_sample`, as published
    models have it.

    Args:
        options: of `save_pretrained`.
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
    configured = [getattr(part, "eos_token_id", None) for part in (model.generation_config,
                                                                   model.config.get_text_config())]  # fmt: skip
    return {token for name in configured if name is not None for token in (name if isinstance(name, list) else [name])}
