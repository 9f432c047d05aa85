"""Reference implementation of the packed codec: a slow decoder in plain Python, from docs/reference/codec.md alone.

It uses neither xtk nor numba, which shows that this page is enough to read a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

# Classes of integers: the first integer of each, and the number of raw bits that select one within it.
CLASS_STARTS = [*range(32), *(start << octave - 1 for octave in range(5, 20) for start in (2, 3))]
RAW_BITS = [0] * 32 + [octave - 1 for octave in range(5, 20) for _ in range(2)]
NONE, CERTAIN = 62, 63  # symbols that do not represent integers

GAP_STATES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384]
# first step, largest step, step of odds, step of entropy, step of depths
PRECISIONS = {
    "fine": (1 / 64, 1 / 8, 1 / 64, 1 / 64, 1 / 32),
    "standard": (1 / 16, 1 / 2, 1 / 16, 1 / 16, 1 / 8),
    "coarse": (1 / 8, 1.0, 1 / 8, 1 / 8, 1 / 4),
}


def levels(first_step: float, largest_step: float) -> list[float]:
    """Return the log-probabilities of the 512 levels."""
    depth, found = 0.0, []
    for _ in range(512):
        found.append(-depth)
        depth += min(first_step * 2 ** (depth // 1.5), largest_step) if depth < 32 else 8.0
    return found


def base_128(content: bytes, count: int) -> tuple[list[int], bytes]:
    """Return `count` non-negative integers in base 128 from the start of bytes, and the bytes after them."""
    numbers = []
    for _ in range(count):
        number = shift = 0
        while True:
            digit, content = content[0], content[1:]
            number |= (digit & 127) << shift
            shift += 7
            if digit < 128:
                break
        numbers.append(number)
    return numbers, content


def split_bytes(content: bytes, sizes: list[int]) -> list[bytes]:
    """Return parts of these sizes, and the remaining bytes as the last part."""
    ends = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    return [content[start:stop] for start, stop in zip(ends, [*ends[1:], None], strict=True)]


def frequencies(content: bytes, contexts: int) -> list[list[int]]:
    """Return the frequency of each symbol in each context."""
    bits = iter("".join(f"{byte:08b}"[::-1] for byte in content))

    def gamma() -> int:
        zeros = 0
        while next(bits) == "0":
            zeros += 1
        return int("1" + "".join(next(bits) for _ in range(zeros)), 2) - 1

    found = []
    for _ in range(contexts):
        row = [gamma() for _ in range(gamma())]
        assert sum(row) in (0, 1024)
        found.append(row)
    return found


class Stream:
    """A stream of symbols in asymmetric numeral systems, with a state below 2^63 and words of 32 bits."""

    def __init__(self, content: bytes, tables: list[list[int]]) -> None:
        padded = content + bytes(-len(content) % 4)
        self.words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
        self.tables, self.state = tables, 0
        self._refill()

    def _refill(self) -> None:
        while self.state < 1 << 31 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def symbol(self, context: int) -> int:
        slot, start = self.state % 1024, 0
        for symbol, frequency in enumerate(self.tables[context]):
            if slot < start + frequency:
                self.state = frequency * (self.state // 1024) + slot - start
                self._refill()
                return symbol
            start += frequency
        raise AssertionError("nothing comes here")

    def integer(self, context: int) -> int | None:
        """Return an integer; None for the symbol NONE, -1 for the symbol CERTAIN."""
        symbol = self.symbol(context)
        if symbol >= NONE:
            return None if symbol == NONE else -1
        return self.integer_of_class(symbol)

    def integer_of_class(self, symbol: int) -> int:
        number = CLASS_STARTS[symbol] + self.state % (1 << RAW_BITS[symbol])
        self.state >>= RAW_BITS[symbol]
        self._refill()
        return number

    def increasing_integers(self, first_context: int) -> Iterator[int]:
        """Yield increasing integers without end; only -1 for an empty list."""
        state = number = 0
        while True:
            symbol = self.symbol(first_context + state)
            if symbol == NONE:
                yield -1
                return
            number += self.integer_of_class(symbol)
            state = max(
                at for at, value in enumerate(GAP_STATES) if value <= GAP_STATES[state] + CLASS_STARTS[symbol] + 1
            )
            self.gap_state = state
            yield number
            number += 1

    def check_end(self) -> None:
        assert self.state == 0
        assert not self.words


def zigzag(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number + 1) // 2


@dataclass
class Position:
    """The decoded values of a position."""

    exact: dict[int, float]
    remainder_mass: float
    observed_logprob: float
    entropy: float
    cluster: int
    sample_sets: list[dict[int, int]] = field(default_factory=list)
    sample_logprobs: list[dict[int, float]] = field(default_factory=list)


class ReferenceDecoder:
    """Decoder of the rows of a shard.

    Args:
        tables: codec tables of the shard.
        order: ids, the most frequent first.
        lengths: number of bytes of each id.
        precision, num_sample_sets, num_samples, has_sample_logprobs: of the header's codec.
    """

    def __init__(
        self, tables: bytes, order: list[int], lengths: list[int], precision: str, num_sample_sets: int,
        num_samples: int, has_sample_logprobs: bool = False,
    ) -> None:  # fmt: skip
        self.order, self.lengths, self.num_sample_sets, self.num_samples = order, lengths, num_sample_sets, num_samples
        first_step, largest_step, self.odds_step, self.entropy_step, self.depth_step = PRECISIONS[precision]
        self.levels = levels(first_step, largest_step)
        (size,), remaining = base_128(tables, 1)
        self.token_tables = frequencies(remaining[:size], 48 + 1)
        (size,), remaining = base_128(remaining[size:], 1)
        logprob_frequencies, remaining = remaining[:size], remaining[size:]
        (num_clusters, num_frequent_ids, size), remaining = base_128(remaining, 3)
        sample_contexts = 21 if num_sample_sets else 0
        self.has_depths = bool(num_sample_sets and has_sample_logprobs)
        sizes = [num_clusters, 1, 17, num_clusters, 32, 17 + 32, 21, 8, sample_contexts, sample_contexts]
        sizes.append(24 if self.has_depths else 0)
        (self.cluster, self.odds, self.count, self.floor, self.remainder, self.entropy, self.gap, self.level,
         self.sample_gap, self.sample_count, self.depth) = (sum(sizes[:at]) for at in range(11))  # fmt: skip
        self.logprob_tables = frequencies(logprob_frequencies, sum(sizes))
        self.frequent_ids = self._read_frequent_ids(
            Stream(remaining[size:], frequencies(remaining[:size], 1 + 21 + 1)), num_clusters
        )
        assert sum(map(len, self.frequent_ids)) == num_frequent_ids

    def _read_frequent_ids(self, stream: Stream, num_clusters: int) -> list[list[tuple[int, int]]]:
        found = []
        for _ in range(num_clusters):
            cluster_ids = []
            for _ in range(stream.integer(0)):
                ranks = stream.increasing_integers(1)
                cluster_ids += [(self.order[next(ranks)], stream.integer(22)) for _ in range(stream.integer(0))]
            found.append(cluster_ids)
        stream.check_end()
        return found

    def id_of_rank(self, cluster: int, rank: int) -> tuple[int, int]:
        """Return the id with this rank in a cluster, and the context of its levels."""
        frequent_ids = self.frequent_ids[cluster]
        return frequent_ids[rank] if rank < len(frequent_ids) else (self.order[rank - len(frequent_ids)], 7)

    def tokens(self, content: bytes, length: int) -> tuple[list[int], list[int]]:
        stream, ids, ends, previous, end = Stream(content, self.token_tables), [], [], 0, 0
        for _ in range(length):
            symbol = stream.symbol(previous)
            previous = min(symbol, 47)
            ids.append(self.order[stream.integer_of_class(symbol)])
            end += self.lengths[ids[-1]] + zigzag(stream.integer(48))
            ends.append(end)
        stream.check_end()
        return ids, ends

    def positions(self, content: bytes, observed_ids: list[int]) -> list[Position]:
        if not observed_ids and not content:
            return []
        numbers, remaining = base_128(content, 3 + 2 * self.num_sample_sets)
        position_stream, id_stream, level_stream, *sample_streams = (
            Stream(part, self.logprob_tables) for part in split_bytes(remaining, numbers[1 + self.num_sample_sets :])
        )
        found, cluster = [], 0
        for token in observed_ids:
            cluster = position_stream.symbol(self.cluster + cluster)
            found.append(self._position(token, cluster, position_stream, id_stream, level_stream))
        for stream, size in zip(sample_streams, numbers[1:], strict=False):
            for position in found:
                counts, logprobs = self._sample_set(position, stream)
                position.sample_sets.append(counts)
                position.sample_logprobs.append(logprobs)
            assert sum(len(position.sample_sets[-1]) for position in found) == size
        assert sum(len(position.exact) - 1 for position in found) == numbers[0]
        for stream in (position_stream, id_stream, level_stream, *sample_streams):
            stream.check_end()
        return found

    def _position(
        self, observed_id: int, cluster: int, position_stream: Stream, id_stream: Stream, level_stream: Stream
    ) -> Position:
        odds = position_stream.integer(self.odds)
        if odds is None:
            observed, others, odds_context = -math.inf, 0.0, 0
        elif odds < 0:
            observed, others, odds_context = 0.0, -math.inf, 16
        else:
            logarithm = zigzag(odds) * self.odds_step
            observed, others = -math.log1p(math.exp(-abs(logarithm))), 0.0
            observed, others = (observed, observed - logarithm) if logarithm >= 0 else (observed + logarithm, observed)
            odds_context = min(max(math.floor(logarithm + 0.5) + 8, 0), 16)
        count = position_stream.integer(self.count + odds_context)
        if count == 0:
            entropy = position_stream.integer(self.entropy + odds_context) * self.entropy_step
            return Position({observed_id: observed}, math.exp(others), observed, entropy, cluster)
        floor = position_stream.integer(self.floor + cluster)
        remainder_level = position_stream.integer(self.remainder + min((floor or 0) // 2, 31))
        remainder_context = 31 if remainder_level is None else min(remainder_level // 2, 31)
        entropy_difference = zigzag(position_stream.integer(self.entropy + 17 + remainder_context)) * self.entropy_step
        logprobs = {}
        ranks = id_stream.increasing_integers(self.gap)
        for _ in range(count):
            token_id, context = self.id_of_rank(cluster, next(ranks))
            below = level_stream.integer(self.level + context)
            logprobs[token_id] = -math.inf if below is None else self.levels[floor - below]
        remainder_logprob = -math.inf if remainder_level is None else self.levels[remainder_level]
        mass = products = 0.0
        for logarithm in logprobs.values():
            mass += math.exp(logarithm)
            products += math.exp(logarithm) * logarithm if logarithm > -math.inf else 0.0
        total = mass + math.exp(remainder_logprob)
        products += math.exp(remainder_logprob) * remainder_logprob if remainder_level is not None else 0.0
        shift = others - math.log(total) if total > 0 and others > -math.inf else 0.0
        entropy = -math.exp(shift) * (products + shift * total)
        entropy += (-observed * math.exp(observed) if observed > -math.inf else 0.0) + entropy_difference
        exact = {observed_id: observed} | {
            token_id: float(np.float32(logarithm) + np.float32(shift)) for token_id, logarithm in logprobs.items()
        }
        return Position(exact, math.exp(shift) * math.exp(remainder_logprob), observed, entropy, cluster)

    def _sample_set(self, position: Position, stream: Stream) -> tuple[dict[int, int], dict[int, float]]:
        logprobs = {}
        samples, remaining, ranks = {}, self.num_samples, stream.increasing_integers(self.sample_gap)
        while remaining > 0:
            rank = next(ranks)
            if rank < 0:
                break
            count = 1
            if remaining > 1:
                count += stream.integer(self.sample_count + stream.gap_state)
            token_id, level_context = self.id_of_rank(position.cluster, rank)
            samples[token_id] = count
            if self.has_depths:
                depth = stream.integer(self.depth + 8 * min(count - 1, 2) + level_context) * self.depth_step
                logprobs[token_id] = math.log(position.remainder_mass) - depth
            remaining -= count
        return samples, logprobs
