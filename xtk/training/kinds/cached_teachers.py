"""Runs that learn from teacher caches."""

from __future__ import annotations

from xtk.batches.combine_teachers import parse_ensemble
from xtk.data.corpus_reader import is_data_path
from xtk.errors import XtkError
from xtk.losses import AUTO_LOSS
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import needs_no_teacher, set_up_teachers
from xtk.training.train_config import RunPaths, TrainConfig


def open_cache_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer, student: dict[str, str]) -> RunInputs:
    """Return the inputs of a run that learns from teacher caches."""
    combination = parse_ensemble(recipe.combine_teachers, recipe.teacher_weights, len(paths.data))
    _check_caches(paths, recipe)
    setup = set_up_teachers(paths, recipe, tokenizer, combination)
    return RunInputs(setup.cached_documents(setup.teachers), **setup.input_fields(student))


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
