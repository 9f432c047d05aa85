"""Commands killed at random moments leave no partial artifact, and running them again gives the same output."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import interrupted_runs
import pytest
import small_inputs
import xtk_processes

SEED = 18
KILLS = 100
TRAINING = ["--max-steps", 6, "--save-steps", 2, "--logging-steps", 1, "--per-device-train-batch-size", 4]


@dataclass(frozen=True)
class Command:
    """A command that writes an output, without the output path.

    Attributes:
        arguments: arguments of `xtk`.
        flag: option for the output path.
        name: name of the output in a folder of the test.
        is_complete: returns whether a reader may use an output with the final name; None: always.
    """

    arguments: list[object]
    flag: str = "-o"
    name: str = "out"
    is_complete: Callable[[Path], bool] | None = None


def has_file(file: str) -> Callable[[Path], bool]:
    return lambda output: (output / file).is_file()


@pytest.fixture(scope="module")
def inputs(pair, corpus, cache, projection, tmp_path_factory) -> Path:
    """Return a folder with inputs of the commands: a second cache, prompts, a finished run."""
    folder = tmp_path_factory.mktemp("inputs")
    small_inputs.write_jsonl(folder / "more.jsonl", small_inputs.sentences(30, seed=4))
    command = ["cache-teacher", pair.teacher, folder / "more.jsonl", "--top-k", 16, "--shard-tokens", 400]
    xtk_processes.run_xtk(*command, "-o", folder / "more")
    prompts = [{"prompt": text.split(".")[0] + "."} for text in small_inputs.sentences(24, seed=5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    xtk_processes.run_xtk("distill", pair.student, corpus, "--loss", "ce", *TRAINING, "-o", folder / "run")
    return folder


@pytest.fixture(scope="module")
def commands(pair, corpus, cache, projection, inputs) -> dict[str, Command]:
    text, shards = inputs / "more.jsonl", ["--shard-tokens", 300]
    run, prompts = inputs / "run", inputs / "prompts.jsonl"
    has_manifest, is_finished = has_file("manifest.json"), has_file("xtk.json")
    student, teacher = pair.student, pair.teacher
    sampling = ["--max-completion-length", 12, "--num-generations", 2]
    return {
        "build-projection": Command(["build-projection", student, teacher]),
        "counts": Command(["build-projection", student, teacher, "--method", "cooccurrence", "--corpus", text]),
        "prune-projection": Command(["prune-projection", projection, "--top-k", 2]),
        "cache-teacher": Command(["cache-teacher", teacher, corpus, *shards], is_complete=has_manifest),
        "raw": Command(
            ["cache-teacher", teacher, corpus, "--precision", "float32", "--top-k", 8, *shards],
            is_complete=has_manifest
        ),
        "merge": Command(
            ["cache", "merge", cache, inputs / "more", "--rows", "3:60"], is_complete=has_manifest
        ),
        "rollout": Command(["rollout", student, prompts, *sampling], name="out.jsonl"),
        "distill": Command(
            ["distill", student, cache, "--projection", projection, *TRAINING], is_complete=is_finished
        ),
        "on-policy": Command(
            ["distill-on-policy", student, prompts, "--teacher", teacher, *sampling, *TRAINING],
            is_complete=is_finished
        ),
        "export": Command(["export", run, "--max-shard-size", "60KB"], is_complete=is_finished),
        "report": Command(["report", run], name="out.html"),
        "align": Command(["align", student, teacher, text], flag="--html", name="out.html"),
        "inspect": Command(["inspect", cache], flag="--html", name="out.html"),
        "sweep": Command(
            ["sweep", student, text, "--loss", "ce", "--max-steps", 2, "--vary", "seed=0 1"], is_complete=lambda _: True
        ),
    }  # fmt: skip


def start(command: list[object], folder: Path):
    """Start `xtk` as a fork of a process that has imported everything; its streams are files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = [str(folder / f"std{name}") for name in ("in", "out", "err")]
    for path in streams:
        Path(path).write_text("")
    arguments = [str(word) for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = xtk_processes.fork_context.Process(
        target=xtk_processes.run_in_fork, args=(arguments, streams, str(folder), environment)
    )
    process.start()
    return process


def contents(output: Path) -> dict[str, object]:
    """Return what does not depend on the number of kills: the contents of all files, without times."""
    paths = [output] if output.is_file() else sorted(path for path in output.rglob("*") if path.is_file())
    return {str(path.relative_to(output.parent)): content_without_times(path) for path in paths}


def content_without_times(path: Path) -> object:
    if path.name == "metrics.jsonl":
        return [
            {key: value for key, value in line.items() if not key.endswith("_seconds")}
            for line in interrupted_runs.deterministic_metrics(path.parent)
        ]
    # These files contain times, or checksums of files with times.
    if path.suffix in (".log", ".md") or path.name in ("xtk.json", "state.json", "manifest.json", "trainer.json"):
        return None if path.parent.name != "cache" else path.read_bytes()
    return path.read_bytes()


def wait_for_a_random_moment(process, folder: Path, seconds: float, rng: random.Random) -> None:
    """Wait for a random time, or for one of the next changes of the output files, where a kill does most harm."""
    deadline = time.monotonic() + rng.uniform(0, seconds)
    if rng.random() < 0.5:
        while time.monotonic() < deadline and process.is_alive():
            time.sleep(0.002)
        return
    changes, seen = rng.randint(1, 25), None
    deadline = time.monotonic() + seconds
    while changes and time.monotonic() < deadline and process.is_alive():
        paths = frozenset(walk(folder))
        changes -= paths != seen
        seen = paths


def walk(folder: Path) -> list[Path]:
    paths = []
    for root, folders, files in os.walk(folder):
        paths += [Path(root, name) for name in [*folders, *files] if not name.startswith("std")]
    return paths


def run_undisturbed(command: Command, folder: Path) -> tuple[dict[str, object], float]:
    started = time.monotonic()
    process = start([*command.arguments, command.flag, folder / command.name], folder)
    process.join(300)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    return contents(folder / command.name), time.monotonic() - started


def kill_and_finish(command: Command, folder: Path, seconds: float, expected: dict[str, object], rng) -> bool:
    """Kill a command up to three times, then let it finish; return whether it was killed before its end."""
    output = folder / command.name
    arguments = [*command.arguments, command.flag, output]
    killed = False
    for _ in range(rng.randint(1, 3)):
        process = start(arguments, folder)
        wait_for_a_random_moment(process, folder, seconds, rng)
        signal_number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        if process.is_alive():
            os.kill(process.pid, signal_number)
        process.join(60)
        stderr = (folder / "stderr").read_text()
        assert "Traceback" not in stderr, stderr
        killed |= process.exitcode != 0
        if output.is_file() or (output.is_dir() and command.is_complete is not None and command.is_complete(output)
                                and command.arguments[0] != "sweep"):  # fmt: skip
            found = contents(output)
            # Files with final names are complete; links to cache shards, used to write a later file, may still exist.
            assert {name: expected[name] for name in found if ".xtk-" not in name} == {
                name: content for name, content in found.items() if ".xtk-" not in name
            }
    process = start(arguments, folder)
    process.join(300)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    assert contents(output) == expected
    leftovers = [str(path) for path in walk(folder) if ".xtk-" in path.name]
    assert not leftovers, leftovers
    return killed


def kill_repeatedly(commands: dict[str, Command], folder: Path, kills: int) -> dict[str, int]:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    names = list(commands)
    undisturbed_outputs = {name: run_undisturbed(commands[name], folder / f"whole-{name}") for name in names}
    kill_counts = dict.fromkeys(names, 0)
    attempt = 0
    while sum(kill_counts.values()) < kills:
        name = names[attempt % len(names)]
        expected, seconds = undisturbed_outputs[name]
        kill_counts[name] += kill_and_finish(commands[name], folder / f"{attempt}-{name}", seconds, expected, rng)
        attempt += 1
        assert attempt < 10 * kills, kill_counts
    return kill_counts


@pytest.mark.long
def test_writing_commands_recover_from_a_hundred_kills(commands, tmp_path):
    print(kill_repeatedly(commands, tmp_path, KILLS))


@pytest.mark.slow
def test_writing_commands_recover_from_a_few_kills(commands, tmp_path):
    print(kill_repeatedly(commands, tmp_path, 4))
