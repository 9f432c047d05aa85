"""Hook of MkDocs: the site opens on docs/README.md; the README of the repository gets the address `about/`."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

ADDRESSES = {"docs/README.md": "index.html", "README.md": "about/index.html"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give two pages other addresses; links to them follow, since they name source files."""
    for source, address in ADDRESSES.items():
        if file := files.get_file_from_path(source):
            file.dest_uri = address
            file.url = address.removesuffix("index.html") or "./"
    return files
