"""The codec that packs: tokens and signals in bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.grids import PRECISIONS
from xtk.artifacts.codec.signal_reader import SignalReader
from xtk.artifacts.codec.signal_writer import pack_signals
from xtk.artifacts.codec.streams import cut, pack_numbers, unpack_numbers
from xtk.artifacts.codec.tokens import TokenReader, pack_tokens
from xtk.artifacts.ranks import Ranks
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import Scores, Signal


class PackedCodec:
    """Ids as ranks and log-probabilities as levels, in an entropy code; docs/reference/codec.md tells of each bit.

    Args:
        options: of the header's codec: "precision", "num_sample_sets" R, "num_samples" n.
        tables: of the shard.
        ranks: of the cache.

    Raises:
        Damaged: the tables are not what was written.
    """

    needs_ranks: ClassVar[bool] = True

    def __init__(self, options: dict[str, Any], tables: bytes, ranks: Ranks | None) -> None:
        assert ranks is not None
        (size,), at = unpack_numbers(tables, 1)
        of_tokens, of_signals = cut(memoryview(tables), at, [size])
        self._tokens = TokenReader(of_tokens, ranks.order, ranks.lengths)
        self._signals = SignalReader(
            of_signals, ranks.order, options["precision"], int(options["num_sample_sets"]), int(options["num_samples"])
        )

    @classmethod
    def largest_error(cls, options: dict[str, Any]) -> float:
        """Return by how much a log-probability above -32 can be off when it comes back, nats."""
        precision = PRECISIONS[options["precision"]]
        # Half a step where it lies, at most as much again that makes its position add up, half a step of odds.
        return precision.largest_step + precision.odds_step / 2

    @classmethod
    def pack(
        cls, rows: Sequence[tuple[TokenSequence, Scores]], options: dict[str, Any], ranks: Ranks | None
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return the shard's tables, and for each row the bytes of its tokens and of its signal.

        Raises:
            ValueError: scores that are not what they should be.
        """
        assert ranks is not None
        token_tables, tokens = pack_tokens([(row.ids, row.ends) for row, _ in rows], ranks.order, ranks.lengths)
        signal_tables, signals = pack_signals(
            [(scores, row.ids[scores.positions]) for row, scores in rows],
            ranks.order,
            options["precision"],
            int(options["num_sample_sets"]),
            int(options["num_samples"]),
        )
        return pack_numbers([len(token_tables)]) + token_tables + signal_tables, tokens, signals

    def tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document.

        Raises:
            Damaged: the bytes are not what was written.
        """
        return self._tokens.tokens(packed, length)

    def scores(self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Scores:
        """Return everything that was kept of a document, as exactly as it was.

        Raises:
            Damaged: the bytes are not what was written.
        """
        return self._signals.scores(packed, ids[positions], positions)

    def signal(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], draw: int | None
    ) -> Signal:
        """Return a document's signal with one set of draws.

        Raises:
            Damaged: the bytes are not what was written.
        """
        return self._signals.signal(packed, ids[positions], positions, draw)
