"""The teachers of a run, how they are combined, and their losses, checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xtk.batches.combine_teachers import TeacherEnsemble
from xtk.batches.losses_per_teacher import AssignedLoss, assign_losses, open_teachers
from xtk.batches.teacher_losses import TeacherLosses, combined_losses
from xtk.cache.output import is_cache
from xtk.data.corpus_reader import Corpus
from xtk.errors import MismatchError, XtkError
from xtk.files.atomic_files import canonical_json, sha256
from xtk.losses import AUTO_LOSS, LOSSES
from xtk.name_registry import load_registered
from xtk.projection.projection import SparseProjection
from xtk.runs.model_card import Provenance, public_model_name
from xtk.text.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutData
from xtk.training.train_config import RunPaths, TrainConfig


@dataclass(frozen=True)
class TeacherSetup(TeacherLosses):
    """The teachers of a run, how they are combined, and their losses."""

    paths: RunPaths  # the run's inputs
    auto_loss_note: str  # the losses that `--loss auto` chose and why; "": it was not used

    def input_fields(self, student: dict[str, str], **fingerprints: Any) -> dict[str, Any]:
        """Return the fields of `RunInputs` that follow from teachers and losses."""
        return {
            "tokenizer": self.tokenizer,
            "objectives": self.objectives,
            "identity": {
                "losses": [self._describe_loss(loss) for loss in self.losses],
                "inputs": {"student": student, **self._fingerprints(), **fingerprints},
            },
            "teachers": self.names,
            "score_weighting": self.combination.score_weighting,
            "auto_loss_note": self.auto_loss_note,
            "held_out": self._open_held_out() if self.paths.eval_caches else None,
            "provenance": Provenance(
                public_model_name(self.paths.student.folder),
                [teacher.identity for teacher in self.teachers],
                self._data_fingerprints(),
            ),
        }

    def _describe_loss(self, one: AssignedLoss) -> str:
        """Return a loss as the recipe describes it."""
        if one.teacher is None or len(self.names) == 1:
            return str(one.loss)
        return f"{one.loss} of {self.names[one.teacher]}"

    def _fingerprints(self) -> dict[str, Any]:
        """Return the fingerprints of caches or online teachers, and of the projections that are given or needed."""
        needed = {loss.teacher for loss in self.losses if loss.rule.comparison_space == "projection"}
        caches = [sha256(canonical_json(teacher.source.manifest)) for teacher in self.teachers]
        kind = self.teachers[0].source.kind
        projections = [
            _projection_fingerprint(teacher.projection) if number in needed or teacher.named_projection else None
            for number, teacher in enumerate(self.teachers)
        ]
        if len(self.teachers) == 1:
            return {kind: caches[0], "projection": projections[0]}
        return {f"{kind}s": caches, "projections": projections}

    def _data_fingerprints(self) -> list[str]:
        """Return the distinct fingerprints of the data that the teachers scored."""
        headers = [teacher.source.header["data"] for teacher in self.teachers]
        sources = [part["fingerprint"] for header in headers for part in header.get("sources", [header])]
        return list(dict.fromkeys(sources))

    def _open_held_out(self) -> HeldOutData:
        """Return the opened held-out caches: one per teacher, in the order of the teachers."""
        paths = self.paths.eval_caches
        if len(paths) != len(self.teachers):
            raise XtkError(
                f"--eval-data has {len(paths)} caches for {len(self.teachers)} teachers",
                where=", ".join(paths),
                hint="give one held-out cache per teacher, in the order of the training caches",
            )
        held = open_teachers(paths, (), self.tokenizer)
        for ours, theirs in zip(self.teachers, held, strict=True):
            if any(ours.identity[key] != theirs.identity[key] for key in ("tokenizer", "embedding_rows")):
                raise MismatchError(
                    "a cache of --eval-data is from a teacher with another vocabulary than its training cache",
                    where=f"{theirs.path} is from {theirs.name}; {ours.path} from {ours.name}",
                    hint="run xtk cache-teacher with the same teacher; give the caches in the same order",
                )
        is_mixed = self.combination.method == "mixture"
        for number, theirs in enumerate(held):
            refusals = [
                theirs.refusal(loss.loss, in_mixture=is_mixed)
                for loss in self.losses
                if loss.teacher is not None and (is_mixed or loss.teacher == number)
            ]
            if refusal := next(filter(None, refusals), None):
                raise refusal
        matchings = tuple(
            ours.token_matching({loss.rule.comparison_space for loss in self.losses if loss.teacher == number})
            if theirs.has_exact_top1
            else None
            for number, (ours, theirs) in enumerate(zip(self.teachers, held, strict=True))
        )
        # Samples without log-probabilities are read as those of a training cache without them.
        known = [theirs.has_sample_logprobs for theirs in held]
        objectives = [
            replace(term, has_sample_logprobs=term.has_sample_logprobs and known[term.teacher_index])
            for term in self.objectives
        ]
        return HeldOutData(
            self.cached_documents(held),
            tuple(objectives),
            self.names,
            self.combination.score_weighting,
            matchings[: len(self.names)],
        )


def set_up_teachers(
    paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, combination: TeacherEnsemble
) -> TeacherSetup:
    """Open the teachers of a run and assign the losses to them."""
    teachers = open_teachers(paths.data, paths.projections, tokenizer, paths.online_teachers)
    losses, auto_loss_note = assign_losses(recipe.losses, teachers, on_policy=recipe.on_policy is not None)
    check_loss_scaling(recipe, losses)
    losses = combined_losses(combination, teachers, losses)
    if recipe.teacher_shift:
        _check_shifted(losses)
    return TeacherSetup(tokenizer, combination, teachers, losses, paths, auto_loss_note)


def _check_shifted(losses: Sequence[AssignedLoss]) -> None:
    """Refuse losses whose target cannot be shifted."""
    loss = next((loss for loss in losses if loss.teacher is not None and not loss.rule.compares_only_cells), None)
    if loss is not None:
        raise XtkError(
            f"the loss {loss.loss} cannot be used with --teacher-shift, since it is not a divergence over cells",
            hint="use byte-kl, bpm, p-kl or boundary-kl; with the student's tokenizer forward-kl, reverse-kl, jsd, ...",
        )


def needs_no_teacher(name: str) -> bool:
    """Return whether a loss needs no teacher."""
    return bool(load_registered(LOSSES, name, "loss").comparison_space == "text")


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


def check_loss_scaling(recipe: TrainConfig, assigned: Sequence[AssignedLoss]) -> None:
    """Raise XtkError for `--scale-kd-to ce` without both a CE loss and a distillation loss."""
    both = {assignment.teacher is None for assignment in assigned}
    if recipe.scale_kd_to == "ce" and both != {True, False}:
        raise XtkError(
            "--scale-kd-to ce needs a CE loss and a distillation loss, but --loss gives only one of them",
            hint="give both, for example --loss ce --loss auto; or remove --scale-kd-to",
        )


def _projection_fingerprint(projection: SparseProjection) -> str:
    return sha256(projection.row_offsets.tobytes() + projection.teacher_ids.tobytes() + projection.weights.tobytes())
