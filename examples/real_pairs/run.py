"""Distill pretrained students from pretrained teachers with other tokenizers, and print tables of all losses.

    XTK_DATA=FOLDER python examples/real_pairs/run.py OUTPUT [--short] [--pairs code text ...] [--seeds 5]

Downloads the models (`xtk/quickstart/pretrained_models.py`), writes texts (`pair_texts.py`), teacher caches and
students, and measures them. Each step is a command that is printed before it runs, so that it can be copied. Results
are stored in OUTPUT/results.jsonl; after an interruption the same command continues. `pair_tables.py OUTPUT` prints the
tables again.

By default, each student takes 125 steps of 4 documents. A line takes less than an hour on two cores, TRL's trainers,
which run the teacher in each step, about an hour. `--short` takes minutes without other work: one pair, the smaller
teacher, three lines, 40 steps, one seed. Needs `pip install '.[gguf]'`, for TRL's lines also `trl`, and XTK_DATA: a
folder with `corpora` (GSM8K, HumanEval, WikiText-2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pair_texts as texts
from pair_results import Results, file_name_part
from pairs import (
    GEMMA,
    NOT_TRAINED,
    PAIRS,
    QWEN,
    QWEN_SMALL,
    SHORT_LINES,
    SMALL_FUNCTIONS,
    START_TOKENS,
    TEACHER,
    Line,
    Pair,
)

from xtk.models.resolver import resolve_model_folder
from xtk.quickstart.pretrained_models import MODELS, download_model

TRL_SCRIPT = Path(__file__).parents[2] / "tests" / "benchmarks" / "trl_gold_trainer.py"
TRAINING = ("--warmup-ratio", 0.1, "--weight-decay", 0, "--save-steps", 0, "--lr-scheduler-type", "cosine")
TOP_K = 64  # stored for the test set, where both models are compared
REWARD = "gsm8k:last_number_fallback=true"
GENERATION = ("--temperature", 0.7, "--max-completion-length", 256)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
BEGINNING_LINES, BEGINNING_CHARACTERS = 2, 100  # of a function, of another text: the prompts of the teacher's answers


@dataclass(frozen=True)
class Size:
    """How much is trained and measured."""

    documents: int = 500
    held_out: int = 60
    steps: int = 125
    batch: int = 4
    seeds: int = 3
    problems: int = 0
    teacher_answers: int = 1  # whether the test set includes the teacher's answers
    start_token: int = 1  # whether students that have none get one of `START_TOKENS`; not in conversations
    bf16: int = 0  # whether the teacher computes in bf16, and the student trains in it over float32 weights
    weights: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    learning_rates: tuple[float, ...] = (1e-4,)


SHORT = Size(documents=160, held_out=24, steps=40, seeds=1, weights=(0.3, 1.0), teacher_answers=0)


def command(*words: object) -> str:
    """Print an `xtk` command, run it and return what it prints."""
    arguments = [str(word) for word in words]
    sys.stdout.write(f"$ xtk {shlex.join(arguments)}\n")
    sys.stdout.flush()
    return _run(["-m", "xtk", *arguments])


def _run(arguments: Sequence[str]) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"this command failed with exit code {done.returncode}; see its error above")
    return done.stdout.strip()


@dataclass(frozen=True)
class Candidate:
    """One setting of a line: a weight of cross-entropy and a learning rate."""

    line: Line
    learning_rate: float

    @property
    def name(self) -> str:
        """The line's name, and the learning rate unless it is the first of the grid."""
        return f"{self.line.name} lr={self.learning_rate:g}"


