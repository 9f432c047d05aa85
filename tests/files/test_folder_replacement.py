"""Atomic replacement of output folders."""

from __future__ import annotations

import shutil

import pytest

from xtk.files.folder_replacement import replacing_folder
from xtk.files.output_claims import FolderKind


def test_the_old_folder_is_kept_if_the_new_one_cannot_be_renamed(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.txt").write_text("old")
    new = []
    kind = FolderKind("a folder", refuse_foreign=lambda folder: shutil.rmtree(new[0]))  # called before the renames
    with pytest.raises(FileNotFoundError), replacing_folder(output, kind) as folder:
        new.append(folder)
    assert (output / "old.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
