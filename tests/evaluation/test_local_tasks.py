"""MMLU, HumanEval+ and MBPP+ from local folders in the layout of the Hub, written by the tests, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from answer_lookup_model import make_oracle

from xtk.errors import XtkError
from xtk.evaluation.local_task_data import CODE_TASKS, parse_tasks
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.rewards.sandbox import Sandbox
from xtk.text.tokenizer import Tokenizer
from xtk.training.task_evaluation import parse_eval_task

pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")

import lm_eval.tasks

from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig

ADD = {"task_id": "HumanEval/0", "entry_point": "add", "prompt": 'def add(a, b):\n    """Add."""\n',
       "canonical_solution": "    return a + b\n", "test": "import numpy as np\n\ndef check(candidate):\n"
       "    for a, b in [(1, 2), (3, -4)]:\n        assert np.isclose(candidate(a, b), a + b)\n"}  # fmt: skip
DOUBLE = {**ADD, "task_id": "HumanEval/1", "entry_point": "double", "prompt": 'def double(a):\n    """Twice."""\n',
          "canonical_solution": "    return 2 * a\n",
          "test": "def check(candidate):\n    assert candidate(2) == 4\n"}  # fmt: skip
SQUARE = {"task_id": 2, "code": "def square(a):\n    return a * a", "prompt": "Write a function that squares.",
          "source_file": "x", "test_imports": ["import math"], "test_list": ["assert square(2) == 4"],
          "test": "import math\nfor a in range(9):\n    assert math.isclose(square(a), a ** 2)\n"}  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def questions(subject: str, count: int) -> list[dict]:
    return [{"question": f"What is {n} plus {n}?", "subject": subject, "answer": n % 4,
             "choices": [str(2 * n + (position - n) % 4) for position in range(4)]} for n in range(count)]  # fmt: skip


def write_mmlu(folder: Path, subjects: list[str], count: int = 8) -> Path:
    for subject in subjects:
        for split, size in (("test", count), ("dev", 5), ("validation", 2)):
            write_rows(folder / subject / f"{split}-00000-of-00001.parquet", questions(subject, size))
    return folder


@pytest.fixture(scope="module")
def mmlu(tmp_path_factory) -> Path:
    return write_mmlu(tmp_path_factory.mktemp("mmlu"), ["anatomy", "virology"])


@pytest.fixture
def sandbox() -> None:
    try:
        Sandbox().close()
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


def reference_choices(model: Path, texts: list[str]) -> list[int]:
    """Return the most likely choice of a model after each text, from full logits in float64."""
    tokenizer, network = Tokenizer(model), load_causal_lm(ModelRef(model, dtype="float64")).eval()
    choices = []
    for text in texts:
        sums = []
        for choice in "ABCD":
            prompt_ids, full_ids = (one.ids.astype(np.int64) for one in tokenizer.encode([text, f"{text} {choice}"]))
            with torch.no_grad():
                logprobs = network(input_ids=torch.from_numpy(full_ids)[None]).logits[0].log_softmax(-1)
            continuation = np.arange(len(prompt_ids), len(full_ids))
            sums.append(float(logprobs[continuation - 1, full_ids[continuation]].sum()))
        choices.append(int(np.argmax(sums)))
    return choices


def test_mmlu_prompts_and_scores_equal_those_of_the_harness(run, pair, mmlu, tmp_path):
    result = run("evaluate-tasks", pair.student, f"mmlu_anatomy={mmlu},mmlu_virology={mmlu}", "--num-fewshot", 1,
                 "-o", "answers.jsonl", "--json", cwd=tmp_path)  # fmt: skip
    scores = json.loads(result.stdout)["results"]
    assert (scores["mmlu_anatomy"]["problems"], scores["mmlu_anatomy"]["num_fewshot"]) == (8, 1)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    prompts = [one["prompt"][0][0] for one in answers if one["task"] == "mmlu_virology"]

    def format_question(row: dict) -> str:
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return f"{row['question']}\n{choices}\nAnswer:"

    rows = questions("virology", 8)
    header = "The following are multiple choice questions (with answers) about virology.\n\n"
    example = f"{format_question(rows[0])} {'ABCD'[rows[0]['answer']]}\n\n"
    assert prompts == [f"{header}{example}{format_question(row)}" for row in rows]
    is_correct = [
        choice == row["answer"] for choice, row in zip(reference_choices(pair.student, prompts), rows, strict=True)
    ]
    assert scores["mmlu_virology"]["acc"] == np.mean(is_correct)


@pytest.mark.slow
def test_mmlu_reports_all_subjects_and_groups(pair, tmp_path):
    task_files_folder = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in task_files_folder.glob("mmlu_*.yaml"))
    folder = write_mmlu(tmp_path / "mmlu", subjects, 1)
    scores = Harness(HarnessConfig(("mmlu",), task_folders={"mmlu": str(folder)})).evaluate(
        load_causal_lm(ModelRef(pair.student)), Tokenizer(pair.student)
    )
    assert len(scores.num_problems) == len(subjects) == 57
    assert {"mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_other", "mmlu_social_sciences"} <= scores.metrics.keys()
    means = [scores.metrics[f"mmlu_{subject}"]["acc"][0] for subject in subjects]
    assert scores.metrics["mmlu"]["acc"][0] == pytest.approx(np.mean(means))


def test_code_tasks_are_run_in_the_sandbox(run, sandbox, pair, tmp_path):
    write_rows(tmp_path / "humaneval" / "data" / "test-00000-of-00001-f7.parquet", [ADD, DOUBLE])
    write_rows(tmp_path / "mbpp" / "data" / "test-00000-of-00001-0.parquet", [SQUARE])
    mbpp_prompt = f'"""\n{SQUARE["prompt"]}\n{SQUARE["test_list"][0]}\n"""\n'
    answers = {ADD["prompt"]: ADD["canonical_solution"], DOUBLE["prompt"]: "    pass\n"}
    model = make_oracle(tmp_path / "oracle", {**answers, mbpp_prompt: SQUARE["code"] + '\n"""\nprint(1'})
    tasks = "humaneval_plus=humaneval,mbpp_plus=mbpp"
    result = run("evaluate-tasks", model, tasks, "--trust-remote-code", "--compare-to", pair.student, "--json",
                 "-o", "answers.jsonl", cwd=tmp_path)  # fmt: skip
    first, second = (json.loads(line)["results"] for line in result.stdout.splitlines())
    assert (first["humaneval_plus"]["pass@1"], first["humaneval_plus"]["problems"]) == (0.5, 2)
    assert (first["mbpp_plus"]["pass@1"], first["mbpp_plus"]["problems"]) == (1.0, 1)
    assert second["humaneval_plus"]["pass@1"] == second["mbpp_plus"]["pass@1"] == 0.0
    assert second["humaneval_plus"]["pass@1_difference"] == 0.5
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["pass@1"] for answer in answers] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    table = run("evaluate-tasks", model, tasks, "--trust-remote-code", "--max-prompts", 1, cwd=tmp_path).stdout
    assert "humaneval_plus" in table
    assert "1.0000" in table


