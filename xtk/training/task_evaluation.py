"""Evaluation during training (--eval-tasks): problems scored by a reward, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from xtk import terminal
from xtk.data.corpus_reader import Corpus
from xtk.errors import NonFiniteModelError, XtkError
from xtk.evaluation.generated_answers import ProcessShare, evaluate_answers
from xtk.evaluation.lm_eval_harness import (
    BATCH_SIZE,
    Harness,
    HarnessConfig,
    parse_task_names,
    preserve_random_states,
)
from xtk.files.atomic_files import canonical_json, sha256, sha256_of_file
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import option, options_of
from xtk.options.spec_parsing import from_pairs, option_names, parse_pairs
from xtk.parallel import process_group
from xtk.parallel.parallel_config import ParallelConfig
from xtk.rewards.reward_spec import WeightedRewards, parse_reward, paths_as_checksums
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import (
    PromptFormat,
    check_rewards_apply,
    read_prompt_template,
    read_prompts,
    read_template_arguments,
)
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.text.tokenizer import Tokenizer
from xtk.training.student_generator import autocast

LOGGED_METRICS = ("avg@", "pass@", "truncated_fraction", "mean_length")


@dataclass(frozen=True)
class ProblemOptions:
    """Options of problems scored by a reward: as `xtk evaluate`, plus `prompt` (a column) and `name` (for metrics)."""

    reward: str = ""
    name: str = ""
    prompt: str = ""
    prompt_template: str = ""
    apply_chat_template: bool = False
    chat_template_kwargs: str = ""
    max_prompts: int = option(0, "Maximum number of prompts; 0: all.", min=0)
    num_generations: int = option(1, "Answers per prompt.", min=1)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 512
    stop: str = ""
    seed: int = 0
    batch_tokens: int = 8192


@dataclass(frozen=True)
class HarnessOptions:
    """Options of lm-evaluation-harness tasks, as in `xtk evaluate`."""

    include_path: str = ""
    num_fewshot: int = -1
    max_prompts: int = 0
    batch_size: int = BATCH_SIZE
    apply_chat_template: bool = False
    chat_template_kwargs: str = ""
    seed: int = 0


class RewardProblems:
    """Problems whose answers a reward scores."""

    def __init__(self, data: str, options: ProblemOptions) -> None:
        if options.num_generations > 1 and options.temperature == 0:
            raise XtkError(
                f"num_generations={options.num_generations} of --eval-tasks generates equal answers at temperature 0",
                where=data,
                hint="add temperature=0.8, or remove num_generations",
            )
        self.names: tuple[str, ...] = (options.name or Path(data).name.partition(".")[0],)
        self._options = options
        corpus = Corpus([data], {"prompt": options.prompt} if options.prompt else {})
        form = PromptFormat(read_prompt_template(options.prompt_template), as_chat=options.apply_chat_template)
        self._prompts = read_prompts(corpus, options.max_prompts or None, form)
        self._sampling = options_of(SamplingConfig, options, stop=(options.stop,) if options.stop else ())
        self._template_arguments = read_template_arguments(options.chat_template_kwargs)
        self._rewards = WeightedRewards([parse_reward(options.reward)])
        check_rewards_apply(self._rewards, self._prompts)

    @property
    def identity(self) -> list[Any]:
        """Its options, with checksums of the files that they name, and of the prompts with their records."""
        options = {name: str(value) for name, value in asdict(self._options).items()}
        options["reward"] = paths_as_checksums(options["reward"])
        options["prompt_template"] = read_prompt_template(options["prompt_template"]) or ""
        prompts = [[str(prompt.document.segments), repr(sorted(prompt.record.items()))] for prompt in self._prompts]
        return [*self.names, options, sha256(canonical_json(prompts))]

    def evaluate(self, model: Any, tokenizer: Tokenizer, process_share: ProcessShare) -> dict[str, float]:
        """Generate answers, each process a part of them, and return the metrics of their rewards."""
        options = self._options
        generator = TransformersGenerator(model, tokenizer, batch_tokens=options.batch_tokens)
        evaluated = evaluate_answers(
            self._prompts,
            generator,
            tokenizer,
            self._sampling,
            self._rewards,
            seed=options.seed,
            num_generations=options.num_generations,
            template_arguments=self._template_arguments,
            process_share=process_share,
        )
        record = {key: value for key, value in evaluated.to_json().items() if key.startswith(LOGGED_METRICS)}
        return {f"{self.names[0]}/{key}": float(value) for key, value in record.items() if value is not None}


class HarnessEvalTasks:
    """Tasks of lm-evaluation-harness. `tasks`: `gsm8k,mmlu`."""

    def __init__(self, tasks: str, options: HarnessOptions) -> None:
        self.names = parse_task_names(tasks)
        if not self.names:
            raise XtkError(
                "a value of --eval-tasks is empty", hint="use for example --eval-tasks arc_easy:max_prompts=200"
            )
        self._harness = Harness(
            HarnessConfig(
                tasks=self.names,
                include_path=options.include_path,
                num_fewshot=options.num_fewshot if options.num_fewshot >= 0 else None,
                limit=options.max_prompts,
                batch_size=options.batch_size,
                apply_chat_template=options.apply_chat_template,
                template_arguments=read_template_arguments(options.chat_template_kwargs),
                seed=options.seed,
            )
        )
        self._options = options

    @property
    def identity(self) -> list[Any]:
        """Its options, and names and checksums of the files of its include_path, which may be anywhere."""
        options = {name: str(value) for name, value in asdict(self._options).items()}
        root = options.pop("include_path")
        files = [
            [path.relative_to(root).as_posix(), sha256_of_file(path)]
            for path in (sorted(Path(root).rglob("*")) if root else ())
            if path.is_file() and path.suffix != ".pyc"  # which Python writes when a task's functions are imported
        ]
        return [*self.names, options, files]

    def evaluate(self, model: Any, tokenizer: Tokenizer, process_share: ProcessShare) -> dict[str, float]:
        """Run the tasks, each process a part of the requests, and return their finite metrics."""
        scores = self._harness.evaluate(model, tokenizer, keep_samples=False, process_share=process_share)
        metrics: dict[str, float] = {}
        for task in scores.top_level_tasks:
            for metric, (value, error) in scores.metrics[task].items():
                metrics |= {f"{task}/{metric}": value, f"{task}/{metric}_error": error}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


EvalTask = RewardProblems | HarnessEvalTasks  # `names` are the prefixes of its metrics


def parse_eval_task(text: str) -> EvalTask:
    """Return the task of an --eval-tasks value: `gsm8k,mmlu:num_fewshot=5` or `FILE.jsonl:reward=gsm8k`.

    A comma separates options only before an option name and `=`, so that rewards and templates may contain commas.
    """
    known = sorted({*option_names(ProblemOptions), *option_names(HarnessOptions)})
    one = "|".join(known)
    match = re.search(rf":(?=(?:{one})=)", text)
    place, specs = (text[: match.start()], text[match.end() :]) if match else (text, "")
    stray = re.search(r":([a-z][a-z_-]*)=", place)
    if stray is not None:
        raise unknown_name_error("option of --eval-tasks", stray[1], known)
    options = dict(
        parse_pairs(specs, f"--eval-tasks {text}", known, noun="option of --eval-tasks", values_have_commas=True)
    )
    kind: type[ProblemOptions | HarnessOptions] = ProblemOptions if "reward" in options else HarnessOptions
    for key in options:
        if key not in option_names(kind):
            others = "problems (with reward=)" if kind is HarnessOptions else "lm-evaluation-harness tasks (no reward=)"
            raise XtkError(
                f"the option {key} of --eval-tasks applies only to {others}",
                where=f"--eval-tasks {text}",
                hint=f"remove {key}=",
            )
    own = from_pairs(kind, options.items(), f"the task {text}")
    if isinstance(own, ProblemOptions):
        return RewardProblems(place, own)
    if Path(place).is_file():
        raise XtkError(
            "--eval-tasks with a data file needs a reward that scores the answers",
            where=place,
            hint=f"use {place}:reward=gsm8k",
        )
    return HarnessEvalTasks(place, own)


def parse_eval_tasks(texts: Sequence[str]) -> tuple[EvalTask, ...]:
    """Return the tasks of all --eval-tasks values."""
    tasks = tuple(map(parse_eval_task, texts))
    names = [name for task in tasks for name in task.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise XtkError(
            f"two --eval-tasks have the name {twice}",
            hint="remove one, or rename one: FILE:reward=REWARD,name=OTHER",
        )
    return tasks


def check_supports_eval_tasks(tasks: Sequence[EvalTask], parallel: ParallelConfig) -> None:
    """Raise XtkError if the student is sharded, because every process would have to take part in each token."""
    if tasks and parallel.is_sharded:
        raise XtkError(
            f"--eval-tasks needs an unsharded student, and --parallel is {parallel}",
            hint="run xtk evaluate on the student or its checkpoints, or use --parallel dp=N",
        )


class TaskEvaluator:
    """Evaluates the unsharded student on --eval-tasks; every process creates one and calls it at the same steps."""

    def __init__(
        self, tasks: Sequence[EvalTask], student: BackboneWithHead, tokenizer: Tokenizer, mixed_precision: str
    ) -> None:
        self._tasks, self._model, self._tokenizer, self._precision = tasks, student.model, tokenizer, mixed_precision

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return all metrics by name, the same in every process (collective)."""
        share = ProcessShare(process_group.rank(), process_group.world_size(), process_group.all_gather_object)
        scores: dict[str, float] = {}
        with preserve_random_states(), autocast(self._precision, self._model.device):
            for task in self._tasks:
                try:
                    scores |= task.evaluate(self._model, self._tokenizer, share)
                except NonFiniteModelError as failure:  # steps that are not finite are skipped too; the run goes on
                    terminal.note(f"distill: warning: no metrics of {', '.join(task.names)}: {failure.what}")
        return {f"eval_{name}": value for name, value in scores.items()}
