"""Frame and parts of HTML pages: single files without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from xtk.errors import XtkError
from xtk.files.output_claims import FileKind

HEAD_BYTES = 4096
PAGE_END = "</main>\n</body>\n</html>\n"
# Readable on white and black, and distinguishable with color blindness (after Okabe and Ito, 2008).
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#808080")

PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #ffffff; --faint: #6b6b70; --line: #c9c9ce; --bar: #3d7ab8; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececee; --paper: #17171a; --faint: #9a9aa2; --line: #4a4a52;
  --bar: #5b9bd8; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { line-height: 1.2; } h2 { margin: 2.2rem 0 0.8rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
caption { text-align: start; font-weight: 600; padding: 0.2rem 0; white-space: nowrap; }
th, td { padding: 0.2rem 1.1rem 0.2rem 0; border-bottom: 1px solid var(--line); text-align: start;
  font-weight: normal; vertical-align: top; }
th[scope="col"] { color: var(--faint); vertical-align: bottom; } th[scope="row"] { white-space: nowrap; }
.number ~ .number { padding-inline-start: 0.4rem; }
.number { text-align: end; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { display: flex; height: 1.4rem; margin: 0.6rem 0; border-radius: 0.2rem; overflow: hidden; }
.keys { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0.6rem 0; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-inline-end: 0.4em; border-radius: 0.15em; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } small { font-weight: normal; color: var(--faint); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 14px; }
svg line { stroke: var(--line); } svg rect { fill: var(--bar); }
"""


def page_start(title: str, extra_style: str, request_fingerprint: str | None = None) -> str:
    """Return the start of a page, up to and including its title.

    Args:
        title: plain text.
        extra_style: CSS added to that of all pages.
        request_fingerprint: stored in the head of the page, for comparison by a later command; None: none.
    """
    kept = "" if request_fingerprint is None else f'<meta name="xtk-request" content="{escape(request_fingerprint)}">\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="generator" content="xtk">\n'
        f"{kept}<style>{PAGE_STYLE}{extra_style}</style>\n</head>\n<body>\n<header>\n<h1>{escape(title)}</h1>\n</header>\n<main>\n"
    )


def stacked_bar(parts: Iterable[tuple[str, float, str]]) -> str:
    """Return a stacked bar with a legend.

    Args:
        parts: (name, fraction, additional text of the legend).
    """
    segments, keys = [], []
    for at, (name, fraction, detail) in enumerate(parts):
        paint = f"background: {COLORS[at % len(COLORS)]}"
        words = escape(f"{name} {100 * fraction:.1f} %" + (f", {detail}" if detail else ""))
        segments.append(f'<span style="width: {100 * fraction:.2f}%; {paint}" title="{words}"></span>')
        keys.append(f'<span><span class="key" style="{paint}"></span>{words}</span>')
    return f'<div class="bar">{"".join(segments)}</div>\n<p class="keys">{"".join(keys)}</p>\n'


def _is_page(path: Path) -> bool:
    return _has(path, '<meta name="xtk-request" content="')


def _check_request(path: Path, request: str) -> None:
    """Refuse a page that was made from other inputs; an equal page is written again."""
    if not _has(path, f'"xtk-request" content="{request}"'):
        raise XtkError(
            "the output file is a page that was made from other inputs or options",
            where=str(path),
            hint="use another -o, or --force to replace it",
        )


def _has(path: Path, text: str) -> bool:
    with path.open("rb") as stream:
        return text.encode() in stream.read(HEAD_BYTES)


PAGE = FileKind[None]("pages", _is_page, _check_request)


def write_page(path: Path, page: str) -> None:
    """Write a page, unless the file has the same content."""
    from xtk.files.atomic_files import atomic_write

    content = page.encode("utf-8", "replace")  # a name may be invalid UTF-8
    if path.is_file() and path.read_bytes() == content:
        return
    with atomic_write(path, keep_others=True) as temporary:
        temporary.write_bytes(content)
