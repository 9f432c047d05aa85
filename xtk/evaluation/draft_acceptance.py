"""Measures of a draft model from speculative decoding: acceptance, accepted length, speed-up, failures by category."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.evaluation.byte_text_categories import TEXT_CATEGORIES, categorize_bytes
from xtk.evaluation.speculative_decoding import ADDED, REPLACED, SpeculativeCompletion, SpeculativeDecoder
from xtk.evaluation.standard_errors import Estimate, Ratio
from xtk.progress import Progress
from xtk.text.document import Document, Segment
from xtk.text.tokenizer import Tokenizer

SPECIAL_TOKENS = "special tokens"  # the category of tokens without bytes
BISECTION_STEPS = 60


@dataclass(frozen=True)
class StepCosts:
    """Median times of forward passes with a cache, in seconds."""

    draft: float  # of a pass of the draft, with one or two tokens
    target: float  # of a pass of the target with one token, in generation by the target alone
    verifications: Mapping[int, float]  # {k: a pass of the target with k + 1 tokens}

    @property
    def ratio(self) -> float:
        """Cost of a draft step over that of a target step."""
        return self.draft / self.target

    def verification_ratio(self, num_draft_tokens: int) -> float:
        """Cost of verifying a block over that of a target step."""
        return self.verifications[num_draft_tokens] / self.target


@dataclass(frozen=True)
class BlockSizeMeasures:
    """Measures of speculative decoding with blocks of one size, compared with the target alone on the same prompts."""

    num_draft_tokens: int  # proposals per block, k
    completions: Sequence[SpeculativeCompletion]  # one per prompt
    alone: Sequence[SpeculativeCompletion]  # completions of the same prompts by the target alone

    @cached_property
    def _counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Verified and accepted proposals, float64 [prompts, k] each."""
        counts = [one.proposal_counts(self.num_draft_tokens) for one in self.completions]
        return np.array([pair[0] for pair in counts], float), np.array([pair[1] for pair in counts], float)

    @property
    def acceptance(self) -> Estimate:
        """Accepted proposals over verified ones."""
        verified, accepted = self._counts
        return Ratio(accepted.sum(1), verified.sum(1)).estimate()

    @property
    def acceptance_by_position(self) -> list[Estimate]:
        """The same for each position in the block; nan where no block came so far."""
        verified, accepted = self._counts
        return [Ratio(accepted[:, at], verified[:, at]).estimate() for at in range(self.num_draft_tokens)]

    @property
    def accepted_length(self) -> Estimate:
        """Tokens per block, with the target's own one."""
        lengths, blocks = zip(*((len(one.ids), one.num_blocks) for one in self.completions), strict=True)
        return Ratio(np.array(lengths, float), np.array(blocks, float)).estimate()

    @property
    def speed_up(self) -> Estimate:
        """Time per token of the target alone over that of speculative decoding."""
        table = np.array(
            [(a.seconds, len(a.ids), s.seconds, len(s.ids)) for a, s in zip(self.alone, self.completions, strict=True)]
        )
        return _jackknife(table, lambda sums: float((sums[0] / sums[1]) / (sums[2] / sums[3])))

    def acceptance_minus(self, other: BlockSizeMeasures) -> Estimate:
        """Difference of acceptance from another draft's, with the error of the difference over the same prompts."""
        (verified, accepted), (others_verified, others_accepted) = self._counts, other._counts
        table = np.stack([some.sum(1) for some in (accepted, verified, others_accepted, others_verified)], 1)
        return _jackknife(table, lambda sums: float(sums[0] / sums[1] - sums[2] / sums[3]))

    def to_json(self, costs: StepCosts, cost_ratios: Sequence[float]) -> dict[str, Any]:
        """Return all measures; numbers that are not finite are None."""
        k, length = self.num_draft_tokens, self.accepted_length.value
        verification = costs.verification_ratio(k)
        record: dict[str, Any] = {"num_draft_tokens": k, "blocks": sum(one.num_blocks for one in self.completions)}
        for name in ("acceptance", "accepted_length", "speed_up"):
            estimate: Estimate = getattr(self, name)
            record |= {name: _finite(estimate.value), f"{name}_error": estimate.finite_error}
        return record | {
            "acceptance_by_position": [_finite(one.value) for one in self.acceptance_by_position],
            "acceptance_by_position_error": [one.finite_error for one in self.acceptance_by_position],
            "predicted_length": expected_length(self.acceptance.value, k),
            "verification_cost": verification,
            "expected_speed_up": length / (k * costs.ratio + verification),
            "break_even_acceptance": break_even_acceptance(k, k * costs.ratio + verification),
            "by_cost_ratio": {
                f"{ratio:g}": {
                    "expected_speed_up": length / (k * ratio + 1),
                    "break_even_acceptance": break_even_acceptance(k, k * ratio + 1),
                }
                for ratio in cost_ratios
            },
        }


