"""Random but seeded mutations of JSON that artifacts state, as a damaged disk or an attacker writes it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str | int, ...]
HUGE = [10**400, 2**63, 2**64, -1, -(2**63), 1e308, -0.0, float("nan"), float("inf"), 4_000_000_000, 10**9]
NAMES = ["../secret.txt", "/etc/hostname", "/dev/zero", "shard-00000.arrow/../../secret.txt", "..", ".", "", "a\0b",
         "C:\\secret.txt", "~/.profile", "link.txt", "fifo", "s3://bucket/key", "shard-99999.arrow", "x" * 5000,
         "\ud800", "-rf", "\x1b[31mred", "shard-00000.arrow\n"]  # fmt: skip
OTHERS: list[Any] = [None, True, False, [], {}, [[]], {"": None}, "", "text", 0, 1, -1, 0.5, [None], {"a": {"b": []}}]


def places(content: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*path, key))
    elif isinstance(content, list):
        for at, value in enumerate(content):
            yield from places(value, (*path, at))


def deep(levels: int, draw: random.Random) -> Any:
    """Return a value that is nested."""
    found: Any = 0
    for _ in range(levels):
        found = [found] if draw.random() < 0.5 else {"a": found}
    return found


def another_value(draw: random.Random, names: list[str]) -> Any:
    """Return a value that does not belong where it is put."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.choice(HUGE)
    if kind == 1:
        return draw.choice(names)
    if kind == 2:
        return deep(draw.choice([3, 50, 400]), draw)
    return draw.choice(OTHERS)


def mutated(content: Any, seed: int, names: list[str] | None = None) -> Any:
    """Return a copy with one to three values replaced, removed, doubled or swapped.

    Args:
        content: JSON.
        seed: the same seed gives the same mutation.
        names: strings that lead out of the artifact.
    """
    draw = random.Random(seed)
    content = copy.deepcopy(content)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice(list(places(content))[1:] or [()])
        if not path:
            return another_value(draw, names or NAMES)
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        last: Any = path[-1]
        kind = draw.randrange(6)
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif kind == 1:
            parent[draw.choice(names or NAMES)] = parent.pop(last)
        elif kind == 2:
            parent[draw.choice(list(parent)) if isinstance(parent, dict) else 0] = parent[last]
        else:
            parent[last] = another_value(draw, names or NAMES)
    return content


def mutated_text(text: str, seed: int) -> bytes:
    """Return text that no dump of an object gives: a key twice, cut short, nested ten thousand deep, other bytes."""
    draw = random.Random(seed)
    at = draw.randrange(1, max(len(text), 2))
    choices: list[Callable[[], bytes]] = [
        lambda: text[:at].encode(),
        lambda: (text[:at] + "[" * 10_000 + text[at:]).encode(),
        lambda: ('{"a":' * 10_000 + "1" + "}" * 10_000).encode(),
        lambda: text.replace("{", '{"version":1,"version":2,"files":{"../secret.txt":"x"},', 1).encode(),
        lambda: text.encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text[:at].encode() + b"\xff\xfe" + text[at:].encode(),
        lambda: text.replace("1", "NaN", 1).encode(),
        lambda: text.replace(":", ":" + "9" * 5000, 1).encode(),
        lambda: b"\0" * 1000,
        lambda: b"",
    ]
    return draw.choice(choices)()


def dumped(content: Any) -> str:
    """Return readable JSON of whatever it is."""
    return json.dumps(content, ensure_ascii=True)
