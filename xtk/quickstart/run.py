"""The whole way: corpus, models, teacher, projection, cache, students, table, picture."""

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
from xtk.artifacts.files import TEMPORARY, read_json, write_json
from xtk.artifacts.outputs import check_folder, entries_of, foreign_error
from xtk.errors import XtkError
from xtk.quickstart.corpus import documents, split

# Found by experiment: docs/explanation/decisions.md. The student sees 15 % of what the teacher saw.
STUDENT_SHARE = 0.15
TEACHER_SEED = 1234
TEACHER_TRAINING = "--max-steps 1500 --per-device-train-batch-size 2 --learning-rate 3e-3"
STUDENT_TRAINING = "--max-steps 800 --per-device-train-batch-size 2 --learning-rate 3e-3"
BOTH_TRAININGS = "--warmup-ratio 0.1 --weight-decay 0.1 --save-steps 200 --save-total-limit 1"
DISTILLED_LOSS = "--loss ce --loss p-kl:weight=2"
WRITING = "--max-completion-length 48 --temperature 0.7"
PROMPTS, CHARACTERS = 5, 120  # of held-out documents, for the student to go on from
BEGUN = "quickstart.json"  # written first: a folder without it is not a quickstart's
RESULTS, PICTURE, REPORT = "results.json", "curves.png", "report.html"


def quickstart(folder: Path, seeds: int) -> dict[str, Any]:
    """Run the demonstration in a folder; what an interrupted run has finished is kept.

    Args:
        folder: where everything goes.
        seeds: pairs of students: seed i gives both of them their first weights and the order of documents.

    Returns:
        `bits_per_byte` on held-out text: `teacher`, `ce` and `distilled`, the latter two with a number a seed.

    Raises:
        XtkError: the folder holds other things, or one of the commands failed.
    """
    if seeds < 1:
        raise XtkError(f"--seeds is {seeds}; it is 1 or more")
    started = time.monotonic()
    _prepare(folder, seeds)
    at = shlex.quote(str(folder))
    _say("The teacher is trained on all of it, the slowest step:")
    common = f"{BOTH_TRAININGS} --eval-data {at}/test.jsonl"
    teacher = _run(
        f"xtk distill {at}/teacher-untrained {at}/train.jsonl --loss ce {TEACHER_TRAINING} {common} -o {at}/teacher"
    )
    _say("The four commands. Which of the student's tokens land on which of the teacher's:")
    _run(f"xtk build-projection {at}/student-0 {at}/teacher -o {at}/projection")
    _run(f"xtk prune-projection {at}/projection --top-k 4 -o {at}/projection-4")
    _say("What the teacher says about the student's part of the corpus, once:")
    _run(f"xtk cache-teacher {at}/teacher {at}/part.jsonl -o {at}/cache")
    figures: dict[str, Any] = {"teacher": _bits(teacher), "ce": [], "distilled": []}
    for seed in range(seeds):
        training = f"{STUDENT_TRAINING} {common} --eval-steps 200 --seed {seed}"
        start = f"xtk distill {at}/student-{seed} {at}/cache"
        _say(f"Student {seed}, taught by the text alone, then by the teacher too:")
        alone = _run(f"{start} --loss ce {training} -o {at}/ce-{seed}")
        taught = _run(f"{start} --projection {at}/projection-4 {DISTILLED_LOSS} {training} -o {at}/distilled-{seed}")
        figures["ce"].append(_bits(alone))
        figures["distilled"].append(_bits(taught))
    write_json(folder / RESULTS, {"bits_per_byte": figures, "seeds": seeds})
    from xtk.quickstart.picture import draw_curves

    draw_curves(folder, seeds, figures["teacher"], folder / PICTURE)
    page = _report(folder, seeds)
    terminal.note(table(figures))
    terminal.note(
        f"\n{folder}/{PICTURE} shows the curves, {page} all numbers. "
        f"All of it took {terminal.duration(time.monotonic() - started)}."
    )
    return figures


