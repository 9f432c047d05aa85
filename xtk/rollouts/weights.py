"""Weights on their way to an engine: which there have to be, and the folder in which a process hands them over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk.errors import Mismatch
from xtk.tokens.model_config import model_config

FILE = "model.safetensors"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Names:
    """The names of a model's weights.

    Attributes:
        names: of all; empty: not known, for a folder without safetensors.
        tied: whether the head is the embedding, and may be left out.
    """

    names: frozenset[str]
    tied: bool = False

    @classmethod
    def of(cls, folder: Path) -> Names:
        """Read them from a folder."""
        from safetensors import safe_open

        names: set[str] = set()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        return cls(frozenset(names), bool(model_config(folder).get("tie_word_embeddings")))

    def check(self, told: Names, where: str) -> None:
        """Refuse weights of which some are missing: an engine would go on with its old ones, and say nothing.

        Raises:
            Mismatch: names them.
        """
        if not self.names:
            return
        missing = self.names - told.names - ({HEAD} if self.tied or told.tied else set())
        other = told.names - self.names - ({HEAD} if self.tied or told.tied else set())
        if missing or other:
            words = [f"without {sorted(missing)[0]}"] if missing else []
            words += [f"with {sorted(other)[0]}"] if other else []
            raise Mismatch(
                f"these are the weights of another model: {len(missing):,} are missing, {len(other):,} unknown",
                where=f"{where}: {', '.join(words)}",
            )


def save_weights(weights: Iterable[tuple[str, Any]], folder: Path) -> None:
    """Write weights as one file of safetensors, with no copy but for views and other devices.

    Args:
        weights: pairs of a name and a tensor.
        folder: where `FILE` goes; there is none yet, or it is replaced at once.
    """
    from safetensors.torch import save_file

    whole = {name: weight.detach().cpu().contiguous() for name, weight in weights}
    stored: dict[int, str] = {}
    for name, weight in whole.items():
        if weight.untyped_storage().data_ptr() in stored:  # safetensors refuses to write memory twice
            whole[name] = weight.clone()
        stored.setdefault(weight.untyped_storage().data_ptr(), name)
    temporary = folder / f".{FILE}"
    save_file(whole, temporary)
    temporary.rename(folder / FILE)
