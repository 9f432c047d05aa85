"""What an output folder already has: a finished run, or the checkpoint from which a run resumes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX, read_json
from xtk.files.output import Output, OutputKind, move_folder_aside
from xtk.files.run_names import BEST, CHECKPOINT, RECIPE_FILE, list_checkpoints
from xtk.parallel import process_group
from xtk.runs.checkpoint import STUDENT, rank_files
from xtk.runs.folder import (
    RUN_MANIFEST,
    add_evaluation,
    check_listed_files,
    is_recipe,
    read_evaluation,
    read_recipe,
    read_run_manifest,
    run_fingerprint,
    verify_files,
    write_recipe,
)
from xtk.runs.sharded_state import SKIP_HINT
from xtk.runs.trainer_state import TrainerState


def _is_run(folder: Path) -> bool:
    recipe = folder / RECIPE_FILE
    return recipe.is_file() and is_recipe(read_json(recipe))


def _find_finished_run(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of `xtk.json` of a finished run; None if it is unfinished. Changes no file."""
    recipe = read_recipe(output)
    if recipe != identity:
        differences = list(_differences(recipe, identity))
        changed = ", ".join(f"{key}: {_shorten(old)} there, {_shorten(new)} now" for key, old, new in differences[:3])
        raise XtkError(
            "the output folder has a run with other options or inputs",
            where=f"{output} ({changed})",
            hint="use another -o, or --force to replace the run",
        )
    return _finished(output) if (output / RUN_MANIFEST).is_file() else None


