"""A page on which a teacher cache can be looked at: what it keeps, what it weighs, and a document of it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from xtk.commands.alignment_page import direction, drawn
from xtk.commands.page import CLOSED, opened, stacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xtk.artifacts.cache_statistics import Positions
    from xtk.artifacts.shard import StoredRow
    from xtk.artifacts.teacher_cache import TeacherCache
    from xtk.tokens.tokenizer import Tokenizer

DOCUMENTS, TOKENS = 2, 1500  # that are shown, of each document
ALTERNATIVES = 6
BARS = 24
WIDTH, HEIGHT = 460, 150  # of a picture, in pixels

STYLE = """
:root { --unlikely: 214 74 60; } @media (prefers-color-scheme: dark) { :root { --unlikely: 235 96 82; } }
.document { font: 0.95rem/1.75 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  border: 1px solid var(--line); border-radius: 0.3rem; padding: 0.7rem; }
.document bdi { padding: 0.1em 0; border-radius: 0.15em; background: rgb(var(--unlikely) / calc(var(--u, 0) * 1%)); }
bdi[title]:hover { outline: 2px solid var(--bar); } .given { color: var(--faint); }
i { color: var(--faint); font-style: normal; font-size: 0.85em; }
b { color: var(--faint); font-weight: normal; text-decoration: underline dotted; font-size: 0.85em; }
"""


def page(record: dict[str, Any], cache: TeacherCache, positions: Positions, request: str = "") -> Iterator[str]:
    """Write a page that needs nothing but itself.

    Args:
        record: what `xtk inspect --json` prints of the cache.
        cache: its first documents are shown.
        positions: what the pictures are of.
        request: kept in the head of the page, for a later run to compare.

    Yields:
        HTML.
    """
    yield opened(f"{record['path']}, a teacher cache", STYLE, request)
    yield from pictures(record, positions)
    yield "<h2>Documents</h2>\n"
    yield (
        "<p>The redder a token, the less likely the teacher found it; grey tokens have no signal. Point at one to see "
        "its probability and the likeliest ids that are kept.</p>\n"
    )
    tokenizer = cache.teacher
    for number in range(min(DOCUMENTS, len(cache))):
        yield from _document(cache.row(number), number, tokenizer)
    yield CLOSED


def pictures(record: dict[str, Any], positions: Positions) -> Iterator[str]:
    """Yield what a cache keeps and what it weighs, as HTML: a table and pictures.

    Args:
        record: what `xtk inspect --json` prints of the cache.
        positions: what the pictures are of.
    """
    statistics = record["statistics"]
    yield from _facts(record)
    yield f"<h2>Bytes</h2>\n{_bytes(statistics)}"
    sampled = f"{len(positions.entropy):,} positions of {statistics['sampled_documents']:,} documents"
    yield f'<h2>Signal</h2>\n<p>From {sampled} all over the cache.</p>\n<div class="pictures">\n'
    yield _histogram("Mass of the exact ids", positions.kept, "probability")
    yield _histogram("Entropy", positions.entropy, "nats")
    yield _histogram("Exact ids", positions.exact, "ids a position")
    if positions.drawn.any():
        yield _histogram("Drawn ids", positions.drawn, "ids a position")
    yield "</div>\n"


def _facts(record: dict[str, Any]) -> Iterator[str]:
    header, statistics = record["header"], record["statistics"]
    facts = {
        "teacher": header["teacher"]["name"],
        "support": ", ".join(f"{name} {value}" for name, value in header["options"].items() if name in _SUPPORT),
        "precision": header["codec"]["precision"],
        **{name: statistics[name] for name in ("documents", "positions", "tokens", "shards", "bytes")},
        **{name.replace("_", " "): statistics[name] for name in _FIGURES if statistics.get(name) is not None},
    }
    yield '<div class="scroll"><table>\n'
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        yield f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(shown)}</td></tr>\n'
    yield "</table></div>\n"


_SUPPORT = ("support", "top_k", "top_p", "num_samples", "num_sample_sets")
_FIGURES = (
    "bytes_per_position",
    "teacher_logprobs_bytes_per_position",
    "mean_entropy_nats",
    "quantization_kl_nats",
    "quantization_kl_share_of_entropy",
    "mean_mass_kept",
    "mean_exact_ids",
    "mean_drawn_ids",
    "share_outside_of_likeliest",
)


def _bytes(statistics: dict[str, Any]) -> str:
    total, per = max(statistics["bytes"], 1), max(statistics["positions"], 1)
    sizes = statistics["bytes_by_part"].items()
    return stacked((name, size / total, f"{size / per:.1f} bytes a position") for name, size in sizes)


def _histogram(title: str, values: NDArray[Any], unit: str) -> str:
    """Return a picture of how often values are how large."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    low = min(low, 0.0) if high - low > 0.5 * abs(high) else low
    whole = values.dtype.kind == "i" and high - low < BARS
    edges = np.arange(low - 0.5, high + 1) if whole else np.linspace(low, high if high > low else low + 1, BARS + 1)
    counts, edges = np.histogram(values, edges)
    step, top = WIDTH / len(counts), max(int(counts.max(initial=1)), 1)
    bars = "".join(
        f'<rect x="{at * step + 0.5:.1f}" y="{HEIGHT - HEIGHT * count / top:.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{HEIGHT * count / top:.1f}">'
        f"<title>{_edge(edges[at])} to {_edge(edges[at + 1])}: {count:,}</title></rect>"
        for at, count in enumerate(counts.tolist())
    )
    mean = f"mean {_edge(float(values.mean()))}" if len(values) else "none"
    return (
        f"<figure>\n<figcaption>{title} <small>{unit}, {mean}</small></figcaption>\n"
        f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 26}" role="img" aria-label="{title}: {mean}">{bars}'
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}"/>'
        f'<text x="0" y="{HEIGHT + 18}">{_edge(low)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 18}" text-anchor="end">{_edge(high)}</text></svg>\n</figure>\n'
    )


