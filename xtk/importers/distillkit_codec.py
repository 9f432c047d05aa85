"""Reader of DistillKit's compressed log-probabilities: its `compression_config.yaml`, and two columns of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from xtk.errors import XtkError

CONFIG = "compression_config.yaml"
_NUM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MAX_EXCESS = 0.1  # of a sum of probabilities; values from polynomials are not exact
_MAX_K, _MAX_VOCABULARY = 65536, 10_000_000


@dataclass(frozen=True)
class DistillKitCodec:
    """The layout of a position.

    The bytes of a position are: `exact_k` values; the coefficients of a polynomial in the rank of the other values;
    and, in bins, a scale and integers of `element_bits` for what the polynomial lacks. With `delta_encoding` all are
    differences to the value before. Ids are integers of ceil(log2(vocabulary)) bits, the highest bit first.

    Attributes:
        vocab_size: `d`.
        k: number of listed tokens.
        exact_k: of these, stored as they are.
        exact_dtype: their type.
        terms: of the polynomial, powers of the rank, "sqrt" or "exp".
        term_dtype: type of its coefficients.
        bins: (type of the scale, bits of an element, number of elements).
        is_delta: whether values are differences.
        is_normalized: whether ranks go from 0 to 1.
    """

    vocab_size: int
    k: int
    exact_k: int
    exact_dtype: str
    terms: tuple[int | str, ...]
    term_dtype: str
    bins: tuple[tuple[str, int, int], ...]
    is_delta: bool
    is_normalized: bool

    @classmethod
    def load(cls, path: Path) -> DistillKitCodec:
        """Read a configuration.

        Args:
            path: of `compression_config.yaml`.
        """
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
            codec = cls(
                vocab_size=int(given["d"]),
                k=int(given["k"]),
                exact_k=int(given["exact_k"]),
                exact_dtype=str(given.get("exact_dtype", "float32")),
                terms=tuple(one if isinstance(one, int) else str(one) for one in given.get("polynomial_terms") or ()),
                term_dtype=str(given.get("term_dtype", "float32")),
                bins=tuple(
                    (str(one["scale_dtype"]), int(one["element_bits"]), int(one["num_elements"]))
                    for one in given.get("residual_bins") or ()
                ),
                is_delta=bool(given.get("delta_encoding", True)),
                is_normalized=bool(given.get("normalize_t", False)),
            )
        except (
            OSError,
            UnicodeDecodeError,
            yaml.YAMLError,
            KeyError,
            TypeError,
            ArithmeticError,
            ValueError,
            RecursionError,
        ) as failure:
            what = f"this is not a compression configuration of DistillKit: {type(failure).__name__}: {failure}"
            raise XtkError(what, where=str(path), hint="use the file that DistillKit wrote with the data") from None
        if problem := codec._problem():
            raise XtkError(problem, where=str(path), hint="use the file that DistillKit wrote with the data")
        return codec

    def _problem(self) -> str | None:
        types = {self.exact_dtype, self.term_dtype, *(bin_ for bin_, _, _ in self.bins)}
        if unknown := types - _NUM_BYTES.keys():
            return f"the type {min(unknown)!r} is unknown"
        if not (0 < self.k <= _MAX_K and 0 <= self.exact_k <= self.k and 1 < self.vocab_size <= _MAX_VOCABULARY):
            return f"k {self.k}, exact_k {self.exact_k} and d {self.vocab_size} do not fit"
        if any(not (0 < bits <= 32 and count > 0) for _, bits, count in self.bins):
            return "a residual bin has an invalid size"
        if sum(count for _, _, count in self.bins) > self.k - self.exact_k:
            return "the residual bins have more elements than there are values"
        if any(isinstance(term, str) and term not in ("sqrt", "exp") for term in self.terms):
            return f"the polynomial has an unknown term: {self.terms}"
        return None

    @property
    def index_bits(self) -> int:
        """Bits of an id, as DistillKit computes them: with the logarithm in single precision."""
        return math.ceil(float(np.log2(np.float32(self.vocab_size))))

    @property
    def logprob_bytes(self) -> int:
        """Bytes of the values of a position."""
        return (
            self.exact_k * _NUM_BYTES[self.exact_dtype]
            + len(self.terms) * _NUM_BYTES[self.term_dtype]
            + sum(_NUM_BYTES[scale] + (bits * count + 7) // 8 for scale, bits, count in self.bins)
        )

    def decode(
        self, packed_ids: Any, packed_logprobs: Any, where: str
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the ids [P, k] and log-probabilities [P, k] of a row's positions.

        Values are at most 0. A sum of probabilities that is above 1 by at most a tenth, the error of the codec, is
        divided out.

        Args:
            packed_ids: [P, bytes], `bytepacked_indices`.
            packed_logprobs: [P, bytes], `compressed_logprobs`.
            where: name of the row in errors.
        """
        ids_of, values_of = _bytes(packed_ids), _bytes(packed_logprobs)
        wanted = ((self.k * self.index_bits + 7) // 8, self.logprob_bytes)
        if ids_of is None or values_of is None or (ids_of.shape[1], values_of.shape[1]) != wanted:
            widths = [None if array is None else array.shape[1] for array in (ids_of, values_of)]
            raise XtkError(
                f"a position has {widths[0]} and {widths[1]} bytes, but {CONFIG} describes {wanted[0]} and {wanted[1]}",
                where=where,
                hint=f"keep the Parquet files in one folder with their own {CONFIG}",
            )
        if len(ids_of) != len(values_of):
            what = "bytepacked_indices and compressed_logprobs have different lengths"
            raise XtkError(what, where=where, hint="remove this row, or use --skip-invalid")
        ids = _unpack(ids_of, self.index_bits, self.k)
        with np.errstate(all="ignore"):
            logprobs = np.minimum(self._values(values_of), 0.0)
            excess = np.log(np.exp(logprobs).sum(1, keepdims=True))
        if not np.isfinite(excess).all() or (excess > math.log1p(_MAX_EXCESS)).any():
            what = "the decoded log-probabilities do not sum to 1"
            raise XtkError(what, where=where, hint="remove this row, or use --skip-invalid")
        return ids, logprobs - np.maximum(excess, 0.0)

    def _values(self, packed: NDArray[np.uint8]) -> NDArray[np.float64]:
        start, size = 0, self.exact_k * _NUM_BYTES[self.exact_dtype]
        exact = _floats(packed[:, :size], self.exact_dtype)
        start, size = size, len(self.terms) * _NUM_BYTES[self.term_dtype]
        coefficients = _floats(packed[:, start : start + size], self.term_dtype)
        start += size
        count = self.k - self.exact_k
        others = np.zeros((len(packed), count))
        first = 0
        for scale_dtype, bits, elements in self.bins:
            size = _NUM_BYTES[scale_dtype]
            scale = _floats(packed[:, start : start + size], scale_dtype)
            start += size
            size = (bits * elements + 7) // 8
            whole = _unpack(packed[:, start : start + size], bits, elements).astype(np.float64)
            whole = whole * 2 - 1 if bits == 1 else whole - 2.0 ** (bits - 1)
            others[:, first : first + elements] = whole * scale
            start, first = start + size, first + elements
        if self.terms and count:
            ranks = np.linspace(0, 1, count) if self.is_normalized else np.arange(count, dtype=np.float64)
            curves = [getattr(np, term)(ranks) if isinstance(term, str) else ranks**term for term in self.terms]
            others += coefficients @ np.stack(curves)
        values = np.concatenate([exact, others], axis=1)
        return np.cumsum(values, axis=1) if self.is_delta else values


def _bytes(packed: Any) -> NDArray[np.uint8] | None:
    """Return rows of bytes as an array; None: they are not."""
    try:
        unpacked = np.asarray(packed)
    except ValueError:
        return None
    is_bytes = unpacked.ndim == 2 and unpacked.dtype.kind in "iu" and unpacked.size
    return unpacked.astype(np.uint8) if is_bytes and unpacked.min() >= 0 and unpacked.max() < 256 else None


def _floats(packed: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Return little-endian numbers [P, N]."""
    packed = np.ascontiguousarray(packed)
    if not packed.shape[1]:
        return np.zeros((len(packed), 0))
    if dtype == "bfloat16":
        return (packed.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return packed.view(f"<f{_NUM_BYTES[dtype]}").astype(np.float64)


def _unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int64]:
    """Return integers [P, count] of some bits, the highest bit first."""
    stream = np.unpackbits(packed, axis=1)[:, : bits * count].reshape(len(packed), count, bits)
    return stream.astype(np.int64) @ (np.int64(1) << np.arange(bits - 1, -1, -1, dtype=np.int64))
