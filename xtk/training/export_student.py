"""A student for the world: the folder that transformers, vLLM and the hub read, of a run or of a checkpoint."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xtk import terminal
from xtk.artifacts.atomic_files import (
    TEMPORARY_PREFIX,
    is_stale_temporary_file,
    read_json,
    set_default_permissions,
    sha256,
    temporary_name,
)
from xtk.artifacts.model_resolver import base_model_and_adapter, weights_fingerprint
from xtk.artifacts.output_checks import check_output_folder, foreign_files_error, list_folder
from xtk.artifacts.run_folder_cleanup import refuse_foreign_files_in_run
from xtk.artifacts.run_folders import (
    CARD_FILE,
    CHECKPOINT,
    METRICS_FILE,
    RECIPE_FILE,
    ROLLOUTS_FILE,
    RUN_MANIFEST,
    TRAINER_FOLDER,
    list_checkpoints,
    read_recipe,
    read_run_manifest,
    run_fingerprint,
    verify_files,
    write_run_manifest,
)
from xtk.artifacts.write_locks import only_writer_of_path
from xtk.errors import CorruptError, XtkError
from xtk.evaluation.result_tables import EvaluationResult, read_results
from xtk.models.causal_lm import DTYPES, load_causal_lm
from xtk.models.student_model import (
    StudentModelConfig,
    StudentSource,
    has_mergeable_adapter,
    load_student,
    save_final_student,
)
from xtk.registry import unknown_name_error
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.checkpoint import EMA, STUDENT, TOKENIZER_FILES, fsync, fsync_and_hash, rank_files
from xtk.training.metrics_file import read_metrics
from xtk.training.model_card import Provenance, add_evaluation_table, model_card
from xtk.training.sharded_state import ShardedStateReader

EXPORT_KIND = "exported-student"
GGUF_FILE = "model.gguf"
KEPT_MANIFEST_KEYS = ("steps", "recipe", "metrics", "best")  # of the run, in `xtk.json`
# What of a finished run is not part of its export, or is written anew.
RUN_ONLY_FILES = (RECIPE_FILE, METRICS_FILE, ROLLOUTS_FILE, CARD_FILE)
GGUF_CONVERTER = "convert_hf_to_gguf.py"
_SIZE = re.compile(r"[1-9]\d*(\.\d+)?([KMGT]i?)?B", re.IGNORECASE)


@dataclass(frozen=True)
class ExportConfig:
    """What is asked for.

    Attributes:
        run: the folder of `xtk distill`.
        checkpoint: the step of one of its checkpoints; 0: the finished student.
        dtype: in which weights are written; "": in which they were trained.
        max_shard_size: of a file of weights, as Hugging Face writes it: 5GB.
        evaluations: files of results, for the card.
        gguf: the type of llama.cpp's numbers, such as q8_0; "": no such file.
        gguf_converter: llama.cpp's script; "": it is looked for on the path of programs.

    Raises:
        XtkError: a value that is not known.
    """

    run: Path
    checkpoint: int = 0
    dtype: str = ""
    max_shard_size: str = "5GB"
    evaluations: tuple[Path, ...] = ()
    gguf: str = ""
    gguf_converter: str = ""

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise unknown_name_error("dtype", self.dtype, DTYPES)
        if not _SIZE.fullmatch(self.max_shard_size):
            raise XtkError(f"--max-shard-size is {self.max_shard_size!r}", hint="a size such as 500MB or 5GB")
        if self.gguf_converter and not self.gguf:
            raise XtkError("--gguf-converter is for --gguf", hint="--gguf f16, bf16 or q8_0")


def export_student(
    config: ExportConfig, output: Path, *, force: bool, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write a student as others load it, whole or not at all; one that is there already is found again.

    Args:
        config: of which run, and how.
        output: the new folder.
        force: replace an export of another request.
        trust_remote_code: run the model's own Python code.

    Returns:
        What its `xtk.json` says.

    Raises:
        XtkError: there is no such run, it is unfinished, or the output holds other things.
    """
    source, content, metrics = _open_source(config)
    converter = _converter(config) if config.gguf else None
    results = [result for path in config.evaluations for result in read_results(path)]
    dtype = config.dtype or content["recipe"].get("student_model", {}).get("dtype", "float32")
    request = {
        "weights": weights_fingerprint(source),
        "step": content["steps"],
        "dtype": dtype,
        "max_shard_size": config.max_shard_size,
        "gguf": config.gguf,
        "evaluation": [sha256(path.read_bytes()) for path in config.evaluations],
    }
    _check_output(output, config.run)
    with only_writer_of_path(output.resolve(), "export"):
        found = _finished_export(output, request, force=force)
        if found is not None:
            return found
        with _replacing_folder(output) as folder:
            tokenizer = Tokenizer(source)
            with _merged_weights(source, config, content["recipe"], tokenizer, folder, trust_remote_code) as whole:
                figures = _write_model_files(whole, folder, tokenizer, dtype, config.max_shard_size, trust_remote_code)
            for pattern in TOKENIZER_FILES:
                for path in source.glob(pattern):
                    shutil.copyfile(path, folder / path.name)
            (folder / CARD_FILE).write_text(_card(config, content, metrics, results), encoding="utf-8")
            if converter is not None:
                _convert(converter, folder, config.gguf)
            kept = {name: content[name] for name in KEPT_MANIFEST_KEYS if name in content}
            content_of_export = {**kept, "kind": EXPORT_KIND, "request": request, **figures}
            write_run_manifest(folder, content_of_export, fsync_and_hash(folder))
        return content_of_export


