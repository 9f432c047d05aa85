"""Loading and checking the models of `xtk evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtk.commands.evaluate_options import EvaluateOptions
    from xtk.text.tokenizer import Tokenizer


def check_models(folders: Mapping[str, tuple[Path, Path | None]], options: EvaluateOptions) -> None:
    """Check all models before the first evaluation, without reading weights.

    Args:
        folders: {model name: (folder, adapter folder or None)}.
    """
    from xtk.errors import XtkError
    from xtk.models.causal_lm import check_loadable
    from xtk.models.resolver import ModelRef
    from xtk.name_registry import load_registered
    from xtk.rollouts import GENERATORS
    from xtk.text.tokenizer import Tokenizer

    names: dict[tuple[Path, Path | None], str] = {}
    for name, (folder, adapter) in folders.items():
        place = (folder.resolve(), adapter and adapter.resolve())
        if place in names:
            raise XtkError(
                "two names refer to the same model",
                where=", ".join(dict.fromkeys((names[place], name))),
                hint="give each model once",
            )
        names[place] = name
        tokenizer = Tokenizer(folder, name=name, start_token=options.start_token)
        if load_registered(GENERATORS, options.backend, "backend").runs_loaded_model:  # vllm also loads other formats
            check_loadable(ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code), tokenizer)


def load_model_and_tokenizer(
    name: str, folders: tuple[Path, Path | None], options: EvaluateOptions
) -> tuple[Any, Tokenizer]:
    """Return a transformers model and its tokenizer.

    Args:
        name: name of the model, for messages.
        folders: (folder, adapter folder or None).
    """
    from xtk.models.causal_lm import check_embedding_rows, default_device, load_causal_lm
    from xtk.models.resolver import ModelRef
    from xtk.text.tokenizer import Tokenizer

    folder, adapter = folders
    tokenizer = Tokenizer(folder, name=name, start_token=options.start_token)
    ref = ModelRef(folder, adapter, options.dtype, options.trust_remote_code)
    model = load_causal_lm(ref, device=default_device())
    check_embedding_rows(model, tokenizer)
    return model, tokenizer
