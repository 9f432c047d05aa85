"""Bits per byte of students that learn from each objective: several model pairs, one cache each, equal steps.

    python tests/benchmarks/bench_objectives.py FOLDER [--settings quickstart ...] [--seeds 3] [--lines "ce+alm" ...]

| setting | teacher | student | text |
| --- | --- | --- | --- |
| quickstart | trained here, one digit per token | up to three digits per token | documentation |
| reversed | trained here, up to three digits per token | one digit per token | documentation |
| real | SmolLM2-135M-Instruct, one digit per token | up to three digits per token | documentation |
| real-digits | SmolLM2-135M-Instruct | one digit per token | documentation |
| code | trained here, merges spaces | one token per space of an indentation | Python functions |
| code-reversed | trained here, one token per space | merges spaces | Python functions |

Every student trains with `xtk distill` on 15 % of the documents, from the teacher's default cache. Two further rows
are upper limits: `ce` on all documents, and `forward-kl` for a student with the teacher's tokenizer (once for
each teacher: not in `real-digits`). With `--peer`,
TRL's GOLD trainer takes the same steps, with an online teacher (`trl_gold_trainer.py`).
Results are stored in FOLDER/results.jsonl with their times; a second run continues. `--jobs` processes run at a time,
with one thread each. `--supports` compares caches instead of objectives.
The on-policy setting is `examples/arithmetic.py`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement import half_interval, report
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import xtk_processes
from installed_smollm2 import find_smollm2

from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import resolve_model_folder
from xtk.quickstart.demo_pipeline import (
    SHARED_TRAINING_OPTIONS,
    STUDENT_FRACTION,
    STUDENT_TRAINING_OPTIONS,
    TEACHER_SEED,
    TEACHER_TRAINING_OPTIONS,
)
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.quickstart.tiny_models import train_tokenizer, write_llama, write_qwen3

RECOMMENDED = "ce:weight=0.3+byte-kl"
STRICT = "strict:divergence=forward-kl"  # the published reverse KL needs probabilities that a cache does not contain
LINES = (
    "ce",
    RECOMMENDED,
    *(f"ce:weight=0.3+{name}" for name in ("boundary-kl", "bpm", "escd", "simct", STRICT)),
    "ce+p-kl:weight=2",
    "ce+gold",
    "ce+alm",
    "ce:weight=0.3+p-kl:weight=2",
    "byte-kl",
    "bpm",
)
ALL_DOCUMENTS, WITH_TEACHERS_TOKENIZER = "ce, all documents", ", teacher's tokenizer"
SAME_TOKENIZER = f"ce:weight=0.3+forward-kl{WITH_TEACHERS_TOKENIZER}"
STUDENT_SPECIALS, TEACHER_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>"], ["<|endoftext|>"]
# Students of TRL's trainer: {name in the table: weight of its cross-entropy}.
PEERS = {"TRL's GOLD": 0.0, "TRL's GOLD with ce": 1.0}
SHORT_LINES = ("ce", RECOMMENDED, "ce+p-kl:weight=2", "ce+gold")
STEPS = 800
CODE_PROMPTS = 40
COMMAND_TIMEOUT_SECONDS = 12 * 3600
Key = tuple[str, str, int]  # setting, losses of a run joined by +, seed
MODEL_WRITING_LOCK = threading.Lock()  # models are initialized with torch's global seed
# Options of caches of the same documents, from the most bytes to the fewest.
SUPPORTS = (
    "--support top-k --top-k 64",
    "",
    "--top-k 8 --num-samples 8",
    "--top-k 4 --num-samples 4",
    "--top-k 2 --num-samples 2",
    "--support sample --num-samples 8",
    "--precision coarse",
)


@dataclass(frozen=True)
class Setting:
    """A pair of models: their kind of text, and how the two tokenizers differ."""

    text: str  # docs or code
    student_digits: str = "{1,3}"
    student_tokens: int = 4000
    student_merges_spaces: bool = True
    teacher_digits: str | None = ""  # None: the pretrained model
    teacher_tokens: int = 3000
    teacher_merges_spaces: bool = True


SETTINGS = {
    "quickstart": Setting("docs"),
    "reversed": Setting("docs", "", 3000, teacher_digits="{1,3}", teacher_tokens=4000),
    "real": Setting("docs", teacher_digits=None),
    "real-digits": Setting("docs", "", teacher_digits=None),
    "code": Setting("code", student_merges_spaces=False),
    "code-reversed": Setting("code", teacher_merges_spaces=False),
}


def run(*arguments: object) -> str:
    """Run an xtk command and return its stdout. Its process is a fork of a process that has imported everything."""
    start_fork_server()
    completed = xtk_processes.run_xtk(
        *arguments, "--quiet", env={"HF_HUB_OFFLINE": "1"}, code=None, timeout=COMMAND_TIMEOUT_SECONDS
    )
    if completed.returncode:
        raise SystemExit(f"xtk {shlex.join(map(str, arguments))}\n{completed.stderr}")
    return completed.stdout.strip()


@functools.cache
def start_fork_server() -> None:
    """Start the process that is forked for each command, once."""
    xtk_processes.start_fork_server()


def python_functions() -> list[tuple[str, str]]:
    """Return (file, source) of the functions of the standard library, 200 to 1,200 characters each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(
        [*root.glob("*.py"), *root.glob("asyncio/*.py"), *root.glob("email/*.py"), *root.glob("json/*.py")]
    ):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                source = textwrap.dedent("\n".join(lines)) + "\n"
                if 200 <= len(source) <= 1200:
                    found.append((file.name, source))
    return found