def _open_source(wanted: ExportConfig) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Return the folder of the weights, what `xtk.json` says of them, and metrics up to then.

    Raises:
        XtkError: this is no run, or it has not come so far.
        Damaged: a file does not match its checksum.
    """
    run = wanted.run
    identity = read_recipe(run)
    steps = [step for step, _ in list_checkpoints(run)]
    metrics = read_metrics(run / METRICS_FILE)
    if not wanted.checkpoint:
        if not (run / RUN_MANIFEST).is_file():
            there = f"--checkpoint {steps[-1]}, or " if steps else ""
            raise XtkError(
                "this run is not finished", where=str(run), hint=f"{there}the same xtk distill command, which goes on"
            )
        content = read_run_manifest(run, (STUDENT,))
        verify_files(run, content, excluded=RUN_ONLY_FILES)
        return run, content, metrics
    if wanted.checkpoint not in steps:
        raise XtkError(
            f"there is no checkpoint of step {wanted.checkpoint}",
            where=str(run),
            hint=f"there are {', '.join(map(str, steps))}" if steps else "xtk distill --save-steps N keeps some",
        )
    metrics = [record for record in metrics if record.get("step", 0) <= wanted.checkpoint]
    last = {name: value for record in metrics for name, value in record.items()}
    folder = dict(list_checkpoints(run))[wanted.checkpoint]
    stated = read_run_manifest(folder, (CHECKPOINT,))
    verify_files(folder, stated)
    if (stated.get("step"), stated.get("run_fingerprint")) != (wanted.checkpoint, run_fingerprint(identity)):
        raise CorruptError("this is a checkpoint of another step or another run", where=str(folder))
    return folder, {"steps": wanted.checkpoint, "recipe": identity, "metrics": last}, metrics


def _check_output(output: Path, run: Path) -> None:
    """Refuse an output that is the run, holds it, or lies in it; and a folder that cannot be replaced.

    Raises:
        XtkError: tells which.
    """
    check_output_folder(output, "an export")
    here, there = output.resolve(), run.resolve()
    if here == Path.cwd() or here.is_mount():
        what = "an export takes the place of its folder, and this one is where you are, or where a disk is mounted"
        raise XtkError(what, where=str(here), hint=f"a folder in it: -o {output / 'NAME'}")
    if here in (there, *there.parents) or there in here.parents:
        raise XtkError("the output is the run, or one lies in the other", where=str(output), hint="another -o")


def _finished_export(output: Path, request: Mapping[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Return what a finished export of the same request says; None if there is nothing to keep.

    Raises:
        XtkError: the output holds other things, or an export of another request.
    """
    if not list_folder(output):
        return None
    if not (output / RUN_MANIFEST).is_file() or read_json(output / RUN_MANIFEST).get("kind") != EXPORT_KIND:
        raise foreign_files_error(list_folder(output), str(output))
    if force:
        refuse_foreign_files_in_run(output, is_export=True)
        return None
    content = read_run_manifest(output, (EXPORT_KIND,))
    there = content.get("request") or {}
    different = [name for name, value in request.items() if there.get(name) != value]
    if not different:
        return content
    raise XtkError(
        "there is an export of another request",
        where=f"{output} (another {', '.join(different)})",
        hint="another -o, or --force to replace it",
    )


