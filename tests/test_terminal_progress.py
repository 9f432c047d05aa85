"""Progress in a terminal of 80 columns and in a pipe: what it shows, and that no command is silent for long."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pseudo_terminal import frames, run_in_terminal

from xtk import progress, terminal
from xtk.progress import Progress, phase
from xtk.training.training_loop import shown_losses

# A slow first step, then 29 fast ones, with the detail of `distill`.
JOB = """
import time
from xtk.progress import Progress
with Progress("distill", 60, "steps") as job:
    for step in range(30):
        time.sleep(1.2 if step == 0 else 0.05)
        job.advance(1, "loss 5.2231  ce 8.4102  byte-kl 2.7146  190 tokens/s  0.9 GiB  data wait 1.0%")
    time.sleep(0.6)
"""


@pytest.mark.parametrize(("columns", "bar", "last"), [(80, True, "ce"), (160, True, "data wait"), (50, False, "loss")])
def test_terminal_shows_step_total_time_left_and_loss_first(tmp_path, columns, bar, last):
    code, written = run_in_terminal([sys.executable, "-c", JOB], tmp_path, columns=columns)
    lines = frames(written)
    assert code == 0, written
    assert max(map(len, lines)) <= columns
    shown = [line for line in lines if " 30/60 steps " in line]
    # From the last steps, 0.05 s each; the mean since the start would give 3 s.
    assert re.search(r"distill (\S+ )?30/60 steps  [0-2]s left  loss 5\.2231", shown[-1])
    assert ("━" in shown[-1]) == bar
    assert last in shown[-1]
    assert len(shown) >= 2  # it is drawn again while the job does not advance
    early = [line for line in lines if re.search(r" [0-9]/60 steps ", line)]
    assert early
    assert not [line for line in early if "left" in line]  # no estimate before ten steps
    assert not re.search(r"\x1b\[[0-9;]*\b(31|91|38;5;197)m", written)  # red is for errors
    assert re.match(r"distill: 30 steps in \ds", lines[-1])


def test_pipe_gets_a_line_also_when_the_job_stands_still(tmp_path):
    program = "from xtk import progress; progress.SECONDS_BETWEEN_LINES = 0.5\n" + JOB
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"distill: 0/60 steps  [01]s so far", lines[0])
    assert re.match(r"distill: \d+/60 steps  \ds left  loss 5\.2231  ce .*  data wait 1\.0%$", lines[-2])
    assert "\x1b" not in done.stderr
    assert len(lines) <= 10


def test_time_left_follows_the_last_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    job = Progress("distill", 1000, "steps")
    for _ in range(9):
        now[0] += 60
        job.advance(1)
    assert job.line() == "9/1,000 steps  9m00s so far"
    for _ in range(91):
        now[0] += 0.25
        job.advance(1)
    assert job.line() == "100/1,000 steps  3m45s left"  # 900 steps of 0.25 s; the mean since the start gives 1h24m
    now[0] += 25
    assert job.line() == "100/1,000 steps  3m20s left"


def test_command_without_a_job_prints_its_phase(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.3)
    monkeypatch.setattr(terminal._terminal, "last_output", terminal._terminal.last_output - 1e6)  # of the fork server
    with progress.command_phase(["doctor"]):
        progress._printer._stop.wait(0.2)
        assert capsys.readouterr().err == ""
        progress._printer._stop.wait(0.8)
        with phase("loading ./teacher"), terminal.quiet():
            progress._printer._stop.wait(0.8)
        with phase(""):  # a subprocess prints
            printed = capsys.readouterr().err
            progress._printer._stop.wait(0.8)
    assert re.fullmatch(r"(doctor: running, [01]s so far\n)+(loading \./teacher, [01]s so far\n)+", printed)
    assert capsys.readouterr().err == ""
    assert progress._printer._thread is None


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--quiet"]])
def test_quiet_commands_print_no_phase(monkeypatch, capsys, arguments):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.1)
    if arguments == ["doctor"]:
        monkeypatch.setattr(terminal._terminal, "quiet", True)
    with progress.command_phase(arguments):
        progress._printer._stop.wait(0.6)
    assert capsys.readouterr().err == ""


def test_no_value_is_shown_twice():
    step = {"loss": 5.2231, "ce": 8.4102, "byte-kl": 2.7146, "distillation_loss": 2.7146, "teacher_bits_per_byte": 2.2}
    assert shown_losses(step) == "loss 5.2231  ce 8.4102  byte-kl 2.7146"
    assert shown_losses({"loss": 3.5, "ce": 3.5}) == "loss 3.5000"
    weighted = {"loss": 1.0, "byte-kl": 2.0, "distillation_loss": 0.5}
    assert shown_losses(weighted) == "loss 1.0000  byte-kl 2.0000  distillation_loss 0.5000"
