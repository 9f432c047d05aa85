"""How OpenMP's threads wait for work in `xtk`: OpenMP itself prints the settings that it has read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xtk.__main__ import OPENMP_WAITING

COMMAND_THAT_LOADS_TORCH = """
import sys, xtk.__main__
xtk.__main__.run_command = lambda arguments: __import__("torch") is None
sys.argv = ["xtk", "inspect", "x"]
xtk.__main__.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "1234"}, {"GOMP_SPINCOUNT": "1234"}),
    ],
    ids=["default", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"],
)
def test_threads_wait_for_a_short_time_unless_the_user_chooses(variables, expected):
    env = {name: value for name, value in os.environ.items() if name not in OPENMP_WAITING}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", **variables}
    command = [sys.executable, "-c", COMMAND_THAT_LOADS_TORCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP")
    for name, value in expected.items():
        assert f"{name} = '{value}'" in done.stderr
