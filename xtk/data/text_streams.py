"""Streams of data files: decompression, lines and UTF-8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.options.shared import MAX_DOCUMENT_BYTES

READ_BYTES = 1 << 18  # chunk size
# UTF-32 first: its mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
UTF_8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RecordReadOptions:
    """Options for reading data files."""

    columns: Mapping[str, str] = field(default_factory=dict)  # {field: column} for fields with another column name
    max_record_bytes: int = MAX_DOCUMENT_BYTES  # maximum size of a record in its file

    def too_large_error(self, where: str) -> XtkError:
        """Return the error for a record above `max_record_bytes`."""
        return XtkError(
            f"this document is larger than --max-document-bytes ({self.max_record_bytes:,})",
            where=where,
            hint="split the document, or use a larger --max-document-bytes",
        )


def file_extension(name: str) -> str:
    """Return the extension that selects the format of a file, without that of a compression."""
    plain = name.removesuffix(".gz").removesuffix(".zst")
    return Path(plain).suffix.lower()


@contextlib.contextmanager
def open_stream(name: str, compression: str | None = "infer") -> Iterator[Any]:
    """Open the bytes of a local or remote file, decompressed unless `compression` is None."""
    if compression == "infer" and name.endswith(".zst"):
        # With pyarrow: without the package zstandard, fsspec returns the compressed bytes.
        import pyarrow

        with _open_file(name) as raw, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
            yield stream
        return
    with _open_file(name, compression) as stream:
        yield stream


def _open_file(name: str, compression: str | None = None) -> Any:
    """Return a local or remote file, to be opened as a context."""
    import fsspec

    if "::" in name and Path(name).is_file():  # fsspec would take it for a chain of protocols
        from fsspec.implementations.local import LocalFileSystem

        compression = fsspec.core.get_compression(name, compression)
        return fsspec.core.OpenFile(LocalFileSystem(), name, "rb", compression)
    return fsspec.open(name, "rb", compression=compression)


def read_lines(stream: Any, name: str, options: RecordReadOptions) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines of up to `max_record_bytes`; they end only at line feeds, and keep them."""
    offset, number, rest, size = 0, 0, list[bytes](), 0  # the chunks of a line whose end is not read yet
    first = True
    while True:
        chunk = stream.read(READ_BYTES)
        if first:
            chunk, offset = strip_byte_order_mark(chunk, name)
            first = False
        *lines, after = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*rest, lines[0]])
            rest, size = [], 0
        rest.append(after)
        size += len(after)
        for line in lines:
            number += 1
            if len(line) > options.max_record_bytes:
                raise options.too_large_error(f"{name}, line {number}")
            yield number, decode_utf8(line + b"\n", offset, name)
            offset += len(line) + 1
        if size > options.max_record_bytes:
            raise options.too_large_error(f"{name}, line {number + 1}")
        if not chunk:
            break
    if size:
        yield number + 1, decode_utf8(b"".join(rest), offset, name)


def read_text(stream: Any, name: str, options: RecordReadOptions) -> str:
    """Return a whole text without its byte order mark."""
    parts, size = [], 0
    while chunk := stream.read(READ_BYTES):
        parts.append(chunk)
        size += len(chunk)
        if size > options.max_record_bytes:
            raise options.too_large_error(name)
    return decode_utf8(*strip_byte_order_mark(b"".join(parts), name), name)


def strip_byte_order_mark(raw: bytes, name: str) -> tuple[bytes, int]:
    """Return the beginning of a text without a byte order mark, and the number of bytes of the mark."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            raise XtkError(
                f"this file is encoded in {encoding}; data must be UTF-8",
                where=name,
                hint=f"convert it: iconv -f {encoding} -t UTF-8 FILE",
            )
    size = len(UTF_8_BYTE_ORDER_MARK) if raw.startswith(UTF_8_BYTE_ORDER_MARK) else 0
    return raw[size:], size


def decode_utf8(raw: bytes, offset: int, name: str) -> str:
    """Return a text; `offset` of these bytes in the file, for the error."""
    try:
        return raw.decode()
    except UnicodeDecodeError as failure:
        at = offset + failure.start
        raise XtkError(
            f"this data file is not UTF-8: byte {raw[failure.start]:#04x} at offset {at:,}",
            where=name,
            hint="convert it from its encoding, for example: iconv -f LATIN1 -t UTF-8 FILE",
        ) from None
