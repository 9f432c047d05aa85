"""No byte of the user disappears: random trees of files, every command that writes, with and without --force, kills."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_inputs
import xtk_processes

FOLDER_COMMANDS = ("cache-teacher", "merge", "distill", "export", "transplant", "sweep", "quickstart")
FILE_COMMANDS = ("build-projection", "counts", "prune-projection", "rollout", "evaluate", "report", "align", "inspect",
                 "export-cache")  # fmt: skip
WITHOUT_FORCE_OPTION = ("quickstart", "evaluate")
STATES = ("foreign", "finished", "other", "unfinished", "link")
FINISHED_FILES = ("manifest.json", "xtk.json")
# Names of the user in the output folder: ordinary ones, and ones that xtk gives to its own files. All others that begin
# with `.xtk-` are xtk's (docs/explanation/reliability.md).
NAMES_INSIDE = ("notes.txt", ".git/config", "config.json", "README.md", "tokenizer.json", "model.safetensors",
                "xtk.json", "manifest.json", "shard-00000.arrow", "shard-00009.arrow",
                "vocabulary-order-0123456789abcdef.arrow",
                "checkpoint-9/x", "checkpoint-1/mine", "checkpoint-2/note.txt", "best-1/config.json", "best-2/x",
                "adapter/README.md", "trainer/rank-00000-of-00001.safetensors", "trackers/mine.txt", "rollouts.jsonl",
                "rollout_batches/000000/note", "modeling_mine.py", "seed=0/x", "train.jsonl", "a/b/c",
                "out")  # fmt: skip
NAMES_BESIDE = ("notes.txt", "out.replaced-1", "out.replaced-3/x", "out.kept-1", "out.1", "out.log", "seed=0.log",
                "out.jsonl.replaced-1", "checkpoint-1/x")  # fmt: skip


@pytest.fixture(scope="module")
def inputs(pair, corpus, tmp_path_factory) -> Path:
    """Return a folder with a finished run and prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    small_inputs.write_jsonl(folder / "prompts.jsonl", small_inputs.sentences(2, seed=5))
    (folder / "problems.jsonl").write_text('{"text": "Anna has", "answer": "4"}\n')
    xtk_processes.run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 2, "--save-steps", 1,
                          "-o", folder / "run")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def commands(pair, corpus, cache, projection, metaspace, inputs) -> dict[str, list[object]]:
    """Return the arguments of each command that writes, without the output."""
    student, teacher, short = pair.student, pair.teacher, ["--max-completion-length", 4]
    return {
        "cache-teacher": ["cache-teacher", teacher, corpus, "--top-k", 4, "--shard-tokens", 400],
        "merge": ["cache", "merge", cache, "--rows", "3:30"],
        "distill": ["distill", student, corpus, "--loss", "ce", "--max-steps", 3, "--save-steps", 1,
                    "--save-total-limit", 1, "--lora-r", 2],
        "export": ["export", inputs / "run", "--dtype", "bfloat16"],
        "transplant": ["transplant", student, teacher],
        "sweep": ["sweep", student, corpus, "--loss", "ce", "--max-steps", 1, "--vary", "seed=0"],
        "quickstart": ["quickstart"],
        "build-projection": ["build-projection", student, teacher],
        "counts": ["build-projection", student, teacher, "--method", "cooccurrence", "--corpus", corpus],
        "prune-projection": ["prune-projection", projection, "--top-k", 2],
        "rollout": ["rollout", student, inputs / "prompts.jsonl", *short],
        "evaluate": ["evaluate-answers", student, inputs / "problems.jsonl", "--reward", "gsm8k", *short],
        "report": ["report", inputs / "run"],
        "align": ["align", student, teacher, "text"],
        "inspect": ["inspect", cache],
        "export-cache": ["cache", "export", cache],
    }  # fmt: skip


def with_output(command: str, arguments: list[object], path: Path) -> list[object]:
    return [*arguments, "--html" if command in ("align", "inspect") else "-o", path]


def output_name(command: str) -> str:
    return "out.jsonl" if command in ("rollout", "evaluate", "export-cache") else "out"


OTHER = {"cache-teacher": ["--top-k", 2], "merge": ["--rows", "1:9"], "distill": ["--seed", 9], "transplant":
         ["--method", "random"], "export": ["--max-shard-size", "60KB"], "rollout": ["--seed", 9],
         "prune-projection": ["--top-k", 1], "build-projection": ["--method", "exact"]}  # fmt: skip


@pytest.fixture(scope="module")
def own_output(commands, tmp_path_factory):
    """Return a function: the finished output of a command, of its request or of another one; None if there is none."""
    made: dict[tuple[str, bool], Path] = {}

    def make(command: str, *, is_other: bool) -> Path | None:
        if command == "quickstart" or (is_other and command not in OTHER):
            return None
        if (command, is_other) not in made:
            path = tmp_path_factory.mktemp("own") / output_name(command)
            xtk_processes.run_xtk(*with_output(command, commands[command], path), *(OTHER[command] if is_other else ()))
            made[command, is_other] = path
        return made[command, is_other]

    return make


