"""Checkpoints: a Hugging Face folder with a manifest; optimizer and random numbers as safetensors in a subfolder.

The model is whole, so that anything loads it; the rest is written by each process in a file of its own (pieces.py), and
read by any number of processes, however they cut the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtk import terminal
from xtk.artifacts.atomic_files import TEMPORARY_PREFIX, read_json, set_default_permissions
from xtk.artifacts.output_checks import foreign_files_error, list_folder
from xtk.artifacts.run_folder_cleanup import (
    keep_file_of_user,
    refuse_foreign_files_in_run,
    remove_run,
    remove_run_subfolder,
)
from xtk.artifacts.run_folders import (
    ADAPTER_FOLDER,
    BEST,
    CARD_FILE,
    CHECKPOINT,
    METRICS_FILE,
    RECIPE_FILE,
    ROLLOUTS_FILE,
    RUN_MANIFEST,
    TRAINER_FOLDER,
    check_weight_sizes,
    file_entries,
    list_checkpoints,
    listed_file_names,
    prefix_entry,
    read_recipe,
    read_run_manifest,
    recipe_version,
    run_fingerprint,
    verify_files,
    write_recipe,
    write_run_manifest,
)
from xtk.artifacts.write_locks import LOCK_PREFIX
from xtk.errors import CorruptError, XtkError
from xtk.models.student_model import is_peft_model, save_trainable
from xtk.training import distributed
from xtk.training.sharded_state import (
    ShardedStateReader,
    TensorBlock,
    WriteAssignment,
    as_corrupt_error,
    local_tensor,
    write_sharded_state,
)
from xtk.training.trainer_state import TrainerState

STUDENT = "student"
INTERRUPTED = "interrupted"  # of the manifest of a checkpoint that only a stopped run has
EMA, RANDOM_STATE = "ema", "random"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


def find_existing_run(output: Path, identity: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Look for a run in a folder, and touch nothing.

    Returns:
        What the finished run wrote to `xtk.json`; None if there is something left to train (or to begin anew: `force`).

    Raises:
        XtkError: the folder holds other things, or a run of another recipe or another version.
        Damaged: the manifest of a finished run was altered, or a file of weights has another size.
    """
    if output.is_file():
        raise XtkError("a student is a folder, and there is a file of this name", where=str(output))
    if not output.is_dir() or all(path.name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)) for path in output.iterdir()):
        return None
    if recipe_version(read_json(output / RECIPE_FILE) if (output / RECIPE_FILE).is_file() else {}) is None:
        raise foreign_files_error(list_folder(output), str(output))
    if force:
        refuse_foreign_files_in_run(output)
        return None
    found = read_recipe(output)
    if found != identity:
        differences = [key for key in sorted({*found, *identity}) if found.get(key) != identity.get(key)]
        told = ", ".join(f"{key}: {found.get(key)} there, {identity.get(key)} asked for" for key in differences[:3])
        raise XtkError(
            "there is a run of another recipe",
            where=f"{output} ({told})",
            hint="another -o, or --force to replace it",
        )
    return _finished(output) if (output / RUN_MANIFEST).is_file() else None


def _finished(output: Path) -> dict[str, Any]:
    """Return what a finished run wrote to `xtk.json`.

    Raises:
        Damaged: the manifest was altered, or a file of weights has another size.
    """
    try:
        content = read_run_manifest(output, (STUDENT,))
        check_weight_sizes(output, content)
    except CorruptError as wrong:
        hint = f"rm {output / RUN_MANIFEST}, and the same command again: it goes on from the last checkpoint"
        raise CorruptError(wrong.what, where=wrong.where, hint=hint) from None
    return content


