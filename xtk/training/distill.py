"""`xtk distill` as a function: opens and checks the inputs, loads the student, and starts the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.atomic_files import canonical_json, sha256
from xtk.artifacts.corpus_reader import Corpus, CorpusFingerprint, is_data_path
from xtk.artifacts.local_and_remote_folders import is_remote
from xtk.artifacts.model_resolver import weights_fingerprint
from xtk.artifacts.output_path_checks import check_output_folder
from xtk.artifacts.run_folders import run_fingerprint
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.artifacts.write_locks import exclusive_write_lock
from xtk.errors import MismatchError, XtkError
from xtk.losses import AUTO_LOSS, LOSSES
from xtk.losses.loss_term import LossTerm
from xtk.name_registry import load_registered
from xtk.projection.projection import Projection
from xtk.rollouts.prompts import tokenize_prompts
from xtk.rollouts.rollout_record import Prompt
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.document import Document
from xtk.tokens.normalization_changes import count_normalization_loss
from xtk.tokens.token_sequence import count_lost_bytes, format_lost_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.combine_teachers import ScoreWeighting, TeacherEnsemble, parse_ensemble
from xtk.training.data_sources import (
    CacheSource,
    DocumentSource,
    MixtureSource,
    TextSource,
    match_documents,
    route_documents,
)
from xtk.training.losses_per_teacher import AssignedLoss, DistillationTeacher, assign_losses, open_teachers
from xtk.training.metrics_file import metric_name
from xtk.training.micro_batches import BatchBuilder, BatchSampler
from xtk.training.model_card import Provenance, public_model_name
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler
from xtk.training.on_policy_loop import OnPolicyLoop, OnPolicySource
from xtk.training.online_teacher_scoring import (
    OnlineSource,
    TeacherBlocks,
    create_teacher_blocks,
    read_training_documents,
    read_training_prompts,
)
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xtk.models.causal_lm import BackboneWithHead
    from xtk.models.student_model_setup import StudentSource
    from xtk.training.held_out_evaluation import HeldOutData, HeldOutEvaluator
    from xtk.training.parallel_config import ParallelConfig
    from xtk.training.task_evaluation import TaskEvaluator
    from xtk.training.training_loop import TrainingRun

DOCUMENTS_PER_CHECK = 1000
TRACKERS = "trackers"


@dataclass(frozen=True)
class DistillInputs:
    """The opened inputs of a run, checked against each other.

    Attributes:
        source: documents, with teacher outputs.
        tokenizer: the student's tokenizer.
        objectives: the terms of the loss.
        identity: losses and input fingerprints, which decide with the options whether two runs are the same.
        teachers: the teachers' names in metrics.
        score_weighting: how teacher weights follow from their log-probabilities; None: the weights are fixed.
        auto_loss_note: the losses that `--loss auto` chose and why; "": it was not used.
        held_out: held-out caches for evaluation; None: there are none.
        provenance: base model, teachers and data, for the model card.
        ce_on_data_only: whether losses without a teacher ignore documents that the student generated.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    objectives: tuple[LossTerm, ...]
    identity: dict[str, Any]
    teachers: tuple[str, ...] = ()
    score_weighting: ScoreWeighting | None = None
    auto_loss_note: str = ""
    held_out: HeldOutData | None = None
    provenance: Provenance = field(default_factory=Provenance)
    ce_on_data_only: bool = False

    def batch_builder(self, max_length: int | None, packing_multiple: int = 0) -> BatchBuilder:
        """Return the builder of micro-batches.

        Args:
            max_length: maximum number of tokens of a document.
            packing_multiple: with packing, the length of a packed sequence is a multiple of this; 0: no packing.
        """
        return BatchBuilder(
            self.source, self.tokenizer, self.objectives, max_length, self.score_weighting, self.teachers,
                packing_multiple,
            ce_on_data_only=self.ce_on_data_only,
        )  # fmt: skip


