"""Cache folders of xtk and its libraries; temporary ones if the home folder is not writable."""

from __future__ import annotations

import getpass
import os
import stat
import sys
from pathlib import Path

from xtk.errors import XtkError

# Environment variables of libraries, and their default folders: in the user's cache folder, and in the home folder.
CACHE_VARIABLES = {"XTK_CACHE": "xtk", "HF_HOME": "huggingface", "TORCH_HOME": "torch", "VLLM_CACHE_ROOT": "vllm"}
HOME_VARIABLES = {
    "XDG_CACHE_HOME": ".cache", "TRITON_CACHE_DIR": ".triton/cache", "VLLM_CONFIG_ROOT": ".config/vllm",
}  # fmt: skip
READABLE_HF_VARIABLES = {"HF_HUB_CACHE": "hub", "HF_TOKEN_PATH": "token"}  # folders in HF_HOME
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", str(SHARED_MEMORY))


def user_cache_folder() -> Path:
    """Return the folder for files that xtk can build again: `XTK_CACHE`, else `~/.cache/xtk`.

    Raises:
        RuntimeError: this user, or the one that `XTK_CACHE` names, has no home folder.
    """
    given = os.environ.get("XTK_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "xtk"


def use_writable_cache_folders(*, quiet: bool) -> None:
    """Set the cache variables of libraries to a temporary folder where their own is not writable.

    Call it before the libraries are imported. The folder is private (mode 700), since numba and others execute code
    from their caches, and the next command uses it again. Read-only Hugging Face caches are still read.
    """
    _set_inductor_cache()
    home = _expanded("~")
    caches = _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    defaults = {name: home / below for name, below in HOME_VARIABLES.items()}
    defaults |= {name: caches / below for name, below in CACHE_VARIABLES.items()}
    places = {name: _expanded(os.environ.get(name) or str(default)) for name, default in defaults.items()}
    if not (refused := {name: place for name, place in places.items() if not _can_write(place)}):
        return
    folder = _temporary_folder()
    for name in refused:
        os.environ[name] = str(folder / {**CACHE_VARIABLES, **HOME_VARIABLES}[name])
    for name, below in READABLE_HF_VARIABLES.items() if "HF_HOME" in refused else ():
        if os.access(refused["HF_HOME"] / below, os.R_OK):
            os.environ.setdefault(name, str(refused["HF_HOME"] / below))
    if not quiet and os.environ.get("RANK", "0") == "0":
        named = next(iter(refused.values()))
        sys.stderr.write(
            f"xtk: cannot write to {named}; using {folder} for caches (set XDG_CACHE_HOME or TMPDIR to change it)\n"
        )
        sys.stderr.flush()


def _set_inductor_cache() -> None:
    """Name the cache of torch's compiler, which by default has the name of the user, if this user has none."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_temporary_folder() / "torchinductor"))


def shared_memory_is_writable() -> bool:
    """Return whether locks and queues between processes can be created; on Linux they are in /dev/shm."""
    return sys.platform != "linux" or _can_write(SHARED_MEMORY / "xtk")


def _expanded(path: str) -> Path:
    """Return a path with the home folder in place of ~; the path as it is, if there is none."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises without a home


def _can_write(path: Path) -> bool:
    """Return whether a folder is writable or can be created; False for one in a home folder that is not known (~)."""
    if path.parts[:1] == ("~",):
        return False
    folder = path
    try:
        while not folder.exists():
            if folder.is_symlink() or folder == folder.parent:
                return False
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            return False
        # Permissions are not reliable on all file systems.
        trial = folder / f".xtk-{os.getpid()}-{os.urandom(4).hex()}"
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def _temporary_folder() -> Path:
    """Return a private temporary folder, the same one for the next command if possible."""
    import tempfile

    name = f"xtk-caches-{os.getuid()}"
    places = [os.environ.get("TMPDIR", ""), *TEMPORARY_FOLDERS]
    for place in filter(None, dict.fromkeys(places)):
        path = Path(place).absolute() / name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError:
            continue
        if _is_private(path) and _can_write(path):
            return path
        try:  # another user created a folder or link with this name
            return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place)).absolute()
        except OSError:
            continue
    raise XtkError(
        "no folder for temporary files is writable",
        where=", ".join(filter(None, places)),
        hint="set TMPDIR=FOLDER in the environment, with a folder that you can write to",
    )


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
