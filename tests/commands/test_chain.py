"""Commands chained with shell pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

XTK = f"{sys.executable} -m xtk"


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=cwd, timeout=300, check=False
    )


@pytest.mark.slow
def test_commands_chain_from_projection_to_evaluation_in_one_pipe(pair, corpus, cache, tmp_path):
    held_out = tmp_path / "test.txt"
    held_out.write_text("Anna has 1234 apples and gives 17 to Bert.\nNow Anna has 1217 apples left. ")
    line = (
        f"{XTK} build-projection {pair.student} {pair.teacher} -o p"
        f" | {XTK} prune-projection - --top-k 4 -o p4"
        f" | {XTK} distill {pair.student} {cache} --projection - --max-steps 3 -o out"
        f" | {XTK} evaluate - {held_out} --json"
    )
    done = shell(line, tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert record["model"] == "out"
    assert record["bytes"] == held_out.stat().st_size
    assert record["documents"] == 1
    assert 3 < record["bits_per_byte"] < 8
    assert (tmp_path / "p4").is_file()


def test_a_failed_command_stops_the_pipe(pair, tmp_path):
    done = shell(
        f"{XTK} build-projection {pair.student} {tmp_path}/nowhere -o p | {XTK} prune-projection - --top-k 4 -o p4",
        tmp_path,
    )
    assert done.returncode == 1
    assert "the command before the | probably failed" in done.stderr
    assert not (tmp_path / "p4").exists()
