"""On-policy distillation on a task with one right answer: sums of two numbers, with two different tokenizers.

    python examples/arithmetic.py --output FOLDER [--steps 100] [--seeds 3] [--first byte-kl]

The teacher's tokenizer has one token per digit, the student's one token per number. An answer is one letter, the sum in
base 62. Half of the answers in the teacher's training data are random, so its most likely answer is right, and an
answer that it samples is often wrong.
Students start from a model that learned the form of an answer only, or, with `--first`, also some sums. They train with cross-entropy on the teacher's
answers, with a distillation loss on the teacher's answers, or with a loss on their own answers (on-policy). All take
the same number of steps and of teacher tokens. A reference, for ways with `--reference reference`, is a model of the
teacher's kind that learned the form only. For comparison, "right answers" trains with cross-entropy on data
without a wrong answer. Accuracy: the share of all sums with the right most likely answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from markupsafe import Markup
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from xtk.pages.html_page import color, page
from xtk.pages.svg_curves import MetricCurve, curves_figure

NUMBERS, RANDOM_FRACTION = 31, 0.5
LETTERS = string.digits + string.ascii_letters  # of base 62
START, END = "<s>", "</s>"
JUDGE = "regex:pattern=^(.),column=answer,group=1"
BATCH, POINTS = 128, 4
TRAINING = ["--learning-rate", "2e-3", "--warmup-steps", "10", "--per-device-train-batch-size", str(BATCH),
            "--save-total-limit", "99", "--logging-steps", "20", "--quiet"]  # fmt: skip


def make_tokenizer(words: list[str], split: str) -> Tokenizer:
    """Return a tokenizer of whole words."""
    vocabulary = {word: number for number, word in enumerate([START, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def make_model(folder: Path, tokenizer: Tokenizer, kind: type, configuration: type, layers: int, seed: int) -> None:
    """Write a small model with random weights."""
    import torch

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END)
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    kind(
        configuration(
            vocab_size=len(fast),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder)


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_data(folder: Path) -> None:
    """Write the teacher's training data, and a prompt for each sum."""
    rng = random.Random(0)
    pairs = [(one, two) for one in range(NUMBERS) for two in range(NUMBERS)]
    write_lines(folder / "prompts.jsonl", [_question(*pair) for pair in pairs])
    rows = []
    for _ in range(80):
        for one, two in pairs:
            answer = rng.randrange(2 * NUMBERS - 1) if rng.random() < RANDOM_FRACTION else one + two
            rows.append({"prompt": f"{one}+{two}=", "completion": LETTERS[answer]})
    rng.shuffle(rows)
    write_lines(folder / "texts.jsonl", rows)


def write_right_answers(path: Path, copies: int) -> None:
    """Write each sum with its right answer, several times."""
    rows = [_question(one, two) for one in range(NUMBERS) for two in range(NUMBERS)]
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows] * copies
    random.Random(1).shuffle(rows)
    write_lines(path, rows)


def _question(one: int, two: int) -> dict[str, str]:
    return {"prompt": f"{one}+{two}=", "answer": LETTERS[one + two]}


