"""From the inputs of `xtk distill` to a finished student: what is checked before, and in which processes it runs."""

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
from xtk.artifacts.corpus import Corpus, CorpusFingerprint, is_data_path
from xtk.artifacts.model_resolver import weights_fingerprint
from xtk.artifacts.output_checks import check_output_folder
from xtk.artifacts.storage import is_remote
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.artifacts.write_locks import exclusive_write_lock
from xtk.errors import MismatchError, XtkError
from xtk.losses import AUTO_LOSS, LOSSES
from xtk.losses.loss_term import LossTerm
from xtk.projection.projection import Projection
from xtk.registry import load_registered
from xtk.rollouts.prompts import tokenize_prompts
from xtk.rollouts.rollout import Prompt
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.document import Document
from xtk.tokens.normalization_loss import count_normalization_loss
from xtk.tokens.token_sequence import count_lost_bytes, format_lost_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import (
    CacheSource,
    DocumentSource,
    MixtureSource,
    TextSource,
    match_documents,
    route_documents,
)
from xtk.training.loss_assignment import AssignedLoss, DistillationTeacher, assign_losses, open_teachers
from xtk.training.metrics_file import metric_name
from xtk.training.micro_batches import BatchBuilder, BatchSampler
from xtk.training.model_card import Provenance, public_model_name
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler
from xtk.training.on_policy_loop import OnPolicyLoop, OnPolicySource
from xtk.training.online_scoring import (
    OnlineSource,
    TeacherBlocks,
    create_teacher_blocks,
    read_training_documents,
    read_training_prompts,
)
from xtk.training.teacher_ensemble import ScoreWeighting, TeacherEnsemble, parse_ensemble
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xtk.models.causal_lm import BackboneWithHead
    from xtk.models.student_model import StudentSource
    from xtk.training.eval_tasks import TaskEvaluator
    from xtk.training.held_out_evaluation import HeldOutData, HeldOutEvaluator
    from xtk.training.parallel_config import ParallelConfig
    from xtk.training.training_loop import TrainingRun

DOCUMENTS_PER_CHECK = 1000
TRACKERS = "trackers"


