"""Evaluation with lm-evaluation-harness: tasks, settings, results and paired differences.

Tasks that execute generated code are refused: the harness executes it in its own process, while xtk executes code in
its sandbox (the reward `tests`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from xtk import terminal
from xtk.errors import NonFiniteModelError, XtkError
from xtk.evaluation.generated_answers import NON_FINITE_HINT, ProcessShare
from xtk.evaluation.standard_errors import Estimate
from xtk.models.saved_model import stop_token_ids
from xtk.name_registry import nearest_name
from xtk.progress import Progress
from xtk.rollouts.transformers_generator import generation_mode
from xtk.text.tokenizer import Tokenizer

BATCH_SIZE = 8
BOOTSTRAP_SAMPLES = 1000  # for metrics that are not means: F1, BLEU, perplexity
# The harness's default seed of few-shot examples, so that results are comparable with published ones.
HARNESS_SEED = 1234
PROGRESS_BATCH_SIZE = 512  # requests between progress updates; each batch is sorted by length
# Consecutive requests per process: the choices of a problem share their context.
REQUESTS_PER_TURN = 32
_NOT_SCORES = frozenset({"name", "alias", "sample_len", "sample_count"})


@dataclass(frozen=True)
class HarnessConfig:
    """Tasks and settings of lm-evaluation-harness."""

    tasks: tuple[str, ...]  # names of tasks, groups or tags
    include_path: str = ""
    num_fewshot: int | None = None  # few-shot examples per problem; None: the task's default
    limit: int = 0  # largest number of problems per task, the first ones; 0: all
    batch_size: int = BATCH_SIZE
    apply_chat_template: bool = False  # format requests with the model's chat template, few-shot examples as turns
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # seed of few-shot examples and of sampling; 0: the harness's default


@dataclass(frozen=True)
class HarnessResults:
    """Results of a model on tasks."""

    # {task or group: {metric: (value, standard error)}}; the error is nan where there is none, the value where it is
    # not a number. Metrics have the harness's names, followed by a comma and the filter where that is not "none".
    metrics: Mapping[str, Mapping[str, tuple[float, float]]]
    num_problems: Mapping[str, int]  # {task: number}
    num_fewshot: Mapping[str, int]  # {task: number}
    top_level_tasks: Sequence[str]  # groups, and tasks that are in no group
    # {(task, metric): {problem: value}} for metrics that are means; empty unless requested.
    per_problem: Mapping[tuple[str, str], Mapping[int, float]]
    samples: Sequence[Mapping[str, Any]] = ()  # prompts and answers, one record per problem and filter

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


def parse_task_names(text: str) -> tuple[str, ...]:
    """Return the names in `gsm8k,mmlu`, each once."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


class Harness:
    """Loaded tasks, for the evaluation of several models."""

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config
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
        with _silence_output(), preserve_random_states():
            self._loaded = self._load()
            without = [name for name, task in self._loaded["tasks"].items() if not self._prepare(name, task)]
        if without:
            terminal.note(
                f"evaluate: --num-fewshot does not apply to {', '.join(without[:3])}{' ...' if without[3:] else ''}: "
                "these tasks are defined without examples"
            )

    def _load(self) -> Any:
        from lm_eval.tasks import TaskManager

        config = self.config
        known: list[str] = []
        # Reading the names of all tasks of the harness takes ten seconds.
        for with_own in (False, True) if config.include_path else (True,):
            manager = TaskManager(include_path=config.include_path or None, include_defaults=with_own)
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

        `keep_samples`: keep prompts, answers and values per problem, which differences need. With `process_share`,
        several processes share the requests: a collective call, whose full results all get.
        """
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
                                  template_arguments=dict(config.template_arguments),
                                  apply_chat_template=config.apply_chat_template,
                                  process_share=process_share or ProcessShare(), stderr=stderr)  # fmt: skip
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
        raise XtkError(
            f"the task {name} executes generated code without a sandbox, which xtk does not allow",
            hint="run xtk evaluate-answers MODEL PROBLEMS.jsonl --reward tests, which uses xtk's sandbox",
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


class HarnessModel:
    """The harness's class for transformers models around a loaded model; several processes can share the requests."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        max_length: int | None,
        template_arguments: dict[str, Any],
        apply_chat_template: bool,
        process_share: ProcessShare,
        stderr: TextIO,
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        # The harness enters its own autocast, which without a dtype would disable that of the training loop.
        device = model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._model = HFLM(pretrained=model, backend="causal", tokenizer=harness_tokenizer(tokenizer),
                           batch_size=batch_size, max_length=max_length, mixed_precision_dtype=dtype,
                           chat_template_args=template_arguments,
                           # A conversation begins as its template writes it, without the start token of a text.
                           add_bos_token=False if apply_chat_template else None)  # fmt: skip
        self._model._loglikelihood_tokens = functools.partial(_without_progress, self._model._loglikelihood_tokens)
        self._share, self._stderr = process_share, stderr

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the harness's model."""
        return getattr(self._model, name)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer for the harness's request cache, which xtk does not use."""
        return "xtk"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation."""
        answers = self._run_in_batches(self._model.loglikelihood, requests)
        _refuse_nan(logprob for logprob, _ in answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the log-probability of each text."""
        answers = self._run_in_batches(self._model.loglikelihood_rolling, requests)
        _refuse_nan(answers)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the generated text of each request."""
        return self._run_in_batches(self._model.generate_until, requests)

    def _run_in_batches(self, method: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        """Answer this process's requests in batches with progress, and return the answers of all processes."""
        share, results = self._share, list[Any]()
        indices = range(len(requests))
        by_rank = [
            [index for index in indices if index // REQUESTS_PER_TURN % share.num_processes == rank]
            for rank in range(share.num_processes)
        ]
        mine = by_rank[share.rank]
        with contextlib.redirect_stderr(self._stderr), Progress("evaluate", len(mine), "requests") as progress:
            for start in range(0, len(mine), PROGRESS_BATCH_SIZE):
                part = [requests[at] for at in mine[start : start + PROGRESS_BATCH_SIZE]]
                results += method(part, disable_tqdm=True)
                progress.advance(len(part))
        answers = dict(zip(itertools.chain(*by_rank), itertools.chain(*share.all_gather_object(results)), strict=True))
        return [answers[at] for at in range(len(requests))]


def check_finite_logits(model: Any) -> None:
    """Refuse a model whose logits are not finite: its most likely answers would have scores like any others."""
    with torch.no_grad():
        ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        logits = model(input_ids=ids).logits
    _refuse_nan([float("nan") if bool(logits.isnan().any() or logits.isposinf().any()) else 0.0])


def _refuse_nan(values: Iterable[float]) -> None:
    """Refuse log-probabilities that are not numbers."""
    if any(math.isnan(value) for value in values):
        raise NonFiniteModelError("the model gives log-probabilities that are not a number", hint=NON_FINITE_HINT)


def harness_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of transformers, which puts the start token in front of texts where the model's does."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        for name, content in tokenizer.to_files(with_start=True).items():
            Path(folder, name).write_bytes(content)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _without_progress(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of the harness without its progress bars, which some callers request in spite of `disable_tqdm`."""
    return method(*arguments, **{**options, "disable_tqdm": True})
