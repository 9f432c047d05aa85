"""Checkpoints: a Hugging Face folder, with the optimizer and random numbers beside it as safetensors."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from xtk.artifacts.files import TEMPORARY, read_json, write_json
from xtk.artifacts.locks import LOCK
from xtk.errors import Damaged, XtkError
from xtk.models.preparation import save_student, save_trained

RECIPE, DONE, METRICS = "recipe.json", "xtk.json", "metrics.jsonl"
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
        raise XtkError("this folder holds other things", where=str(output), hint="give a new folder to -o")
    if force:
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
    for path in output.glob("*" if force else f"{TEMPORARY}*"):
        if path.name.startswith(LOCK):  # its holder removes it
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not (output / RECIPE).is_file():
        write_json(output / RECIPE, recipe)


def save_model(model: Any, tokenizer_folder: Path, folder: Path, *, finished: bool = False) -> None:
    """Write weights, configuration and the tokenizer's own files, unchanged; of a finished model, adapters merged."""
    (save_student if finished else save_trained)(model, folder)
    for pattern in TOKENIZER_FILES:
        for path in tokenizer_folder.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def save_checkpoint(
    output: Path,
    step: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokenizer_folder: Path,
    random: dict[str, torch.Tensor],
    tokens: int = 0,
) -> None:
    """Write `checkpoint-STEP`, whole: under a temporary name, synced, renamed.

    Args:
        output: the run's folder.
        step: steps that are done.
        model: the student.
        optimizer: over the model's parameters.
        tokenizer_folder: where the tokenizer's files lie.
        random: the state of torch's generators of each process: {"cpu", "cuda": [processes, n]}.
        tokens: that the steps took, over all processes.
    """
    temporary = output / f"{TEMPORARY}checkpoint-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_model(model, tokenizer_folder, temporary)
        state = {f"random.{name}": states for name, states in random.items()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value.detach().cpu().contiguous()
        save_file(state, temporary / "trainer.safetensors")
        write_json(temporary / DONE, {"kind": "checkpoint", "step": step, "tokens": tokens})
        sync_folder(temporary)
        final = output / f"checkpoint-{step}"
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        sync_folder(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints of a run, oldest first."""
    found = []
    for path in output.glob("checkpoint-*"):
        with contextlib.suppress(ValueError):
            found.append((int(path.name.rpartition("-")[2]), path))
    return sorted(found)


def remove_old_checkpoints(output: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints."""
    for _, path in checkpoints(output)[: -keep or None]:
        shutil.rmtree(path, ignore_errors=True)


def load_trainer_state(folder: Path, model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Put the optimizer and the random numbers of a process back.

    Raises:
        Damaged: the file is cut short, or of another model.
    """
    path = folder / "trainer.safetensors"
    try:
        state = load_file(path)
    except Exception as wrong:
        raise Damaged(
            f"this checkpoint cannot be read: {wrong}",
            where=str(path),
            hint=f"rm -r {folder}: the one before it is taken",
        ) from None
    random = {name: state.pop(f"random.{name}") for name in ("cpu", "cuda") if f"random.{name}" in state}
    for name, parameter in model.named_parameters():
        keys = {key.split(".", 1)[0]: value for key, value in state.items() if key.split(".", 1)[1] == name}
        if parameter.requires_grad and not keys:
            raise Damaged(f"this checkpoint has no optimizer state for {name}", where=str(path))
        if keys:
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in keys.items()
            }
    if rank < len(random["cpu"]):
        torch.set_rng_state(random["cpu"][rank])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"][rank])


def finish_run(output: Path, model: Any, tokenizer_folder: Path, content: dict[str, Any]) -> None:
    """Write the student into the run's folder; `xtk.json` last, so that a folder without it is unfinished."""
    temporary = output / f"{TEMPORARY}final"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_model(model, tokenizer_folder, temporary, finished=True)
        sync_folder(temporary)
        for path in sorted(temporary.iterdir()):
            if path.is_dir():  # of a run that was killed just here
                shutil.rmtree(output / path.name, ignore_errors=True)
            path.replace(output / path.name)
        sync_folder(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    write_json(output / DONE, content)


def sync_folder(folder: Path) -> None:
    """Bring a folder and its files to the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
