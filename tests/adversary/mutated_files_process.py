"""Script that runs xtk's commands on mutated files and records which paths are opened; prints a JSON line per case."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from forged_artifacts import projection_parts, with_checksum, write_projection
from json_mutations import NAMES, mutate, mutate_text, to_json

OPENED_PATHS: list[str] = []
ENABLED = [False]


def record_path(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the paths that are opened or changed; an audit hook."""
    if ENABLED[0] and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "shutil.rmtree"):
        paths = arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]
        OPENED_PATHS.extend(os.fsdecode(path) for path in paths if isinstance(path, str | bytes))


def digest(folder: Path) -> dict[str, str]:
    """Return a checksum of each regular file under a folder, and `other` for all other entries."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        regular = path.is_file() and not path.is_symlink()
        checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest() if regular else "other"
    return checksums


def run_command(arguments: list[str]) -> tuple[int | str, str]:
    """Run one command in this process; return its exit code, or "traceback", and its stderr."""
    from xtk import cli, terminal

    out, err = io.StringIO(), io.StringIO()
    terminal._terminal.results = out
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: int | str = cli.run_command(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            return "traceback", err.getvalue() + traceback.format_exc()
    if code != 0 and ("Traceback" in err.getvalue() or not err.getvalue().strip()):
        return "traceback", err.getvalue()
    return code, err.getvalue()


def paths_outside(work: Path, opened: list[str]) -> list[str]:
    """Return the opened paths outside of the artifact and its output, except files of Python and the system."""
    allowed = (str(work / "artifact"), str(work / "out"), str(work / "page.html"), str(work / "corpus.jsonl"),
               str(work / ".xtk-tmp-"), *ALLOWED_PATHS)  # fmt: skip
    found = []
    for name in opened:
        path = os.path.normpath(os.path.join(os.getcwd(), name))  # noqa: PTH118, PTH109
        if not path.startswith(allowed) and path != str(work) and Path(path).suffix not in (".py", ".pyc", ".so"):
            found.append(path)
    return found


ALLOWED_PATHS: tuple[str, ...] = ()


def main() -> None:
    """Run the cases; arguments: the folder of pristine artifacts, the first seed, the number of seeds."""
    global ALLOWED_PATHS
    pristine, first_seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    student = pristine / "student"
    ALLOWED_PATHS = (str(student), sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix, os.environ["XTK_CACHE"],
                     "/proc/",
                     "/dev/null", "/usr/", "/sys/", str(Path(__file__).parents[2] / "xtk"), "/dev/urandom",
                     "/etc/ld", "/etc/mime", "/dev/shm/", "/tmp/torchinductor", "/etc/localtime")  # fmt: skip
    import xtk.projection.coverage_audit  # noqa: F401 (imports are not files that commands read)

    sys.addaudithook(record_path)
    temporary = Path(tempfile.mkdtemp())
    names = [*NAMES, str(temporary / "work" / "secret.txt")]
    manifest = json.loads((pristine / "cache" / "manifest.json").read_text())
    header, data, safetensors_header = projection_parts(pristine / "projection")
    for seed in range(first_seed, first_seed + count):
        work = temporary / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        (work / "secret.txt").write_text("the user's own\n")
        (work / ".profile").write_text("export PATH\n")
        artifact, out = work / "artifact", work / "out"
        kind = ("cache", "projection", "recipe", "xtk.json", "config.json", "text")[seed % 6]
        commands: list[list[Any]]
        if kind == "projection":
            if seed % 12 == 1:
                write_projection(artifact, mutate(header, seed, names), data, safetensors_header)
            else:
                write_projection(artifact, header, data, mutate(copy.deepcopy(safetensors_header), seed, names) or {})
            commands = [["inspect", artifact], ["prune-projection", artifact, "--top-k", 1, "-o", out]]
        elif kind == "cache" or (kind == "text" and seed % 12 == 5):
            shutil.copytree(pristine / "cache", artifact)
            forged = with_checksum(mutate(manifest, seed, names))
            if kind == "text":
                forged = mutate_text((pristine / "cache" / "manifest.json").read_text(), seed)
            (artifact / "manifest.json").write_bytes(forged)
            (artifact / "link.txt").symlink_to(work / "secret.txt")
            os.mkfifo(artifact / "fifo")
            commands = [["inspect", artifact], ["inspect", artifact, "--verify"],
                        ["cache", "merge", artifact, "-o", out],
                        ["distill", student, artifact, "--max-steps", 1, "-o", out]]  # fmt: skip
        else:
            shutil.copytree(pristine / "run", artifact)
            name = {"recipe": "recipe.json", "text": ("recipe.json", "xtk.json")[seed // 6 % 2]}.get(kind, kind)
            text = (pristine / "run" / name).read_text()
            content = (
                mutate_text(text, seed) if kind == "text" else to_json(mutate(json.loads(text), seed, names)).encode()
            )
            (artifact / name).write_bytes(content)
            commands = [["inspect", artifact], ["inspect", artifact, "--verify"],
                        ["report", artifact, "-o", work / "page.html"]]  # fmt: skip
            if kind == "config.json":
                for other in ("recipe.json", "xtk.json"):
                    (artifact / other).unlink()
                commands = [["inspect", artifact], ["build-projection", student, artifact, "-o", out]]
        for arguments in commands:
            if arguments[0] == "distill" and seed % 4:
                continue
            shutil.rmtree(out, ignore_errors=True)
            before = digest(work)
            OPENED_PATHS.clear()
            ENABLED[0] = True
            code, printed = run_command([str(one) for one in arguments])
            ENABLED[0] = False
            after = digest(work)
            changed = [one for one in {*before, *after} if before.get(one) != after.get(one)
                       and not one.startswith(("out", "page.html"))]  # fmt: skip
            record = {"seed": seed, "kind": kind, "command": arguments[0], "code": code, "changed": changed,
                      "opened": paths_outside(work, OPENED_PATHS), "secret": "the user's own" in printed,
                      "printed": printed[-1500:] if code == "traceback" else printed[-200:]}  # fmt: skip
            sys.__stdout__.write(json.dumps(record) + "\n")
            sys.__stdout__.flush()
    shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