@contextmanager
def _replacing_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` that takes its place when the block ends well, and goes when it does not.

    A link stays one: what it leads to is replaced.
    """
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    for left in output.parent.glob(f"{TEMPORARY_PREFIX}*-{glob.escape(output.name)}"):
        if is_stale_temporary_file(left.name):
            shutil.rmtree(left, ignore_errors=True)
    temporary, old = (output.parent / temporary_name(output.name) for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        fsync(temporary)
        if output.is_dir():
            refuse_foreign_files_in_run(output, is_export=True)  # of now: converting takes long
            output.replace(old)
        temporary.replace(output)
        fsync(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _merged_weights(
    source: Path,
    wanted: ExportConfig,
    recipe: Mapping[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    trust_remote_code: bool,
) -> Iterator[Path]:
    """Give a folder of whole weights: the source, or one where its adapter is merged, or the average stands in."""
    base, adapter = base_model_and_adapter(source)
    averaged = bool(wanted.checkpoint and recipe.get("ema_decay"))
    if adapter is None and not averaged:
        yield source
        return
    prepared = recipe.get("student_model", {})
    told: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in prepared.items()}
    packed = [told.pop(name, False) for name in ("load_in_4bit", "load_in_8bit")]
    if any(packed):
        terminal.note("export: the adapter was trained over packed weights, and is merged into the unpacked ones")
    told.pop("freeze", None)
    try:
        preparation = StudentModelConfig(**told) if adapter else StudentModelConfig(dtype=told.get("dtype", "float32"))
    except TypeError as wrong:
        raise CorruptError(
            f"this recipe prepares the student in a way that does not exist: {wrong}", where=str(source)
        ) from None
    origin = StudentSource(base, None if preparation.lora_r else adapter, adapter)
    model = load_student(
        origin, preparation, tokenizer, device=torch.device("cpu"), trust_remote_code=trust_remote_code, quiet=True
    )
    if averaged:
        _put_average(model, source)
    aside = folder / "whole"
    if has_mergeable_adapter(model):
        model = model.merge_and_unload()
    save_final_student(model, aside)
    del model
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@torch.no_grad()
def _put_average(model: Any, checkpoint: Path) -> None:
    """Let a model have the average that a checkpoint keeps for weights."""
    names = rank_files(checkpoint, read_run_manifest(checkpoint, (CHECKPOINT,)))
    pieces = ShardedStateReader([checkpoint / TRAINER_FOLDER / name for name in names])
    kept = pieces.names()
    for name, parameter in model.named_parameters():
        if f"{EMA}.{name}" in kept:
            parameter.copy_(pieces.read(f"{EMA}.{name}", parameter))


def _write_model_files(
    whole: Path, folder: Path, tokenizer: Tokenizer, dtype: str, max_shard_size: str, trust_remote_code: bool
) -> dict[str, Any]:
    """Write weights and configurations; return figures.

    Raises:
        XtkError: a weight is too large for the dtype.
    """
    model = load_causal_lm(whole, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    ends = _end_token_ids(model, tokenizer)
    described = model.generation_config
    if ends:
        # The end of a turn ends an answer too: transformers and vLLM stop at what stands here.
        described.eos_token_id = ends if len(ends) > 1 else ends[0]
    for role in ("bos", "pad"):
        if role in tokenizer.special_token_ids:
            setattr(described, f"{role}_token_id", tokenizer.special_token_ids[role])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    files = list(folder.glob("*.safetensors"))
    set_default_permissions(*files)
    return {
        "dtype": dtype,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shards": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "eos_token_ids": ends,
    }


def _end_token_ids(model: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end an answer: those of the tokenizer, and those at which the model has stopped so far."""
    said = [getattr(part, "eos_token_id", None) for part in (model.generation_config, model.config.get_text_config())]
    stops = {token for one in said if one is not None for token in (one if isinstance(one, list) else [one])}
    # transformers' configurations have ids by default, whatever these spell: at text nothing ends.
    return sorted(tokenizer.end_ids | stops & tokenizer.special_token_names.keys())


def _card(
    wanted: ExportConfig,
    content: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    results: Sequence[EvaluationResult],
) -> str:
    """Return the card of the run, or a new one of a checkpoint, with the results."""
    written = wanted.run / CARD_FILE
    if not wanted.checkpoint and written.is_file():
        card = written.read_text(encoding="utf-8")
    else:
        first = {name: value for record in reversed(metrics) for name, value in record.items()}
        card = model_card(Provenance(), content, first)
    return add_evaluation_table(card, results)


def _converter(wanted: ExportConfig) -> Path:
    """Return llama.cpp's script.

    Raises:
        XtkError: it is not there.
    """
    named = wanted.gguf_converter or shutil.which(GGUF_CONVERTER) or ""
    if not named or not Path(named).is_file():
        raise XtkError(
            f"a GGUF file is written by llama.cpp's {GGUF_CONVERTER}, and it is not there",
            where=wanted.gguf_converter or None,
            hint=f"git clone https://github.com/ggml-org/llama.cpp; --gguf-converter llama.cpp/{GGUF_CONVERTER}",
        )
    return Path(named)


def _convert(converter: Path, folder: Path, kind: str) -> None:
    """Let llama.cpp's script write a GGUF file into the folder.

    Raises:
        XtkError: it failed; tells its last line.
    """
    command = [sys.executable, str(converter), str(folder), "--outfile", str(folder / GGUF_FILE), "--outtype", kind]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / GGUF_FILE).is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise XtkError(f"the converter ended with exit code {done.returncode}: {last}", where=str(converter))


def check_hub_access(repository: str) -> None:
    """Refuse to push without an account, before anything is written.

    Raises:
        XtkError: there is no token.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise XtkError(f"--push-to-hub is {repository!r}", hint="owner/name")
    if not get_token():
        raise XtkError(
            "the hub takes uploads from those it knows, and there is no token",
            where=f"--push-to-hub {repository}",
            hint="hf auth login, or HF_TOKEN in the environment",
        )


def upload_to_hub(folder: Path, repository: str) -> str:
    """Upload an export; return the address of its page.

    Raises:
        XtkError: the hub does not take it.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by xtk")
    except Exception as wrong:  # the hub's client has dozens of errors, all of which mean the same here
        raise XtkError(
            f"the hub does not take it: {str(wrong).splitlines()[0]}",
            where=f"--push-to-hub {repository}",
            hint=f"the folder is written; hf upload {repository} {folder}",
        ) from None
    return str(address)
