"""What runs inside of the sandbox: a program, code that answers calls, and tests that call it from a process apart.

The code never meets its tests: it sees the arguments of one call after another and sends results, as plain values. The
asserts are evaluated where it cannot reach, on objects of Python's own types.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import sys
from typing import Any, BinaryIO

from xtk.rewards.values import NotPlain, read, write

LARGEST_MESSAGE = 1 << 24


def run_program(job: dict[str, Any]) -> None:
    """Run a program by itself."""
    exec(compile(job["code"], "<code>", "exec"), {"__name__": "__main__"})


def answer_calls(job: dict[str, Any], link: int) -> None:
    """Run the code, then answer what the tests ask: `(name, arguments, keywords)`."""
    reader, writer = os.fdopen(link, "rb"), os.fdopen(os.dup(link), "wb")
    names: dict[str, Any] = {"__name__": "solution"}
    failed: BaseException | None = None
    try:
        for text in job["code"]:
            exec(_program(text), names)
    except BaseException as error:
        failed = error
        sys.stderr.write(f"{type(error).__name__}: {error}\n"[:1000])
    for line in reader:
        name, arguments, keywords = read(line)
        try:
            if failed is not None:
                raise failed
            reply = write((True, names[name](*arguments, **keywords), arguments))
        except NotPlain as error:
            reply = write((False, "TypeError", f"the result is no plain value: {error}"))
        except BaseException as error:
            reply = write((False, _nearest(error), str(error)[:1000]))
        writer.write(reply)
        writer.flush()


def _program(text: str) -> Any:
    """Compile the lines of a text that are a program: what a model writes behind it, or does not finish, is left out.

    Raises:
        SyntaxError: no line is left.
    """
    lines = text.splitlines(keepends=True)
    while True:
        try:
            return compile("".join(lines), "<code>", "exec")
        except SyntaxError as wrong:
            del lines[min((wrong.lineno or 1) - 1, len(lines) - 1) :]
            if not any(line.strip() for line in lines):
                raise


def _nearest(error: BaseException) -> str:
    """Return the name of the built-in exception that an error is, or comes of."""
    return next(
        (
            kind.__name__
            for kind in type(error).__mro__
            if vars(builtins).get(kind.__name__) is kind and kind is not object
        ),
        "Exception",
    )


class _Broken(BaseException):
    """The tests themselves cannot be run."""


class _Gone(BaseException):
    """The process of the code has ended, or sends what is no result."""


class _Stop(BaseException):
    """One test has failed: the others do not matter."""


class Called:
    """A function of the code, as the tests see it."""

    made = 0  # calls, of all functions

    def __init__(self, name: str, reader: BinaryIO, writer: BinaryIO) -> None:
        self._name, self._reader, self._writer = name, reader, writer
        self.__name__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it over there. Arguments that it changes are changed here too."""
        Called.made += 1
        try:
            message = write((self._name, list(arguments), keywords))
        except NotPlain as error:
            raise _Broken(f"an argument is no plain value: {error}") from None
        try:
            self._writer.write(message)
            self._writer.flush()
            line = self._reader.readline(LARGEST_MESSAGE)
            reply = read(line)
            if not isinstance(reply, tuple) or len(reply) != 3:
                raise ValueError("no reply")
        except (OSError, ValueError, TypeError):
            raise _Gone from None
        good, result, after = reply
        if good is not True:
            kind: Any = getattr(builtins, str(result), None)
            usual = isinstance(kind, type) and issubclass(kind, Exception)
            with contextlib.suppress(TypeError):  # UnicodeError and its kind want five arguments
                raise (kind if usual else RuntimeError)(str(after))
            raise RuntimeError(str(after))
        if isinstance(after, list) and len(after) == len(arguments):
            for here, there in zip(arguments, after, strict=True):
                _bring(here, there)
        return result


def _bring(here: Any, there: Any) -> None:
    """Change a value as the code has changed its copy."""
    if type(here) is not type(there):
        return
    if isinstance(here, list) and here != there:
        here[:] = there
    elif isinstance(here, dict | set) and here != there:
        here.clear()
        here.update(there)


class _EachAssert(ast.NodeTransformer):
    """Turns `assert x` into: note whether x held. What is no assert stays."""

    def __init__(self) -> None:
        self.number = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant) and node.test.value:  # tests nothing
            return ast.copy_location(ast.Pass(), node)
        self.number += 1
        note = ast.Name("__note__", ast.Load())
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(note, [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


def call_tests(job: dict[str, Any], link: int, verdicts: int) -> None:
    """Run tests against the code at the other end of a link.

    Writes one byte an assert, `+` or `-`; `.` when all were run; `?` when the tests themselves are broken; first of all
    the number of asserts in the text, and a line feed.
    """
    reader, writer = os.fdopen(link, "rb"), os.fdopen(os.dup(link), "wb")
    every = _EachAssert()
    try:
        tree = ast.fix_missing_locations(every.visit(ast.parse(job["tests"])))
        program = compile(tree, "<tests>", "exec")
        setups = [compile(text, "<setup>", "exec") for text in job["setup"]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        os.write(verdicts, b"0\n?")
        return
    os.write(verdicts, b"%d\n" % every.number)

    def note(test: Any) -> None:
        try:
            good = bool(test())
        except Exception:
            good = False
        os.write(verdicts, b"+" if good else b"-")
        if not good and not job["partial"]:
            raise _Stop

    names: dict[str, Any] = {"__name__": "tests", "__note__": note}
    asked = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(vars(builtins))
    names |= {name: Called(name, reader, writer) for name in asked - {"__note__"}}
    calls = {name: Called(job["entry_point"], reader, writer) for name in (job["entry_point"], "candidate") if name}
    try:
        for setup in setups:
            exec(setup, names)
        names |= calls if job["entry_point"] else {}
        exec(program, names)
        if job["entry_point"] and "check" in names and not isinstance(names["check"], Called):
            names["check"](calls["candidate"])
        os.write(verdicts, b"." if Called.made else b"?")
    except (_Stop, _Gone):
        os.write(verdicts, b"-")
    except (_Broken, ImportError):
        os.write(verdicts, b"?")
    except Exception:
        os.write(verdicts, b"-")
