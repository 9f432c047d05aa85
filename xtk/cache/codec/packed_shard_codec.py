"""The `packed` codec: tokens and quantized log-probabilities, entropy-coded."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.entropy_coded_streams import decode_varints, encode_varints, split_bytes
from xtk.cache.codec.logprob_packing import pack_logprobs
from xtk.cache.codec.logprob_unpacking import LogprobDecoder
from xtk.cache.codec.quantization_levels import QUANTIZATION_STEPS
from xtk.cache.codec.shard_codec_registry import CodecInput, CodecOutput
from xtk.cache.codec.token_packing import TokenDecoder, pack_tokens
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder


class PackedCodec:
    """Codec with ids as frequency ranks and log-probabilities as levels, entropy-coded; see docs/reference/codec.md."""

    needs_vocabulary_order: ClassVar[bool] = True

    def __init__(self, options: dict[str, Any], tables: bytes, vocabulary_order: VocabularyOrder | None) -> None:
        assert vocabulary_order is not None
        (size,), at = decode_varints(tables, 1)
        of_tokens, of_signals = split_bytes(memoryview(tables), at, [size])
        self._token_decoder = TokenDecoder(of_tokens, vocabulary_order.ids_by_frequency, vocabulary_order.token_bytes)
        self._logprob_decoder = LogprobDecoder(
            of_signals,
            vocabulary_order.ids_by_frequency,
            options["precision"],
            int(options["num_sample_sets"]),
            int(options["num_samples"]),
            bool(options.get("sample_logprobs", False)),
        )

    @classmethod
    def max_logprob_error(cls, options: dict[str, Any]) -> float:
        """Return the maximum quantization error of a log-probability above -32, nats."""
        precision = QUANTIZATION_STEPS[options["precision"]]
        # Half a step for the level, at most as much for the renormalization of the position, half a step of odds.
        return precision.largest_step + precision.odds_step / 2

    @classmethod
    def pack(
        cls, documents: CodecInput, options: dict[str, Any], vocabulary_order: VocabularyOrder | None
    ) -> CodecOutput:
        """Return the shard's codec tables, and for each document the bytes of its tokens and log-probabilities."""
        assert vocabulary_order is not None
        token_tables, tokens = pack_tokens(
            [(row.ids, row.byte_ends) for row, _ in documents],
            vocabulary_order.ids_by_frequency,
            vocabulary_order.token_bytes,
        )
        signal_tables, signals = pack_logprobs(
            [(scores, row.ids[scores.positions]) for row, scores in documents],
            vocabulary_order.ids_by_frequency,
            options["precision"],
            int(options["num_sample_sets"]),
            int(options["num_samples"]),
            bool(options.get("sample_logprobs", False)),
        )
        return encode_varints([len(token_tables)]) + token_tables + signal_tables, tokens, signals

    def unpack_tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return token ids and byte ends of a document, int32 [T] each."""
        return self._token_decoder.decode(packed, length)

    def unpack_stored_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return the stored log-probabilities of a document, as far as the precision keeps them."""
        return self._logprob_decoder.decode_stored_logprobs(packed, ids[positions], positions)

    def unpack_teacher_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], sample_set: int | None
    ) -> TeacherLogprobs:
        """Return a document's log-probabilities with one sample set, or with none."""
        return self._logprob_decoder.decode_teacher_logprobs(packed, ids[positions], positions, sample_set)
