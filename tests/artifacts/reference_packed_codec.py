"""The packed codec read with plain Python, slowly, from docs/reference/codec.md alone: the twin of the fast one.

Nothing of xtk is used here, nor numba: who can follow this page can read a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

# Classes of numbers: the first of each, and the raw bits that choose within it.
FIRST = [*range(32), *(start << octave - 1 for octave in range(5, 20) for start in (2, 3))]
RAW = [0] * 32 + [octave - 1 for octave in range(5, 20) for _ in range(2)]
NONE, CERTAIN = 62, 63  # symbols that stand for no number

GAP_STATES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384]
# first step, largest step, step of odds, step of entropy
PRECISIONS = {
    "fine": (1 / 64, 1 / 8, 1 / 64, 1 / 64),
    "standard": (1 / 16, 1 / 2, 1 / 16, 1 / 16),
    "coarse": (1 / 8, 1.0, 1 / 8, 1 / 8),
}


def levels(first_step: float, largest_step: float) -> list[float]:
    """The log-probabilities that there are."""
    depth, found = 0.0, []
    for _ in range(512):
        found.append(-depth)
        depth += min(first_step * 2 ** (depth // 1.5), largest_step) if depth < 32 else 8.0
    return found


def base_128(content: bytes, count: int) -> tuple[list[int], bytes]:
    """Some whole numbers from the front of bytes, and the bytes after them."""
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


def parts(content: bytes, sizes: list[int]) -> list[bytes]:
    """Parts of some sizes, and the rest."""
    ends = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    return [content[start:stop] for start, stop in zip(ends, [*ends[1:], None], strict=True)]


def frequencies(content: bytes, contexts: int) -> list[list[int]]:
    """The frequency of each symbol in each context."""
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
    """Symbols out of bytes: asymmetric numeral systems, with a state below 2^63 and words of 32 bits."""

    def __init__(self, content: bytes, tables: list[list[int]]) -> None:
        padded = content + bytes(-len(content) % 4)
        self.words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
        self.tables, self.state = tables, 0
        self._refill()

    def _refill(self) -> None:
        while self.state < 1 << 31 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def symbol(self, context: int) -> int:
        place, start = self.state % 1024, 0
        for symbol, frequency in enumerate(self.tables[context]):
            if place < start + frequency:
                self.state = frequency * (self.state // 1024) + place - start
                self._refill()
                return symbol
            start += frequency
        raise AssertionError("nothing comes here")

    def number(self, context: int) -> int | None:
        """A number, or None for the symbol that stands for none."""
        symbol = self.symbol(context)
        if symbol >= NONE:
            return None if symbol == NONE else -1
        return self.within(symbol)

    def within(self, symbol: int) -> int:
        number = FIRST[symbol] + self.state % (1 << RAW[symbol])
        self.state >>= RAW[symbol]
        self._refill()
        return number

    def ids(self, first_context: int) -> Iterator[int]:
        """Rising numbers, without an end; None first if there are none."""
        state = number = 0
        while True:
            symbol = self.symbol(first_context + state)
            if symbol == NONE:
                yield -1
                return
            number += self.within(symbol)
            state = max(at for at, value in enumerate(GAP_STATES) if value <= GAP_STATES[state] + FIRST[symbol] + 1)
            self.gap_state = state
            yield number
            number += 1

    def end(self) -> None:
        assert self.state == 0
        assert not self.words


def zigzag(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number + 1) // 2


@dataclass
class Position:
    """What a position is told to be."""

    exact: dict[int, float]
    tail_mass: float
    realised: float
    entropy: float
    kind: int
    draws: list[dict[int, int]] = field(default_factory=list)


class PlainCodec:
    """Reads the rows of a shard.

    Args:
        tables: of the shard.
        order: ids, by rank.
        lengths: bytes of each id.
        precision, sets, draws: of the header's codec.
    """

    def __init__(
        self, tables: bytes, order: list[int], lengths: list[int], precision: str, sets: int, draws: int
    ) -> None:
        self.order, self.lengths, self.sets, self.draws = order, lengths, sets, draws
        first_step, largest_step, self.odds_step, self.entropy_step = PRECISIONS[precision]
        self.levels = levels(first_step, largest_step)
        (size,), rest = base_128(tables, 1)
        self.token_tables = frequencies(rest[:size], 48 + 1)
        (size,), rest = base_128(rest[size:], 1)
        of_signals, rest = rest[:size], rest[size:]
        (kinds, favourites, size), rest = base_128(rest, 3)
        drawn = 21 if sets else 0
        sizes = [kinds, 1, 17, kinds, 32, 17 + 32, 21, 8, drawn, drawn]
        (self.kind, self.odds, self.count, self.floor, self.tail, self.entropy, self.gap, self.level, self.drawn_gap,
         self.drawn_count) = (sum(sizes[:at]) for at in range(10))  # fmt: skip
        self.signal_tables = frequencies(of_signals, sum(sizes))
        self.favourites = self._favourites(Stream(rest[size:], frequencies(rest[:size], 1 + 21 + 1)), kinds)
        assert sum(map(len, self.favourites)) == favourites

    def _favourites(self, stream: Stream, kinds: int) -> list[list[tuple[int, int]]]:
        found = []
        for _ in range(kinds):
            own = []
            for _ in range(stream.number(0)):
                ranks = stream.ids(1)
                own += [(self.order[next(ranks)], stream.number(22)) for _ in range(stream.number(0))]
            found.append(own)
        stream.end()
        return found

    def named(self, kind: int, rank: int) -> tuple[int, int]:
        """The id that has a rank where positions are of a kind, and the context of its levels."""
        own = self.favourites[kind]
        return own[rank] if rank < len(own) else (self.order[rank - len(own)], 7)

    def tokens(self, content: bytes, length: int) -> tuple[list[int], list[int]]:
        stream, ids, ends, before, end = Stream(content, self.token_tables), [], [], 0, 0
        for _ in range(length):
            symbol = stream.symbol(before)
            before = min(symbol, 47)
            ids.append(self.order[stream.within(symbol)])
            end += self.lengths[ids[-1]] + zigzag(stream.number(48))
            ends.append(end)
        stream.end()
        return ids, ends

    def positions(self, content: bytes, realised: list[int]) -> list[Position]:
        if not realised and not content:
            return []
        numbers, rest = base_128(content, 3 + 2 * self.sets)
        first, second, third, *drawn = (
            Stream(part, self.signal_tables) for part in parts(rest, numbers[1 + self.sets :])
        )
        found, kind = [], 0
        for token in realised:
            kind = first.symbol(self.kind + kind)
            found.append(self._position(token, kind, first, second, third))
        for stream, size in zip(drawn, numbers[1:], strict=False):
            for position in found:
                position.draws.append(self._set(position.kind, stream))
            assert sum(len(position.draws[-1]) for position in found) == size
        assert sum(len(position.exact) - 1 for position in found) == numbers[0]
        for stream in (first, second, third, *drawn):
            stream.end()
        return found

    def _position(self, token: int, kind: int, first: Stream, second: Stream, third: Stream) -> Position:
        code = first.number(self.odds)
        if code is None:
            own, others, chance = -math.inf, 0.0, 0
        elif code < 0:
            own, others, chance = 0.0, -math.inf, 16
        else:
            logarithm = zigzag(code) * self.odds_step
            own, others = -math.log1p(math.exp(-abs(logarithm))), 0.0
            own, others = (own, own - logarithm) if logarithm >= 0 else (own + logarithm, own)
            chance = min(max(math.floor(logarithm + 0.5) + 8, 0), 16)
        count = first.number(self.count + chance)
        if count == 0:
            entropy = first.number(self.entropy + chance) * self.entropy_step
            return Position({token: own}, math.exp(others), own, entropy, kind)
        floor = first.number(self.floor + kind)
        tail = first.number(self.tail + min((floor or 0) // 2, 31))
        tail_context = 31 if tail is None else min(tail // 2, 31)
        rest = zigzag(first.number(self.entropy + 17 + tail_context)) * self.entropy_step
        logarithms = {}
        ranks = second.ids(self.gap)
        for _ in range(count):
            name, context = self.named(kind, next(ranks))
            below = third.number(self.level + context)
            logarithms[name] = -math.inf if below is None else self.levels[floor - below]
        tail_level = -math.inf if tail is None else self.levels[tail]
        mass = products = 0.0
        for logarithm in logarithms.values():
            mass += math.exp(logarithm)
            products += math.exp(logarithm) * logarithm if logarithm > -math.inf else 0.0
        total = mass + math.exp(tail_level)
        products += math.exp(tail_level) * tail_level if tail is not None else 0.0
        shift = others - math.log(total) if total > 0 and others > -math.inf else 0.0
        entropy = -math.exp(shift) * (products + shift * total)
        entropy += (-own * math.exp(own) if own > -math.inf else 0.0) + rest
        exact = {token: own} | {
            name: float(np.float32(logarithm) + np.float32(shift)) for name, logarithm in logarithms.items()
        }
        return Position(exact, math.exp(shift) * math.exp(tail_level), own, entropy, kind)

    def _set(self, kind: int, stream: Stream) -> dict[int, int]:
        drawn, left, ranks = {}, self.draws, stream.ids(self.drawn_gap)
        while left > 0:
            rank = next(ranks)
            if rank < 0:
                break
            count = 1
            if left > 1:
                count += stream.number(self.drawn_count + stream.gap_state)
            drawn[self.named(kind, rank)[0]] = count
            left -= count
        return drawn
