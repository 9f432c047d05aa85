"""Messages between processes that write: words as JSON, arrays as their bytes; nothing in them is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import errors
from xtk.errors import XtkError
from xtk.rollouts.writer import Ask, Completion, Sampling, WriterRequest
from xtk.tokens.tokenizer import Tokenizer

Arrays = dict[str, NDArray[Any]]


def send(pipe: Connection, words: dict[str, Any], arrays: Arrays | None = None) -> None:
    """Send a message: a line of JSON, and the arrays behind it.

    Raises:
        OSError: nobody reads it.
    """
    arrays = arrays or {}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    line = json.dumps({"words": words, "arrays": shapes}).encode() + b"\n"
    pipe.send_bytes(line + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values()))


def receive(pipe: Connection) -> tuple[dict[str, Any], Arrays]:
    """Return the next message.

    Raises:
        EOFError: there will be none.
        OSError: so too.
    """
    raw = pipe.recv_bytes()
    line, _, rest = raw.partition(b"\n")
    header = json.loads(line)
    arrays: Arrays = {}
    at = 0
    for name, (dtype, shape) in header["arrays"].items():
        array = np.frombuffer(rest, np.dtype(dtype), int(np.prod(shape)), at).reshape(shape)
        arrays[name] = array
        at += array.nbytes
    return header["words"], arrays


def words_of_request(request: WriterRequest) -> dict[str, Any]:
    """Return what a request is made of."""
    tokenizer = request.tokenizer
    return {
        "folder": str(request.folder),
        "name": request.name,
        "tokenizer": [str(tokenizer.folder), tokenizer.name, tokenizer.width],
        "dtype": request.dtype,
        "batch_tokens": request.batch_tokens,
        "trust_remote_code": request.trust_remote_code,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in request.options.items()},
    }


def request_of(words: dict[str, Any]) -> WriterRequest:
    """Return the request."""
    folder, name, width = words["tokenizer"]
    read = {**words, "folder": Path(words["folder"]), "tokenizer": Tokenizer(folder, name=name, width=width)}
    adapter = read["options"].get("adapter")
    return WriterRequest(**{**read, "options": {**read["options"], **({"adapter": Path(adapter)} if adapter else {})}})


def arrays_of_asks(asks: Sequence[Ask]) -> Arrays:
    """Return asks as arrays; a length of 0 is none."""
    return {
        "ids": _joined([ask.ids for ask in asks], np.int32),
        "sizes": np.array([len(ask.ids) for ask in asks], np.int64),
        "keys": _joined([np.array(ask.key, np.int64) for ask in asks], np.int64),
        "key_sizes": np.array([len(ask.key) for ask in asks], np.int64),
        "lengths": np.array([-1 if ask.length is None else ask.length for ask in asks], np.int64),
    }


def asks_of(arrays: Arrays) -> list[Ask]:
    """Return the asks."""
    ids, keys = _parted(arrays["ids"], arrays["sizes"]), _parted(arrays["keys"], arrays["key_sizes"])
    lengths = [None if length < 0 else length for length in arrays["lengths"].tolist()]
    return [Ask(one, tuple(key.tolist()), length) for one, key, length in zip(ids, keys, lengths, strict=True)]


def sampling_of(words: dict[str, Any]) -> Sampling:
    """Return how tokens are drawn, from the fields of `Sampling`."""
    return Sampling(**{**words, "stop": tuple(words["stop"])})


def arrays_of_completions(completions: Sequence[Completion]) -> Arrays:
    """Return completions as arrays, but for how they finished."""
    arrays = {
        "ids": _joined([one.ids for one in completions], np.int32),
        "logprobs": _joined([one.logprobs for one in completions], np.float32),
        "sizes": np.array([len(one.ids) for one in completions], np.int64),
    }
    top_ids = [one.top_ids for one in completions if one.top_ids is not None]
    return {**arrays, "top_ids": np.concatenate(top_ids)} if top_ids else arrays


def completions_of(finishes: Sequence[str], arrays: Arrays) -> list[Completion]:
    """Return the completions."""
    sizes = arrays["sizes"]
    top_ids = _parted(arrays["top_ids"], sizes) if "top_ids" in arrays else [None] * len(sizes)
    parts = (_parted(arrays["ids"], sizes), _parted(arrays["logprobs"], sizes), finishes, top_ids)
    return [Completion(*one) for one in zip(*parts, strict=True)]


def words_of_error(wrong: XtkError) -> dict[str, Any]:
    """Return an error as words."""
    return {"error": type(wrong).__name__, "what": wrong.what, "where": wrong.where, "hint": wrong.hint}


def error_of(words: dict[str, Any]) -> XtkError:
    """Return the error."""
    kind = getattr(errors, words["error"], XtkError)
    kind = kind if isinstance(kind, type) and issubclass(kind, XtkError) else XtkError
    return kind(words["what"], where=words["where"], hint=words["hint"])


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _parted(joined: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(joined, np.cumsum(sizes)[:-1]) if len(sizes) else []
