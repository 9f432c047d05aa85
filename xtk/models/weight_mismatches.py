"""Weights that differ between a model and its files; importing it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xtk import terminal
from xtk.errors import CorruptError
from xtk.models.safetensors_headers import format_names

_HINT = "copy or download the model again"


@dataclass(frozen=True)
class WeightMismatches:
    """Weights that differ between files and model, sorted by name.

    Attributes:
        missing: in the model but not in the files: transformers initializes them randomly.
        unexpected: in the files but not in the model.
        reshaped: (name, shape in the file, shape in the model) where the shapes differ.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @classmethod
    def from_loading_info(cls, loading_info: Mapping[str, Any]) -> Self:
        """Return the mismatches in transformers' loading info, which leaves out tied heads and known buffers."""
        reshaped = {(str(name), tuple(stored), tuple(own)) for name, stored, own in loading_info["mismatched_keys"]}
        return cls(
            tuple(sorted(loading_info["missing_keys"])),
            tuple(sorted(loading_info["unexpected_keys"])),
            tuple(sorted(reshaped)),
        )

    def check(self, folder: Path, *, quiet: bool = False) -> None:
        """Refuse missing weights and other shapes; print a note on unexpected weights, once per folder.

        Raises:
            CorruptError: with the first names.
        """
        if self.missing:
            missing = format_names(list(self.missing))
            what = f"the model's files lack {len(self.missing):,} of its weights: {missing}"
            raise CorruptError(what, where=str(folder), hint=_HINT)
        if self.reshaped:
            shapes = [f"{name} {list(stored)} instead of {list(own)}" for name, stored, own in self.reshaped]
            raise CorruptError(
                f"{len(shapes):,} weights do not have the shapes of the configuration: {format_names(shapes)}",
                where=str(folder),
                hint="use the config.json that belongs to these weights, or download the model again",
            )
        if self.unexpected and not quiet:
            names = format_names(list(self.unexpected))
            terminal.note_once(f"warning: {folder}: the model does not use {len(self.unexpected):,} weights ({names})")
