"""On-policy runs: the student generates completions, and online teachers score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.batches.combine_teachers import parse_ensemble
from xtk.data.corpus_reader import Corpus
from xtk.engines.backend import BackendConfig
from xtk.errors import XtkError
from xtk.rewards.reward_spec import WeightedRewards
from xtk.rollouts.prompts import check_rewards_apply, tokenize_prompts
from xtk.rollouts.rollout_record import Prompt
from xtk.runs.folder import run_fingerprint
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.references import check_online_references, online_sources, reference_fingerprints
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import TeacherSetup, plain_corpus, set_up_teachers
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler
from xtk.training.on_policy_loop import OnPolicyDocuments, OnPolicyLoop
from xtk.training.online_teacher_scoring import read_training_prompts
from xtk.training.student_generator import LogprobCheck, StudentGenerator
from xtk.training.train_config import RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, step_batch_builder


@dataclass(frozen=True, kw_only=True)
class OnPolicyInputs(RunInputs):
    """Inputs of an on-policy run."""

    source: OnPolicyDocuments
    config: OnPolicyConfig  # options of on-policy training

    def training_documents(self, recipe: TrainConfig, limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the prompts with a weight above 0, and the bytes of all prompts.

        With `lmbda` below 1, prompts whose document in the data is too long are skipped as in other runs.
        """
        documents = [prompt.document for prompt in self.source.prompts]
        sizes = np.array([len(document.text.encode()) for document in documents], np.int64)
        counting = np.flatnonzero([document.weight > 0 for document in documents])
        if not len(counting):
            raise XtkError(
                "the data has no prompt with a weight above 0", hint="use data with prompts, or another --weight-column"
            )
        if limit is not None and self.config.lmbda < 1:
            numbers = len(documents) * self.config.num_generations + np.arange(len(documents))
            data = [self.source.document(int(number)) for number in numbers]
            data_sizes = np.array([len(document.text.encode()) for document in data], np.int64)
            counting = np.setdiff1d(counting, self.documents_to_skip(recipe, limit, numbers, data_sizes))
            if not len(counting):
                raise XtkError("all documents of the data are too long", hint="use --long-documents truncate")
        return counting, sizes

    def sampler(
        self, recipe: TrainConfig, documents: NDArray[np.int64], sizes: NDArray[np.int64], documents_per_step: int
    ) -> PromptSampler:
        """Return the sampler of the prompts of each step."""
        return PromptSampler(documents, sizes, documents_per_step, recipe.seed, self.config)

    def teacher_blocks(self, run: TrainingRun) -> OnPolicyLoop:
        """Return the loop that generates and scores rollouts, and print its settings."""
        config = self.config
        assert isinstance(run.sampler, PromptSampler)
        model = replace(run.initial_student, dtype=config.dtype, name=str(run.initial_student.folder))
        options = {"servers": list(config.server), "engine": dict(config.engine)}
        request = BackendConfig(model, self.tokenizer, config.batch_tokens, options)
        generator = StudentGenerator(
            config,
            self.tokenizer,
            run.student,
            run.accelerator.device,
            request,
            lambda folder, dtype: run.saver.write_student(folder, dtype=dtype) if run.saver is not None else None,
            run.output,
            self.source.prompts,
            mixed_precision=run.recipe.mixed_precision,
            seed=run.recipe.seed,
        )
        terminal.note(f"distill: {config.describe(generator.describe(run.accelerator.num_processes))}")
        per_batch = config.steps_per_generation * run.sampler.documents_per_step
        if per_batch > (most := len(self.source.prompts) * config.num_generations):
            terminal.note(
                f"distill: a rollout batch (--steps-per-generation {config.steps_per_generation}) has {per_batch:,} "
                f"documents, but one completion for each of {most:,}: it trains some of them several times"
            )
        for teacher in self.source.online_teachers:
            terminal.note(f"distill: {teacher.describe_placement()}")
        may_truncate = run.recipe.long_documents != "refuse"
        generator.check_prompts(run.recipe.max_length or 0, may_truncate=may_truncate)
        check = None
        if not generator.uses_training_model:
            check = LogprobCheck(run.wrapped_student, run.parallel, run.packing_multiple, run.accelerator.device)
        return OnPolicyLoop(
            self.source, run.sampler, run.steps, config, run.output, run.accelerator, generator,
                run_fingerprint(run.identity),
            check, step_batch_builder(run).documents,
        )  # fmt: skip


def open_on_policy_inputs(
    paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str], config: OnPolicyConfig
) -> OnPolicyInputs:
    """Return the inputs of an on-policy run."""
    if not paths.online_teachers:
        raise XtkError(
            "xtk distill-on-policy needs --teacher", hint="add --teacher MODEL to score the student's completions"
        )
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, len(paths.online_teachers))
    corpus = plain_corpus(paths, recipe)
    is_routed = combination.method == "route"
    check_online_references(paths, recipe, combination)
    scoring = (*paths.online_teachers, *paths.references)
    prompts = read_training_prompts(scoring, corpus, config.prompt_format, is_routed=is_routed)
    check_rewards_apply(WeightedRewards(config.rewards), prompts)
    setup = set_up_teachers(paths, recipe, tokenizer, combination)
    source = _on_policy_source(config, prompts, corpus, setup, paths)
    fields = setup.input_fields(student, prompts=source.fingerprint(), **reference_fingerprints(paths.references))
    return OnPolicyInputs(source=source, **fields, ce_on_data_only=True, config=config)


def _on_policy_source(
    on_policy: OnPolicyConfig,
    prompts: Sequence[Prompt],
    corpus: Corpus,
    setup: TeacherSetup,
    paths: RunPaths,
) -> OnPolicyDocuments:
    """Return the source of on-policy documents: prompts, and with `lmbda` < 1 also the completions of the data."""
    conversation = next((prompt.document for prompt in prompts if prompt.document.conversation is not None), None)
    if conversation is not None and on_policy.environment:  # it sends the first message: prompts alone may not render
        _ = setup.tokenizer.chat_template
    elif conversation is not None:
        tokenize_prompts(setup.tokenizer, [conversation], on_policy.chat_template_kwargs)
    data: list[Document] = []
    if on_policy.lmbda < 1:
        form = on_policy.prompt_format
        data = [form.document_with_completion(record, corpus.columns, where) for record, where in corpus.records()]
        unanswered = next(
            (at for at, document in enumerate(data) if not any(part.train for part in document.segments)), None
        )
        if len(data) != len(prompts) or unanswered is not None:
            raise XtkError(
                "--lmbda below 1 also trains on completions in the data, but a prompt has no completion",
                where=f"{corpus.name}, document {unanswered or 0}",
                hint="give each prompt a completion, end messages with an assistant message, or use --lmbda 1",
            )
    projections = [
        None if teacher.has_students_tokenizer or teacher.support != "candidates" else teacher.projection
        for teacher in setup.teachers
    ]
    return OnPolicyDocuments(
        prompts,
        data,
        on_policy.num_generations,
        setup.tokenizer,
        [*paths.online_teachers, *paths.references],
        online_sources(setup, paths),
        [teacher.name for teacher in setup.teachers] if setup.combination.method == "route" else [],
        # Those of references are the same as those of their teachers.
        [*projections, *projections],
    )
