"""Runs whose teachers score the data during training."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.batches.combine_teachers import parse_ensemble
from xtk.cache.output import is_cache
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.losses import AUTO_LOSS
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import needs_no_teacher, set_up_teachers
from xtk.training.online_teacher_scoring import OnlineDocuments, TeacherBlocks, read_training_documents, teacher_names
from xtk.training.train_config import RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, step_batch_builder


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
    teachers = paths.online_teachers
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, len(teachers))
    corpus = plain_corpus(paths, recipe)
    documents, sizes = read_training_documents(teachers, corpus, is_routed=combination.method == "route")
    setup = set_up_teachers(paths, recipe, tokenizer, combination)
    source = OnlineDocuments(documents, teachers, sizes, setup.combined(teachers))
    # A block of steps is scored with the student's weights at its beginning.
    follows_student = any(teacher.student_weights in ("live", "ema") for teacher in teachers)
    block = {"teacher_block_steps": recipe.teacher_block_steps} if recipe.teacher_block_steps else {}
    return OnlineInputs(source, **setup.input_fields(student, **(block if follows_student else {})))


def plain_corpus(paths: RunPaths, recipe: TrainConfig) -> Corpus:
    """Return the data that online teachers score."""
    if all(loss.name != AUTO_LOSS and needs_no_teacher(loss.name) for loss in recipe.losses):
        raise XtkError("--teacher is given, but no --loss uses a teacher", hint="remove --teacher, or use --loss auto")
    for place in paths.data:
        if is_cache(place):
            raise XtkError(
                "--teacher needs plain data, but CACHE is a teacher cache",
                where=place,
                hint="give the data that the cache was made from, or remove --teacher to train from the cache",
            )
    return Corpus(list(paths.data), paths.columns, paths.max_document_bytes)
