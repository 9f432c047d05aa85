"""What differs between the files of two folders, in a line each."""

from __future__ import annotations


def are_folders(*sides: object) -> bool:
    """Return whether all sides are {name: bytes}; files whose content is no matter may have another value."""
    return all(
        isinstance(side, dict) and any(isinstance(content, bytes) for content in side.values()) for side in sides
    )


def lines(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Return a line for each name whose file is missing on one side, or has other bytes."""
    found = [f"only left: {name}" for name in sorted(left.keys() - right.keys())]
    found += [f"only right: {name}" for name in sorted(right.keys() - left.keys())]
    for name in sorted(left.keys() & right.keys()):
        one, other = left[name], right[name]
        if isinstance(one, bytes) and isinstance(other, bytes) and one != other:
            different = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            at = next(different, min(len(one), len(other)))
            found.append(
                f"{name}: {len(one)} and {len(other)} bytes, first different at {at}: "
                f"{one[at : at + 40]!r} and {other[at : at + 40]!r}"
            )
        elif one != other:
            found.append(f"{name}: {str(one)[:80]} and {str(other)[:80]}")
    return found
