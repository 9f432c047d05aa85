"""Evaluation with lm-evaluation-harness: tasks, settings, results and paired differences.

Tasks that execute generated code are refused: the harness executes it in its own process, while xtk executes code in
its sandbox (the reward `tests`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from xtk import terminal
from xtk.errors import XtkError
from xtk.evaluation.generated_answers import AnswerScores, ProcessShare
from xtk.evaluation.lm_eval_model import HarnessModel, check_finite_logits
from xtk.evaluation.local_task_data import CODE_TASKS, CodeProblems, write_mmlu_tasks
from xtk.evaluation.standard_errors import Estimate
from xtk.models.saved_model import stop_token_ids
from xtk.name_registry import nearest_name
from xtk.rollouts.transformers_generator import generation_mode
from xtk.text.tokenizer import Tokenizer

BATCH_SIZE = 8
BOOTSTRAP_SAMPLES = 1000  # for metrics that are not means: F1, BLEU, perplexity
# The harness's default seed of few-shot examples, so that results are comparable with published ones.
HARNESS_SEED = 1234
_NOT_SCORES = frozenset({"name", "alias", "sample_len", "sample_count"})


@dataclass(frozen=True)
class HarnessConfig:
    """Tasks and settings of lm-evaluation-harness.

    Attributes:
        tasks: names of tasks, groups or tags.
        task_folders: {task: folder} for tasks that are read from a local folder: MMLU and code tasks.
        num_fewshot: few-shot examples per problem; None: the task's default.
        limit: largest number of problems per task, the first ones; 0: all.
        apply_chat_template: format requests with the model's chat template, few-shot examples as turns.
        seed: seed of few-shot examples and of sampling; 0: the harness's default.
    """

    tasks: tuple[str, ...]
    include_path: str = ""
    task_folders: Mapping[str, str] = field(default_factory=dict)
    num_fewshot: int | None = None
    limit: int = 0
    batch_size: int = BATCH_SIZE
    apply_chat_template: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class HarnessResults:
    """Results of a model on tasks.

    Attributes:
        metrics: {task or group: {metric: (value, standard error)}}; the error is nan where there is none, the value
            where it is not a number. Metrics have the harness's names, followed by a comma and the filter where that
            is not "none".
        num_problems, num_fewshot: {task: number}.
        top_level_tasks: groups, and tasks that are in no group.
        per_problem: {(task, metric): {problem: value}} for metrics that are means; empty unless requested.
        samples: prompts and answers, one record per problem and filter.
    """

    metrics: Mapping[str, Mapping[str, tuple[float, float]]]
    num_problems: Mapping[str, int]
    num_fewshot: Mapping[str, int]
    top_level_tasks: Sequence[str]
    per_problem: Mapping[tuple[str, str], Mapping[int, float]]
    samples: Sequence[Mapping[str, Any]] = ()

    def difference(self, other: HarnessResults, task: str, metric: str) -> Estimate | None:
        """Return the difference to another model's metric, paired by problem; None without values per problem."""
        mine, theirs = self.per_problem.get((task, metric), {}), other.per_problem.get((task, metric), {})
        both = sorted(mine.keys() & theirs.keys())
        if not both:
            return None
        return Estimate.mean_of(np.array([mine[at] - theirs[at] for at in both]))

    def to_json(self, compared_to: HarnessResults | None = None) -> dict[str, dict[str, Any]]:
        """Return the metrics as JSON values, with the differences of another model's results to these."""
        by_task: dict[str, dict[str, Any]] = {}
        for task, values in self.metrics.items():
            line = by_task[task] = {}
            for metric, (value, error) in values.items():
                line[metric] = value if math.isfinite(value) else None
                line[f"{metric}_error"] = error if math.isfinite(error) else None
                gain = None if compared_to is None else compared_to.difference(self, task, metric)
                if gain is not None:
                    line[f"{metric}_difference"] = gain.value
                    line[f"{metric}_difference_error"] = gain.error if math.isfinite(gain.error) else None
            if task in self.num_problems:
                line["problems"] = self.num_problems[task]
            if task in self.num_fewshot:
                line["num_fewshot"] = self.num_fewshot[task]
        return by_task