class Experiment:
    """Trains and measures the students of one pair.

    Args:
        name: the pair's name.
        folder: folder of all results.
        models: folder of the downloaded models.
        size: how much is trained and measured.
    """

    def __init__(self, name: str, pair: Pair, folder: Path, models: Path, size: Size, results: Results) -> None:
        self.name, self.pair, self.folder, self.size, self.results = name, pair, folder, size, results
        self.teacher, self.student = models / pair.teacher, models / pair.student
        self.data = folder / "data"
        self.caches = folder / "caches" / f"{Path(pair.teacher).stem}-{pair.data}"
        self.given_student, self.is_prepared = self.student, False
        if pair.tokenizer:
            self.student = folder / f"{self.student.stem}-with-{Path(pair.tokenizer).stem}-tokens"
        elif pair.data == "maths" and pair.student == GEMMA:
            self.student = folder / f"{self.student.stem}-chat"

    def prepare(self) -> None:
        """Write the data that needs a teacher, the caches, and a student that is changed before training, once."""
        if self.is_prepared:
            return
        self.is_prepared = True
        self.caches.parent.mkdir(exist_ok=True)
        if self.pair.data == "maths":
            self._write_right_answers()
        for part, options in (("train", []), ("test", ["--top-k", TOP_K, "--precision", "float32"])):
            command(
                "cache-teacher", self.teacher, self.texts(part), *options, *self.dtype, "-o", f"{self.caches}-{part}"
            )
        if self.pair.tokenizer:
            command("transplant", self.given_student, self.teacher.with_name(self.pair.tokenizer), "-o", self.student)
        elif self.student != self.given_student:
            with_chat_template(self.given_student, self.student)

    @property
    def start_token(self) -> list[str]:
        """The option of the student's start token."""
        token = START_TOKENS.get(self.pair.student) if self.size.start_token and self.pair.data != "maths" else None
        return ["--start-token", token] if token else []

    @property
    def dtype(self) -> list[str]:
        """The option of the teacher's data type."""
        return ["--dtype", "bfloat16"] if self.size.bf16 else []

    def texts(self, part: str) -> Path:
        """Return the file of the train, dev or test set; maths: the teacher's answers."""
        prefix = self.caches.name if self.pair.data == "maths" else self.pair.data
        return self.data / f"{prefix}-{part}.jsonl"

    def _write_right_answers(self) -> None:
        """Write the teacher's right answers to questions as conversations: train, dev and test."""
        documents, held_out = self.size.documents, self.size.held_out
        wanted = {"train": ("maths-prompts", 0, documents), "dev": ("maths-prompts", documents, held_out),
                  "test": ("maths-problems", 0, held_out)}  # fmt: skip
        for part, (source, first, count) in wanted.items():
            if self.texts(part).is_file():
                continue
            rows = texts.read_rows(self.data / f"{source}.jsonl")[2 * first : 2 * (first + count)]
            prompts = texts.write_rows(self.data / f"{self.caches.name}-{part}-prompts.jsonl", rows)
            answers = self.data / f"{self.caches.name}-{part}-answers.jsonl"
            command("rollout", self.teacher, prompts, "--apply-chat-template", "--reward", REWARD, *GENERATION,
                    *self.dtype, "-o", answers)  # fmt: skip
            texts.write_rows(self.texts(part), right_answers(rows, texts.read_rows(answers), count))

    def answers(self, part: str) -> Path:
        """Return the teacher's continuations of the beginnings of the training or test texts."""
        if self.pair.data == "maths":
            return self.texts(part)
        beginnings = self.data / f"{self.pair.data}-{part}-beginnings.jsonl"
        if not beginnings.is_file():
            rows = texts.read_rows(self.texts(part))
            texts.write_rows(beginnings, [{"prompt": beginning(texts.whole_text(row), self.pair.data)} for row in rows])
        output = self.data / f"{self.caches.name}-{part}-answers.jsonl"
        command("rollout", self.teacher, beginnings, *GENERATION, *self.dtype, "-o", output)
        return output

    def candidates(self, line: Line) -> list[Candidate]:
        """Return the settings of a line."""
        weights = self.size.weights if line.has_grid else (1.0,)
        return [Candidate(line.with_weight(weight), rate) for weight in weights for rate in self.size.learning_rates]

    def train(self, candidate: Candidate, seed: int) -> Path:
        """Train a student, store its bits per byte of the development set, and return its folder."""
        self.prepare()
        output = self._run_folder(candidate, seed)
        if candidate.line.continues:
            self.train(Candidate(self.pair.default, self.size.learning_rates[0]), seed)
        output.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        if candidate.line.source == "trl":
            self._train_with_trl(candidate, seed, output)
            bits = _bits(command("evaluate", output, self.texts("dev"), "--json"))
        else:
            command(*self._distill_arguments(candidate, seed), "-o", output)
            bits = json.loads((output / "xtk.json").read_text(encoding="utf-8"))["metrics"]["eval_bits_per_byte"]
        self.results.add((self.name, candidate.name, seed, "dev"), {"bits_per_byte": bits}, started)
        return output

    def _run_folder(self, candidate: Candidate, seed: int) -> Path:
        return self.folder / "runs" / self.name / f"{file_name_part(candidate.name)}-{seed}"

    def _distill_arguments(self, candidate: Candidate, seed: int) -> list[object]:
        line = candidate.line
        losses = [word for loss in line.losses for word in ("--loss", loss)]
        options = [*TRAINING, "--max-steps", self.size.steps, "--per-device-train-batch-size", self.size.batch,
                   "--learning-rate", f"{candidate.learning_rate:g}", "--seed", seed, "--eval-data", self.texts("dev"),
                   *self.start_token, *(["--mixed-precision", "bf16"] if self.size.bf16 else []),
                   *(self._in_bf16(self.teacher.with_name(word)) if word in MODELS else word
                     for word in line.options)]  # fmt: skip
        if line.source == "prompts":
            prompts = self.data / f"{self.caches.name}-train-prompts.jsonl"
            default = self._run_folder(Candidate(self.pair.default, self.size.learning_rates[0]), seed)
            student = default if line.continues else self.student
            teacher = self._in_bf16(self.teacher)
            return ["distill-on-policy", student, prompts, "--teacher", teacher, *losses, *options,
                    "--apply-chat-template", "--max-completion-length", 256]  # fmt: skip
        source = self.answers("train") if line.source == "answers" else f"{self.caches}-train"
        return ["distill", self.student, source, *losses, *options]

    def _in_bf16(self, model: Path) -> str:
        """Return a teacher's name with its data type, where it computes in the process of the student."""
        return f"{model}:dtype=bfloat16" if self.size.bf16 else str(model)

    def _train_with_trl(self, candidate: Candidate, seed: int, output: Path) -> None:
        if (output / "config.json").is_file():
            return
        loss, *weighted = candidate.line.losses
        weight = weighted[0].partition("=")[2] or "1" if weighted else "0"
        models = [resolve_model_folder(str(model), with_weights=True) for model in (self.student, self.teacher)]
        options = ["--steps", self.size.steps, "--batch", self.size.batch, "--learning-rate", candidate.learning_rate,
                   "--seed", seed, "--ce", weight, "--weight-decay", 0, "--schedule", "cosine",
                   *(["--uld"] if loss == "uld" else [])]  # fmt: skip
        arguments = [str(word) for word in [TRL_SCRIPT, *models, self.texts("train"), output, *options]]
        sys.stdout.write(f"$ python {shlex.join(arguments)}\n")
        sys.stdout.flush()
        _run(arguments)

    def measure(self, name: str, model: Path, seed: int) -> None:
        """Measure a model on the test set and on texts of other kinds, unless the results have it."""
        for measure in self._missing_measures(name, seed):
            self.prepare()
            started = time.monotonic()
            figures = self._figures(measure, model, name)
            self.results.add((self.name, name, seed, measure), figures, started)

    def _missing_measures(self, name: str, seed: int) -> list[str]:
        """Return the measures of a line that the results do not have."""
        answers = ["teacher's answers"] if self.size.teacher_answers and self.pair.data != "maths" else []
        tasks = {"code": ["solved", SMALL_FUNCTIONS], "maths": ["solved"]}.get(self.pair.data, [])
        solved = tasks if self.size.problems else []
        measures = ("test", *self.pair.other, *answers, *solved)
        return [measure for measure in measures if (self.name, name, seed, measure) not in self.results.figures]

    def _figures(self, measure: str, model: Path, name: str) -> dict[str, Any]:
        if measure in ("solved", SMALL_FUNCTIONS):
            return self._solved(model, "small-functions" if measure == SMALL_FUNCTIONS else "humaneval")
        # A trained student was saved with its start token.
        own = {TEACHER: self.dtype, NOT_TRAINED: self.start_token}
        options = ["--json", *own.get(name, [])]
        if measure != "test":
            other = self.answers("test") if measure == "teacher's answers" else self.data / f"{measure}.jsonl"
            return {"bits_per_byte": _bits(command("evaluate", model, other, *options))}
        source = self.texts("test") if name == TEACHER else f"{self.caches}-test"
        row = json.loads(command("evaluate", model, source, "--by-category", *options))
        figures = {name: row[name] for name in ("bits_per_byte", "byte-kl", "top1_agreement") if name in row}
        return figures | {kind: values["bits_per_byte"] for kind, values in row["categories"].items()}

    def _solved(self, model: Path, tasks: str) -> dict[str, Any]:
        """Return the share of solved problems: GSM8K's for maths, otherwise of code tasks (ten samples each)."""
        count = ["--max-prompts", self.size.problems, "--json"]
        if self.pair.data == "maths":
            problems = [self.data / "maths-problems.jsonl", "--apply-chat-template", "--reward", REWARD]
        else:
            problems = [self.data / f"{tasks}-problems.jsonl", "--reward", "tests", "--num-generations", 10,
                        "--temperature", 0.8]  # fmt: skip
        row = json.loads(command("evaluate-answers", model, *problems, *count))
        return {name: row[name] for name in ("pass@1", "pass@10", "truncated_fraction", "mean_length") if name in row}

    def run(self, lines: Sequence[Line]) -> None:
        """Train and measure all lines: seed 0 chooses settings on the development set, other seeds repeat them."""
        self.measure(TEACHER, self.teacher, 0)
        self.measure(NOT_TRAINED, self.student, 0)
        chosen: list[Candidate] = []
        for line in lines:
            candidates = self.candidates(line)
            for candidate in candidates:
                if (self.name, candidate.name, 0, "dev") not in self.results.figures:
                    self.train(candidate, 0)
            chosen.append(min(candidates, key=self._development_bits))
            self._complete(chosen[-1], 0)
        for seed in range(1, self.size.seeds):
            for candidate in chosen:
                self._complete(candidate, seed)
        self._compare_documents(list(dict.fromkeys(candidate.name for candidate in chosen)))

    def _complete(self, candidate: Candidate, seed: int) -> None:
        """Train and measure a student, unless the results have all its measures."""
        if self._missing_measures(candidate.name, seed):
            self.measure(candidate.name, self.train(candidate, seed), seed)

    def _development_bits(self, candidate: Candidate) -> float:
        return float(self.results.figures[self.name, candidate.name, 0, "dev"]["bits_per_byte"])

    def _compare_documents(self, names: list[str]) -> None:
        """Store each line's bits per byte minus those of the default, paired by the documents of the test set."""
        models = {name: self.folder / "runs" / self.name / f"{file_name_part(name)}-0" for name in names}
        default = next((name for name in names if name.rpartition(" lr=")[0] == self.pair.default.name), "")
        others = [name for name in names if name != default]
        keys = {name: (self.name, name, 0, "documents") for name in others}
        if default not in models or all(key in self.results.figures for key in keys.values()):
            return
        if not all(model.is_dir() for model in models.values()):
            sys.stdout.write("not compared by document: some students were trained on another machine\n")
            return
        started = time.monotonic()
        compared = [word for name in others for word in ("--compare-to", models[name])]
        printed = command("evaluate", models[default], self.texts("test"), *compared, "--json").splitlines()
        for name, row in zip(others, map(json.loads, printed[1:]), strict=True):
            figures = {
                "difference": -row["difference"],
                "error": row["difference_error"],
                "documents": row["documents"],
            }
            self.results.add(keys[name], figures, started)


