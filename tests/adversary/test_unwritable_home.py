"""Machines on which nothing but the output can be written: no HOME, a read-only package, a read-only /dev/shm."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import xtk
from xtk import writable_cache_folders
from xtk.errors import XtkError

pytestmark = pytest.mark.slow

NOBODY = 65534
WITHOUT_A_NAME = 54321  # a user whom the system does not know
NOTE = "xtk: cannot write to "


def start(script: str, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with mounts of its own, as root of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "sh", "-e", "-c", script, "sh", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of the package, without compiled kernels, that every user may read."""
    if shutil.which("unshare") is None or start("mount -t tmpfs tmpfs /mnt").returncode != 0:
        pytest.skip("this machine allows no mounts")
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(xtk.__file__).parent, folder / "xtk", ignore=ignored)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    return folder


@pytest.fixture
def place(tmp_path, pair) -> Path:
    """A folder that every user may write, with the pair of models."""
    for name in ("student", "teacher"):
        shutil.copytree(getattr(pair, name), tmp_path / name)
        for path in (tmp_path / name).iterdir():
            path.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "corpus.jsonl").write_text('{"text": "One and two make three."}\n' * 8)
    (tmp_path / "corpus.jsonl").chmod(0o644)
    return tmp_path


READ_ONLY = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; mount -t tmpfs -o ro,size=4k tmpfs /dev/shm; '
AS_USER = "setpriv --reuid={user} --regid={user} --clear-groups "


def run_as(user: int | None, package: Path, place: Path, *arguments: str, home: str = "/proc/nonexistent", **env: str):
    """Run a command as a user, with the package and /dev/shm read-only; None: root, of the machine or of its own."""
    other = AS_USER.format(user=user) if user is not None and os.geteuid() == 0 else ""
    script = READ_ONLY + f'cd "$2"; shift 2; exec {other}"$@"'
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package), "HOME": home, "TMPDIR": str(place / "tmp"),
                   "HF_HUB_OFFLINE": "1", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "1", **env}  # fmt: skip
    return start(script, package, place, sys.executable, "-P", "-m", "xtk", *arguments, **environment)


@pytest.mark.parametrize("user", [None, NOBODY, WITHOUT_A_NAME])
def test_a_command_runs_where_home_and_package_cannot_be_written(package, place, user):
    command = ("align", "student", "teacher", "One and two make three.")
    done = run_as(user, package, place, *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOTE) == 1
    assert "Traceback" not in done.stderr
    assert "three" in done.stdout
    (folder,) = (place / "tmp").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list((folder / "numba").rglob("*.nbi"))
    assert sorted(path.name for path in place.iterdir()) == ["corpus.jsonl", "student", "teacher", "tmp"]
    quiet = run_as(user, package, place, *command, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, done.stdout, "")
    assert list((place / "tmp").iterdir()) == [folder]


@pytest.mark.long  # a user without a cache of compiled functions compiles them all: a minute
def test_a_run_with_loader_processes_needs_no_shared_memory(package, place):
    assert run_as(NOBODY, package, place, "cache-teacher", "teacher", "corpus.jsonl", "-o", "cache").returncode == 0
    done = run_as(NOBODY, package, place, "distill", "student", "cache", "--max-steps", "2",
                  "--per-device-train-batch-size", "2", "--dataloader-num-workers", "2", "-o", "out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "/dev/shm is not writable" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_folder_at_all_is_an_error_in_one_sentence(alone, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc/none")
    monkeypatch.setattr(writable_cache_folders, "TEMPORARY_FOLDERS", ("/proc", "/proc/nonexistent"))
    with pytest.raises(XtkError, match="no folder for temporary files is writable") as refused:
        writable_cache_folders.use_writable_cache_folders(quiet=False)
    assert refused.value.where == "/proc/none, /proc, /proc/nonexistent"


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No variable of the caches, and a HOME and a TMPDIR of the test."""
    for name in (*writable_cache_folders.USER_CACHE_VARIABLES, *writable_cache_folders.HOME_VARIABLES,
        *writable_cache_folders.HF_HOME_VARIABLES, *writable_cache_folders.READABLE_HF_VARIABLES, "NUMBA_CACHE_DIR",
                 "XDG_CACHE_HOME", writable_cache_folders.INDUCTOR_CACHE_VARIABLE, "RANK",
                     "HUGGINGFACE_HUB_CACHE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def test_a_home_that_can_be_written_changes_nothing(alone, monkeypatch, capsys):
    (alone / "home").mkdir()
    monkeypatch.setenv("HOME", str(alone / "home"))
    monkeypatch.setenv("USER", "somebody")
    before = dict(os.environ)
    writable_cache_folders.use_writable_cache_folders(quiet=False)
    assert dict(os.environ) == before
    assert list((alone / "home").iterdir()) == list((alone / "tmp").iterdir()) == []
    assert capsys.readouterr().err == ""


def test_models_in_a_folder_that_can_only_be_read_are_read(alone, monkeypatch):
    shared = alone / "shared"
    (shared / "hub").mkdir(parents=True)
    (shared / "token").write_text("key")
    monkeypatch.setenv("HF_HOME", str(shared))
    monkeypatch.setattr(writable_cache_folders, "_can_write", lambda path,
        probe=True: path is not None and shared not in path.parents
                        and path != shared and "/proc" not in str(path))  # fmt: skip
    writable_cache_folders.use_writable_cache_folders(quiet=True)
    assert os.environ["HF_HUB_CACHE"] == str(shared / "hub")
    assert os.environ["HF_TOKEN_PATH"] == str(shared / "token")
    assert os.environ["HF_HOME"].startswith(str(alone / "tmp"))


@pytest.mark.parametrize("kind", ["a link", "open to others", "a file"])
def test_a_folder_that_others_could_have_made_is_not_used(alone, kind):
    known, other = alone / "tmp" / f"xtk-caches-{os.getuid()}", alone / "other"
    other.mkdir(mode=0o700)
    if kind == "a link":
        known.symlink_to(other)
    elif kind == "a file":
        known.write_text("")
    else:
        known.mkdir()
        known.chmod(0o777)
    writable_cache_folders.use_writable_cache_folders(quiet=True)
    chosen = Path(os.environ["XTK_CACHE"]).parent
    assert chosen != known
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
    assert list(other.iterdir()) == []


def test_the_choice_is_fast(alone):
    started = time.monotonic()
    writable_cache_folders.use_writable_cache_folders(quiet=True)
    assert time.monotonic() - started < 0.1
