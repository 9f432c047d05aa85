"""One of several processes that write shards of a cache: what runs in it. xtk.teachers.worker_pool starts it."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from xtk import terminal
from xtk.errors import XtkError, from_os_error
from xtk.subprocesses import die_with_parent


def main(pipe: Connection) -> None:
    """Receive who started it, the work and the shards; open the teacher; tell of each shard that is written.

    The first answer is that the teacher is open, the last one None. A mistake that the user can mend is sent as such.
    """
    try:
        # Nothing is lost with it but the shard that it writes, and its parent is not there to wait for more.
        die_with_parent(pipe.recv(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, _stop)
        terminal.set_quiet(True)
        _write_shards(pipe, pipe.recv())
    except EOFError:  # the parent has gone
        sys.exit(1)
    except Exception as failure:
        mendable = failure if isinstance(failure, XtkError) else from_os_error(failure)
        if mendable is None:
            raise
        pipe.send(mendable)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what libraries do at the end is not to be interrupted by Python


def _write_shards(pipe: Connection, work: Any) -> None:
    from xtk.teachers.cache_building import write_shards
    from xtk.teachers.cache_request import open_teacher
    from xtk.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer(work.request.teacher_folder, name=work.request.teacher_name)
    teacher = open_teacher(work.request, tokenizer)
    pipe.send("open")
    for told in write_shards(work, teacher, tokenizer, pipe.recv()):
        pipe.send(told)
    pipe.send(None)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)
