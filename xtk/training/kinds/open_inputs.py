"""Opens the inputs of a run, by the kind of run that options and data determine."""

from __future__ import annotations

from xtk.cache.output import is_cache
from xtk.files.atomic_files import canonical_json
from xtk.files.output import Output
from xtk.losses import AUTO_LOSS
from xtk.models.resolver import weights_fingerprint
from xtk.runs.resume_point import RUN_FOLDER
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.cached_teachers import open_cache_inputs
from xtk.training.kinds.on_policy import open_on_policy_inputs
from xtk.training.kinds.online_teachers import open_online_inputs
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.kinds.teacher_setup import needs_no_teacher
from xtk.training.kinds.text_only import open_text_inputs
from xtk.training.train_config import RunPaths, TrainConfig


def open_inputs(paths: RunPaths, recipe: TrainConfig, tokenizer: Tokenizer) -> RunInputs:
    """Return the opened inputs of a run, checked against each other and the student."""
    models = [paths.student.folder, *(teacher.request.teacher.folder for teacher in paths.online_teachers)]
    models += [paths.student.adapter] if paths.student.adapter else []
    Output(paths.output, RUN_FOLDER, inputs=(*models, *paths.data, *paths.projections))
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
