"""Runs without a teacher: losses on the text alone."""

from __future__ import annotations

from xtk.batches.combine_teachers import parse_ensemble
from xtk.batches.data_sources import TextDocuments
from xtk.batches.losses_per_teacher import assign_losses
from xtk.data.corpus_reader import Corpus, CorpusFingerprint
from xtk.errors import XtkError
from xtk.losses.term import LossTerm
from xtk.runs.model_card import Provenance, public_model_name
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import check_loss_scaling
from xtk.training.train_config import RunPaths, TrainConfig


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
