"""The quickstart: corpus, models, teacher, projection, cache, students, evaluation and report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.artifacts.atomic_files import TEMPORARY_PREFIX, read_json, write_json
from xtk.artifacts.output_claims import FolderKind, claim_output
from xtk.errors import XtkError
from xtk.models.causal_lm import silence_transformers
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.quickstart.tiny_models import make_student, make_teacher

# Found by experiment: docs/explanation/decisions.md. The student is trained on 15 % of the teacher's documents.
STUDENT_FRACTION = 0.15
TEACHER_SEED = 1234
TEACHER_TRAINING_OPTIONS = "--max-steps 1500 --per-device-train-batch-size 2 --learning-rate 3e-3"
STUDENT_TRAINING_OPTIONS = "--max-steps 800 --per-device-train-batch-size 2 --learning-rate 3e-3"
SHARED_TRAINING_OPTIONS = "--warmup-ratio 0.1 --weight-decay 0.1 --save-steps 200 --save-total-limit 1"
DISTILL_LOSS_OPTIONS = "--loss ce --loss p-kl:weight=2"
GENERATION_OPTIONS = "--max-completion-length 48 --temperature 0.7"
NUM_PROMPTS, PROMPT_CHARACTERS = 5, 120  # held-out documents whose beginnings are prompts
MARKER_FILE = "quickstart.json"  # written first; identifies the folder of a quickstart
RESULTS_FILE, REPORT_FILE = "results.json", "report.html"


def run_quickstart(folder: Path, num_seeds: int) -> dict[str, Any]:
    """Run the demonstration in a folder; an interrupted one resumes.

    Args:
        folder: output folder.
        num_seeds: number of seeds; a seed sets initial weights and document order of two students.

    Returns:
        Bits per byte on held-out text: `teacher`, `ce` and `distilled`; the latter two have a value per seed.

    Raises:
        XtkError: the folder has other files, or a command failed.
    """
    if num_seeds < 1:
        raise XtkError(f"--seeds is {num_seeds}, but must be at least 1", hint="use --seeds 1 or more")
    started = time.monotonic()
    _prepare(folder, num_seeds)
    at = shlex.quote(str(folder))
    _print_note("Train the teacher on all documents (the slowest step):")
    common = f"{SHARED_TRAINING_OPTIONS} --eval-data {at}/test.jsonl"
    teacher = _run_printed_command(
        f"xtk distill {at}/teacher-untrained {at}/train.jsonl --loss ce {TEACHER_TRAINING_OPTIONS} {common} -o "
        f"{at}/teacher"
    )
    _print_note("Map the student's tokens to the teacher's:")
    _run_printed_command(f"xtk build-projection {at}/student-0 {at}/teacher -o {at}/projection")
    _run_printed_command(f"xtk prune-projection {at}/projection --top-k 4 -o {at}/projection-4")
    _print_note("Store the teacher's log-probabilities for the student's documents:")
    _run_printed_command(f"xtk cache-teacher {at}/teacher {at}/part.jsonl -o {at}/cache")
    figures: dict[str, Any] = {"teacher": _bits(teacher), "ce": [], "distilled": []}
    for seed in range(num_seeds):
        training = f"{STUDENT_TRAINING_OPTIONS} {common} --eval-steps 200 --seed {seed}"
        start = f"xtk distill {at}/student-{seed} {at}/cache"
        _print_note(f"Train student {seed} with cross-entropy only, then with the teacher:")
        alone = _run_printed_command(f"{start} --loss ce {training} -o {at}/ce-{seed}")
        taught = _run_printed_command(
            f"{start} --projection {at}/projection-4 {DISTILL_LOSS_OPTIONS} {training} -o {at}/distilled-{seed}"
        )
        figures["ce"].append(_bits(alone))
        figures["distilled"].append(_bits(taught))
    write_json(folder / RESULTS_FILE, {"bits_per_byte": figures, "seeds": num_seeds})
    page = _report(folder, num_seeds)
    terminal.note(markdown_table(figures))
    duration = terminal.format_duration(time.monotonic() - started)
    terminal.note(f"\nCurves and all numbers: {page}. Total time: {duration}.")
    return figures


def _report(folder: Path, seeds: int) -> Path:
    """Compare the untrained, cross-entropy and distilled students of the first seed; write a page about all runs."""
    at = shlex.quote(str(folder))
    _print_note("Evaluate the untrained, cross-entropy and distilled student on held-out text:")
    models = {"untrained": "student-0", "ce": "ce-0", "distilled": "distilled-0"}
    evaluation, samples = folder / "evaluation.jsonl", folder / "samples"
    compared = f"--compare-to {at}/ce-0 --compare-to {at}/student-0"
    printed = _run_printed_command(
        f"xtk evaluate {at}/distilled-0 {at}/test.jsonl {compared} --json > {at}/{evaluation.name}"
    )
    evaluation.write_text(printed, encoding="utf-8")
    samples.mkdir(exist_ok=True)
    for name, model in models.items():
        _run_printed_command(
            f"xtk rollout {at}/{model} {at}/prompts.jsonl {GENERATION_OPTIONS} -o {at}/samples/{name}.jsonl"
        )
    _print_note("Write a report about all runs:")
    runs = " ".join(f"{at}/{kind}-{seed}" for kind in ("ce", "distilled") for seed in range(seeds))
    shown = " ".join(f"--samples {at}/samples/{name}.jsonl" for name in models)
    baselines = f"--baseline {at}/student-0 --baseline {at}/ce-0"
    page = f"--cache {at}/cache --evaluation {at}/{evaluation.name} {baselines} {shown} -o {at}/{REPORT_FILE} --force"
    return Path(_run_printed_command(f"xtk report {runs} {page}"))


def markdown_table(figures: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    rows = [("teacher, trained on all documents", [figures["teacher"]])]
    rows.append((f"student, cross-entropy only, trained on {STUDENT_FRACTION:.0%} of them", figures["ce"]))
    rows.append(("the same student, distilled, same steps and documents", figures["distilled"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"| {'':{width}} | bits per byte on held-out text |", f"| {'-' * width} | --- |"]
    lines += [f"| {name:{width}} | {', '.join(f'{value:.3f}' for value in values)} |" for name, values in rows]
    return "\n" + "\n".join(lines)


QUICKSTART = FolderKind[None]("a quickstart", lambda folder: (folder / MARKER_FILE).is_file())


def _prepare(folder: Path, seeds: int) -> None:
    """Write corpus, tokenizers and untrained models; each file is complete or absent."""
    claim_output(folder, QUICKSTART)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MARKER_FILE, {"kind": "quickstart"})
    training, held_out = train_test_split(python_documents())
    part = training[: int(len(training) * STUDENT_FRACTION)]
    _print_note(
        f"{len(training):,} training documents from Python's documentation, {len(part):,} of them for the student; "
        f"{len(held_out):,} held-out documents."
    )
    silence_transformers()
    beginnings = [text[:PROMPT_CHARACTERS] for text in held_out if len(text) > PROMPT_CHARACTERS][:NUM_PROMPTS]
    for name, texts in (("train", training), ("part", part), ("test", held_out), ("prompts", beginnings)):
        _write_once(folder / f"{name}.jsonl", lambda path, texts=texts: _write_jsonl(path, texts))
    _write_once(folder / "teacher-untrained", lambda path: make_teacher(path, training, TEACHER_SEED))
    for seed in range(seeds):
        _write_once(folder / f"student-{seed}", lambda path, seed=seed: make_student(path, training, seed))


def _write_once(path: Path, write: Any) -> None:
    if path.exists():
        return
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    temporary.replace(path)


def _write_jsonl(path: Path, texts: Iterable[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


def _print_note(text: str) -> None:
    terminal.note(f"\n{text}")


def _run_printed_command(command: str) -> str:
    """Print a command, run it without its `> FILE`, and return its output."""
    terminal.note(f"$ {command}")
    words = shlex.split(command)
    words = words[: words.index(">")] if ">" in words else words
    arguments = words[1:] + (["--quiet"] if terminal.is_quiet() else [])
    done = subprocess.run(
        [sys.executable, "-m", "xtk", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise XtkError(
            f"a command of the quickstart failed with exit code {done.returncode}",
            where=command,
            hint="see its error above, then run the same quickstart again to resume",
        )
    return done.stdout.strip()


def _bits(run: str) -> float:
    return float(read_json(Path(run) / "xtk.json")["metrics"]["eval_bits_per_byte"])
