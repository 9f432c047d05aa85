"""The processes in the sandbox: a program, a server for calls of the code's functions, and tests that call them.

The code has no access to its tests: it gets the arguments of one call after another and returns plain values. The
asserts are evaluated in the other process, on objects of Python's built-in types: no `__eq__` of the code can make one
pass.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import decimal
import io
import json
import numbers
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

MAX_MESSAGE_BYTES = 1 << 24
MAX_ERROR_BYTES = 1 << 16
MAX_LAZY_ITEMS = 100_000  # of an iterator


class NotPlainError(Exception):
    """A value that cannot be serialized as plain values."""


def to_jsonable(value: Any) -> Any:
    """Return a value as JSON: itself, or `[type, content]`; NotPlainError: it has another type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return ["int", hex(int(value))]
    if isinstance(value, numbers.Real):
        return ["float", float(value).hex()]
    if isinstance(value, numbers.Complex):
        return ["complex", complex(value).real.hex(), complex(value).imag.hex()]
    if isinstance(value, decimal.Decimal):
        return ["decimal", str(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[to_jsonable(key), to_jsonable(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return [kind.__name__, [to_jsonable(item) for item in value]]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, Iterator):
        return ["iterator", [to_jsonable(item) for item, _ in zip(value, range(MAX_LAZY_ITEMS), strict=False)]]
    raise NotPlainError(type(value).__name__)


def from_jsonable(packed: Any) -> Any:
    """Return the value of `to_jsonable`'s result; ValueError: it is malformed."""
    if packed is None or isinstance(packed, bool | str):
        return packed
    if not isinstance(packed, list) or not packed:
        raise ValueError("the value is not in the format of serialized values")
    kind, *content = packed
    readers: dict[str, Any] = {
        "int": lambda text: int(text, 16),
        "float": float.fromhex,
        "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
        "decimal": decimal.Decimal,
        "bytes": bytes.fromhex,
        "dict": lambda pairs: {from_jsonable(key): from_jsonable(item) for key, item in pairs},
        "list": lambda items: [from_jsonable(item) for item in items],
        "tuple": lambda items: tuple(from_jsonable(item) for item in items),
        "set": lambda items: {from_jsonable(item) for item in items},
        "frozenset": lambda items: frozenset(from_jsonable(item) for item in items),
        "deque": lambda items: deque(from_jsonable(item) for item in items),
        "range": range,
        "iterator": lambda items: iter([from_jsonable(item) for item in items]),
    }
    try:
        return readers[kind](*content)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError("the value is not in the format of serialized values") from error


def encode_value(value: Any) -> bytes:
    """Return a value as one line of JSON; NotPlainError: it has another type, or is nested too deeply."""
    try:
        return json.dumps(to_jsonable(value)).encode() + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        raise NotPlainError(str(error)) from error


def decode_value(line: bytes) -> Any:
    """Return the value of a line of JSON; ValueError: it is malformed."""
    try:
        return from_jsonable(json.loads(line))
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def run_program(job: dict[str, Any]) -> None:
    """Run a program."""
    exec(compile(job["code"], "<code>", "exec"), {"__name__": "__main__"})


def serve_function_calls(job: dict[str, Any], link: int) -> None:
    """Run the code, then serve calls of the tests: `(name, arguments, keywords)`."""
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
        name, arguments, keywords = decode_value(line)
        try:
            if failed is not None:
                raise failed
            reply = encode_value((True, names[name](*arguments, **keywords), arguments))
        except NotPlainError as error:
            reply = encode_value((False, "TypeError", [f"the result is not a plain value: {error}"]))
        except BaseException as error:
            reply = _raised(error)
        writer.write(reply)
        writer.flush()


def _program(text: str) -> Any:
    """Compile the program at the start of a text, without an unfinished end; SyntaxError: there is none."""
    lines = io.StringIO(text, newline=None).readlines()  # as compile counts lines; splitlines has more separators
    while True:
        try:
            return compile("".join(lines), "<code>", "exec")
        except SyntaxError as failure:
            del lines[min((failure.lineno or 1) - 1, len(lines) - 1) :]
            if not any(line.strip() for line in lines):
                raise


def _raised(error: BaseException) -> bytes:
    """Return the reply for a call that raised an exception: its built-in type and its arguments."""
    arguments: list[Any] = []
    with contextlib.suppress(Exception):  # __str__ of the code's own exceptions may fail
        arguments = [str(error)[:1000]]
    with contextlib.suppress(Exception):
        if len(reply := encode_value((False, _builtin_exception_name(error), list(error.args)))) < MAX_ERROR_BYTES:
            return reply
    return encode_value((False, _builtin_exception_name(error), arguments))


def _builtin_exception_name(error: BaseException) -> str:
    """Return the name of an exception's built-in type, or that of its nearest built-in base class."""
    own = (kind for kind in type(error).__mro__ if kind is not object)
    return next((kind.__name__ for kind in own if vars(builtins).get(kind.__name__) is kind), "Exception")


class _Broken(BaseException):
    """The tests themselves cannot run."""


class _Gone(BaseException):
    """The process of the code has ended, or sends invalid replies."""


class _Stop(BaseException):
    """A test has failed."""


class RemoteCalls:
    """Calls of the code's functions in its process."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self.num_calls = 0
        self.raised_exceptions: list[BaseException] = []  # those of the code, not of the tests
        self.connection_error: _Gone | _Broken | None = None  # why further calls cannot be made; None while they can

    def call(self, name: str, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return whether a call succeeded; its result, or the name of an exception; and the arguments afterwards.

        _Gone: the process of the code has ended. _Broken: an argument is not a plain value.
        """
        self.num_calls += 1
        if self.connection_error is not None:
            raise self.connection_error
        try:
            message = encode_value((name, list(arguments), keyword_arguments))
        except NotPlainError as error:
            self.connection_error = _Broken(f"an argument is not a plain value: {error}")
            raise self.connection_error from None
        try:
            self._writer.write(message)
            self._writer.flush()
            reply = decode_value(self._reader.readline(MAX_MESSAGE_BYTES))
            if not isinstance(reply, tuple) or len(reply) != 3:
                raise ValueError("the reply of the sandbox worker is not a valid message")
        except (OSError, ValueError, TypeError):
            self.connection_error = _Gone()
            raise self.connection_error from None
        return reply


class RemoteFunction:
    """A function of the code, as the tests call it."""

    def __init__(self, name: str, calls: RemoteCalls) -> None:
        self._name, self._calls = name, calls
        self.__name__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function in the process of the code. Changes that it makes to its arguments are copied back.

        An exception of the code is raised as one of the same built-in type.
        """
        good, result, after = self._calls.call(self._name, arguments, keywords)
        if good is not True:
            error = _exception(result, after)
            self._calls.raised_exceptions.append(error)
            raise error
        if isinstance(after, list) and len(after) == len(arguments):
            for here, there in zip(arguments, after, strict=True):
                _copy_changes(here, there)
        return result


def _exception(name: Any, arguments: Any) -> BaseException:
    """Return a built-in exception of this name without raising it; a RuntimeError if the name is unknown."""
    values = arguments if isinstance(arguments, list) else [arguments]
    kind: Any = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return RuntimeError(*values)
    made: Any = None
    try:
        made = kind(*values)
    except Exception:  # UnicodeDecodeError and similar types need five arguments
        with contextlib.suppress(Exception):
            made = kind.__new__(kind, *values)
    return made if isinstance(made, BaseException) else RuntimeError(*values)


def _copy_changes(here: Any, there: Any) -> None:
    """Update an argument with the code's changes to its copy."""
    if type(here) is not type(there):
        return
    if isinstance(here, list) and here != there:
        here[:] = there
    elif isinstance(here, dict | set) and here != there:
        here.clear()
        here.update(there)


class _EachAssert(ast.NodeTransformer):
    """Replaces `assert x` with a call that records whether x is true. Other statements stay."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(ast.Name("__note__", ast.Load()), [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


def run_tests(job: dict[str, Any], link: int, verdicts: int) -> None:
    """Run tests against the code in another process, up to the first that fails.

    Writes `-` for a failed assert; at the end `.` if all have run, `!` if not, `?` if the tests themselves are broken
    or call no function of the code.
    """
    reader, writer = os.fdopen(link, "rb"), os.fdopen(os.dup(link), "wb")
    try:
        tree = ast.parse(job["tests"])
        called_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(vars(builtins))
        program = compile(ast.fix_missing_locations(_EachAssert().visit(tree)), "<tests>", "exec")
        setups = [compile(text, "<setup>", "exec") for text in job["setup"]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        os.write(verdicts, b"?")
        return

    link_calls = RemoteCalls(reader, writer)

    def record_assert(test: Callable[[], Any]) -> None:
        try:
            good = bool(test())
        except (_Broken, _Stop):
            raise
        except BaseException:
            good = False
        if not good:  # written at once: tests may catch what is raised
            os.write(verdicts, b"-")
            raise _Stop

    names: dict[str, Any] = {name: RemoteFunction(name, link_calls) for name in called_names}
    names |= {"__name__": "tests", "__note__": record_assert}
    calls = {name: RemoteFunction(job["entry_point"], link_calls) for name in (job["entry_point"], "candidate") if name}
    try:
        for setup in setups:
            exec(setup, names)
        names |= calls if job["entry_point"] else {}
        exec(program, names)
        if job["entry_point"] and "check" in names and not isinstance(names["check"], RemoteFunction):
            names["check"](calls["candidate"])
        if link_calls.connection_error is not None:  # the tests caught it
            raise link_calls.connection_error
        end = b"."
    except _Broken:
        end = b"?"
    except BaseException as error:
        # Whether the tests, not the code, lack a module.
        is_broken = isinstance(error, ImportError) and error not in link_calls.raised_exceptions
        end = b"?" if is_broken else b"!"
    os.write(verdicts, end if link_calls.num_calls else b"?")
