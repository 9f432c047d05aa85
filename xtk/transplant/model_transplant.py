"""Writes a model with another tokenizer: rows, configurations, tokenizer files and manifest."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import MismatchError, XtkError
from xtk.files.atomic_files import canonical_json, set_default_permissions, sha256
from xtk.files.output import Output, write_output_folder
from xtk.models.causal_lm import DTYPES, check_loadable, load_causal_lm, load_model_config
from xtk.models.resolver import ModelRef, weights_fingerprint
from xtk.models.safetensors_headers import read_input_embedding
from xtk.models.saved_model import save_model, stop_token_ids
from xtk.name_registry import load_registered
from xtk.projection.build import tokenizer_identity
from xtk.projection.disk_cache import cached_projection
from xtk.projection.file import read_projection
from xtk.projection.vocabulary_pair import SparseEntries
from xtk.runs.folder import (
    fsync_and_hash,
    model_folder_kind,
    read_run_manifest,
    write_run_manifest,
)
from xtk.text.tokenizer import Tokenizer
from xtk.text.tokenizer_files import configured_vocab_size
from xtk.transplant.new_rows import new_rows
from xtk.transplant.row_methods import METHODS, MeanRow, RowMethod
from xtk.transplant.token_sources import TokenSources
from xtk.transplant.tokenizer_folder import tokenizer_settings, write_tokenizer

TRANSPLANT_KIND = "transplanted-model"
# A new vocabulary has a multiple of this many rows, for tensor cores and vocabulary shards.
VOCABULARY_MULTIPLE = 64
_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)$")  # tables with a row for each position
ROLES = ("bos", "eos", "pad")
# Settings of generation configurations with token ids, in addition to names that end in `_token_id`.
_OTHER_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias")
KEPT = "kept"  # the method of a pruned vocabulary, in the manifest


@dataclass(frozen=True)
class TransplantConfig:
    """A transplant."""

    model: Path  # folder of the model
    adapter: Path | None  # folder of an adapter to merge; None: none
    old: Tokenizer  # tokenizer of the model
    new: Tokenizer  # the new tokenizer
    method: str = "subword"  # one of METHODS
    donor: Path | None = None  # with `omp`: folder of a model with the new tokenizer
    projection: Path | None = None  # with `projection`: a file from the new tokenizer to the old; None: `multitoken`
    keep_chat_template: bool = False  # use the chat template of the model instead of that of the new tokenizer
    dtype: str = ""  # of the written weights; "": that of the model
    seed: int = 0  # of the method `random`
    kept: NDArray[np.int32] | None = None  # [V], old id of each token of a pruned vocabulary; None: another tokenizer


def transplant_model(
    config: TransplantConfig, output: Path, *, force: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write a model with another tokenizer and return its manifest; an equal one that exists is reused."""
    check_transplant(config, output, force=force)
    check_loadable(ModelRef(config.model, config.adapter, trust_remote_code=trust_remote_code), config.old)
    sources = TokenSources(config.new, config.old, config.kept)
    request = _request(config)
    claimed = Output(output, TRANSPLANT_FOLDER, force=force, inputs=_inputs(config))
    with claimed.lock():
        finished = claimed.find_finished(request)
        if finished is not None:
            return finished
        model = _load_model(config, trust_remote_code)
        method = MeanRow() if config.kept is not None else _make_method(config)
        weights = method.weights(sources)
        with write_output_folder(output) as folder:
            figures = _replace_vocabulary(model, sources, weights, config.seed if method.samples_rows else None)
            eos = _set_token_ids(model, sources)
            save_model(model, folder)
            set_default_permissions(*folder.glob("*.safetensors"))
            write_tokenizer(folder, config.new, config.old if config.keep_chat_template else config.new)
            content = {
                "kind": TRANSPLANT_KIND,
                "request": request,
                "method": KEPT if config.kept is not None else config.method,
                **sources.report(weights.rows),
                **figures,
                "eos_token_ids": eos,
            }
            write_run_manifest(folder, content, fsync_and_hash(folder))
        return read_run_manifest(output, (TRANSPLANT_KIND,))


def check_transplant(config: TransplantConfig, output: Path, *, force: bool = False) -> None:
    """Refuse tokenizers, files and an output that do not fit, before the model is loaded."""
    _check_tokenizers(config)
    if output.resolve() == Path.cwd():
        raise XtkError(
            "-o is the working directory, which a transplant cannot replace",
            where=str(output),
            hint=f"use a folder inside of it: -o {output / 'NAME'}",
        )
    if config.projection is not None and config.method == "projection":
        _check_projection(config)
    if config.donor is not None:
        _read_donor(config)
    Output(output, TRANSPLANT_FOLDER, force=force, inputs=_inputs(config)).find_finished(_request(config))