def with_chat_template(model: Path, folder: Path) -> None:
    """Write a copy of a base model with the chat template of Gemma's instruct models, whose tokens it has."""
    if not folder.is_dir():
        temporary = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(resolve_model_folder(str(model), with_weights=True), temporary)
        (temporary / "chat_template.jinja").write_text(GEMMA_TEMPLATE, encoding="utf-8")
        temporary.rename(folder)


def right_answers(rows: list[dict[str, Any]], rollouts: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Yield conversations of questions and complete answers that the reward accepts, at most `count`."""
    kept = [rollout for rollout in rollouts if rollout["reward"] == 1.0 and rollout["complete"]]
    for rollout in kept[:count]:
        question = {"role": "user", "content": rows[rollout["prompt_number"]]["prompt"]}
        yield {"messages": [question, {"role": "assistant", "content": completion_text(rollout).strip()}]}


def completion_text(rollout: dict[str, Any]) -> str:
    """Return the text of a rollout's completion."""
    return str(rollout["messages"][-1]["content"] if "messages" in rollout else rollout["completion"])


def beginning(text: str, kind: str) -> str:
    """Return the beginning of a text that a teacher continues."""
    if kind == "code":
        return "\n".join(text.splitlines()[:BEGINNING_LINES])  # a line break and the next indent are one token
    return text[:BEGINNING_CHARACTERS].rpartition(" ")[0]


def _bits(printed: str) -> float:
    return float(json.loads(printed)["bits_per_byte"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", nargs="*", default=None, choices=list(PAIRS), help="default: all")
    parser.add_argument("--lines", nargs="*", default=None, help="names of lines, such as ce:weight={weight}+bpm")
    parser.add_argument("--models", type=Path, help="folder of downloaded models; default: FOLDER/models")
    parser.add_argument("--teacher", choices=("qwen-1.5b", "qwen-0.5b"), help="in place of Qwen's 1.5B")
    parser.add_argument("--short", action="store_true", help="one pair, three lines, 40 steps, one seed, Qwen's 0.5B")
    for one in dataclasses.fields(Size):
        flag = f"--{one.name.replace('_', '-')}"
        if "tuple" in str(one.type):
            parser.add_argument(flag, nargs="*", type=float)
        else:
            parser.add_argument(flag, type=int)
    return parser.parse_args()


def _size(arguments: argparse.Namespace) -> Size:
    size = SHORT if arguments.short else Size()
    changes: dict[str, Any] = {}
    for name in vars(size):
        value = getattr(arguments, name)
        if value is not None:
            changes[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(size, **changes)


def main() -> None:
    """Run the chosen pairs and print their tables."""
    arguments = _arguments()
    corpora = Path(os.environ.get("XTK_DATA", "")) / "corpora"
    if not corpora.is_dir():
        raise SystemExit("set XTK_DATA to a folder with corpora/gsm8k_train.jsonl, HumanEval.jsonl.gz and others")
    size = _size(arguments)
    names = arguments.pairs or (["code"] if arguments.short else list(PAIRS))
    teacher = QWEN_SMALL if arguments.teacher == "qwen-0.5b" or (arguments.short and not arguments.teacher) else QWEN
    folder = arguments.folder.resolve()
    models = (arguments.models or folder / "models").resolve()
    for place in (folder, models):
        place.mkdir(parents=True, exist_ok=True)
    results = Results(folder)
    documents = texts.make_texts(corpora, train=size.documents, held_out=size.held_out)
    inputs = {"teacher": teacher, "texts": texts.checksum(documents), "python": platform.python_version()}
    results.check_settings({**dataclasses.asdict(size), **inputs})
    texts.write_texts(folder / "data", documents)
    for name in names:
        pair = PAIRS[name]
        pair = dataclasses.replace(pair, teacher=teacher) if pair.teacher == QWEN else pair
        lines = SHORT_LINES if arguments.short else pair.lines
        if arguments.lines:
            lines = [line for line in pair.lines if line.name in arguments.lines]
        lines = [line for line in lines if pair.teacher not in line.options]  # a teacher is not its own reference
        options = {word for line in lines for word in line.options}
        for model in {pair.teacher, pair.student, pair.tokenizer, *options} & MODELS.keys():
            download_model(model, models)
        Experiment(name, pair, folder, models, size, results).run(lines)
    from pair_tables import print_tables

    print_tables(folder)


if __name__ == "__main__":
    main()
