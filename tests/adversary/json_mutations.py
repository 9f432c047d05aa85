"""Random, seeded mutations of the JSON in artifacts, as a corrupt disk or an attacker would write it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

JsonPath = tuple[str | int, ...]
EXTREME_NUMBERS = [10**400, 2**63, 2**64, -1, -(2**63), 1e308, -0.0, float("nan"), float("inf"), 4_000_000_000, 10**9]
NAMES = ["../secret.txt", "/etc/hostname", "/dev/zero", "shard-00000.arrow/../../secret.txt", "..", ".", "", "a\0b",
         "C:\\secret.txt", "~/.profile", "link.txt", "fifo", "s3://bucket/key", "shard-99999.arrow", "x" * 5000,
         "\ud800", "-rf", "\x1b[31mred", "shard-00000.arrow\n"]  # fmt: skip
VALUES: list[Any] = [None, True, False, [], {}, [[]], {"": None}, "", "text", 0, 1, -1, 0.5, [None], {"a": {"b": []}}]


def json_paths(content: Any, path: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the paths of all values."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from json_paths(value, (*path, key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from json_paths(value, (*path, index))


def nested_value(levels: int, rng: random.Random) -> Any:
    """Return a value that is nested this many levels deep."""
    value: Any = 0
    for _ in range(levels):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def invalid_value(rng: random.Random, names: list[str]) -> Any:
    """Return a value that is not valid in the place of another one."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(EXTREME_NUMBERS)
    if kind == 1:
        return rng.choice(names)
    if kind == 2:
        return nested_value(rng.choice([3, 50, 400]), rng)
    return rng.choice(VALUES)


def mutate(content: Any, seed: int, names: list[str] | None = None) -> Any:
    """Return a copy with one to three values replaced, removed, duplicated or swapped.

    Args:
        content: JSON.
        seed: the same seed gives the same mutation.
        names: file names that point outside of the artifact.
    """
    rng = random.Random(seed)
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        path = rng.choice(list(json_paths(content))[1:] or [()])
        if not path:
            return invalid_value(rng, names or NAMES)
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        last: Any = path[-1]
        kind = rng.randrange(6)
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif kind == 1:
            parent[rng.choice(names or NAMES)] = parent.pop(last)
        elif kind == 2:
            parent[rng.choice(list(parent)) if isinstance(parent, dict) else 0] = parent[last]
        else:
            parent[last] = invalid_value(rng, names or NAMES)
    return content


def mutate_text(text: str, seed: int) -> bytes:
    """Return text that no JSON serializer writes: a repeated key, truncated, nested ten thousand deep, other bytes."""
    rng = random.Random(seed)
    position = rng.randrange(1, max(len(text), 2))
    choices: list[Callable[[], bytes]] = [
        lambda: text[:position].encode(),
        lambda: (text[:position] + "[" * 10_000 + text[position:]).encode(),
        lambda: ('{"a":' * 10_000 + "1" + "}" * 10_000).encode(),
        lambda: text.replace("{", '{"version":1,"version":2,"files":{"../secret.txt":"x"},', 1).encode(),
        lambda: text.encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text[:position].encode() + b"\xff\xfe" + text[position:].encode(),
        lambda: text.replace("1", "NaN", 1).encode(),
        lambda: text.replace(":", ":" + "9" * 5000, 1).encode(),
        lambda: b"\0" * 1000,
        lambda: b"",
    ]
    return rng.choice(choices)()


def to_json(content: Any) -> str:
    """Return ASCII-only JSON of any value."""
    return json.dumps(content, ensure_ascii=True)