@dataclass(frozen=True)
class DistillInputs:
    """Everything that a run reads, checked against each other.

    Attributes:
        source: documents, with the teachers' words on them.
        tokenizer: the student's.
        objectives: the terms of the sum.
        identity: what makes two runs of one recipe different: losses, fingerprints of the inputs.
        teachers: how metrics call them.
        score_weighting: how weights of teachers come from what they say; None: they do not.
        auto_loss_note: what `--loss auto` took and why; "": nothing was left to it.
        held_out: what the student is asked about held-out documents of caches; None: there are none.
        provenance: what the student comes from.
        ce_on_data_only: whether losses on the student alone are about documents that it did not write.
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
        """Return what makes micro-batches.

        Args:
            max_length: tokens of a document at most.
            packing_multiple: how many tokens a row of documents is a multiple of; 0: each document has a row of its
                own.
        """
        return BatchBuilder(
            self.source, self.tokenizer, self.objectives, max_length, self.score_weighting, self.teachers,
                packing_multiple,
            ce_on_data_only=self.ce_on_data_only,
        )  # fmt: skip


def open_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer) -> DistillInputs:
    """Open caches and projections, and check that they and the student belong together.

    Raises:
        XtkError: one of them cannot be read, or they do not fit each other.
    """
    local = [Path(cache) for cache in paths.data if not is_remote(cache)]
    models = [paths.student, *(teacher.request.teacher_folder for teacher in paths.online_teachers)]
    models += [paths.adapter] if paths.adapter else []
    check_output_folder(paths.output, "a student", (*models, *local, *paths.projections))
    student = {"weights": weights_fingerprint(paths.student), "tokenizer": tokenizer.fingerprint}
    if paths.adapter:
        student["adapter"] = weights_fingerprint(paths.adapter)
    alone = all(loss.name != AUTO_LOSS and _on_text(loss.name) for loss in recipe.losses)
    live = paths.online_teachers
    on_policy = recipe.on_policy
    if on_policy is not None and not live:
        raise XtkError("nobody scores what the student writes", hint="--teacher MODEL beside --on-policy")
    plain = alone and not live and not any(is_cache(cache) for cache in paths.data)
    speakers = 1 if plain else len(live or paths.data)
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, speakers)
    if plain and paths.eval_caches:
        raise XtkError(
            "held-out caches are for losses that are about teachers", where=paths.eval_caches[0],
            hint="--eval-data with the documents themselves",
        )  # fmt: skip
    if plain:
        return _of_texts(paths, recipe, tokenizer, student)
    corpus = Corpus(list(paths.data), paths.columns, paths.max_document_bytes) if live else None
    if corpus is None:
        _check_caches(paths, recipe)
    else:
        _check_live(paths, alone=alone)
        if on_policy is not None:
            prompts = read_training_prompts(live, corpus, on_policy.prompt_format)
        else:
            documents, sizes = read_training_documents(live, corpus, is_routed=combination.method == "route")
    teachers = open_teachers(paths.data, paths.projections, tokenizer, live)
    taken, chosen = assign_losses(recipe.losses, teachers, on_policy=on_policy is not None)
    _check_balance(recipe, taken)
    if combination.method == "mixture":
        _check_mixable(teachers)
    names = _teacher_names(combination, teachers)
    source: DocumentSource
    if corpus is None:
        source = _of_caches(combination, teachers)
    elif on_policy is not None:
        source = _of_rounds(on_policy, prompts, corpus, combination, teachers, tokenizer)
    else:
        source = OnlineSource(documents, live, sizes, paths.columns, partial(_combined_source, combination))
    if combination.method == "mixture":
        taken = _of_mixture(taken, teachers)
    objectives = tuple(_objective(one, combination, teachers, names) for one in taken)
    held_out = None
    if paths.eval_caches:
        held_out = _open_held_out(paths, combination, teachers, taken, objectives, tokenizer)
    return DistillInputs(
        source,
        tokenizer,
        objectives,
        {
            "losses": [_loss_description(one, names) for one in taken],
            "inputs": {
                "student": student,
                **_input_fingerprints(taken, teachers),
                **({"prompts": source.fingerprint()} if isinstance(source, OnPolicySource) else {}),
            },
        },
        names,
        combination.score_weighting,
        chosen,
        held_out,
        Provenance(public_model_name(paths.student), [one.identity for one in teachers], _data_of(teachers)),
        ce_on_data_only=on_policy is not None,
    )


def _of_rounds(
    on_policy: OnPolicyConfig,
    prompts: Sequence[Prompt],
    corpus: Corpus,
    combination: TeacherEnsemble,
    teachers: Sequence[DistillationTeacher],
    tokenizer: Tokenizer,
) -> OnPolicySource:
    """Return what the student writes, and, where some steps take them, the documents of the data."""
    talk = next((one.document for one in prompts if one.document.conversation is not None), None)
    if talk is not None and on_policy.environment:  # which has the first word, so that a template may refuse this alone
        _ = tokenizer.chat_template
    elif talk is not None:
        tokenize_prompts(tokenizer, [talk], on_policy.chat_template_kwargs)
    data: list[Document] = []
    if on_policy.lmbda < 1:
        form = on_policy.prompt_format
        data = [form.document_with_completion(record, corpus.columns, where) for record, where in corpus.records()]
        unanswered = next((at for at, one in enumerate(data) if not any(part.train for part in one.segments)), None)
        if len(data) != len(prompts) or unanswered is not None:
            raise XtkError(
                "--lmbda below 1 takes completions of the data too, and a prompt has none",
                where=f"{corpus.name}, document {unanswered or 0}",
                hint="prompt and completion, or messages that end with the assistant's",
            )
    images = [None if one.has_students_tokenizer or one.support != "candidates" else one.projection for one in teachers]
    return OnPolicySource(
        prompts,
        data,
        on_policy.num_generations,
        tokenizer,
        [one.source for one in teachers if isinstance(one.source, OnlineTeacher)],
        [one.name for one in teachers] if combination.method == "route" else [],
        images,
        partial(_combined_source, combination),
    )


def _open_held_out(
    places: RunPaths,
    combination: TeacherEnsemble,
    teachers: Sequence[DistillationTeacher],
    taken: Sequence[AssignedLoss],
    objectives: tuple[LossTerm, ...],
    tokenizer: Tokenizer,
) -> HeldOutData:
    """Open the caches of held-out documents: one of each teacher, in their order.

    Raises:
        XtkError: they are of other teachers, or a loss cannot be computed from one.
    """
    from xtk.training.held_out_evaluation import HeldOutData

    if len(places.eval_caches) != len(teachers):
        raise XtkError(
            f"there are {len(places.eval_caches)} held-out caches of {len(teachers)} teachers",
            where="--eval-data " + ", ".join(places.eval_caches),
            hint="one for each, in the order of the caches to train from",
        )
    held = open_teachers(places.eval_caches, (), tokenizer)
    for ours, theirs in zip(teachers, held, strict=True):
        if any(ours.identity[key] != theirs.identity[key] for key in ("tokenizer", "embedding_rows")):
            raise MismatchError(
                "a held-out cache is of another teacher, with another vocabulary",
                where=f"{theirs.path} is from {theirs.name}; {ours.path} from {ours.name}",
                hint="xtk cache-teacher with the same teacher; caches in the same order",
            )
    for number, theirs in enumerate(held):
        refusals = [theirs.refusal(one.loss) for one in taken if one.teacher == number]
        if refusal := next(filter(None, refusals), None):
            raise refusal
    by_name = _teacher_names(combination, teachers)
    meetings = tuple(
        ours.token_matching({one.rule.comparison_space for one in taken if one.teacher == number})
        if theirs.has_exact_top1
        else None
        for number, (ours, theirs) in enumerate(zip(teachers, held, strict=True))
    )
    source = _of_caches(combination, held)
    return HeldOutData(source, objectives, by_name, combination.score_weighting, meetings[: len(by_name)])


def _on_text(name: str) -> bool:
    """Say whether a loss needs no teacher."""
    return bool(load_registered(LOSSES, name, "loss").comparison_space == "text")


def _of_texts(places: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]) -> DistillInputs:
    """Return the inputs of a run without a teacher."""
    taken, _ = assign_losses(recipe.losses, [])
    _check_balance(recipe, taken)
    documents = list(Corpus(list(places.data), places.columns, places.max_document_bytes))
    fingerprint = CorpusFingerprint()
    for document in documents:
        fingerprint.add(document)
    identity = {
        "losses": [str(one.loss) for one in taken],
        "inputs": {"student": student, "documents": str(fingerprint)},
    }
    objectives = tuple(
        LossTerm(one.rule, one.loss.make_divergence(), None, one.loss.name, one.loss.weight) for one in taken
    )
    origin = Provenance(public_model_name(places.student), data=[str(fingerprint)])
    return DistillInputs(TextSource(documents), tokenizer, objectives, identity, provenance=origin)


def _of_caches(combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher]) -> DocumentSource:
    """Return the documents of all caches."""
    caches = [teacher.source for teacher in teachers if isinstance(teacher.source, TeacherCache)]
    if len(caches) == 1:
        return CacheSource(*caches)
    if combination.method == "route":
        return CacheSource(*caches, rows=route_documents(caches, [teacher.name for teacher in teachers]))
    return _combined_source(combination, caches, match_documents(caches))


def _teacher_names(combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher]) -> tuple[str, ...]:
    """Return how metrics call who speaks."""
    return ("mixture",) if combination.method == "mixture" else tuple(teacher.name for teacher in teachers)


def _combined_source(
    combination: TeacherEnsemble, caches: Sequence[TeacherCache], rows: NDArray[np.int64]
) -> DocumentSource:
    """Return the documents of caches, by where each holds them."""
    if combination.method == "mixture":
        return MixtureSource(*caches, rows=rows, weights=combination.weights)
    return CacheSource(*caches, rows=rows)


def _check_mixable(teachers: Sequence[DistillationTeacher]) -> None:
    first, *others = teachers
    for other in others:
        if other.identity["tokenizer"] != first.identity["tokenizer"]:
            raise MismatchError(
                "teachers with different tokenizers cannot be mixed: their probabilities are of different tokens",
                where=f"{first.path} and {other.path}",
                hint="--combine-teachers sum, which compares each with the student",
            )


def _check_caches(places: RunPaths, recipe: TrainConfig) -> None:
    """Refuse plain data for losses that need a teacher, and columns that caches have of their own."""
    for place in places.data:
        if is_data_path(place):
            names = [loss.name for loss in recipe.losses if loss.name == AUTO_LOSS or not _on_text(loss.name)]
            raise XtkError(
                f"--loss {names[0]} needs what a teacher assigns to the text, and this is plain data",
                where=place,
                hint=f"xtk cache-teacher TEACHER {place} -o CACHE, and CACHE here; or --teacher TEACHER; or --loss ce",
            )
    for name in ("weight", "route"):
        if name in places.columns:
            raise XtkError(
                f"a cache has the {name}s of its documents from cache-teacher; --{name}-column is for plain data",
                where=places.data[0],
                hint=f"xtk cache-teacher ... --{name}-column {places.columns[name]}",
            )


def _check_live(places: RunPaths, *, alone: bool) -> None:
    """Refuse live teachers of whom nothing is asked, or beside caches."""
    if alone:
        raise XtkError("none of the losses is about a teacher", hint="no --teacher, or --loss auto")
    for place in places.data:
        if is_cache(place):
            raise XtkError(
                "--teacher scores plain data, and this is a cache",
                where=place,
                hint="the data that the cache was made from; or the cache, without --teacher",
            )


def _of_mixture(taken: Sequence[AssignedLoss], teachers: Sequence[DistillationTeacher]) -> list[AssignedLoss]:
    """Return the losses on the one word of all: those of the teacher who tells least, if they fit all.

    Raises:
        XtkError: one of them cannot learn from a teacher.
    """
    least = next((number for number, teacher in enumerate(teachers) if teacher.support == "none"), 0)
    of_all = [one for one in taken if one.teacher in (None, least)]
    for one in of_all:
        for teacher in teachers:
            if refusal := teacher.refusal(one.loss):
                raise refusal
    return [one if one.teacher is None else replace(one, teacher=0) for one in of_all]


def _objective(
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
    """Return how a recipe tells of a loss."""
    return str(one.loss) if one.teacher is None or len(names) == 1 else f"{one.loss} of {names[one.teacher]}"


def _input_fingerprints(taken: Sequence[AssignedLoss], teachers: Sequence[DistillationTeacher]) -> dict[str, Any]:
    """Return the fingerprints of caches (or of who is in their place), and of projections named or needed."""
    needed = {one.teacher for one in taken if one.rule.comparison_space == "projection"}
    caches = [sha256(canonical_json(teacher.source.manifest)) for teacher in teachers]
    kind = "teacher" if any(teacher.is_online for teacher in teachers) else "cache"
    projections = [
        _projection_fingerprint(teacher.projection) if number in needed or teacher.named_projection else None
        for number, teacher in enumerate(teachers)
    ]
    if len(teachers) == 1:
        return {kind: caches[0], "projection": projections[0]}
    return {f"{kind}s": caches, "projections": projections}


def _data_of(teachers: Sequence[DistillationTeacher]) -> list[str]:
    """Return the fingerprints of what teachers read, each once."""
    headers = [teacher.source.header["data"] for teacher in teachers]
    return list(dict.fromkeys(part["fingerprint"] for header in headers for part in header.get("sources", [header])))


def _projection_fingerprint(projection: Projection) -> str:
    return sha256(projection.row_offsets.tobytes() + projection.teacher_ids.tobytes() + projection.weights.tobytes())


def _check_balance(recipe: TrainConfig, taken: Sequence[AssignedLoss]) -> None:
    """Refuse to balance what is not there."""
    both = {one.teacher is None for one in taken}
    if recipe.scale_kd_to == "ce" and both != {True, False}:
        raise XtkError(
            "--scale-kd-to ce brings what is about a teacher to the size of ce, and only one of the two is there",
            hint="--loss ce, and another --loss beside it",
        )


def run_identity(
    recipe: TrainConfig, inputs: DistillInputs, num_data_shards: int, logging_config: LoggingConfig
) -> dict[str, Any]:
    """Return what makes two runs the same run.

    Raises:
        XtkError: early stopping is asked for, and nothing is evaluated.
    """
    held_out: dict[str, Any] = {}
    if recipe.early_stopping_patience:
        if not ((logging_config.eval_documents or inputs.held_out) and logging_config.eval_steps):
            raise XtkError(
                "--early-stopping-patience counts evaluations, and there are none",
                hint="--eval-data DATA --eval-steps N",
            )
        fingerprint = CorpusFingerprint()
        caches = None if inputs.held_out is None else inputs.held_out.source
        for document in logging_config.eval_documents if caches is None else map(caches.document, range(len(caches))):
            fingerprint.add(document)
        held_out = {"eval_documents": str(fingerprint), "eval_steps": logging_config.eval_steps}
    return {**recipe.identity(num_data_shards), **inputs.identity, **held_out}


def distill(
    paths: RunPaths, recipe: TrainConfig, logging_config: LoggingConfig, inputs: DistillInputs, *, force: bool,
        trust_remote_code: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a student in this process, which may be one of several.

    Args:
        paths: where it reads and writes.
        recipe: what decides the result.
        logging_config: what is logged and kept.
        inputs: of `open_inputs`.
        force: replace a run of another recipe.
        trust_remote_code: run the model's own Python code.
        options: the same as the options of a command line, which `recipe.json` keeps.

    Returns:
        What the run's `xtk.json` says: steps, recipe, last metrics.
    """
    from accelerate.utils import set_seed

    from xtk.models.causal_lm import max_context_length, silence_transformers
    from xtk.models.student_model import StudentSource, has_mergeable_adapter, is_peft_model
    from xtk.training.batch_prefetch import report_killed_workers
    from xtk.training.checkpoint import ResumePoint, find_checkpoint, find_existing_run, prepare_run_folder
    from xtk.training.distributed import report_lost_processes
    from xtk.training.experiment_trackers import start_trackers
    from xtk.training.parallel_config import parse_parallel
    from xtk.training.student_module import parallelize
    from xtk.training.training_loop import TrainingRun, train

    silence_transformers()
    accelerator = _start(paths, recipe, logging_config)
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
    cut = _load_student(origin, recipe, inputs, accelerator, layout, trust_remote_code)
    limits = [limit for limit in (max_context_length(cut.model.config), recipe.max_length) if limit]
    limit = min(limits) if limits else None
    documents, sizes = _training_documents(recipe, inputs, limit) if recipe.on_policy is None else _prompts(inputs)
    _check_teaching(recipe, paths.online_teachers, layout, is_peft_model(cut.model))
    packed = recipe.packing and cut.enable_packing()
    if recipe.packing and not packed:
        terminal.note("distill: the student does not read documents in one row apart; each has a row of its own")
    if recipe.preparation.torch_compile:
        cut.compile_backbone()
    with contextlib.ExitStack() as held:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            held.enter_context(exclusive_write_lock(paths.output, "student"))
            prepare_run_folder(paths.output, options or {}, identity, force=force)
        accelerator.wait_for_everyone()
        if logging_config.report_to:
            start_trackers(accelerator, paths.output / TRACKERS, resumed.step, identity)
        trained, parameters = parallelize(cut, accelerator, layout, packing=packed, offload=recipe.fsdp_offload)
        packing = layout.length_multiple if packed else 0
        per_step = recipe.effective_documents_per_step(len(documents), layout.num_data_shards)
        run = TrainingRun(
            accelerator=accelerator,
            parallel=layout,
            student=cut,
            wrapped_student=trained,
            parameters=parameters,
            tokenizer=inputs.tokenizer,
            batch_builder=inputs.batch_builder(limit, packing),
            sampler=_order(recipe, documents, sizes, per_step),
            recipe=recipe,
            logging_config=logging_config,
            steps=recipe.num_steps(len(documents), layout.num_data_shards),
            output=paths.output,
            tokenizer_folder=paths.student,
            held_out_evaluator=_evaluation(inputs, logging_config, cut, trained, packing, layout, accelerator.device),
            task_evaluator=_examination(logging_config, cut, inputs, recipe),
            provenance=inputs.provenance,
            merge_adapter=_adapter_merger(paths, recipe, inputs, trust_remote_code)
            if has_mergeable_adapter(cut.model)
            else None,
        )
        run.resume_point = resumed
        run.teacher_blocks = _blocks(run, inputs, paths, packing, trust_remote_code)
        if inputs.auto_loss_note:
            terminal.note(f"distill: --loss auto takes {inputs.auto_loss_note}")
        if per_step < recipe.documents_per_step(layout.num_data_shards):
            terminal.note(f"distill: {_small_epoch_note(recipe, per_step, layout)}")
        terminal.note(
            f"distill: {run.steps:,} steps of {per_step} documents, "
            f"{len(documents):,} documents, {layout.describe()} on {accelerator.device.type}"
        )
        with report_killed_workers(), report_lost_processes():
            return train(run, identity)


