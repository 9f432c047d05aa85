"""Jinja templates rendered in a process with limits: of memory, of processor time, of how much they write.

A chat template comes with a model, and is a program. Jinja's sandbox keeps it from files and from Python, not from
writing 'a' * 2000000000, from filters that do the same (center, indent, format), or from loops in loops. So one child
process renders for all templates of a process; the operating system limits it, and the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from xtk.children import without_interrupts
from xtk.errors import XtkError

# Templates that ask for the date get this one: the same inputs give the same bytes on every day.
TODAY = datetime(2024, 7, 26)
CHAT, PROMPT = "chat", "prompt"  # environments: as transformers has it for chat templates; for --prompt-template
MAX_SECONDS = 5  # of processor time for one rendering
AT_ONCE = 1 << 22  # characters of a request
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_SOURCE = 1 << 20  # characters; the longest published templates have some ten thousand
TIMES_ITS_INPUT, SLACK = 100, 1 << 16  # what a template may write: so many times what it reads, and so much more
_SIZE = struct.Struct("<Q")
_START = "import sys; sys.path[:] = {path!r}; from xtk.tokens.rendering import serve; serve()"
_MESSAGE = 300  # characters of what a template says when it refuses


class Template:
    """A template, compiled and rendered in the child process.

    Args:
        source: Jinja.
        kind: CHAT or PROMPT.
        where: whose it is, for messages.

    Raises:
        XtkError: it is not a template, or takes more than its limits to compile.
    """

    def __init__(self, source: str, kind: str, where: str) -> None:
        self.source, self.kind, self.where = source, kind, where
        if len(source) > MAX_SOURCE:
            raise XtkError(
                f"this template has {len(source):,} characters; at most {MAX_SOURCE:,} are read", where=where
            )
        self.render_all([])

    def render_all(self, all_values: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the text for each set of values.

        Args:
            all_values: {name: value}; what is not of JSON becomes its text.

        Raises:
            XtkError: the template refuses one, or takes more than its limits.
        """
        texts = []
        for part in _parts([json.dumps(values, default=str) for values in all_values]):
            for answer in _child().ask(self, part):
                if "error" in answer:
                    raise XtkError(_printable(answer["error"]), where=self.where)
                texts.append(answer["text"])
        return texts


def _parts(bodies: list[str]) -> Iterator[list[str]]:
    """Yield requests of some megabytes at most, or of one body; one that is empty where there is none."""
    part: list[str] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part


class _Child:
    """The process that renders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers: dict[tuple[str, str], int] = {}

    def ask(self, template: Template, values: Sequence[str]) -> list[dict[str, str]]:
        """Return what the child answers to each set of values, which are JSON.

        Raises:
            XtkError: it ended over this request.
        """
        with self._lock:
            for again in (False, True):
                fresh = self._process is None
                try:
                    return self._answers(template, values)
                except (OSError, EOFError):
                    number = self.close()
                    # One that was ended from outside between two requests is started again.
                    if fresh or again or number in (-signal.SIGVTALRM, -signal.SIGSEGV):
                        raise XtkError(_told(number), where=template.where) from None
        raise AssertionError

    def _answers(self, template: Template, values: Sequence[str]) -> list[dict[str, str]]:
        key = (template.kind, template.source)
        known = key in self._numbers
        request = {
            "template": self._numbers.setdefault(key, len(self._numbers)),
            "kind": template.kind,
            "source": None if known else template.source,
            "sizes": list(map(len, values)),
        }
        body = f'{json.dumps(request)[:-1]}, "values": [{",".join(values)}]}}'.encode()
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_SIZE.pack(len(body)) + body)
        process.stdin.flush()
        (size,) = _SIZE.unpack(_exactly(process.stdout, _SIZE.size))
        answers: list[dict[str, str]] = json.loads(_exactly(process.stdout, size))
        return answers

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with without_interrupts():
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _START.format(path=sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
        return self._process

    def close(self) -> int:
        """End the process, if there is one; return its exit code, or minus the number of the signal that ended it."""
        process, self._process = self._process, None
        self._numbers = {}
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            return process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


_children: list[_Child] = []
_starting = threading.Lock()
_inherited: list[_Child] = []


def _child() -> _Child:
    with _starting:
        if not _children:
            _children.append(_Child())
        return _children[0]


def _forget() -> None:
    """Leave the child to the process that was forked: its answers are not for this one."""
    global _starting
    _starting = threading.Lock()
    _inherited.extend(_children)
    _children.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close() -> None:
    for child in _children:
        child.close()


def _told(number: int) -> str:
    if number == -signal.SIGVTALRM:
        return f"this template took more than {MAX_SECONDS} seconds of processor time for one conversation"
    if number == -signal.SIGKILL:
        return "the process that renders this template was killed; it may have taken too much memory"
    return f"this template ended the process that renders it (exit code {number})"


def _printable(text: str) -> str:
    kept = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text[: _MESSAGE + 1])
    return kept if len(kept) <= _MESSAGE else kept[:_MESSAGE] + "..."


def _exactly(stream: Any, size: int) -> bytes:
    content: bytes = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


# In the child.


def serve() -> None:
    """Render what comes on stdin until it ends."""
    import resource

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its answer is not read any more
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environments = {CHAT: _chat_environment(), PROMPT: _prompt_environment()}
    templates: dict[int, Any] = {}
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := questions.read(_SIZE.size):
        body = questions.read(_SIZE.unpack(head)[0])
        answer = _encoded(environments, templates, body)
        answers.write(_SIZE.pack(len(answer)) + answer)
        answers.flush()


def _answer(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> list[dict[str, str]]:
    request = json.loads(body)
    number, source, kind = (request[name] for name in ("template", "source", "kind"))
    if source is not None:
        try:
            with _limited():
                templates[number] = (environments[kind].from_string(source), len(source))
        except Exception as wrong:
            templates[number] = (None, 0)
            return [{"error": f"this {kind} template cannot be read: {_reason(wrong)}"}]
    template, size = templates[number]
    if template is None:
        return [{"error": f"this {kind} template cannot be read"}]
    return [
        _rendered(template, values, kind, TIMES_ITS_INPUT * (size + read) + SLACK)
        for values, read in zip(request["values"], request["sizes"], strict=True)
    ]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Limit the processor time of a block: the timer's signal ends the process, also inside of C."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _rendered(template: Any, values: dict[str, Any], kind: str, limit: int) -> dict[str, str]:
    parts, size = [], 0
    try:
        with _limited():
            for part in template.generate(values):
                parts.append(part)
                size += len(part)
                if size > limit:
                    return {
                        "error": f"the {kind} template writes more than {limit:,} characters, {TIMES_ITS_INPUT} times "
                        "its own length and that of what it reads"
                    }
        return {"text": "".join(parts)}
    except Exception as wrong:  # a template is a program
        del parts
        verb = "refuses a conversation" if kind == CHAT else "fails"
        return {"error": f"the {kind} template {verb}: {_reason(wrong)}"}


def _reason(wrong: Exception) -> str:
    if isinstance(wrong, MemoryError):
        return f"it takes more than {MAX_MEMORY >> 30} GiB of memory"
    if isinstance(wrong, RecursionError):
        return "it is nested too deeply"
    return str(wrong)[: _MESSAGE + 1] or type(wrong).__name__


def _encoded(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> bytes:
    try:
        return json.dumps(_answer(environments, templates, body)).encode()
    except MemoryError as wrong:
        return json.dumps([{"error": f"this template cannot be rendered: {_reason(wrong)}"}]).encode()


def _chat_environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a model writes; here its body is text as any other."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _prompt_environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