def open_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer) -> DistillInputs:
    """Return the opened caches and projections, checked against each other and the student.

    Raises:
        XtkError: one of them cannot be read, or they do not match.
    """
    local = [Path(cache) for cache in paths.data if not is_remote(cache)]
    models = [paths.student, *(teacher.request.teacher_folder for teacher in paths.online_teachers)]
    models += [paths.adapter] if paths.adapter else []
    check_output_folder(paths.output, "a student", (*models, *local, *paths.projections))
    student = {"weights": weights_fingerprint(paths.student), "tokenizer": tokenizer.fingerprint}
    if paths.adapter:
        student["adapter"] = weights_fingerprint(paths.adapter)
    alone = all(loss.name != AUTO_LOSS and _on_text(loss.name) for loss in recipe.losses)
    online = paths.online_teachers
    on_policy = recipe.on_policy
    if on_policy is not None and not online:
        raise XtkError("--on-policy needs --teacher", hint="add --teacher MODEL to score the student's completions")
    plain = alone and not online and not any(is_cache(cache) for cache in paths.data)
    num_teachers = 1 if plain else len(online or paths.data)
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, num_teachers)
    if plain and paths.eval_caches:
        raise XtkError(
            "--eval-data is a cache, but no loss uses a teacher", where=paths.eval_caches[0],
            hint="give --eval-data the documents as text or JSONL",
        )  # fmt: skip
    if plain:
        return _text_inputs(paths, recipe, tokenizer, student)
    corpus = Corpus(list(paths.data), paths.columns, paths.max_document_bytes) if online else None
    if corpus is None:
        _check_caches(paths, recipe)
    else:
        _check_online_teachers(paths, alone=alone)
        if on_policy is not None:
            prompts = read_training_prompts(online, corpus, on_policy.prompt_format)
        else:
            documents, sizes = read_training_documents(online, corpus, is_routed=combination.method == "route")
    teachers = open_teachers(paths.data, paths.projections, tokenizer, online)
    assigned, auto_note = assign_losses(recipe.losses, teachers, on_policy=on_policy is not None)
    _check_loss_scaling(recipe, assigned)
    if combination.method == "mixture":
        _check_mixable(teachers)
    if combination.score_weighting is not None:
        _check_score(combination.score_weighting.score, teachers)
    names = _teacher_names(combination, teachers)
    source: DocumentSource
    if corpus is None:
        source = _cache_source(combination, teachers)
    elif on_policy is not None:
        source = _on_policy_source(on_policy, prompts, corpus, combination, teachers, tokenizer)
    else:
        source = OnlineSource(documents, online, sizes, paths.columns, partial(_combined_source, combination))
    if combination.method == "mixture":
        assigned = _losses_on_mixture(assigned, teachers)
    objectives = tuple(_loss_term(one, combination, teachers, names) for one in assigned)
    held_out = None
    if paths.eval_caches:
        held_out = _open_held_out(paths, combination, teachers, assigned, objectives, tokenizer)
    return DistillInputs(
        source,
        tokenizer,
        objectives,
        {
            "losses": [_loss_description(one, names) for one in assigned],
            "inputs": {
                "student": student,
                **_input_fingerprints(assigned, teachers),
                **({"prompts": source.fingerprint()} if isinstance(source, OnPolicySource) else {}),
            },
        },
        names,
        combination.score_weighting,
        auto_note,
        held_out,
        Provenance(public_model_name(paths.student), [one.identity for one in teachers], _data_fingerprints(teachers)),
        ce_on_data_only=on_policy is not None,
    )


def _on_policy_source(
    on_policy: OnPolicyConfig,
    prompts: Sequence[Prompt],
    corpus: Corpus,
    combination: TeacherEnsemble,
    teachers: Sequence[DistillationTeacher],
    tokenizer: Tokenizer,
) -> OnPolicySource:
    """Return the source of on-policy documents: prompts, and with `lmbda` < 1 also the completions of the data."""
    conversation = next((one.document for one in prompts if one.document.conversation is not None), None)
    if conversation is not None and on_policy.environment:  # it sends the first message: prompts alone may not render
        _ = tokenizer.chat_template
    elif conversation is not None:
        tokenize_prompts(tokenizer, [conversation], on_policy.chat_template_kwargs)
    data: list[Document] = []
    if on_policy.lmbda < 1:
        form = on_policy.prompt_format
        data = [form.document_with_completion(record, corpus.columns, where) for record, where in corpus.records()]
        unanswered = next((at for at, one in enumerate(data) if not any(part.train for part in one.segments)), None)
        if len(data) != len(prompts) or unanswered is not None:
            raise XtkError(
                "--lmbda below 1 also trains on completions in the data, but a prompt has no completion",
                where=f"{corpus.name}, document {unanswered or 0}",
                hint="give each prompt a completion, end messages with an assistant message, or use --lmbda 1",
            )
    projections = [
        None if one.has_students_tokenizer or one.support != "candidates" else one.projection for one in teachers
    ]
    return OnPolicySource(
        prompts,
        data,
        on_policy.num_generations,
        tokenizer,
        [one.source for one in teachers if isinstance(one.source, OnlineTeacher)],
        [one.name for one in teachers] if combination.method == "route" else [],
        projections,
        partial(_combined_source, combination),
    )


