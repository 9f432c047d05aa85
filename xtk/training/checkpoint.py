"""Checkpoints: a Hugging Face folder, with the optimizer and random numbers beside it as safetensors.

The model is whole, so that anything loads it; the rest is written by each process in a file of its own (pieces.py), and
read by any number of processes, however they cut the model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtk import terminal
from xtk.artifacts.files import TEMPORARY, read_json, share, write_json
from xtk.artifacts.locks import LOCK
from xtk.artifacts.outputs import entries_of, foreign_error
from xtk.artifacts.owned import refuse_foreign_in_run, remove_run
from xtk.errors import Damaged, XtkError
from xtk.models.preparation import is_adapted, save_trained
from xtk.training import processes
from xtk.training.pieces import Box, Pieces, Share, local, write_pieces

RECIPE, DONE, METRICS, CARD = "recipe.json", "xtk.json", "metrics.jsonl", "README.md"
VERSION = 2
AVERAGE, RANDOM = "average", "random"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


def find_run(output: Path, recipe: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Look for a run in a folder, and touch nothing.

    Returns:
        What the finished run wrote to `xtk.json`; None if there is something left to train (or to begin anew: `force`).

    Raises:
        XtkError: the folder holds other things, or a run of another recipe.
    """
    if output.is_file():
        raise XtkError("a student is a folder, and there is a file of this name", where=str(output))
    if not output.is_dir() or all(path.name.startswith((TEMPORARY, LOCK)) for path in output.iterdir()):
        return None
    found = read_json(output / RECIPE) if (output / RECIPE).is_file() else {}
    if not {"losses", "inputs"} <= set(found):
        raise foreign_error(entries_of(output), str(output))
    if force:
        refuse_foreign_in_run(output)
        return None
    if found != recipe:
        differences = [key for key in sorted({*found, *recipe}) if found.get(key) != recipe.get(key)]
        told = ", ".join(f"{key}: {found.get(key)} there, {recipe.get(key)} asked for" for key in differences[:3])
        raise XtkError(
            "there is a run of another recipe",
            where=f"{output} ({told})",
            hint="another -o, or --force to replace it",
        )
    return read_json(output / DONE) if (output / DONE).is_file() else None


def begin_run(output: Path, recipe: dict[str, Any], *, force: bool) -> None:
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
        write_json(output / RECIPE, recipe)


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints of a run, oldest first."""
    found = []
    for path in output.glob("checkpoint-*"):
        with contextlib.suppress(ValueError):
            found.append((int(path.name.rpartition("-")[2]), path))
    return sorted(found)


def remove_old_checkpoints(output: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, and the best weights of which they know."""
    for _, path in checkpoints(output)[: -keep or None]:
        shutil.rmtree(path, ignore_errors=True)
    _remove_bests(output, 0)


def _remove_bests(output: Path, new: int) -> None:
    """Remove best weights of which no checkpoint knows, from which a run could go on, but for new ones."""
    known = {new, *(read_json(path / DONE).get("best_step", 0) for _, path in checkpoints(output))}
    for path in output.glob("best-*"):
        if path.name not in {f"best-{step}" for step in known}:
            shutil.rmtree(path, ignore_errors=True)


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
    ) -> None:
        self._merge = merge
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
        temporary, final = output / f"{TEMPORARY}checkpoint-{step}", output / f"checkpoint-{step}"
        ranks = processes.number()
        try:
            if processes.is_first():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
            processes.wait()
            path = temporary / _part(processes.rank(), ranks)
            self._write_part(path)
            self.write_model(temporary)
            processes.wait()
            if processes.is_first():
                _check_parts(temporary, ranks)
                content = {"kind": "checkpoint", "version": VERSION, "step": step, "processes": ranks}
                write_json(temporary / DONE, {**content, "layout": self._layout, **counted})
                sync_folder(temporary)
                shutil.rmtree(final, ignore_errors=True)
                temporary.replace(final)
                sync_folder(output)
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
        write_pieces(path, pieces, shapes, {"version": VERSION, "trained": sorted(self._trained)})

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
        temporary, final = output / f"{TEMPORARY}best-{step}", output / f"best-{step}"
        if processes.is_first():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self.write_model(temporary)
        if processes.is_first():
            sync_folder(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            sync_folder(output)
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
        self.write_student(temporary, output / f"best-{best}" if best else None)
        if processes.is_first():
            (temporary / CARD).write_text(card, encoding="utf-8")
            sync_folder(temporary)
            for path in sorted(temporary.iterdir()):
                if path.is_dir():  # of a run that was killed just here
                    shutil.rmtree(output / path.name, ignore_errors=True)
                path.replace(output / path.name)
            sync_folder(output)
            temporary.rmdir()
            write_json(output / DONE, content)
            for path in output.glob("best-*"):
                shutil.rmtree(path, ignore_errors=True)
        processes.wait()

    def write_student(self, folder: Path, trained: Path | None = None) -> None:
        """Write the student as others load it, adapters merged into its weights, into a new folder.

        Args:
            folder: what lies there goes.
            trained: what `write_best` wrote; None: the weights that the model has.
        """
        adapter = folder.with_name(f"{TEMPORARY}adapter")
        place = adapter if self._merge else folder
        if processes.is_first():
            for one in (folder, adapter):
                shutil.rmtree(one, ignore_errors=True)
            if trained is not None:
                shutil.copytree(trained, place)
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
            Damaged: a file is missing, cut short, or of another model.
        """
        content = read_json(folder / DONE)
        if content.get("version") != VERSION:
            raise XtkError(
                f"this checkpoint has version {content.get('version', 1)}, and this xtk goes on from {VERSION}",
                where=str(folder),
                hint="finish the run with the xtk that began it, or begin anew with --force",
            )
        _check_parts(folder, content["processes"])
        pieces = Pieces([folder / _part(rank, content["processes"]) for rank in range(content["processes"])])
        self._check_names(folder, set(pieces.headers[0]["trained"]))
        kept = [name.split(".", 1) for name in sorted(pieces.names())]
        for key, name in kept:
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
        if content["processes"] == processes.number() and content["layout"] == self._layout:
            names = {device: f"{RANDOM}.{device}.{processes.rank()}" for device in processes.random_states()}
            processes.set_random_states({device: pieces.alone(name) for device, name in names.items()})
        else:
            processes.seed_anew(seed, content["step"], processes.rank() if stream is None else stream)
            told = f"{content['processes']} process(es), {content['layout']}"
            terminal.note(f"distill: {folder.name} was written by {told}: random numbers (of dropout) begin anew")
        return content

    def _check_names(self, folder: Path, there: set[str]) -> None:
        for names, told in ((there - set(self._trained), "trains no"), (set(self._trained) - there, "trains")):
            if names:
                raise Damaged(f"this checkpoint is of another model: this one {told} {min(names)}", where=str(folder))


def _part(rank: int, ranks: int) -> str:
    return f"trainer-{rank:05d}-of-{ranks:05d}.safetensors"


def _check_parts(folder: Path, ranks: int) -> None:
    missing = [rank for rank in range(ranks) if not (folder / _part(rank, ranks)).is_file()]
    if missing:
        raise Damaged(
            f"{len(missing)} of {ranks} processes' parts are not in this checkpoint",
            where=str(folder / _part(missing[0], ranks)),
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


def sync_folder(folder: Path) -> None:
    """Bring a folder and its files to the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
