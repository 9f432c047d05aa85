"""What the pages that xtk writes have in common: each stands alone, without scripts, and fetches nothing."""

from __future__ import annotations

from html import escape
from pathlib import Path

from xtk.errors import XtkError

CLOSED = "</main>\n</body>\n</html>\n"


def opened(title: str, style: str, request: str | None = None) -> str:
    """Return how a page begins, up to what stands below its title.

    Args:
        title: plain text.
        style: of the page.
        request: kept in the head of the page, for a later run to compare; None: nobody compares.
    """
    kept = "" if request is None else f'<meta name="xtk-request" content="{escape(request)}">\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="generator" content="xtk">\n'
        f"{kept}<style>{style}</style>\n</head>\n<body>\n<header>\n<h1>{escape(title)}</h1>\n</header>\n<main>\n"
    )


def check_page(path: Path, request: str, *, force: bool) -> None:
    """Refuse to replace what is not a page of the same request; with `force`, what is no page.

    Raises:
        XtkError: there is a folder, another file or another page.
    """
    if path.is_dir():
        raise XtkError("this is to be a file, and there is a folder of this name", where=str(path))
    if not path.exists():
        return
    with path.open("rb") as stream:
        head = stream.read(4096)
    if b'"xtk-request"' not in head:
        raise XtkError("there is another file", where=str(path), hint="another -o; --force replaces pages alone")
    if not force and f'"xtk-request" content="{request}"'.encode() not in head:
        raise XtkError(
            "there is a page of another request", where=str(path), hint="another -o, or --force to replace it"
        )


def write_page(path: Path, page: str) -> None:
    """Write a page, unless the same one is there."""
    from xtk.artifacts.files import written_whole

    content = page.encode("utf-8", "replace")  # a name may be no UTF-8
    if path.is_file() and path.read_bytes() == content:
        return
    with written_whole(path) as temporary:
        temporary.write_bytes(content)
