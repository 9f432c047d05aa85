"""Opens the inputs of a run, by the kind of run that options and data determine."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.batches.combine_teachers import parse_ensemble
from xtk.batches.data_sources import TextDocuments
from xtk.batches.losses_per_teacher import assign_losses
from xtk.cache.output import is_cache
from xtk.data.corpus_reader import Corpus, CorpusFingerprint, is_data_path
from xtk.errors import XtkError
from xtk.files.atomic_files import canonical_json
from xtk.files.output import Output
from xtk.losses import AUTO_LOSS
from xtk.losses.term import LossTerm
from xtk.models.resolver import weights_fingerprint
from xtk.runs.model_card import Provenance, public_model_name
from xtk.runs.resume_point import RUN_FOLDER
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.on_policy import open_on_policy_inputs
from xtk.training.kinds.references import (
    check_online_references,
    check_reference_use,
    online_sources,
    open_reference_caches,
    reference_fingerprints,
)
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import check_loss_scaling, needs_no_teacher, plain_corpus, set_up_teachers
from xtk.training.online_teacher_scoring import OnlineDocuments, TeacherBlocks, read_training_documents, teacher_names
from xtk.training.train_config import RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, step_batch_builder


def open_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer) -> RunInputs:
    """Return the opened inputs of a run, checked against each other and the student."""
    check_reference_use(paths, recipe)
    scoring = (*paths.online_teachers, *paths.references)
    models = [paths.student.folder, *(teacher.request.teacher.folder for teacher in scoring)]
    models += [paths.student.adapter] if paths.student.adapter else []
    Output(paths.output, RUN_FOLDER, inputs=(*models, *paths.data, *paths.projections, *paths.reference_caches))
    student = {
        "weights": weights_fingerprint(paths.student.folder),
        "tokenizer": tokenizer.fingerprint,
        "special_tokens": canonical_json(tokenizer.special_token_ids),
        "template": tokenizer.template_fingerprint or "",
        "start_ids": canonical_json(tokenizer.start_ids),
    }
    if paths.student.adapter:
        student["adapter"] = weights_fingerprint(paths.student.adapter)
    if recipe.on_policy is not None:
        return open_on_policy_inputs(paths, recipe, tokenizer, student, recipe.on_policy)
    if paths.online_teachers:
        return open_online_inputs(paths, recipe, tokenizer, student)
    is_without_teacher = all(loss.name != AUTO_LOSS and needs_no_teacher(loss.name) for loss in recipe.losses)
    if is_without_teacher and not any(map(is_cache, paths.data)):
        return open_text_inputs(paths, recipe, tokenizer, student)
    return open_cache_inputs(paths, recipe, tokenizer, student)


def open_text_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]) -> RunInputs:
    """Return the inputs of a run without a teacher."""
    parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, 1)
    if paths.eval_caches:
        raise XtkError(
            "--eval-data is a cache, but no loss uses a teacher", where=paths.eval_caches[0],
            hint="give --eval-data the documents as text or JSONL",
        )  # fmt: skip
    assigned, _ = assign_losses(recipe.losses, [])
    check_loss_scaling(recipe, assigned)
    documents = list(Corpus(list(paths.data), paths.columns, paths.max_document_bytes))
    fingerprint = str(CorpusFingerprint.of(documents))
    return RunInputs(
        TextDocuments(documents),
        tokenizer,
        tuple(
            LossTerm(
                assignment.rule, assignment.loss.make_divergence(), None, assignment.loss.name, assignment.loss.weight
            )
            for assignment in assigned
        ),
        {
            "losses": [str(assignment.loss) for assignment in assigned],
            "inputs": {"student": student, "documents": fingerprint},
        },
        provenance=Provenance(public_model_name(paths.student.folder), data=[fingerprint]),
    )


def open_cache_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]) -> RunInputs:
    """Return the inputs of a run that learns from teacher caches."""
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, len(paths.data))
    _check_caches(paths, recipe)
    setup = set_up_teachers(paths, recipe, tokenizer, combination)
    references = open_reference_caches(paths, setup)
    documents = setup.cached_documents(setup.teachers, references)
    return RunInputs(documents, **setup.input_fields(student, **reference_fingerprints(references)))


def _check_caches(paths: RunPaths, recipe: TrainConfig) -> None:
    """Raise XtkError for plain data with a loss that needs a teacher, and for column options that caches ignore."""
    for place in paths.data:
        if is_data_path(place):
            names = [loss.name for loss in recipe.losses if loss.name == AUTO_LOSS or not needs_no_teacher(loss.name)]
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


@dataclass(frozen=True)
class OnlineInputs(RunInputs):
    """Inputs of a run whose teachers score the data during training."""

    source: OnlineDocuments

    def teacher_blocks(self, run: TrainingRun) -> TeacherBlocks:
        """Return the blocks of steps that the teachers score, and print their size."""
        blocks = TeacherBlocks(
            self.source,
            run.sampler,
            run.steps,
            run.recipe.teacher_block_steps,
            run.accelerator,
            step_batch_builder(run).documents,
        )
        teachers = self.source.online_teachers
        processes = "a separate process" if any(teacher.needs_subprocess for teacher in teachers) else "each process"
        terminal.note(
            f"distill: {', '.join(teacher_names(teachers))} scores the documents of {blocks.size} steps at a time, "
            f"in {processes}"
        )
        return blocks


def open_online_inputs(
    paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]
) -> OnlineInputs:
    """Return the inputs of a run whose teachers score the data during training."""
    teachers, scoring = paths.online_teachers, (*paths.online_teachers, *paths.references)
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, len(teachers))
    check_online_references(paths, recipe, combination)
    corpus = plain_corpus(paths, recipe)
    documents, sizes = read_training_documents(scoring, corpus, is_routed=combination.method == "route")
    setup = set_up_teachers(paths, recipe, tokenizer, combination)
    source = OnlineDocuments(documents, scoring, sizes, online_sources(setup, paths))
    # A block of steps is scored with the student's weights at its beginning.
    follows_student = any(teacher.student_weights in ("live", "ema") for teacher in teachers)
    block = {"teacher_block_steps": recipe.teacher_block_steps} if recipe.teacher_block_steps else {}
    fingerprints = {**(block if follows_student else {}), **reference_fingerprints(paths.references)}
    return OnlineInputs(source, **setup.input_fields(student, **fingerprints))