def documents(text: str) -> tuple[list[str], list[str]]:
    """Return training and held-out documents; no source file is in both."""
    if text == "docs":
        return train_test_split(python_documents())
    train, held_out = train_test_split(python_functions())
    return train, held_out[:160]


def write_texts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def prepare(folder: Path, setting: Setting, seeds: int) -> Path:
    """Create the missing data, teacher, students and cache; return the teacher's path."""
    with MODEL_WRITING_LOCK:
        teacher = write_models(folder, setting, seeds)
    if setting.teacher_digits is not None:
        options = f"{TEACHER_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS}".split()
        run("distill", folder / "teacher-untrained", folder / "train.jsonl", "--loss", "ce", *options, "-o", teacher)
    run("cache-teacher", teacher, folder / "part.jsonl", "-o", folder / "cache")
    return teacher


def write_models(folder: Path, setting: Setting, seeds: int) -> Path:
    """Write the missing data and untrained models; return the path of the trained teacher."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = documents(setting.text)
    if not (folder / "test.jsonl").is_file():
        write_texts(folder / "train.jsonl", train)
        write_texts(folder / "part.jsonl", train[: int(len(train) * STUDENT_FRACTION)])
        beginnings = ["\n".join(text.splitlines()[:2]) + "\n" for text in held_out[:CODE_PROMPTS]]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in beginnings))
        write_texts(folder / "test.jsonl", held_out)
    merges = setting.student_merges_spaces
    tokenizer = train_tokenizer(
        setting.student_digits, setting.student_tokens, STUDENT_SPECIALS, train, merge_spaces=merges
    )
    for seed in range(seeds):
        if not (folder / f"student-{seed}").is_dir():
            write_llama(folder / f"student-{seed}", tokenizer, seed)
    if setting.teacher_digits is None:
        teacher = find_smollm2()
        tokenizer = Tokenizer.from_file(str(resolve_model_folder(str(teacher), with_weights=False) / "tokenizer.json"))
    else:
        teacher = folder / "teacher"
        merges = setting.teacher_merges_spaces
        tokenizer = train_tokenizer(
            setting.teacher_digits, setting.teacher_tokens, TEACHER_SPECIALS, train, merge_spaces=merges
        )
        if not (folder / "teacher-untrained").is_dir():
            write_qwen3(folder / "teacher-untrained", tokenizer, TEACHER_SEED)
    for seed in range(seeds):
        if not (folder / f"same-tokenizer-{seed}").is_dir():
            write_llama(folder / f"same-tokenizer-{seed}", tokenizer, seed)
    return teacher


def measure(model: Path | str, folder: Path, *, code: bool) -> dict[str, float]:
    """Return bits per byte of held-out text, overall and by category; for code also the share of samples that parse."""
    result = json.loads(run("evaluate", model, folder / "test.jsonl", "--by-category", "--json"))
    figures = {"bits_per_byte": result["bits_per_byte"]}
    for name, category in result["categories"].items():
        figures[name] = category["bits_per_byte"]
    if code:
        samples = folder / f"samples-{Path(model).name}.jsonl"
        generation = ["--temperature", 0.5, "--max-completion-length", 96, "--force", "-o", samples]
        run("rollout", model, folder / "prompts.jsonl", *generation)
        figures["parse"] = statistics.mean(map(parses, samples.read_text(encoding="utf-8").splitlines()))
    return figures


def parses(line: str) -> bool:
    """Return whether a generated function parses, up to its last complete line."""
    row = json.loads(line)
    text = row["prompt"] + row["completion"].rpartition("\n")[0] + "\n"
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def file_name_part(text: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in text)


def support_table(folder: Path, name: str, seeds: int, pool: ThreadPoolExecutor) -> None:
    """Print bits per byte of students that learn from caches of different supports, and the sizes of the caches."""
    setting, folder = SETTINGS[name], folder / name
    teacher = prepare(folder, setting, seeds)
    rows, reference = [], list[float]()

    def learn(cache: Path, seed: int) -> float:
        return measure(train(folder, RECOMMENDED, seed, cache), folder, code=False)["bits_per_byte"]

    caches = {options: folder / f"cache{file_name_part(options)}" for options in SUPPORTS}
    for options, cache in caches.items():
        run("cache-teacher", teacher, folder / "part.jsonl", *options.split(), "-o", cache)
    learned = {options: [pool.submit(learn, cache, seed) for seed in range(seeds)] for options, cache in caches.items()}
    for options, cache in caches.items():
        sizes = json.loads(run("inspect", cache, "--json"))["statistics"]
        bits = [value.result() for value in learned[options]]
        reference = reference or bits
        logprob_bytes = sizes["bytes_by_section"]["teacher_logprobs"] / sizes["positions"]
        cells = (
            f"{sizes['bytes_per_position']:.1f}",
            f"{logprob_bytes:.1f}",
            ", ".join(f"{value:.3f}" for value in bits),
        )
        rows.append((options or "(default: 16 and 16)", *cells, differences(bits, reference)))
    columns = ("cache", "bytes a position", "of log-probabilities", "bits per byte, by seed", "minus the first")
    report(__file__, rows, columns)


def train_with_trl(folder: Path, teacher: Path, line: str, seed: int, steps: int) -> Path:
    """Train a student with TRL's GOLD trainer; return its folder."""
    output = folder / "runs" / f"{file_name_part(line)}-{seed}"
    if not (output / "config.json").is_file():
        script = Path(__file__).parent / "trl_gold_trainer.py"
        paths = [
            folder / f"student-{seed}",
            resolve_model_folder(str(teacher), with_weights=True),
            folder / "part.jsonl",
        ]
        options = ["--steps", steps, "--seed", seed, "--ce", PEERS[line]]
        completed = subprocess.run([sys.executable, *map(str, [script, *paths, output, *options])], capture_output=True,
                              text=True, check=False)  # fmt: skip
        if completed.returncode:
            raise SystemExit(completed.stderr)
    return output


