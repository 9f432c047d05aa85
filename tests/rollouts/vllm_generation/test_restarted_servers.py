"""A generation server that is killed and restarted generates with the student's weights, not with its first ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from vllm_on_cpu import Server

from xtk.engines.http_client_pool import RetryPolicy
from xtk.rollouts.server_generator import ServerGenerator

from .generation_requests import (
    CONTEXT,
    GREEDY,
    assert_equal_completions,
    backend_config,
    greedy_completions,
    make_requests,
    max_logprob_error,
)

RETRY_POLICY = RetryPolicy(
    max_attempts=400, total_seconds=600, attempt_seconds=120, connect_seconds=20, initial_backoff=0.1, max_backoff=1.0
)


def start_server(folder: Path, log: Path, port: int = 0) -> Server:
    flags = ("--max-model-len", str(CONTEXT), "--served-model-name", "student")
    return Server(folder, log, *flags, port=port, VLLM_SERVER_DEV_MODE="1")


def test_restarted_server_receives_the_student_weights_again(students, tmp_path, capsys):
    old, new = students
    servers = [start_server(old, tmp_path / "log")]
    try:
        servers[0].wait(600)
        generator = ServerGenerator.open(backend_config(old, servers=[servers[0].url], patience=RETRY_POLICY))
        generator.update_weights(new)
        assert max_logprob_error(new, generator.generate(make_requests(), GREEDY)) < 1e-4

        servers[0].kill()  # while there are no requests
        servers.append(start_server(old, tmp_path / "log-2", servers[0].port))
        servers[1].wait(600)
        assert_equal_completions(generator.generate(make_requests(), GREEDY), greedy_completions(new))
        assert "was restarted without the student's weights; sent them again" in capsys.readouterr().err

        def kill_and_restart() -> None:
            time.sleep(1.0)
            servers[1].kill()
            time.sleep(35)
            servers.append(start_server(old, tmp_path / "log-3", servers[0].port))

        restart_thread = threading.Thread(target=kill_and_restart)
        restart_thread.start()
        deadline = time.monotonic() + 300
        while restart_thread.is_alive() or time.monotonic() < deadline:
            assert max_logprob_error(new, generator.generate(make_requests(), GREEDY)) < 1e-4
            if not restart_thread.is_alive() and "responding again" in (stderr := capsys.readouterr().err):
                break
        assert "; retrying" in stderr
        assert max_logprob_error(old, generator.generate(make_requests(), GREEDY)) > 0.1
    finally:
        for server in servers:
            server.stop()