def _differences(
    recorded: Mapping[str, Any], identity: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of different values, such as "inputs.student.weights", and both values."""
    for key in sorted({*recorded, *identity}):
        old, new = recorded.get(key), identity.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def _shorten(value: Any) -> str:
    """Return a value for a message, without most digits of checksums."""
    return re.sub(r"(sha256:[0-9a-f]{12})[0-9a-f]+", r"\1...", str(value))


def _finished(output: Path) -> dict[str, Any]:
    """Return the content of `xtk.json` of a finished run."""
    try:
        content = read_run_manifest(output, (STUDENT,))
        check_listed_files(output, content)
    except CorruptError as failure:
        hint = f"run `rm {output / RUN_MANIFEST}` and the same command again; it resumes from the last checkpoint"
        raise CorruptError(failure.what, where=failure.where, hint=hint) from None
    return content


# A request is the identity of a run.
RUN_FOLDER = OutputKind("a student", _is_run, _find_finished_run, is_folder=True)


def check_evaluation(output: Path, evaluation: Mapping[str, str], *, is_finished: bool) -> None:
    """Refuse a run in the output folder that is evaluated on other data or tasks than requested.

    Its metrics would be reported for data that they were not computed on. They do not affect the student, so a run
    without any of them can be continued with them.

    Args:
        evaluation: fingerprints of the requested data and tasks, by option.
        is_finished: whether the run is finished, so that no further evaluation takes place.
    """
    stated = read_evaluation(output) if (output / RECIPE_FILE).is_file() else None
    if stated is None:
        return
    different = [
        option
        for option, recorded in evaluation.items()
        if (is_finished or option in stated) and stated.get(option) != recorded
    ]
    if different:
        lacking = [option for option in different if option not in stated]
        raise XtkError(
            f"the run in the output folder was evaluated {'without' if lacking else 'on other'} {', '.join(different)}"
            + ("" if lacking else " than requested"),
            where=str(output),
            hint="evaluate its student with xtk evaluate; or use the same evaluation options, another -o, or --force "
            "to train again",
        )


def prepare_run_folder(
    output: Path,
    options: Mapping[str, Any],
    identity: dict[str, Any],
    resumed: ResumePoint,
    *,
    force: bool,
    evaluation: Mapping[str, str] | None = None,
) -> None:
    """Create a run folder, or remove temporary files of a killed run; with `force`, move an old folder aside.

    The folder is locked by this process.
    """
    if force:
        move_folder_aside(output)
    output.mkdir(parents=True, exist_ok=True)
    if not force:
        finished = Output(output, RUN_FOLDER).find_finished(identity)
        known = {resumed.folder, *resumed.damaged, None}
        if finished is not None or any(folder not in known for step, folder in list_checkpoints(output)[-1:]):
            raise XtkError(
                "another command has written into the output folder since this one started",
                where=str(output),
                hint="run the same command again; it continues from what is there",
            )
    for path in output.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not (output / RECIPE_FILE).is_file():
        write_recipe(output, options, identity, evaluation)
    elif evaluation:
        add_evaluation(output, evaluation)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes."""

    step: int = 0  # completed steps; 0: the run starts from the beginning
    folder: Path | None = None  # the checkpoint folder; None: the run starts from the beginning
    damaged: tuple[Path, ...] = ()  # later checkpoints that are corrupt


def find_checkpoint(output: Path, identity: Mapping[str, Any], *, needs_best: bool) -> ResumePoint:
    """Return the newest checkpoint of a run whose files all match its manifest (collective).

    Each process verifies a part of the files. A checkpoint that does not match is reported, and the previous one is
    tried.

    Args:
        identity: the run's options and input fingerprints, which the checkpoint must match.
        needs_best: whether the run uses early stopping, so that the best weights so far are needed too.

    Raises:
        CorruptError: all checkpoints are corrupt.
    """
    checkpoints = process_group.all_gather_object(list_checkpoints(output))[0]
    run, damaged, failure = run_fingerprint(identity), list[Path](), None
    for step, folder in reversed(checkpoints):
        failure = next(
            filter(None, process_group.all_gather_object(_problem(output, step, folder, run, best=needs_best))), None
        )
        if failure is None:
            return ResumePoint(step, folder, tuple(damaged))
        if not isinstance(failure, CorruptError):
            raise failure
        damaged.append(folder)
        terminal.note(f"distill: warning: skipping {folder.name}: {failure.what} ({failure.where})")
    if failure is not None:
        raise CorruptError(
            f"all checkpoints of this run are corrupt: {failure.what}",
            where=failure.where,
            hint="restore a checkpoint from a backup, or use --force to train again from step 0",
        )
    return ResumePoint()


def _problem(output: Path, step: int, folder: Path, run: str, *, best: bool) -> XtkError | None:
    """Return why a checkpoint cannot be used, judged by the files that this process verifies; None: no problem."""
    here = (process_group.rank(), process_group.world_size())
    try:
        content = read_run_manifest(folder, (CHECKPOINT,))
        if content.get("step") != step:
            raise CorruptError(
                f"the checkpoint's manifest is for step {content.get('step')}, but its folder name is for step {step}",
                where=str(folder),
                hint=SKIP_HINT,
            )
        if content.get("run_fingerprint") != run:
            raise CorruptError(
                "the checkpoint was written by a run with other options or inputs",
                where=str(folder),
                hint="use the options and inputs of that run, or another -o; or move this checkpoint away",
            )
        verify_files(folder, content, subset=here)
        rank_files(folder, content)
        state = TrainerState.from_manifest(content)
        best_step = state.best_step
        if best and state.best_bits_per_byte is not None:
            weights = output / f"{BEST}-{best_step}"
            kept = read_run_manifest(weights, (BEST,))
            if (kept.get("step"), kept.get("run_fingerprint")) != (best_step, run):
                raise CorruptError(
                    f"the folder {weights.name} has weights of another step, or of a run with other options or inputs",
                    where=str(weights),
                    hint=SKIP_HINT,
                )
            verify_files(weights, kept, subset=here)
    except XtkError as failure:
        failure.where = failure.where or str(folder / RUN_MANIFEST)
        return failure
    except OSError as failure:
        return CorruptError(
            f"the checkpoint cannot be read: {failure.strerror}", where=str(failure.filename or folder), hint=SKIP_HINT
        )
    return None