def add_user_entries(folder: Path, names: tuple[str, ...], rng: random.Random, salt: str) -> None:
    """Write files, symbolic links and hard links of the user; names that exist already are left out."""
    written: list[Path] = []
    for number, name in enumerate(rng.sample(names, rng.randint(1, 6))):
        path = folder / name
        if os.path.lexists(path) or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = rng.choice(("file", "file", "link", "hard link" if written else "file"))
        if kind == "link":
            path.symlink_to(rng.choice(("nowhere", "/etc/hostname", "notes.txt", "..")))
        elif kind == "hard link":
            path.hardlink_to(rng.choice(written))
        else:
            path.write_text(f"user {salt} {number} {rng.random()}")
            written.append(path)


def user_entries(root: Path, *, with_own: bool = False) -> Counter[str]:
    """Return all links, and all files of `add_user_entries`; with `with_own`, xtk's files too."""
    return Counter(_user_entries(root, with_own=with_own))


def _user_entries(root: Path, *, with_own: bool) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in [*folders, *files]):
            if path.is_symlink():
                yield f"link to {path.readlink()}"
            elif path.is_file() and (with_own or path.read_bytes()[:5] == b"user "):
                yield path.read_bytes().decode("latin-1")


def make_tree(root: Path, command: str, state: str, own_output, rng: random.Random) -> Path:
    """Write an output of a state and files of the user; return the path of the output."""
    output = root / output_name(command)
    is_folder = command in FOLDER_COMMANDS
    own = None if state == "foreign" else own_output(command, is_other=state == "other")
    root.mkdir()
    place = output
    if state == "link":
        (root / "disk").mkdir()
        place = root / "disk" / "target"
        output.symlink_to(place)
    if own is not None:
        (shutil.copytree if own.is_dir() else shutil.copyfile)(own, place)
        if state == "unfinished" and is_folder:
            for name in FINISHED_FILES:
                (place / name).unlink(missing_ok=True)
    elif is_folder:
        place.mkdir()
    else:
        place.write_text(f"user {rng.random()}")
    if is_folder:
        add_user_entries(place, NAMES_INSIDE, rng, "inside")
    add_user_entries(root, NAMES_BESIDE, rng, "beside")
    return output


def check(command: str, commands, own_output, root: Path, seed: int, *, force: bool) -> None:
    """Run a command on a random tree; the user's files are there afterwards, with --force also the old output."""
    rng = random.Random(f"{command} {seed}")
    state = rng.choice(STATES) if seed else "foreign"
    output = make_tree(root, command, state, own_output, rng)
    if command == "quickstart" and not user_entries(output):
        return  # the whole pipeline would run
    with_own = force and command != "sweep"  # a finished run of a sweep stays, and its log grows
    before = user_entries(root, with_own=with_own)
    assert before
    arguments = [*with_output(command, commands[command], output), *(["--force"] if force else [])]
    result = xtk_processes.run_xtk(*arguments, code=None, cwd=root)
    assert "Traceback" not in result.stderr
    lost = before - user_entries(root, with_own=with_own)
    assert not lost, f"{state}: {[content[:80] for content in lost]}\n{result.stderr}"


CASES = [
    (command, force)
    for command in (*FOLDER_COMMANDS, *FILE_COMMANDS)
    for force in ((False,) if command in WITHOUT_FORCE_OPTION else (False, True))
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "force"), CASES)
def test_files_of_the_user_survive_each_command(commands, own_output, tmp_path, command, force):
    for seed in range(2):
        check(command, commands, own_output, tmp_path / str(seed), seed, force=force)


@pytest.mark.long
@pytest.mark.parametrize(("command", "force"), CASES)
def test_files_of_the_user_survive_each_command_on_many_trees(commands, own_output, tmp_path, command, force):
    for seed in range(2, 12):
        check(command, commands, own_output, tmp_path / str(seed), seed, force=force)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cache-teacher", "distill", "export", "sweep", "build-projection"])
def test_files_of_the_user_survive_kills(commands, own_output, tmp_path, command):
    """Killed up to three times at random moments, then run to its end: with --force, and without."""
    rng = random.Random(command)
    for number in range(3):
        root = tmp_path / str(number)
        output = make_tree(root, command, rng.choice(STATES), own_output, rng)
        before, force = user_entries(root), ["--force"] if number < 2 else []
        arguments = [str(word) for word in [*with_output(command, commands[command], output), *force]]
        streams = [str(tmp_path / f"{name}-{number}") for name in ("in", "out", "err")]
        for stream in streams:
            Path(stream).write_text("")
        for _ in range(rng.randint(1, 3)):
            process = xtk_processes.fork_context.Process(
                target=xtk_processes.run_in_fork,
                args=(arguments, streams, str(root), {**os.environ, "OMP_NUM_THREADS": "1"}),
            )
            process.start()
            deadline = time.monotonic() + rng.uniform(0, 3)
            while process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.002)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            assert not before - user_entries(root)
        xtk_processes.run_xtk(*arguments, code=None, cwd=root)
        assert not before - user_entries(root)
