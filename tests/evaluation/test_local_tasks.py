"""MMLU, HumanEval+ and MBPP+ from folders in the form that the hub has them, made here, without a network."""

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
from xtk.rewards.sandbox import Sandbox
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.task_evaluation import parse_eval_task

pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")

import lm_eval.tasks

from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig

ADDS = {"task_id": "HumanEval/0", "entry_point": "add", "prompt": 'def add(a, b):\n    """Add."""\n',
        "canonical_solution": "    return a + b\n", "test": "import numpy as np\n\ndef check(candidate):\n"
        "    for a, b in [(1, 2), (3, -4)]:\n        assert np.isclose(candidate(a, b), a + b)\n"}  # fmt: skip
DOUBLES = {**ADDS, "task_id": "HumanEval/1", "entry_point": "double", "prompt": 'def double(a):\n    """Twice."""\n',
           "canonical_solution": "    return 2 * a\n",
           "test": "def check(candidate):\n    assert candidate(2) == 4\n"}  # fmt: skip
SQUARES = {"task_id": 2, "code": "def square(a):\n    return a * a", "prompt": "Write a function that squares.",
           "source_file": "x", "test_imports": ["import math"], "test_list": ["assert square(2) == 4"],
           "test": "import math\nfor a in range(9):\n    assert math.isclose(square(a), a ** 2)\n"}  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def questions(subject: str, count: int) -> list[dict]:
    return [{"question": f"What is {n} plus {n}?", "subject": subject, "answer": n % 4,
             "choices": [str(2 * n + (place - n) % 4) for place in range(4)]} for n in range(count)]  # fmt: skip


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


def chosen(model: Path, texts: list[str]) -> list[int]:
    """Return the choice that a model finds likeliest after each text, from full logits in float64."""
    tokenizer, network = Tokenizer(model), load_causal_lm(model, dtype=torch.float64).eval()
    found = []
    for text in texts:
        sums = []
        for choice in "ABCD":
            before, whole = (one.ids.astype(np.int64) for one in tokenizer.encode([text, f"{text} {choice}"]))
            with torch.no_grad():
                logprobs = network(input_ids=torch.from_numpy(whole)[None]).logits[0].log_softmax(-1)
            rest = np.arange(len(before), len(whole))
            sums.append(float(logprobs[rest - 1, whole[rest]].sum()))
        found.append(int(np.argmax(sums)))
    return found


def test_mmlu_is_asked_as_the_harness_does(run, pair, mmlu, tmp_path):
    done = run("evaluate", pair.student, "--tasks", f"mmlu_anatomy={mmlu},mmlu_virology={mmlu}", "--num-fewshot", 1,
               "-o", "answers.jsonl", "--json", cwd=tmp_path)  # fmt: skip
    scores = json.loads(done.stdout)["results"]
    assert (scores["mmlu_anatomy"]["problems"], scores["mmlu_anatomy"]["num_fewshot"]) == (8, 1)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    asked = [one["prompt"][0][0] for one in answers if one["task"] == "mmlu_virology"]

    def put(row: dict) -> str:
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return f"{row['question']}\n{choices}\nAnswer:"

    rows = questions("virology", 8)
    head = "The following are multiple choice questions (with answers) about virology.\n\n"
    example = f"{put(rows[0])} {'ABCD'[rows[0]['answer']]}\n\n"
    assert asked == [f"{head}{example}{put(row)}" for row in rows]
    right = [choice == row["answer"] for choice, row in zip(chosen(pair.student, asked), rows, strict=True)]
    assert scores["mmlu_virology"]["acc"] == np.mean(right)