def _inputs(config: TransplantConfig) -> list[Path]:
    return [config.model, config.new.folder, *(one for one in (config.adapter, config.donor) if one)]


@contextlib.contextmanager
def pruned_tokenizer(files: Mapping[str, bytes], name: str) -> Iterator[Tokenizer]:
    """Yield the tokenizer of files that exist only meanwhile."""
    with tempfile.TemporaryDirectory(prefix="xtk-") as folder:
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        yield Tokenizer(folder, name=name)


TRANSPLANT_FOLDER = model_folder_kind(TRANSPLANT_KIND, "a transplanted model")


def _request(config: TransplantConfig) -> dict[str, Any]:
    weights = [weights_fingerprint(config.model)]
    weights += [weights_fingerprint(config.adapter)] if config.adapter else []
    template = (config.old if config.keep_chat_template else config.new).template_fingerprint
    generation = config.model / "generation_config.json"  # copied to the output
    return {
        "weights": " ".join(weights),
        "old_tokenizer": tokenizer_identity(config.old),
        "new_tokenizer": tokenizer_identity(config.new),
        "chat_template": template,
        "start_ids": list(config.new.start_ids),
        "method": KEPT if config.kept is not None else config.method,
        "donor": weights_fingerprint(config.donor) if config.donor else None,
        "projection": sha256(config.projection.read_bytes()) if config.projection else None,
        "dtype": config.dtype,
        "seed": config.seed if config.kept is None and config.method == "random" else 0,
        "tokenizer_settings": sha256(canonical_json(tokenizer_settings(config.new))),
        "generation_config": sha256(generation.read_bytes()) if generation.is_file() else None,
    }


def _check_tokenizers(config: TransplantConfig) -> None:
    """Refuse a new tokenizer that lacks a role which the model needs, or that is the model's own."""
    if config.dtype:
        load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), config.dtype, "dtype")
    if config.new.end_id is None:
        raise XtkError(
            "the new tokenizer has no eos token, which the model needs to end a text",
            where=config.new.name,
            hint="set eos_token in its tokenizer_config.json to one of its special tokens",
        )
    if config.kept is None and tokenizer_identity(config.new)["tokenizer"] == config.old.fingerprint:
        raise XtkError(
            "the new tokenizer is the tokenizer of the model already",
            where=config.new.name,
            hint="use another TOKENIZER, or --prune-to N for a smaller vocabulary",
        )


def _make_method(config: TransplantConfig) -> RowMethod:
    kind = load_registered(METHODS, config.method, "method")
    options: dict[str, Any] = {}
    if config.method == "projection":
        options["projection"] = (
            _check_projection(config) if config.projection else cached_projection(config.new, config.old)
        )
    if config.method == "omp":
        options["donor"] = _read_donor(config)
    made: RowMethod = kind(**options)
    return made


def _check_projection(config: TransplantConfig) -> Any:
    assert config.projection is not None
    projection = read_projection(config.projection)
    for side, tokenizer in (("student", config.new), ("teacher", config.old)):
        if projection.header.get(side, {}).get("tokenizer") != tokenizer.fingerprint:
            raise MismatchError(
                f"the projection was built for other tokenizers: its {side} is not {tokenizer.name}",
                where=str(config.projection),
                hint="build it with xtk build-projection TOKENIZER MODEL -o FILE, or remove --projection",
            )
    return projection


def _read_donor(config: TransplantConfig) -> NDArray[np.float32]:
    """Return the donor's input embedding."""
    assert config.donor is not None
    donor = Tokenizer(config.donor)
    same = donor.vocabulary.bytes_by_id == config.new.vocabulary.bytes_by_id
    if not same or dict(donor.vocabulary.special_tokens) != dict(config.new.vocabulary.special_tokens):
        raise MismatchError(
            f"the donor has other tokens ({len(donor):,}) than the new tokenizer ({len(config.new):,})",
            where=f"--donor {config.donor}",
            hint="use a donor model that has the new tokenizer, or another --method",
        )
    table = read_input_embedding(config.donor)
    if len(table) < len(donor) or not np.isfinite(table[: len(donor)]).all():
        raise XtkError(
            "the donor's embedding has too few rows, or values that are not finite",
            where=f"--donor {config.donor}",
            hint="download the donor again, or use another --method",
        )
    return table