def _small_epoch_note(recipe: TrainConfig, per_step: int, layout: ParallelConfig) -> str:
    """Say that a step has room for more documents than an epoch has."""
    what = "documents of the data" if recipe.on_policy is None else "completions of all prompts"
    return (
        f"each step takes the {per_step:,} {what}, once: --per-device-train-batch-size x --gradient-accumulation-steps "
        f"x processes is {recipe.documents_per_step(layout.num_data_shards):,}"
    )


def _evaluation(
    inputs: DistillInputs, reporting: LoggingConfig, cut: BackboneWithHead, trained: nn.Module, packing: int,
        layout: ParallelConfig,
    device: torch.device,
) -> HeldOutEvaluator | None:  # fmt: skip
    """Return what reads held-out documents, if there are some."""
    from xtk.models.causal_lm import max_context_length
    from xtk.training.held_out_evaluation import HeldOutData, HeldOutEvaluator

    asked = inputs.held_out or HeldOutData.of_documents(reporting.eval_documents)
    if not len(asked.source):
        return None
    return HeldOutEvaluator(
        asked, trained, inputs.tokenizer, max_context_length(cut.model.config), packing, layout, device
    )


def _examination(
    reporting: LoggingConfig, cut: BackboneWithHead, inputs: DistillInputs, recipe: TrainConfig
) -> TaskEvaluator | None:
    """Return what asks the student, if it is asked something."""
    from xtk.training.eval_tasks import TaskEvaluator

    if not reporting.eval_tasks:
        return None
    return TaskEvaluator(reporting.eval_tasks, cut, inputs.tokenizer, recipe.mixed_precision)


