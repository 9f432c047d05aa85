"""Machines where only the output folder is writable: no HOME, a read-only package, a read-only /dev/shm."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import xtk
from xtk import writable_cache_folders
from xtk.errors import XtkError

pytestmark = pytest.mark.slow

NOBODY = 65534  # the id of the Unix user nobody
UNKNOWN_UID = 54321  # a user id without an account
NOTE = "xtk: cannot write to "


def run_in_namespace(script: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as root in a separate mount namespace."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "sh", "-e", "-c", script, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Return a copy of the package, without compiled kernels, that every user may read."""
    if shutil.which("unshare") is None or run_in_namespace("mount -t tmpfs tmpfs /mnt").returncode != 0:
        pytest.skip("this machine allows no mounts")
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(xtk.__file__).parent, folder / "xtk", ignore=ignored)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    return folder


@pytest.fixture
def work_folder(tmp_path, pair) -> Path:
    """Return a folder that every user may write, with the pair of models."""
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


READ_ONLY_MOUNTS = (
    'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; mount -t tmpfs -o ro,size=4k tmpfs /dev/shm; '
)
SET_USER = "setpriv --reuid={user} --regid={user} --clear-groups "


def run_as(
    user: int | None, package: Path, work_folder: Path, *arguments: str, home: str = "/proc/nonexistent", **env: str
):
    """Run a command as a user, with the package and /dev/shm read-only; None: root, of the machine or a namespace."""
    set_user = SET_USER.format(user=user) if user is not None and os.geteuid() == 0 else ""
    script = READ_ONLY_MOUNTS + f'cd "$2"; shift 2; exec {set_user}"$@"'
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package), "HOME": home,
                   "TMPDIR": str(work_folder / "tmp"),
                   "HF_HUB_OFFLINE": "1", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "1", **env}  # fmt: skip
    return run_in_namespace(script, package, work_folder, sys.executable, "-P", "-m", "xtk", *arguments, **environment)


@pytest.mark.parametrize("user", [None, NOBODY, UNKNOWN_UID])
def test_command_runs_without_a_writable_home_and_package(package, work_folder, user):
    command = ("align", "student", "teacher", "One and two make three.")
    result = run_as(user, package, work_folder, *command)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(NOTE) == 1
    assert "Traceback" not in result.stderr
    assert "three" in result.stdout
    (folder,) = (work_folder / "tmp").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list((folder / "numba").rglob("*.nbi"))
    assert sorted(path.name for path in work_folder.iterdir()) == ["corpus.jsonl", "student", "teacher", "tmp"]
    quiet = run_as(user, package, work_folder, *command, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, result.stdout, "")
    assert list((work_folder / "tmp").iterdir()) == [folder]


def test_libraries_get_folders_and_a_read_only_hub_cache_is_still_read(tmp_path):
    home, caches = tmp_path / "home", tmp_path / "home" / ".cache"
    (caches / "huggingface" / "hub").mkdir(parents=True)
    names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "VLLM_CONFIG_ROOT", "HF_HUB_CACHE")
    code = (
        "import os; from xtk import writable_cache_folders as folders\n"
        "own = folders._can_write; folders._can_write = lambda path: 'home' not in path.parts and own(path)\n"
        f"folders.use_writable_cache_folders(quiet=True); print([os.environ.get(name) for name in {names}])"
    )

    def places(**env: str) -> list[str | None]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(xtk.__file__).parent.parent),
                       "HOME": str(home), "TMPDIR": str(tmp_path), **env}  # fmt: skip
        command = [sys.executable, "-c", code]
        return ast.literal_eval(
            subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
        )

    temporary = f"{tmp_path}/xtk-caches-{os.getuid()}"
    assert places() == [temporary, f"{temporary}/triton", f"{temporary}/vllm", f"{caches}/huggingface/hub"]
    (tmp_path / "caches").mkdir()
    given = f"{tmp_path}/caches"
    assert places(XDG_CACHE_HOME=given) == [given, f"{given}/triton", f"{given}/vllm", None]


@pytest.mark.long  # without a cache of compiled functions, compiling them takes a minute
def test_run_with_dataloader_workers_needs_no_shared_memory(package, work_folder):
    assert (
        run_as(NOBODY, package, work_folder, "cache-teacher", "teacher", "corpus.jsonl", "-o", "cache").returncode == 0
    )
    result = run_as(NOBODY, package, work_folder, "distill", "student", "cache", "--max-steps", "2",
                    "--per-device-train-batch-size", "2", "--dataloader-num-workers", "2", "-o", "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "/dev/shm is not writable" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_writable_temporary_folder_is_an_error(isolated_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(XtkError, match="no folder for temporary files is writable"):
        writable_cache_folders.use_writable_cache_folders(quiet=False)


@pytest.fixture
def isolated_folder(monkeypatch, tmp_path):
    """Yield a folder that contains TMPDIR; HOME does not exist, and no cache variables are set."""
    names = ("XTK_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "VLLM_CONFIG_ROOT", "NUMBA_CACHE_DIR")
    for name in (*names, "TORCHINDUCTOR_CACHE_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def test_writable_home_changes_nothing(isolated_folder, monkeypatch, capsys):
    (isolated_folder / "home").mkdir()
    monkeypatch.setenv("HOME", str(isolated_folder / "home"))
    monkeypatch.setenv("USER", "somebody")
    before = dict(os.environ)
    writable_cache_folders.use_writable_cache_folders(quiet=False)
    assert dict(os.environ) == before
    assert [path.name for path in (isolated_folder / "home").iterdir()] == [".cache"]
    assert list((isolated_folder / "tmp").iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["a link", "open to others", "a file"])
def test_folder_that_other_users_could_have_created_is_not_used(isolated_folder, kind):
    default_folder, other = isolated_folder / "tmp" / f"xtk-caches-{os.getuid()}", isolated_folder / "other"
    other.mkdir(mode=0o700)
    if kind == "a link":
        default_folder.symlink_to(other)
    elif kind == "a file":
        default_folder.write_text("")
    else:
        default_folder.mkdir()
        default_folder.chmod(0o777)
    with pytest.raises(XtkError, match=r"can be changed by other users|File exists"):
        writable_cache_folders.use_writable_cache_folders(quiet=True)
    assert list(other.iterdir()) == []


def test_choice_of_cache_folders_is_fast(isolated_folder):
    started = time.monotonic()
    writable_cache_folders.use_writable_cache_folders(quiet=True)
    assert time.monotonic() - started < 0.1
