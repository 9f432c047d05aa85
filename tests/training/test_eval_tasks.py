"""Evaluation tasks during training: metrics equal to those of `xtk evaluate`, and unchanged trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lm_eval_tasks
import pytest

from xtk.errors import XtkError
from xtk.parallel.parallel_config import parse_parallel
from xtk.runs.metrics_file import read_metrics
from xtk.training.task_evaluation import check_supports_eval_tasks, parse_eval_tasks

WITH_HARNESS = pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")

# It uses every random number generator, as a reward may.
REWARD = """
import random
import numpy as np
import torch


def length(completion, prompt, row):
    random.random(), np.random.random(), torch.rand(1)
    return len(completion) / 100
"""


TEMPLATE = (
    "{% if brief is not defined %}{{ raise_exception('brief or not?') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if brief %} In short:{% endif %}"
)
TEMPLATE_KWARGS = '{"brief": true, "kind": 1}'


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory) -> Path:
    """A student with dropout, problems, tasks, and a reward."""
    folder = tmp_path_factory.mktemp("eval-tasks")
    shutil.copytree(pair.student, folder / "student")
    configuration = json.loads((folder / "student" / "config.json").read_text())
    (folder / "student" / "config.json").write_text(json.dumps(configuration | {"attention_dropout": 0.2}))
    (folder / "student" / "chat_template.jinja").write_text(TEMPLATE)
    lm_eval_tasks.write_tasks(folder / "tasks")
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lm_eval_tasks.make_problems(7)))
    (folder / "judge.py").write_text(REWARD)
    return folder


EVAL_TASKS = [
    "--eval-tasks", "problems.jsonl:reward=judge.py:length:weight=2,prompt=question,num_generations=2,temperature=1,"
    f"max_completion_length=8,apply_chat_template=true,chat_template_kwargs={TEMPLATE_KWARGS},seed=3",
    "--eval-tasks", "choose_sum,write_sum:include_path=tasks,num_fewshot=1,apply_chat_template=true,"
    f"chat_template_kwargs={TEMPLATE_KWARGS}",
]  # fmt: skip


@pytest.fixture(scope="module")
def train(run, cache, folder):
    def train_student(name: str, *arguments: object, batch: int = 4, **options: object):
        command = ["distill", "student", cache, "--loss", "ce", "--loss", "byte-kl", "--max-steps", 4, "--save-steps",
                   2, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", batch,
                   "-o", name]  # fmt: skip
        return run(*command, *arguments, cwd=folder, **options)

    return train_student


@pytest.fixture(scope="module")
def evaluated_run(train, folder) -> Path:
    train("run", *EVAL_TASKS, "--eval-steps", 2, "--eval-on-start", "--report-to", "tensorboard")
    return folder / "run"


def eval_metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    """Return a run's evaluation metrics by step."""
    found = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        metrics = {key: value for key, value in record.items() if key.startswith("eval_")}
        if metrics:
            found[record["step"]] = metrics
    return found


@pytest.mark.slow
def test_eval_tasks_do_not_change_the_trained_weights(train, folder, evaluated_run):
    train("plain")
    assert (folder / "plain" / "model.safetensors").read_bytes() == (evaluated_run / "model.safetensors").read_bytes()
    losses = [[record["loss"] for record in read_metrics(folder / name / "metrics.jsonl") if record["step"]]
              for name in ("plain", "run")]  # fmt: skip
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.slow
def test_scheduled_task_metrics_equal_those_of_xtk_evaluate(run, folder, evaluated_run):
    found = eval_metrics_by_step(evaluated_run)
    assert sorted(found) == [0, 2, 4]
    assert "eval_bits_per_byte" not in found[4]
    generation = run("evaluate-answers", "run", "problems.jsonl", "--reward", "judge.py:length:weight=2", "--columns",
                     "prompt=question", "--num-generations", 2, "--temperature", 1, "--max-completion-length", 8,
                     "--seed", 3, "--apply-chat-template", "--chat-template-kwargs", TEMPLATE_KWARGS, "--json",
                     cwd=folder)  # fmt: skip
    generation_results = json.loads(generation.stdout)
    for key in ("avg@2", "avg@2_error", "pass@1", "pass@2", "mean_length", "truncated_fraction"):
        assert found[4][f"eval_problems/{key}"] == pytest.approx(generation_results[key]), key
    assert found[4]["eval_problems/avg@2"] != found[0]["eval_problems/avg@2"]
    harness = run("evaluate-tasks", "run", "choose_sum,write_sum", "--include-path", "tasks", "--num-fewshot", 1,
                  "--apply-chat-template", "--chat-template-kwargs", TEMPLATE_KWARGS, "--json", cwd=folder)  # fmt: skip
    for task, scores in json.loads(harness.stdout)["results"].items():
        for metric in scores.keys() - {"problems", "num_fewshot"}:
            assert found[4][f"eval_{task}/{metric}"] == pytest.approx(scores[metric]), metric
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in (evaluated_run / "trackers").rglob("*tfevents*")}
    tags = {tag for one in folders for tag in EventAccumulator(str(one)).Reload().Tags()["scalars"]}
    assert {"eval_choose_sum/acc", "eval_problems/truncated_fraction"} <= tags


