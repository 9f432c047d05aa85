"""The quickstart: corpus, models, teacher, cache, students, evaluation and report."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from xtk import terminal
from xtk.errors import XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX, read_json, write_json
from xtk.files.output import Output, OutputKind
from xtk.models.causal_lm import silence_transformers
from xtk.progress import phase
from xtk.quickstart.pretrained_models import default_folder, download_model
from xtk.quickstart.python_docs_corpus import python_documents, python_functions, small_functions, train_test_split
from xtk.quickstart.tiny_models import make_student, make_teacher
from xtk.subprocesses import die_with_parent
from xtk.terminal_tables import print_table

# Found by experiment: docs/explanation/decisions.md. The student is trained on 15 % of the teacher's documents.
STUDENT_FRACTION = 0.15
TEACHER_SEED = 1234
TEACHER_TRAINING_OPTIONS = "--max-steps 1500 --per-device-train-batch-size 2 --learning-rate 3e-3"
STUDENT_TRAINING_OPTIONS = "--max-steps 800 --per-device-train-batch-size 2 --learning-rate 3e-3"
SHARED_TRAINING_OPTIONS = "--warmup-ratio 0.1 --weight-decay 0.1 --save-steps 200 --save-total-limit 1"
GENERATION_OPTIONS = "--max-completion-length 48 --temperature 0.7"
NUM_PROMPTS, PROMPT_CHARACTERS = 5, 120  # held-out documents whose beginnings are prompts
NUM_STEPS = 5
MARKER_FILE = "quickstart.json"  # written first; identifies the folder of a quickstart
EVALUATION_FILE, RESULTS_FILE, REPORT_FILE = "evaluation.jsonl", "results.json", "report.html"
# With --real: a pretrained student, its teacher with another tokenizer, and functions of the standard library, about
# 24,000 tokens. Cross-entropy has its full weight: docs/explanation/real-pairs.md.
PRETRAINED_STUDENT, PRETRAINED_TEACHER = "smollm2-135m-instruct.gguf", "qwen2.5-coder-0.5b-instruct.gguf"
NUM_FUNCTIONS, NUM_HELD_OUT_FUNCTIONS = 200, 24
PRETRAINED_LOSS = "--loss ce --loss byte-kl"
PRETRAINED_TRAINING_OPTIONS = (
    "--max-steps 50 --per-device-train-batch-size 4 --learning-rate 1e-4 --warmup-ratio 0.1 --save-steps 0 "
    "--start-token '<|endoftext|>'"  # SmolLM2 has none: docs/how-to/real-models.md, "Start and end tokens"
)
PRETRAINED_GENERATION_OPTIONS = "--max-completion-length 64 --temperature 0.5"
PROMPT_LINES = 2  # of a function: its name and its description
# Text unlike the training text. A student that fits the training text as well knows more of this one with a teacher.
OTHER_TEXT = "small functions"
NUM_PRINTED_PROMPTS, MAX_PRINTED_LINES = 2, 8


@dataclass(frozen=True)
class Demo:
    """What a quickstart trains, as words of commands."""

    teacher: str
    students: list[str]  # of each seed
    loss: str  # options of the distilled students' losses
    training: str  # options of all students
    generation: str  # options of the samples


def run_quickstart(folder: Path, num_seeds: int, *, real: bool = False) -> dict[str, Any]:
    """Run the demonstration in a folder, with two students per seed; an interrupted one resumes.

    Returns:
        Bits per byte on held-out text: `teacher`, `ce` and `distilled`; the latter two have a value per seed. With
            `real` (pretrained models) also `untrained`, and `other`: the same four on small functions, which are unlike
            the training text.
    """
    if num_seeds < 1:
        raise XtkError(f"--seeds is {num_seeds}, but must be at least 1", hint="use --seeds 1 or more")
    started = time.monotonic()
    at = shlex.quote(str(folder))
    demo = _prepare_pretrained(folder, num_seeds) if real else _prepare_small(folder, num_seeds)
    _print_step(2, "store the teacher's log-probabilities for the student's documents:")
    _run_printed_command(f"xtk cache-teacher {demo.teacher} {at}/part.jsonl -o {at}/cache")
    results: dict[str, list[float]] = {"ce": [], "distilled": []}
    for seed, student in enumerate(demo.students):
        training = f"{demo.training} --eval-data {at}/test.jsonl --seed {seed}"
        _print_step(3, f"train student {seed} with cross-entropy only, then with the teacher:")
        for kind, loss in (("ce", "--loss ce"), ("distilled", demo.loss)):
            options = f"{loss} {training}".strip()
            run = _run_printed_command(f"xtk distill {student} {at}/cache {options} -o {at}/{kind}-{seed}")
            results[kind].append(float(read_json(Path(run) / "xtk.json")["metrics"]["eval_bits_per_byte"]))
    page = _report(folder, demo)
    rows = (folder / EVALUATION_FILE).read_text(encoding="utf-8").splitlines()
    _, _, untrained, teacher = (float(json.loads(row)["bits_per_byte"]) for row in rows)
    figures: dict[str, Any] = {"teacher": teacher, **({"untrained": untrained} if real else {}), **results}
    if real:
        figures["other"] = _evaluate_other_text(folder, demo)
    _print_samples(folder)
    write_json(folder / RESULTS_FILE, {"bits_per_byte": figures, "seeds": num_seeds})
    _print_results(figures)
    duration = terminal.format_duration(time.monotonic() - started)
    _print_note(f"Curves and all numbers: {page}. Total time: {duration}.")
    return figures


def _report(folder: Path, demo: Demo) -> Path:
    """Compare the untrained, cross-entropy and distilled students of the first seed; write a page about all runs."""
    at = shlex.quote(str(folder))
    _print_step(4, "evaluate the untrained, cross-entropy and distilled student on held-out text:")
    student = demo.students[0]
    models = {"untrained": student, "ce": f"{at}/ce-0", "distilled": f"{at}/distilled-0"}
    evaluation, samples = folder / EVALUATION_FILE, folder / "samples"
    compared = f"--compare-to {at}/ce-0 --compare-to {student} --compare-to {demo.teacher}"
    printed = _run_printed_command(
        f"xtk evaluate {at}/distilled-0 {at}/test.jsonl {compared} --json > {at}/{evaluation.name}"
    )
    evaluation.write_text(printed, encoding="utf-8")
    samples.mkdir(exist_ok=True)
    for name, model in models.items():
        with contextlib.suppress(XtkError):  # a student that generates nothing; the command says so
            _run_printed_command(
                f"xtk rollout {model} {at}/prompts.jsonl {demo.generation} -o {at}/samples/{name}.jsonl"
            )
    _print_step(5, "write a report about all runs:")
    runs = " ".join(f"{at}/{kind}-{seed}" for kind in ("ce", "distilled") for seed in range(len(demo.students)))
    baselines = f"--baseline {student} --baseline {at}/ce-0"
    page = f"--evaluation {at}/{evaluation.name} {baselines} --teacher {demo.teacher}"
    page += f" -o {at}/{REPORT_FILE} --force"
    return Path(_run_printed_command(f"xtk report {runs} {page}"))


def _evaluate_other_text(folder: Path, demo: Demo) -> dict[str, Any]:
    """Return bits per byte of the small functions: `teacher`, `untrained`, and `ce` and `distilled` by seed."""
    at, seeds = shlex.quote(str(folder)), range(len(demo.students))
    models = [demo.students[0], *(f"{at}/{kind}-{seed}" for seed in seeds for kind in ("ce", "distilled"))]
    compared = " ".join(f"--compare-to {model}" for model in models)
    printed = _run_printed_command(f"xtk evaluate {demo.teacher} {at}/other.jsonl {compared} --json > {at}/other.json")
    (folder / "other.json").write_text(printed, encoding="utf-8")
    teacher, untrained, *trained = (float(json.loads(row)["bits_per_byte"]) for row in printed.splitlines())
    return {"teacher": teacher, "untrained": untrained, "ce": trained[::2], "distilled": trained[1::2]}


def _print_samples(folder: Path) -> None:
    """Print the first prompts with the samples of the untrained, cross-entropy and distilled student."""
    samples = {}
    for name in ("untrained", "ce", "distilled"):
        path = folder / "samples" / f"{name}.jsonl"
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ())
        samples[name] = {row["prompt"]: row["completion"] for row in rows}  # without empty completions
    for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PRINTED_PROMPTS]:
        prompt = json.loads(line)["text"]
        _print_note(f"Generated samples after this prompt:\n{prompt.rstrip()}")
        for name, completions in samples.items():
            lines = completions.get(prompt, "(nothing)").strip("\n").splitlines()[:MAX_PRINTED_LINES]
            terminal.note("\n".join([f"--- {name}", *lines]))


def _print_results(figures: dict[str, Any]) -> None:
    terminal.note("")
    title, (heads, *rows) = result_rows(figures)
    print_table(title, heads, rows, [False] + [True] * (len(heads) - 1), as_note=True)
    where = f"On the {OTHER_TEXT}: " if "other" in figures else ""
    _print_note(where + explain_results(figures.get("other", figures)))


def result_rows(figures: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Return the title and the rows of the closing table, the heads of its columns first."""
    names = {
        "teacher": "teacher, trained on all documents",
        "ce": f"student, cross-entropy only, trained on {STUDENT_FRACTION:.0%} of them",
        "distilled": "the same student, distilled, same steps and documents",
    }
    heads, columns = ["model", "bits per byte"], [figures]
    if "other" in figures:
        names = {
            "teacher": f"teacher, {Path(PRETRAINED_TEACHER).stem}",
            "untrained": f"student, {Path(PRETRAINED_STUDENT).stem}",
            "ce": f"trained on {NUM_FUNCTIONS} functions of the library",
            "distilled": "distilled on the same",
        }
        heads, columns = ["model", "the library", OTHER_TEXT], [figures, figures["other"]]
    cells = [
        [text, *(", ".join(f"{value:.3f}" for value in np.atleast_1d(column[name])) for column in columns)]
        for name, text in names.items()
    ]
    return "Bits per byte on held-out text (lower is better)", [heads, *cells]


