"""Differences between the files of two folders, one line per file."""

from __future__ import annotations


def are_folders(*sides: object) -> bool:
    """Return whether all sides are {name: bytes}; files whose content does not matter may have other values."""
    return all(
        isinstance(side, dict) and any(isinstance(content, bytes) for content in side.values()) for side in sides
    )


def difference_lines(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Return a line for each file that is missing on one side or has different bytes."""
    differences = [f"only left: {name}" for name in sorted(left.keys() - right.keys())]
    differences += [f"only right: {name}" for name in sorted(right.keys() - left.keys())]
    for name in sorted(left.keys() & right.keys()):
        left_content, right_content = left[name], right[name]
        if isinstance(left_content, bytes) and isinstance(right_content, bytes) and left_content != right_content:
            differing = (
                offset for offset, (a, b) in enumerate(zip(left_content, right_content, strict=False)) if a != b
            )
            offset = next(differing, min(len(left_content), len(right_content)))
            differences.append(
                f"{name}: {len(left_content)} and {len(right_content)} bytes, first different at {offset}: "
                f"{left_content[offset : offset + 40]!r} and {right_content[offset : offset + 40]!r}"
            )
        elif left_content != right_content:
            differences.append(f"{name}: {str(left_content)[:80]} and {str(right_content)[:80]}")
    return differences
