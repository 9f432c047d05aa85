"""Time of the audit of a projection with 151,646 rows, qwen x llama3, including the categories of both vocabularies."""

from __future__ import annotations

from measurement import median_seconds, real_data, report

from xtk.projection.build import build_projection
from xtk.projection.coverage_audit import audit_projection
from xtk.projection.special_tokens import match_special_tokens
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.text.tokenizer import Tokenizer


def main() -> None:
    """Measure and print."""
    tokenizers = [Tokenizer(real_data() / "tokenizers" / name) for name in ("qwen", "llama3")]
    projection, special_tokens = build_projection(*tokenizers), match_special_tokens(*tokenizers)
    seconds = median_seconds(lambda: audit_projection(projection, VocabularyPair(*tokenizers), *special_tokens), 7)
    report(__file__, [(f"audit of {projection.student_width:,} rows", f"{seconds:.2f} s", "0.5 s")])


if __name__ == "__main__":
    main()
