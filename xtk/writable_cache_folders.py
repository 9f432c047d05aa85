"""Cache folders of xtk and its libraries; temporary ones if the home folder is not writable."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from xtk.errors import XtkError

# Environment variables of libraries, and their default folders inside the user's cache folder.
USER_CACHE_VARIABLES = {
    "XTK_CACHE": "xtk", "HF_HOME": "huggingface", "TORCH_HOME": "torch", "VLLM_CACHE_ROOT": "vllm",
}  # fmt: skip
HOME_VARIABLES = {"TRITON_CACHE_DIR": ".triton/cache", "VLLM_CONFIG_ROOT": ".config/vllm"}
HF_HOME_VARIABLES = {
    "HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules", "HF_ASSETS_CACHE": "assets", "HF_XET_CACHE": "xet",
}  # fmt: skip
READABLE_HF_VARIABLES = {"HF_HUB_CACHE": "hub", "HF_TOKEN_PATH": "token"}
INDUCTOR_CACHE_VARIABLE = (
    "TORCHINDUCTOR_CACHE_DIR"  # by default in the folder of temporary files, under the user's name
)
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
    before, home = (
        dict(os.environ),
        _cache_path(os.environ.get("XDG_CACHE_HOME"), _home_folder(), ".cache") or "~/.cache",
    )
    changed = _changes()
    if not changed:
        return
    folder: Path | None = None
    for name, wanted in changed.items():
        if isinstance(wanted, Path):
            os.environ[name] = str(wanted)
            continue
        folder = folder or _temporary_folder()
        os.environ[name] = str(folder / wanted)
    named = [name for name, wanted in changed.items() if isinstance(wanted, str) and name != INDUCTOR_CACHE_VARIABLE]
    if not named or quiet or os.environ.get("RANK", "0") != "0":
        return
    failure = next((value for name in named if (value := before.get(name))), None) or home
    sys.stderr.write(
        f"xtk: cannot write to {failure}; using {folder} for caches (set XDG_CACHE_HOME or TMPDIR to change it)\n"
    )
    sys.stderr.flush()


def shared_memory_is_writable() -> bool:
    """Return whether locks and queues between processes can be created; on Linux they are in /dev/shm."""
    return sys.platform != "linux" or _can_write(SHARED_MEMORY / "xtk")


def _home_folder() -> Path | None:
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises without a home
    return home if home.is_absolute() else None


def _changes() -> dict[str, str | Path]:
    """Return the variables to set: a path, or a name inside the temporary folder."""
    caches, changes = _cache_path(os.environ.get("XDG_CACHE_HOME"), _home_folder(), ".cache"), dict[str, str | Path]()
    for base, table in ((caches, USER_CACHE_VARIABLES), (_home_folder(), HOME_VARIABLES)):
        for name, below in table.items():
            if not _can_write(_cache_path(os.environ.get(name), base, below)):
                changes[name] = below
    if not _can_write(caches and caches / "any"):
        changes["XDG_CACHE_HOME"] = "caches"
    numba = os.environ.get("NUMBA_CACHE_DIR")
    if (numba or not _package_cache_is_writable()) and not _can_write(_cache_path(numba, caches, "numba")):
        changes["NUMBA_CACHE_DIR"] = "numba"
    if "HF_HOME" in changes:
        home = _cache_path(os.environ.get("HF_HOME"), caches, USER_CACHE_VARIABLES["HF_HOME"])
        for name, below in READABLE_HF_VARIABLES.items():
            place = _cache_path(os.environ.get(name), home, below)
            if (
                place is not None
                and _is_readable(place)
                and not (below == "hub" and "HUGGINGFACE_HUB_CACHE" in os.environ)
            ):
                changes[name] = place
    for name, below in HF_HOME_VARIABLES.items():
        if os.environ.get(name) and not _can_write(_cache_path(os.environ.get(name), None, "")):
            changes[name] = f"huggingface/{below}"
    if _has_no_user_name() and INDUCTOR_CACHE_VARIABLE not in os.environ:
        changes[INDUCTOR_CACHE_VARIABLE] = "torchinductor"
    return changes


def _cache_path(value: str | None, base: Path | None, below: str) -> Path | None:
    """Return a library's cache folder: the value of its variable, else a folder below `base`; None: unknown."""
    if value:
        path = Path(os.path.expanduser(value))  # noqa: PTH111
        return path if path.parts[:1] != ("~",) else None
    return None if base is None else base / below


def _is_readable(path: Path) -> bool:
    try:
        return os.access(path, os.R_OK) and path.exists()
    except OSError:
        return False


def _has_no_user_name() -> bool:
    """Return whether this user has no name in the system; torch needs one for its default cache."""
    if any(os.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        return False
    import pwd

    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return True
    return False


def _package_cache_is_writable() -> bool:
    """Return whether numba can write next to the modules of xtk, its first choice."""
    folders = {Path(__file__).parent}
    for folder, _, _ in os.walk(Path(__file__).parent):
        if not folder.endswith("__pycache__"):
            folders.add(Path(folder))
    return all(_can_write(folder / "__pycache__" / "any", probe=False) for folder in folders)


def _can_write(path: Path | None, *, probe: bool = True) -> bool:
    """Return whether a folder is writable or can be created.

    Args:
        path: the folder; None: unknown.
        probe: create and remove a folder, since permissions are not reliable on all file systems.
    """
    if path is None:
        return False
    folder = path
    try:
        while not folder.exists():
            if folder.is_symlink() or folder == folder.parent:
                return False
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            return False
        if probe:
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
