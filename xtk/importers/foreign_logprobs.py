"""Rows of DistillKit with token ids and log-probabilities.

Readers of rows raise ValueError, within `row_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from xtk.api.cache_from_arrays import to_array
from xtk.errors import XtkError
from xtk.importers.completion_logprobs import MAX_LOGPROB

# Lists of which at least this share has the token of the text are taken as belonging to the tokens.
MIN_LISTED_SHARE = 0.3
LOWEST_LOGPROB = -1e8

CONFIG = "compression_config.yaml"
_NUM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MAX_EXCESS = 0.1  # of a sum of probabilities; values from polynomials are not exact
_MAX_K, _MAX_VOCABULARY = 65536, 10_000_000


# Ids and log-probabilities that are listed at a position; None: nothing is listed.
Listed = tuple[NDArray[np.int64], NDArray[np.float64]] | None


@dataclass(frozen=True)
class ListedRow:
    """A row of DistillKit."""

    lists: list[Listed]  # of each position, (ids, log-probabilities); None: nothing is listed
    token_ids: NDArray[np.int64]  # [T]
    first: int | None = None  # index of the token that the first list is about; None: it is searched


def listed_row(record: Mapping[str, Any], codec: DistillKitCodec | None) -> ListedRow | None:
    """Return a row of DistillKit; None: the columns are others."""
    if _has(record, "input_ids", "bytepacked_indices", "compressed_logprobs"):
        return _read_compressed(record, codec)
    return _read_top_values(record) if _has(record, "input_ids", "token_ids", "top_values") else None


def _has(record: Mapping[str, Any], *columns: str) -> bool:
    return all(record.get(name) is not None for name in columns)


def fitted_row(row: ListedRow, token_ids: NDArray[np.int64]) -> tuple[list[Listed], NDArray[np.bool_]]:
    """Return the lists at the tokens that they are about, and which tokens are trained: all that have a list.

    List i may be about token i or i + 1, so the lists are put where most of them have the token of the text.
    `token_ids`: [T], its tokens.
    """
    if token_ids.ndim != 1 or not len(token_ids):
        raise ValueError("the token ids of the row are not a list of integers")
    size, count = len(token_ids), len(row.lists)
    firsts = (1, 0) if row.first is None else (row.first,)
    best, share = max(((first, _listed_share(row.lists, token_ids, first)) for first in firsts), key=lambda one: one[1])
    if share < MIN_LISTED_SHARE:
        raise XtkError(
            f"only {share:.0%} of the {count:,} lists have the token of the text, so they are of other tokens",
            hint="use the teacher's own --tokenizer",
        )
    placed: list[Listed] = [None] * size
    for at, entries in enumerate(row.lists):
        if 0 < at + best < size:
            placed[at + best] = entries
    return placed, np.array([item is not None for item in placed], np.bool_)


def _listed_share(lists: Sequence[Listed], token_ids: NDArray[np.int64], first: int) -> float:
    """Return the share of lists that have the token `first` places later."""
    pairs = [(entries[0], first + at) for at, entries in enumerate(lists) if entries is not None and first + at > 0]
    hits = [token < len(token_ids) and token_ids[token] in ids for ids, token in pairs]
    return float(np.mean(hits)) if hits else 0.0


def _pairs(ids: Any, logprobs: Any, names: tuple[str, str]) -> list[Listed]:
    if len(ids) != len(logprobs):
        raise ValueError(f"{names[0]} and {names[1]} are not lists of the same length")
    pairs = zip(ids, logprobs, strict=True)
    return [None if some is None or values is None else _pair(some, values, names) for some, values in pairs]


def _pair(ids: Any, logprobs: Any, names: tuple[str, str]) -> Listed:
    """Return the ids and log-probabilities of a position without entries that fill them up."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{names[0]} and {names[1]} have different shapes")
    # -inf and -1e9 fill up.
    pairs = [(token, value) for token, value in zip(ids, logprobs, strict=True) if value is not None]
    numbers = to_array(names[0], [token for token, _ in pairs], np.int64, "")
    amounts = to_array(names[1], [value for _, value in pairs], np.float64, "")
    if numbers.ndim != 1 or amounts.ndim != 1:
        raise ValueError(f"{names[0]} and {names[1]} have different shapes")
    kept = ~(amounts <= LOWEST_LOGPROB)
    if not (amounts <= MAX_LOGPROB).all() or (numbers[kept] < 0).any():
        raise ValueError(f"{names[0]} has an id below 0, or {names[1]} a value that is not a log-probability")
    return (numbers[kept], amounts[kept]) if kept.any() else None


def _read_top_values(record: Mapping[str, Any]) -> ListedRow:
    """Read a row of DistillKit without compression."""
    lists = _pairs(record["token_ids"], record["top_values"], ("token_ids", "top_values"))
    return ListedRow(lists, token_ids=to_array("input_ids", record["input_ids"], np.int64, ""))


