"""Export of a run or checkpoint as a model folder for transformers, vLLM and the Hugging Face Hub."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xtk import terminal
from xtk.errors import CorruptError, MismatchError, XtkError
from xtk.evaluation.evaluation_result_files import EvaluationResult, add_evaluation_table, read_results
from xtk.files.atomic_files import (
    set_default_permissions,
    sha256,
)
from xtk.files.output import Output, write_output_folder
from xtk.files.run_names import CHECKPOINT, RECIPE_FILE, list_checkpoints
from xtk.models.causal_lm import DTYPES, load_causal_lm
from xtk.models.resolver import ModelRef, base_model_and_adapter, weights_fingerprint
from xtk.models.saved_model import save_model, stop_token_ids
from xtk.models.student_model_setup import (
    StudentModelConfig,
    has_mergeable_adapter,
    load_student,
    save_final_student,
)
from xtk.name_registry import unknown_name_error
from xtk.runs.checkpoint import EMA, STUDENT, copy_tokenizer_files, rank_files
from xtk.runs.folder import (
    CARD_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_MANIFEST,
    TRAINER_FOLDER,
    fsync_and_hash,
    model_folder_kind,
    read_recipe,
    read_run_manifest,
    run_fingerprint,
    verify_files,
    write_run_manifest,
)
from xtk.runs.metrics_file import read_metrics
from xtk.runs.model_card import Provenance, model_card
from xtk.runs.sharded_state import ShardedStateReader
from xtk.text.tokenizer import Tokenizer

EXPORT_KIND = "exported-student"
KEPT_MANIFEST_KEYS = ("steps", "recipe", "metrics", "best")  # copied from the run's `xtk.json`
# Files of a finished run that an export leaves out or rewrites.
RUN_ONLY_FILES = (RECIPE_FILE, METRICS_FILE, ROLLOUTS_FILE, CARD_FILE)
_SIZE = re.compile(r"([1-9]\d*(?:\.\d+)?)([KMGT]?)(i?)B", re.IGNORECASE)


@dataclass(frozen=True)
class ExportConfig:
    """Options of an export."""

    run: Path  # output folder of `xtk distill`
    checkpoint: int = 0  # step of the checkpoint to export; 0: the finished student
    dtype: str = ""  # dtype of the written weights; "": the dtype of training
    max_shard_size: str = "5GB"  # maximum size of a weights file, as in Hugging Face: 5GB
    evaluations: tuple[Path, ...] = ()  # result files of `xtk evaluate`, for the model card

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise unknown_name_error("dtype", self.dtype, DTYPES)
        size_in_bytes(self.max_shard_size)


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as 500MB, 1.5GiB or 5GB; transformers itself reads no GiB."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise XtkError(f"--max-shard-size {text!r} is not a size", hint="use a size such as 500MB or 5GB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def export_student(
    config: ExportConfig, output: Path, *, force: bool, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write a student as a model folder and return its `xtk.json`; an equal export that exists is reused."""
    source, content, metrics = _open_source(config)
    results = [result for path in config.evaluations for result in read_results(path)]
    dtype = config.dtype or content["recipe"].get("student_model", {}).get("dtype", "float32")
    request = {
        "weights": weights_fingerprint(source),
        "step": content["steps"],
        "dtype": dtype,
        "max_shard_size": config.max_shard_size,
        "evaluation": [sha256(path.read_bytes()) for path in config.evaluations],
    }
    claimed = Output(output, EXPORT_FOLDER, force=force)
    _check_output(output, config.run)
    with claimed.lock():
        finished = claimed.find_finished(request)
        if finished is not None:
            return finished
        with write_output_folder(output) as folder:
            tokenizer = Tokenizer(source)
            with _merged_weights(source, config, content["recipe"], tokenizer, folder, trust_remote_code) as merged:
                model = ModelRef(merged, None, dtype, trust_remote_code)
                figures = _write_model_files(model, folder, tokenizer, config.max_shard_size)
            copy_tokenizer_files(source, folder)
            (folder / CARD_FILE).write_text(_card(config, content, metrics, results), encoding="utf-8")
            if _open_source(config)[:2] != (source, content):  # verifies all files again
                raise MismatchError(
                    "the run was replaced while it was exported", where=str(source), hint="run the same command again"
                )
            kept = {name: content[name] for name in KEPT_MANIFEST_KEYS if name in content}
            content_of_export = {**kept, "kind": EXPORT_KIND, "request": request, **figures}
            write_run_manifest(folder, content_of_export, fsync_and_hash(folder))
        return content_of_export


