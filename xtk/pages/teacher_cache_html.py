"""The HTML page of `xtk inspect --html`: statistics of a teacher cache and its first documents."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from xtk.pages.alignment_html import text_direction, visible_bytes
from xtk.pages.html_page import PAGE_END, page_start, stacked_bar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xtk.cache.reader import TeacherCache
    from xtk.cache.shard import StoredDocument
    from xtk.cache.statistics import PositionStatistics
    from xtk.text.tokenizer import Tokenizer

MAX_DOCUMENTS, MAX_TOKENS = 2, 1500  # shown; tokens per document
MAX_ALTERNATIVES = 6
HISTOGRAM_BINS = 24
PLOT_WIDTH, PLOT_HEIGHT = 460, 150  # of a histogram, in pixels

CACHE_STYLE = """
:root { --unlikely: 214 74 60; } @media (prefers-color-scheme: dark) { :root { --unlikely: 235 96 82; } }
.document { font: 0.95rem/1.75 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  border: 1px solid var(--line); border-radius: 0.3rem; padding: 0.7rem; }
.document bdi { padding: 0.1em 0; border-radius: 0.15em; background: rgb(var(--unlikely) / calc(var(--u, 0) * 1%)); }
bdi[title]:hover { outline: 2px solid var(--bar); } .unscored { color: var(--faint); }
i { color: var(--faint); font-style: normal; font-size: 0.85em; }
b { color: var(--faint); font-weight: normal; text-decoration: underline dotted; font-size: 0.85em; }
"""


def cache_page(
    record: dict[str, Any], cache: TeacherCache, positions: PositionStatistics, request: str = ""
) -> Iterator[str]:
    """Yield the HTML of the page.

    Args:
        record: JSON record of `xtk inspect`.
        cache: the cache, whose first documents are shown.
        positions: sampled positions, for the histograms.
        request: fingerprint of the inputs, stored in the head of the page.

    Yields:
        HTML.
    """
    yield page_start(f"{record['path']}, a teacher cache", CACHE_STYLE, request)
    yield from cache_sections(record, positions)
    yield "<h2>Documents</h2>\n"
    yield (
        "<p>Red tokens have a low teacher probability; grey tokens are not scored. Point at a token to see its "
        "probability and the most likely stored tokens.</p>\n"
    )
    tokenizer = cache.teacher_tokenizer
    for number in range(min(MAX_DOCUMENTS, len(cache))):
        yield from _scored_document(cache.read_document(number), number, tokenizer)
    yield PAGE_END


def cache_sections(record: dict[str, Any], positions: PositionStatistics) -> Iterator[str]:
    """Yield statistics of a cache as HTML: a table, sizes and histograms.

    Args:
        record: JSON record of `xtk inspect`.
        positions: sampled positions, for the histograms.
    """
    statistics = record["statistics"]
    yield from _facts(record)
    yield f"<h2>Bytes</h2>\n{_bytes_bar(statistics)}"
    sampled = f"{len(positions.entropy):,} positions of {statistics['sampled_documents']:,} documents"
    yield f"<h2>Teacher log-probabilities</h2>\n<p>From {sampled}, evenly spaced.</p>\n"
    yield '<div class="pictures">\n'
    yield _histogram("Probability mass of exact tokens", positions.kept_mass, "probability")
    yield _histogram("Entropy", positions.entropy, "nats")
    yield _histogram("Exact tokens", positions.num_exact_ids, "tokens per position")
    if positions.num_sampled_ids.any():
        yield _histogram("Sampled tokens", positions.num_sampled_ids, "tokens per position")
    yield "</div>\n"


def _facts(record: dict[str, Any]) -> Iterator[str]:
    header, statistics = record["header"], record["statistics"]
    facts = {
        "teacher": header["teacher"]["name"],
        "support": ", ".join(f"{name} {value}" for name, value in header["options"].items() if name in _SUPPORT),
        "precision": header["codec"]["precision"],
        **{name: statistics[name] for name in _TOTALS},
        **{name.replace("_", " "): statistics[name] for name in _FIGURES if statistics.get(name) is not None},
    }
    yield '<div class="scroll"><table>\n'
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        yield f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(shown)}</td></tr>\n'
    yield "</table></div>\n"


_SUPPORT = ("support", "top_k", "top_p", "num_samples", "num_sample_sets")
_TOTALS = ("documents", "positions", "tokens", "shards", "bytes", "shared_file_bytes")
_FIGURES = (
    "teacher_bits_per_byte",
    "bytes_per_position",
    "teacher_logprobs_bytes_per_position",
    "mean_entropy_nats",
    "quantization_kl_nats",
    "quantization_kl_fraction_of_entropy",
    "mean_stored_mass",
    "mean_exact_ids",
    "mean_sampled_ids",
    "observed_outside_top_k_fraction",
)


def _bytes_bar(statistics: dict[str, Any]) -> str:
    total, per = max(statistics["bytes"], 1), max(statistics["positions"], 1)
    sizes = statistics["bytes_by_section"].items()
    return stacked_bar((name, size / total, f"{size / per:.1f} bytes a position") for name, size in sizes)


def _histogram(title: str, values: NDArray[Any], unit: str) -> str:
    """Return a histogram of values, as HTML."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    low = min(low, 0.0) if high - low > 0.5 * abs(high) else low
    one_bin_per_integer = values.dtype.kind == "i" and high - low < HISTOGRAM_BINS
    edges = (
        np.arange(low - 0.5, high + 1)
        if one_bin_per_integer
        else np.linspace(low, high if high > low else low + 1, HISTOGRAM_BINS + 1)
    )
    counts, edges = np.histogram(values, edges)
    step, top = PLOT_WIDTH / len(counts), max(int(counts.max(initial=1)), 1)
    bars = "".join(
        f'<rect x="{at * step + 0.5:.1f}" y="{PLOT_HEIGHT - PLOT_HEIGHT * count / top:.1f}" '
        f'width="{max(step - 1, 0.5):.1f}" '
        f'height="{PLOT_HEIGHT * count / top:.1f}">'
        f"<title>{_edge(edges[at])} to {_edge(edges[at + 1])}: {count:,}</title></rect>"
        for at, count in enumerate(counts.tolist())
    )
    mean = f"mean {_edge(float(values.mean()))}" if len(values) else "none"
    return (
        f"<figure>\n<figcaption>{title} <small>{unit}, {mean}</small></figcaption>\n"
        f'<svg viewBox="0 -4 {PLOT_WIDTH} {PLOT_HEIGHT + 26}" role="img" aria-label="{title}: {mean}">{bars}'
        f'<line x1="0" x2="{PLOT_WIDTH}" y1="{PLOT_HEIGHT}" y2="{PLOT_HEIGHT}"/>'
        f'<text x="0" y="{PLOT_HEIGHT + 18}">{_edge(low)}</text>'
        f'<text x="{PLOT_WIDTH}" y="{PLOT_HEIGHT + 18}" text-anchor="end">{_edge(high)}</text></svg>\n</figure>\n'
    )


