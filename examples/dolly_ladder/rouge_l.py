"""Reward `rouge_l.py:rouge_l`: ROUGE-L of an answer with the nearest reference. Needs `pip install rouge-score`."""

from __future__ import annotations

import functools
from typing import Any

from rouge_score.rouge_scorer import RougeScorer


@functools.cache
def _scorer() -> RougeScorer:
    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(completion: str, prompt: str, row: dict[str, Any]) -> float:
    """Return the highest F-measure over the references in the row's field `output`, as the papers do."""
    references = row["output"] if isinstance(row["output"], list) else [row["output"]]
    return max(float(_scorer().score(reference, completion.strip())["rougeL"].fmeasure) for reference in references)
