"""A model that is evaluated, loaded as the options of `xtk evaluate` say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtk.tokens.tokenizer import Tokenizer


def load_evaluated(name: str, places: tuple[Path, Path | None], given: Mapping[str, Any]) -> tuple[Any, Tokenizer]:
    """Return a model of transformers, and its tokenizer.

    Args:
        name: as it was called.
        places: its folder, and that of its adapter.
        given: options: `dtype`, `trust_remote_code`.

    Raises:
        XtkError: it cannot be loaded, or has fewer rows than its tokenizer has tokens.
    """
    from xtk.models.causal_lm import DTYPES, check_rows, default_device, load_causal_lm
    from xtk.tokens.tokenizer import Tokenizer

    folder, adapter = places
    tokenizer = Tokenizer(folder, name=name)
    model = load_causal_lm(
        folder,
        dtype=DTYPES[given["dtype"]],
        device=default_device(),
        trust_remote_code=given["trust_remote_code"],
        adapter=adapter,
    )
    check_rows(model, tokenizer)
    return model, tokenizer