def _report(folder: Path, seeds: int) -> Path:
    """Compare the first seed's student before, taught by the text, and distilled; write a page about all runs."""
    at = shlex.quote(str(folder))
    _say("The first student before, after the text alone, and after the teacher, on text that none has seen:")
    models = {"untrained": "student-0", "ce": "ce-0", "distilled": "distilled-0"}
    evaluation, samples = folder / "evaluation.jsonl", folder / "samples"
    compared = f"--compare-to {at}/ce-0 --compare-to {at}/student-0"
    told = _run(f"xtk evaluate {at}/distilled-0 {at}/test.jsonl {compared} --json > {at}/{evaluation.name}")
    evaluation.write_text(told, encoding="utf-8")
    samples.mkdir(exist_ok=True)
    for name, model in models.items():
        _run(f"xtk rollout {at}/{model} {at}/prompts.jsonl {WRITING} -o {at}/samples/{name}.jsonl")
    _say("All that has been written down, on a page:")
    runs = " ".join(f"{at}/{kind}-{seed}" for kind in ("ce", "distilled") for seed in range(seeds))
    shown = " ".join(f"--samples {at}/samples/{name}.jsonl" for name in models)
    baselines = f"--baseline {at}/student-0 --baseline {at}/ce-0"
    page = f"--cache {at}/cache --evaluation {at}/{evaluation.name} {baselines} {shown} -o {at}/{REPORT} --force"
    return Path(_run(f"xtk report {runs} {page}"))


def table(figures: dict[str, Any]) -> str:
    """Return the result as a table in Markdown."""
    rows = [("teacher, trained on all documents", [figures["teacher"]])]
    rows.append((f"student, cross-entropy alone, on {STUDENT_SHARE:.0%} of them", figures["ce"]))
    rows.append(("the same student, distilled, same steps and data", figures["distilled"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"| {'':{width}} | bits per byte on held-out text |", f"| {'-' * width} | --- |"]
    lines += [f"| {name:{width}} | {', '.join(f'{value:.3f}' for value in values)} |" for name, values in rows]
    return "\n" + "\n".join(lines)


def _prepare(folder: Path, seeds: int) -> None:
    """Write corpus, tokenizers and untrained models, whole or not at all."""
    check_folder(folder, "a quickstart")
    if (there := entries_of(folder)) and not (folder / BEGUN).is_file():
        raise foreign_error(there, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / BEGUN, {"kind": "quickstart"})
    training, held_out = split(documents())
    part = training[: int(len(training) * STUDENT_SHARE)]
    _say(
        f"{len(training):,} documents of Python's own documentation to train on, of which the student sees "
        f"{len(part):,}; {len(held_out):,} held out."
    )
    from xtk.models.causal_lm import quieten_transformers
    from xtk.quickstart.models import make_student, make_teacher

    quieten_transformers()
    beginnings = [text[:CHARACTERS] for text in held_out if len(text) > CHARACTERS][:PROMPTS]
    for name, texts in (("train", training), ("part", part), ("test", held_out), ("prompts", beginnings)):
        _write_once(folder / f"{name}.jsonl", lambda path, texts=texts: _write_jsonl(path, texts))
    _write_once(folder / "teacher-untrained", lambda path: make_teacher(path, training, TEACHER_SEED))
    for seed in range(seeds):
        _write_once(folder / f"student-{seed}", lambda path, seed=seed: make_student(path, training, seed))


def _write_once(path: Path, write: Any) -> None:
    if path.exists():
        return
    temporary = path.parent / f"{TEMPORARY}{path.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    temporary.replace(path)


def _write_jsonl(path: Path, texts: Iterable[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


def _say(text: str) -> None:
    terminal.note(f"\n{text}")


def _run(command: str) -> str:
    """Print a command, run it as it stands, and return what it printed; what stands behind > is for readers."""
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
            f"a command of the quickstart ended with exit code {done.returncode}",
            where=command,
            hint="its own message is above",
        )
    return done.stdout.strip()


def _bits(run: str) -> float:
    return float(read_json(Path(run) / "xtk.json")["metrics"]["eval_bits_per_byte"])