def train(folder: Path, line: str, seed: int, cache: Path | None = None, steps: int = STEPS) -> Path:
    """Train a student with losses, joined by +; return its folder."""
    student, source, losses = folder / f"student-{seed}", cache or folder / "cache", line
    if line == ALL_DOCUMENTS:
        source, losses = folder / "train.jsonl", "ce"
    elif line.endswith(WITH_TEACHERS_TOKENIZER):
        student, losses = folder / f"same-tokenizer-{seed}", line.removesuffix(WITH_TEACHERS_TOKENIZER)
    loss_options = [word for name in losses.split("+") for word in ("--loss", name)]
    options = f"{STUDENT_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS} --max-steps {steps} --seed {seed}".split()
    output = folder / "runs" / f"{file_name_part(line)}{file_name_part(cache.name) if cache else ''}-{seed}"
    run("distill", student, source, *loss_options, *options, "-o", output)
    return output


def learn(folder: Path, teacher: Path, key: Key, steps: int) -> dict[str, float]:
    """Return the figures of a setting's teacher, or of a student trained with the losses and seed of a key."""
    name, line, seed = key
    if line in PEERS:
        model = train_with_trl(folder, teacher, line, seed, steps)
    else:
        model = teacher if line == "teacher" else train(folder, line, seed, steps=steps)
    return measure(model, folder, code=SETTINGS[name].text == "code")