def _open_held_out(
    paths: RunPaths,
    combination: TeacherEnsemble,
    teachers: Sequence[DistillationTeacher],
    assigned: Sequence[AssignedLoss],
    objectives: tuple[LossTerm, ...],
    tokenizer: Tokenizer,
) -> HeldOutData:
    """Return the opened held-out caches: one per teacher, in the order of the teachers.

    Raises:
        XtkError: they come from other teachers, or do not store what a loss needs.
    """
    from xtk.training.held_out_evaluation import HeldOutData

    if len(paths.eval_caches) != len(teachers):
        raise XtkError(
            f"--eval-data has {len(paths.eval_caches)} caches for {len(teachers)} teachers",
            where=", ".join(paths.eval_caches),
            hint="give one held-out cache per teacher, in the order of the training caches",
        )
    held = open_teachers(paths.eval_caches, (), tokenizer)
    for ours, theirs in zip(teachers, held, strict=True):
        if any(ours.identity[key] != theirs.identity[key] for key in ("tokenizer", "embedding_rows")):
            raise MismatchError(
                "a cache of --eval-data is from a teacher with another vocabulary than its training cache",
                where=f"{theirs.path} is from {theirs.name}; {ours.path} from {ours.name}",
                hint="run xtk cache-teacher with the same teacher; give the caches in the same order",
            )
    for number, theirs in enumerate(held):
        refusals = [theirs.refusal(one.loss) for one in assigned if one.teacher == number]
        if refusal := next(filter(None, refusals), None):
            raise refusal
    names = _teacher_names(combination, teachers)
    matchings = tuple(
        ours.token_matching({one.rule.comparison_space for one in assigned if one.teacher == number})
        if theirs.has_exact_top1
        else None
        for number, (ours, theirs) in enumerate(zip(teachers, held, strict=True))
    )
    source = _cache_source(combination, held)
    return HeldOutData(source, objectives, names, combination.score_weighting, matchings[: len(names)])


def _on_text(name: str) -> bool:
    """Return whether a loss needs no teacher."""
    return bool(load_registered(LOSSES, name, "loss").comparison_space == "text")


def _text_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]) -> DistillInputs:
    """Return the inputs of a run without a teacher."""
    assigned, _ = assign_losses(recipe.losses, [])
    _check_loss_scaling(recipe, assigned)
    documents = list(Corpus(list(paths.data), paths.columns, paths.max_document_bytes))
    fingerprint = CorpusFingerprint()
    for document in documents:
        fingerprint.add(document)
    identity = {
        "losses": [str(one.loss) for one in assigned],
        "inputs": {"student": student, "documents": str(fingerprint)},
    }
    objectives = tuple(
        LossTerm(one.rule, one.loss.make_divergence(), None, one.loss.name, one.loss.weight) for one in assigned
    )
    origin = Provenance(public_model_name(paths.student), data=[str(fingerprint)])
    return DistillInputs(TextSource(documents), tokenizer, objectives, identity, provenance=origin)


def _cache_source(combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher]) -> DocumentSource:
    """Return the documents of all caches, combined by the method of `--combine-teachers`."""
    caches = [teacher.source for teacher in teachers if isinstance(teacher.source, TeacherCache)]
    if len(caches) == 1:
        return CacheSource(*caches)
    if combination.method == "route":
        return CacheSource(*caches, rows=route_documents(caches, [teacher.name for teacher in teachers]))
    return _combined_source(combination, caches, match_documents(caches))


def _teacher_names(combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher]) -> tuple[str, ...]:
    """Return the teachers' names in metrics; a mixture has one."""
    return ("mixture",) if combination.method == "mixture" else tuple(teacher.name for teacher in teachers)


def _combined_source(
    combination: TeacherEnsemble, caches: Sequence[TeacherCache], rows: NDArray[np.int64]
) -> DocumentSource:
    """Return the matched documents of several caches."""
    if combination.method == "mixture":
        return MixtureSource(*caches, rows=rows, weights=combination.weights)
    return CacheSource(*caches, rows=rows)


def _check_score(score: str, teachers: Sequence[DistillationTeacher]) -> None:
    """Check that the score of --teacher-weights can be computed from each teacher.

    Raises:
        XtkError: a cache does not have the exact top-1 tokens that the score needs.
    """
    lacking = next((one for one in teachers if score == "max-probability" and not one.has_exact_top1), None)
    if lacking is not None:
        raise XtkError(
            "--teacher-weights max-probability needs the exact most likely token of each position",
            where=f"{lacking.path} has the support {lacking.support}",
            hint="use --teacher-weights ce, or caches with the support top-k+sample, top-k or top-p",
        )


def _check_mixable(teachers: Sequence[DistillationTeacher]) -> None:
    first, *others = teachers
    for other in others:
        if other.identity["tokenizer"] != first.identity["tokenizer"]:
            raise MismatchError(
                "--combine-teachers mixture needs teachers with the same tokenizer",
                where=f"{first.path} and {other.path}",
                hint="use --combine-teachers sum",
            )