def _check_teaching(
    recipe: TrainConfig, teachers: Sequence[OnlineTeacher], layout: ParallelConfig, adapted: bool
) -> None:
    """Refuse a student that cannot write, or cannot teach itself, as it is asked to.

    Raises:
        XtkError: tells why.
    """
    from xtk.training.student_generator import check_generation_backend

    if recipe.on_policy is not None:
        check_generation_backend(recipe.on_policy, layout)
        recipe.on_policy.check_batch(recipe.documents_per_step(layout.num_data_shards))
    if recipe.offload_student and (layout.is_sharded or not teachers):
        raise XtkError(
            "--offload-student is for a student that each process has all of, beside live teachers",
            hint="--fsdp-offload, for one that is shared out",
        )
    asked = {teacher.student_weights for teacher in teachers} - {""}
    if asked and layout.is_sharded:
        raise XtkError(
            f"a student that is cut over processes ({layout}) is not its own teacher",
            hint="--teacher with its folder, for the weights that it begins with; or replicas",
        )
    if "ema" in asked and not recipe.ema_decay:
        raise XtkError("--teacher self:weights=ema, and there is no average", hint="--ema-decay 0.99")
    if "base" in asked and not adapted:
        raise XtkError("--teacher self:weights=base, and the student has no adapter", hint="--lora-r 16")


