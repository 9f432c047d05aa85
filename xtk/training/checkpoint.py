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
from xtk.artifacts.files import TEMPORARY, read_json, share
from xtk.artifacts.locks import LOCK
from xtk.artifacts.outputs import entries_of, foreign_error
from xtk.artifacts.owned import keep_file_of_user, refuse_foreign_in_run, remove_folder_of_run, remove_run
from xtk.artifacts.runs import (
    ADAPTER,
    BEST,
    CARD,
    CHECKPOINT,
    DONE,
    METRICS,
    RECIPE,
    ROLLOUTS,
    TRAINER,
    beginning,
    check_sizes,
    entries,
    fingerprint_of_run,
    listed_names,
    numbered,
    read_manifest,
    read_recipe,
    recipe_version,
    verify,
    write_manifest,
    write_recipe,
)
from xtk.errors import Damaged, XtkError
from xtk.models.preparation import is_adapted, save_trained
from xtk.training import processes
from xtk.training.pieces import Box, Pieces, Share, damage, local, write_pieces
from xtk.training.standing import Standing

STUDENT = "student"
INTERRUPTED = "interrupted"  # of the manifest of a checkpoint that only a stopped run has
AVERAGE, RANDOM = "average", "random"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


def find_run(output: Path, identity: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Look for a run in a folder, and touch nothing.

    Returns:
        What the finished run wrote to `xtk.json`; None if there is something left to train (or to begin anew: `force`).

    Raises:
        XtkError: the folder holds other things, or a run of another recipe or another version.
        Damaged: the manifest of a finished run was altered, or a file of weights has another size.
    """
    if output.is_file():
        raise XtkError("a student is a folder, and there is a file of this name", where=str(output))
    if not output.is_dir() or all(path.name.startswith((TEMPORARY, LOCK)) for path in output.iterdir()):
        return None
    if recipe_version(read_json(output / RECIPE) if (output / RECIPE).is_file() else {}) is None:
        raise foreign_error(entries_of(output), str(output))
    if force:
        refuse_foreign_in_run(output)
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
    return _finished(output) if (output / DONE).is_file() else None


def _finished(output: Path) -> dict[str, Any]:
    """Return what a finished run wrote to `xtk.json`.

    Raises:
        Damaged: the manifest was altered, or a file of weights has another size.
    """
    try:
        content = read_manifest(output, (STUDENT,))
        check_sizes(output, content)
    except Damaged as wrong:
        hint = f"rm {output / DONE}, and the same command again: it goes on from the last checkpoint"
        raise Damaged(wrong.what, where=wrong.where, hint=hint) from None
    return content


def begin_run(output: Path, options: Mapping[str, Any], identity: dict[str, Any], *, force: bool) -> None:
    """Make a run's folder, or clear away what a killed run, or with `force` any run, has left in it."""
    output.mkdir(parents=True, exist_ok=True)
    if force:
        remove_run(output)
    for path in output.glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not (output / RECIPE).is_file():
        write_recipe(output, options, identity)


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: steps that are done; 0: the run begins.
        folder: of the checkpoint; None: the run begins.
        damaged: later checkpoints, which cannot be used.
    """

    step: int = 0
    folder: Path | None = None
    damaged: tuple[Path, ...] = ()


def find_checkpoint(output: Path, identity: Mapping[str, Any], *, best: bool) -> Resumed:
    """Return the newest checkpoint of a run whose files all match its manifest; every process has to call it.

    Each process reads its share of the files. A checkpoint that does not match is reported, and the one before it is
    tried.

    Args:
        output: the run's folder.
        identity: of the run.
        best: whether the run keeps the best weights, so that those of the checkpoint are needed too.

    Raises:
        Damaged: there are checkpoints, and none of them can be used; or the metrics up to it were altered.
        XtkError: another version wrote it.
    """
    found = processes.told_by_all(numbered(output))[0]
    run, damaged, wrong = fingerprint_of_run(identity), list[Path](), None
    for step, folder in reversed(found):
        wrong = next(filter(None, processes.told_by_all(_problem(output, step, folder, run, best=best))), None)
        if wrong is None:
            if processes.is_first():
                _check_metrics(output, folder)
            return Resumed(step, folder, tuple(damaged))
        if not isinstance(wrong, Damaged):
            raise wrong
        damaged.append(folder)
        terminal.note(f"distill: warning: {folder.name} cannot be used: {wrong.what} ({wrong.where})")
    if wrong is not None:
        raise Damaged(
            f"no checkpoint of this run can be used: {wrong.what}",
            where=wrong.where,
            hint="restore a checkpoint from a copy; or --force, to train again from step 0",
        )
    return Resumed()


def _problem(output: Path, step: int, folder: Path, run: str, *, best: bool) -> XtkError | None:
    """Return why a checkpoint cannot be used, as far as this process has read it; None if it can."""
    here = (processes.rank(), processes.number())
    try:
        content = read_manifest(folder, (CHECKPOINT,))
        if content.get("step") != step:
            raise Damaged(f"this is the checkpoint of step {content.get('step')}", where=str(folder))
        if content.get("run") != run:
            raise Damaged("this checkpoint is of another run", where=str(folder))
        verify(folder, content, share=here)
        parts_of(folder, content)
        of = Standing.of(content).best_step
        if best and of:
            weights = output / f"{BEST}-{of}"
            kept = read_manifest(weights, (BEST,))
            if (kept.get("step"), kept.get("run")) != (of, run):
                raise Damaged("these are the best weights of another step or run", where=str(weights))
            verify(weights, kept, share=here)
    except XtkError as wrong:
        wrong.where = wrong.where or str(folder / DONE)
        return wrong
    except OSError as wrong:
        return Damaged(f"it cannot be read: {wrong.strerror}", where=str(wrong.filename or folder))
    return None


def _check_metrics(output: Path, folder: Path) -> None:
    """Refuse a file of metrics that is not as it was when a checkpoint was written; one that is gone is none.

    Raises:
        Damaged: so it is.
    """
    stated = read_manifest(folder).get("metrics_file")
    size = stated.get("bytes") if isinstance(stated, dict) else None
    found = beginning(output, METRICS, size) if isinstance(size, int) else None
    if found is not None and found != stated:
        raise Damaged(
            f"these metrics are not those that were there when {folder.name} was written",
            where=str(output / METRICS),
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
    found = [path for _, path in numbered(output) if path not in damaged]
    interrupted = [path for path in found if _was_interrupted(path)]
    regular = [path for path in found if path not in interrupted]
    newest = () if finished else found[-1:]
    for path in (*damaged, *regular[: -keep or None], *(path for path in interrupted if path not in newest)):
        remove_folder_of_run(path)
    _remove_bests(output, 0)


def _was_interrupted(checkpoint: Path) -> bool:
    with contextlib.suppress(XtkError):
        return read_manifest(checkpoint, (CHECKPOINT,)).get(INTERRUPTED) is True
    return False


def _remove_bests(output: Path, new: int) -> None:
    """Remove best weights of which no checkpoint knows, from which a run could go on, but for new ones."""
    known = {new}
    for _, path in numbered(output):
        with contextlib.suppress(XtkError):
            known.add(Standing.of(read_manifest(path, (CHECKPOINT,))).best_step)
    for step, path in numbered(output, BEST):
        if step not in known:
            remove_folder_of_run(path)


class Saver:
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
        layout: str = "",
        merge: Callable[[Path, Path], None] | None = None,
        run: str = "",
    ) -> None:
        self._merge, self._run = merge, run
        self._model, self._optimizer, self._tokenizer_folder = model, optimizer, tokenizer_folder
        self._averages, self._layout = averages or {}, layout
        self._weights = dict(model.state_dict(keep_vars=True))
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        optimised = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if optimised != {id(one) for one in self._trained.values()}:
            raise TypeError("the parameters of the optimizer are not those of the model that are trained")
        self._share = Share(self._trained)

    def write_checkpoint(self, output: Path, step: int, counted: dict[str, Any]) -> None:
        """Write `checkpoint-STEP`, whole: under a temporary name, synced, renamed.

        Args:
            output: the run's folder, which all processes share.
            step: steps that are done.
            counted: what the run has counted so far.

        Raises:
            XtkError: a process wrote to another disk than the first.
        """
        temporary, final = output / f"{TEMPORARY}{CHECKPOINT}-{step}", output / f"{CHECKPOINT}-{step}"
        ranks = processes.number()
        try:
            if processes.is_first():
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / TRAINER).mkdir(parents=True)
            processes.wait()
            name = part_name(processes.rank(), ranks)
            self._write_part(temporary / TRAINER / name)
            with ThreadPoolExecutor(1) as thread:  # the checksum of the part, while weights are gathered and written
                part = thread.submit(entries, temporary / TRAINER, [name])
                self.write_model(temporary)
            parts = {name: entry for one in processes.told_by_all(part.result()) for name, entry in one.items()}
            if processes.is_first():
                _check_parts(temporary, ranks)
                content = {"kind": CHECKPOINT, "step": step, "run": self._run, "processes": ranks}
                kept = {**content, "parallel": self._layout, **counted}
                if (metrics := beginning(output, METRICS)) is not None:
                    sync(output / METRICS)
                    kept["metrics_file"] = metrics
                write_manifest(temporary, kept, sync_and_hash(temporary), {TRAINER: parts})
                sync(temporary)
                _put_in_place(temporary, final)
            processes.wait()
        finally:
            if processes.is_first():
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_part(self, path: Path) -> None:
        pieces, shapes = [], {}
        for name, parameter in self._trained.items():
            state = {**self._optimizer.state.get(parameter, {})}
            if name in self._averages:
                state[AVERAGE] = self._averages[name]
            for key, value in state.items():
                kept_as = f"{key}.{name}"
                shapes[kept_as] = value.shape
                if value.shape == parameter.shape:
                    pieces += self._share.of(name, value, kept_as)
                elif not value.ndim:
                    if self._share.first(name, parameter.ndim):
                        pieces.append((Box(kept_as, (), ()), value.detach()))
                else:
                    raise TypeError(f"{key} of {name} is neither a number nor of the shape of what it belongs to")
        for device, numbers in processes.random_states().items():
            kept_as = f"{RANDOM}.{device}.{processes.rank()}"
            shapes[kept_as] = numbers.shape
            pieces.append((Box(kept_as, (0,), tuple(numbers.shape)), numbers))
        write_pieces(path, pieces, shapes, {"trained": sorted(self._trained)})

    def write_model(self, folder: Path) -> None:
        """Write weights, configuration and the tokenizer's own files, unchanged, from the first process."""
        whole: dict[str, Tensor] = {}
        gathered: dict[int, Tensor] = {}  # by identity: tied weights stay one
        for name, tensor in self._weights.items():
            if not isinstance(tensor, Tensor) or not self._is_written(name):
                continue
            if id(tensor) not in gathered:
                gathered[id(tensor)] = _on_the_cpu(tensor.detach())
            if processes.is_first():
                whole[name] = gathered[id(tensor)]
        if not processes.is_first():
            return
        with _as_if_whole(self._model.config):
            save_trained(self._model, folder, whole)
            share(*folder.glob("*.safetensors"))
        self._add_tokenizer(folder)

    def _add_tokenizer(self, folder: Path) -> None:
        for pattern in TOKENIZER_FILES:
            for path in self._tokenizer_folder.glob(pattern):
                shutil.copyfile(path, folder / path.name)

    def _is_written(self, name: str) -> bool:
        """Say whether a weight is part of what is saved: of a model with adapters these, and what is trained."""
        return not is_adapted(self._model) or name in self._trained or ".lora_" in name or ".modules_to_save." in name

    def write_best(self, output: Path, step: int) -> None:
        """Write the model to `best-STEP`, whole."""
        temporary, final = output / f"{TEMPORARY}{BEST}-{step}", output / f"{BEST}-{step}"
        if processes.is_first():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self.write_model(temporary)
        if processes.is_first():
            content = {"kind": BEST, "step": step, "run": self._run}
            write_manifest(temporary, content, sync_and_hash(temporary))
            _put_in_place(temporary, final)
            _remove_bests(output, step)
        processes.wait()

    def finish(self, output: Path, content: dict[str, Any], card: str, best: int = 0) -> None:
        """Write the student into the run's folder; `xtk.json` last, so that a folder without it is unfinished.

        Args:
            output: the run's folder.
            content: of `xtk.json`.
            card: of `README.md`.
            best: the step whose weights, kept by `write_best`, are the student's; 0: those that the model has.
        """
        temporary = output / f"{TEMPORARY}final"
        self.write_student(temporary, output / f"{BEST}-{best}" if best else None)
        if processes.is_first():
            (temporary / CARD).write_text(card, encoding="utf-8")
            beside = [name for name in (RECIPE, METRICS, ROLLOUTS) if (output / name).is_file()]
            files = sync_and_hash(temporary) | entries(output, beside)
            folders = {ADAPTER: sync_and_hash(temporary / ADAPTER)} if (temporary / ADAPTER).is_dir() else {}
            for path in sorted(temporary.iterdir()):
                if path.is_dir():  # of a run that was killed just here
                    remove_folder_of_run(output / path.name)
                else:
                    keep_file_of_user(output / path.name, path)
                path.replace(output / path.name)
            for name in beside:
                sync(output / name)
            sync(output)
            temporary.rmdir()
            write_manifest(output, content, files, folders)
            for _, path in numbered(output, BEST):
                remove_folder_of_run(path)
        processes.wait()

    def write_student(self, folder: Path, trained: Path | None = None) -> None:
        """Write the student as others load it, adapters merged into its weights, into a new folder.

        Args:
            folder: what lies there goes.
            trained: what `write_best` wrote; None: the weights that the model has.

        Raises:
            Damaged: what `write_best` wrote was altered.
        """
        adapter = folder.with_name(f"{TEMPORARY}adapter")
        place = adapter if self._merge else folder
        if processes.is_first():
            for one in (folder, adapter):
                shutil.rmtree(one, ignore_errors=True)
            if trained is not None:
                verify(trained, read_manifest(trained, (BEST,)))
                shutil.copytree(trained, place, ignore=shutil.ignore_patterns(DONE))
            else:
                place.mkdir()
        if trained is None:
            self.write_model(place)
        if processes.is_first() and self._merge:
            folder.mkdir()
            self._merge(adapter, folder)
            share(*folder.rglob("*.safetensors"))
            self._add_tokenizer(folder)
            shutil.rmtree(adapter)

    def load(self, folder: Path, seed: int, stream: int | None = None) -> dict[str, Any]:
        """Put back the optimizer, the averages and the random numbers of this process.

        On another number of processes, or another layout, random numbers begin anew, from seed, step and stream.

        Args:
            folder: of the checkpoint.
            seed: of the run.
            stream: processes with the same one draw the same random numbers; None: each draws its own.

        Returns:
            What `xtk.json` says.

        Raises:
            XtkError: another version wrote it.
            Damaged: a file is missing, cut short, or of another model. Checksums are compared before, by
                `find_checkpoint`.
        """
        content = read_manifest(folder, (CHECKPOINT,))
        pieces = Pieces([folder / TRAINER / name for name in parts_of(folder, content)])
        with damage(folder):
            self._put_back(pieces, folder)
            if content["processes"] == processes.number() and content["parallel"] == self._layout:
                names = {device: f"{RANDOM}.{device}.{processes.rank()}" for device in processes.random_states()}
                processes.set_random_states({device: pieces.alone(name) for device, name in names.items()})
                return content
        processes.seed_anew(seed, content["step"], processes.rank() if stream is None else stream)
        told = f"{content['processes']} process(es), {content['parallel']}"
        terminal.note(f"distill: {folder.name} was written by {told}: random numbers (of dropout) begin anew")
        return content

    def _put_back(self, pieces: Pieces, folder: Path) -> None:
        """Put back the optimizer and the averages."""
        self._check_names(folder, set(pieces.headers[0]["trained"]))
        for key, name in [name.split(".", 1) for name in sorted(pieces.names())]:
            if key == RANDOM:
                continue
            parameter = self._trained[name]
            if key == AVERAGE:
                local(self._averages[name]).copy_(local(pieces.read(f"{key}.{name}", parameter)))
            elif pieces.is_number(f"{key}.{name}") and parameter.ndim:
                number = pieces.alone(f"{key}.{name}")
                self._optimizer.state[parameter][key] = number.to(_device_of_numbers(self._optimizer, parameter))
            else:
                self._optimizer.state[parameter][key] = pieces.read(f"{key}.{name}", parameter)

    def _check_names(self, folder: Path, there: set[str]) -> None:
        for names, told in ((there - set(self._trained), "trains no"), (set(self._trained) - there, "trains")):
            if names:
                raise Damaged(f"this checkpoint is of another model: this one {told} {min(names)}", where=str(folder))


def part_name(rank: int, ranks: int) -> str:
    """Return the name of a process's file in the trainer's folder of a checkpoint."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def parts_of(folder: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the names of all processes' files in the trainer's folder of a checkpoint.

    Raises:
        Damaged: the manifest lists others, or one is missing.
    """
    listed = content["folders"].get(TRAINER, {})
    names = [part_name(rank, content["processes"]) for rank in range(min(content.get("processes", 0), len(listed)))]
    if not names or set(names) != set(listed):
        raise Damaged("this manifest does not list the files of all processes", where=str(folder / DONE))
    _check_parts(folder, len(names))
    return names


def _check_parts(folder: Path, ranks: int) -> None:
    missing = [rank for rank in range(ranks) if not (folder / TRAINER / part_name(rank, ranks)).is_file()]
    if missing:
        raise Damaged(
            f"{len(missing)} of {ranks} processes' parts are not in this checkpoint",
            where=str(folder / TRAINER / part_name(missing[0], ranks)),
            hint="all processes need one shared folder for -o",
        )


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """Return all of a tensor, on the CPU; every process has to call it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.device_type
        there = tensor if tensor.device.type == mesh else tensor.to(mesh)
        tensor = there.full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu() if processes.is_first() else tensor.new_empty(0)


@contextlib.contextmanager
def _as_if_whole(configuration: Any) -> Iterator[None]:
    """Keep transformers from gathering, which all processes would have to do, what is gathered already."""
    kept = getattr(configuration, "distributed_config", None)
    if kept is not None:
        configuration.distributed_config = None
    try:
        yield
    finally:
        if kept is not None:
            configuration.distributed_config = kept


def _device_of_numbers(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Return where an optimizer keeps its count of steps."""
    (group,) = (group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def sync_and_hash(folder: Path) -> dict[str, dict[str, Any]]:
    """Bring a folder to the disk; return size and checksum of its own files, which are read while the disk writes."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(entries, folder, listed_names(folder))
        sync_folder(folder)
        return found.result()


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename a folder, for good."""
    remove_folder_of_run(final)
    temporary.replace(final)
    sync(final.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder, its files and subfolders to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