def _load_model(config: TransplantConfig, trust_remote_code: bool) -> Any:
    """Return the model, in the dtype of the written weights."""
    described = load_model_config(ModelRef(config.model, trust_remote_code=trust_remote_code))
    if getattr(described, "quantization_config", None):
        raise XtkError(
            "the weights of this model are quantized, and a transplant needs unquantized ones",
            where=str(config.model),
            hint="use the model that was quantized",
        )
    dtype = config.dtype or str(getattr(described, "dtype", None) or "float32").removeprefix("torch.")
    is_tied = bool(getattr(described.get_text_config(), "tie_word_embeddings", False))
    model = load_causal_lm(ModelRef(config.model, config.adapter, dtype, trust_remote_code))
    if model.get_output_embeddings() is None or not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise XtkError(
            "this model has no output head whose rows are tokens", where=str(config.model), hint="use another model"
        )
    if is_tied and not _is_tied(model):
        raise XtkError(
            "config.json has tie_word_embeddings true, but the weights contain a separate output head",
            where=str(config.model),
            hint="set tie_word_embeddings to false in config.json to keep this head, or remove it from the weights",
        )
    rows = model.get_input_embeddings().weight.shape[0]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(parameter) for end in ends for parameter in end.parameters()}
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and id(module.weight) not in own
        and module.num_embeddings >= len(config.old)
        and not _POSITIONS.search(name)
    ]
    if getattr(described.get_text_config(), "hidden_size_per_layer_input", None):  # of Gemma 3n: rows for most tokens
        others.append("the embeddings of its layers (hidden_size_per_layer_input)")
    if others:
        raise XtkError(
            f"this model has another table with a row for each token, which a transplant cannot fill: {others[0]}",
            where=str(config.model),
            hint="use another model",
        )
    if rows > len(config.old):
        terminal.note(f"transplant: {rows - len(config.old):,} rows of the embedding have no token and are left out")
    return model


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _num_rows(sources: TokenSources) -> int:
    """Return the rows of the model that the tokenizer comes from; without one, a multiple of `VOCABULARY_MULTIPLE`.

    transformers and vLLM compare the rows of a draft model and its target, not their tokens.
    """
    rows = configured_vocab_size(sources.new.folder)
    return rows if rows >= len(sources.new) else -(-len(sources.new) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@torch.no_grad()
def _replace_vocabulary(
    model: Any, sources: TokenSources, weights: SparseEntries, sampling_seed: int | None
) -> dict[str, Any]:
    """Replace embedding, head and bias of a model by those for the new tokens; return figures for the manifest."""
    is_tied = _is_tied(model)
    num_rows = _num_rows(sources)
    head = model.get_output_embeddings()
    # The norm of a row in a head is its tokens' probability, so norms are matched in a separate embedding only.
    tables = [(model.get_input_embeddings().weight, sources.copied, not is_tied)]
    tables += [] if is_tied else [(head.weight, sources.copied_outputs, False)]
    tables += [] if head.bias is None else [(head.bias[:, None], sources.copied_outputs, False)]
    made = []
    for table, copied, match_norms in tables:
        new = torch.empty(num_rows, table.shape[1], dtype=table.dtype)
        for start, rows in new_rows(
            table, sources, weights, num_rows, copied=copied, sampling_seed=sampling_seed, match_norms=match_norms
        ):
            new[start : start + len(rows)] = rows
        made.append(new)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    head = model.get_output_embeddings()
    targets = [model.get_input_embeddings().weight, *([] if is_tied else [head.weight])]
    targets += [] if head.bias is None else [head.bias[:, None]]
    for target, new in zip(targets, made, strict=True):
        target.copy_(new)
    return {
        "embedding_rows": num_rows,
        "tied": is_tied,
        "dtype": str(targets[0].dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _set_token_ids(model: Any, sources: TokenSources) -> list[int]:
    """Set the ids of roles to those of the new tokenizer, and remove other old ids; return the end tokens.

    Generation ends at eos, at the end of a turn, and at the tokens where the model ended before, of those that the new
    tokenizer has. Other settings that are an old id get the new id of that token.
    """
    new = sources.new
    new_id = {old: token for token, old in enumerate(sources.copied_outputs.tolist()) if old >= 0}
    configurations = {id(part): part for part in (model.config, model.config.get_text_config())}
    # Configurations have default ids, which may be ordinary text tokens: keep only special tokens.
    old_stops = stop_token_ids(model) & sources.old.special_token_names.keys()
    stops = {token for token, old in enumerate(sources.copied.tolist()) if old in old_stops}
    ends = sorted(new.stop_ids | stops & new.special_token_names.keys())
    for part in (*configurations.values(), model.generation_config):
        for name in [name for name in vars(part) if name.endswith("_token_id")]:
            value = getattr(part, name)
            if value is not None:
                setattr(part, name, new_id.get(value) if isinstance(value, int) else None)
        for role in ROLES:
            setattr(part, f"{role}_token_id", new.special_token_ids.get(role))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    for name in _OTHER_IDS:
        if getattr(model.generation_config, name, None) is not None:
            setattr(model.generation_config, name, None)
    return ends
