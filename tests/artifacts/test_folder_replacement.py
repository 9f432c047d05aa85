"""Folders that are replaced whole."""

from __future__ import annotations

import shutil

import pytest

from xtk.artifacts.folder_replacement import replacing_folder


def test_the_old_folder_is_kept_if_the_new_one_cannot_be_renamed(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.txt").write_text("old")
    with pytest.raises(OSError), replacing_folder(output, None) as folder:  # noqa: PT011 (which one: the system's)
        shutil.rmtree(folder)
    assert (output / "old.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
