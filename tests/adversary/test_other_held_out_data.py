"""A run in the output folder is not the answer to a request that evaluates it on other data or tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_inputs import ODD, sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.training.metrics_file import read_metrics

OTHER = "was evaluated on other --eval-data than requested"
REWARD = "def score(completion, prompt, row):\n    return {value}\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held-out")
    write_jsonl(folder / "train.jsonl", sentences(8, seed=4))
    write_jsonl(folder / "a.jsonl", sentences(3, seed=5))
    write_jsonl(folder / "b.jsonl", ODD)
    return folder


@pytest.fixture
def distill(pair, data, tmp_path):
    def run(*more: object, name: str = "run", code: int = 0):
        return run_xtk("distill", pair.student, data / "train.jsonl", "--loss", "ce", "--max-steps", 2,
                       "--logging-steps", 1, *more, "-o", tmp_path / name, code=code)  # fmt: skip

    return run


def bits(folder: Path) -> list[float]:
    return [
        line["eval_bits_per_byte"] for line in read_metrics(folder / "metrics.jsonl") if "eval_bits_per_byte" in line
    ]


def test_a_finished_run_is_found_again_only_with_its_held_out_data(distill, data, tmp_path):
    distill("--eval-data", data / "a.jsonl")
    whole = (tmp_path / "run" / "model.safetensors").read_bytes()
    distill("--eval-data", data / "a.jsonl")
    distill()  # requests no evaluation
    refused = distill("--eval-data", data / "b.jsonl", code=1).stderr
    assert OTHER in refused
    assert "xtk evaluate" in refused
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == whole
    distill("--eval-data", data / "b.jsonl", "--force")
    assert bits(tmp_path / "run") != []
    distill(name="without")
    assert "evaluated without --eval-data" in distill("--eval-data", data / "a.jsonl", name="without", code=1).stderr


def test_held_out_data_that_grows_is_other_data(distill, data, tmp_path):
    held_out = tmp_path / "grows.jsonl"
    held_out.write_bytes((data / "a.jsonl").read_bytes())
    distill("--eval-data", held_out)
    held_out.write_bytes((data / "a.jsonl").read_bytes() + (data / "b.jsonl").read_bytes())
    assert OTHER in distill("--eval-data", held_out, code=1).stderr


def test_a_stopped_run_continues_with_the_same_held_out_data_only(distill, data, tmp_path):
    begin = ("--eval-steps", 1, "--max-seconds", 0.001)
    distill("--eval-data", data / "a.jsonl", *begin, code=75)
    assert OTHER in distill("--eval-data", data / "b.jsonl", "--eval-steps", 1, code=1).stderr
    distill("--eval-data", data / "a.jsonl", "--eval-steps", 1)
    assert len(bits(tmp_path / "run")) == 2
    # A run that began without evaluation may get one.
    distill(*begin[2:], name="late", code=75)
    distill("--eval-data", data / "a.jsonl", name="late")
    distill("--eval-data", data / "a.jsonl", name="late")
    assert OTHER in distill("--eval-data", data / "b.jsonl", name="late", code=1).stderr


def test_tasks_and_their_rewards_are_compared(distill, data, tmp_path):
    (tmp_path / "judge.py").write_text(REWARD.format(value=1.0))
    rows = [{"prompt": "Anna has 12 apples and"}, {"prompt": "Bert has 3"}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"{tmp_path}/problems.jsonl:reward={tmp_path}/judge.py:score,max_completion_length=4"
    distill("--eval-tasks", task)
    distill("--eval-tasks", task)
    assert "other --eval-tasks" in distill("--eval-tasks", task.replace("=4", "=5"), code=1).stderr
    (tmp_path / "judge.py").write_text(REWARD.format(value=2.0))
    assert "other --eval-tasks" in distill("--eval-tasks", task, code=1).stderr


def test_a_sweep_does_not_average_runs_on_different_held_out_data(pair, data, tmp_path):
    def sweep(seeds: str, held_out: str, code: int = 0):
        given = ("--vary", f"seed={seeds}", "--eval-data", data / held_out)
        return run_xtk("sweep", pair.student, data / "train.jsonl", "--loss", "ce", "--max-steps", 1, *given, "--json",
                       "-o", tmp_path / "s", code=code)  # fmt: skip

    sweep("0", "a.jsonl")
    refused = sweep("0 1", "b.jsonl", code=1).stderr
    assert "seed=0: the run in the output folder " + OTHER in refused
    assert not (tmp_path / "s" / "seed=1").exists()
    sweep("0 1", "a.jsonl")


def test_steps_on_rollouts_log_no_cross_entropy(pair, tmp_path):
    rows = [{"prompt": f"{name} has 12 apples and", "completion": " gives 2."} for name in ("Anna", "Bert", "Clara")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_xtk("distill", pair.student, tmp_path / "prompts.jsonl", "--teacher", f"{pair.teacher}:top_k=16", "--on-policy",
            "--loss", "ce", "--loss", "byte-kl", "--lmbda", 0.5, "--per-device-train-batch-size", 2, "--max-steps", 8,
            "--max-completion-length", 6, "--logging-steps", 1, "-o", tmp_path / "out")  # fmt: skip
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert {line["is_on_policy_step"] for line in lines} == {0, 1}
    assert all(("ce" in line) != line["is_on_policy_step"] for line in lines)
    assert all(line.get("ce", 1) > 0 for line in lines)
    content = json.loads((tmp_path / "out" / "xtk.json").read_text())
    assert content["metrics"]["ce"] == [line["ce"] for line in lines if "ce" in line][-1]


@pytest.mark.parametrize("kind", ["users only", "other role", "empty completions", "no tool calls", "plain text"])
def test_data_without_anything_to_train_is_refused(pair, tmp_path, kind):
    question = {"role": "user", "content": "12 + 5?"}
    row = {
        "users only": {"messages": [question]},
        "other role": {"messages": [question, {"role": "gpt", "content": "17"}]},
        "empty completions": {"prompt": "Anna has", "completion": ""},
        "no tool calls": {"messages": [question, {"role": "assistant", "content": "17"}]},
        "plain text": {"text": "Anna has 3 apples"},
    }[kind]
    shutil.copytree(pair.student, tmp_path / "student")
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    (tmp_path / "student" / "chat_template.jinja").write_text(template)
    (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 4)
    command = ["distill", tmp_path / "student", tmp_path / "d.jsonl", "--loss", "ce", "--max-steps", 2]
    command += ["--train-on", "tool-call"] if kind in ("no tool calls", "plain text") else []
    assert "none of the 4 documents has text to train" in run_xtk(*command, "-o", tmp_path / "o", code=1).stderr
    assert not (tmp_path / "o" / "model.safetensors").exists()
    good = {"prompt": "Anna has", "completion": " 3 apples"}
    if kind == "empty completions":
        (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 3 + json.dumps(good) + "\n")
        assert "3 of 4 checked documents have no text to train" in run_xtk(*command, "-o", tmp_path / "p").stderr
    elif "--train-on" in command:
        for regions in ("answer", "end-of-turn", "answer,tool-call"):
            run_xtk(*command[:-1], regions, "-o", tmp_path / regions)
