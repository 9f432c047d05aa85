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

from xtk.errors import XtkError
from xtk.subprocesses import block_sigint

# Templates that ask for the date get this one: the same inputs give the same bytes on every day.
FIXED_DATE = datetime(2024, 7, 26)
CHAT_TEMPLATE, PROMPT_TEMPLATE = (
    "chat",
    "prompt",
)  # environments: as transformers has it for chat templates; for --prompt-template
MAX_SECONDS = 5  # of processor time for one rendering
MAX_REQUEST_CHARACTERS = 1 << 22  # characters of a request
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_SOURCE_CHARACTERS = 1 << 20  # characters; the longest published templates have some ten thousand
MAX_OUTPUT_RATIO, MIN_OUTPUT_LIMIT = (
    100,
    1 << 16,
)  # what a template may write: so many times what it reads, and so much more
_SIZE_HEADER = struct.Struct("<Q")
_WORKER_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from xtk.tokens.template_rendering import serve_render_requests; serve_render_requests()"
)
_MAX_ERROR_CHARACTERS = 300  # characters of what a template says when it refuses


class SandboxedTemplate:
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
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise XtkError(
                f"this template has {len(source):,} characters; at most {MAX_SOURCE_CHARACTERS:,} are read", where=where
            )
        self.render_batch([])

    def render_batch(self, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the text for each set of values.

        Args:
            variables: {name: value}; what is not of JSON becomes its text.

        Raises:
            XtkError: the template refuses one, or takes more than its limits.
        """
        texts = []
        for part in _split_requests([json.dumps(values, default=str) for values in variables]):
            for answer in _render_process().render(self, part):
                if "error" in answer:
                    raise XtkError(_printable_error(answer["error"]), where=self.where)
                texts.append(answer["text"])
        return texts


def _split_requests(bodies: list[str]) -> Iterator[list[str]]:
    """Yield requests of some megabytes at most, or of one body; one that is empty where there is none."""
    part: list[str] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > MAX_REQUEST_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part


class _RenderProcess:
    """The process that renders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._template_numbers: dict[tuple[str, str], int] = {}

    def render(self, template: SandboxedTemplate, values: Sequence[str]) -> list[dict[str, str]]:
        """Return what the child answers to each set of values, which are JSON.

        Raises:
            XtkError: it ended over this request.
        """
        with self._lock:
            for again in (False, True):
                fresh = self._process is None
                try:
                    return self._exchange(template, values)
                except (OSError, EOFError):
                    number = self.close()
                    # One that was ended from outside between two requests is started again.
                    if fresh or again or number in (-signal.SIGVTALRM, -signal.SIGSEGV):
                        raise XtkError(_exit_reason(number), where=template.where) from None
        raise AssertionError

    def _exchange(self, template: SandboxedTemplate, values: Sequence[str]) -> list[dict[str, str]]:
        key = (template.kind, template.source)
        known = key in self._template_numbers
        request = {
            "template": self._template_numbers.setdefault(key, len(self._template_numbers)),
            "kind": template.kind,
            "source": None if known else template.source,
            "sizes": list(map(len, values)),
        }
        body = f'{json.dumps(request)[:-1]}, "values": [{",".join(values)}]}}'.encode()
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_SIZE_HEADER.pack(len(body)) + body)
        process.stdin.flush()
        (size,) = _SIZE_HEADER.unpack(_read_exactly(process.stdout, _SIZE_HEADER.size))
        answers: list[dict[str, str]] = json.loads(_read_exactly(process.stdout, size))
        return answers

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with block_sigint():
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _WORKER_CODE.format(path=sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
        return self._process

    def close(self) -> int:
        """End the process, if there is one; return its exit code, or minus the number of the signal that ended it."""
        process, self._process = self._process, None
        self._template_numbers = {}
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


_processes: list[_RenderProcess] = []
_start_lock = threading.Lock()
_inherited_processes: list[_RenderProcess] = []


def _render_process() -> _RenderProcess:
    with _start_lock:
        if not _processes:
            _processes.append(_RenderProcess())
        return _processes[0]


def _forget_after_fork() -> None:
    """Leave the child to the process that was forked: its answers are not for this one."""
    global _starting
    _start_lock = threading.Lock()
    _inherited_processes.extend(_processes)
    _processes.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _close_at_exit() -> None:
    for child in _processes:
        child.close()


def _exit_reason(number: int) -> str:
    if number == -signal.SIGVTALRM:
        return f"this template took more than {MAX_SECONDS} seconds of processor time for one conversation"
    if number == -signal.SIGKILL:
        return "the process that renders this template was killed; it may have taken too much memory"
    return f"this template ended the process that renders it (exit code {number})"


def _printable_error(text: str) -> str:
    kept = "".join(
        letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text[: _MAX_ERROR_CHARACTERS + 1]
    )
    return kept if len(kept) <= _MAX_ERROR_CHARACTERS else kept[:_MAX_ERROR_CHARACTERS] + "..."


def _read_exactly(stream: Any, size: int) -> bytes:
    content: bytes = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


# In the child.


def serve_render_requests() -> None:
    """Render what comes on stdin until it ends."""
    import resource

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its answer is not read any more
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environments = {CHAT_TEMPLATE: _chat_environment(), PROMPT_TEMPLATE: _prompt_environment()}
    templates: dict[int, Any] = {}
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := questions.read(_SIZE_HEADER.size):
        body = questions.read(_SIZE_HEADER.unpack(head)[0])
        answer = _encode_response(environments, templates, body)
        answers.write(_SIZE_HEADER.pack(len(answer)) + answer)
        answers.flush()


def _render_request(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> list[dict[str, str]]:
    request = json.loads(body)
    number, source, kind = (request[name] for name in ("template", "source", "kind"))
    if source is not None:
        try:
            with _cpu_time_limit():
                templates[number] = (environments[kind].from_string(source), len(source))
        except Exception as wrong:
            templates[number] = (None, 0)
            return [{"error": f"this {kind} template cannot be read: {_error_text(wrong)}"}]
    template, size = templates[number]
    if template is None:
        return [{"error": f"this {kind} template cannot be read"}]
    return [
        _render_one(template, values, kind, MAX_OUTPUT_RATIO * (size + read) + MIN_OUTPUT_LIMIT)
        for values, read in zip(request["values"], request["sizes"], strict=True)
    ]


@contextlib.contextmanager
def _cpu_time_limit() -> Iterator[None]:
    """Limit the processor time of a block: the timer's signal ends the process, also inside of C."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _render_one(template: Any, values: dict[str, Any], kind: str, limit: int) -> dict[str, str]:
    parts, size = [], 0
    try:
        with _cpu_time_limit():
            for part in template.generate(values):
                parts.append(part)
                size += len(part)
                if size > limit:
                    return {
                        "error": f"the {kind} template writes more than {limit:,} characters, {MAX_OUTPUT_RATIO} times "
                        "its own length and that of what it reads"
                    }
        return {"text": "".join(parts)}
    except Exception as wrong:  # a template is a program
        del parts
        verb = "refuses a conversation" if kind == CHAT_TEMPLATE else "fails"
        return {"error": f"the {kind} template {verb}: {_error_text(wrong)}"}


def _error_text(wrong: Exception) -> str:
    if isinstance(wrong, MemoryError):
        return f"it takes more than {MAX_MEMORY >> 30} GiB of memory"
    if isinstance(wrong, RecursionError):
        return "it is nested too deeply"
    return str(wrong)[: _MAX_ERROR_CHARACTERS + 1] or type(wrong).__name__


def _encode_response(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> bytes:
    try:
        return json.dumps(_render_request(environments, templates, body)).encode()
    except MemoryError as wrong:
        return json.dumps([{"error": f"this template cannot be rendered: {_error_text(wrong)}"}]).encode()


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
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = FIXED_DATE.strftime
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


def _raise_template_error(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
