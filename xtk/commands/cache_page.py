"""A page on which a teacher cache can be looked at: what it keeps, what it weighs, and a document of it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from xtk.commands.alignment_page import direction, drawn
from xtk.commands.page import CLOSED, opened

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xtk.artifacts.cache_statistics import Positions
    from xtk.artifacts.shard import StoredRow
    from xtk.artifacts.teacher_cache import TeacherCache
    from xtk.tokens.tokenizer import Tokenizer

DOCUMENTS, TOKENS = 2, 1500  # that are shown, of each document
ALTERNATIVES = 6
BARS = 24
WIDTH, HEIGHT = 480, 150  # of a picture, in pixels

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #ffffff; --faint: #6b6b70; --line: #c9c9ce; --bar: #3d7ab8;
  --text: #7fb069; --tokens: #e6aa3c; --signal: #3d7ab8; --rest: #b0b0b6; --unlikely: 214 74 60; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececee; --paper: #17171a; --faint: #9a9aa2; --line: #4a4a52;
  --bar: #5b9bd8; --unlikely: 235 96 82; } }
body { margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.45 system-ui, sans-serif; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.15rem 0.9rem 0.15rem 0; border-bottom: 1px solid var(--line); text-align: start; }
th { font-weight: normal; }
td { text-align: end; font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption small { font-weight: normal; color: var(--faint); }
svg { width: 100%; height: auto; } svg rect { fill: var(--bar); } svg text { fill: var(--faint); font-size: 11px; }
svg line { stroke: var(--line); }
.bytes { display: flex; height: 1.6rem; margin: 0.6rem 0; border-radius: 0.2rem; overflow: hidden; }
.text { background: var(--text); } .tokens { background: var(--tokens); } .signal { background: var(--signal); }
.rest { background: var(--rest); }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-inline: 0.9em 0.3em; border-radius: 0.15em; }
.document { font: 0.95rem/1.75 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  border: 1px solid var(--line); border-radius: 0.3rem; padding: 0.7rem; }
bdi { padding: 0.1em 0; border-radius: 0.15em; background: rgb(var(--unlikely) / calc(var(--u, 0) * 1%)); }
bdi[title]:hover { outline: 2px solid var(--bar); } .given { color: var(--faint); }
i { color: var(--faint); font-style: normal; font-size: 0.85em; }
b { color: var(--faint); font-weight: normal; text-decoration: underline dotted; font-size: 0.85em; }
"""


def page(record: dict[str, Any], cache: TeacherCache, positions: Positions) -> Iterator[str]:
    """Write a page that needs nothing but itself.

    Args:
        record: what `xtk inspect --json` prints of the cache.
        cache: its first documents are shown.
        positions: what the pictures are of.

    Yields:
        HTML.
    """
    yield opened(f"{record['path']}, a teacher cache", STYLE)
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
    yield "<table>\n"
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        yield f'<tr><th scope="row">{escape(name)}</th><td>{escape(shown)}</td></tr>\n'
    yield "</table>\n"


_SUPPORT = ("support", "top_k", "top_p", "draws", "sets")
_FIGURES = (
    "bytes_per_position",
    "signal_bytes_per_position",
    "mean_entropy_nats",
    "codec_kl_nats",
    "codec_kl_share_of_entropy",
    "mean_mass_kept",
    "mean_exact_ids",
    "mean_drawn_ids",
    "share_outside_of_likeliest",
)


def _bytes(statistics: dict[str, Any]) -> str:
    parts, total = statistics["bytes_by_part"], max(statistics["bytes"], 1)
    bar = "".join(
        f'<span class="{name}" style="width: {100 * size / total:.2f}%" title="{name}: {size:,} bytes"></span>'
        for name, size in parts.items()
    )
    per = max(statistics["positions"], 1)
    key = "".join(
        f'<span class="key {name}"></span>{name} {100 * size / total:.1f} %, {size / per:.1f} bytes a position'
        for name, size in parts.items()
    )
    return f'<div class="bytes">{bar}</div>\n<p>{key}</p>\n'


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
        f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 24}" role="img" aria-label="{title}: {mean}">{bars}'
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}"/>'
        f'<text x="0" y="{HEIGHT + 15}">{_edge(low)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 15}" text-anchor="end">{_edge(high)}</text></svg>\n</figure>\n'
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
