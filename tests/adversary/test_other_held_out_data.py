"""A run in the output folder is not reused by a command that evaluates it on other data or tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_inputs import ODD_TEXTS, sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.runs.metrics_file import read_metrics

OTHER_DATA_MESSAGE = "was evaluated on other --eval-data than requested"
REWARD_CODE = "def score(completion, prompt, row):\n    return {value}\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held-out")
    write_jsonl(folder / "train.jsonl", sentences(8, seed=4))
    write_jsonl(folder / "a.jsonl", sentences(3, seed=5))
    write_jsonl(folder / "b.jsonl", ODD_TEXTS)
    return folder


@pytest.fixture
def distill(pair, data, tmp_path):
    def run(*options: object, name: str = "run", code: int = 0):
        return run_xtk("distill", pair.student, data / "train.jsonl", "--loss", "ce", "--max-steps", 2,
                       "--logging-steps", 1, *options, "-o", tmp_path / name, code=code)  # fmt: skip

    return run


def bits_per_byte(folder: Path) -> list[float]:
    return [
        line["eval_bits_per_byte"] for line in read_metrics(folder / "metrics.jsonl") if "eval_bits_per_byte" in line
    ]


def test_finished_run_is_reused_only_with_its_held_out_data(distill, data, tmp_path):
    distill("--eval-data", data / "a.jsonl")
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    distill("--eval-data", data / "a.jsonl")
    distill()  # requests no evaluation
    stderr = distill("--eval-data", data / "b.jsonl", code=1).stderr
    assert OTHER_DATA_MESSAGE in stderr
    assert "xtk evaluate" in stderr
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    distill("--eval-data", data / "b.jsonl", "--force")
    assert bits_per_byte(tmp_path / "run") != []
    distill(name="without")
    assert "evaluated without --eval-data" in distill("--eval-data", data / "a.jsonl", name="without", code=1).stderr


def test_extended_held_out_data_is_other_data(distill, data, tmp_path):
    held_out = tmp_path / "grows.jsonl"
    held_out.write_bytes((data / "a.jsonl").read_bytes())
    distill("--eval-data", held_out)
    held_out.write_bytes((data / "a.jsonl").read_bytes() + (data / "b.jsonl").read_bytes())
    assert OTHER_DATA_MESSAGE in distill("--eval-data", held_out, code=1).stderr


def test_stopped_run_resumes_only_with_the_same_held_out_data(distill, data, tmp_path):
    stop_early = ("--eval-steps", 1, "--max-seconds", 0.001)
    distill("--eval-data", data / "a.jsonl", *stop_early, code=75)
    assert OTHER_DATA_MESSAGE in distill("--eval-data", data / "b.jsonl", "--eval-steps", 1, code=1).stderr
    distill("--eval-data", data / "a.jsonl", "--eval-steps", 1)
    assert len(bits_per_byte(tmp_path / "run")) == 2
    # A run that started without evaluation can add one.
    distill(*stop_early[2:], name="late", code=75)
    distill("--eval-data", data / "a.jsonl", name="late")
    distill("--eval-data", data / "a.jsonl", name="late")
    assert OTHER_DATA_MESSAGE in distill("--eval-data", data / "b.jsonl", name="late", code=1).stderr


def test_other_tasks_or_rewards_are_refused(distill, data, tmp_path):
    (tmp_path / "judge.py").write_text(REWARD_CODE.format(value=1.0))
    rows = [{"prompt": "Anna has 12 apples and"}, {"prompt": "Bert has 3"}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"{tmp_path}/problems.jsonl:reward={tmp_path}/judge.py:score,max_completion_length=4"
    distill("--eval-tasks", task)
    distill("--eval-tasks", task)
    assert "other --eval-tasks" in distill("--eval-tasks", task.replace("=4", "=5"), code=1).stderr
    (tmp_path / "judge.py").write_text(REWARD_CODE.format(value=2.0))
    assert "other --eval-tasks" in distill("--eval-tasks", task, code=1).stderr


def test_sweep_does_not_average_runs_with_different_held_out_data(pair, data, tmp_path):
    def sweep(seeds: str, held_out: str, code: int = 0):
        extra = ("--vary", f"seed={seeds}", "--eval-data", data / held_out)
        return run_xtk("sweep", pair.student, data / "train.jsonl", "--loss", "ce", "--max-steps", 1, *extra, "--json",
                       "-o", tmp_path / "s", code=code)  # fmt: skip

    sweep("0", "a.jsonl")
    done = sweep("0 1", "b.jsonl", code=1)
    assert "seed=0 failed with exit code 1\n    xtk: the run in the output folder " + OTHER_DATA_MESSAGE in done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(record["state"], record["seed_means"]["runs"]) for record in records] == [("failed", 1), ("finished", 1)]
    (tmp_path / "s" / "seed=1").rename(tmp_path / "seed=1")
    sweep("0 1", "a.jsonl")


def test_on_policy_steps_log_no_cross_entropy(pair, tmp_path):
    rows = [{"prompt": f"{name} has 12 apples and", "completion": " gives 2."} for name in ("Anna", "Bert", "Clara")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_xtk("distill-on-policy", pair.student, tmp_path / "prompts.jsonl", "--teacher", f"{pair.teacher}:top_k=16",
            "--loss", "ce", "--loss", "byte-kl", "--lmbda", 0.5, "--per-device-train-batch-size", 2, "--max-steps", 8,
            "--max-completion-length", 6, "--logging-steps", 1, "-o", tmp_path / "out")  # fmt: skip
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert {line["is_on_policy_step"] for line in lines} == {0, 1}
    assert all(("ce" in line) != line["is_on_policy_step"] for line in lines)
    assert all(line.get("ce", 1) > 0 for line in lines)
    manifest = json.loads((tmp_path / "out" / "xtk.json").read_text())
    assert manifest["metrics"]["ce"] == [line["ce"] for line in lines if "ce" in line][-1]


@pytest.mark.parametrize("kind", ["users only", "other role", "empty completions", "no tool calls", "plain text"])
def test_data_without_trained_text_is_refused(pair, tmp_path, kind):
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
    valid_row = {"prompt": "Anna has", "completion": " 3 apples"}
    if kind == "empty completions":
        (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 3 + json.dumps(valid_row) + "\n")
        assert "3 of 4 checked documents have no text to train" in run_xtk(*command, "-o", tmp_path / "p").stderr
    elif "--train-on" in command:
        for regions in ("answer", "end-of-turn", "answer,tool-call"):
            run_xtk(*command[:-1], regions, "-o", tmp_path / regions)