def _edge(value: float) -> str:
    return f"{value:.3g}"


def _scored_document(row: StoredDocument, number: int, tokenizer: Tokenizer) -> Iterator[str]:
    tokens, scores = row.tokens, row.stored_logprobs
    at = dict(zip(scores.positions.tolist(), range(len(scores)), strict=True))
    shown = min(len(tokens), MAX_TOKENS)
    text = row.document.text
    yield (
        f"<article>\n<h3>Document {number:,}</h3>\n<p>{len(tokens):,} tokens, {len(scores):,} positions.</p>\n"
        f'<p class="document" lang="" translate="no" dir="{text_direction(text)}">'
    )
    for place, token in enumerate(tokens.ids[:shown].tolist()):
        yield _scored_token(tokenizer, token, row, at.get(place))
    more = f"<p>The first {shown:,} of {len(tokens):,} tokens.</p>\n" if shown < len(tokens) else ""
    yield f"</p>\n{more}</article>\n"


def _scored_token(tokenizer: Tokenizer, token: int, row: StoredDocument, position: int | None) -> str:
    inside = _token_html(tokenizer, token)
    if position is None:
        return f'<bdi class="unscored">{inside}</bdi>'
    scores = row.stored_logprobs
    probability = float(np.exp(scores.observed_logprobs[position]))
    kept = slice(scores.offsets[position], scores.offsets[position + 1])
    best = np.argsort(-scores.logprobs[kept], kind="stable")[:MAX_ALTERNATIVES]
    lines = [f"probability {probability:.3g}, entropy {scores.entropy[position]:.3g} nats"]
    lines += [
        f"{np.exp(logprob):.3f}  {_token_text(tokenizer, other)}"
        for other, logprob in zip(scores.ids[kept][best].tolist(), scores.logprobs[kept][best].tolist(), strict=True)
    ]
    # From white at probability 1 to red at e^-8.
    shade = round(min(max(-float(scores.observed_logprobs[position]), 0.0) / 8, 1) * 75)
    title = escape("\n".join(lines))
    return f'<bdi title="{title}" style="--u: {shade}">{inside}</bdi>'


def _token_html(tokenizer: Tokenizer, token: int) -> str:
    if token in tokenizer.special_token_names:
        return f"<i>{escape(tokenizer.special_token_names[token])}</i>"
    return visible_bytes(tokenizer.vocabulary.bytes_of(token)).replace("<i>·</i>", " ") + (
        "\n" if b"\n" in tokenizer.vocabulary.bytes_of(token) else ""
    )


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    if token in tokenizer.special_token_names:
        return tokenizer.special_token_names[token]
    if token >= len(tokenizer):
        return f"id {token} (not a token)"
    return repr(tokenizer.vocabulary.bytes_of(token).decode("utf-8", "backslashreplace"))
