"""Error messages, conversion of operating system errors, and lookup of registered names."""

from __future__ import annotations

import ast
import errno
import re
from pathlib import Path

import pytest
import torch

from xtk.errors import CorruptError, MismatchError, XtkError, from_os_error, path_exists
from xtk.name_registry import load_registered, nearest_name, unknown_name_error

TABLE = {"ordered": "collections:OrderedDict", "counter": "collections:Counter", "forward-kl": "json:dumps"}


def test_error_text_has_message_location_and_hint():
    full = XtkError("this is wrong", where="p.safetensors", hint="xtk build-projection A B -o p.safetensors")
    assert str(full) == ("this is wrong\n  where: p.safetensors\n  try:   xtk build-projection A B -o p.safetensors")
    assert str(XtkError("this is wrong")) == "this is wrong"
    assert str(XtkError("this is wrong", hint="another")) == "this is wrong\n  try:   another"


def test_corrupt_and_mismatch_errors_are_xtk_errors():
    assert issubclass(CorruptError, XtkError)
    assert issubclass(MismatchError, XtkError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "cache/shard"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "cache/shard"), "the disk is full"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "cache/shard"), "no such file or folder"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "cache/shard"), "the file name is too long"),
        (PermissionError(errno.EACCES, "Permission denied", "cache/shard"), "permission denied"),
    ],
)
def test_operating_system_errors_are_converted_with_their_path(error, message):
    converted = from_os_error(error)
    assert converted.what == message
    assert converted.where == "cache/shard"


def test_full_disk_is_recognized_in_errors_of_libraries():
    error = from_os_error(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert error.what == "the disk is full"
    assert error.hint


def test_out_of_memory_of_a_gpu_names_the_options_that_help():
    text = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB"
    error = from_os_error(torch.OutOfMemoryError(text))
    assert error.what == "the GPU has not enough memory"
    assert error.where == "CUDA out of memory. Tried to allocate 20.00 MiB"
    for option in ("--max-batch-tokens", "--gradient-checkpointing", "--parallel fsdp", "--dtype bfloat16"):
        assert option in error.hint


def test_other_errors_are_not_converted():
    assert from_os_error(ValueError("shapes differ")) is None
    assert from_os_error(OSError(errno.EIO, "Input/output error")) is None


def test_path_exists_accepts_any_text(tmp_path):
    assert path_exists(str(tmp_path))
    for text in ("", "x" * 5000, "x/" * 5000, "\0", str(tmp_path / "absent"), "\ud800"):
        assert not path_exists(text)


def test_load_registered_returns_the_object_of_a_name():
    from collections import Counter

    assert load_registered(TABLE, "counter", "thing") is Counter


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("forward_kl", "forward-kl"), ("forwardkl", "forward-kl"), ("orderd", "ordered"), ("xyz", None)],
)
def test_unknown_name_error_suggests_the_nearest_name(name, nearest):
    assert nearest_name(name, TABLE) == nearest
    with pytest.raises(XtkError) as raised:
        load_registered(TABLE, name, "loss")
    suggestion = f"; did you mean {nearest}?" if nearest else ""
    assert raised.value.what == f"no loss called {name!r}{suggestion}"
    assert raised.value.hint == (None if nearest else "use one of: counter, forward-kl, ordered")


def test_unknown_name_error_accepts_an_iterator_of_names():
    assert (
        unknown_name_error("option", "top_k", iter(["top-k", "top-p"])).what
        == "no option called 'top_k'; did you mean top-k?"
    )


def test_launcher_workers_print_the_same_error_once(run, tmp_path):
    (tmp_path / "reported").mkdir()
    command = ["inspect", tmp_path / "nothing"]
    stderr_of_workers = [
        run(*command, code=1, env={"XTK_REPORTED_ERRORS": str(tmp_path / "reported")}).stderr for _ in range(2)
    ]
    assert stderr_of_workers == [run(*command, code=1).stderr, ""]
    assert "nothing" in stderr_of_workers[0]
    other_error = run("inspect", tmp_path / "else", code=1, env={"XTK_REPORTED_ERRORS": str(tmp_path / "reported")})
    assert "else" in other_error.stderr


def test_no_message_suggests_deleting_a_file():
    """A file that a message is about may be intact, and the only copy: users move it away instead."""
    suggestion = re.compile(
        r"\bdelete (it|them)|\b(delete|remove|erase) (this|these|the|its) (\w+ )?(file|folder|shard|cache)s?\b"
    )
    suggesting = []
    for path in sorted((Path(__file__).parent.parent / "xtk").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if "\n" not in text and not text.endswith(".") and suggestion.search(text):
                suggesting.append(f"{path.name}:{node.lineno}: {text}")
    assert suggesting == []