def _order(recipe: TrainConfig, documents: np.ndarray, sizes: np.ndarray, per_step: int) -> BatchSampler:
    """Return which documents, or prompts, a step takes."""
    if recipe.on_policy is None:
        return BatchSampler(documents, sizes, per_step, recipe.seed)
    return PromptSampler(documents, sizes, per_step, recipe.seed, recipe.on_policy)


def _blocks(
    run: TrainingRun, inputs: DistillInputs, places: RunPaths, packing: int, trust_remote_code: bool
) -> TeacherBlocks | None:
    """Return the blocks of a run with live teachers, or the rounds of one that is on-policy, and tell of them."""
    on_policy = run.recipe.on_policy
    if on_policy is None:
        return create_teacher_blocks(
            inputs.source, run.sampler, run.steps, run.recipe.teacher_block_steps, places.output, run.accelerator
        )
    from xtk.rollouts.generator_interface import GeneratorConfig
    from xtk.training.logprob_check import LogprobCheck
    from xtk.training.student_generator import IN_PROCESS_BACKEND, StudentGenerator

    assert isinstance(inputs.source, OnPolicySource)
    assert isinstance(run.sampler, PromptSampler)
    options: dict[str, Any] = {"adapter": places.adapter} if places.adapter else {}
    if on_policy.backend == "server":
        options["servers"] = list(on_policy.server)
    elif on_policy.engine:
        options["engine"] = dict(on_policy.engine)
    request = GeneratorConfig(places.student, str(places.student), inputs.tokenizer, on_policy.dtype,
                            on_policy.batch_tokens, trust_remote_code, options)  # fmt: skip
    writer = StudentGenerator(
        on_policy,
        inputs.tokenizer,
        run.student,
        request,
        lambda folder: run.saver.write_student(folder) if run.saver is not None else None,
        places.output,
        mixed_precision=run.recipe.mixed_precision,
        seed=run.recipe.seed,
    )
    terminal.note(f"distill: {on_policy.describe(writer.describe(run.accelerator.num_processes))}")
    for teacher in inputs.source.teachers:
        terminal.note(f"distill: {teacher.describe_placement()}")
    check = None
    if on_policy.backend != IN_PROCESS_BACKEND:
        check = LogprobCheck(run.wrapped_student, run.parallel, packing, run.accelerator.device)
    return OnPolicyLoop(inputs.source, run.sampler, run.steps, on_policy, places.output, run.accelerator, writer, check)


