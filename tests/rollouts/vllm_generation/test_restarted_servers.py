"""A generation server that is killed and restarted generates with the student's weights, not with its first ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from vllm_on_cpu import Server

from xtk.engines.http_client_pool import RetryPolicy
from xtk.rollouts.server_generator import ServerGenerator

from .generation_requests import CONTEXT, GREEDY, asks_of, assert_same, error_of, greedily, request_of

PATIENT = RetryPolicy(
    max_attempts=400, total_seconds=600, attempt_seconds=120, connect_seconds=20, initial_backoff=0.1, max_backoff=1.0
)


def start(folder: Path, log: Path, port: int = 0) -> Server:
    flags = ("--max-model-len", str(CONTEXT), "--served-model-name", "student")
    return Server(folder, log, *flags, port=port, VLLM_SERVER_DEV_MODE="1")


def test_a_server_that_was_restarted_gets_the_weights_again(students, tmp_path, capsys):
    old, new = students
    running = [start(old, tmp_path / "log")]
    try:
        running[0].wait(600)
        writer = ServerGenerator.open(request_of(old, servers=[running[0].url], patience=PATIENT))
        writer.update_weights(new)
        assert error_of(new, writer.generate(asks_of(), GREEDY)) < 1e-4

        running[0].kill()  # while nothing is asked of it
        running.append(start(old, tmp_path / "log-2", running[0].port))
        running[1].wait(600)
        assert_same(writer.generate(asks_of(), GREEDY), greedily(new))
        assert "was restarted without the student's weights; sent them again" in capsys.readouterr().err

        def die_and_come_back() -> None:
            time.sleep(1.0)
            running[1].kill()
            time.sleep(35)  # longer than the time between two lines
            running.append(start(old, tmp_path / "log-3", running[0].port))

        fate = threading.Thread(target=die_and_come_back)
        fate.start()
        end = time.monotonic() + 300
        while fate.is_alive() or time.monotonic() < end:
            assert error_of(new, writer.generate(asks_of(), GREEDY)) < 1e-4
            if not fate.is_alive() and "responding again" in (said := capsys.readouterr().err):
                break
        assert "; retrying" in said
        assert "no response for 3" in said, "a line every 30 seconds"
        assert error_of(old, writer.generate(asks_of(), GREEDY)) > 0.1
    finally:
        for server in running:
            server.stop()