@pytest.mark.slow
def test_all_of_mmlu_has_its_groups(pair, tmp_path):
    own = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in own.glob("mmlu_*.yaml"))
    folder = write_mmlu(tmp_path / "mmlu", subjects, 1)
    scores = Harness(HarnessConfig(("mmlu",), task_folders={"mmlu": str(folder)})).evaluate(
        load_causal_lm(pair.student), Tokenizer(pair.student)
    )
    assert len(scores.num_problems) == len(subjects) == 57
    assert {"mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_other", "mmlu_social_sciences"} <= scores.metrics.keys()
    means = [scores.metrics[f"mmlu_{subject}"]["acc"][0] for subject in subjects]
    assert scores.metrics["mmlu"]["acc"][0] == pytest.approx(np.mean(means))


def test_code_is_run_in_the_sandbox(run, sandbox, pair, tmp_path):
    write_rows(tmp_path / "humaneval" / "data" / "test-00000-of-00001-f7.parquet", [ADDS, DOUBLES])
    write_rows(tmp_path / "mbpp" / "data" / "test-00000-of-00001-0.parquet", [SQUARES])
    put = f'"""\n{SQUARES["prompt"]}\n{SQUARES["test_list"][0]}\n"""\n'
    answers = {ADDS["prompt"]: ADDS["canonical_solution"], DOUBLES["prompt"]: "    pass\n"}
    model = make_oracle(tmp_path / "oracle", {**answers, put: SQUARES["code"] + '\n"""\nprint(1'})
    tasks = "humaneval_plus=humaneval,mbpp_plus=mbpp"
    done = run("evaluate", model, "--tasks", tasks, "--trust-remote-code", "--compare-to", pair.student, "--json",
               "-o", "answers.jsonl", cwd=tmp_path)  # fmt: skip
    first, second = (json.loads(line)["results"] for line in done.stdout.splitlines())
    assert (first["humaneval_plus"]["pass@1"], first["humaneval_plus"]["problems"]) == (0.5, 2)
    assert (first["mbpp_plus"]["pass@1"], first["mbpp_plus"]["problems"]) == (1.0, 1)
    assert second["humaneval_plus"]["pass@1"] == second["mbpp_plus"]["pass@1"] == 0.0
    assert second["humaneval_plus"]["pass@1_difference"] == 0.5
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["pass@1"] for one in answers] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    table = run("evaluate", model, "--tasks", tasks, "--trust-remote-code", "--max-prompts", 1, cwd=tmp_path).stdout
    assert "humaneval_plus" in table
    assert "1.0000" in table


@pytest.mark.slow
def test_a_student_is_asked_while_it_learns(run, sandbox, pair, mmlu, corpus, tmp_path):
    write_rows(tmp_path / "humaneval" / "test-00000-of-00001.parquet", [ADDS])
    run("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 1, "--eval-steps", 1, "--eval-tasks",
        f"mmlu_anatomy={mmlu},humaneval_plus=humaneval:max_prompts=2", "-o", "out", cwd=tmp_path)  # fmt: skip
    figures = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    told = {key: value for line in figures for key, value in line.items()}
    assert {"eval_mmlu_anatomy/acc", "eval_humaneval_plus/pass@1"} <= told.keys()


def test_what_cannot_be_read_is_told(mmlu, tmp_path):
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
        with pytest.raises(XtkError) as refused:
            parse_eval_task(tasks)
        assert message in str(refused.value)
    write_rows(tmp_path / "mbpp" / "test-0.parquet", [SQUARES])
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
def test_mmlu_rows_that_cannot_be_scored_are_refused(mmlu, tmp_path, change):
    folder = write_mmlu(tmp_path / "mmlu", ["anatomy"])
    rows = questions("anatomy", 8)
    rows[3] |= change
    write_rows(folder / "anatomy" / "test-00000-of-00001.parquet", rows)
    with pytest.raises(XtkError, match="not a question with 4 choices"):
        parse_eval_task(f"mmlu_anatomy={folder}")


def test_names_and_folders_are_told_apart(mmlu):
    assert parse_tasks(f"gsm8k, mmlu={mmlu},gsm8k") == (("gsm8k", "mmlu"), {"mmlu": str(mmlu)})
