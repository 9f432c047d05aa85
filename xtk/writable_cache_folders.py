"""Cache folders of xtk and its libraries; temporary ones if the home folder is not writable."""

from __future__ import annotations

import getpass
import os
import stat
import sys
import tempfile
from pathlib import Path

from xtk.errors import XtkError

SHARED_MEMORY = Path("/dev/shm")


def user_cache_folder() -> Path:
    """Return the folder for files that xtk can build again: `XTK_CACHE`, else `xtk` in `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        RuntimeError: this user, or the one that a variable names, has no home folder.
    """
    given = os.environ.get("XTK_CACHE")
    return Path(given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "xtk")).expanduser()  # noqa: PTH118


def use_writable_cache_folders(*, quiet: bool) -> None:
    """Set XDG_CACHE_HOME, in which libraries keep their caches, to a temporary folder if it is not writable.

    Call it before the libraries are imported. The folder is private (mode 700), since numba and others execute code
    from their caches, and the next command uses it again. A read-only cache of Hugging Face is still read.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a user without a name, of which torch's compiler makes the name of its cache
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_temporary_folder() / "torchinductor"))
    caches = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))  # noqa: PTH111 - never raises
    is_writable = _can_write(caches)
    folder = caches if is_writable else _temporary_folder()
    if not _can_write(Path(os.path.expanduser("~"))):  # noqa: PTH111 - where these two have folders
        for name in ("TRITON_CACHE_DIR", "VLLM_CONFIG_ROOT"):
            os.environ.setdefault(name, str(folder / name.partition("_")[0].lower()))
    if is_writable:
        return
    for name, below in (("HF_HUB_CACHE", "hub"), ("HF_TOKEN_PATH", "token")):
        if "HF_HOME" not in os.environ and os.access(caches / "huggingface" / below, os.R_OK):
            os.environ.setdefault(name, str(caches / "huggingface" / below))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if not quiet and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"xtk: cannot write to {caches}; using {folder} for caches (set XDG_CACHE_HOME or TMPDIR to change it)\n"
        )
        sys.stderr.flush()


def shared_memory_is_writable() -> bool:
    """Return whether locks and queues between processes can be created; on Linux they are in /dev/shm."""
    return sys.platform != "linux" or os.access(SHARED_MEMORY, os.W_OK | os.X_OK)


def _can_write(path: Path) -> bool:
    """Return whether a folder is writable, after creating it; False for one in a home folder that is not known (~)."""
    try:
        if path.parts[:1] != ("~",):
            path.mkdir(parents=True, exist_ok=True)
            return os.access(path, os.W_OK | os.X_OK)
    except OSError:
        pass
    return False


def _temporary_folder() -> Path:
    """Return a private temporary folder, the same one for the next command."""
    try:
        path = Path(tempfile.gettempdir()) / f"xtk-caches-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as failure:
        raise XtkError(
            f"no folder for temporary files is writable: {failure}",
            hint="set TMPDIR=FOLDER in the environment, with a folder that you can write to",
        ) from None
    if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077):
        raise XtkError(
            "this folder for caches can be changed by other users",
            where=str(path),
            hint="set XDG_CACHE_HOME=FOLDER in the environment, with a folder that only you can write to",
        )
    return path
