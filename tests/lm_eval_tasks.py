"""Tasks of lm-evaluation-harness on local files: additions as a multiple-choice task and as a generation task."""

from __future__ import annotations

import json
from pathlib import Path

NUM_PROBLEMS = 40


def make_problems(count: int = NUM_PROBLEMS) -> list[dict[str, object]]:
    """Return additions, each with two choices, of which the first or the second is right."""
    problems = []
    for number in range(count):
        choices = [str(2 * number), str(2 * number + 3)]
        problems.append({"question": f"{number} + {number} =", "choices": choices[:: 1 if number % 3 else -1],
                         "gold": 0 if number % 3 else 1, "answer": str(2 * number)})  # fmt: skip
    return problems


def make_task_yaml(name: str, data: Path, **more: object) -> str:
    """Return the configuration of a task as JSON, which is valid YAML."""
    return json.dumps({
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train",
        "fewshot_split": "train", **more,
    })  # fmt: skip


def write_tasks(folder: Path) -> Path:
    """Write a folder of tasks: choose_sum, write_sum, the group of both, and run_sum with `unsafe_code`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in make_problems()))
    choose_task = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
                   "doc_to_target": "gold", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    write_task = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "answer",
                  "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
                  "filter_list": [{"name": "number", "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"},
                                                                {"function": "take_first"}]}]}  # fmt: skip
    (folder / "choose.yaml").write_text(make_task_yaml("choose_sum", data, **choose_task))
    (folder / "write.yaml").write_text(make_task_yaml("write_sum", data, **write_task))
    (folder / "unsafe.yaml").write_text(make_task_yaml("run_sum", data, **write_task, unsafe_code=True))
    group = {"group": "sums", "task": ["choose_sum", "write_sum"]}
    (folder / "sums.yaml").write_text(json.dumps(group))
    return folder
