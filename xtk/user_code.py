"""Importing and calling Python code of the user, with errors that name it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.errors import Terminated, XtkError
from xtk.name_registry import unknown_name_error


@contextlib.contextmanager
def user_code_errors(subject: str, *, where: str | None = None, hint: str | None = None) -> Iterator[None]:
    """Turn exceptions of user code, also `sys.exit`, into an XtkError that names it.

    KeyboardInterrupt, SIGTERM and errors of xtk pass through. The current directory is restored afterwards. A process
    that the code forks ends here.
    `subject`: subject of the error sentence, such as `the reward score.py:f`.
    """
    directory, process = _current_directory(), os.getpid()
    try:
        yield
    except (XtkError, Terminated, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise XtkError(f"{subject} ended the process: sys.exit({error.code!r})", where=where, hint=hint) from error
    except BaseException as error:
        raise XtkError(f"{subject} failed: {_describe(error)}", where=where, hint=hint) from error
    finally:
        if os.getpid() != process:  # a process that the code forked returned from it; it must not continue the command
            os._exit(1)
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


def load_user_object(spec: str, option: str, kind: str) -> Any:
    """Import and return `FILE.py:NAME` of the user; the option and the kind (function, class) are for messages."""
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
