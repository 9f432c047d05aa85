"""Jinja templates, rendered in a subprocess with limits of memory, CPU time and output length.

A chat template comes with a model, and is a program. Jinja's sandbox protects files and Python objects, but does not
prevent 'a' * 2000000000, filters with the same effect (center, indent, format), or nested loops. So one subprocess
renders all templates of a process under limits of the operating system; if it dies, the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
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

# Templates that use the current date get this one, so that the same inputs give the same bytes on every day.
FIXED_DATE = datetime(2024, 7, 26)
CHAT_TEMPLATE, PROMPT_TEMPLATE = (
    "chat",
    "prompt",
)  # Jinja environments: that of transformers for chat templates; that of --prompt-template
MAX_SECONDS = 5  # of CPU time per conversation
MAX_REQUEST_CHARACTERS = 1 << 22  # per request, several conversations
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_SOURCE_CHARACTERS = 1 << 20  # the longest published templates have some ten thousand
MAX_OUTPUT_RATIO, MIN_OUTPUT_LIMIT = (
    100,
    1 << 16,
)  # output limit: this ratio times template and input, plus this number of characters
_SIZE_HEADER = struct.Struct("<Q")
_WORKER_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from xtk.text.chat.jinja_subprocess import serve_render_requests; serve_render_requests()"
)
_MAX_ERROR_CHARACTERS = 300  # of a template's error message


class SandboxedTemplate:
    """A Jinja template, compiled and rendered in the subprocess.

    Args:
        source: the Jinja source.
        kind: CHAT_TEMPLATE or PROMPT_TEMPLATE.
        where: name of its owner in errors.

    Raises:
        XtkError: it has a syntax error, or exceeds its limits during compilation.
    """

    def __init__(self, source: str, kind: str, where: str) -> None:
        self.source, self.kind, self.where = source, kind, where
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise XtkError(
                f"this {kind} template has {len(source):,} characters; must have at most {MAX_SOURCE_CHARACTERS:,}",
                where=where,
                hint="use a shorter template",
            )
        self.render_batch([])

    @property
    def _hint(self) -> str:
        return "correct the template, or remove the " + ("conversation" if self.kind == CHAT_TEMPLATE else "row")

    def render_batch(self, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the rendered text for each set of variables.

        Args:
            variables: {name: value}; values without a JSON type become strings.

        Raises:
            XtkError: the template raises an error, or exceeds its limits.
        """
        texts = []
        for part in _split_requests([json.dumps(values, default=str) for values in variables]):
            for response in _render_process().render(self, part):
                if "error" in response:
                    raise XtkError(_printable_error(response["error"]), where=self.where, hint=self._hint)
                texts.append(response["text"])
        return texts


def _split_requests(bodies: list[str]) -> Iterator[list[str]]:
    """Yield requests of at most MAX_REQUEST_CHARACTERS or one body each; an empty request if there are no bodies."""
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
    """The subprocess that renders templates."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._template_numbers: dict[tuple[str, str], int] = {}

    def render(self, template: SandboxedTemplate, values: Sequence[str]) -> list[dict[str, str]]:
        """Return the subprocess's response for each set of variables (JSON texts).

        Raises:
            XtkError: the subprocess died during this request.
        """
        with self._lock:
            for again in (False, True):
                fresh = self._process is None
                try:
                    return self._exchange(template, values)
                except (OSError, EOFError):
                    number = self.close()
                    # If it died between two requests, for example killed by the user, it is started again.
                    if fresh or again or number in (-signal.SIGVTALRM, -signal.SIGSEGV):
                        raise XtkError(_exit_reason(number), where=template.where, hint=_exit_hint(number)) from None
                except BaseException:  # such as KeyboardInterrupt: the pending response would answer the next request
                    if self._process is not None:
                        self._process.kill()
                    self.close()
                    raise
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
        responses: list[dict[str, str]] = json.loads(_read_exactly(process.stdout, size))
        return responses

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
        """End the subprocess, if there is one; return its exit code, negative if a signal ended it."""
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
    """Drop the subprocess in a forked process: its responses belong to the parent."""
    global _start_lock
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
        return f"the Jinja template exceeded {MAX_SECONDS} seconds of CPU time for one conversation"
    if number == -signal.SIGKILL:
        return "the process that renders Jinja templates was killed"
    return f"the process that renders Jinja templates crashed (exit code {number})"


def _exit_hint(number: int) -> str:
    if number == -signal.SIGVTALRM:
        return "use a simpler template, or remove very long conversations from the data"
    if number == -signal.SIGKILL:
        return "check whether the machine ran out of memory, then run the same command again"
    return "run the same command again; if the process crashes again, use another template"


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


# In the subprocess.


def serve_render_requests() -> None:
    """Render requests from stdin to stdout until stdin closes."""
    import resource

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the parent has closed the pipe
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environments = {CHAT_TEMPLATE: _chat_environment(), PROMPT_TEMPLATE: _prompt_environment()}
    templates: dict[int, Any] = {}
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(_SIZE_HEADER.size):
        body = requests.read(_SIZE_HEADER.unpack(head)[0])
        response = _encode_response(environments, templates, body)
        responses.write(_SIZE_HEADER.pack(len(response)) + response)
        responses.flush()


def _render_request(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> list[dict[str, str]]:
    request = json.loads(body)
    number, source, kind = (request[name] for name in ("template", "source", "kind"))
    if source is not None:
        try:
            with _cpu_time_limit():
                templates[number] = (environments[kind].from_string(source), len(source))
        except Exception as error:
            templates[number] = (None, 0)
            return [{"error": f"the {kind} template is invalid: {_error_text(error)}"}]
    template, size = templates[number]
    if template is None:
        return [{"error": f"the {kind} template is invalid"}]
    return [
        _render_one(template, values, kind, MAX_OUTPUT_RATIO * (size + read) + MIN_OUTPUT_LIMIT)
        for values, read in zip(request["values"], request["sizes"], strict=True)
    ]


@contextlib.contextmanager
def _cpu_time_limit() -> Iterator[None]:
    """Limit the CPU time of a block: the timer's signal ends the process, also inside of C code."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _render_one(template: Any, values: dict[str, Any], kind: str, limit: int) -> dict[str, str]:
    parts, size = [], 0
    try:
        with _cpu_time_limit():
            # For Jinja's filter `random` and function `lipsum`. A chat template is rendered again with other contents,
            # and must then make the same choices; prompts of different rows may differ.
            random.seed(0 if kind == CHAT_TEMPLATE else json.dumps(values))
            for part in template.generate(values):
                parts.append(part)
                size += len(part)
                if size > limit:
                    return {
                        "error": f"the output of the {kind} template exceeds {limit:,} characters (about "
                        f"{MAX_OUTPUT_RATIO} times the length of template and input)"
                    }
        return {"text": "".join(parts)}
    except Exception as error:  # a template is a program
        del parts
        verb = "refuses a conversation of the data" if kind == CHAT_TEMPLATE else "cannot be rendered for a row"
        return {"error": f"the {kind} template {verb}: {_error_text(error)}"}


def _error_text(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it uses more than {MAX_MEMORY >> 30} GiB of memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)[: _MAX_ERROR_CHARACTERS + 1] or type(error).__name__


def _encode_response(environments: Mapping[str, Any], templates: dict[int, Any], body: bytes) -> bytes:
    try:
        return json.dumps(_render_request(environments, templates, body)).encode()
    except MemoryError as error:
        return json.dumps([{"error": f"the Jinja template cannot be rendered: {_error_text(error)}"}]).encode()


def _chat_environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text; here its body is rendered as usual."""

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
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