class Harness:
    """Loaded tasks, for the evaluation of several models."""

    def __init__(self, config: HarnessConfig) -> None:
        code = [name for name in config.tasks if name in CODE_TASKS and name in config.task_folders]
        self._code_problems = [
            CodeProblems(name, config.task_folders[name], config.limit, chat=config.apply_chat_template,
                         template_arguments=config.template_arguments)
            for name in code
        ]  # fmt: skip
        config = replace(config, tasks=tuple(name for name in config.tasks if name not in code))
        self.config = config
        self._loaded: Any = None
        if not config.tasks:
            return
        if importlib.util.find_spec("lm_eval") is None:
            raise XtkError(
                "evaluating tasks needs the package lm-evaluation-harness, which is not installed",
                hint="run pip install '.[evaluation]' in xtk's repository",
            )
        if config.include_path and not Path(config.include_path).is_dir():
            raise XtkError(
                "the folder of custom tasks (include_path) does not exist",
                where=config.include_path,
                hint="use --include-path FOLDER with a folder that contains task YAML files",
            )
        with _silence_output(), preserve_random_states(), tempfile.TemporaryDirectory() as folder:
            self._loaded = self._load(write_mmlu_tasks(config.task_folders, Path(folder)))
            without = [name for name, task in self._loaded["tasks"].items() if not self._prepare(name, task)]
        if without:
            terminal.note(
                f"evaluate: --num-fewshot does not apply to {', '.join(without[:3])}{' ...' if without[3:] else ''}: "
                "these tasks are defined without examples"
            )

    def _load(self, paths: list[Path]) -> Any:
        from lm_eval.tasks import TaskManager

        config = self.config
        known: list[str] = []
        paths = [*([Path(config.include_path)] if config.include_path else []), *paths]
        # Reading the names of all tasks of the harness takes ten seconds.
        for with_own in (False, True) if paths else (True,):
            manager = TaskManager(include_path=paths or None, include_defaults=with_own)
            known = manager.all_tasks
            if set(config.tasks) <= set(known):
                for name in config.tasks:  # before their code or data are loaded
                    _refuse_code(name, (manager.task_index[name].cfg or {}).get("unsafe_code"))
                try:
                    return manager.load(list(config.tasks))
                except Exception as failure:
                    raise _harness_error("lm-evaluation-harness cannot load the tasks", config, failure) from failure
        missing = next(name for name in config.tasks if name not in known)
        near = nearest_name(missing, known)
        raise XtkError(
            f"lm-evaluation-harness has no task called {missing!r}" + (f"; did you mean {near}?" if near else ""),
            hint="run lm-eval ls tasks for a list, or add your own tasks with --include-path FOLDER",
        )

    def _prepare(self, name: str, task: Any) -> bool:
        """Set the number of examples of a task; return False if it takes none, although the configuration has some."""
        config = self.config
        _refuse_code(name, getattr(task, "UNSAFE_CODE", False))  # members of groups were not checked before
        own = task.get_config("num_fewshot")
        if own is None or (config.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
        return not (own == 0 and config.num_fewshot)

    def evaluate(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        keep_samples: bool = True,
        process_share: ProcessShare | None = None,
    ) -> HarnessResults:
        """Return the results of a model; random states and the model's mode are restored afterwards.

        Args:
            max_length: context length in tokens; None: from the model's configuration.
            keep_samples: keep prompts, answers and values per problem, which differences need.
            process_share: this process's part, if several processes share the requests; then this is a collective call,
                and all processes get the full results.
        """
        process_share = process_share or ProcessShare()
        with preserve_random_states():
            parts = [
                _code_results(
                    code_problem, *code_problem.evaluate(model, tokenizer, process_share, keep_samples=keep_samples)
                )
                for code_problem in self._code_problems
            ]
        if self._loaded is not None:
            parts.append(self._evaluate_harness(model, tokenizer, max_length, process_share, keep_samples=keep_samples))
        return _merge_results(parts)

    def _evaluate_harness(
        self, model: Any, tokenizer: Tokenizer, max_length: int | None, share: ProcessShare, *, keep_samples: bool
    ) -> HarnessResults:
        from lm_eval import evaluator

        config = self.config
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if config.apply_chat_template:
            tokenizer.chat_template  # noqa: B018 - raises if there is none
        # Text after the end is not part of the answer: rows of a batch that have ended go on until all have.
        stop_ids = tokenizer.stop_ids | stop_token_ids(inner) & tokenizer.special_token_names.keys()
        try:
            with _silence_output() as stderr, preserve_random_states(), generation_mode(inner, stop_ids):
                check_finite_logits(inner)
                self._seed()
                lm = HarnessModel(inner, tokenizer, batch_size=config.batch_size, max_length=max_length,
                                  template_arguments=dict(config.template_arguments), process_share=share,
                                  stderr=stderr)  # fmt: skip
                output = evaluator.evaluate(
                    lm, self._loaded, limit=config.limit or None, bootstrap_iters=BOOTSTRAP_SAMPLES,
                        log_samples=keep_samples,
                    apply_chat_template=config.apply_chat_template, fewshot_as_multiturn=config.apply_chat_template,
                )  # fmt: skip
        except XtkError:
            raise
        except Exception as failure:
            raise _harness_error("lm-evaluation-harness failed", config, failure) from failure
        return _parse_results(output)

    def _seed(self) -> None:
        """Seed as the harness does, unless a seed is set; each model gets the same few-shot examples."""
        seed = self.config.seed
        random.seed(seed)
        np.random.seed(seed or HARNESS_SEED)
        torch.manual_seed(seed or HARNESS_SEED)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed or HARNESS_SEED)