def _check_caches(paths: RunPaths, recipe: TrainConfig) -> None:
    """Raise XtkError for plain data with a loss that needs a teacher, and for column options that caches ignore."""
    for place in paths.data:
        if is_data_path(place):
            names = [loss.name for loss in recipe.losses if loss.name == AUTO_LOSS or not _on_text(loss.name)]
            raise XtkError(
                f"--loss {names[0]} needs teacher log-probabilities, but CACHE is plain data",
                where=place,
                hint=f"run xtk cache-teacher TEACHER {place} -o CACHE and pass CACHE; or use --teacher TEACHER",
            )
    for name in ("weight", "route"):
        if name in paths.columns:
            raise XtkError(
                f"--{name}-column applies only to plain data; a teacher cache stores the {name} of each document",
                where=paths.data[0],
                hint=f"set it when the cache is written: xtk cache-teacher ... --{name}-column {paths.columns[name]}",
            )


def _check_online_teachers(paths: RunPaths, *, alone: bool) -> None:
    """Raise XtkError for online teachers without a loss that uses them, or together with caches."""
    if alone:
        raise XtkError("--teacher is given, but no --loss uses a teacher", hint="remove --teacher, or use --loss auto")
    for place in paths.data:
        if is_cache(place):
            raise XtkError(
                "--teacher needs plain data, but CACHE is a teacher cache",
                where=place,
                hint="give the data that the cache was made from, or remove --teacher to train from the cache",
            )


def _losses_on_mixture(assigned: Sequence[AssignedLoss], teachers: Sequence[DistillationTeacher]) -> list[AssignedLoss]:
    """Return the losses on the mixture: those of the teacher with the least support, if all teachers allow them.

    Raises:
        XtkError: a loss cannot be computed from one of the teachers.
    """
    least = next((number for number, teacher in enumerate(teachers) if teacher.support == "none"), 0)
    losses = [one for one in assigned if one.teacher in (None, least)]
    for one in losses:
        for teacher in teachers:
            if refusal := teacher.refusal(one.loss):
                raise refusal
    return [one if one.teacher is None else replace(one, teacher=0) for one in losses]


def _loss_term(
    one: AssignedLoss, combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher], names: tuple[str, ...]
) -> LossTerm:
    rule, divergence, loss = one.rule, one.loss.make_divergence(), one.loss
    if one.teacher is None:
        return LossTerm(rule, divergence, None, loss.name, loss.weight)
    alone = combination.method in ("mixture", "route") or combination.score_weighting is not None
    return LossTerm(
        rule,
        divergence,
        teachers[one.teacher].comparison_space(rule.comparison_space),
        metric_name(loss.name, names[one.teacher], names),
        loss.weight,
        one.teacher,
        teacher_weight=1.0 if alone else combination.weights[one.teacher],
        denominator_group=("auto" if one.is_auto else loss.name) if combination.method == "route" else "",
    )


def _loss_description(one: AssignedLoss, names: tuple[str, ...]) -> str:
    """Return a loss as the recipe describes it."""
    return str(one.loss) if one.teacher is None or len(names) == 1 else f"{one.loss} of {names[one.teacher]}"


def _input_fingerprints(assigned: Sequence[AssignedLoss], teachers: Sequence[DistillationTeacher]) -> dict[str, Any]:
    """Return the fingerprints of caches or online teachers, and of the projections that are given or needed."""
    needed = {one.teacher for one in assigned if one.rule.comparison_space == "projection"}
    caches = [sha256(canonical_json(teacher.source.manifest)) for teacher in teachers]
    kind = "teacher" if any(teacher.is_online for teacher in teachers) else "cache"
    projections = [
        _projection_fingerprint(teacher.projection) if number in needed or teacher.named_projection else None
        for number, teacher in enumerate(teachers)
    ]
    if len(teachers) == 1:
        return {kind: caches[0], "projection": projections[0]}
    return {f"{kind}s": caches, "projections": projections}


def _data_fingerprints(teachers: Sequence[DistillationTeacher]) -> list[str]:
    """Return the distinct fingerprints of the data that the teachers scored."""
    headers = [teacher.source.header["data"] for teacher in teachers]
    return list(dict.fromkeys(part["fingerprint"] for header in headers for part in header.get("sources", [header])))


def _projection_fingerprint(projection: Projection) -> str:
    return sha256(projection.row_offsets.tobytes() + projection.teacher_ids.tobytes() + projection.weights.tobytes())


