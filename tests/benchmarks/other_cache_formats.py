"""Bytes per position of the formats in which other toolkits store a teacher's top tokens.

They do not depend on the distributions, so they are computed from the formats alone: DistillKit's from
`distillkit/compression/config.py` and its README, Megatron-LM's from its offline distillation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

QWEN, LLAMA_3 = 151936, 128256  # DistillKit's `d` is the width of the model


@dataclass(frozen=True)
class DistillKit:
    """A configuration of DistillKit's compressor.

    Attributes:
        ids: k, the stored ids per position.
        exact: how many of the k log-probabilities are stored without approximation.
        exact_bits: bits of each of them.
        terms: terms of the polynomial that approximates the others.
        term_bits: bits of each term.
        bins: residuals of the polynomial, in bins of (bits of the scale, bits per residual, residuals).
    """

    ids: int
    exact: int
    exact_bits: int
    terms: int
    term_bits: int = 32
    bins: tuple[tuple[int, int, int], ...] = ()

    def bytes(self, vocabulary: int) -> int:
        """Return the bytes per position.

        ceil(k * ceil(log2 d) / 8)                        ids, packed
        + ceil((exact_k * exact_bits + terms * term_bits + bins) / 8)
        where a bin is its scale and its residuals, padded to whole bytes.
        """
        ids = -(-self.ids * (vocabulary - 1).bit_length() // 8)
        bins = sum(-(-(scale + bits * count) // 8) * 8 for scale, bits, count in self.bins)
        return ids + -(-(self.exact * self.exact_bits + self.terms * self.term_bits + bins) // 8)


def raw(ids: int) -> int:
    """Return the bytes per position of int32 ids with fp32 log-probabilities."""
    return 8 * ids


def megatron(ids: int) -> int:
    """Return the bytes per position of Megatron-LM's entries, five each before zstd; its largest id is 131,071."""
    return 5 * ids


LAYOUTS = {
    "DistillKit, recommended: k = 128, 16 exact in bf16, 6 terms": DistillKit(128, 16, 16, 6),
    "DistillKit, budget: k = 50, 1 exact in bf16, 3 terms": DistillKit(50, 1, 16, 3),
    "DistillKit, quick start: k = 128, 32 exact in fp32, 3 terms": DistillKit(128, 32, 32, 3),
    "DistillKit at k = 64, 16 exact in bf16, 6 terms": DistillKit(64, 16, 16, 6),
    "DistillKit at k = 64, 1 exact in bf16, 3 terms": DistillKit(64, 1, 16, 3),
    "DistillKit at k = 64, 16 exact in bf16, 4 terms, 16 residuals of 8 bits and 32 of 2": DistillKit(
        64, 16, 16, 4, bins=((16, 8, 16), (32, 2, 32))
    ),
}


def main() -> None:
    """Print the table."""
    rows = [(name, layout.bytes(QWEN), layout.bytes(LLAMA_3)) for name, layout in LAYOUTS.items()]
    rows += [("int32 and fp32 at k = 64", raw(64), raw(64)), ("Megatron-LM at k = 64, before zstd", 0, megatron(64))]
    sys.stdout.write("| layout | Qwen, 151,936 | Llama-3, 128,256 |\n| --- | --- | --- |\n")
    for name, qwen, llama in rows:
        sys.stdout.write(f"| {name} | {qwen or '(ids end at 131,071)'} | {llama} |\n")


if __name__ == "__main__":
    main()
