"""Messages between a generator and its subprocess: JSON and raw arrays, no pickle."""

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
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.tokens.tokenizer import Tokenizer

Arrays = dict[str, NDArray[Any]]


def send_message(pipe: Connection, content: dict[str, Any], arrays: Arrays | None = None) -> None:
    """Send a message: a line of JSON followed by the bytes of the arrays.

    Raises:
        OSError: the other end is closed.
    """
    arrays = arrays or {}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    line = json.dumps({"words": content, "arrays": shapes}).encode() + b"\n"
    pipe.send_bytes(line + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values()))


def receive_message(pipe: Connection) -> tuple[dict[str, Any], Arrays]:
    """Return the next message.

    Raises:
        EOFError: the other end is closed.
        OSError: the pipe fails.
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


def serialize_config(config: GeneratorConfig) -> dict[str, Any]:
    """Return a generator config as JSON values."""
    tokenizer = config.tokenizer
    return {
        "folder": str(config.folder),
        "name": config.name,
        "tokenizer": [str(tokenizer.folder), tokenizer.name, tokenizer.embedding_rows],
        "dtype": config.dtype,
        "batch_tokens": config.batch_tokens,
        "trust_remote_code": config.trust_remote_code,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in config.options.items()},
    }


def deserialize_config(words: dict[str, Any]) -> GeneratorConfig:
    """Return the generator config of `serialize_config`."""
    folder, name, width = words["tokenizer"]
    read = {**words, "folder": Path(words["folder"]), "tokenizer": Tokenizer(folder, name=name, embedding_rows=width)}
    adapter = read["options"].get("adapter")
    return GeneratorConfig(
        **{**read, "options": {**read["options"], **({"adapter": Path(adapter)} if adapter else {})}}
    )


def serialize_requests(requests: Sequence[GenerationRequest]) -> Arrays:
    """Return requests as arrays; a length of -1 means no limit."""
    return {
        "ids": _concatenate([request.input_ids for request in requests], np.int32),
        "sizes": np.array([len(request.input_ids) for request in requests], np.int64),
        "keys": _concatenate([np.array(request.seed_key, np.int64) for request in requests], np.int64),
        "key_sizes": np.array([len(request.seed_key) for request in requests], np.int64),
        "lengths": np.array(
            [-1 if request.max_length is None else request.max_length for request in requests], np.int64
        ),
    }


def deserialize_requests(arrays: Arrays) -> list[GenerationRequest]:
    """Return the requests of `serialize_requests`."""
    ids, keys = _split_by_size(arrays["ids"], arrays["sizes"]), _split_by_size(arrays["keys"], arrays["key_sizes"])
    lengths = [None if length < 0 else length for length in arrays["lengths"].tolist()]
    return [
        GenerationRequest(one, tuple(key.tolist()), length) for one, key, length in zip(ids, keys, lengths, strict=True)
    ]


def deserialize_sampling(words: dict[str, Any]) -> SamplingConfig:
    """Return a `SamplingConfig` from a dict of its fields."""
    return SamplingConfig(**{**words, "stop": tuple(words["stop"])})


def serialize_completions(completions: Sequence[Completion]) -> Arrays:
    """Return completions as arrays, without finish reasons."""
    arrays = {
        "ids": _concatenate([one.ids for one in completions], np.int32),
        "logprobs": _concatenate([one.logprobs for one in completions], np.float32),
        "sizes": np.array([len(one.ids) for one in completions], np.int64),
    }
    top_ids = [one.top_ids for one in completions if one.top_ids is not None]
    return {**arrays, "top_ids": np.concatenate(top_ids)} if top_ids else arrays


def deserialize_completions(finishes: Sequence[str], arrays: Arrays) -> list[Completion]:
    """Return the completions of `serialize_completions`."""
    sizes = arrays["sizes"]
    top_ids = _split_by_size(arrays["top_ids"], sizes) if "top_ids" in arrays else [None] * len(sizes)
    parts = (_split_by_size(arrays["ids"], sizes), _split_by_size(arrays["logprobs"], sizes), finishes, top_ids)
    return [Completion(*one) for one in zip(*parts, strict=True)]


def serialize_error(error: XtkError) -> dict[str, Any]:
    """Return an error as JSON values."""
    return {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def deserialize_error(words: dict[str, Any]) -> XtkError:
    """Return the error of `serialize_error`."""
    kind = getattr(errors, words["error"], XtkError)
    kind = kind if isinstance(kind, type) and issubclass(kind, XtkError) else XtkError
    return kind(words["what"], where=words["where"], hint=words["hint"])


def _concatenate(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _split_by_size(joined: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(joined, np.cumsum(sizes)[:-1]) if len(sizes) else []
