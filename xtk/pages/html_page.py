"""HTML pages from the templates in `templates/`: single files without scripts or external resources."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from xtk.errors import XtkError
from xtk.files.output import OutputKind, write_output
from xtk.pages.alignment_tables import visible_symbol

HEAD_BYTES = 4096
DIRECTION_CHARACTERS = 16_384  # of a text, in which a letter with a direction is searched
# Readable on white and black, and distinguishable with color blindness (after Okabe and Ito, 2008).
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#808080")


def page(title: str, content: Markup, request_fingerprint: str | None = None) -> str:
    """Return a page; the fingerprint is stored in its head, for comparison by a later command."""
    return str(render("page", title=title, content=content, request=request_fingerprint))


def render(template: str, **values: Any) -> Markup:
    """Return HTML from a template, with all values escaped that are not HTML from `render`."""
    return Markup(ENVIRONMENT.get_template(f"{template}.jinja").render(values))


def color(number: int) -> str:
    """Return the color of a part or run."""
    return COLORS[number % len(COLORS)]


def visible_bytes(spelling: bytes, replaced: Mapping[str, str] | None = None) -> Markup:
    """Return bytes as HTML with visible symbols for all of them; `replaced` gives other HTML for some characters."""
    if not spelling:
        return Markup("<i>∅</i>")
    text = spelling.decode("utf-8", "surrogateescape")
    # A combining mark at the start would be rendered on top of the previous character.
    parts = ["<i>◌</i>"] if unicodedata.category(text[0]).startswith("M") else []
    for character in text:
        if "\udc80" <= character <= "\udcff":
            parts.append(f"<b>{ord(character) - 0xDC00:02X}</b>")
        elif replaced and character in replaced:
            parts.append(replaced[character])
        else:
            symbol = "·" if character == " " else visible_symbol(character)
            parts.append(f"<i>{symbol}</i>" if symbol else escape(character))
    return Markup("".join(parts))


def text_direction(text: str) -> str:
    """Return the direction of a text, "ltr" or "rtl", from its first letter with a direction."""
    kinds = map(unicodedata.bidirectional, text[:DIRECTION_CHARACTERS])
    return "rtl" if next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L" else "ltr"


def format_number(value: float) -> str:
    """Return a number as text: four significant digits, thousands with commas."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    if 1e4 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _format_signed(difference: float) -> str:
    return ("+" if difference > 0 else "\N{MINUS SIGN}") + format_number(abs(difference))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals |= {"color": color, "MAX_CHARACTERS": 1200}  # of a completion
ENVIRONMENT.filters |= {
    "formatted": lambda value, specification=",": format(value, specification),
    "number": format_number,
    "signed": _format_signed,
    "direction": text_direction,
}


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


PAGE = OutputKind[None]("a page", _is_page, _check_request)


def write_page(path: Path, content: str) -> None:
    """Write a page; a file with the same content is kept."""
    with write_output(path) as temporary:
        temporary.write_bytes(content.encode("utf-8", "replace"))  # a name may be invalid UTF-8
