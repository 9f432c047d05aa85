"""What xtk says, and tables of variants."""

from __future__ import annotations

import errno

import pytest

from xtk.errors import CorruptError, MismatchError, XtkError, from_os_error, path_exists
from xtk.name_registry import load_registered, nearest_name, unknown_name_error

TABLE = {"ordered": "collections:OrderedDict", "counter": "collections:Counter", "forward-kl": "json:dumps"}


def test_an_error_says_what_where_and_what_next():
    full = XtkError("this is wrong", where="p.safetensors", hint="xtk build-projection A B -o p.safetensors")
    assert str(full) == ("this is wrong\n  where: p.safetensors\n  try:   xtk build-projection A B -o p.safetensors")
    assert str(XtkError("this is wrong")) == "this is wrong"
    assert str(XtkError("this is wrong", hint="another")) == "this is wrong\n  try:   another"


def test_damage_and_mismatch_are_mistakes_that_a_user_can_mend():
    assert issubclass(CorruptError, XtkError)
    assert issubclass(MismatchError, XtkError)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "cache/shard"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "cache/shard"), "the disk is full"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "cache/shard"), "no such file or folder"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "cache/shard"), "the file name is too long"),
        (PermissionError(errno.EACCES, "Permission denied", "cache/shard"), "permission denied"),
    ],
)
def test_errors_of_the_operating_system_are_told_with_their_path(error, what):
    told = from_os_error(error)
    assert told.what == what
    assert told.where == "cache/shard"


def test_a_full_disk_is_recognised_in_what_libraries_make_of_it():
    told = from_os_error(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert told.what == "the disk is full"
    assert told.hint


def test_other_errors_are_bugs_and_keep_their_traceback():
    assert from_os_error(ValueError("shapes differ")) is None
    assert from_os_error(OSError(errno.EIO, "Input/output error")) is None


def test_any_text_may_be_asked_whether_it_is_a_path(tmp_path):
    assert path_exists(str(tmp_path))
    for text in ("", "x" * 5000, "x/" * 5000, "\0", str(tmp_path / "absent"), "\ud800"):
        assert not path_exists(text)


def test_a_name_stands_for_what_its_table_says():
    from collections import Counter

    assert load_registered(TABLE, "counter", "thing") is Counter


@pytest.mark.parametrize(
    ("name", "near"), [("forward_kl", "forward-kl"), ("forwardkl", "forward-kl"), ("orderd", "ordered"), ("xyz", None)]
)
def test_a_typo_is_answered_with_the_nearest_name(name, near):
    assert nearest_name(name, TABLE) == near
    with pytest.raises(XtkError) as caught:
        load_registered(TABLE, name, "loss")
    question = f"; did you mean {near}?" if near else ""
    assert caught.value.what == f"no loss called {name!r}{question}"
    assert caught.value.hint == "use one of: counter, forward-kl, ordered"


def test_known_names_need_no_table():
    assert (
        unknown_name_error("option", "top_k", iter(["top-k", "top-p"])).what
        == "no option called 'top_k'; did you mean top-k?"
    )


def test_what_a_worker_of_a_launcher_has_told_its_others_do_not_tell(run, tmp_path):
    (tmp_path / "told").mkdir()
    asked = ["inspect", tmp_path / "nothing"]
    workers = [run(*asked, code=1, env={"XTK_REPORTED_ERRORS": str(tmp_path / "told")}).stderr for _ in range(2)]
    assert workers == [run(*asked, code=1).stderr, ""]
    assert "nothing" in workers[0]
    other = run("inspect", tmp_path / "else", code=1, env={"XTK_REPORTED_ERRORS": str(tmp_path / "told")})
    assert "else" in other.stderr
