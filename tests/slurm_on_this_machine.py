"""Imitations of `sbatch`, `srun` and `scontrol` that run jobs at once on this machine, as a Slurm cluster for tests.

Like Slurm, `sbatch` runs a copy of the script, reads `#SBATCH` lines up to the first command, starts the tasks of an
array together, and starts a job again after `scontrol requeue`. A job with a dependency starts after earlier jobs.
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

# On a real cluster, an unknown option ends the job.
SBATCH_OPTIONS = {"array", "cpus-per-task", "dependency", "gpus-per-node", "gpus-per-task", "job-name", "nodes",
                  "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition", "requeue",
                  "time"}  # fmt: skip
SRUN_OPTIONS = {"kill-on-bad-exit"}
MAX_STARTS = 20


def install(folder: Path) -> dict[str, str]:
    """Write the three programs into a folder; return the environment variables that put them first on the PATH."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "SLURM_HERE": str(folder)}


def read_jobs(env: dict[str, str]) -> list[dict[str, object]]:
    """Return the finished jobs in the order of their ends: job, array task, start, exit code, dependency, log."""
    return [json.loads(line) for line in Path(env["SLURM_HERE"], "jobs.jsonl").read_text().splitlines()]


def split_options(arguments: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return the leading options as {option: value}, and the remaining arguments, which begin with the command."""
    options = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        if name not in known:
            sys.exit(f"unrecognized option '--{name}'")
        options[name] = value
    return options, arguments


def script_options(script: Path) -> dict[str, str]:
    options = {}
    for line in script.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options |= split_options(line.split()[1:], SBATCH_OPTIONS)[0]
    return options


def next_job(state: Path) -> int:
    number = 4200 + len(list(state.glob("job-*")))
    (state / f"job-{number}").mkdir()
    return number


def sbatch(state: Path, arguments: list[str]) -> int:
    command_line_options, (script, *script_arguments) = split_options(arguments, SBATCH_OPTIONS)
    options = script_options(Path(script)) | command_line_options
    dependency = options.get("dependency", "")
    if dependency and not all((state / f"job-{number}").is_dir() for number in re.findall(r"\d+", dependency)):
        sys.exit("Job dependency problem")
    job = next_job(state)
    script_copy = state / f"job-{job}" / "slurm_script"
    shutil.copy(script, script_copy)
    first, last = map(int, options["array"].split("-")) if "array" in options else (0, 0)
    tasks = [Task(state, job, task_number if "array" in options else None, options,
                  [str(script_copy), *script_arguments]) for task_number in range(first, last + 1)]  # fmt: skip
    while sum(task.poll() for task in tasks):
        time.sleep(0.001)
    print(job if "parsable" in options else f"Submitted batch job {job}")
    return 0


class Task:
    """A job, or one task of an array."""

    def __init__(
        self, state: Path, job: int, array_index: int | None, options: dict[str, str], command: list[str]
    ) -> None:
        self.state, self.job, self.array_index, self.options, self.command = state, job, array_index, options, command
        self.job_id = job + (array_index or 0) * 1000  # SLURM_JOB_ID differs between the tasks of an array
        self.starts = 0
        log_name = options["output"].replace("%x", options["job-name"]).replace("%j", str(job))
        self.log = Path(log_name.replace("%A", str(job)).replace("%a", str(array_index)))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        nodes = self.options.get("nodes", "1")
        env = {
            "SLURM_JOB_ID": str(self.job_id), "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"here[1-{nodes}]",
            "SLURM_RESTART_COUNT": str(self.starts),
        }  # fmt: skip
        if self.array_index is not None:
            env |= {"SLURM_ARRAY_JOB_ID": str(self.job), "SLURM_ARRAY_TASK_ID": str(self.array_index)}
        self.starts += 1
        with self.log.open("ab") as log:
            return subprocess.Popen(["bash", *self.command], env={**os.environ, **env}, stdout=log, stderr=log,
                                    stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def poll(self) -> bool:
        """Poll the process of the task, start it again if it was requeued, and return whether it is running."""
        code = self.process.poll()
        if code is None:
            # SLURM_HERE_LOSES is TASK=FILE: the task is killed, as by the loss of its machine, as soon as FILE exists.
            task, _, loss_file = os.environ.get("SLURM_HERE_LOSES", "").partition("=")
            if task == str(self.array_index) and Path(loss_file).exists():
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            return True
        if self.starts < 0:
            return False
        with (self.state / "jobs.jsonl").open("a") as job_log:
            dependency = self.options.get("dependency", "")
            job_log.write(json.dumps({"job": self.job, "task": self.array_index, "start": self.starts, "code": code,
                                      "dependency": dependency, "log": str(self.log)}) + "\n")  # fmt: skip
        requeue_file = self.state / f"requeue-{self.job_id}"
        if requeue_file.exists() and self.starts < MAX_STARTS:
            requeue_file.unlink()
            self.process = self.start()
            return True
        self.starts = -1
        return False


def srun(arguments: list[str]) -> int:
    options, command = split_options(arguments, SRUN_OPTIONS)
    nodes = [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)})
        for node in range(int(os.environ["SLURM_NNODES"]))
    ]
    # SLURM_HERE_PREEMPTS is a file: when it exists, the first start gets SIGTERM, and the job is requeued.
    preempt_file = (
        Path(os.environ.get("SLURM_HERE_PREEMPTS", "")) if os.environ["SLURM_RESTART_COUNT"] == "0" else Path()
    )
    while any(node.poll() is None for node in nodes):
        if preempt_file.is_file():
            scontrol(Path(os.environ["SLURM_HERE"]), ["requeue", os.environ["SLURM_JOB_ID"]])
            for node in nodes:
                node.terminate()
            preempt_file = Path()
        if options.get("kill-on-bad-exit") == "1" and any(node.poll() for node in nodes):
            for node in nodes:
                node.terminate()
        time.sleep(0.05)
    return max((node.returncode if node.returncode >= 0 else 128 - node.returncode) for node in nodes)


def scontrol(state: Path, arguments: list[str]) -> int:
    match arguments:
        case ["show", "hostnames", nodes]:
            print("127.0.0.1\n" * int(nodes.rpartition("-")[2].rstrip("]")), end="")
        case ["requeue", job]:
            (state / f"requeue-{job}").touch()
        case _:
            sys.exit(f"invalid keyword: {arguments}")
    return 0


if __name__ == "__main__":
    state, name, arguments = Path(os.environ.get("SLURM_HERE", "")), sys.argv[1], sys.argv[2:]
    sys.exit(srun(arguments) if name == "srun" else {"sbatch": sbatch, "scontrol": scontrol}[name](state, arguments))
