"""Code of the user: importing it, and calling it so that whatever it does ends in an error that names it."""

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
from xtk.registry import unknown_name_error


class _Exited(BaseException):
    """`os._exit` was called."""


_leave = os._exit
_user_code_state = threading.local()  # .process: the one that calls code of the user in this thread


def _refuse_to_leave(status: int) -> NoReturn:
    """Raise an exception in code of the user; leave elsewhere, and in the processes that it forks."""
    if getattr(_user_code_state, "process", None) == os.getpid():
        raise _Exited(f"os._exit({status})")
    _leave(status)


@contextlib.contextmanager
def user_code_errors(subject: str, *, where: str | None = None, hint: str | None = None) -> Iterator[None]:
    """Call code of the user; an exception, also of `sys.exit` and `os._exit`, becomes an error that names it.

    Ctrl-C and SIGTERM pass, and errors of xtk. Relative paths mean the same after it: a change of the current directory
    is taken back.

    Args:
        subject: the subject of the error: `the reward score.py:f`.
        where: what it was called with.
        hint: what it should do.

    Raises:
        XtkError: it raised an exception.
    """
    before, directory = getattr(_user_code_state, "process", None), _current_directory()
    os._exit, _user_code_state.process = _refuse_to_leave, os.getpid()
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
        raise XtkError(f"{subject} failed: {type(error).__name__}: {error}", where=where, hint=hint) from error
    finally:
        _user_code_state.process = before
        if directory is not None and directory != _current_directory():
            os.chdir(directory)


def _current_directory() -> Path | None:
    with contextlib.suppress(FileNotFoundError):  # it was removed
        return Path.cwd()
    return None


def _was_raised_by_code(error: BaseException) -> bool:
    """Return whether a `raise` statement raised an exception, rather than a signal."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def load_user_object(spec: str, option: str, kind: str) -> Any:
    """Import a function or class of the user's.

    Args:
        spec: `FILE.py:NAME`.
        option: the option, for messages.
        kind: what it is to be, for messages.

    Raises:
        XtkError: there is no such file, it cannot be imported, or it has nothing of this name that can be called.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise XtkError("no such file or folder", where=path or spec, hint=option)
    full_name = f"{Path(path).resolve()}"  # no module of a library has it
    specification = importlib.util.spec_from_file_location(full_name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[full_name] = module  # dataclasses look there for the types of their fields
    with user_code_errors(f"importing {path}"):
        specification.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name_error(f"{kind} in {path}", name, known)
    return found