def prepare_run_folder(output: Path, options: Mapping[str, Any], identity: dict[str, Any], *, force: bool) -> None:
    """Make a run's folder, or clear away what a killed run, or with `force` any run, has left in it."""
    output.mkdir(parents=True, exist_ok=True)
    if force:
        remove_run(output)
    for path in output.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not (output / RECIPE_FILE).is_file():
        write_recipe(output, options, identity)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        step: steps that are done; 0: the run begins.
        folder: of the checkpoint; None: the run begins.
        damaged: later checkpoints, which cannot be used.
    """

    step: int = 0
    folder: Path | None = None
    damaged: tuple[Path, ...] = ()


def find_checkpoint(output: Path, identity: Mapping[str, Any], *, needs_best: bool) -> ResumePoint:
    """Return the newest checkpoint of a run whose files all match its manifest; every process has to call it.

    Each process reads its share of the files. A checkpoint that does not match is reported, and the one before it is
    tried.

    Args:
        output: the run's folder.
        identity: of the run.
        needs_best: whether the run keeps the best weights, so that those of the checkpoint are needed too.

    Raises:
        Damaged: there are checkpoints, and none of them can be used; or the metrics up to it were altered.
        XtkError: another version wrote it.
    """
    found = distributed.all_gather_object(list_checkpoints(output))[0]
    run, damaged, wrong = run_fingerprint(identity), list[Path](), None
    for step, folder in reversed(found):
        wrong = next(
            filter(None, distributed.all_gather_object(_problem(output, step, folder, run, best=needs_best))), None
        )
        if wrong is None:
            if distributed.is_main_process():
                _check_metrics(output, folder)
            return ResumePoint(step, folder, tuple(damaged))
        if not isinstance(wrong, CorruptError):
            raise wrong
        damaged.append(folder)
        terminal.note(f"distill: warning: {folder.name} cannot be used: {wrong.what} ({wrong.where})")
    if wrong is not None:
        raise CorruptError(
            f"no checkpoint of this run can be used: {wrong.what}",
            where=wrong.where,
            hint="restore a checkpoint from a copy; or --force, to train again from step 0",
        )
    return ResumePoint()


def _problem(output: Path, step: int, folder: Path, run: str, *, best: bool) -> XtkError | None:
    """Return why a checkpoint cannot be used, as far as this process has read it; None if it can."""
    here = (distributed.rank(), distributed.world_size())
    try:
        content = read_run_manifest(folder, (CHECKPOINT,))
        if content.get("step") != step:
            raise CorruptError(f"this is the checkpoint of step {content.get('step')}", where=str(folder))
        if content.get("run_fingerprint") != run:
            raise CorruptError("this checkpoint is of another run", where=str(folder))
        verify_files(folder, content, subset=here)
        rank_files(folder, content)
        of = TrainerState.from_manifest(content).best_step
        if best and of:
            weights = output / f"{BEST}-{of}"
            kept = read_run_manifest(weights, (BEST,))
            if (kept.get("step"), kept.get("run_fingerprint")) != (of, run):
                raise CorruptError("these are the best weights of another step or run", where=str(weights))
            verify_files(weights, kept, subset=here)
    except XtkError as wrong:
        wrong.where = wrong.where or str(folder / RUN_MANIFEST)
        return wrong
    except OSError as wrong:
        return CorruptError(f"it cannot be read: {wrong.strerror}", where=str(wrong.filename or folder))
    return None


def _check_metrics(output: Path, folder: Path) -> None:
    """Refuse a file of metrics that is not as it was when a checkpoint was written; one that is gone is none.

    Raises:
        Damaged: so it is.
    """
    stated = read_run_manifest(folder).get("metrics_file")
    size = stated.get("bytes") if isinstance(stated, dict) else None
    found = prefix_entry(output, METRICS_FILE, size) if isinstance(size, int) else None
    if found is not None and found != stated:
        raise CorruptError(
            f"these metrics are not those that were there when {folder.name} was written",
            where=str(output / METRICS_FILE),
            hint="restore the file from a copy; or remove it, and the run goes on without its lines up to there",
        )


def remove_old_checkpoints(output: Path, keep: int, damaged: Collection[Path] = (), *, finished: bool = False) -> None:
    """Keep the newest `keep` checkpoints, and the best weights of which they know.

    The checkpoint of an interrupted run is kept in addition until a newer one is there, so that a run that was
    interrupted ends with the same checkpoints as one that was not.

    Args:
        output: the run's folder.
        keep: how many.
        damaged: checkpoints that could not be used, which go in any case.
        finished: whether the student is written.
    """
    found = [path for _, path in list_checkpoints(output) if path not in damaged]
    interrupted = [path for path in found if _was_interrupted(path)]
    regular = [path for path in found if path not in interrupted]
    newest = () if finished else found[-1:]
    for path in (*damaged, *regular[: -keep or None], *(path for path in interrupted if path not in newest)):
        remove_run_subfolder(path)
    _remove_bests(output, 0)


def _was_interrupted(checkpoint: Path) -> bool:
    with contextlib.suppress(XtkError):
        return read_run_manifest(checkpoint, (CHECKPOINT,)).get(INTERRUPTED) is True
    return False


def _remove_bests(output: Path, new: int) -> None:
    """Remove best weights of which no checkpoint knows, from which a run could go on, but for new ones."""
    known = {new}
    for _, path in list_checkpoints(output):
        with contextlib.suppress(XtkError):
            known.add(TrainerState.from_manifest(read_run_manifest(path, (CHECKPOINT,))).best_step)
    for step, path in list_checkpoints(output, BEST):
        if step not in known:
            remove_run_subfolder(path)


class CheckpointSaver:
    """Writes what a run changes, and reads it back; every process has one, and all call its methods together.

    Args:
        model: transformers' or peft's, of which parameters may be cut over processes; names are those it gives them.
        optimizer: over its parameters.
        tokenizer_folder: where the tokenizer's files lie.
        averages: by the names of parameters, and cut like them.
        layout: how the work is cut. Random numbers go on where it is the same.
        merge: writes the finished student into a folder, from a folder with its adapter; None: there is no adapter, or
            none that can be merged.
        run: the run's fingerprint, which its checkpoints state.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        tokenizer_folder: Path,
        *,
        averages: Mapping[str, Tensor] | None = None,
        parallel: str = "",
        merge_adapter: Callable[[Path, Path], None] | None = None,
        run_fingerprint: str = "",
    ) -> None:
        self._merge, self._run = merge_adapter, run_fingerprint
        self._model, self._optimizer, self._tokenizer_folder = model, optimizer, tokenizer_folder
        self._averages, self._layout = averages or {}, parallel
        self._weights = dict(model.state_dict(keep_vars=True))
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        optimised = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if optimised != {id(one) for one in self._trained.values()}:
            raise TypeError("the parameters of the optimizer are not those of the model that are trained")
        self._write_assignment = WriteAssignment(self._trained)

    def write_checkpoint(self, output: Path, step: int, trainer_state: dict[str, Any]) -> None:
        """Write `checkpoint-STEP`, whole: under a temporary name, synced, renamed.

        Args:
            output: the run's folder, which all processes share.
            step: steps that are done.
            trainer_state: what the run has counted so far.

        Raises:
            XtkError: a process wrote to another disk than the first.
        """
        temporary, final = output / f"{TEMPORARY_PREFIX}{CHECKPOINT}-{step}", output / f"{CHECKPOINT}-{step}"
        ranks = distributed.world_size()
        try:
            if distributed.is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / TRAINER_FOLDER).mkdir(parents=True)
            distributed.barrier()
            name = rank_file_name(distributed.rank(), ranks)
            self._write_rank_file(temporary / TRAINER_FOLDER / name)
            with ThreadPoolExecutor(1) as thread:  # the checksum of the part, while weights are gathered and written
                part = thread.submit(file_entries, temporary / TRAINER_FOLDER, [name])
                self.write_model(temporary)
            parts = {name: entry for one in distributed.all_gather_object(part.result()) for name, entry in one.items()}
            if distributed.is_main_process():
                _check_parts(temporary, ranks)
                content = {"kind": CHECKPOINT, "step": step, "run_fingerprint": self._run, "num_processes": ranks}
                kept = {**content, "parallel": self._layout, **trainer_state}
                if (metrics := prefix_entry(output, METRICS_FILE)) is not None:
                    fsync(output / METRICS_FILE)
                    kept["metrics_file"] = metrics
                write_run_manifest(temporary, kept, fsync_and_hash(temporary), {TRAINER_FOLDER: parts})
                fsync(temporary)
                _replace_folder(temporary, final)
            distributed.barrier()
        finally:
            if distributed.is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_rank_file(self, path: Path) -> None:
        pieces, shapes = [], {}
        for name, parameter in self._trained.items():
            state = {**self._optimizer.state.get(parameter, {})}
            if name in self._averages:
                state[EMA] = self._averages[name]
            for key, value in state.items():
                kept_as = f"{key}.{name}"
                shapes[kept_as] = value.shape
                if value.shape == parameter.shape:
                    pieces += self._write_assignment.blocks_to_write(name, value, kept_as)
                elif not value.ndim:
                    if self._write_assignment.writes_scalars(name, parameter.ndim):
                        pieces.append((TensorBlock(kept_as, (), ()), value.detach()))
                else:
                    raise TypeError(f"{key} of {name} is neither a number nor of the shape of what it belongs to")
        for device, numbers in distributed.random_states().items():
            kept_as = f"{RANDOM_STATE}.{device}.{distributed.rank()}"
            shapes[kept_as] = numbers.shape
            pieces.append((TensorBlock(kept_as, (0,), tuple(numbers.shape)), numbers))
        write_sharded_state(path, pieces, shapes, {"trained": sorted(self._trained)})

    def write_model(self, folder: Path) -> None:
        """Write weights, configuration and the tokenizer's own files, unchanged, from the first process."""
        whole: dict[str, Tensor] = {}
        gathered: dict[int, Tensor] = {}  # by identity: tied weights stay one
        for name, tensor in self._weights.items():
            if not isinstance(tensor, Tensor) or not self._is_saved(name):
                continue
            if id(tensor) not in gathered:
                gathered[id(tensor)] = _on_the_cpu(tensor.detach())
            if distributed.is_main_process():
                whole[name] = gathered[id(tensor)]
        if not distributed.is_main_process():
            return
        with _without_distributed_config(self._model.config):
            save_trainable(self._model, folder, whole)
            set_default_permissions(*folder.glob("*.safetensors"))
        self._add_tokenizer(folder)

    def _add_tokenizer(self, folder: Path) -> None:
        for pattern in TOKENIZER_FILES:
            for path in self._tokenizer_folder.glob(pattern):
                shutil.copyfile(path, folder / path.name)

    def _is_saved(self, name: str) -> bool:
        """Say whether a weight is part of what is saved: of a model with adapters these, and what is trained."""
        return (
            not is_peft_model(self._model) or name in self._trained or ".lora_" in name or ".modules_to_save." in name
        )

    def write_best(self, output: Path, step: int) -> None:
        """Write the model to `best-STEP`, whole."""
        temporary, final = output / f"{TEMPORARY_PREFIX}{BEST}-{step}", output / f"{BEST}-{step}"
        if distributed.is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self.write_model(temporary)
        if distributed.is_main_process():
            content = {"kind": BEST, "step": step, "run_fingerprint": self._run}
            write_run_manifest(temporary, content, fsync_and_hash(temporary))
            _replace_folder(temporary, final)
            _remove_bests(output, step)
        distributed.barrier()

    def write_final(self, output: Path, manifest: dict[str, Any], card: str, best_step: int = 0) -> None:
        """Write the student into the run's folder; `xtk.json` last, so that a folder without it is unfinished.

        Args:
            output: the run's folder.
            manifest: of `xtk.json`.
            card: of `README.md`.
            best_step: the step whose weights, kept by `write_best`, are the student's; 0: those that the model has.
        """
        temporary = output / f"{TEMPORARY_PREFIX}final"
        self.write_student(temporary, output / f"{BEST}-{best_step}" if best_step else None)
        if distributed.is_main_process():
            (temporary / CARD_FILE).write_text(card, encoding="utf-8")
            beside = [name for name in (RECIPE_FILE, METRICS_FILE, ROLLOUTS_FILE) if (output / name).is_file()]
            files = fsync_and_hash(temporary) | file_entries(output, beside)
            folders = (
                {ADAPTER_FOLDER: fsync_and_hash(temporary / ADAPTER_FOLDER)}
                if (temporary / ADAPTER_FOLDER).is_dir()
                else {}
            )
            for path in sorted(temporary.iterdir()):
                if path.is_dir():  # of a run that was killed just here
                    remove_run_subfolder(output / path.name)
                else:
                    keep_file_of_user(output / path.name, path)
                path.replace(output / path.name)
            for name in beside:
                fsync(output / name)
            fsync(output)
            temporary.rmdir()
            write_run_manifest(output, manifest, files, folders)
            for _, path in list_checkpoints(output, BEST):
                remove_run_subfolder(path)
        distributed.barrier()

    def write_student(self, folder: Path, best_folder: Path | None = None) -> None:
        """Write the student as others load it, adapters merged into its weights, into a new folder.

        Args:
            folder: what lies there goes.
            best_folder: what `write_best` wrote; None: the weights that the model has.

        Raises:
            Damaged: what `write_best` wrote was altered.
        """
        adapter = folder.with_name(f"{TEMPORARY_PREFIX}adapter")
        place = adapter if self._merge else folder
        if distributed.is_main_process():
            for one in (folder, adapter):
                shutil.rmtree(one, ignore_errors=True)
            if best_folder is not None:
                verify_files(best_folder, read_run_manifest(best_folder, (BEST,)))
                shutil.copytree(best_folder, place, ignore=shutil.ignore_patterns(RUN_MANIFEST))
            else:
                place.mkdir()
        if best_folder is None:
            self.write_model(place)
        if distributed.is_main_process() and self._merge:
            folder.mkdir()
            self._merge(adapter, folder)
            set_default_permissions(*folder.rglob("*.safetensors"))
            self._add_tokenizer(folder)
            shutil.rmtree(adapter)

    def load(self, folder: Path, seed: int, random_stream: int | None = None) -> dict[str, Any]:
        """Put back the optimizer, the averages and the random numbers of this process.

        On another number of processes, or another layout, random numbers begin anew, from seed, step and stream.

        Args:
            folder: of the checkpoint.
            seed: of the run.
            random_stream: processes with the same one draw the same random numbers; None: each draws its own.

        Returns:
            What `xtk.json` says.

        Raises:
            XtkError: another version wrote it.
            Damaged: a file is missing, cut short, or of another model. Checksums are compared before, by
                `find_checkpoint`.
        """
        content = read_run_manifest(folder, (CHECKPOINT,))
        pieces = ShardedStateReader([folder / TRAINER_FOLDER / name for name in rank_files(folder, content)])
        with as_corrupt_error(folder):
            self._put_back(pieces, folder)
            if content["num_processes"] == distributed.world_size() and content["parallel"] == self._layout:
                names = {
                    device: f"{RANDOM_STATE}.{device}.{distributed.rank()}" for device in distributed.random_states()
                }
                distributed.set_random_states({device: pieces.read_unsharded(name) for device, name in names.items()})
                return content
        distributed.reseed(seed, content["step"], distributed.rank() if random_stream is None else random_stream)
        told = f"{content['num_processes']} process(es), {content['parallel']}"
        terminal.note(f"distill: {folder.name} was written by {told}: random numbers (of dropout) begin anew")
        return content

    def _put_back(self, pieces: ShardedStateReader, folder: Path) -> None:
        """Put back the optimizer and the averages."""
        self._check_names(folder, set(pieces.headers[0]["trained"]))
        for key, name in [name.split(".", 1) for name in sorted(pieces.names())]:
            if key == RANDOM_STATE:
                continue
            parameter = self._trained[name]
            if key == EMA:
                local_tensor(self._averages[name]).copy_(local_tensor(pieces.read(f"{key}.{name}", parameter)))
            elif pieces.is_scalar(f"{key}.{name}") and parameter.ndim:
                number = pieces.read_unsharded(f"{key}.{name}")
                _check_dtype(key, name, number.dtype, torch.float32, folder)
                self._optimizer.state[parameter][key] = number.to(_device_of_numbers(self._optimizer, parameter))
            else:
                values = pieces.read(f"{key}.{name}", parameter)
                _check_dtype(key, name, values.dtype, parameter.dtype if parameter.ndim else values.dtype, folder)
                self._optimizer.state[parameter][key] = values
        self._check_states(folder)

    def _check_states(self, folder: Path) -> None:
        """Check that each parameter has all values that the optimizer stores, or none (never updated)."""
        expected = set().union(*self._optimizer.state.values())
        for name, parameter in self._trained.items():
            missing = expected - set(self._optimizer.state.get(parameter) or expected)
            if missing:
                raise CorruptError(f"the optimizer state of {name} has no {min(missing)}", where=str(folder))

    def _check_names(self, folder: Path, there: set[str]) -> None:
        for names, told in ((there - set(self._trained), "trains no"), (set(self._trained) - there, "trains")):
            if names:
                raise CorruptError(
                    f"this checkpoint is of another model: this one {told} {min(names)}", where=str(folder)
                )