def _open_source(wanted: ExportConfig) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Return the folder of the weights, their manifest, and the metrics up to that step."""
    run = wanted.run
    identity = read_recipe(run)
    steps = [step for step, _ in list_checkpoints(run)]
    metrics = read_metrics(run / METRICS_FILE)
    if not wanted.checkpoint:
        if not (run / RUN_MANIFEST).is_file():
            alternative = f", or use --checkpoint {steps[-1]}" if steps else ""
            raise XtkError(
                "the run to export is not finished",
                where=str(run),
                hint=f"run the same xtk distill command again{alternative}",
            )
        content = read_run_manifest(run, (STUDENT,))
        verify_files(run, content, excluded=RUN_ONLY_FILES)
        return run, content, metrics
    if wanted.checkpoint not in steps:
        raise XtkError(
            f"the run has no checkpoint of step {wanted.checkpoint}",
            where=str(run),
            hint=f"use --checkpoint with one of {', '.join(map(str, steps))}"
            if steps
            else "remove --checkpoint to export the finished student; xtk distill --save-steps N writes checkpoints",
        )
    metrics = [record for record in metrics if record.get("step", 0) <= wanted.checkpoint]
    last = {name: value for record in metrics for name, value in record.items()}
    folder = dict(list_checkpoints(run))[wanted.checkpoint]
    stated = read_run_manifest(folder, (CHECKPOINT,))
    verify_files(folder, stated)
    if (stated.get("step"), stated.get("run_fingerprint")) != (wanted.checkpoint, run_fingerprint(identity)):
        raise CorruptError(
            "the checkpoint was written at another step, or by a run with other options or inputs",
            where=str(folder),
            hint="export another checkpoint with --checkpoint STEP",
        )
    return folder, {"steps": wanted.checkpoint, "recipe": identity, "metrics": last}, metrics


def _check_output(output: Path, run: Path) -> None:
    """Raise XtkError for an output that is, contains or lies inside of the run, or that cannot be replaced."""
    here, there = output.resolve(), run.resolve()
    if here == Path.cwd() or here.is_mount():
        what = "-o is the working directory or a mount point, which an export cannot replace"
        raise XtkError(what, where=str(here), hint=f"use a folder inside of it: -o {output / 'NAME'}")
    if here in (there, *there.parents) or there in here.parents:
        raise XtkError(
            "the output folder contains the run or lies inside of it",
            where=str(output),
            hint="use another -o, outside of the run",
        )


EXPORT_FOLDER = model_folder_kind(EXPORT_KIND, "an export")


@contextmanager
def _merged_weights(
    source: Path,
    wanted: ExportConfig,
    recipe: Mapping[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    trust_remote_code: bool,
) -> Iterator[Path]:
    """Yield a folder of full weights: the source, or a copy with the adapter merged or with EMA weights."""
    base, adapter = base_model_and_adapter(source)
    averaged = bool(wanted.checkpoint and recipe.get("ema_decay"))
    if adapter is None and not averaged:
        yield source
        return
    prepared = recipe.get("student_model", {})
    values: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in prepared.items()}
    quantized = [values.pop(name, False) for name in ("load_in_4bit", "load_in_8bit")]
    if any(quantized):
        terminal.note("export: the adapter was trained on quantized weights and is merged into the unquantized weights")
    values.pop("freeze", None)
    try:
        preparation = (
            StudentModelConfig(**values) if adapter else StudentModelConfig(dtype=values.get("dtype", "float32"))
        )
    except TypeError as failure:
        raise CorruptError(
            f"the recipe.json of the run has an unknown option for the student: {failure}",
            where=str(source),
            hint="export with the version of xtk that trained this run",
        ) from None
    origin = ModelRef(base, None if preparation.lora_r else adapter, trust_remote_code=trust_remote_code)
    model = load_student(origin, preparation, tokenizer, checkpoint=adapter, device=torch.device("cpu"), quiet=True)
    if adapter is not None and weights_fingerprint(base) != recipe["inputs"]["student"]["weights"]:
        raise MismatchError(
            "the base model of the adapter is not the one of the run",
            where=str(base),
            hint="restore the student of the run in this folder; or export the finished student, without --checkpoint",
        )
    if averaged:
        _load_ema_weights(model, source)
    merged = folder / "merged"
    if has_mergeable_adapter(model):
        model = model.merge_and_unload()
    save_final_student(model, merged)
    del model
    try:
        yield merged
    finally:
        shutil.rmtree(merged, ignore_errors=True)


@torch.no_grad()
def _load_ema_weights(model: Any, checkpoint: Path) -> None:
    """Replace a model's weights by the EMA weights of a checkpoint."""
    names = rank_files(checkpoint, read_run_manifest(checkpoint, (CHECKPOINT,)))
    state = ShardedStateReader([checkpoint / TRAINER_FOLDER / name for name in names])
    kept = state.names()
    for name, parameter in model.named_parameters():
        if f"{EMA}.{name}" in kept:
            parameter.copy_(state.read(f"{EMA}.{name}", parameter))


