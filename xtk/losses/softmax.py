"""What a chunk of logits says at entries and rests, and the gradient of its logits.

The logits of a chunk need not be in one piece: other processes may have other columns, and an item whose rows are more
than a chunk is read in several. What is read is added up over the pieces; the gradient is written a piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses import kernels
from xtk.losses.alternatives import PartOfRuns
from xtk.losses.chains import PartOfChain
from xtk.losses.divergences import Divergence
from xtk.losses.ranks import Largest, PartOfRanks, scale
from xtk.losses.surrogates import SurrogateOfTerm
from xtk.models.head import Shard

TINY = 1e-37


@dataclass
class Part:
    """The items of one term whose rows lie in one chunk; offsets and rows begin at 0.

    `weights` are those of the entries within their own row, without the averaging over an item's rows. Rests are listed
    for items whose teacher has one: their rows, the item of each (counted among these items), the log of the share of a
    row. `item_groups` are the items of all cells, then of all rests; `of_items` are the weights of items. In a chain,
    `cells` counts its links too, and each row of a rest is an item of its own.
    """

    items: int
    cells: int
    entry_cells: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    weights: Tensor
    rest_probs: Tensor
    rest_rows: Tensor
    rest_items: Tensor
    rest_log_shares: Tensor
    item_groups: Tensor
    scale: float
    divergence: Divergence
    runs: PartOfRuns | None
    chain: PartOfChain | None
    ranks: PartOfRanks | None
    outside: str
    factor: float
    surrogate: SurrogateOfTerm | None
    of_items: Tensor | None

    @property
    def rests(self) -> int:
        """How many rests there are, each of one or more rows."""
        return len(self.rest_probs) if self.chain is None else len(self.rest_rows)


@dataclass(frozen=True)
class Window:
    """The piece of a chunk's logits that exists at one time.

    Attributes:
        first, stop: its rows.
        start: its first token.
        width: how many tokens.
        whole: whether it is all of the chunk.
    """

    first: int
    stop: int
    start: int
    width: int
    whole: bool

    @property
    def rows(self) -> slice:
        """Its rows, among those of the chunk."""
        return slice(self.first, self.stop)

    def places(self, rows: Tensor, tokens: Tensor) -> Places:
        """Return where entries (row, token) stand in it."""
        if self.whole:
            return Places(rows * self.width + tokens, None)
        inside = (rows >= self.first) & (rows < self.stop) & (tokens >= self.start) & (tokens < self.start + self.width)
        which = inside.nonzero()[:, 0]
        return Places((rows[which] - self.first) * self.width + tokens[which] - self.start, which)

    def places_of_rows(self, rows: Tensor) -> Places:
        """Return which of its rows some rows are."""
        if self.whole:
            return Places(rows, None)
        which = ((rows >= self.first) & (rows < self.stop)).nonzero()[:, 0]
        return Places(rows[which] - self.first, which)


@dataclass(frozen=True)
class Places:
    """Places in a window: flat indices, and of which of all they are; None: of all, in their order."""

    flat: Tensor
    which: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """Pick, of values of all, those that are here."""
        return values if self.which is None else values[self.which]

    def put(self, values: Tensor, total: Tensor) -> None:
        """Write the values that are here into those of all."""
        if self.which is None:
            total.copy_(values)
        else:
            total[self.which] = values


@dataclass(frozen=True)
class Spoken:
    """What the logits of a chunk say; a sum over the tokens of a window is one over all tokens when it is added up.

    Attributes:
        highest: [n], the largest logit of each row.
        normaliser: [n], the sum of the exponentials of the logits over it.
        left: [rest rows] of each part, what is left of this sum without the entries.
        entries: [entries] of each part, their logits.
        before: [alternatives] of each part that has some, their logits.
        largest: of each part that compares ranks, the student's largest.
        masses: [items] of each such part, the sums over the tokens that take part.
    """

    highest: Tensor
    normaliser: Tensor
    left: list[Tensor]
    entries: list[Tensor]
    before: list[Tensor]
    largest: list[Largest]
    masses: list[Tensor]

    @property
    def log_totals(self) -> Tensor:
        """[n], the log-sum-exp of each row."""
        return self.normaliser.log() + self.highest


@dataclass(frozen=True)
class Reading:
    """A window that was read: its exponentials, from which the entries of the part `removed` are taken out.

    `covered` is what the entries of a part with rests have of the exponentials.
    """

    window: Window
    exponentials: Tensor
    removed: int
    entries: list[Places]
    before: list[Places]
    rests: list[Places]
    covered: list[Tensor | None]
    said: Spoken


def read(logits: Tensor, window: Window, parts: list[Part], shard: Shard | None) -> Reading:
    """Read a window; its logits are written over."""
    # The last part with a rest: its entries are taken out of the exponentials, to be spread.
    removed = max((number for number, part in enumerate(parts) if len(part.rest_rows)), default=-1)
    entries = [window.places(part.rows, part.tokens) for part in parts]
    before = [window.places(part.runs.rows, part.runs.tokens) for part in parts if part.runs is not None]
    rests = [window.places_of_rows(part.rest_rows) for part in parts]
    flat = logits.view(-1)
    taken, taken_before = ([flat.take(places.flat) for places in some] for some in (entries, before))
    of_ranks = [part.ranks for part in parts if part.ranks is not None]
    largest = [ranks.find(logits, window.first, window.start) for ranks in of_ranks]
    highest = logits.amax(1)
    if shard is not None:
        shard.highest(highest)
    exponentials = logits.sub_(highest[:, None]).exp_()
    normaliser = exponentials.sum(1)
    masses = [ranks.sums(exponentials, window.first, window.start) for ranks in of_ranks]
    covered: list[Tensor | None] = []
    left = []
    # That of `removed` comes last, and is not put back.
    for part, places, rest in zip(parts, entries, rests, strict=True):
        if not len(part.rest_rows):
            covered.append(None)
            left.append(normaliser[:0])
            continue
        own = flat.take(places.flat).mul_(places.of(part.weights))
        add_at(flat, places.flat, -own)
        left.append(exponentials.sum(1)[rest.flat])
        if part is not parts[removed]:
            add_at(flat, places.flat, own)
        covered.append(own)
    said = Spoken(highest, normaliser, left, taken, taken_before, largest, masses)
    return Reading(window, exponentials, removed, entries, before, rests, covered, said)


def add_up(readings: list[Reading], parts: list[Part], shard: Shard | None) -> Spoken:
    """Return what all windows of a chunk say, of this process and of all that have other columns."""
    if shard is None and len(readings) == 1:
        said = readings[0].said
        for rest in said.left:
            rest.clamp_min_(TINY)
        return said
    like = readings[0].said.normaliser
    highest = torch.cat([reading.said.highest for reading in readings])
    normaliser = torch.cat([reading.said.normaliser for reading in readings])
    left = [like.new_zeros(len(part.rest_rows)) for part in parts]
    entries = [like.new_zeros(len(part.rows)) for part in parts]
    before = [like.new_zeros(len(part.runs.rows)) for part in parts if part.runs is not None]
    for reading in readings:
        said = reading.said
        for places, values, total in zip(
            [*reading.rests, *reading.entries, *reading.before],
            [*said.left, *said.entries, *said.before],
            [*left, *entries, *before],
            strict=True,
        ):
            places.put(values, total)
    of_ranks = [part.ranks for part in parts if part.ranks is not None]
    masses = [
        sum(of_windows, like.new_zeros(())) for of_windows in zip(*(one.said.masses for one in readings), strict=True)
    ]
    found = zip(*(one.said.largest for one in readings), strict=True)
    largest = [ranks.merged(list(some)) for ranks, some in zip(of_ranks, found, strict=True)]
    if shard is not None:
        largest = [ranks.merged(_of_all_shards(some, shard)) for ranks, some in zip(of_ranks, largest, strict=True)]
        sums = [normaliser, *left, *entries, *before, *masses]
        together = shard.add(torch.cat(sums))
        for values, total in zip(torch.split(together, [len(values) for values in sums]), sums, strict=True):
            total.copy_(values)
    left = [rest.clamp_min_(TINY) for rest in left]
    return Spoken(highest, normaliser, left, entries, before, largest, masses)


def _of_all_shards(own: Largest, shard: Shard) -> list[Largest]:
    """Return what each process of the group found among its tokens."""
    tokens, logits = shard.gather(own.tokens), shard.gather(own.logits)
    return [Largest(*one) for one in zip(tokens, logits, strict=True)]


@dataclass(frozen=True)
class OfRanks:
    """The gradients of what the student's largest tokens of one part say.

    Attributes:
        rows, tokens: [H], where they stand.
        of_logprobs: [H], of their log-probabilities.
        item_rows: [items].
        of_masses: [items], of the probability of all tokens that take part.
        masses: [items], these probabilities.
        ranks: which tokens take part.
    """

    rows: Tensor
    tokens: Tensor
    of_logprobs: Tensor
    item_rows: Tensor
    of_masses: Tensor
    masses: Tensor
    ranks: PartOfRanks


@dataclass(frozen=True)
class OfParts:
    """The gradients of log-probabilities: of the entries, rest rows and alternatives of each part; and of ranks."""

    entries: list[Tensor]
    rests: list[Tensor]
    before: list[Tensor]
    ranks: list[OfRanks]


def gradient_of_logits(reading: Reading, said: Spoken, gradients: OfParts, parts: list[Part]) -> Tensor:
    """Turn the exponentials of a window into the gradient of its logits, in place.

    The gradient is `exponentials * factors`, with more factors for the tokens of bands, that of each entry at its
    place, and that of each rest spread over what is left of its rows. Nothing is added to be taken away again: where a
    rest is tiny, its factor is huge.

    Args:
        reading: the window, just read.
        said: what the whole chunk says.
        gradients: of it.
        parts: the items.
    """
    window, exponentials = reading.window, reading.exponentials
    flat = exponentials.view(-1)
    in_all = torch.zeros_like(said.normaliser)
    runs = [part.runs for part in parts if part.runs is not None]
    for part, of_entries, of_rests in zip(parts, gradients.entries, gradients.rests, strict=True):
        add_at(in_all, part.rows, of_entries)
        add_at(in_all, part.rest_rows, of_rests)
    for run, of_before in zip(runs, gradients.before, strict=True):
        add_at(in_all, run.rows, of_before)
    bands = []
    for some in gradients.ranks:
        add_at(in_all, some.rows, some.of_logprobs)
        mask = some.ranks.mask(window.start, window.width, exponentials.dtype)
        if mask is not None:  # else they are all of the row, whose mass is not moved
            add_at(in_all, some.item_rows, some.masses * some.of_masses)
            of_band = torch.zeros_like(in_all).index_add_(0, some.item_rows, some.of_masses) / said.normaliser
            bands.append((of_band[window.rows], mask))
    factors = (-in_all / said.normaliser)[window.rows]
    sparse = [
        (places.flat, places.of(gradient))
        for places, gradient in zip(
            [*reading.entries, *reading.before], [*gradients.entries, *gradients.before], strict=True
        )
    ]
    for some in gradients.ranks:
        places = window.places(some.rows, some.tokens)
        sparse.append((places.flat, places.of(some.of_logprobs)))
    in_place, more = factors, list[Tensor]()
    for number, (part, own, rests) in enumerate(zip(parts, reading.covered, reading.rests, strict=True)):
        if own is None:
            continue
        places, of_left = reading.entries[number], torch.zeros_like(factors)
        add_at(of_left, rests.flat, rests.of(gradients.rests[number] / said.left[number]))
        if number == reading.removed:
            in_place = factors + of_left
            rows = places.of(part.rows) - window.first
            of_places = factors[rows]
            for of_band, mask in bands:
                of_places = of_places + of_band[rows] * mask[places.of(part.tokens) - window.start]
            sparse.append((places.flat, own * of_places))
        else:
            copy = exponentials.clone()
            last = reading.covered[reading.removed]
            assert last is not None
            add_at(copy.view(-1), reading.entries[reading.removed].flat, last)
            add_at(copy.view(-1), places.flat, -own)
            more.append(copy.mul_(of_left[:, None]))
    scale(exponentials, in_place, bands)
    for tensor in more:
        exponentials.add_(tensor)
    for places_of_some, gradient in sparse:
        add_at(flat, places_of_some, gradient)
    return exponentials


def add_at(values: Tensor, places: Tensor, more: Tensor) -> None:
    """Add to values [n], in place, at places that may come twice."""
    if values.device.type == "cpu":  # three times as fast as torch's, which is written for all shapes
        kernels.add_at(values.numpy(), places.numpy(), more.numpy())
    else:
        values.scatter_add_(0, places, more)