def explain_results(figures: dict[str, Any]) -> str:
    """Return what the bits per byte of a quickstart mean: gain, and share of the gap to the teacher that is closed."""
    ce, distilled = (fmean(figures[kind]) for kind in ("ce", "distilled"))
    gap, gain, of_seeds = ce - figures["teacher"], ce - distilled, len(figures["ce"])
    mean = f", mean of {of_seeds} seeds" if of_seeds > 1 else ""
    change = f"saves {gain:.3f}" if gain >= 0 else f"costs {-gain:.3f}"
    text = f"With the teacher, the student {change} bits per byte ({abs(gain) / ce:.0%}{mean}): "
    if gap <= 0:
        return text + "the teacher is not better than the student trained with cross-entropy only."
    share = f"{abs(gain) / gap:.0%} of its gap of {gap:.3f} to the teacher"
    return text + (f"{share} is closed." if gain >= 0 else f"{share} is added to it.")


QUICKSTART = OutputKind[None](
    "a quickstart", lambda folder: (folder / MARKER_FILE).is_file(), is_folder=True, has_force=False
)


def _prepare_small(folder: Path, num_seeds: int) -> Demo:
    """Write corpus, tokenizers and untrained models, and train the teacher."""
    _claim(folder, real=False)
    training, held_out = train_test_split(python_documents())
    part = training[: int(len(training) * STUDENT_FRACTION)]
    _print_note(
        f"{len(training):,} training documents from Python's documentation, {len(part):,} of them for the student; "
        f"{len(held_out):,} held-out documents."
    )
    silence_transformers()
    beginnings = [text[:PROMPT_CHARACTERS] for text in held_out if len(text) > PROMPT_CHARACTERS][:NUM_PROMPTS]
    _write_documents(folder, train=training, part=part, test=held_out, prompts=beginnings)
    _write_once(folder / "teacher-untrained", lambda path: make_teacher(path, training, TEACHER_SEED))
    for seed in range(num_seeds):
        _write_once(folder / f"student-{seed}", lambda path, seed=seed: make_student(path, training, seed))
    at = shlex.quote(str(folder))
    _print_step(1, "train the teacher on all documents (the slowest step):")
    options = f"{TEACHER_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS} --eval-data {at}/test.jsonl"
    _run_printed_command(f"xtk distill {at}/teacher-untrained {at}/train.jsonl --loss ce {options} -o {at}/teacher")
    return Demo(
        teacher=f"{at}/teacher",
        students=[f"{at}/student-{seed}" for seed in range(num_seeds)],
        loss="",
        training=f"{STUDENT_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS} --eval-steps 200",
        generation=GENERATION_OPTIONS,
    )


