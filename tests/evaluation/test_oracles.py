"""An oracle model that contains the answers scores 1 through every path of `xtk evaluate`; other models do not.

Real problems, real model files and the real command; the default tests use some problems, the long tests all.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import lm_eval_tasks
import pytest
from answer_lookup_model import make_oracle

from xtk.errors import XtkError
from xtk.rewards.sandbox import Sandbox


def read_gsm8k(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "corpora" / "gsm8k_test.jsonl").read_text().splitlines()]


def read_human_eval(folder: Path) -> list[dict[str, str]]:
    lines = gzip.decompress((folder / "corpora" / "HumanEval.jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GSM8K = ["--columns", "prompt=question", "--reward", "gsm8k"]
HUMAN_EVAL = ["--reward", "tests:seconds=60"]


@pytest.fixture
def evaluate_problems(run, tmp_path):
    """Return a function that evaluates a model on problems and returns the reported metrics."""

    def evaluate(model: Path, rows: list[dict[str, str]], *arguments: object) -> dict[str, float]:
        path = write_rows(tmp_path / "problems.jsonl", rows)
        result = run(
            "evaluate-answers",
            model,
            path,
            *arguments,
            "--max-completion-length",
            1500,
            "--batch-tokens",
            65536,
            "--trust-remote-code",
            "--json",
            cwd=tmp_path,
            timeout=3000,
        )
        return json.loads(result.stdout)

    return evaluate


@pytest.fixture
def sandbox() -> None:
    try:
        Sandbox().close()
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.mark.slow
def test_oracle_scores_the_problems_of_gsm8k_that_it_knows(evaluate_problems, pair, real_data, tmp_path):
    rows = read_gsm8k(real_data)[:20]
    oracle = make_oracle(tmp_path / "oracle", {row["question"]: row["answer"] for row in rows[:15]})
    found = evaluate_problems(oracle, rows, *GSM8K)
    assert found["avg@1"] == 0.75  # unknown questions get an empty answer
    assert found["problems"] == 20
    assert evaluate_problems(pair.student, rows[:3], *GSM8K)["avg@1"] == 0.0


@pytest.mark.slow
def test_oracle_solves_problems_of_human_eval(evaluate_problems, sandbox, pair, real_data, tmp_path):
    rows = read_human_eval(real_data)[:3]
    oracle = make_oracle(tmp_path / "oracle", {row["prompt"]: row["canonical_solution"] for row in rows})
    assert evaluate_problems(oracle, rows, *HUMAN_EVAL)["pass@1"] == 1.0
    chat_oracle = make_oracle(tmp_path / "chats", {
        f"Write this:\n{row['prompt']}": f"Here:\n```python\n{row['prompt']}{row['canonical_solution']}```\nDone."
        for row in rows})  # fmt: skip
    assert (
        evaluate_problems(chat_oracle, rows, *HUMAN_EVAL, "--prompt-template", "Write this:\n{{prompt}}")["pass@1"]
        == 1.0
    )


@pytest.mark.long
def test_oracle_solves_all_of_gsm8k(evaluate_problems, pair, real_data, tmp_path):
    rows = read_gsm8k(real_data)
    oracle = make_oracle(tmp_path / "oracle", {row["question"]: row["answer"] for row in rows})
    found = evaluate_problems(oracle, rows, *GSM8K)
    assert (found["avg@1"], found["problems"], found["truncated_fraction"]) == (1.0, 1319, 0.0)
    assert evaluate_problems(pair.student, rows, *GSM8K)["avg@1"] < 0.01


@pytest.mark.long
def test_oracle_solves_all_of_human_eval(evaluate_problems, sandbox, pair, real_data, tmp_path):
    rows = read_human_eval(real_data)
    oracle = make_oracle(tmp_path / "oracle", {row["prompt"]: row["canonical_solution"] for row in rows})
    found = evaluate_problems(oracle, rows, *HUMAN_EVAL)
    assert (found["pass@1"], found["problems"], found["unscored"]) == (1.0, 164, 0)
    assert evaluate_problems(pair.student, rows, *HUMAN_EVAL)["pass@1"] == 0.0


@pytest.mark.parametrize("count", [12, pytest.param(1319, marks=pytest.mark.long)])
def test_oracle_solves_gsm8k_as_a_harness_task(run, real_data, tmp_path, count):
    pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    rows = read_gsm8k(real_data)[:count]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    numbers = [{"function": "regex", "regex_pattern": "#### (-?[0-9.,]+)"}, {"function": "take_first"}]
    (tmp_path / "gsm8k.yaml").write_text(lm_eval_tasks.make_task_yaml(
        "gsm8k_here", data, output_type="generate_until", doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_target="{{answer.split('####')[-1].strip()}}", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\nQuestion:"], "max_gen_toks": 1500},
        filter_list=[{"name": "strict", "filter": numbers}]))  # fmt: skip
    oracle = make_oracle(
        tmp_path / "oracle", {f"Question: {row['question']}\nAnswer:": " " + row["answer"] for row in rows}
    )
    proc = run("evaluate-tasks", oracle, "gsm8k_here", "--include-path", tmp_path, "--trust-remote-code", "--json",
               "--batch-size", 32, cwd=tmp_path, timeout=3000)  # fmt: skip
    scores = json.loads(proc.stdout)["results"]["gsm8k_here"]
    assert (scores["exact_match,strict"], scores["problems"]) == (1.0, count)