def _start(places: RunPaths, recipe: TrainConfig, reporting: LoggingConfig) -> Any:
    """Meet the other processes; return Accelerate's accelerator.

    Raises:
        XtkError: a tracker is not there, Accelerate was told to do what `--parallel` does, or processes are to make
            the batches of live teachers.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from xtk.training.distributed import init_process_group_after_restart
    from xtk.training.experiment_trackers import check_trackers

    check_trackers(reporting.report_to)
    if places.online_teachers and reporting.dataloader_num_workers:
        raise XtkError("batches of live teachers are made by a thread", hint="--dataloader-num-workers 0")
    timeout = timedelta(seconds=reporting.ddp_timeout)
    init_process_group_after_restart(timeout)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=list(reporting.report_to) or None,
        project_dir=str(places.output / TRACKERS) if reporting.report_to else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise XtkError(
            f"Accelerate was told to share the work by {kind}, and xtk does that itself",
            hint="accelerate launch --multi_gpu -m xtk distill ... --parallel fsdp=N",
        )
    return accelerator


def _load_student(
    origin: StudentSource,
    recipe: TrainConfig,
    inputs: DistillInputs,
    accelerator: Any,
    layout: ParallelConfig,
    trust_remote_code: bool,
) -> BackboneWithHead:
    """Load the student, whole, and cut it."""
    import torch

    from xtk.models.causal_lm import BackboneWithHead
    from xtk.models.student_model import load_student

    model = load_student(
        origin,
        recipe.preparation,
        inputs.tokenizer,
        # Where weights are shared out, each process's part of them goes to its device later.
        device=torch.device("cpu") if layout.is_sharded else accelerator.device,
        mixed_precision=recipe.mixed_precision,
        trust_remote_code=trust_remote_code,
    )
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return BackboneWithHead(model)


def _adapter_merger(
    places: RunPaths, recipe: TrainConfig, inputs: DistillInputs, trust_remote_code: bool
) -> Callable[[Path, Path], None]:
    """Return what loads the student anew, with the adapter of a folder, and writes both as one model."""
    import torch

    from xtk.models.student_model import StudentSource, load_student, save_final_student

    def merge(adapter: Path, folder: Path) -> None:
        model = load_student(
            StudentSource(places.student, places.adapter, adapter),
            recipe.preparation,
            inputs.tokenizer,
            device=torch.device("cpu"),
            mixed_precision=recipe.mixed_precision,
            trust_remote_code=trust_remote_code,
            quiet=True,
        )
        save_final_student(model, folder)

    return merge


def _report_normalization(inputs: DistillInputs, documents: np.ndarray) -> None:
    """Tell what the student's tokenizer or chat template does not read as it is, in documents all over the cache."""
    sample = documents[:: -(-len(documents) // DOCUMENTS_PER_CHECK) or 1]
    read = [inputs.source.document(int(number)) for number in sample]
    texts = [document.text for document in read if document.conversation is None]
    if warning := count_normalization_loss(inputs.tokenizer, texts).warning():
        terminal.note(f"distill: {warning}")
    talks = [document for document in read if document.conversation is not None]
    counts = [count_lost_bytes(*pair) for pair in zip(talks, tokenize_documents(inputs.tokenizer, talks), strict=True)]
    if sum(counts):
        terminal.note("distill: " + format_lost_bytes(counts))


def _longer_than(limit: int, inputs: DistillInputs, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return (tokens, number) of the documents of more than `limit` tokens.

    A text has at most a token a byte, and two at its ends: only texts that may be longer are tokenised. What a
    template adds to a conversation is not known before.
    """
    found = []
    talks = inputs.source.conversations()
    candidates = np.flatnonzero((sizes + 2 > limit) | talks)
    for start in range(0, len(candidates), DOCUMENTS_PER_CHECK):
        numbers = candidates[start : start + DOCUMENTS_PER_CHECK].tolist()
        documents = [inputs.source.document(number) for number in numbers]
        for number, sequence in zip(numbers, tokenize_documents(inputs.tokenizer, documents), strict=True):
            if len(sequence) > limit:
                found.append((len(sequence), number))
    return found


def _prompts(inputs: DistillInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the prompts that count, and how long each is."""
    assert isinstance(inputs.source, OnPolicySource)
    documents = [prompt.document for prompt in inputs.source.prompts]
    sizes = np.array([len(document.text.encode()) for document in documents], np.int64)
    counting = np.flatnonzero([document.weight > 0 for document in documents])
    if not len(counting):
        raise XtkError("there is no prompt to go on from")
    return counting, sizes


def _training_documents(recipe: TrainConfig, inputs: DistillInputs, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents to train on, and all sizes; those that are too long are counted and told."""
    sizes = inputs.source.text_bytes()
    weightless = inputs.source.weights() == 0
    documents = np.flatnonzero((sizes > 0) & ~weightless)
    if weightless.any():
        terminal.note(f"distill: {weightless.sum():,} of {len(sizes):,} documents have the weight 0 and are left out")
    _report_normalization(inputs, documents)
    too_long = [] if limit is None else _longer_than(limit, inputs, sizes)
    if too_long:
        longest, number = max(too_long)
        told = (
            f"{len(too_long):,} of {len(sizes):,} documents are longer than the {limit:,} tokens that the student reads"
        )
        if recipe.long_documents == "refuse":
            raise XtkError(
                told,
                where=f"the longest is row {number} of the cache with {longest:,} tokens",
                hint="--long-documents truncate or skip",
            )
        terminal.note(f"distill: {told}: --long-documents {recipe.long_documents}")
        if recipe.long_documents == "skip":
            documents = np.setdiff1d(documents, [number for _, number in too_long])
    if not len(documents):
        raise XtkError("there is no document to train on")
    return documents, sizes
