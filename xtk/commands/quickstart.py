"""`xtk quickstart`: the whole way on a corpus that every Python carries, on a CPU, in minutes."""

from __future__ import annotations

from xtk.commands import options


def quickstart(output: options.Output) -> None:
    """Distil a small student across tokenizers, from nothing, and compare it."""
