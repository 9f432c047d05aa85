"""Importing and calling Python code of the user, with errors that name it."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from xtk.errors import Terminated, XtkError
from xtk.name_registry import unknown_name_error


class _Exited(BaseException):
    """`os._exit` was called."""


_original_exit = os._exit
_user_code_state = threading.local()  # .process: id of the process in which this thread calls user code


def _exit_outside_user_code(status: int) -> NoReturn:
    """Raise an exception inside of user code; exit elsewhere, also in processes forked by user code."""
    if getattr(_user_code_state, "process", None) == os.getpid():
        raise _Exited(f"os._exit({status})")
    _original_exit(status)


@contextlib.contextmanager
def user_code_errors(subject: str, *, where: str | None = None, hint: str | None = None) -> Iterator[None]:
    """Turn exceptions of user code, also `sys.exit` and `os._exit`, into an XtkError that names it.

    Ctrl-C, SIGTERM and errors of xtk pass through. The current directory is restored afterwards. A process that the
    code forks ends here.

    Args:
        subject: subject of the error sentence, such as `the reward score.py:f`.
    """
    before, directory, process = getattr(_user_code_state, "process", None), _current_directory(), os.getpid()
    os._exit, _user_code_state.process = _exit_outside_user_code, process
    try:
        yield
    except (XtkError, Terminated):
        raise
    except (SystemExit, _Exited) as error:
        call = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
        raise XtkError(f"{subject} ended the process: {call}", where=where, hint=hint) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _was_raised_by_code(error):
            raise
        raise XtkError(f"{subject} failed: {_describe(error)}", where=where, hint=hint) from error
    finally:
        if os.getpid() != process:  # a process that the code forked returned from it; it must not continue the command
            _original_exit(1)
        _user_code_state.process = before
        if directory is not None and directory != _current_directory():
            os.chdir(directory)


def _current_directory() -> Path | None:
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        return Path.cwd()
    return None


def _describe(error: BaseException) -> str:
    """Return type and message of an exception, whose `__str__` may fail as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its message cannot be printed)"


def _was_raised_by_code(error: BaseException) -> bool:
    """Return whether an exception came from a `raise` statement and not from a signal."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def load_user_object(spec: str, option: str, kind: str) -> Any:
    """Import and return a function or class from a Python file of the user.

    Args:
        spec: `FILE.py:NAME`.
        option: the command line option, for messages.
        kind: "function" or "class", for messages.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise XtkError("the Python file does not exist", where=path or spec, hint=f"use {option}")
    full_name = f"{Path(path).resolve()}"  # not the name of any library's module
    specification = importlib.util.spec_from_file_location(full_name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[full_name] = module  # dataclasses resolve the types of their fields there
    with user_code_errors(f"importing {path}", hint="correct the Python file, and run it alone with python FILE.py"):
        specification.loader.exec_module(module)
    loaded = getattr(module, name, None)
    if not callable(loaded):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name_error(f"{kind} in {path}", name, known)
    return loaded