class ObjectiveResults:
    """Figures in a file of JSON lines, each computed once, with its computation time.

    Args:
        path: the file.

    Attributes:
        figures: {(setting, losses, seed): figures}.
        seconds: total computation time of all figures.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[Key, dict[str, float]] = {}
        self.seconds = 0.0
        for line in path.read_text().splitlines() if path.is_file() else []:
            row = json.loads(line)
            self.figures[row["setting"], row["line"], row["seed"]] = row["figures"]
            self.seconds += row.get("seconds", 0.0)

    @staticmethod
    def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Return the result of a function, and its seconds."""
        started = time.monotonic()
        return function(*arguments), time.monotonic() - started

    def add_finished(self, running: Mapping[Future[tuple[Any, float]], Key]) -> None:
        """Wait for results, and add each when it is finished."""
        for future in as_completed(running):
            setting, line, seed = key = running[future]
            result, seconds = future.result()
            if key in self.figures:
                continue
            figures = self.figures[key] = result if isinstance(result, dict) else {}
            self.seconds += seconds
            row = {"setting": setting, "line": line, "seed": seed, "figures": figures, "seconds": round(seconds, 1)}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def differences(values: list[float], reference: list[float]) -> str:
    """Return the mean of the paired differences and half of its 95 % interval."""
    if len(values) < 2:
        return "" if not values else f"{values[0] - reference[0]:+.3f}"
    paired = [value - reference_value for value, reference_value in zip(values, reference, strict=True)]
    half = half_interval(statistics.stdev(paired) / math.sqrt(len(paired)), len(paired))
    return f"{statistics.mean(paired):+.3f} ± {half:.3f}"


def table(name: str, results: Mapping[Key, dict[str, float]], seeds: int) -> None:
    """Print the results of a setting, best first."""
    lines = {line for setting, line, _ in results if setting == name and line not in ("teacher", "models")}
    done = {
        line: [results[name, line, seed] for seed in range(seeds) if (name, line, seed) in results] for line in lines
    }
    columns = [
        column for column in ("digits", "white space", "parse") if all(column in rows[0] for rows in done.values())
    ]

    def bits(line: str, column: str = "bits_per_byte") -> list[float]:
        return [row[column] for row in done[line]]

    rows = [("teacher", f"{results[name, 'teacher', 0]['bits_per_byte']:.3f}", "", *("" for _ in columns))]
    for line in sorted(lines, key=lambda one: statistics.mean(bits(one))):
        reference = bits(RECOMMENDED)[: len(bits(line))] if RECOMMENDED in done else bits(line)
        paired = bits(line)[: len(reference)]
        means = [f"{statistics.mean(bits(line, column)):.2f}" for column in columns]
        rows.append((line, ", ".join(f"{one:.3f}" for one in bits(line)), differences(paired, reference), *means))
    sys.stdout.write(f"\n**{name}**\n\n")
    report(__file__, rows, ("losses", "bits per byte, by seed", f"minus {RECOMMENDED}", *columns))


def main() -> None:
    """Train all students, seed by seed, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each student; other steps need another FOLDER")
    parser.add_argument(
        "--lines", nargs="*", default=LINES, help='losses of a run, joined by +; also "ce, teacher\'s tokenizer"'
    )
    parser.add_argument("--supports", action="store_true", help="compare caches of other supports, with one objective")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--peer", action="store_true", help="also TRL's GOLD trainer")
    parser.add_argument("--short", action="store_true", help="few losses, one seed, the quickstart's pair")
    args = parser.parse_args()
    if args.short:
        args.settings, args.lines, args.seeds = ["quickstart"], SHORT_LINES, 1
    silence_transformers()
    args.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        if args.supports:
            for name in args.settings:
                support_table(args.folder, name, args.seeds, pool)
            return
        results = ObjectiveResults(args.folder / "results.jsonl")
        preparing = {
            pool.submit(results.timed, prepare, args.folder / name, SETTINGS[name], args.seeds): (name, "models", 0)
            for name in args.settings
        }
        teachers = {key[0]: future.result()[0] for future, key in preparing.items()}
        results.add_finished(preparing)
        running: dict[Future[tuple[Any, float]], Key] = {}
        for seed, name in itertools.product(range(args.seeds), args.settings):
            upper_limits = [ALL_DOCUMENTS] + ([SAME_TOKENIZER] if name != "real-digits" else [])
            for line in ["teacher", *args.lines, *upper_limits, *(PEERS if args.peer else ())]:
                key = name, line, 0 if line == "teacher" else seed
                if key not in results.figures and key not in running.values():
                    running[pool.submit(results.timed, learn, args.folder / name, teachers[name], key, args.steps)] = (
                        key
                    )
        try:
            results.add_finished(running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for name in args.settings:
        table(name, results.figures, args.seeds)
    hours = results.seconds / args.jobs / 3600
    sys.stdout.write(f"\nAll results together took {hours:.1f} hours with {args.jobs} processes at a time.\n")


if __name__ == "__main__":
    main()