def _prepare_pretrained(folder: Path, num_seeds: int) -> Demo:
    """Write functions of the standard library, and download the models."""
    if importlib.util.find_spec("gguf") is None:
        raise XtkError(
            "--real reads GGUF files, for which the package gguf is not installed", hint="run: pip install gguf"
        )
    models = default_folder()
    _claim(folder, real=True)
    training, held_out = train_test_split(python_functions())
    training, held_out = training[:NUM_FUNCTIONS], held_out[:NUM_HELD_OUT_FUNCTIONS]
    other = small_functions()
    _print_note(
        f"{len(training)} functions of Python's standard library; to measure, {len(held_out)} others of it, and "
        f"{len(other)} small functions of another style."
    )
    # Without the last line break: with the indent of the next line it is one token.
    beginnings = ["\n".join(text.splitlines()[:PROMPT_LINES]) for text in other[:NUM_PROMPTS]]
    test, small = ([_first_word_as_prompt(text) for text in texts] for texts in (held_out, other))
    _write_documents(folder, part=training, test=test, other=small, prompts=beginnings)
    _print_step(1, f"download {PRETRAINED_STUDENT} and {PRETRAINED_TEACHER}, if they are not in {models}:")
    student, teacher = (
        shlex.quote(str(download_model(name, models))) for name in (PRETRAINED_STUDENT, PRETRAINED_TEACHER)
    )
    return Demo(
        teacher=teacher,
        students=[student] * num_seeds,
        loss=PRETRAINED_LOSS,
        training=PRETRAINED_TRAINING_OPTIONS,
        generation=PRETRAINED_GENERATION_OPTIONS,
    )


