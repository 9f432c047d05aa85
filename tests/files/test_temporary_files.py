"""Temporary files of running, ended and killed processes."""

from __future__ import annotations

import os
import subprocess
import sys

from xtk.files.atomic_files import is_stale_temporary_file, temporary_name


def test_temporary_file_of_an_ended_process_is_stale():
    parent, host = os.getppid(), temporary_name("x").partition("@")[2].partition("-")[0]
    with subprocess.Popen([sys.executable, "-c", "from xtk.files.atomic_files import temporary_name as t; "
                           "import sys; print(t('x'), flush=True); sys.stdin.read()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:  # fmt: skip
        name = writer.stdout.readline().strip()
        assert not is_stale_temporary_file(name)
        writer.stdin.close()
    assert is_stale_temporary_file(name)
    assert not is_stale_temporary_file(f".xtk-tmp-{parent}@{host}-0123abcd-x")
    assert is_stale_temporary_file(f".xtk-tmp-{2**22 + 1}@{host}-0123abcd-x")
    assert is_stale_temporary_file(f".xtk-tmp-{os.getpid()}@{host}-0123abcd-x")  # of a process that had this id before
