"""Help texts, error messages and pages use the terms of the field, and class names are unique."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from xtk.cli import COMMANDS, app
from xtk.options.declaration import headings_of

ROOT = Path(__file__).parent.parent
MAX_SENTENCE, MAX_SENTENCES = 100, 2

# Words of an earlier dialect that an engineer would not search for. Words that good English needs are not banned.
DIALECT = re.compile(
    r"(?<![A-Za-z])(anew|likeliest|to the letter|stands? there|stood there|realised|by lot)(?![A-Za-z])", re.IGNORECASE
)

# Calls whose text is printed for the user.
ERRORS = {"BadParameter", "UsageError", "ResumableStop", "Finding"}
NOTES = {"note", "result_line", "Progress", "warn"}


def commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in COMMANDS}


def options() -> Iterator[tuple[str, str, str]]:
    """Yield (command, parameter, help)."""
    for name, command in commands().items():
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            if text:
                yield name, "/".join(parameter.opts), text


def sentences(text: str) -> list[str]:
    """Return the sentences of a help text without the marks `Repeatable.` and `[default: 4]`."""
    text = re.sub(r" Repeatable\.| \[default: [^\]]*\]", "", text)
    return re.split(r"(?<=[.!?])\s+", text.strip())


@pytest.mark.parametrize(("command", "option", "text"), options(), ids=lambda value: str(value)[:40])
def test_help_text_is_one_or_two_short_phrases(command, option, text):
    parts = sentences(text)
    assert len(parts) <= MAX_SENTENCES, parts
    assert max(map(len, parts)) <= MAX_SENTENCE, [(len(part), part) for part in parts]
    assert not re.match(r"(of|in|on|for|at|by|as|where|what|who|how|which|that)\b", text, re.IGNORECASE), text


def test_every_option_is_under_one_heading_of_its_command():
    general = {"output", "config", "force", "as_json", "quiet", "verbose", "help"}
    for name, command in commands().items():
        if not command.kind.HEADINGS:
            continue
        listed = [option for _, names in headings_of(command.kind.HEADINGS) for option in names]
        known = {str(one.name) for one in commands()[name].params if one.param_type_name == "option"}
        assert len(listed) == len(set(listed)), name
        assert set(listed) <= known, set(listed) - known
        assert known - set(listed) <= general, known - set(listed)


def test_help_of_every_command_ends_with_two_examples():
    for name, command in commands().items():
        lines = (command.epilog or "").splitlines()
        assert len(lines) == 2, name
        for line in lines:
            assert f"xtk {name} " in line
            assert len(line) <= 100


def test_options_in_examples_exist():
    import shlex

    for command in commands().values():
        for line in command.epilog.splitlines():
            for words in " ".join(shlex.split(line)).split(" | "):
                _, name, second, *_ = [*words.split(), ""]
                name = name if name in commands() else f"{name} {second}"
                known = {spelling for one in commands()[name].params for spelling in (*one.opts, *one.secondary_opts)}
                known |= {spelling for one in commands()["distill"].params for spelling in one.opts}  # of sweep
                used = {word.partition("=")[0] for word in words.split() if re.match(r"--?[a-z]", word)}
                assert used <= known, used - known


def test_help_texts_have_no_dialect_words():
    texts = [(f"xtk {name}", command.help or "") for name, command in commands().items()]
    texts += [(f"xtk {name} {option}", text) for name, option, text in options()]
    found = [f"{location}: {match[0]!r} in {text!r}" for location, text in texts for match in DIALECT.finditer(text)]
    assert not found, "\n".join(found)


def string_literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, string literal) of an expression; f-strings are joined, keys and subscripts left out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield node.lineno, "".join(map(str, parts))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from string_literals(part.value)
    elif isinstance(node, ast.Subscript):
        yield from string_literals(node.value)
    elif isinstance(node, ast.Compare) or _is_get_call(node):
        return
    else:
        for child in ast.iter_child_nodes(node):
            yield from string_literals(child)


def _is_get_call(node: ast.AST) -> bool:
    """Return whether a node is a call of `.get`, whose argument is a key."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"


def printed_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of all error messages, notes, progress and result texts in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.endswith(("Error", "_error")) or name in ERRORS | NOTES:
                for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                    yield from string_literals(argument)
        # Texts that are assigned to a variable before they are raised or printed.
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name)
            and target.id in ("what", "why", "hint", "message", "reason", "warning", "where")
            for target in node.targets
        ):
            yield from string_literals(node.value)


def test_errors_and_notes_have_no_dialect_words():
    found = {
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text!r}"
        for path in sorted((ROOT / "xtk").rglob("*.py"))
        for line, text in printed_texts(path)
        for match in DIALECT.finditer(text)
    }
    assert not found, f"{len(found)} sentences:\n" + "\n".join(sorted(found))


def page_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a page, without code."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "``", line)


def test_pages_have_no_dialect_words():
    found = [
        f"{page.relative_to(ROOT)}:{line}: {match[0]!r} in {text.strip()!r}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for line, text in page_texts(page)
        for match in DIALECT.finditer(text)
    ]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


def words_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of all names, docstrings and comments of a file; of shell scripts, lines that are comments."""
    if path.suffix != ".py":
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.lstrip().startswith("#"))
        return
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    for token in tokens:
        if token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " ")
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", ["xtk", "tests", "examples", "docs", "."])
def test_code_has_no_dialect(folder):
    patterns = ("*.py",) if folder == "." else ("**/*.py", "**/*.sh", "**/*.sbatch")
    paths = sorted(path for pattern in patterns for path in (ROOT / folder).glob(pattern))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {hit[0]!r} in {text[max(hit.start() - 40, 0) : hit.end() + 40]!r}"
        for path in paths
        if path != Path(__file__)
        for line, text in words_of_code(path)
        for hit in DIALECT.finditer(text)
    ]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)


def test_class_names_are_unique():
    names = Counter(
        node.name
        for path in (ROOT / "xtk").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
