"""Main function of a worker process that writes shards of a cache; xtk.teachers.worker_pool starts it."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from xtk import terminal
from xtk.errors import XtkError, from_os_error
from xtk.subprocesses import die_with_parent


def main(pipe: Connection) -> None:
    """Receive the parent's process id, the job and the shard numbers; send the manifest entry of each written shard.

    The first message says that the teacher is open; the last one is None. An XtkError is sent to the parent.
    """
    try:
        # Without the parent, only the current shard is lost.
        die_with_parent(pipe.recv(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, _stop)
        terminal.set_quiet(True)
        _write_shards(pipe, pipe.recv())
    except EOFError:  # the parent has ended
        sys.exit(1)
    except Exception as failure:
        error = failure if isinstance(failure, XtkError) else from_os_error(failure)
        if error is None:
            raise
        pipe.send(error)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # do not interrupt cleanup of libraries


def _write_shards(pipe: Connection, work: Any) -> None:
    from xtk.teachers.cache_build_config import open_teacher
    from xtk.teachers.cache_building import write_shards
    from xtk.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer(work.request.teacher_folder, name=work.request.teacher_name)
    teacher = open_teacher(work.request, tokenizer, work.header["teacher"]["weights"])
    pipe.send("open")
    for number_and_entry in write_shards(work, teacher, tokenizer, pipe.recv()):
        pipe.send(number_and_entry)
    pipe.send(None)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)
