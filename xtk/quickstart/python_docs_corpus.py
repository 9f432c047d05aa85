"""Corpora of the quickstart: the documentation and the functions inside of every Python installation."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

# Packages of the standard library that are read, besides its top-level modules.
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "encodings", "html", "http",
    "importlib", "json", "logging", "multiprocessing", "re", "sqlite3", "tkinter", "tomllib", "unittest", "urllib",
    "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip
EXCLUDED_FOLDERS = (
    "test", "tests", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
)  # fmt: skip
MIN_DOCSTRING_CHARACTERS = 80
MIN_DOCUMENT_CHARACTERS, MAX_DOCUMENT_CHARACTERS = 300, 1200
FUNCTION_CHARACTERS = range(200, 1201)
SMALL_FUNCTIONS_FILE = Path(__file__).with_name("small_functions.txt")
HELD_OUT_FRACTION = 0.05


def python_documents() -> list[tuple[str, str]]:
    """Return (source, text) of help topics and library docstrings, without repeated passages."""
    seen: set[str] = set()
    return [(source, text) for source, passages in _sources() for text in _merge_passages(_fresh(passages, seen))]


def python_functions() -> list[tuple[str, str]]:
    """Return (source, text) of the standard library's functions of 200 to 1,200 characters, without indentation."""
    return [(source, text) for source, file in _library_files() for text in _functions(file)]


def small_functions() -> list[str]:
    """Return the functions of `SMALL_FUNCTIONS_FILE`, written for xtk, so that no model has seen them."""
    return [*_functions(SMALL_FUNCTIONS_FILE, range(1, FUNCTION_CHARACTERS.stop))]


def train_test_split(texts: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return (training, held-out) texts, shuffled; a source is in one of them only, against leakage."""
    training = [text for source, text in texts if _source_fraction(source) >= HELD_OUT_FRACTION]
    held_out = [text for source, text in texts if _source_fraction(source) < HELD_OUT_FRACTION]
    random.Random(0).shuffle(training)
    random.Random(0).shuffle(held_out)
    return training, held_out


def _source_fraction(source: str) -> float:
    return int(hashlib.sha256(f"0:{source}".encode()).hexdigest()[:8], 16) / 2**32


def _sources() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, passages) of every help topic and module, in a fixed order."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic:{name}", topics[name].strip().split("\n\n")
    for source, file in _library_files():
        yield source, _docstrings(file)


def _library_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of the modules of the standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*root.glob("*.py"), *(file for package in PACKAGES for file in (root / package).rglob("*.py"))]
    for file in sorted(files):
        module = file.relative_to(root)
        if not set(EXCLUDED_FOLDERS) & set(module.parts) and not module.name.startswith("_sysconfigdata"):
            yield module.as_posix(), file


def _functions(file: Path, sizes: range = FUNCTION_CHARACTERS) -> Iterator[str]:
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")  # as ast counts them: splitlines also splits at form feeds
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            if len(source) in sizes:
                yield source


def _docstrings(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [part for text in texts if len(text) >= MIN_DOCSTRING_CHARACTERS for part in text.strip().split("\n\n")]


def _fresh(passages: list[str], seen: set[str]) -> Iterator[str]:
    """Yield passages that were not seen before; long ones are split at line ends."""
    for passage in passages:
        text = passage.rstrip()
        if not text.strip() or (len(text) > 40 and text.strip() in seen):
            continue
        seen.add(text.strip())
        while len(text) > MAX_DOCUMENT_CHARACTERS:
            cut = text.rfind("\n", 0, MAX_DOCUMENT_CHARACTERS)
            cut = cut if cut > 0 else MAX_DOCUMENT_CHARACTERS
            yield text[:cut]
            text = text[cut:].lstrip("\n")
        yield text


def _merge_passages(passages: Iterator[str]) -> Iterator[str]:
    """Yield documents of 300 to 1,200 characters; the last one of a source may be shorter."""
    held: list[str] = []
    for passage in passages:
        size = sum(map(len, held))
        if size >= MIN_DOCUMENT_CHARACTERS and (
            size + len(passage) > MAX_DOCUMENT_CHARACTERS or size >= 0.75 * MAX_DOCUMENT_CHARACTERS
        ):
            yield "\n\n".join(held)
            held = []
        held.append(passage)
    if sum(map(len, held)) >= MIN_DOCSTRING_CHARACTERS:
        yield "\n\n".join(held)
