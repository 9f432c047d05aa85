"""What the commands of evaluation share: which models they load, and the file of answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.errors import XtkError
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option
from xtk.options.shared import (
    MODEL_DTYPES,
    ConfigOption,
    JsonOption,
    QuietOption,
    StartTokenOption,
    TrustRemoteCodeOption,
)

if TYPE_CHECKING:
    from xtk.text.tokenizer import Tokenizer

ModelFolders = tuple[Path, Path | None]  # of a model, and of its adapter


@dataclass(frozen=True, kw_only=True)
class LoadedModelOptions(StartTokenOption, TrustRemoteCodeOption):
    """How a model is loaded."""

    dtype: str = option(
        "auto",
        "Data type of the model; auto: that of the checkpoint on a GPU with bf16, float32 on a CPU.",
        choices=MODEL_DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluatedModelOptions(LoadedModelOptions, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Which models are evaluated, and how they are loaded."""

    model: str = argument(
        REQUIRED,
        "Model to evaluate: a folder, a GGUF file or a hub id; - reads its path from standard input.",
        metavar="MODEL",
    )
    compare_to: tuple[str, ...] = option(
        (),
        "Another model to evaluate on the same data; reports MODEL minus OTHER, paired by document. Repeatable.",
        metavar="OTHER",
    )


def difference_heading(models: Sequence[str]) -> str:
    """Return what a difference to the first of some models is called, in the order of the subtraction."""
    return f"{models[0]} minus {models[1] if len(models) == 2 else 'the model of the row'}"


MODEL_OPTIONS = ("compare_to", "start_token", "dtype", "trust_remote_code")


def models_to_evaluate(
    options: EvaluatedModelOptions, data: Sequence[str] = (), *, backend: str = "transformers"
) -> dict[str, ModelFolders]:
    """Return all models by name, after checks without reading weights; one argument, also of `data`, may be `-`."""
    from xtk.models.causal_lm import check_loadable
    from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
    from xtk.name_registry import load_registered
    from xtk.rollouts import GENERATORS
    from xtk.text.tokenizer import Tokenizer

    if [options.model, *options.compare_to, *data].count("-") > 1:
        raise typer.BadParameter("only one of MODEL, --compare-to and DATA can be read from standard input (-)")
    names = [terminal.path_argument(name) for name in (options.model, *options.compare_to)]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise XtkError("MODEL and --compare-to name the same model", where=twice, hint="give each model once")
    models = {name: base_model_and_adapter(resolve_model_folder(name, with_weights=True)) for name in names}
    for name, (folder, adapter) in models.items():
        tokenizer = Tokenizer(folder, name=name, start_token=options.start_token, adapter=adapter)
        if load_registered(GENERATORS, backend, "backend").runs_loaded_model:  # vllm also loads other formats
            check_loadable(ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code), tokenizer)
    return models


def load_model_and_tokenizer(name: str, folders: ModelFolders, options: LoadedModelOptions) -> tuple[Any, Tokenizer]:
    """Return a transformers model and its tokenizer."""
    from xtk.models.causal_lm import check_embedding_rows, default_device, load_causal_lm
    from xtk.models.precision import resolve_dtype
    from xtk.models.resolver import ModelRef
    from xtk.text.tokenizer import Tokenizer

    folder, adapter = folders
    tokenizer = Tokenizer(folder, name=name, start_token=options.start_token, adapter=adapter)
    ref = ModelRef(folder, adapter, resolve_dtype(options.dtype, folder), options.trust_remote_code)
    model = load_causal_lm(ref, device=default_device())
    check_embedding_rows(model, tokenizer)
    return model, tokenizer


@contextlib.contextmanager
def answers_file(output: str) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Yield a function that writes a line to the file of answers, which exists after the last one; "": no file."""
    from xtk.files.output import write_output, writer_lock

    if not output:
        yield lambda line: None
        return
    path = Path(output)
    _check_answers_path(path)
    with writer_lock(path, "file"):
        _check_answers_path(path)  # another command may have written it since
        with write_output(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
            yield lambda line: stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _check_answers_path(path: Path) -> None:
    from xtk.files.output import check_output_path

    check_output_path(path)
    if path.exists() or path.is_symlink():
        raise XtkError("the output file exists already", where=str(path), hint="use -o with a new file name")
    if path.suffix != ".jsonl":
        raise XtkError("the name of the output file must end in .jsonl", where=str(path), hint="use -o FILE.jsonl")
