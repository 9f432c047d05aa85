"""Memory of the libraries that `distill` and `cache-teacher` import, measured in a subprocess."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

from xtk import __version__
from xtk.errors import XtkError
from xtk.files.atomic_files import atomic_write, canonical_json, sha256
from xtk.writable_cache_folders import user_cache_folder

IMPORT_CODE = (
    "import accelerate, numba, pyarrow, xtk.training.distill, xtk.training.training_loop, "
    "xtk.training.held_out_evaluation; "
    "from xtk.doctor.library_memory import resident"
)


@functools.lru_cache
def library_bytes(model: str, more: str) -> int:
    """Return the resident bytes of a process that has imported the libraries of both commands and a model class.

    A subprocess measures it, which takes seconds; the number is stored in the user's cache folder until the installed
    packages change.
    """
    named = [f"from transformers import {model}"] if model else []
    named += [f"import {more}"] if more else []
    code = "; ".join([IMPORT_CODE, *named, "print(resident())"])
    path = None
    # No home folder, an unreadable package folder, or an environment variable that is not UTF-8.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = (
            user_cache_folder()
            / "libraries"
            / sha256(canonical_json([code, *_import_environment()])).removeprefix("sha256:")
        )
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="ascii"))
    found = _resident_memory_after(code)
    if path is not None:
        with contextlib.suppress(OSError, XtkError), atomic_write(path) as temporary:
            temporary.write_text(f"{found}\n", encoding="ascii")
    return found


def _import_environment() -> tuple[str, list[str], dict[str, str]]:
    """Return what the memory of imports depends on: Python, machine, packages, and linker and heap variables."""
    packages = {found.name for place in filter(None, sys.path) for found in Path(place).glob("*.dist-info")}
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("GLIBC_", "LD_", "MALLOC_", "OMP_"))
    }
    machine = f"{platform.node()} {platform.machine()} {os.sysconf('SC_PAGE_SIZE')}"  # the cache folder may be shared
    return f"{sys.version} {__version__} {machine}", sorted(packages), variables


def _resident_memory_after(code: str) -> int:
    """Return the number that a subprocess with this code prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        last = (done.stderr.strip() or f"the process ended with {how}").splitlines()[-1]
        raise XtkError("cannot import the libraries of a run", where=last, hint="reinstall xtk with its dependencies")
    return int(done.stdout.split()[-1])


def resident() -> int:
    """Return the resident memory of this process in bytes.

    ru_maxrss does not work: in a child process it starts at the parent's peak.
    """
    path = Path("/proc/self/statm")
    if path.is_file():
        return int(path.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
