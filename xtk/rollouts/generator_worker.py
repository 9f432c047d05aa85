"""Subprocess of `SubprocessGenerator`: python -m xtk.rollouts.generator_worker FILE_DESCRIPTOR PARENT_PID."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.errors import XtkError, from_os_error
from xtk.name_registry import load_registered
from xtk.rollouts import GENERATORS, generator_ipc
from xtk.rollouts.generator_interface import Generator
from xtk.subprocesses import die_with_parent


def main(pipe: Connection) -> None:
    """Open a backend and serve requests until the pipe closes. Errors are sent back; the process goes on."""
    generator: Generator | None = None
    try:
        while True:
            words, arrays = generator_ipc.receive_message(pipe)
            try:
                if generator is None:
                    request = generator_ipc.deserialize_config(words["request"])
                    generator = load_registered(GENERATORS, words["backend"], "backend").open(request)
                    generator_ipc.send_message(pipe, {"context": generator.context_length})
                else:
                    generator_ipc.send_message(pipe, *_handle_request(generator, words, arrays))
            except Exception as failure:
                generator_ipc.send_message(pipe, generator_ipc.serialize_error(_as_xtk_error(failure)))
    except (EOFError, OSError):  # the parent process has closed the pipe
        return


def _handle_request(
    generator: Generator, words: dict[str, Any], arrays: generator_ipc.Arrays
) -> tuple[dict[str, Any], generator_ipc.Arrays]:
    if words["do"] == "write":
        found = generator.generate(
            generator_ipc.deserialize_requests(arrays), generator_ipc.deserialize_sampling(words["sampling"])
        )
        return {"finishes": [one.finish_reason for one in found]}, generator_ipc.serialize_completions(found)
    if words["do"] == "update":
        generator.update_weights(Path(words["folder"]))
    elif words["do"] == "sleep":
        generator.sleep()
    else:
        generator.wake_up()
    return {}, {}


def _as_xtk_error(failure: Exception) -> XtkError:
    error = failure if isinstance(failure, XtkError) else from_os_error(failure)
    if error is None:
        traceback.print_exc()
        error = XtkError(
            f"the generation process failed: {type(failure).__name__}: {failure}",
            hint="see the traceback of the process above",
        )
    return error


if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # subprocesses must not keep the pipe open
    terminal.set_quiet(True)
    main(Connection(descriptor))
