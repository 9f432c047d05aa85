"""The part of `xtk evaluate` that asks tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.artifacts.outputs import check_path
from xtk.commands.evaluated import load_evaluated
from xtk.commands.tables import print_table, with_error
from xtk.errors import XtkError


def evaluate_tasks(folders: dict[str, tuple[Path, Path | None]], given: dict[str, Any], *, as_json: bool) -> None:
    """Ask models tasks, one after the other, and tell what they score.

    Args:
        folders: {name: (model, adapter)}.
        given: the options of the command.
        as_json: print a JSON line a model; else a table.
    """
    from xtk.artifacts.files import written_whole
    from xtk.artifacts.locks import only_writer_of_path
    from xtk.evaluation.harness import Asking, Harness, Scores
    from xtk.evaluation.local_tasks import read_tasks
    from xtk.models.causal_lm import context_length
    from xtk.rollouts.prompts import read_template_arguments

    tasks, local = read_tasks(given["tasks"])
    asking = Asking(
        tasks=tasks,
        folders=local,
        include_path=given["include_path"],
        num_fewshot=given["num_fewshot"],
        limit=given["max_prompts"],
        batch_size=given["batch_size"],
        apply_chat_template=given["apply_chat_template"],
        template_arguments=read_template_arguments(given["chat_template_kwargs"]),
        seed=given["seed"],
    )
    path = answers_file(given["output"])
    harness = Harness(asking)
    results: dict[str, Scores] = {}
    with contextlib.ExitStack() as held:
        stream = None
        if path is not None:
            held.enter_context(only_writer_of_path(path.resolve(), "file"))
            answers_file(given["output"])  # another command may have written it since
            temporary = held.enter_context(written_whole(path, keep_others=True))
            stream = held.enter_context(temporary.open("w", encoding="utf-8"))
        for name, places in folders.items():
            model, tokenizer = load_evaluated(name, places, given)
            limits = [limit for limit in (context_length(model.config), given["max_length"]) if limit]
            found = harness.ask(model, tokenizer, max_length=min(limits, default=None))
            results[name] = found
            for sample in found.samples if stream is not None else ():
                assert stream is not None
                stream.write(json.dumps({"model": name, **sample}, ensure_ascii=False) + "\n")
            del model
        if stream is not None:
            stream.flush()
    _tell(results, asking.tasks, given, as_json=as_json)


def _tell(results: dict[str, Any], tasks: tuple[str, ...], given: dict[str, Any], *, as_json: bool) -> None:
    first = next(iter(results))
    lines = {name: found.record(results[first] if name != first else None) for name, found in results.items()}
    if as_json:
        for name, line in lines.items():
            told: dict[str, Any] = {"model": name, "data": list(tasks), "seed": given["seed"]}
            terminal.result_json(told | {"limit": given["max_prompts"], "results": line})
        return
    rows = []
    for task in results[first].top:
        for metric in results[first].values[task]:
            for name, line in lines.items():
                scores = line[task]
                gain = scores.get(f"{metric}_difference")
                rows.append([
                    task, metric, name, with_error(scores[metric], scores[f"{metric}_error"]),
                    "" if gain is None else with_error(gain, scores[f"{metric}_difference_error"], "+"),
                    str(scores.get("num_fewshot", "")), f"{scores['problems']:,}" if "problems" in scores else "",
                ])  # fmt: skip
    heads = ["task", "metric", "model", "value", f"{first} is above by", "examples", "problems"]
    print_table(f"lm-evaluation-harness: {', '.join(tasks)}", heads, rows)


def answers_file(output: str) -> Path | None:
    """Return where answers go; None: nowhere.

    Raises:
        XtkError: there is a file, or it is none of JSON lines.
    """
    if not output:
        return None
    path = Path(output)
    check_path(path)
    if path.suffix != ".jsonl" or path.exists() or path.is_symlink():
        told = "there is such a file" if path.exists() or path.is_symlink() else "answers are JSON lines"
        raise XtkError(told, where=str(path), hint="-o FILE.jsonl, of another name")
    return path
