"""The process of `xtk.rollouts.apart`: python -m xtk.rollouts.worker DESCRIPTOR PARENT."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.children import die_with
from xtk.errors import XtkError, from_os_error
from xtk.lookup import lookup
from xtk.rollouts import WRITERS, messages
from xtk.rollouts.writer import Writer


def main(pipe: Connection) -> None:
    """Open a backend, and do what is asked until nobody asks. What goes wrong is sent back, and ends nothing."""
    writer: Writer | None = None
    try:
        while True:
            words, arrays = messages.receive(pipe)
            try:
                if writer is None:
                    request = messages.request_of(words["request"])
                    writer = lookup(WRITERS, words["backend"], "backend").open(request)
                    messages.send(pipe, {"context": writer.context})
                else:
                    messages.send(pipe, *_done(writer, words, arrays))
            except Exception as failure:
                messages.send(pipe, messages.words_of_error(_told(failure)))
    except (EOFError, OSError):  # whoever asked has gone
        return


def _done(writer: Writer, words: dict[str, Any], arrays: messages.Arrays) -> tuple[dict[str, Any], messages.Arrays]:
    if words["do"] == "write":
        found = writer.write(messages.asks_of(arrays), messages.sampling_of(words["sampling"]))
        return {"finishes": [one.finish for one in found]}, messages.arrays_of_completions(found)
    if words["do"] == "update":
        writer.update(Path(words["folder"]))
    elif words["do"] == "rest":
        writer.rest()
    else:
        writer.wake()
    return {}, {}


def _told(failure: Exception) -> XtkError:
    mendable = failure if isinstance(failure, XtkError) else from_os_error(failure)
    if mendable is None:
        traceback.print_exc()
        mendable = XtkError(
            f"the process that writes failed: {type(failure).__name__}: {failure}", hint="its traceback stands above"
        )
    return mendable


if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent, signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # what this starts is not to hold the pipe open
    terminal.set_quiet(True)
    main(Connection(descriptor))
