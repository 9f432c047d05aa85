"""Temporary files: whose they are."""

from __future__ import annotations

import os
import subprocess
import sys

from xtk.artifacts.atomic_files import is_stale_temporary_file, temporary_name


def test_a_process_with_the_number_of_a_killed_writer_is_another_one(tmp_path):
    """Numbers of processes are given again; the time at which a process started tells them apart."""
    parent, host = os.getppid(), temporary_name("x").partition("@")[2].partition("-")[0]
    with subprocess.Popen([sys.executable, "-c", "from xtk.artifacts.atomic_files import temporary_name as t; "
                           "import sys; print(t('x'), flush=True); sys.stdin.read()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:  # fmt: skip
        name = writer.stdout.readline().strip()
        assert not is_stale_temporary_file(name)
        started = name.partition(".xtk-tmp-")[2].partition("@")[0].partition(".")[2]
        assert is_stale_temporary_file(name.replace(f"{writer.pid}.{started}@", f"{parent}.{started}@"))
        writer.stdin.close()
    assert is_stale_temporary_file(name)
    assert not is_stale_temporary_file(f".xtk-tmp-{parent}@{host}-0123abcd-x")  # of an earlier version
    assert is_stale_temporary_file(f".xtk-tmp-{2**22 + 1}@{host}-0123abcd-x")