def _check_loss_scaling(recipe: TrainConfig, assigned: Sequence[AssignedLoss]) -> None:
    """Raise XtkError for `--scale-kd-to ce` without both a CE loss and a distillation loss."""
    both = {one.teacher is None for one in assigned}
    if recipe.scale_kd_to == "ce" and both != {True, False}:
        raise XtkError(
            "--scale-kd-to ce needs a CE loss and a distillation loss, but --loss gives only one of them",
            hint="give both, for example --loss ce --loss auto; or remove --scale-kd-to",
        )


def run_identity(
    recipe: TrainConfig, inputs: DistillInputs, num_data_shards: int, logging_config: LoggingConfig
) -> dict[str, Any]:
    """Return the options and fingerprints that decide whether two runs are the same.

    Raises:
        XtkError: early stopping without evaluation.
    """
    held_out: dict[str, Any] = {}
    if recipe.early_stopping_patience:
        if not ((logging_config.eval_documents or inputs.held_out) and logging_config.eval_steps):
            raise XtkError(
                "--early-stopping-patience needs evaluations during training",
                hint="add --eval-data DATA --eval-steps N",
            )
        fingerprint = CorpusFingerprint()
        caches = None if inputs.held_out is None else inputs.held_out.source
        for document in logging_config.eval_documents if caches is None else map(caches.document, range(len(caches))):
            fingerprint.add(document)
        held_out = {"eval_documents": str(fingerprint), "eval_steps": logging_config.eval_steps}
    return {**recipe.identity(num_data_shards), **inputs.identity, **held_out}


def _print_plan(run: TrainingRun, inputs: DistillInputs, per_step: int, documents: int) -> None:
    """Print the losses, the number of steps and the parallel layout of a run that begins."""
    if inputs.auto_loss_note:
        terminal.note(f"distill: --loss auto chose {inputs.auto_loss_note}")
    if per_step < run.recipe.documents_per_step(run.parallel.num_data_shards):
        terminal.note(f"distill: {_small_epoch_note(run.recipe, per_step, run.parallel)}")
    terminal.note(
        f"distill: {run.steps:,} steps of {per_step} documents, {documents:,} documents, "
        f"{run.parallel.describe()} on {run.accelerator.device.type}"
    )


