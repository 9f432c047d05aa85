"""Tasks of lm-evaluation-harness on local files: sums, one to choose from two, one to write."""

from __future__ import annotations

import json
from pathlib import Path

COUNT = 40


def rows(count: int = COUNT) -> list[dict[str, object]]:
    """Return sums; the right one of two choices is now the first and now the second."""
    found = []
    for n in range(count):
        choices = [str(2 * n), str(2 * n + 3)]
        found.append({"question": f"{n} + {n} =", "choices": choices[:: 1 if n % 3 else -1],
                      "gold": 0 if n % 3 else 1, "answer": str(2 * n)})  # fmt: skip
    return found


def task(name: str, data: Path, **more: object) -> str:
    """Return a task, as YAML, which JSON is."""
    return json.dumps({
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train",
        "fewshot_split": "train", **more,
    })  # fmt: skip


def write_tasks(folder: Path) -> Path:
    """Write a folder of tasks: choose_sum, write_sum, their group, and one that would run code."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    choose = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
              "doc_to_target": "gold", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    write = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "answer",
             "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
             "filter_list": [{"name": "number", "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"},
                                                           {"function": "take_first"}]}]}  # fmt: skip
    (folder / "choose.yaml").write_text(task("choose_sum", data, **choose))
    (folder / "write.yaml").write_text(task("write_sum", data, **write))
    (folder / "unsafe.yaml").write_text(task("run_sum", data, **write, unsafe_code=True))
    group = {"group": "sums", "task": ["choose_sum", "write_sum"]}
    (folder / "sums.yaml").write_text(json.dumps(group))
    return folder
