"""Size of the package: lines of code, docstrings, comments and blank lines by part; its largest functions and files."""

from __future__ import annotations

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "xtk"
KINDS = ("code", "docstrings", "comments", "blank")


def count_lines(path: Path) -> collections.Counter[str]:
    """Return the number of lines of a file by kind."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    kinds = {number: "blank" for number, line in enumerate(lines, 1) if not line.strip()}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            kinds[token.start[0]] = "comments"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            kinds |= dict.fromkeys(range(first.lineno, (first.end_lineno or first.lineno) + 1), "docstrings")
    return collections.Counter(kinds.get(number, "code") for number in range(1, len(lines) + 1))


def largest(tree: ast.Module) -> tuple[int, int]:
    """Return the lines of the longest function without its docstring, and the most parameters of a function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [
        (node.end_lineno or 0) - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
        for node in functions
    ]
    counts = [len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs) for node in functions]
    return max(sizes, default=0), max(counts, default=0)


def main() -> None:
    """Print the tables."""
    parts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    longest, most_parameters, long_files = 0, 0, 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.parent != PACKAGE else "(top level)"
        counts = count_lines(path)
        parts[name] += counts
        long_files += counts.total() > 500
        size, parameters = largest(ast.parse(path.read_text(encoding="utf-8")))
        longest, most_parameters = max(longest, size), max(most_parameters, parameters)
    rows = [*sorted(parts.items()), ("all", sum(parts.values(), collections.Counter()))]
    lines = ["| part | lines | " + " | ".join(KINDS) + " |", "| --- |" + " --- |" * (len(KINDS) + 1)]
    lines += [
        f"| {name} | {counts.total():,} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + " |"
        for name, counts in rows
    ]
    lines += [
        f"\nlongest function {longest} lines, most parameters {most_parameters}, files above 500 lines {long_files}"
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
