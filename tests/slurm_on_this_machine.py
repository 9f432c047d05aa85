"""`sbatch`, `srun` and `scontrol` that run what they are given, here and at once: a cluster of one machine for tests.

As Slurm does, `sbatch` runs a copy of the script, reads `#SBATCH` lines up to the first command, starts the tasks of an
array together, and starts a job again that `scontrol requeue` names. A job with a dependency starts after those before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# A name that sbatch does not know would end a job in a real cluster.
OF_SBATCH = {"array", "cpus-per-task", "dependency", "gpus-per-node", "gpus-per-task", "job-name", "nodes", "ntasks",
             "ntasks-per-node", "open-mode", "output", "parsable", "partition", "requeue", "time"}  # fmt: skip
OF_SRUN = {"kill-on-bad-exit"}
MOST_STARTS = 20


def install(folder: Path) -> dict[str, str]:
    """Write the three programs into a folder; return the variables with which a test finds them."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "SLURM_HERE": str(folder)}


def jobs(env: dict[str, str]) -> list[dict[str, object]]:
    """Return what ran, in the order of ends: job, task of an array, start, exit code, dependency, log."""
    return [json.loads(line) for line in Path(env["SLURM_HERE"], "jobs.jsonl").read_text().splitlines()]


def split(arguments: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return {option: value} and the rest, which begins with the command."""
    options = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        if name not in known:
            sys.exit(f"unrecognized option '--{name}'")
        options[name] = value
    return options, arguments


def options_in(script: Path) -> dict[str, str]:
    found = {}
    for line in script.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found |= split(line.split()[1:], OF_SBATCH)[0]
    return found


def next_job(state: Path) -> int:
    number = 4200 + len(list(state.glob("job-*")))
    (state / f"job-{number}").mkdir()
    return number


def sbatch(state: Path, arguments: list[str]) -> int:
    given, (script, *words) = split(arguments, OF_SBATCH)
    options = options_in(Path(script)) | given
    dependency = options.get("dependency", "")
    if dependency and not all((state / f"job-{number}").is_dir() for number in re.findall(r"\d+", dependency)):
        sys.exit("Job dependency problem")
    job = next_job(state)
    copy = state / f"job-{job}" / "slurm_script"
    shutil.copy(script, copy)
    first, last = map(int, options["array"].split("-")) if "array" in options else (0, 0)
    tasks = [Task(state, job, at if "array" in options else None, options, [str(copy), *words])
             for at in range(first, last + 1)]  # fmt: skip
    while sum(task.goes_on() for task in tasks):
        time.sleep(0.001)
    print(job if "parsable" in options else f"Submitted batch job {job}")
    return 0


class Task:
    """A job, or one task of an array."""

    def __init__(self, state: Path, job: int, at: int | None, options: dict[str, str], command: list[str]) -> None:
        self.state, self.job, self.at, self.options, self.command = state, job, at, options, command
        self.number = job + (at or 0) * 1000  # SLURM_JOB_ID differs between the tasks of an array
        self.starts = 0
        name = options["output"].replace("%x", options["job-name"]).replace("%j", str(job))
        self.log = Path(name.replace("%A", str(job)).replace("%a", str(at)))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        nodes = self.options.get("nodes", "1")
        env = {
            "SLURM_JOB_ID": str(self.number), "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"here[1-{nodes}]",
            "SLURM_RESTART_COUNT": str(self.starts),
        }  # fmt: skip
        if self.at is not None:
            env |= {"SLURM_ARRAY_JOB_ID": str(self.job), "SLURM_ARRAY_TASK_ID": str(self.at)}
        self.starts += 1
        with self.log.open("ab") as log:
            return subprocess.Popen(["bash", *self.command], env={**os.environ, **env}, stdout=log, stderr=log,
                                    stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def goes_on(self) -> bool:
        """Look after the task; return whether it runs."""
        code = self.process.poll()
        if code is None:
            # SLURM_HERE_LOSES is TASK=FILE: the machine of this task is lost as soon as this file is there.
            task, _, file = os.environ.get("SLURM_HERE_LOSES", "").partition("=")
            if task == str(self.at) and Path(file).exists():
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            return True
        if self.starts < 0:
            return False
        with (self.state / "jobs.jsonl").open("a") as told:
            dependency = self.options.get("dependency", "")
            told.write(json.dumps({"job": self.job, "task": self.at, "start": self.starts, "code": code,
                                   "dependency": dependency, "log": str(self.log)}) + "\n")  # fmt: skip
        wish = self.state / f"requeue-{self.number}"
        if wish.exists() and self.starts < MOST_STARTS:
            wish.unlink()
            self.process = self.start()
            return True
        self.starts = -1
        return False


def srun(arguments: list[str]) -> int:
    options, command = split(arguments, OF_SRUN)
    nodes = [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)})
        for node in range(int(os.environ["SLURM_NNODES"]))
    ]
    # SLURM_HERE_PREEMPTS is a file: when it is there, the first start gets SIGTERM, and the job is queued again.
    preempts = Path(os.environ.get("SLURM_HERE_PREEMPTS", "")) if os.environ["SLURM_RESTART_COUNT"] == "0" else Path()
    while any(node.poll() is None for node in nodes):
        if preempts.is_file():
            scontrol(Path(os.environ["SLURM_HERE"]), ["requeue", os.environ["SLURM_JOB_ID"]])
            for node in nodes:
                node.terminate()
            preempts = Path()
        if options.get("kill-on-bad-exit") == "1" and any(node.poll() for node in nodes):
            for node in nodes:
                node.terminate()
        time.sleep(0.05)
    return max((node.returncode if node.returncode >= 0 else 128 - node.returncode) for node in nodes)


def scontrol(state: Path, arguments: list[str]) -> int:
    match arguments:
        case ["show", "hostnames", nodes]:
            print("127.0.0.1\n" * int(nodes.rpartition("-")[2].rstrip("]")), end="")
        case ["requeue", number]:
            (state / f"requeue-{number}").touch()
        case _:
            sys.exit(f"invalid keyword: {arguments}")
    return 0


if __name__ == "__main__":
    place, name, words = Path(os.environ.get("SLURM_HERE", "")), sys.argv[1], sys.argv[2:]
    sys.exit(srun(words) if name == "srun" else {"sbatch": sbatch, "scontrol": scontrol}[name](place, words))
