"""Checkpoints: a Hugging Face model folder with a manifest, and a subfolder with optimizer, EMA and random states.

The model is saved unsharded, so that any tool loads it. Each process writes its part of the rest into a separate
safetensors file (sharded_state.py); any number of processes can read them, with any sharding of the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtk import terminal
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX, fsync, has_same_content, set_default_permissions
from xtk.files.output import move_aside
from xtk.files.run_names import BEST, CHECKPOINT, RECIPE_FILE, list_checkpoints
from xtk.models.saved_model import TOKENIZER_CLASS, add_transformers_4_keys
from xtk.models.student_model_setup import is_peft_model, save_trainable
from xtk.parallel import process_group
from xtk.runs.folder import (
    ADAPTER_FOLDER,
    CARD_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_MANIFEST,
    TRAINER_FOLDER,
    file_entries,
    fsync_and_hash,
    read_run_manifest,
    verify_files,
    write_run_manifest,
)
from xtk.runs.sharded_state import (
    SKIP_HINT,
    ShardedStateReader,
    TensorBlock,
    WriteAssignment,
    as_corrupt_error,
    local_tensor,
    write_sharded_state,
)
from xtk.runs.trainer_state import TrainerState
from xtk.text.start_tokens import AUTO_START, WITHOUT_POST_PROCESSOR
from xtk.text.tokenizer import Tokenizer
from xtk.text.tokenizer_files import TOOL_USE_TEMPLATE, combined_template_files

STUDENT = "student"
INTERRUPTED = "interrupted"  # manifest key of the extra checkpoint that an interrupted run writes
EMA, RANDOM_STATE = "ema", "random"
_CARD_BEGINNING = 96  # bytes: up to the tag xtk
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


def copy_tokenizer_files(source: Path, folder: Path, start_token: str = AUTO_START) -> None:
    """Copy the tokenizer's files of a model folder; transformers 4 can read them. Two chat templates become one.

    Another start token than the tokenizer's own becomes its own: transformers and vLLM put it before a text too.
    """
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    add_transformers_4_keys(folder)
    template = combined_template_files(source) if (source / TOOL_USE_TEMPLATE).is_file() else None
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if start_token != AUTO_START:
        tokenizer = Tokenizer(source, start_token=start_token)
        (folder / "tokenizer.json").write_bytes(tokenizer.to_files(with_start=True)["tokenizer.json"])
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        settings["add_bos_token"] = tokenizer.start_ids == (tokenizer.special_token_ids.get("bos"),)
        if str(settings.get("tokenizer_class", "")).startswith(WITHOUT_POST_PROCESSOR):
            settings["tokenizer_class"] = TOKENIZER_CLASS
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def remove_old_checkpoints(output: Path, keep: int, damaged: Collection[Path] = (), *, finished: bool = False) -> None:
    """Remove all but the newest `keep` checkpoints, and best weights to which no checkpoint refers.

    The checkpoint of an interruption is kept in addition until a newer one exists, so that a run ends with the same
    checkpoints, interrupted or not.

    Args:
        keep: number of regular checkpoints to keep.
        damaged: corrupt checkpoints, which are always removed.
        finished: whether the finished student is written already.
    """
    checkpoints = [path for _, path in list_checkpoints(output) if path not in damaged]
    interrupted = [path for path in checkpoints if _was_interrupted(path)]
    regular = [path for path in checkpoints if path not in interrupted]
    newest = () if finished else checkpoints[-1:]
    for path in (*damaged, *regular[: -keep or None], *(path for path in interrupted if path not in newest)):
        _remove_run_subfolder(path)
    _remove_bests(output, 0)


def _was_interrupted(checkpoint: Path) -> bool:
    with contextlib.suppress(XtkError):
        return read_run_manifest(checkpoint, (CHECKPOINT,)).get(INTERRUPTED) is True
    return False


def _remove_bests(output: Path, new: int) -> None:
    """Remove best weights to which no checkpoint refers, except those of step `new`."""
    known = {new}
    for _, path in list_checkpoints(output):
        with contextlib.suppress(XtkError):
            known.add(TrainerState.from_manifest(read_run_manifest(path, (CHECKPOINT,))).best_step)
    for step, path in list_checkpoints(output, BEST):
        if step not in known:
            _remove_run_subfolder(path)


class CheckpointSaver:
    """Writes and loads checkpoints and the finished student; all processes call its methods together (collective)."""

    def __init__(
        self,
        model: Any,  # a transformers or PEFT model; its parameters may be sharded over processes
        optimizer: torch.optim.Optimizer,
        tokenizer_folder: Path,  # folder with the tokenizer files, which are copied
        *,
        start_token: str = AUTO_START,  # start token of the written tokenizers; see `copy_tokenizer_files`
        averages: Mapping[str, Tensor] | None = None,  # EMA weights by parameter name, sharded like the parameters
        parallel: str = "",  # the parallel layout, as text. Random states are restored only if it is the same.
        # called with (adapter folder, output folder), writes the merged student; None: no adapter, or one that cannot
        # be merged
        merge_adapter: Callable[[Path, Path], None] | None = None,
        run_fingerprint: str = "",  # fingerprint of the run, stored in its checkpoints
    ) -> None:
        self._merge, self._run = merge_adapter, run_fingerprint
        self._model, self._optimizer = model, optimizer
        self._tokenizer_folder, self._start_token = tokenizer_folder, start_token
        self._averages, self._layout = averages or {}, parallel
        self._weights = dict(model.state_dict(keep_vars=True))
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimized = {id(param_group) for group in optimizer.param_groups for param_group in group["params"]}
        if optimized != {id(parameter) for parameter in self._trained.values()}:
            raise TypeError("the optimizer must have exactly the model's trainable parameters")
        self._write_assignment = WriteAssignment(self._trained)

    def write_checkpoint(self, output: Path, step: int, trainer_state: dict[str, Any]) -> None:
        """Write `checkpoint-STEP` atomically: under a temporary name, fsynced, then renamed."""
        temporary, final = output / f"{TEMPORARY_PREFIX}{CHECKPOINT}-{step}", output / f"{CHECKPOINT}-{step}"
        ranks = process_group.world_size()
        try:
            if process_group.is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / TRAINER_FOLDER).mkdir(parents=True)
            process_group.barrier()
            name = rank_file_name(process_group.rank(), ranks)
            self._write_rank_file(temporary / TRAINER_FOLDER / name)
            with ThreadPoolExecutor(1) as thread:  # hash this process's file while weights are gathered and written
                part = thread.submit(file_entries, temporary / TRAINER_FOLDER, [name])
                self.write_model(temporary)
            parts = {
                name: entry for one in process_group.all_gather_object(part.result()) for name, entry in one.items()
            }
            if process_group.is_main_process():
                _check_parts(temporary, ranks)
                content = {"kind": CHECKPOINT, "step": step, "run_fingerprint": self._run, "num_processes": ranks}
                kept = {**content, "parallel": self._layout, **trainer_state}
                if (output / METRICS_FILE).is_file():
                    fsync(output / METRICS_FILE)
                write_run_manifest(temporary, kept, fsync_and_hash(temporary), {TRAINER_FOLDER: parts})
                fsync(temporary)
                _replace_folder(temporary, final)
            process_group.barrier()
        finally:
            if process_group.is_main_process():
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
                    raise TypeError(f"optimizer state {key} of {name} is neither a scalar nor of the parameter's shape")
        for device, numbers in process_group.random_states().items():
            kept_as = f"{RANDOM_STATE}.{device}.{process_group.rank()}"
            shapes[kept_as] = numbers.shape
            pieces.append((TensorBlock(kept_as, (0,), tuple(numbers.shape)), numbers))
        write_sharded_state(path, pieces, shapes, {"trained": sorted(self._trained)})

    def write_model(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write weights, configuration and tokenizer files (collective); `dtype`: of matrices, None: as trained."""
        full: dict[str, Tensor] = {}
        gathered: dict[int, Tensor] = {}  # by identity: tied weights stay one tensor
        for name, tensor in self._weights.items():
            if not isinstance(tensor, Tensor) or not self._is_saved(name):
                continue
            if id(tensor) not in gathered:
                # Vectors stay: routing biases and the like, for which engines use float32.
                is_cast = dtype is not None and tensor.is_floating_point() and tensor.ndim > 1
                gathered[id(tensor)] = _gather_to_cpu(tensor.detach()).to(dtype if is_cast else tensor.dtype)
            if process_group.is_main_process():
                full[name] = gathered[id(tensor)]
        if not process_group.is_main_process():
            return
        with _without_distributed_config(self._model.config):
            save_trainable(self._model, folder, full)
            set_default_permissions(*folder.glob("*.safetensors"))
        copy_tokenizer_files(self._tokenizer_folder, folder, self._start_token)

    def _is_saved(self, name: str) -> bool:
        """Return whether a weight is saved: all of a plain model; of a PEFT model, adapters and trained weights."""
        return (
            not is_peft_model(self._model) or name in self._trained or ".lora_" in name or ".modules_to_save." in name
        )

    def write_best(self, output: Path, step: int) -> None:
        """Write the model to `best-STEP` atomically (collective)."""
        temporary, final = output / f"{TEMPORARY_PREFIX}{BEST}-{step}", output / f"{BEST}-{step}"
        if process_group.is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self.write_model(temporary)
        if process_group.is_main_process():
            content = {"kind": BEST, "step": step, "run_fingerprint": self._run}
            write_run_manifest(temporary, content, fsync_and_hash(temporary))
            _replace_folder(temporary, final)
            _remove_bests(output, step)
        process_group.barrier()

    def write_final(self, output: Path, manifest: dict[str, Any], card: str, best_step: int | None = None) -> None:
        """Write the finished student into the run folder; `xtk.json` last, so that a folder without it is unfinished.

        Args:
            manifest: content of `xtk.json`.
            card: content of `README.md`.
            best_step: step whose weights, saved by `write_best`, become the student; None: the current weights.
        """
        temporary = output / f"{TEMPORARY_PREFIX}final"
        self.write_student(temporary, output / f"{BEST}-{best_step}" if best_step is not None else None)
        if process_group.is_main_process():
            (temporary / CARD_FILE).write_text(card, encoding="utf-8")
            run_files = [name for name in (RECIPE_FILE, METRICS_FILE, ROLLOUTS_FILE) if (output / name).is_file()]
            files = fsync_and_hash(temporary) | file_entries(output, run_files)
            folders = (
                {ADAPTER_FOLDER: fsync_and_hash(temporary / ADAPTER_FOLDER)}
                if (temporary / ADAPTER_FOLDER).is_dir()
                else {}
            )
            for path in sorted(temporary.iterdir()):
                _replace(path, output / path.name)
            for name in run_files:
                fsync(output / name)
            fsync(output)
            temporary.rmdir()
            if os.path.lexists(output / RUN_MANIFEST):
                move_aside(output / RUN_MANIFEST)
            write_run_manifest(output, manifest, files, folders)
            for _, path in list_checkpoints(output, BEST):
                _remove_run_subfolder(path)
        process_group.barrier()

    def write_student(self, folder: Path, best_folder: Path | None = None, dtype: torch.dtype | None = None) -> None:
        """Write the student into a new folder, with adapters merged into its weights (collective).

        Args:
            folder: the output; an existing folder is removed.
            best_folder: a folder of `write_best`; None: write the current weights.
            dtype: as for `write_model`, for current weights without an adapter.
        """
        adapter = folder.with_name(f"{TEMPORARY_PREFIX}adapter")
        place = adapter if self._merge else folder
        if process_group.is_main_process():
            for one in (folder, adapter):
                shutil.rmtree(one, ignore_errors=True)
            if best_folder is not None:
                verify_files(best_folder, read_run_manifest(best_folder, (BEST,)))
                shutil.copytree(best_folder, place, ignore=shutil.ignore_patterns(RUN_MANIFEST))
            else:
                place.mkdir()
        if best_folder is None:
            self.write_model(place, None if self._merge else dtype)
        if process_group.is_main_process() and self._merge:
            folder.mkdir()
            self._merge(adapter, folder)
            set_default_permissions(*folder.rglob("*.safetensors"))
            copy_tokenizer_files(self._tokenizer_folder, folder, self._start_token)
            copy_tokenizer_files(folder, folder / ADAPTER_FOLDER)
            shutil.rmtree(adapter)

    def load(self, folder: Path, seed: int, random_stream: int | None = None) -> dict[str, Any]:
        """Load optimizer state, EMA weights and random states of this process from a checkpoint.

        With another number of processes or another layout, generators are reseeded from seed, step and stream.
        `random_stream`: processes with equal values sample the same random numbers; None: the rank.

        Returns:
            The content of the checkpoint's `xtk.json`.
        """
        content = read_run_manifest(folder, (CHECKPOINT,))
        state = ShardedStateReader([folder / TRAINER_FOLDER / name for name in rank_files(folder, content)])
        with as_corrupt_error(folder):
            self._load_optimizer_and_ema(state, folder)
            if content["num_processes"] == process_group.world_size() and content["parallel"] == self._layout:
                names = {
                    device: f"{RANDOM_STATE}.{device}.{process_group.rank()}"
                    for device in process_group.random_states()
                }
                held = {device: name for device, name in names.items() if device == "cpu" or name in state.names()}
                if held.keys() != names.keys():  # written on a CPU, read on a GPU
                    process_group.reseed(seed, content["step"], process_group.rank())
                process_group.set_random_states({device: state.read_unsharded(name) for device, name in held.items()})
                return content
        process_group.reseed(seed, content["step"], process_group.rank() if random_stream is None else random_stream)
        writers = f"{content['num_processes']} process(es), {content['parallel']}"
        terminal.note(f"distill: {folder.name} was written by {writers}: random generators are reseeded")
        return content

    def _load_optimizer_and_ema(self, state: ShardedStateReader, folder: Path) -> None:
        """Load optimizer state and EMA weights."""
        self._check_names(folder, set(state.headers[0]["trained"]))
        for key, name in [name.split(".", 1) for name in sorted(state.names())]:
            if key == RANDOM_STATE:
                continue
            parameter = self._trained[name]
            if key == EMA:
                local_tensor(self._averages[name]).copy_(local_tensor(state.read(f"{key}.{name}", parameter)))
            elif state.is_scalar(f"{key}.{name}") and parameter.ndim:
                number = state.read_unsharded(f"{key}.{name}")
                _check_dtype(key, name, number.dtype, torch.float32, folder)
                self._optimizer.state[parameter][key] = number.to(_device_of_scalars(self._optimizer, parameter))
            else:
                values = state.read(f"{key}.{name}", parameter)
                _check_dtype(key, name, values.dtype, parameter.dtype if parameter.ndim else values.dtype, folder)
                self._optimizer.state[parameter][key] = values
        self._check_states(folder)

    def _check_states(self, folder: Path) -> None:
        """Check that each parameter has all values that the optimizer stores, or none (never updated)."""
        expected = set().union(*self._optimizer.state.values())
        for name, parameter in self._trained.items():
            missing = expected - set(self._optimizer.state.get(parameter) or expected)
            if missing:
                what = f"the checkpoint's optimizer state of the parameter {name} has no {min(missing)}"
                raise CorruptError(what, where=str(folder), hint=SKIP_HINT)

    def _check_names(self, folder: Path, saved: set[str]) -> None:
        for names, has in ((saved - set(self._trained), "does not train"), (set(self._trained) - saved, "also trains")):
            if names:
                raise CorruptError(
                    f"the checkpoint is from another model: the student {has} the parameter {min(names)}",
                    where=str(folder),
                    hint=SKIP_HINT,
                )


