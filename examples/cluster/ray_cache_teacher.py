"""Fill a teacher cache with Ray: one task for each part, repeated where a worker or a machine was lost.

All arguments that are not listed below are those of `xtk cache-teacher`:

    python ray_cache_teacher.py --parts 8 TEACHER DATA... --top-k 64 -o /shared/cache
    python ray_cache_teacher.py --parts 8 TEACHER '/shared/corpus-{part}.jsonl' --top-k 64 -o /shared/cache

All parts write shards of one cache, in a folder that all machines share or at a URL such as s3://BUCKET/cache. With
{part} in an argument, each part has separate data and a separate cache (OUTPUT-parts/0, 1, ...), and they are merged.
The path of the finished cache is printed. To continue after an error, run the same command again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from xtk.subprocesses import die_with_parent

OWN_OPTIONS = ("--num-machines", "--machine-rank", "--force", "--estimate", "--config")
EXIT_USAGE = 2


class CommandFailed(Exception):
    """A command ended with an error that a later attempt may not meet."""


def run_xtk(arguments: list[str], folder: str) -> str:
    """Run `xtk` and return what it prints; its messages appear in the log of the Ray worker.

    Raises:
        CommandFailed: with the exit code.
        ValueError: the arguments are invalid, which no attempt can change.
    """
    done = subprocess.run(
        [sys.executable, "-m", "xtk", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=folder, check=False,
        # Not every version of Ray ends the processes of a lost worker. One that lives on would hold the lock of its
        # part, and the next attempt would be refused.
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )  # fmt: skip
    if done.returncode:
        message = f"exit code {done.returncode}: xtk {' '.join(arguments)}"
        raise ValueError(message) if done.returncode == EXIT_USAGE else CommandFailed(message)
    return done.stdout


def commands(arguments: list[str], output: str, parts: int) -> tuple[list[list[str]], list[str]]:
    """Return the command of each part, and the one that finishes the cache.

    Args:
        arguments: of cache-teacher, without the output.
        output: path or URL of the finished cache.
        parts: number of parts.
    """
    if any("{part}" in argument for argument in arguments):
        caches = [f"{output}-parts/{part}" for part in range(parts)]
        scored = [
            ["cache-teacher", *(argument.replace("{part}", str(part)) for argument in arguments), "-o", cache]
            for part, cache in enumerate(caches)
        ]
        return scored, ["cache", "merge", *caches, "-o", output]
    whole = ["cache-teacher", *arguments, "-o", output]
    return [[*whole, "--num-machines", str(parts), "--machine-rank", str(part)] for part in range(parts)], whole


def wait_for(tasks: dict[ray.ObjectRef, int]) -> list[int]:
    """Wait for all parts and return the numbers of those that failed."""
    failed = []
    waiting = list(tasks)
    while waiting:
        (ended,), waiting = ray.wait(waiting)
        try:
            ray.get(ended)
            sys.stderr.write(f"ray_cache_teacher: part {tasks[ended]} of {len(tasks)} is finished\n")
        except RayError as failure:
            failed.append(tasks[ended])
            sys.stderr.write(f"ray_cache_teacher: part {tasks[ended]} failed: {failure}\n")
    return failed


def main() -> int:
    """Read the options, fill the cache, print its path; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("-o", "--output", required=True, help="folder or URL of the cache, the same on all machines")
    parser.add_argument("--parts", type=int, required=True, help="number of tasks, such as the number of GPUs times 4")
    parser.add_argument("--gpus-per-part", type=float, help="default: 1 if the Ray cluster has GPUs")
    parser.add_argument("--cpus-per-part", type=float, default=1)
    parser.add_argument("--retries", type=int, default=3, help="further attempts of a part that failed")
    parser.add_argument("--address", help="of the Ray cluster; default: RAY_ADDRESS, else this machine alone")
    options, arguments = parser.parse_known_args()
    if options.parts < 1:
        parser.error(f"--parts is {options.parts}, but must be at least 1")
    for argument in arguments:
        if argument.split("=")[0] in OWN_OPTIONS:
            parser.error(f"remove {argument}: a part that is repeated would not be the same part")

    with contextlib.redirect_stdout(sys.stderr):  # Ray prints messages of its processes; stdout is for the path
        printed = run_parts(options, arguments)
        ray.shutdown()
    sys.stdout.write(printed)
    return 0 if printed else 1


def run_parts(options: argparse.Namespace, arguments: list[str]) -> str:
    """Run all parts and finish the cache; return what the last command prints, "" if a part failed."""
    ray.init(address=options.address)
    gpus = options.gpus_per_part
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
    # Ray repeats a task whose worker was lost; with retry_exceptions, also one whose command failed.
    task = ray.remote(run_xtk).options(num_gpus=gpus, num_cpus=options.cpus_per_part, max_retries=options.retries,
                                       retry_exceptions=[CommandFailed])  # fmt: skip
    scored, finish = commands(arguments, options.output, options.parts)
    tasks = {task.remote(command, str(Path.cwd())): part for part, command in enumerate(scored)}
    if failed := wait_for(tasks):
        sys.stderr.write(
            f"ray_cache_teacher: {len(failed)} of {options.parts} parts failed; finished shards are kept\n"
            "  try:   see the messages above, then run the same command again\n"
        )
        return ""
    # One cache: finished by its last part, unless the file system shows new files late. Several: merged here.
    return ray.get(task.remote(finish, str(Path.cwd())))


if __name__ == "__main__":
    sys.exit(main())