def distill(
    paths: RunPaths, recipe: TrainConfig, logging_config: LoggingConfig, inputs: DistillInputs, *, force: bool,
        trust_remote_code: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a student and return the content of its manifest; runs in this process, which may be one of several.

    Args:
        paths: inputs and output.
        recipe: the options that decide the result.
        logging_config: logging, evaluation and checkpoints.
        inputs: from `open_inputs`.
        force: replace a run with other options or inputs.
        trust_remote_code: run the model's own Python code.
        options: the same as command-line options, stored in `recipe.json`.

    Returns:
        The content of the run's `xtk.json`: steps, recipe, last metrics.
    """
    from accelerate.utils import set_seed

    from xtk.models.causal_lm import max_context_length, silence_transformers
    from xtk.models.student_model_setup import StudentSource, has_mergeable_adapter, is_peft_model
    from xtk.training.batch_prefetch import report_killed_workers
    from xtk.training.checkpoint import ResumePoint, find_checkpoint, find_existing_run, prepare_run_folder
    from xtk.training.experiment_trackers import start_trackers
    from xtk.training.parallel_config import parse_parallel
    from xtk.training.process_group import report_lost_processes
    from xtk.training.student_with_losses import parallelize
    from xtk.training.training_loop import TrainingRun, train

    silence_transformers()
    accelerator = _start_accelerator(paths, recipe, logging_config)
    terminal.set_main_process(accelerator.is_main_process)
    layout = parse_parallel(recipe.parallel, accelerator.num_processes).with_mesh(accelerator.device)
    identity = run_identity(recipe, inputs, layout.num_data_shards, logging_config)
    finished = find_existing_run(paths.output, identity, force=force)
    if finished is not None:
        return finished
    keeps_best = recipe.early_stopping_patience > 0
    resumed = ResumePoint() if force else find_checkpoint(paths.output, identity, needs_best=keeps_best)
    set_seed(recipe.seed)
    origin = StudentSource(paths.student, paths.adapter, resumed.folder)
    student = _load_student(origin, recipe, inputs, accelerator, layout, trust_remote_code)
    _check_student_not_replaced(paths, inputs)
    limits = [limit for limit in (max_context_length(student.model.config), recipe.max_length) if limit]
    limit = min(limits) if limits else None
    on_policy = recipe.on_policy is not None
    documents, sizes = _training_prompts(inputs) if on_policy else _training_documents(recipe, inputs, limit)
    _check_student_options(recipe, paths.online_teachers, layout, is_peft_model(student.model))
    packed = recipe.packing and student.enable_packing()
    if recipe.packing and not packed:
        terminal.note("distill: warning: the student's architecture does not support --packing; documents are padded")
    if recipe.preparation.torch_compile:
        student.compile_backbone()
    with contextlib.ExitStack() as held:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            held.enter_context(exclusive_write_lock(paths.output, "student"))
            prepare_run_folder(paths.output, options or {}, identity, resumed, force=force)
        accelerator.wait_for_everyone()
        if logging_config.report_to:
            start_trackers(accelerator, paths.output / TRACKERS, resumed.step, identity)
        trained, parameters = parallelize(student, accelerator, layout, packing=packed, offload=recipe.fsdp_offload)
        packing = layout.length_multiple if packed else 0
        per_step = recipe.effective_documents_per_step(len(documents), layout.num_data_shards)
        run = TrainingRun(
            accelerator=accelerator,
            parallel=layout,
            student=student,
            wrapped_student=trained,
            parameters=parameters,
            tokenizer=inputs.tokenizer,
            batch_builder=inputs.batch_builder(limit, packing),
            sampler=_batch_sampler(recipe, documents, sizes, per_step),
            recipe=recipe,
            logging_config=logging_config,
            steps=recipe.num_steps(len(documents), layout.num_data_shards),
            output=paths.output,
            tokenizer_folder=paths.student,
            held_out_evaluator=_held_out_evaluator(
                inputs, logging_config, student, trained, packing, layout, accelerator.device
            ),
            task_evaluator=_task_evaluator(logging_config, student, inputs, recipe),
            provenance=inputs.provenance,
            merge_adapter=_adapter_merger(paths, recipe, inputs, trust_remote_code)
            if has_mergeable_adapter(student.model)
            else None,
        )
        run.resume_point = resumed
        run.teacher_blocks = _teacher_blocks(run, inputs, paths, packing, run_fingerprint(identity), trust_remote_code)
        _print_plan(run, inputs, per_step, len(documents))
        with report_killed_workers(), report_lost_processes():
            return train(run, identity)


def _small_epoch_note(recipe: TrainConfig, per_step: int, layout: ParallelConfig) -> str:
    """Return the note that a step would take more documents than an epoch has."""
    what = "documents of the data" if recipe.on_policy is None else "completions of all prompts"
    return (
        f"each step uses all {per_step:,} {what} once: --per-device-train-batch-size x --gradient-accumulation-steps "
        f"x processes is {recipe.documents_per_step(layout.num_data_shards):,}"
    )


def _held_out_evaluator(
    inputs: DistillInputs, logging_config: LoggingConfig, student: BackboneWithHead, trained: nn.Module, packing: int,
        layout: ParallelConfig,
    device: torch.device,
) -> HeldOutEvaluator | None:  # fmt: skip
    """Return the evaluator of held-out documents; None: there are none."""
    from xtk.models.causal_lm import max_context_length
    from xtk.training.held_out_evaluation import HeldOutData, HeldOutEvaluator

    data = inputs.held_out or HeldOutData.of_documents(logging_config.eval_documents)
    if not len(data.source):
        return None
    return HeldOutEvaluator(
        data, trained, inputs.tokenizer, max_context_length(student.model.config), packing, layout, device
    )


def _task_evaluator(
    logging_config: LoggingConfig, student: BackboneWithHead, inputs: DistillInputs, recipe: TrainConfig
) -> TaskEvaluator | None:
    """Return the evaluator of `--eval-tasks`; None: there are none."""
    from xtk.training.task_evaluation import TaskEvaluator

    if not logging_config.eval_tasks:
        return None
    return TaskEvaluator(logging_config.eval_tasks, student, inputs.tokenizer, recipe.mixed_precision)


def _check_student_options(
    recipe: TrainConfig, teachers: Sequence[OnlineTeacher], layout: ParallelConfig, adapted: bool
) -> None:
    """Check that the sharded student can generate, be offloaded, or be its own teacher, as the options require.

    Raises:
        XtkError: it cannot.
    """
    from xtk.training.student_generator import check_generation_backend

    if recipe.on_policy is not None:
        check_generation_backend(recipe.on_policy, layout)
        recipe.on_policy.check_batch(recipe.documents_per_step(layout.num_data_shards))
    if recipe.offload_student and not teachers:
        raise XtkError("--offload-student needs --teacher", hint="remove --offload-student, or add --teacher MODEL")
    if recipe.offload_student and layout.is_sharded:
        raise XtkError(
            f"--offload-student needs an unsharded student, and --parallel is {layout}", hint="use --fsdp-offload"
        )
    self_weights = {teacher.student_weights for teacher in teachers} - {""}
    if self_weights and layout.is_sharded:
        raise XtkError(
            f"--teacher self needs an unsharded student, and --parallel is {layout}",
            hint="use --parallel dp=N; or --teacher with the student's folder, for its initial weights",
        )
    if "ema" in self_weights and not recipe.ema_decay:
        raise XtkError("--teacher self:weights=ema needs --ema-decay", hint="add --ema-decay 0.99")
    if "base" in self_weights and not adapted:
        raise XtkError("--teacher self:weights=base needs a student with an adapter", hint="add --lora-r 16")


def _batch_sampler(recipe: TrainConfig, documents: np.ndarray, sizes: np.ndarray, per_step: int) -> BatchSampler:
    """Return the sampler of the documents, or prompts, of each step."""
    if recipe.on_policy is None:
        return BatchSampler(documents, sizes, per_step, recipe.seed)
    return PromptSampler(documents, sizes, per_step, recipe.seed, recipe.on_policy)


def _teacher_blocks(
    run: TrainingRun, inputs: DistillInputs, paths: RunPaths, packing: int, fingerprint: str, trust_remote_code: bool
) -> TeacherBlocks | None:
    """Return the teacher blocks of a run with online teachers, or its on-policy loop, and print its settings."""
    on_policy = run.recipe.on_policy
    if on_policy is None:
        return create_teacher_blocks(
            inputs.source, run.sampler, run.steps, run.recipe.teacher_block_steps, paths.output, run.accelerator
        )
    from xtk.engines.backend import BackendConfig
    from xtk.training.engine_logprob_check import LogprobCheck
    from xtk.training.student_generator import StudentGenerator

    assert isinstance(inputs.source, OnPolicySource)
    assert isinstance(run.sampler, PromptSampler)
    options: dict[str, Any] = {"adapter": paths.adapter} if paths.adapter else {}
    options |= {"servers": list(on_policy.server), "engine": dict(on_policy.engine)}
    request = BackendConfig(paths.student, str(paths.student), inputs.tokenizer, on_policy.dtype,
                            on_policy.batch_tokens, trust_remote_code, options)  # fmt: skip
    writer = StudentGenerator(
        on_policy,
        inputs.tokenizer,
        run.student,
        request,
        lambda folder: run.saver.write_student(folder) if run.saver is not None else None,
        paths.output,
        mixed_precision=run.recipe.mixed_precision,
        seed=run.recipe.seed,
    )
    terminal.note(f"distill: {on_policy.describe(writer.describe(run.accelerator.num_processes))}")
    for teacher in inputs.source.teachers:
        terminal.note(f"distill: {teacher.describe_placement()}")
    check = None
    if not writer.uses_training_model:
        check = LogprobCheck(run.wrapped_student, run.parallel, packing, run.accelerator.device)
    return OnPolicyLoop(
        inputs.source, run.sampler, run.steps, on_policy, paths.output, run.accelerator, writer, fingerprint, check
    )


def _start_accelerator(paths: RunPaths, recipe: TrainConfig, logging_config: LoggingConfig) -> Any:
    """Join the process group; return Accelerate's accelerator.

    Raises:
        XtkError: a tracker is not installed, Accelerate is configured to shard the model itself, or DataLoader workers
            are used with online teachers.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from xtk.training.experiment_trackers import check_trackers
    from xtk.training.process_group import init_process_group_after_restart

    check_trackers(logging_config.report_to)
    if paths.online_teachers and logging_config.dataloader_num_workers:
        raise XtkError("--teacher does not support --dataloader-num-workers", hint="use --dataloader-num-workers 0")
    timeout = timedelta(seconds=logging_config.ddp_timeout)
    init_process_group_after_restart(timeout)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=list(logging_config.report_to) or None,
        project_dir=str(paths.output / TRACKERS) if logging_config.report_to else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise XtkError(
            f"Accelerate is configured for {kind}, but xtk distill shards the model itself (--parallel)",
            hint="use accelerate launch --multi_gpu -m xtk distill ... --parallel fsdp=N",
        )
    return accelerator


def _check_student_not_replaced(paths: RunPaths, inputs: DistillInputs) -> None:
    """Raise MismatchError if the student's files are not those of the recipe any more."""
    stated = inputs.identity["inputs"]["student"]
    for name, folder in (("weights", paths.student), ("adapter", paths.adapter)):
        if folder is not None and weights_fingerprint(folder) != stated[name]:
            raise MismatchError(
                "the files of the student were replaced since the run started",
                where=str(folder),
                hint="restore them, and run the same command again",
            )


def _load_student(
    origin: StudentSource,
    recipe: TrainConfig,
    inputs: DistillInputs,
    accelerator: Any,
    layout: ParallelConfig,
    trust_remote_code: bool,
) -> BackboneWithHead:
    """Return the student, unsharded, split into backbone and output head."""
    import torch

    from xtk.models.causal_lm import BackboneWithHead
    from xtk.models.student_model_setup import load_student

    model = load_student(
        origin,
        recipe.preparation,
        inputs.tokenizer,
        # With sharding, each process's shard moves to its device later.
        device=torch.device("cpu") if layout.is_sharded else accelerator.device,
        mixed_precision=recipe.mixed_precision,
        trust_remote_code=trust_remote_code,
    )
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return BackboneWithHead(model)


def _adapter_merger(
    paths: RunPaths, recipe: TrainConfig, inputs: DistillInputs, trust_remote_code: bool
) -> Callable[[Path, Path], None]:
    """Return a function (adapter folder, output folder) that loads student and adapter and writes the merged model."""
    import torch

    from xtk.models.student_model_setup import StudentSource, load_student, save_final_student

    def merge(adapter: Path, folder: Path) -> None:
        model = load_student(
            StudentSource(paths.student, paths.adapter, adapter),
            recipe.preparation,
            inputs.tokenizer,
            device=torch.device("cpu"),
            mixed_precision=recipe.mixed_precision,
            trust_remote_code=trust_remote_code,
            quiet=True,
        )
        _check_student_not_replaced(paths, inputs)
        save_final_student(model, folder)

    return merge


def _report_normalization(inputs: DistillInputs, documents: np.ndarray) -> None:
    """Print how much text the student's tokenizer or chat template changes, on a sample of the documents."""
    sample = documents[:: -(-len(documents) // DOCUMENTS_PER_CHECK) or 1]
    read = [inputs.source.document(int(number)) for number in sample]
    texts = [document.text for document in read if document.conversation is None]
    if warning := count_normalization_loss(inputs.tokenizer, texts).warning():
        terminal.note(f"distill: {warning}")
    conversations = [document for document in read if document.conversation is not None]
    tokenized = tokenize_documents(inputs.tokenizer, conversations)
    counts = [count_lost_bytes(*pair) for pair in zip(conversations, tokenized, strict=True)]
    if sum(counts):
        terminal.note("distill: " + format_lost_bytes(counts))


def _longer_than(limit: int, inputs: DistillInputs, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return (tokens, index) of the documents with more than `limit` tokens.

    A text has at most one token per byte and two special tokens, so only texts that may be longer are tokenized.
    Conversations are always tokenized, because the length of their template is not known.
    """
    found = []
    conversations = inputs.source.conversations()
    candidates = np.flatnonzero((sizes + 2 > limit) | conversations)
    for start in range(0, len(candidates), DOCUMENTS_PER_CHECK):
        numbers = candidates[start : start + DOCUMENTS_PER_CHECK].tolist()
        documents = [inputs.source.document(number) for number in numbers]
        for number, sequence in zip(numbers, tokenize_documents(inputs.tokenizer, documents), strict=True):
            if len(sequence) > limit:
                found.append((len(sequence), number))
    return found


def _training_prompts(inputs: DistillInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the prompts with a weight above 0, and the bytes of all prompts."""
    assert isinstance(inputs.source, OnPolicySource)
    documents = [prompt.document for prompt in inputs.source.prompts]
    sizes = np.array([len(document.text.encode()) for document in documents], np.int64)
    counting = np.flatnonzero([document.weight > 0 for document in documents])
    if not len(counting):
        raise XtkError(
            "the data has no prompt with a weight above 0",
            hint="use data with prompts, or another --weight-column",
        )
    return counting, sizes


def _training_documents(recipe: TrainConfig, inputs: DistillInputs, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the documents to train on, and the bytes of all; report documents that are too long."""
    sizes = inputs.source.text_bytes()
    weightless = inputs.source.weights() == 0
    documents = np.flatnonzero((sizes > 0) & ~weightless)
    if weightless.any():
        terminal.note(f"distill: skipping {weightless.sum():,} of {len(sizes):,} documents, whose weight is 0")
    _report_normalization(inputs, documents)
    too_long = [] if limit is None else _longer_than(limit, inputs, sizes)
    if too_long:
        longest, number = max(too_long)
        message = f"{len(too_long):,} of {len(sizes):,} documents have more tokens than the limit of {limit:,}"
        if recipe.long_documents == "refuse":
            raise XtkError(
                message,
                where=f"the longest is document {number} with {longest:,} tokens",
                hint="use --long-documents truncate or --long-documents skip",
            )
        terminal.note(f"distill: {message}: --long-documents {recipe.long_documents}")
        if recipe.long_documents == "skip":
            documents = np.setdiff1d(documents, [number for _, number in too_long])
    if not len(documents):
        raise XtkError(
            "no document is left to train on: all are empty, have the weight 0 or are too long",
            hint="use other data or --weight-column, or --long-documents truncate",
        )
    return documents, sizes