def _read_compressed(record: Mapping[str, Any], codec: DistillKitCodec | None) -> ListedRow:
    """Read a row of DistillKit; list i is about token i + 1."""
    if codec is None:
        raise XtkError(
            f"columns of DistillKit need its {CONFIG}",
            hint="keep the file in the folder of the Parquet files, as DistillKit writes it",
        )
    ids, logprobs = codec.decode(record["bytepacked_indices"], record["compressed_logprobs"])
    tokens = to_array("input_ids", record["input_ids"], np.int64, "")
    return ListedRow(list(zip(ids, logprobs, strict=True)), token_ids=tokens, first=1)


@dataclass(frozen=True)
class DistillKitCodec:
    """The layout of a position in DistillKit's columns of bytes, from its `compression_config.yaml`.

    The bytes of a position are: `exact_k` values; the coefficients of a polynomial in the rank of the other values;
    and, in bins, a scale and integers of `element_bits` for what the polynomial lacks. With `delta_encoding` all are
    differences to the value before. Ids are integers of ceil(log2(vocabulary)) bits, the highest bit first.
    """

    vocab_size: int  # `d`
    k: int  # number of listed tokens
    exact_k: int  # of these, stored as they are
    exact_dtype: str  # their type
    terms: tuple[int | str, ...]  # of the polynomial, powers of the rank, "sqrt" or "exp"
    term_dtype: str  # type of its coefficients
    bins: tuple[tuple[str, int, int], ...]  # (type of the scale, bits of an element, number of elements)
    is_delta: bool  # whether values are differences
    is_normalized: bool  # whether ranks go from 0 to 1

    @classmethod
    def load(cls, path: Path) -> DistillKitCodec:
        """Read a configuration."""
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
            codec = cls(
                vocab_size=int(given["d"]),
                k=int(given["k"]),
                exact_k=int(given["exact_k"]),
                exact_dtype=str(given.get("exact_dtype", "float32")),
                terms=tuple(
                    term if isinstance(term, int) else str(term) for term in given.get("polynomial_terms") or ()
                ),
                term_dtype=str(given.get("term_dtype", "float32")),
                bins=tuple(
                    (str(bin_["scale_dtype"]), int(bin_["element_bits"]), int(bin_["num_elements"]))
                    for bin_ in given.get("residual_bins") or ()
                ),
                is_delta=bool(given.get("delta_encoding", True)),
                is_normalized=bool(given.get("normalize_t", False)),
            )
            problem = codec._problem()
        except (OSError, yaml.YAMLError, LookupError, TypeError, ArithmeticError, ValueError, RecursionError) as error:
            problem = f"this is not a compression configuration of DistillKit: {type(error).__name__}: {error}"
        if problem:
            raise XtkError(problem, where=str(path), hint="use the file that DistillKit wrote with the data")
        return codec

    def _problem(self) -> str | None:
        types = {self.exact_dtype, self.term_dtype, *(dtype for dtype, _, _ in self.bins)}
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

    def decode(self, packed_ids: Any, packed_logprobs: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the ids [P, k] and log-probabilities [P, k] of a row's positions.

        Values are at most 0. A sum of probabilities that is above 1 by at most a tenth, the error of the codec, is
        divided out.

        Args:
            packed_ids: [P, bytes], `bytepacked_indices`.
            packed_logprobs: [P, bytes], `compressed_logprobs`.
        """
        ids_of, values_of = _bytes(packed_ids), _bytes(packed_logprobs)
        widths = ids_of.shape[1], values_of.shape[1]
        wanted = ((self.k * self.index_bits + 7) // 8, self.logprob_bytes)
        if widths != wanted:
            raise XtkError(
                f"a position has {widths[0]} and {widths[1]} bytes, but {CONFIG} describes {wanted[0]} and {wanted[1]}",
                hint=f"keep the Parquet files in one folder with their own {CONFIG}",
            )
        if len(ids_of) != len(values_of):
            raise ValueError("bytepacked_indices and compressed_logprobs have different lengths")
        ids = _unpack(ids_of, self.index_bits, self.k)
        with np.errstate(all="ignore"):
            logprobs = np.minimum(self._values(values_of), 0.0)
            excess = np.log(np.exp(logprobs).sum(1, keepdims=True))
        if not np.isfinite(excess).all() or (excess > math.log1p(_MAX_EXCESS)).any():
            raise ValueError("the decoded log-probabilities do not sum to 1")
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


def _bytes(packed: Any) -> NDArray[np.uint8]:
    unpacked = np.asarray(packed)
    if unpacked.ndim != 2 or unpacked.dtype.kind not in "iu" or unpacked.min() < 0 or unpacked.max() > 255:
        raise ValueError("bytepacked_indices or compressed_logprobs are not rows of bytes")
    return unpacked.astype(np.uint8)


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