def _edge(value: float) -> str:
    return f"{value:.3g}"


def _document(row: StoredRow, number: int, tokenizer: Tokenizer) -> Iterator[str]:
    tokens, scores = row.tokens, row.scores
    at = dict(zip(scores.positions.tolist(), range(len(scores)), strict=True))
    shown = min(len(tokens), TOKENS)
    text = row.document.text
    yield (
        f"<article>\n<h3>Document {number:,}</h3>\n<p>{len(tokens):,} tokens, {len(scores):,} positions.</p>\n"
        f'<p class="document" lang="" translate="no" dir="{direction(text)}">'
    )
    for place, token in enumerate(tokens.ids[:shown].tolist()):
        yield _token(tokenizer, token, row, at.get(place))
    more = f"<p>The first {shown:,} of {len(tokens):,} tokens.</p>\n" if shown < len(tokens) else ""
    yield f"</p>\n{more}</article>\n"


def _token(tokenizer: Tokenizer, token: int, row: StoredRow, position: int | None) -> str:
    inside = _spelled(tokenizer, token)
    if position is None:
        return f'<bdi class="given">{inside}</bdi>'
    scores = row.scores
    probability = float(np.exp(scores.realised_logprobs[position]))
    kept = slice(scores.offsets[position], scores.offsets[position + 1])
    best = np.argsort(-scores.logprobs[kept], kind="stable")[:ALTERNATIVES]
    lines = [f"probability {probability:.3g}, entropy {scores.entropy[position]:.3g} nats"]
    lines += [
        f"{np.exp(logprob):.3f}  {_plain(tokenizer, other)}"
        for other, logprob in zip(scores.ids[kept][best].tolist(), scores.logprobs[kept][best].tolist(), strict=True)
    ]
    # From white at probability 1 to red at e^-8.
    shade = round(min(max(-float(scores.realised_logprobs[position]), 0.0) / 8, 1) * 75)
    title = escape("\n".join(lines))
    return f'<bdi title="{title}" style="--u: {shade}">{inside}</bdi>'


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    if token in tokenizer.control_names:
        return f"<i>{escape(tokenizer.control_names[token])}</i>"
    return drawn(tokenizer.vocabulary.spelling(token)).replace("<i>·</i>", " ") + (
        "\n" if b"\n" in tokenizer.vocabulary.spelling(token) else ""
    )


def _plain(tokenizer: Tokenizer, token: int) -> str:
    if token in tokenizer.control_names:
        return tokenizer.control_names[token]
    if token >= len(tokenizer):
        return f"id {token}, no token"
    return repr(tokenizer.vocabulary.spelling(token).decode("utf-8", "backslashreplace"))