def _write_model_files(merged: ModelRef, folder: Path, tokenizer: Tokenizer, max_shard_size: str) -> dict[str, Any]:
    """Write weights and configurations; return dtype, sizes and stop tokens for the manifest."""
    model = load_causal_lm(merged)
    ends = _end_token_ids(model, tokenizer)
    described = model.generation_config
    if ends:
        # The end of a turn must stop generation too: transformers and vLLM stop at these ids.
        described.eos_token_id = ends if len(ends) > 1 else ends[0]
    for role in ("bos", "pad"):
        if role in tokenizer.special_token_ids:
            setattr(described, f"{role}_token_id", tokenizer.special_token_ids[role])
    save_model(model, folder, max_shard_size=size_in_bytes(max_shard_size))
    files = list(folder.glob("*.safetensors"))
    set_default_permissions(*files)
    return {
        "dtype": merged.dtype,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shards": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "eos_token_ids": ends,
    }


def _end_token_ids(model: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the stop token ids: those of the tokenizer and of the model's configurations."""
    # Configurations have default ids, which may be ordinary text tokens: keep only special tokens.
    return sorted(tokenizer.stop_ids | stop_token_ids(model) & tokenizer.special_token_names.keys())


def _card(
    wanted: ExportConfig,
    content: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    results: Sequence[EvaluationResult],
) -> str:
    """Return the model card of the run, or a new one for a checkpoint, with evaluation results."""
    written = wanted.run / CARD_FILE
    if not wanted.checkpoint and written.is_file():
        card = written.read_text(encoding="utf-8")
    else:
        first = {name: value for record in reversed(metrics) for name, value in record.items()}
        card = model_card(Provenance(), content, first)
    return add_evaluation_table(card, results)


def check_hub_access(repository: str) -> None:
    """Check the repository name and the access token before anything is written."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise XtkError(f"--push-to-hub {repository!r} is not a repository name", hint="use owner/name")
    if not get_token():
        raise XtkError(
            "uploads to the Hugging Face Hub need an access token, and none was found",
            where=f"--push-to-hub {repository}",
            hint="run hf auth login, or set HF_TOKEN",
        )


def upload_to_hub(folder: Path, repository: str) -> str:
    """Upload an export; return the URL of its page."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by xtk")
    except Exception as failure:  # huggingface_hub has dozens of error classes
        raise XtkError(
            f"the upload to the Hugging Face Hub failed: {str(failure).splitlines()[0]}",
            where=f"--push-to-hub {repository}",
            hint=f"the local folder is complete; upload it with: hf upload {repository} {folder}",
        ) from None
    return str(address)