def rank_file_name(rank: int, num_ranks: int) -> str:
    """Return the name of a process's file in the trainer subfolder of a checkpoint."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


def rank_files(folder: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the names of all processes' files in the trainer subfolder of a checkpoint."""
    listed = content["folders"].get(TRAINER_FOLDER, {})
    names = [
        rank_file_name(rank, content["num_processes"])
        for rank in range(min(content.get("num_processes", 0), len(listed)))
    ]
    if not names or set(names) != set(listed):
        raise CorruptError(
            "the checkpoint's manifest does not list the trainer files of all processes",
            where=str(folder / RUN_MANIFEST),
            hint=SKIP_HINT,
        )
    _check_parts(folder, len(names))
    return names


def _check_parts(folder: Path, ranks: int) -> None:
    missing = [rank for rank in range(ranks) if not (folder / TRAINER_FOLDER / rank_file_name(rank, ranks)).is_file()]
    if missing:
        raise CorruptError(
            f"the checkpoint has no trainer files of {len(missing)} of {ranks} processes",
            where=str(folder / TRAINER_FOLDER / rank_file_name(missing[0], ranks)),
            hint="restore the file; with several machines, use a folder for -o that all machines share",
        )


def _gather_to_cpu(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor on the CPU of the main process, an empty one elsewhere (collective)."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.device_type
        there = tensor if tensor.device.type == mesh else tensor.to(mesh)
        tensor = there.full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu() if process_group.is_main_process() else tensor.new_empty(0)


@contextlib.contextmanager
def _without_distributed_config(configuration: Any) -> Iterator[None]:
    """Keep transformers from gathering weights again while saving, which would be a collective call."""
    kept = getattr(configuration, "distributed_config", None)
    if kept is not None:
        configuration.distributed_config = None
    try:
        yield
    finally:
        if kept is not None:
            configuration.distributed_config = kept


def _check_dtype(key: str, name: str, stored: torch.dtype, expected: torch.dtype, folder: Path) -> None:
    if stored != expected:
        raise CorruptError(
            f"the checkpoint's optimizer state {key} of the parameter {name} has the dtype {stored}, not {expected}",
            where=str(folder),
            hint=SKIP_HINT,
        )


def _device_of_scalars(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Return the device on which an optimizer keeps its step counter."""
    (group,) = (group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def _replace_folder(temporary: Path, final: Path) -> None:
    """Rename a folder over an older one, and fsync the parent."""
    if os.path.lexists(final):
        _remove_run_subfolder(final)
    temporary.replace(final)
    fsync(final.parent)


def _remove_run_subfolder(folder: Path) -> None:
    """Remove a checkpoint or best weights of a run; move aside a folder that is not exactly what its manifest lists."""
    try:
        content = read_run_manifest(folder)
    except (XtkError, OSError):
        move_aside(folder)
        return
    listed = {RUN_MANIFEST, *content["files"]}
    listed |= {f"{name}/{file}" for name, files in content["folders"].items() for file in files}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file()}
    if folder.is_symlink() or there - listed:
        move_aside(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(new: Path, final: Path) -> None:
    """Rename a file or folder of the student to its final path; move aside what is there, except for equal content.

    Equal content is of this run, which was killed in between. Of a model card, only the beginning is equal: it contains
    times.
    """
    if os.path.lexists(final):
        if not _is_same(new, final):
            move_aside(final)
        elif final.is_dir():
            shutil.rmtree(final)
    new.replace(final)


def _is_same(new: Path, old: Path) -> bool:
    if old.is_symlink() or new.is_dir() != old.is_dir():
        return False
    if new.is_dir():
        names = [sorted(path.name for path in folder.iterdir()) for folder in (new, old)]
        return names[0] == names[1] and all(_is_same(new / name, old / name) for name in names[0])
    if new.name == CARD_FILE:
        with new.open("rb") as stream, old.open("rb") as other:
            return stream.read(_CARD_BEGINNING) == other.read(_CARD_BEGINNING)
    return has_same_content(new, old)
