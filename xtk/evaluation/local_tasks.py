"""Tasks from folders of this machine, in the form that the hub has them: MMLU for the harness, problems of code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk.artifacts.corpus import Corpus
from xtk.errors import XtkError
from xtk.evaluation.generated_answers import AnswerScores, ProcessShare, check_rewards_apply, evaluate_answers
from xtk.registry import unknown_name_error
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import PromptFormat, read_prompts
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.tokens.tokenizer import Tokenizer

MMLU = "mmlu"
MAX_ANSWER_TOKENS = 768  # of an answer, as EvalPlus has it
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class CodeTask:
    """How the problems of a set are put.

    Attributes:
        base_template: template of the prompt that a base model continues; "": the row's own.
        chat_template: template of the message of the user.
        stop_strings: texts that end an answer to the plain prompt.
    """

    base_template: str
    chat_template: str
    stop_strings: tuple[str, ...] = ()


_COMPLETION_TASK = CodeTask("", "Complete this function.\n```python\n{{ prompt }}```")
_STOP_STRINGS = ('\n"""', "\nassert", "\nprint(", "\nif __name__")  # as EvalPlus has them


def _tests_task(text: str) -> CodeTask:
    tests = '{{ test_list | join("\n") }}'
    task = f"{{{{ {text} }}}}\n"
    return CodeTask(f'"""\n{task}{tests}\n"""\n', f"{task}Your code should pass these tests:\n{tests}", _STOP_STRINGS)


CODE_TASKS = {
    "humaneval": _COMPLETION_TASK,
    "humaneval_plus": _COMPLETION_TASK,
    "mbpp": _tests_task("text"),
    "mbpp_plus": _tests_task("prompt"),
}


def parse_tasks(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read `gsm8k,mmlu=FOLDER,humaneval_plus=FOLDER`.

    Returns:
        The names of all tasks, and the folders of those that have one.

    Raises:
        XtkError: a folder is missing, or its task has no form that is read from a folder.
    """
    names, folders = list[str](), dict[str, str]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, is_local, folder = part.partition("=")
        if name not in names:
            names.append(name)
        if not is_local:
            continue
        if name not in CODE_TASKS and name.partition("_")[0] != MMLU:
            raise unknown_name_error("task that is read from a folder", name, [MMLU, *CODE_TASKS])
        if not Path(folder).is_dir():
            raise XtkError("no such folder", where=part, hint=f"{name}=FOLDER, as the hub has it")
        folders[name] = folder
    if len({folder for name, folder in folders.items() if name not in CODE_TASKS}) > 1:
        raise XtkError("tasks of MMLU are read from one folder", where=text)
    return tuple(names), folders


def write_mmlu_tasks(folders: Mapping[str, str], output_folder: Path) -> list[Path]:
    """Write tasks for the harness that read MMLU from a folder, and are otherwise those of the harness.

    Args:
        folders: by task: `SUBJECT/test-*.parquet`, `SUBJECT/dev-*.parquet` are in it, as in `cais/mmlu`.
        output_folder: an empty folder.

    Returns:
        The folders of tasks for the harness, the later ones first; none if no task of MMLU has a folder.

    Raises:
        XtkError: files of a subject are missing.
    """
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    local = {name: Path(folder).absolute() for name, folder in folders.items() if name not in CODE_TASKS}
    if not local:
        return []
    own = Path(str(lm_eval.tasks.__file__)).parent / MMLU / "default"
    root, missing = next(iter(local.values())), list[str]()
    for path in sorted(own.glob(f"{MMLU}_*.yaml")):
        task = load_yaml(path, resolve_func=False)
        subject = str(task.get("dataset_name"))
        group = str(task.get("tag")).removesuffix("_tasks")
        files = {split: [str(one) for one in sorted((root / subject).glob(f"{split}-*.parquet"))]
                 for split in ("test", "dev")}  # fmt: skip
        if not all(files.values()):
            missing += [subject] if {MMLU, group, task["task"]} & local.keys() else []
            continue
        told = {"include": str(path), "task": task["task"], "tag": task.get("tag"), "dataset_path": "parquet",
                "dataset_name": None, "dataset_kwargs": {"data_files": files}}  # fmt: skip
        (output_folder / path.name).write_text(json.dumps(told))
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise XtkError(
            f"no test and dev files of {some}", where=str(root), hint="SUBJECT/test-*.parquet, SUBJECT/dev-*.parquet"
        )
    return [own, output_folder]


class CodeProblems:
    """Problems of code from a folder; answers are run in the sandbox, by the reward `tests`.

    Args:
        name: a key of `CODE_TASKS`.
        folder: `test-*.parquet` is in it, or in its folder `data`.
        limit: problems, the first ones; 0: all.
        chat: put as messages of a user.
        template_arguments: of the chat template.

    Raises:
        XtkError: there are no such files, or their rows have no tests.
    """

    def __init__(
        self, name: str, folder: str, limit: int, *, chat: bool, template_arguments: Mapping[str, Any]
    ) -> None:
        self.name, self._task, self._chat = name, CODE_TASKS[name], chat
        self._template_arguments = dict(template_arguments)
        files = [path for place in (folder, f"{folder}/data", f"{folder}/full")
                 for path in sorted(Path(place).glob("test-*.parquet"))]  # fmt: skip
        if not files:
            raise XtkError("no files test-*.parquet", where=f"{name}={folder}", hint="the folder as the hub has it")
        form = PromptFormat(self._task.chat_template if chat else self._task.base_template, as_chat=chat)
        self._prompts = read_prompts(Corpus([str(path) for path in files]), limit or None, form)
        self._rewards = WeightedRewards([parse_reward("tests")])
        check_rewards_apply(self._rewards, self._prompts)

    def evaluate(
        self, model: Any, tokenizer: Tokenizer, process_share: ProcessShare, *, keep_samples: bool
    ) -> tuple[AnswerScores, list[int], list[dict[str, Any]]]:
        """Return the answers of a model without sampling, the problems' numbers, and what was asked and answered."""
        from xtk.rollouts.transformers_generator import TransformersGenerator

        samples: list[dict[str, Any]] = []

        def keep(prompt: Prompt, one: Rollout) -> None:
            asked = "\n".join(segment.text for segment in prompt.document.segments)
            text = "".join(segment.text for segment in one.document.segments if segment.train)
            samples.append({"task": self.name, "problem": prompt.number, "filter": "none", "prompt": [asked],
                            "answers": [text], "pass@1": one.reward})  # fmt: skip

        stop: Sequence[str] = () if self._chat else self._task.stop_strings
        found = evaluate_answers(
            self._prompts, TransformersGenerator(model, tokenizer, batch_tokens=BATCH_TOKENS), tokenizer,
            SamplingConfig(0.0, 1.0, 0, MAX_ANSWER_TOKENS, tuple(stop)), self._rewards, process_share=process_share,
            template_arguments=self._template_arguments, on_answer=keep if keep_samples else None,
        )  # fmt: skip
        return found, [prompt.number for prompt in self._prompts], samples