def _refuse_code(name: str, unsafe: object) -> None:
    if unsafe:
        local = f"use the task {name}=FOLDER, or " if name in CODE_TASKS else ""
        raise XtkError(
            f"the task {name} executes generated code without a sandbox, which xtk does not allow",
            hint=f"{local}run xtk evaluate-answers MODEL PROBLEMS.jsonl --reward tests, which uses xtk's sandbox",
        )


def _code_results(
    task: CodeProblems, answers: AnswerScores, numbers: Sequence[int], samples: Sequence[Mapping[str, Any]]
) -> HarnessResults:
    name, metric, judged = task.name, "pass@1", answers.is_scored
    estimate = answers.pass_at(1)
    single = {
        number: float(score) for number, score, one in zip(numbers, answers.scores[:, 0], judged, strict=True) if one
    }
    error = math.nan if estimate.finite_error is None else estimate.finite_error
    return HarnessResults({name: {metric: (estimate.value, error)}}, {name: int(judged.sum())}, {name: 0}, [name],
                  {(name, metric): single}, samples)  # fmt: skip


def _merge_results(parts: Sequence[HarnessResults]) -> HarnessResults:
    return HarnessResults(
        {task: values for part in parts for task, values in part.metrics.items()},
        {task: number for part in parts for task, number in part.num_problems.items()},
        {task: number for part in parts for task, number in part.num_fewshot.items()},
        [task for part in parts for task in part.top_level_tasks],
        {key: values for part in parts for key, values in part.per_problem.items()},
        [sample for part in parts for sample in part.samples],
    )


def _parse_results(output: Mapping[str, Any]) -> HarnessResults:
    """Return the results in the harness's output."""
    values = {
        task: _parse_metrics(figures) for task, figures in {**output["results"], **output.get("groups", {})}.items()
    }
    single: dict[tuple[str, str], dict[int, float]] = {}
    samples: list[dict[str, Any]] = []
    for task, records in (output.get("samples") or {}).items():
        for record in records:
            scores = {_metric_name(metric, record["filter"]): record[metric] for metric in record["metrics"]}
            scores = {name: float(value) for name, value in scores.items() if _is_number(value)}
            for name, value in scores.items():
                single.setdefault((task, name), {})[int(record["doc_id"])] = value
            samples.append({"task": task, "problem": int(record["doc_id"]), "filter": record["filter"],
                            "prompt": [_to_json_value(one) for one in record["arguments"]],
                            "answers": _to_json_value(record["filtered_resps"]),
                                "target": _to_json_value(record["target"]),
                            **scores})  # fmt: skip
    for (task, name), of_problems in list(single.items()):
        value = values.get(task, {}).get(name, (math.nan, math.nan))[0]
        if not math.isclose(float(np.mean(list(of_problems.values()))), value, abs_tol=1e-9):  # not a mean
            del single[task, name]
    problems = {task: int(count["effective"]) for task, count in output["n-samples"].items()}
    shots = {task: int(number) for task, number in output["n-shot"].items()}
    within = {child for children in output["group_subtasks"].values() for child in children}
    return HarnessResults(values, problems, shots, [task for task in values if task not in within], single, samples)


def _parse_metrics(figures: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    metrics: dict[str, tuple[float, float]] = {}
    for key, value in figures.items():
        metric, _, chosen = key.partition(",")
        if key in _NOT_SCORES or metric.endswith("_stderr") or not isinstance(value, int | float | np.number):
            continue
        error = figures.get(f"{metric}_stderr,{chosen}")
        metrics[_metric_name(metric, chosen)] = (
            float(value),
            float(error) if error is not None and _is_number(error) else math.nan,
        )
    return metrics


def _metric_name(metric: str, chosen: str) -> str:
    return metric if chosen in ("", "none") else f"{metric},{chosen}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(float(value))


def _to_json_value(value: Any) -> Any:
    """Return a value as a JSON value; other types become text."""
    if isinstance(value, dict):
        return {str(key): _to_json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _harness_error(what: str, config: HarnessConfig, failure: Exception) -> XtkError:
    first_line = (str(failure) or type(failure).__name__).strip().splitlines()[0][:300]
    return XtkError(
        f"{what}: {type(failure).__name__}: {first_line}",
        where=f"tasks {','.join(config.tasks)}",
        hint="run lm-eval ls tasks for the task names, and check --include-path and the options of the task",
    )


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    own, arrays = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextlib.contextmanager
def _silence_output() -> Iterator[TextIO]:
    """Hide the harness's output, progress bars and log; yield the terminal's stderr."""
    import datasets

    terminal = sys.stderr
    log = logging.getLogger("lm_eval")
    level, multiproc = log.level, os.environ.get("DISABLE_MULTIPROC")
    bars = datasets.are_progress_bars_disabled()
    log.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    os.environ["DISABLE_MULTIPROC"] = "1"  # no process pool for standard errors while a model is in memory
    hidden = io.StringIO()
    try:
        with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
            yield terminal
    finally:
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        os.environ.pop("DISABLE_MULTIPROC")
        if multiproc is not None:
            os.environ["DISABLE_MULTIPROC"] = multiproc
