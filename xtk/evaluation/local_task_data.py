"""Tasks from local copies of hub datasets: MMLU for lm-evaluation-harness, and code problems."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.evaluation.generated_answers import AnswerScores, ProcessShare, evaluate_answers
from xtk.name_registry import unknown_name_error
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import PromptFormat, check_rewards_apply, read_prompts
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.text.tokenizer import Tokenizer

MMLU, NUM_CHOICES = "mmlu", 4
MAX_ANSWER_TOKENS = 768  # as in EvalPlus
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class CodeTask:
    """Prompt format of a set of code problems.

    Attributes:
        base_template: template of the prompt that a base model continues; "": the row's prompt.
        columns: columns that its rows have.
    """

    base_template: str
    chat_template: str
    columns: tuple[str, ...]
    stop_strings: tuple[str, ...] = ()


_COMPLETION_TASK = CodeTask(
    "", "Complete this function.\n```python\n{{ prompt }}```", ("prompt", "entry_point", "test")
)
_STOP_STRINGS = ('\n"""', "\nassert", "\nprint(", "\nif __name__")  # as in EvalPlus


def _tests_task(text: str) -> CodeTask:
    tests = '{{ test_list | join("\n") }}'
    task = f"{{{{ {text} }}}}\n"
    base, chat = f'"""\n{task}{tests}\n"""\n', f"{task}Your code should pass these tests:\n{tests}"
    return CodeTask(base, chat, (text, "test_list"), _STOP_STRINGS)


CODE_TASKS = {
    "humaneval": _COMPLETION_TASK,
    "humaneval_plus": _COMPLETION_TASK,
    "mbpp": _tests_task("text"),
    "mbpp_plus": _tests_task("prompt"),
}