def _claim(folder: Path, *, real: bool) -> None:
    """Mark a folder as that of a quickstart; refuse one of the other kind."""
    Output(folder, QUICKSTART).find_finished()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MARKER_FILE).is_file() and read_json(folder / MARKER_FILE).get("real", False) != real:
        raise XtkError(
            f"the folder has a quickstart {'without' if real else 'with'} --real",
            where=str(folder),
            hint="choose another output folder",
        )
    write_json(folder / MARKER_FILE, {"kind": "quickstart", "real": real})


def _write_documents(folder: Path, **documents: Sequence[str | dict[str, str]]) -> None:
    for name, of_file in documents.items():
        _write_once(folder / f"{name}.jsonl", lambda path, of_file=of_file: _write_jsonl(path, of_file))


def _write_once(path: Path, write: Any) -> None:
    if path.exists():
        return
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    temporary.replace(path)


def _first_word_as_prompt(text: str) -> dict[str, str]:
    """Return a document whose first word is not measured: models without a start token do not predict it."""
    word = text.split(maxsplit=1)[0]
    return {"prompt": word, "completion": text.removeprefix(word)}


def _write_jsonl(path: Path, documents: Iterable[str | dict[str, str]]) -> None:
    rows = ({"text": document} if isinstance(document, str) else document for document in documents)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _print_note(text: str) -> None:
    terminal.note(f"\n{text}")


def _print_step(number: int, text: str) -> None:
    _print_note(f"Step {number} of {NUM_STEPS}: {text}")


def _run_printed_command(command: str) -> str:
    """Print a command, run it without its `> FILE`, and return its output."""
    terminal.note(f"$ {command}")
    words = shlex.split(command)
    words = words[: words.index(">")] if ">" in words else words
    arguments = words[1:] + (["--quiet"] if terminal.is_quiet() else [])
    with phase(""):
        done = subprocess.run(
            [sys.executable, "-m", "xtk", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL), check=False,
        )  # fmt: skip
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise XtkError(
            f"a command of the quickstart failed with exit code {done.returncode}",
            where=command,
            hint="see its error above, then run the same quickstart again to resume",
        )
    return done.stdout.strip()
