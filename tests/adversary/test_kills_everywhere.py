"""Every command that writes, killed at random moments: no half artifact, and the same command ends as undisturbed."""

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
class Writing:
    """A command that writes, without its output.

    Attributes:
        arguments: of `xtk`.
        flag: the option that takes the output.
        name: of the output, below a folder of the test.
        is_whole: says of an output under its final name whether a reader may use it; None: it always may.
    """

    arguments: list[object]
    flag: str = "-o"
    name: str = "out"
    is_whole: Callable[[Path], bool] | None = None


def has(file: str) -> Callable[[Path], bool]:
    return lambda output: (output / file).is_file()


@pytest.fixture(scope="module")
def inputs(pair, corpus, cache, projection, tmp_path_factory) -> Path:
    """What the commands read: a second cache, prompts, a finished run."""
    folder = tmp_path_factory.mktemp("inputs")
    small_inputs.write_jsonl(folder / "more.jsonl", small_inputs.sentences(30, seed=4))
    command = ["cache-teacher", pair.teacher, folder / "more.jsonl", "--top-k", 16, "--shard-tokens", 400]
    xtk_processes.run_xtk(*command, "-o", folder / "more")
    prompts = [{"prompt": text.split(".")[0] + "."} for text in small_inputs.sentences(24, seed=5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    xtk_processes.run_xtk("distill", pair.student, corpus, "--loss", "ce", *TRAINING, "-o", folder / "run")
    return folder


@pytest.fixture(scope="module")
def commands(pair, corpus, cache, projection, inputs) -> dict[str, Writing]:
    text, shards = inputs / "more.jsonl", ["--shard-tokens", 300]
    run, prompts = inputs / "run", inputs / "prompts.jsonl"
    manifest, done = has("manifest.json"), has("xtk.json")
    student, teacher = pair.student, pair.teacher
    sampling = ["--max-completion-length", 12, "--num-generations", 2]
    return {
        "build-projection": Writing(["build-projection", student, teacher]),
        "counts": Writing(["build-projection", student, teacher, "--method", "cooccurrence", "--corpus", text]),
        "prune-projection": Writing(["prune-projection", projection, "--top-k", 2]),
        "cache-teacher": Writing(["cache-teacher", teacher, corpus, *shards], is_whole=manifest),
        "raw": Writing(
            ["cache-teacher", teacher, corpus, "--precision", "float32", "--top-k", 8, *shards], is_whole=manifest
        ),
        "merge": Writing(["cache-teacher", "--merge", cache, inputs / "more", "--rows", "3:60"], is_whole=manifest),
        "rollout": Writing(["rollout", student, prompts, *sampling], name="out.jsonl"),
        "distill": Writing(
            ["distill", student, cache, "--projection", projection, *TRAINING], is_whole=done
        ),
        "on-policy": Writing(
            ["distill", student, prompts, "--on-policy", "--teacher", teacher, *sampling, *TRAINING], is_whole=done
        ),
        "export": Writing(["export", run, "--max-shard-size", "60KB"], is_whole=done),
        "report": Writing(["report", run], name="out.html"),
        "align": Writing(["align", student, teacher, text, "--html"], name="out.html"),
        "inspect": Writing(["inspect", cache], flag="--html", name="out.html"),
        "sweep": Writing(
            ["sweep", student, text, "--loss", "ce", "--max-steps", 2, "--vary", "seed=0 1"], is_whole=lambda _: True
        ),
    }  # fmt: skip


def start(command: list[object], folder: Path):
    """Start `xtk` as a fork of a process that has imported everything; its streams are files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = [str(folder / f"std{name}") for name in ("in", "out", "err")]
    for path in streams:
        Path(path).write_text("")
    arguments = [str(word) for word in command]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = xtk_processes._forks.Process(
        target=xtk_processes._child, args=(arguments, streams, str(folder), surroundings)
    )
    process.start()
    return process


def contents(output: Path) -> dict[str, object]:
    """What stays the same however often a command was killed: all files, without clocks."""
    paths = [output] if output.is_file() else sorted(path for path in output.rglob("*") if path.is_file())
    return {str(path.relative_to(output.parent)): timeless(path) for path in paths}


def timeless(path: Path) -> object:
    if path.name == "metrics.jsonl":
        return [
            {key: value for key, value in line.items() if not key.endswith("_seconds")}
            for line in interrupted_runs.told(path.parent)
        ]
    # They hold clocks, or checksums of what does.
    if path.suffix in (".log", ".md") or path.name in ("xtk.json", "state.json", "manifest.json", "trainer.json"):
        return None if path.parent.name != "cache" else path.read_bytes()
    return path.read_bytes()


def wait_for_an_instant(process, folder: Path, seconds: float, draw: random.Random) -> None:
    """Wait for a while, or for one of the next changes of the files that are written: there a kill does most harm."""
    until = time.monotonic() + draw.uniform(0, seconds)
    if draw.random() < 0.5:
        while time.monotonic() < until and process.is_alive():
            time.sleep(0.002)
        return
    changes, seen = draw.randint(1, 25), None
    until = time.monotonic() + seconds
    while changes and time.monotonic() < until and process.is_alive():
        now = frozenset(walk(folder))
        changes -= now != seen
        seen = now


def walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, files in os.walk(folder):
        found += [Path(root, name) for name in [*folders, *files] if not name.startswith("std")]
    return found


def undisturbed(writing: Writing, folder: Path) -> tuple[dict[str, object], float]:
    started = time.monotonic()
    process = start([*writing.arguments, writing.flag, folder / writing.name], folder)
    process.join(300)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    return contents(folder / writing.name), time.monotonic() - started


def kill_and_finish(writing: Writing, folder: Path, seconds: float, expected: dict[str, object], draw) -> bool:
    """Kill a command, up to three times, then let it end; say whether it was killed before its end."""
    output = folder / writing.name
    command = [*writing.arguments, writing.flag, output]
    killed = False
    for _ in range(draw.randint(1, 3)):
        process = start(command, folder)
        wait_for_an_instant(process, folder, seconds, draw)
        how = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        if process.is_alive():
            os.kill(process.pid, how)
        process.join(60)
        stderr = (folder / "stderr").read_text()
        assert "Traceback" not in stderr, stderr
        killed |= process.exitcode != 0
        if output.is_file() or (output.is_dir() and writing.is_whole is not None and writing.is_whole(output)
                                and writing.arguments[0] != "sweep"):  # fmt: skip
            found = contents(output)
            # What has its final name is whole; of a cache shards that a later file is written with may still be linked.
            assert {name: expected[name] for name in found if ".xtk-" not in name} == {
                name: content for name, content in found.items() if ".xtk-" not in name
            }
    process = start(command, folder)
    process.join(300)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    assert contents(output) == expected
    left = [str(path) for path in walk(folder) if ".xtk-" in path.name]
    assert not left, left
    return killed


def kill_everywhere(commands: dict[str, Writing], folder: Path, kills: int) -> dict[str, int]:
    draw = random.Random(SEED)
    print(f"instants are drawn from seed {SEED}")
    names = list(commands)
    whole = {name: undisturbed(commands[name], folder / f"whole-{name}") for name in names}
    counted = dict.fromkeys(names, 0)
    number = 0
    while sum(counted.values()) < kills:
        name = names[number % len(names)]
        expected, seconds = whole[name]
        counted[name] += kill_and_finish(commands[name], folder / f"{number}-{name}", seconds, expected, draw)
        number += 1
        assert number < 10 * kills, counted
    return counted


@pytest.mark.long
def test_a_hundred_kills_over_all_commands_that_write(commands, tmp_path):
    print(kill_everywhere(commands, tmp_path, KILLS))


@pytest.mark.slow
def test_each_command_that_writes_is_killed_once(commands, tmp_path):
    print(kill_everywhere(commands, tmp_path, 8))