def rank_file_name(rank: int, num_ranks: int) -> str:
    """Return the name of a process's file in the trainer's folder of a checkpoint."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


def rank_files(folder: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the names of all processes' files in the trainer's folder of a checkpoint.

    Raises:
        Damaged: the manifest lists others, or one is missing.
    """
    listed = content["folders"].get(TRAINER_FOLDER, {})
    names = [
        rank_file_name(rank, content["num_processes"])
        for rank in range(min(content.get("num_processes", 0), len(listed)))
    ]
    if not names or set(names) != set(listed):
        raise CorruptError("this manifest does not list the files of all processes", where=str(folder / RUN_MANIFEST))
    _check_parts(folder, len(names))
    return names


def _check_parts(folder: Path, ranks: int) -> None:
    missing = [rank for rank in range(ranks) if not (folder / TRAINER_FOLDER / rank_file_name(rank, ranks)).is_file()]
    if missing:
        raise CorruptError(
            f"{len(missing)} of {ranks} processes' parts are not in this checkpoint",
            where=str(folder / TRAINER_FOLDER / rank_file_name(missing[0], ranks)),
            hint="all processes need one shared folder for -o",
        )


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """Return all of a tensor, on the CPU; every process has to call it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.device_type
        there = tensor if tensor.device.type == mesh else tensor.to(mesh)
        tensor = there.full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu() if distributed.is_main_process() else tensor.new_empty(0)


@contextlib.contextmanager
def _without_distributed_config(configuration: Any) -> Iterator[None]:
    """Keep transformers from gathering, which all processes would have to do, what is gathered already."""
    kept = getattr(configuration, "distributed_config", None)
    if kept is not None:
        configuration.distributed_config = None
    try:
        yield
    finally:
        if kept is not None:
            configuration.distributed_config = kept


def _check_dtype(key: str, name: str, found: torch.dtype, expected: torch.dtype, folder: Path) -> None:
    if found != expected:
        raise CorruptError(f"{key} of {name} is {found}; the optimizer needs {expected}", where=str(folder))


def _device_of_numbers(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Return where an optimizer keeps its count of steps."""
    (group,) = (group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def fsync_and_hash(folder: Path) -> dict[str, dict[str, Any]]:
    """Bring a folder to the disk; return size and checksum of its own files, which are read while the disk writes."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(file_entries, folder, listed_file_names(folder))
        fsync_folder(folder)
        return found.result()


def _replace_folder(temporary: Path, final: Path) -> None:
    """Rename a folder, for good."""
    remove_run_subfolder(final)
    temporary.replace(final)
    fsync(final.parent)


def fsync_folder(folder: Path) -> None:
    """Bring a folder, its files and subfolders to the disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