@pytest.mark.long
def test_two_processes_split_the_problems_and_log_the_same_metrics(train, folder, evaluated_run):
    train("two", *EVAL_TASKS, "--eval-steps", 2, "--num-processes", 2, batch=2)
    one, two = eval_metrics_by_step(evaluated_run), eval_metrics_by_step(folder / "two")
    assert sorted(two) == [2, 4]
    for step, found in two.items():
        assert found.keys() == one[step].keys()
        assert found == pytest.approx(one[step], abs=0.03)  # each process samples dropout for its own documents


def test_task_identity_depends_on_file_contents_and_not_on_paths(folder, tmp_path):
    def identity(tasks: Path) -> list[object]:
        (task,) = parse_eval_tasks([f"choose_sum:include_path={tasks}"])
        return task.identity

    expected = identity(folder / "tasks")
    assert identity(shutil.copytree(folder / "tasks", tmp_path / "elsewhere")) == expected
    changed = shutil.copytree(folder / "tasks", tmp_path / "changed")
    (changed / "sums.jsonl").write_text((changed / "sums.jsonl").read_text().replace("1 + 1", "2 + 1"))
    assert identity(changed) != expected
    (tmp_path / "elsewhere" / "__pycache__").mkdir()
    (tmp_path / "elsewhere" / "__pycache__" / "functions.cpython-312.pyc").write_bytes(b"compiled")
    assert identity(tmp_path / "elsewhere") == expected


def test_any_template_and_reward_text_has_an_identity(folder):
    """A text that looks like `FILE.py:NAME` but is too long for a file name is not a file."""
    text = "x" * 300 + "{{ question }} in a file.py: "
    for options in (f"reward=gsm8k,prompt_template={text}", f"reward=regex:pattern=a.py:{'b' * 300}.py:(c)"):
        (task,) = parse_eval_tasks([f"{folder / 'problems.jsonl'}:{options},prompt=question"])
        assert task.identity


@pytest.mark.parametrize("parallel", ["fsdp=2", "tp=2"])
def test_eval_tasks_refuse_a_sharded_student(folder, monkeypatch, parallel):
    monkeypatch.chdir(folder)
    tasks = parse_eval_tasks(["problems.jsonl:reward=gsm8k,prompt=question"])
    with pytest.raises(XtkError, match="--eval-tasks needs an unsharded student"):
        check_supports_eval_tasks(tasks, parse_parallel(parallel, 2))
    check_supports_eval_tasks(tasks, parse_parallel("dp=2", 2))
    check_supports_eval_tasks((), parse_parallel(parallel, 2))


def test_invalid_eval_tasks_are_refused_before_training(train, folder, monkeypatch):
    refused = train("never", "--eval-tasks", "problems.jsonl:reward=gsm8k,prompt=nothing", code=1)
    assert (
        "this document has no column nothing; its columns: question" in refused.stderr
    )  # "nothing" is the name of the requested column
    assert not (folder / "never").exists()
    monkeypatch.chdir(folder)
    for text, message in [
        ("problems.jsonl", "--eval-tasks with a data file needs a reward"),
        ("problems.jsonl:prompt=question,reward=gsm8", "did you mean gsm8k?"),
        ("choose_sum:shots=5", "no option of --eval-tasks called 'shots'"),
        ("choose_sum:include_path=tasks,temperature=1", "applies only to problems"),
        ("problems.jsonl:reward=gsm8k,num_fewshot=1", "applies only to lm-evaluation-harness tasks"),
        (
            "problems.jsonl:reward=gsm8k,prompt=question,num_generations=4",
            "num_generations=4 of --eval-tasks generates equal answers at temperature 0",
        ),
        ("problems.jsonl:reward=gsm8k,prompt=question,max_prompts=few", "max_prompts"),
        ("problems.jsonl:reward=gsm8k,prompt=question,chat_template_kwargs=[1]", "not a JSON object"),
        ("run_sum:include_path=tasks", "executes generated code"),
    ]:
        with pytest.raises(XtkError) as raised:
            parse_eval_tasks([text])
        assert message in f"{raised.value} {raised.value.hint}", text
    problems = "problems.jsonl:reward=regex:pattern=^[0-9],[0-9]$,prompt=question"
    for empty in ("", " , ", ",:num_fewshot=1"):
        with pytest.raises(XtkError, match="a value of --eval-tasks is empty"):
            parse_eval_tasks([empty])
    with pytest.raises(XtkError, match="two --eval-tasks have the name problems"):
        parse_eval_tasks([problems, problems])
    assert [one.names for one in parse_eval_tasks([problems, problems + ",name=again"])] == [("problems",), ("again",)]
