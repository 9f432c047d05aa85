"""Models that are evaluated, checked before the first one works, and loaded as the options of `xtk evaluate` say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtk.tokens.tokenizer import Tokenizer


def check_models(folders: Mapping[str, tuple[Path, Path | None]], options: Mapping[str, Any]) -> None:
    """Refuse models that cannot be loaded before the first one works: that may take hours, and would be lost.

    Args:
        folders: by its name, where each model lies, and its adapter.
        options: options: `backend`, `trust_remote_code`.

    Raises:
        XtkError: one is named twice, has no tokenizer, or cannot be loaded as far as can be told without its weights.
    """
    from xtk.errors import XtkError
    from xtk.models.causal_lm import check_loadable
    from xtk.tokens.tokenizer import Tokenizer

    names: dict[tuple[Path, Path | None], str] = {}
    for name, (folder, adapter) in folders.items():
        place = (folder.resolve(), adapter and adapter.resolve())
        if place in names:
            raise XtkError("this model is named twice", where=", ".join(dict.fromkeys((names[place], name))))
        names[place] = name
        tokenizer = Tokenizer(folder, name=name)
        if options["backend"] == "transformers":  # another one loads other formats too
            check_loadable(folder, tokenizer, trust_remote_code=options["trust_remote_code"], adapter=adapter)


def load_model_and_tokenizer(
    name: str, folders: tuple[Path, Path | None], options: Mapping[str, Any]
) -> tuple[Any, Tokenizer]:
    """Return a model of transformers, and its tokenizer.

    Args:
        name: as it was called.
        folders: its folder, and that of its adapter.
        options: options: `dtype`, `trust_remote_code`.

    Raises:
        XtkError: it cannot be loaded, or has fewer rows than its tokenizer has tokens.
    """
    from xtk.models.causal_lm import DTYPES, check_embedding_rows, default_device, load_causal_lm
    from xtk.tokens.tokenizer import Tokenizer

    folder, adapter = folders
    tokenizer = Tokenizer(folder, name=name)
    model = load_causal_lm(
        folder,
        dtype=DTYPES[options["dtype"]],
        device=default_device(),
        trust_remote_code=options["trust_remote_code"],
        adapter=adapter,
    )
    check_embedding_rows(model, tokenizer)
    return model, tokenizer