def parse_tasks(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of tasks such as `gsm8k,mmlu=FOLDER`, and {task: folder} of those with a folder."""
    names, folders = list[str](), dict[str, str]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, is_local, folder = part.partition("=")
        if name not in names:
            names.append(name)
        if not is_local:
            continue
        if name not in CODE_TASKS and name.partition("_")[0] != MMLU:
            raise unknown_name_error("task with a local folder", name, [MMLU, *CODE_TASKS])
        if not Path(folder).is_dir():
            raise XtkError(
                f"the folder of the task {name} does not exist",
                where=f"task {part}",
                hint=f"use {name}=FOLDER with a local copy of the dataset from the hub",
            )
        folders[name] = folder
    if len({folder for name, folder in folders.items() if name not in CODE_TASKS}) > 1:
        raise XtkError(
            "all MMLU tasks must be read from the same folder",
            where=f"task {text}",
            hint=f"give them the same folder: {MMLU}_anatomy=FOLDER,{MMLU}_virology=FOLDER",
        )
    return tuple(names), folders


def write_mmlu_tasks(folders: Mapping[str, str], output_folder: Path) -> list[Path]:
    """Write the harness's MMLU tasks with a local folder as their data, and return folders of tasks for the harness.

    Args:
        folders: {task: folder}; a folder contains `SUBJECT/test-*.parquet` and `SUBJECT/dev-*.parquet`, as `cais/mmlu`.

    Returns:
        The harness's MMLU folder and `output_folder`, which overrides it; empty if no MMLU task has a folder.
    """
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    local = {name: Path(folder).absolute() for name, folder in folders.items() if name not in CODE_TASKS}
    if not local:
        return []
    own = Path(str(lm_eval.tasks.__file__)).parent / MMLU / "default"
    root, missing = next(iter(local.values())), list[str]()
    known = {MMLU}
    for path in sorted(own.glob(f"{MMLU}_*.yaml")):
        task = load_yaml(path, resolve_func=False)
        subject = str(task.get("dataset_name"))
        group = str(task.get("tag")).removesuffix("_tasks")
        known |= {group, task["task"]}
        files = {split: [str(one) for one in sorted((root / subject).glob(f"{split}-*.parquet"))]
                 for split in ("test", "dev")}  # fmt: skip
        if not all(files.values()):
            missing += [subject] if {MMLU, group, task["task"]} & local.keys() else []
            continue
        for place in itertools.chain.from_iterable(files.values()):
            _check_mmlu_file(place)
        config = {"include": str(path), "task": task["task"], "tag": task.get("tag"), "dataset_path": "parquet",
                  "dataset_name": None, "dataset_kwargs": {"data_files": files}}  # fmt: skip
        (output_folder / path.name).write_text(json.dumps(config))
    if unknown := sorted(local.keys() - known):
        raise unknown_name_error("MMLU task with a local folder", unknown[0], sorted(known))
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise XtkError(
            f"the folder of the MMLU data has no test or no dev files of {some}",
            where=str(root),
            hint="download cais/mmlu: it has SUBJECT/test-*.parquet and SUBJECT/dev-*.parquet for each subject",
        )
    return [own, output_folder]


def _check_mmlu_file(path: str) -> None:
    """Check the questions of a file, which the harness reads later."""
    for row, where in Corpus([path]).records():
        question, choices, answer = (row.get(column) for column in ("question", "choices", "answer"))
        is_valid = isinstance(question, str) and isinstance(choices, list) and len(choices) == NUM_CHOICES
        is_valid = is_valid and all(isinstance(choice, str) for choice in choices)  # type: ignore[union-attr]
        if not is_valid or not isinstance(answer, int) or not 0 <= answer < NUM_CHOICES:
            raise XtkError(
                f"a row of the MMLU data is not a question with {NUM_CHOICES} choices and an answer from 0 to "
                f"{NUM_CHOICES - 1}: its answer is {answer!r}",
                where=where,
                hint="download cais/mmlu again; rows without answers cannot be scored",
            )


class CodeProblems:
    """Code problems from a local folder with `test-*.parquet`, directly or in `data` or `full`.

    Answers are executed in the sandbox by the reward `tests`. `limit` keeps the first problems; 0: all.
    """

    def __init__(
        self, name: str, folder: str, limit: int, *, chat: bool, template_arguments: Mapping[str, Any]
    ) -> None:
        self.name, self._task, self._chat = name, CODE_TASKS[name], chat
        self._template_arguments = dict(template_arguments)
        files = [path for place in (folder, f"{folder}/data", f"{folder}/full")
                 for path in sorted(Path(place).glob("test-*.parquet"))]  # fmt: skip
        if not files:
            raise XtkError(
                f"the folder of the task {name} has no file test-*.parquet",
                where=f"task {name}={folder}",
                hint="use a local copy of the dataset from the hub, with test-*.parquet in it, in data/ or in full/",
            )
        corpus = Corpus([str(path) for path in files])
        for record, where in corpus.records():
            lacking = [column for column in self._task.columns if record.get(column) is None]
            if lacking:
                raise XtkError(
                    f"a problem of the task {name} has no value in the column {lacking[0]}",
                    where=where,
                    hint=f"use {name}=FOLDER with a local copy of that dataset from the hub",
                )
        form = PromptFormat(self._task.chat_template if chat else self._task.base_template, as_chat=chat)
        self._prompts = read_prompts(corpus, limit or None, form)
        self._rewards = WeightedRewards([parse_reward("tests")])
        check_rewards_apply(self._rewards, self._prompts)

    def evaluate(
        self, model: Any, tokenizer: Tokenizer, process_share: ProcessShare, *, keep_samples: bool
    ) -> tuple[AnswerScores, list[int], list[dict[str, Any]]]:
        """Return rewards of a model's greedy answers, the problems' numbers, and prompts with answers."""
        samples: list[dict[str, Any]] = []

        def keep(prompt: Prompt, one: Rollout) -> None:
            prompt_text = "\n".join(segment.text for segment in prompt.document.segments)
            text = "".join(segment.text for segment in one.document.segments if segment.train)
            samples.append({"task": self.name, "problem": prompt.number, "filter": "none", "prompt": [prompt_text],
                            "answers": [text], "pass@1": one.reward})  # fmt: skip

        stop: Sequence[str] = () if self._chat else self._task.stop_strings
        evaluated = evaluate_answers(
            self._prompts, TransformersGenerator(model, tokenizer, batch_tokens=BATCH_TOKENS), tokenizer,
            SamplingConfig(temperature=0.0, max_completion_length=MAX_ANSWER_TOKENS, stop=tuple(stop)), self._rewards,
            process_share=process_share,
            template_arguments=self._template_arguments, on_answer=keep if keep_samples else None,
        )  # fmt: skip
        return evaluated, [prompt.number for prompt in self._prompts], samples
