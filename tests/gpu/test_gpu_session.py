"""The driver of GPU sessions: time limits, recorded results, skipped steps, and results after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_session
import pytest
from gpu_session import PART_SECONDS, STEPS, Results, Step, run_parts, take_step

PRINT_TABLE = (
    "print('x.py on a machine\\n| what | measured | reach |\\n| --- | --- | --- |\\n| speed | 1.5 x | 1.3 x |')"
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of_group(group: int) -> list[int]:
    pids = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and is_running(int(path.name)):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(path.name)) == group:
                    pids.append(int(path.name))
    return pids


def test_parts_have_steps_shorter_than_a_part_and_step_names_are_unique():
    assert {step.part for step in STEPS} == {1, 2, 3}
    assert max(step.seconds for step in STEPS) < PART_SECONDS
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.slow
def test_a_part_ends_in_time_whatever_its_steps_do(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "PART_SECONDS", 3.0)
    monkeypatch.setattr(gpu_session, "MIN_STEP_SECONDS", 0.5)
    sleeping = [Step(str(number), 1, 2, ("-c", "import time; time.sleep(60)")) for number in range(3)]
    started = time.monotonic()
    assert run_parts([1], sleeping, Results(tmp_path / "r"), dry_run=False) == 3
    assert time.monotonic() - started < 10
    ended = [line["status"] for line in lines(tmp_path / "r") if line["status"] != "started"]
    assert ended == ["cut", "cut", "skipped"]


WITHOUT_DATASETS = """
import runpy, sys
sys.modules["datasets"] = None
sys.path[:0] = ["tests", "tests/benchmarks"]
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="imported")
"""


@pytest.mark.slow
def test_steps_import_no_package_beyond_those_that_the_session_needs():
    assert "datasets" not in gpu_session.REQUIRED_PACKAGES
    files = {word for step in [*STEPS, gpu_session.DATA_STEP] for word in step.command if word.endswith(".py")}
    files -= {word for step in STEPS if "vllm" in step.needs or "triton" in step.needs for word in step.command}
    command = [sys.executable, "-c", WITHOUT_DATASETS, *sorted(files)]
    env = {**os.environ, "PYTHONPATH": str(gpu_session.ROOT)}
    completed = subprocess.run(command, cwd=gpu_session.ROOT, env=env, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_steps_use_the_package_of_the_checkout_and_no_data_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XTK_DATA", str(tmp_path / "elsewhere"))
    code = "import os, xtk; print(os.path.dirname(os.path.dirname(xtk.__file__)), os.environ['XTK_DATA'])"
    take_step(Step("one", 1, 60, ("-c", code)), 60, Results(tmp_path / "r"), dry_run=False)
    assert lines(tmp_path / "r")[-1]["tail"] == [f"{gpu_session.ROOT} {gpu_session.DATA}"]


def test_a_dry_run_takes_every_script_of_the_steps():
    dry = [step for part in (1, 2, 3) for step in gpu_session.steps_of(part, STEPS, dry_run=True)]
    taken = {word for step in dry for word in step.dry_command or step.command if word.endswith(".py")}
    assert {word for step in STEPS for word in step.command if word.endswith(".py")} <= taken


def test_printed_numbers_of_a_step_are_recorded(tmp_path):
    take_step(Step("one", 1, 20, ("-c", PRINT_TABLE)), 20, Results(tmp_path / "r"), dry_run=False)
    started, number, ended = lines(tmp_path / "r")
    assert (started["status"], ended["status"]) == ("started", "passed")
    assert number == {"step": "one", "part": 1, "what": "speed", "measured": "1.5 x", "reach": "1.3 x"}


def test_step_over_its_limit_is_killed_with_its_children_and_the_next_step_runs(tmp_path):
    start_child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code = (
        f"{start_child}; print(1); import time, os; open({str(tmp_path / 'pgid')!r}, 'w').write(str(os.getpgid(0))); "
    )
    steps = [Step("slow", 1, 2, ("-c", f"{code} time.sleep(60)")), Step("next", 1, 20, ("-c", "pass"))]
    assert run_parts([1], steps, Results(tmp_path / "r"), dry_run=False) == 1
    ended = [line for line in lines(tmp_path / "r") if line["status"] != "started"]
    assert [(line["step"], line["status"]) for line in ended] == [("slow", "cut"), ("next", "passed")]
    assert ended[0]["tail"] == ["1"]
    group = int((tmp_path / "pgid").read_text())
    for _ in range(100):
        if not any(is_running(pid) for pid in processes_of_group(group)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a child of the step is still running")


@pytest.mark.slow
def test_dry_run_has_longer_time_limits(tmp_path):
    step = Step("slow", 1, 1, ("-c", "import time; time.sleep(2)"))
    assert run_parts([1], [step], Results(tmp_path / "r"), dry_run=True) == 0
    assert run_parts([1], [step], Results(tmp_path / "r"), dry_run=False) == 1


def test_skipped_steps_are_recorded_with_the_reason(tmp_path, monkeypatch):
    results = Results(tmp_path / "r")
    assert (
        take_step(Step("one", 1, 9, ("-c", "pass"), needs=("no_such_module",)), 9, results, dry_run=False) == "skipped"
    )
    raises = ("-c", "raise SystemExit('skipped: no data')")
    assert take_step(Step("two", 1, 9, raises), 9, results, dry_run=False) == "skipped"
    monkeypatch.setattr(gpu_session, "PART_SECONDS", 0.0)
    run_parts([1], [Step("three", 1, 9, ("-c", "pass"))], results, dry_run=False)
    found = lines(tmp_path / "r")
    assert found[0]["reason"] == "not installed: no_such_module"
    assert found[2]["tail"] == ["skipped: no data"]
    assert found[3]["reason"] == "no time is left in this part"


def test_results_are_kept_if_the_session_is_killed(tmp_path):
    code = (
        "import gpu_session as g; from pathlib import Path; "
        f"r = g.Results(Path({str(tmp_path / 'r')!r})); "
        "g.run_parts([1], [g.Step('done', 1, 20, ('-c', 'pass')), "
        "g.Step('slow', 1, 60, ('-c', 'import time; time.sleep(60)'))], r, dry_run=False)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(gpu_session.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            if (tmp_path / "r").exists() and "slow" in (tmp_path / "r").read_text():
                break
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = [(line["step"], line["status"]) for line in lines(tmp_path / "r")]
    assert found == [("done", "started"), ("done", "passed"), ("slow", "started")]


@pytest.mark.slow
def test_session_without_a_gpu_is_refused_with_its_requirements(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, gpu_session.__file__, "--output", str(tmp_path / "r")]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert "no CUDA device" in completed.stderr
    assert not (tmp_path / "r").exists()
