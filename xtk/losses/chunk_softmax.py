"""What a chunk of logits says at entries and rests, and the gradient of its logits.

The logits of a chunk need not be in one piece: other processes may have other columns, and an item whose rows are more
than a chunk is read in several. What is read is added up over the pieces; the gradient is written a piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses import cell_kernels
from xtk.losses.clipped_surrogate import TermSurrogate
from xtk.losses.divergences import Divergence
from xtk.losses.prefix_alternatives import ChunkAlternatives
from xtk.losses.prefix_products import ChunkPrefixProduct
from xtk.losses.sorted_probs import ChunkSortedProbs, LargestLogits, scale_rows
from xtk.models.output_head import HeadShard

MIN_SUM = 1e-37


@dataclass
class LossChunk:
    """The items of one term whose rows lie in one chunk; offsets and rows begin at 0.

    `weights` are those of the entries within their own row, without the averaging over an item's rows. Rests are listed
    for items whose teacher has one: their rows, the item of each (counted among these items), the log of the share of a
    row. `item_groups` are the items of all cells, then of all rests; `of_items` are the weights of items. In a chain,
    `cells` counts its links too, and each row of a rest is an item of its own.
    """

    num_items: int
    num_cells: int
    entry_cells: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    weights: Tensor
    remainder_probs: Tensor
    remainder_rows: Tensor
    remainder_items: Tensor
    remainder_log_weights: Tensor
    item_groups: Tensor
    scale: float
    divergence: Divergence
    alternatives: ChunkAlternatives | None
    prefix_product: ChunkPrefixProduct | None
    sorted_probs: ChunkSortedProbs | None
    outside_mode: str
    factor: float
    surrogate: TermSurrogate | None
    item_weights: Tensor | None

    @property
    def num_remainders(self) -> int:
        """How many rests there are, each of one or more rows."""
        return len(self.remainder_probs) if self.prefix_product is None else len(self.remainder_rows)


@dataclass(frozen=True)
class LogitsWindow:
    """The piece of a chunk's logits that exists at one time.

    Attributes:
        first_row, stop_row: its rows.
        first_token: its first token.
        num_tokens: how many tokens.
        is_whole_chunk: whether it is all of the chunk.
    """

    first_row: int
    stop_row: int
    first_token: int
    num_tokens: int
    is_whole_chunk: bool

    @property
    def rows(self) -> slice:
        """Its rows, among those of the chunk."""
        return slice(self.first_row, self.stop_row)

    def entry_indices(self, rows: Tensor, tokens: Tensor) -> WindowIndices:
        """Return where entries (row, token) stand in it."""
        if self.is_whole_chunk:
            return WindowIndices(rows * self.num_tokens + tokens, None)
        inside = (
            (rows >= self.first_row)
            & (rows < self.stop_row)
            & (tokens >= self.first_token)
            & (tokens < self.first_token + self.num_tokens)
        )
        which = inside.nonzero()[:, 0]
        return WindowIndices((rows[which] - self.first_row) * self.num_tokens + tokens[which] - self.first_token, which)

    def row_indices(self, rows: Tensor) -> WindowIndices:
        """Return which of its rows some rows are."""
        if self.is_whole_chunk:
            return WindowIndices(rows, None)
        which = ((rows >= self.first_row) & (rows < self.stop_row)).nonzero()[:, 0]
        return WindowIndices(rows[which] - self.first_row, which)


@dataclass(frozen=True)
class WindowIndices:
    """Places in a window: flat indices, and of which of all they are; None: of all, in their order."""

    local: Tensor
    selected: Tensor | None

    def select(self, values: Tensor) -> Tensor:
        """Pick, of values of all, those that are here."""
        return values if self.selected is None else values[self.selected]

    def scatter_into(self, values: Tensor, total: Tensor) -> None:
        """Write the values that are here into those of all."""
        if self.selected is None:
            total.copy_(values)
        else:
            total[self.selected] = values


@dataclass(frozen=True)
class ChunkStatistics:
    """What the logits of a chunk say; a sum over the tokens of a window is one over all tokens when it is added up.

    Attributes:
        row_max: [n], the largest logit of each row.
        exp_sums: [n], the sum of the exponentials of the logits over it.
        remainder_sums: [rest rows] of each part, what is left of this sum without the entries.
        entry_logits: [entries] of each part, their logits.
        alternative_logits: [alternatives] of each part that has some, their logits.
        largest: of each part that compares ranks, the student's largest.
        included_sums: [items] of each such part, the sums over the tokens that take part.
    """

    row_max: Tensor
    exp_sums: Tensor
    remainder_sums: list[Tensor]
    entry_logits: list[Tensor]
    alternative_logits: list[Tensor]
    largest: list[LargestLogits]
    included_sums: list[Tensor]

    @property
    def row_logsumexp(self) -> Tensor:
        """[n], the log-sum-exp of each row."""
        return self.exp_sums.log() + self.row_max


@dataclass(frozen=True)
class WindowStatistics:
    """A window that was read: its exponentials, from which the entries of the part `removed` are taken out.

    `covered` is what the entries of a part with rests have of the exponentials.
    """

    window: LogitsWindow
    exponentials: Tensor
    removed_chunk: int
    entry_indices: list[WindowIndices]
    alternative_indices: list[WindowIndices]
    remainder_indices: list[WindowIndices]
    entry_exponentials: list[Tensor | None]
    statistics: ChunkStatistics


def read_window(
    logits: Tensor, window: LogitsWindow, chunks: list[LossChunk], shard: HeadShard | None
) -> WindowStatistics:
    """Read a window; its logits are written over."""
    # The last part with a rest: its entries are taken out of the exponentials, to be spread.
    removed = max((number for number, part in enumerate(chunks) if len(part.remainder_rows)), default=-1)
    entries = [window.entry_indices(part.rows, part.tokens) for part in chunks]
    before = [
        window.entry_indices(part.alternatives.rows, part.alternatives.tokens)
        for part in chunks
        if part.alternatives is not None
    ]
    rests = [window.row_indices(part.remainder_rows) for part in chunks]
    flat = logits.view(-1)
    taken, taken_before = ([flat.take(places.local) for places in some] for some in (entries, before))
    of_ranks = [part.sorted_probs for part in chunks if part.sorted_probs is not None]
    largest = [ranks.find_largest(logits, window.first_row, window.first_token) for ranks in of_ranks]
    highest = logits.amax(1)
    if shard is not None:
        shard.all_reduce_max(highest)
    exponentials = logits.sub_(highest[:, None]).exp_()
    normaliser = exponentials.sum(1)
    masses = [ranks.included_sums(exponentials, window.first_row, window.first_token) for ranks in of_ranks]
    covered: list[Tensor | None] = []
    left = []
    # That of `removed` comes last, and is not put back.
    for part, places, rest in zip(chunks, entries, rests, strict=True):
        if not len(part.remainder_rows):
            covered.append(None)
            left.append(normaliser[:0])
            continue
        own = flat.take(places.local).mul_(places.select(part.weights))
        scatter_add_(flat, places.local, -own)
        left.append(exponentials.sum(1)[rest.local])
        if part is not chunks[removed]:
            scatter_add_(flat, places.local, own)
        covered.append(own)
    said = ChunkStatistics(highest, normaliser, left, taken, taken_before, largest, masses)
    return WindowStatistics(window, exponentials, removed, entries, before, rests, covered, said)


def combine_windows(
    windows: list[WindowStatistics], chunks: list[LossChunk], shard: HeadShard | None
) -> ChunkStatistics:
    """Return what all windows of a chunk say, of this process and of all that have other columns."""
    if shard is None and len(windows) == 1:
        said = windows[0].statistics
        for rest in said.remainder_sums:
            rest.clamp_min_(MIN_SUM)
        return said
    like = windows[0].statistics.exp_sums
    highest = torch.cat([reading.statistics.row_max for reading in windows])
    normaliser = torch.cat([reading.statistics.exp_sums for reading in windows])
    left = [like.new_zeros(len(part.remainder_rows)) for part in chunks]
    entries = [like.new_zeros(len(part.rows)) for part in chunks]
    before = [like.new_zeros(len(part.alternatives.rows)) for part in chunks if part.alternatives is not None]
    for reading in windows:
        said = reading.statistics
        for places, values, total in zip(
            [*reading.remainder_indices, *reading.entry_indices, *reading.alternative_indices],
            [*said.remainder_sums, *said.entry_logits, *said.alternative_logits],
            [*left, *entries, *before],
            strict=True,
        ):
            places.scatter_into(values, total)
    of_ranks = [part.sorted_probs for part in chunks if part.sorted_probs is not None]
    masses = [
        sum(of_windows, like.new_zeros(()))
        for of_windows in zip(*(one.statistics.included_sums for one in windows), strict=True)
    ]
    found = zip(*(one.statistics.largest for one in windows), strict=True)
    largest = [ranks.merge_largest(list(some)) for ranks, some in zip(of_ranks, found, strict=True)]
    if shard is not None:
        largest = [
            ranks.merge_largest(_gather_largest(some, shard)) for ranks, some in zip(of_ranks, largest, strict=True)
        ]
        sums = [normaliser, *left, *entries, *before, *masses]
        together = shard.all_reduce_sum(torch.cat(sums))
        for values, total in zip(torch.split(together, [len(values) for values in sums]), sums, strict=True):
            total.copy_(values)
    left = [rest.clamp_min_(MIN_SUM) for rest in left]
    return ChunkStatistics(highest, normaliser, left, entries, before, largest, masses)


def _gather_largest(own: LargestLogits, shard: HeadShard) -> list[LargestLogits]:
    """Return what each process of the group found among its tokens."""
    tokens, logits = shard.all_gather(own.tokens), shard.all_gather(own.logits)
    return [LargestLogits(*one) for one in zip(tokens, logits, strict=True)]


@dataclass(frozen=True)
class RankGradients:
    """The gradients of what the student's largest tokens of one part say.

    Attributes:
        rows, tokens: [H], where they stand.
        logprob_gradients: [H], of their log-probabilities.
        item_rows: [items].
        mass_gradients: [items], of the probability of all tokens that take part.
        masses: [items], these probabilities.
        sorted_probs: which tokens take part.
    """

    rows: Tensor
    tokens: Tensor
    logprob_gradients: Tensor
    item_rows: Tensor
    mass_gradients: Tensor
    masses: Tensor
    sorted_probs: ChunkSortedProbs


@dataclass(frozen=True)
class ChunkGradients:
    """The gradients of log-probabilities: of the entries, rest rows and alternatives of each part; and of ranks."""

    entries: list[Tensor]
    remainders: list[Tensor]
    alternatives: list[Tensor]
    ranks: list[RankGradients]


def logits_gradient(
    window_statistics: WindowStatistics, statistics: ChunkStatistics, gradients: ChunkGradients, chunks: list[LossChunk]
) -> Tensor:
    """Turn the exponentials of a window into the gradient of its logits, in place.

    The gradient is `exponentials * factors`, with more factors for the tokens of bands, that of each entry at its
    place, and that of each rest spread over what is left of its rows. Nothing is added to be taken away again: where a
    rest is tiny, its factor is huge.

    Args:
        window_statistics: the window, just read.
        statistics: what the whole chunk says.
        gradients: of it.
        chunks: the items.
    """
    window, exponentials = window_statistics.window, window_statistics.exponentials
    flat = exponentials.view(-1)
    in_all = torch.zeros_like(statistics.exp_sums)
    runs = [part.alternatives for part in chunks if part.alternatives is not None]
    for part, of_entries, of_rests in zip(chunks, gradients.entries, gradients.remainders, strict=True):
        scatter_add_(in_all, part.rows, of_entries)
        scatter_add_(in_all, part.remainder_rows, of_rests)
    for run, of_before in zip(runs, gradients.alternatives, strict=True):
        scatter_add_(in_all, run.rows, of_before)
    bands = []
    for some in gradients.ranks:
        scatter_add_(in_all, some.rows, some.logprob_gradients)
        mask = some.sorted_probs.included_mask(window.first_token, window.num_tokens, exponentials.dtype)
        if mask is not None:  # else they are all of the row, whose mass is not moved
            scatter_add_(in_all, some.item_rows, some.masses * some.mass_gradients)
            of_band = torch.zeros_like(in_all).index_add_(0, some.item_rows, some.mass_gradients) / statistics.exp_sums
            bands.append((of_band[window.rows], mask))
    factors = (-in_all / statistics.exp_sums)[window.rows]
    sparse = [
        (places.local, places.select(gradient))
        for places, gradient in zip(
            [*window_statistics.entry_indices, *window_statistics.alternative_indices],
            [*gradients.entries, *gradients.alternatives],
            strict=True,
        )
    ]
    for some in gradients.ranks:
        places = window.entry_indices(some.rows, some.tokens)
        sparse.append((places.local, places.select(some.logprob_gradients)))
    in_place, more = factors, list[Tensor]()
    for number, (part, own, rests) in enumerate(
        zip(chunks, window_statistics.entry_exponentials, window_statistics.remainder_indices, strict=True)
    ):
        if own is None:
            continue
        places, of_left = window_statistics.entry_indices[number], torch.zeros_like(factors)
        scatter_add_(
            of_left, rests.local, rests.select(gradients.remainders[number] / statistics.remainder_sums[number])
        )
        if number == window_statistics.removed_chunk:
            in_place = factors + of_left
            rows = places.select(part.rows) - window.first_row
            of_places = factors[rows]
            for of_band, mask in bands:
                of_places = of_places + of_band[rows] * mask[places.select(part.tokens) - window.first_token]
            sparse.append((places.local, own * of_places))
        else:
            copy = exponentials.clone()
            last = window_statistics.entry_exponentials[window_statistics.removed_chunk]
            assert last is not None
            scatter_add_(copy.view(-1), window_statistics.entry_indices[window_statistics.removed_chunk].local, last)
            scatter_add_(copy.view(-1), places.local, -own)
            more.append(copy.mul_(of_left[:, None]))
    scale_rows(exponentials, in_place, bands)
    for tensor in more:
        exponentials.add_(tensor)
    for places_of_some, gradient in sparse:
        scatter_add_(flat, places_of_some, gradient)
    return exponentials


def scatter_add_(values: Tensor, indices: Tensor, increments: Tensor) -> None:
    """Add to values [n], in place, at places that may come twice."""
    if values.device.type == "cpu":  # three times as fast as torch's, which is written for all shapes
        cell_kernels.scatter_add_(values.numpy(), indices.numpy(), increments.numpy())
    else:
        values.scatter_add_(0, indices, increments)
