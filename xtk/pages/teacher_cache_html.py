"""The HTML page of `xtk inspect --html`: statistics of a teacher cache and its first documents."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from xtk.cache.reader import TeacherCache
from xtk.cache.statistics import PositionStatistics
from xtk.cache.teacher_document import TeacherDocument
from xtk.pages.html_page import page, render, visible_bytes
from xtk.text.tokenizer import Tokenizer

MAX_DOCUMENTS, MAX_TOKENS = 2, 1500  # shown; tokens per document
MAX_ALTERNATIVES = 6
HISTOGRAM_BINS = 24
PLOT_WIDTH, PLOT_HEIGHT = 460, 150  # of a histogram, in pixels
SUPPORT_OPTIONS = ("support", "top_k", "top_p", "num_samples", "num_sample_sets")
TOTALS = ("documents", "positions", "tokens", "shards", "bytes", "shared_file_bytes")
FIGURES = (
    "teacher_bits_per_byte", "bytes_per_position", "teacher_logprobs_bytes_per_position", "mean_entropy_nats",
    "quantization_kl_nats", "quantization_kl_fraction_of_entropy", "mean_stored_mass", "mean_exact_ids",
    "mean_sampled_ids", "observed_outside_top_k_fraction",
)  # fmt: skip


def cache_page(record: dict[str, Any], cache: TeacherCache, positions: PositionStatistics, request: str = "") -> str:
    """Return the page: a table of statistics, sizes and histograms; then documents."""
    header, statistics = record["header"], record["statistics"]
    rows = [cache.read_document(number) for number in range(min(MAX_DOCUMENTS, len(cache)))]
    facts = {
        "teacher": header["teacher"]["name"],
        "support": ", ".join(f"{name} {value}" for name, value in header["options"].items() if name in SUPPORT_OPTIONS),
        "precision": header["codec"]["precision"],
        **{name: statistics[name] for name in TOTALS},
        **{name.replace("_", " "): statistics[name] for name in FIGURES if statistics.get(name) is not None},
    }
    total, count = max(statistics["bytes"], 1), max(statistics["positions"], 1)
    histograms = [
        _histogram("Probability mass of exact tokens", positions.kept_mass, "probability"),
        _histogram("Entropy", positions.entropy, "nats"),
        _histogram("Exact tokens", positions.num_exact_ids, "tokens per position"),
    ]
    if positions.num_sampled_ids.any():
        histograms.append(_histogram("Sampled tokens", positions.num_sampled_ids, "tokens per position"))
    content = render(
        "cache",
        facts={name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()},
        sizes=[
            (size / total, f"{name} {100 * size / total:.1f} %, {size / count:.1f} bytes a position")
            for name, size in statistics["bytes_by_section"].items()
        ],
        sampled=f"{len(positions.entropy):,} positions of {statistics['sampled_documents']:,} documents",
        histograms=histograms,
        documents=[_scored_document(row, cache.teacher_tokenizer) for row in rows],
        width=PLOT_WIDTH,
        height=PLOT_HEIGHT,
    )
    return page(f"{record['path']}, a teacher cache", content, request)


def _histogram(title: str, values: NDArray[Any], unit: str) -> dict[str, Any]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    low = min(low, 0.0) if high - low > 0.5 * abs(high) else low
    one_bin_per_integer = values.dtype.kind == "i" and high - low < HISTOGRAM_BINS
    edges = np.linspace(low, high if high > low else low + 1, HISTOGRAM_BINS + 1)
    if one_bin_per_integer:
        edges = np.arange(low - 0.5, high + 1)
    counts, edges = np.histogram(values, edges)
    step, top = PLOT_WIDTH / len(counts), max(int(counts.max(initial=1)), 1)
    bars = [
        {
            "x": at * step + 0.5,
            "width": max(step - 1, 0.5),
            "height": PLOT_HEIGHT * count / top,
            "title": f"{edges[at]:.3g} to {edges[at + 1]:.3g}: {count:,}",
        }
        for at, count in enumerate(counts.tolist())
    ]
    mean = f"mean {float(values.mean()):.3g}" if len(values) else "none"
    return {"title": title, "unit": unit, "mean": mean, "bars": bars, "low": f"{low:.3g}", "high": f"{high:.3g}"}


def _scored_document(row: TeacherDocument, tokenizer: Tokenizer) -> dict[str, Any]:
    positions = {place: at for at, place in enumerate(row.stored_logprobs.positions.tolist())}
    tokens = [
        (_token_html(tokenizer, token), *_title_and_shade(tokenizer, row, positions.get(place)))
        for place, token in enumerate(row.tokens.ids[:MAX_TOKENS].tolist())
    ]
    return {"text": row.document.text, "length": len(row.tokens), "positions": len(positions), "tokens": tokens}


def _title_and_shade(tokenizer: Tokenizer, row: TeacherDocument, position: int | None) -> tuple[str, int]:
    """Return the probability and the most likely tokens of a position, and its redness in percent."""
    if position is None:
        return "", 0
    scores = row.stored_logprobs
    observed = float(scores.observed_logprobs[position])
    kept = slice(scores.offsets[position], scores.offsets[position + 1])
    best = np.argsort(-scores.logprobs[kept], kind="stable")[:MAX_ALTERNATIVES]
    lines = [f"probability {np.exp(observed):.3g}, entropy {scores.entropy[position]:.3g} nats"]
    lines += [
        f"{np.exp(logprob):.3f}  {_token_text(tokenizer, other)}"
        for other, logprob in zip(scores.ids[kept][best].tolist(), scores.logprobs[kept][best].tolist(), strict=True)
    ]
    # From white at probability 1 to red at e^-8.
    return "\n".join(lines), round(min(max(-observed, 0.0) / 8, 1) * 75)


def _token_html(tokenizer: Tokenizer, token: int) -> Markup:
    if token in tokenizer.special_token_names:
        return Markup("<i>{}</i>").format(tokenizer.special_token_names[token])
    return visible_bytes(tokenizer.vocabulary.bytes_of(token), {" ": " ", "\n": "<i>⏎</i>\n"})


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    if token in tokenizer.special_token_names:
        return tokenizer.special_token_names[token]
    if token >= len(tokenizer):
        return f"id {token} (not a token)"
    return repr(tokenizer.vocabulary.bytes_of(token).decode("utf-8", "backslashreplace"))