def xtk(*arguments: object, unless: str = "") -> str:
    """Run a command; return its output, or "" if it failed with the message `unless`."""
    done = subprocess.run(
        [sys.executable, "-m", "xtk", *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode and unless and unless in done.stderr:
        return ""
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def print_now(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def accuracy(student: Path, questions: Path, output: Path) -> float:
    """Return the share of sums whose most likely answer is right."""
    printed = xtk("rollout", student, questions, "--temperature", 0, "--max-completion-length", 6, "--quiet",
                  "--reward", JUDGE, "-o", output, "--force", "--json", unless="no rollout can be used")  # fmt: skip
    return float(json.loads(printed)["mean_reward"]) if printed else 0.0  # 0: all completions are empty


WAYS = ("ce", "byte-kl", "on-policy bpm", "on-policy policy-gradient")


def arguments_of(way: str, teacher: Path, written: Path, cache: Path, prompts: Path) -> list[object]:
    """Return the arguments of `xtk distill STUDENT`, or of `distill-on-policy`, for a way: see `--ways`."""
    if way in ("ce", "right answers"):
        return [written if way == "ce" else written.parent / "right.jsonl", "--loss", "ce"]
    losses, *options = way.removeprefix("on-policy ").split()
    reference = f"{teacher.with_name('reference')}"
    if not way.startswith("on-policy "):
        reference += "-cache"
    elif "--teacher-shift" in options:  # a policy gradient compares observed tokens only
        reference += ":top_k=all"
    options = [reference if word == "reference" else word for word in options]
    options = [*(word for loss in losses.split("+") for word in ("--loss", loss)), *options]
    if not way.startswith("on-policy "):
        return [cache, *options]
    data = written if "--lmbda" in options else prompts
    return [data, *options, "--teacher", f"{teacher}:top_k=all", "--max-completion-length", 6]


def main() -> None:
    """Make data and models, train the students, print their accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", metavar="WAY", help="a way in which all students train before, for half the steps")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="students that train at the same time")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=WAYS,
        help="ce, 'right answers', LOSS or 'on-policy LOSS', also "
        "with '+LOSS' and options of distill; 'on-policy policy-gradient:teacher=none' is a control; "
        "'on-policy policy-gradient:offset=0.5 --reference reference' subtracts the teacher's style",
    )
    given = parser.parse_args()
    logging.set_verbosity_error()
    folder = given.output
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder)
    digits = [*LETTERS, "+", "="]
    numbers = [*LETTERS, *map(str, range(10, NUMBERS)), "+", "="]
    make_model(folder / "blank", make_tokenizer(digits, r"\w|\+|="), Qwen3ForCausalLM, Qwen3Config, 4, 0)
    teacher, prompts = folder / "teacher", folder / "prompts.jsonl"
    xtk("distill", folder / "blank", folder / "texts.jsonl", "--loss", "ce", *TRAINING,
        "--max-steps", given.teacher_steps, "-o", teacher)  # fmt: skip
    xtk("distill", folder / "blank", folder / "texts.jsonl", "--loss", "ce", *TRAINING,
        "--max-steps", 10, "-o", folder / "reference")  # fmt: skip
    print_now(f"teacher, most likely answers: {accuracy(teacher, prompts, folder / 'answers.jsonl'):.3f}")
    count = given.steps * BATCH
    written, cache = folder / "written.jsonl", folder / "cache"
    generations = -(-count // NUMBERS**2)
    printed = xtk("rollout", teacher, prompts, "--num-generations", generations, "--max-completion-length", 6,
               "--seed", 1, "--reward", JUDGE, "--batch-tokens", 65536, "--quiet", "-o", written,
               "--json")  # fmt: skip
    print_now(f"teacher, sampled answers: {json.loads(printed)['mean_reward']:.3f}")
    write_right_answers(folder / "right.jsonl", generations)
    for model, output in ((teacher, cache), (folder / "reference", folder / "reference-cache")):
        xtk("cache-teacher", model, written, "--top-k", 64, "--batch-tokens", 65536, "--quiet", "-o", output)
    steps = [*range(0, given.steps, given.steps // POINTS), given.steps]

    def learn(student: Path, name: str, seed: int, start: float) -> list[float]:
        """Train a student; return its accuracy at the start, at checkpoints and at the end."""
        arguments = arguments_of(name, teacher, written, cache, prompts)
        output = student.parent / "".join(letter if letter.isalnum() else "-" for letter in name)
        command = "distill-on-policy" if name.startswith("on-policy ") else "distill"
        xtk(command, student, *TRAINING, "--max-steps", given.steps, "--seed", seed,
            "--save-steps", given.steps // POINTS, *arguments, "-o", output)  # fmt: skip
        stops = [*(output / f"checkpoint-{step}" for step in steps[1:-1]), output]
        curve = [start, *(accuracy(stop, prompts, Path(f"{output}-answers.jsonl")) for stop in stops)]
        print_now(f"{seed} {name}: {' '.join(f'{value:.3f}' for value in curve)}")
        return curve

    learned: dict[str, list[Future[list[float]]]] = {name: [] for name in given.ways}
    with ThreadPoolExecutor(given.jobs) as pool:
        for seed in range(given.seeds):
            place = folder / str(seed)
            place.mkdir(exist_ok=True)
            tokenizer = make_tokenizer(numbers, r"\d+|[a-zA-Z]|\+|=")
            make_model(place / "blank", tokenizer, LlamaForCausalLM, LlamaConfig, 2, seed)
            student = place / "student"
            xtk("distill", place / "blank", written, "--loss", "ce", *TRAINING, "--max-steps", 10, "--seed", seed,
                "-o", student)  # fmt: skip
            if given.first:
                xtk("distill", student, *arguments_of(given.first, teacher, written, cache, prompts), *TRAINING,
                    "--max-steps", given.steps // 2, "--seed", seed, "-o", place / "first")  # fmt: skip
                student = place / "first"
            start = accuracy(student, prompts, place / "answers.jsonl")
            for name in given.ways:
                learned[name].append(pool.submit(learn, student, name, seed, start))
    curves = {name: [one.result() for one in of_seeds] for name, of_seeds in learned.items()}
    for name, of_seeds in curves.items():
        last = [curve[-1] for curve in of_seeds]
        print_now(f"{name}: {statistics.mean(last):.3f} ({', '.join(f'{value:.3f}' for value in last)})")
    (folder / "curves.json").write_text(json.dumps({"steps": steps, "curves": curves}))
    write_page(folder, steps, curves)


def write_page(folder: Path, steps: list[int], curves: dict[str, list[list[float]]]) -> None:
    """Write a page with a figure of the accuracies: a curve for each student."""
    metric_curves = [
        MetricCurve(f"{name}, seed {seed}", number, list(zip(steps, curve, strict=True)))
        for number, (name, of_seeds) in enumerate(curves.items())
        for seed, curve in enumerate(of_seeds)
    ]
    legend = " ".join(f'<span style="color: {color(number)}">{name}</span>' for number, name in enumerate(curves))
    figure = str(curves_figure("sums answered right", f"by steps of {BATCH} answers", metric_curves))
    content = Markup(f"<p>{legend}</p>\n{figure}")
    (folder / "curves.html").write_text(page("Arithmetic", content), encoding="utf-8")


if __name__ == "__main__":
    main()