def expected_length(acceptance: float, num_draft_tokens: int) -> float:
    """Return the expected tokens per block if each proposal is accepted independently (Leviathan 2023, equation 1)."""
    return float(sum(acceptance**power for power in range(num_draft_tokens + 1)))


def break_even_acceptance(num_draft_tokens: int, cost: float) -> float | None:
    """Return the acceptance from which a block, of `cost` target steps, is faster than the target; None: never."""
    if cost >= num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_length(middle, num_draft_tokens) >= cost else (middle, high)
    return high


def measure_drafts(
    decoders: Sequence[SpeculativeDecoder],
    prompts: Sequence[NDArray[np.int32]],
    block_sizes: Sequence[int],
    max_lengths: Sequence[int],
    seed: int = 0,
) -> list[tuple[list[BlockSizeMeasures], StepCosts]]:
    """Continue each prompt by the target alone, and with blocks of each size and draft, one after the other.

    `decoders`: one per draft, with the same target; `max_lengths`: of each completion, whose last block is complete.
    Returns for each draft the measures by block size, and the costs of steps.
    """
    alone: list[SpeculativeCompletion] = []
    completions: list[dict[int, list[SpeculativeCompletion]]] = [{size: [] for size in block_sizes} for _ in decoders]
    total = len(prompts) * (1 + len(decoders) * len(block_sizes))
    with Progress("evaluate-draft", total, "completions") as progress:
        for number, (prompt, length) in enumerate(zip(prompts, max_lengths, strict=True)):
            key = (seed * 1_000_003 + number) * 1_000
            alone.append(decoders[0].generate(prompt, 0, length, key))
            progress.advance(1)
            for decoder, by_size in zip(decoders, completions, strict=True):
                for size in block_sizes:
                    by_size[size].append(decoder.generate(prompt, size, length, key + size))
                    progress.advance(1)
    of_target = decoders[0].target.step_seconds
    verifications = {size: statistics.median(of_target[size + 1]) for size in block_sizes}
    results = []
    for decoder, by_size in zip(decoders, completions, strict=True):
        drafts = [seconds for steps in decoder.draft.step_seconds.values() for seconds in steps]
        costs = StepCosts(statistics.median(drafts), statistics.median(of_target[1]), verifications)
        results.append(([BlockSizeMeasures(size, by_size[size], alone) for size in block_sizes], costs))
    return results


def failures_by_category(
    completions: Sequence[SpeculativeCompletion], tokenizer: Tokenizer
) -> dict[str, tuple[int, int]]:
    """Return {text category: (verified proposals, rejected ones)}, by the token of the text at the place.

    A token has the category of its first byte that is not white space, if it has one.
    """
    table: dict[str, tuple[int, int]] = {}
    for completion in completions:
        categories = token_categories(completion.ids, tokenizer)
        for category, origin in zip(categories, completion.origins.tolist(), strict=True):
            if origin != ADDED:
                verified, rejected = table.get(category, (0, 0))
                table[category] = (verified + 1, rejected + (origin == REPLACED))
    return dict(sorted(table.items(), key=lambda item: -item[1][0]))


def token_categories(ids: NDArray[np.int32], tokenizer: Tokenizer) -> list[str]:
    """Return the text category of each token."""
    vocabulary = tokenizer.vocabulary
    spellings = [b"" if vocabulary.special_mask[token] else vocabulary.bytes_by_id[token] for token in ids.tolist()]
    # A byte that is not valid UTF-8 becomes one byte of another text, so that offsets stay.
    text = re.sub("[\udc80-\udcff]", "?", b"".join(spellings).decode("utf-8", "surrogateescape"))
    of_bytes = categorize_bytes(Document((Segment("text", text, True),)))
    categories, start = [], 0
    for spelling in spellings:
        offset = len(spelling) - len(spelling.lstrip())
        at = start + (offset if offset < len(spelling) else 0)
        categories.append(TEXT_CATEGORIES[of_bytes[at]] if spelling else SPECIAL_TOKENS)
        start += len(spelling)
    return categories


def _jackknife(table: NDArray[np.float64], measure: Callable[[NDArray[np.float64]], float]) -> Estimate:
    """Return a function of the column sums of a table [prompts, columns], with its error over prompts."""
    sums, count = table.sum(0), len(table)
    if count < 2:
        return Estimate(measure(sums), math.nan)
    without = np.array([measure(sums - row) for row in table])
    return Estimate(measure(sums), math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum())))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