@pytest.mark.slow
def test_student_is_evaluated_on_local_tasks_during_training(run, sandbox, pair, mmlu, corpus, tmp_path):
    write_rows(tmp_path / "humaneval" / "test-00000-of-00001.parquet", [ADD])
    run("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 1, "--eval-steps", 1, "--eval-tasks",
        f"mmlu_anatomy={mmlu},humaneval_plus=humaneval:max_prompts=2", "-o", "out", cwd=tmp_path)  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    metrics = {key: value for line in records for key, value in line.items()}
    assert {"eval_mmlu_anatomy/acc", "eval_humaneval_plus/pass@1"} <= metrics.keys()


def test_unreadable_task_folders_are_refused(mmlu, tmp_path):
    (tmp_path / "empty").mkdir()
    for tasks, message in [
        (f"mmlu={mmlu}", "has no test or no dev files of abstract_algebra, astronomy, business_ethics and 52 more"),
        (f"mmlu_stem={mmlu}", "has no test or no dev files of abstract_algebra"),
        (f"mmlu_astronomy={mmlu}", "has no test or no dev files of astronomy"),
        (f"humaneval_plus={tmp_path / 'empty'}", "humaneval_plus has no file test-*.parquet"),
        ("mmlu=nowhere", "the folder of the task mmlu does not exist"),
        ("gsm8k=.", "no task with a local folder called 'gsm8k'"),
        (f"mmlu_anatomy={mmlu},mmlu_virology={tmp_path}", "read from the same folder"),
        ("mbpp_pluss=.", "did you mean mbpp"),
        (f"mmlu_pro={mmlu}", "no MMLU task with a local folder called 'mmlu_pro'"),
    ]:  # fmt: skip
        with pytest.raises(XtkError) as raised:
            parse_eval_task(tasks)
        assert message in str(raised.value)
    write_rows(tmp_path / "mbpp" / "test-0.parquet", [SQUARE])
    with pytest.raises(XtkError, match="humaneval_plus has no value in the column entry_point"):
        parse_eval_task(f"humaneval_plus={tmp_path / 'mbpp'}")
    write_rows(tmp_path / "odd" / "test-0.parquet", [{"prompt": "x", "text": "y"}])
    for name in CODE_TASKS:
        with pytest.raises(XtkError):
            parse_eval_task(f"{name}={tmp_path / 'odd'}")
    (tmp_path / "odd" / "test-0.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(XtkError):
        parse_eval_task(f"mbpp_plus={tmp_path / 'odd'}")


@pytest.mark.parametrize(
    "change", [{"answer": -1}, {"answer": 4}, {"answer": None}, {"choices": ["1", "2"]}, {"question": None}]
)
def test_invalid_mmlu_rows_are_refused(mmlu, tmp_path, change):
    folder = write_mmlu(tmp_path / "mmlu", ["anatomy"])
    rows = questions("anatomy", 8)
    rows[3] |= change
    write_rows(folder / "anatomy" / "test-00000-of-00001.parquet", rows)
    with pytest.raises(XtkError, match="not a question with 4 choices"):
        parse_eval_task(f"mmlu_anatomy={folder}")


def test_task_names_and_folders_are_parsed(mmlu):
    assert parse_tasks(f"gsm8k, mmlu={mmlu},gsm8k") == (("gsm8k", "mmlu"), {"mmlu": str(mmlu)})
