"""Teacher caches from a model and a dataset in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtk.api.tokenizer_argument import store_files, to_tokenizer
from xtk.cache.codec.shard_codec_registry import DEFAULT_PRECISION
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import Support, make_support
from xtk.data.arrow_record_readers import read_dataset
from xtk.data.corpus_reader import Corpus
from xtk.data.record_to_document import Record
from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import DTYPES
from xtk.models.precision import AUTO, resolve_dtype
from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
from xtk.models.weight_hash import CHUNK_BYTES, hash_chunks
from xtk.name_registry import unknown_name_error
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import cache_teacher as build_cache
from xtk.text.tokenizer import Tokenizer

_UNHASHED_SETTINGS = ("transformers_version", "_name_or_path")


class RecordCorpus(Corpus):
    """A corpus of records in memory: a `datasets.Dataset`, or a sequence of mappings or texts.

    Args:
        dataset: its rows have the columns of `xtk cache-teacher DATA`, such as "text" or "messages".
        columns: {field: column} for fields with another column name.
    """

    def __init__(self, dataset: Any, columns: Mapping[str, str] | None = None) -> None:
        super().__init__([], columns)
        self._dataset = dataset
        self.sources = []
        if isinstance(dataset, Mapping):
            names = ", ".join(map(repr, list(dataset)[:5]))
            raise XtkError(
                f"the dataset is a {type(dataset).__name__} with the keys {names}, not a sequence of rows",
                where="cache_teacher",
                hint=f"pass one of its values, such as dataset[{next(iter(dataset), 'train')!r}]",
            )
        if hasattr(dataset, "iterrows"):  # iterating over a DataFrame gives the names of its columns
            raise XtkError(
                f"the dataset is a {type(dataset).__name__} of pandas, not a sequence of rows",
                where="cache_teacher",
                hint='pass dataset.to_dict("records")',
            )
        if iter(dataset) is dataset:
            raise XtkError(
                f"the dataset is a {type(dataset).__name__}, which can be read only once",
                where="cache_teacher",
                hint="pass list(dataset), or a dataset that starts from the beginning at each iteration",
            )

    @property
    def name(self) -> str:
        """What the data is, for messages."""
        return f"the dataset ({type(self._dataset).__name__})"

    def records(self) -> Iterator[tuple[Record, str]]:
        """Yield the rows, {column: value}, and the number of each."""
        for number, row in enumerate(self._rows()):
            where = f"{self.name}, row {number}"
            if not isinstance(row, str | Mapping):
                raise XtkError(
                    f"a row of the dataset is a {type(row).__name__}",
                    where=where,
                    hint="rows must be texts, or mappings with the columns of xtk cache-teacher, such as 'text'",
                )
            yield ({"text": row} if isinstance(row, str) else row), where

    def _rows(self) -> Iterator[Any]:
        """Yield the rows; those of the library `datasets` as from its files, unless they have a format or transform."""
        is_dataset = hasattr(self._dataset, "with_format") and hasattr(self._dataset, "features")
        if is_dataset and getattr(self._dataset, "format", {"type": None})["type"] is None:
            return read_dataset(self._dataset, self.name, self._read_options)
        return iter(self._dataset)


def cache_teacher(
    model: Any,
    dataset: Any,
    output: str | Path,
    *,
    tokenizer: Any = None,
    support: Support | str = "",
    top_k: int | str | None = None,
    top_p: float | None = None,
    num_samples: int | None = None,
    precision: str = DEFAULT_PRECISION,
    columns: Mapping[str, str] | None = None,
    force: bool = False,
    **options: Any,
) -> TeacherCache:
    """Score a dataset with a teacher into a cache, as `xtk cache-teacher` does, and open it.

    A cache of the same model, data and options is found again; an unfinished one is continued.

    Args:
        model: a causal language model of transformers, which is used as it is; or a folder or hub id, which is loaded.
        dataset: a `datasets.Dataset`, a sequence of texts or of mappings with the columns of `xtk cache-teacher`, or a
            path.
        output: folder of the cache, used exactly as given.
        tokenizer: the model's: a folder, a hub id, or a fast tokenizer of transformers. Needed for a model object.
        support: which tokens of each distribution are stored, as `xtk cache-teacher --support`; "": chosen by the
            other arguments.
        top_k: as `--top-k`: a number, or "all".
        top_p: as `--top-p`.
        num_samples: as `--num-samples`.
        precision: as `--precision`.
        columns: {field: column} for fields with another column name.
        force: replace a cache of another request.
        options: `dtype` and `trust_remote_code` of a model that is loaded; fields of `CacheRequest`: `start_token`,
            `long_documents`, `max_length`, `batch_tokens`, `shard_tokens`.

    Raises:
        XtkError: the dataset is empty or not a sequence of rows, a document is too long, the dtype is unknown, or the
            output has something else.
    """
    corpus: Corpus = (
        Corpus([str(dataset)], columns) if isinstance(dataset, str | Path) else RecordCorpus(dataset, columns)
    )
    if isinstance(model, str | Path):
        folder, adapter = base_model_and_adapter(resolve_model_folder(str(model), with_weights=True))
        dtype = resolve_dtype(options.pop("dtype", AUTO), folder)
        _check_dtype(dtype)
        ref = ModelRef(folder, adapter, dtype, options.pop("trust_remote_code", False), str(model))
        support = _to_support(support, folder, top_k, top_p, num_samples)
        request = CacheRequest(ref, support, precision=precision, **options)
        build_cache(request, corpus, output, force=force)
        return TeacherCache(output)
    name, folder = _store_model_files(model, tokenizer)
    support = _to_support(support, folder, top_k, top_p, num_samples)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        build_cache(_request_for_model(model, name, folder, support, precision, options), corpus, output, force=force)
    finally:
        for module in training:
            module.training = True
    return TeacherCache(output)


def _check_dtype(name: str) -> None:
    """Refuse a dtype in which xtk does not score."""
    if name not in DTYPES:
        raise unknown_name_error("dtype", name, DTYPES)


def _to_support(
    support: Support | str, folder: Path, top_k: int | str | None, top_p: float | None, num_samples: int | None
) -> Support:
    """Return the support of the arguments; "all" of `top_k` is the vocabulary of the teacher in this folder."""
    if isinstance(support, Support):
        return support
    if top_k == "all":
        top_k = Tokenizer(folder).embedding_rows
    if isinstance(top_k, str):
        raise XtkError(f"top_k is {top_k!r}, but must be a number or 'all'", hint="use, for example, top_k=64")
    return make_support(support, top_k=top_k, top_p=top_p, num_samples=num_samples)


def _store_model_files(model: Any, tokenizer: Any) -> tuple[str, Path]:
    """Return the name of a loaded model, and a folder of xtk's cache with its configuration and tokenizer."""
    if tokenizer is None:
        raise XtkError(
            "cache_teacher needs the tokenizer of a model object",
            where=type(model).__name__,
            hint="add tokenizer=AutoTokenizer.from_pretrained(...), or pass the folder of the model",
        )
    own = to_tokenizer(tokenizer)
    files = {name: content.decode() for name, content in own.to_files().items()}
    name = Path(str(getattr(model, "name_or_path", ""))).name or type(model).__name__
    return name, store_files("teachers", {**files, "config.json": model.config.to_json_string(use_diff=False)}, name)


def _request_for_model(
    model: Any, name: str, folder: Path, support: Support, precision: str, options: Mapping[str, Any]
) -> CacheRequest:
    """Return the request for a loaded model, whose configuration and tokenizer are in this folder."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    options = dict(options)
    wanted = options.pop("dtype", dtype)
    _check_dtype(wanted)
    if wanted != dtype:
        raise XtkError(
            f"dtype is {wanted!r}, but the model has {dtype}",
            where=name,
            hint=f"pass model.to(torch.{wanted}), or the folder of the model with dtype",
        )
    loaded = {"cut": BackboneWithHead(model), "weights": loaded_weights_fingerprint(model)}
    ref = ModelRef(folder, None, dtype, options.pop("trust_remote_code", False), name)
    return CacheRequest(ref, support, precision=precision, backend_options=loaded, **options)


def loaded_weights_fingerprint(model: Any) -> str:
    """Return "loaded:sha256:...", which identifies the weights of a loaded model, its configuration and its adapters.

    Hashes names, shapes, dtypes and all bytes of the tensors. The configuration has values that change the logits, such
    as the base of the rotary embedding; of adapters, those that are active and their scaling are hashed.
    """
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _UNHASHED_SETTINGS}
    adapters = [  # layers of peft, which may not be installed
        [name, list(module.active_adapters), module.disable_adapters, module.scaling]
        for name, module in model.named_modules()
        if hasattr(module, "scaling") and hasattr(module, "active_adapters")
    ]
    digest = hashlib.sha256(json.dumps([settings, adapters], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        starts = range(0, len(flat), CHUNK_BYTES)
        digest.update(hash_chunks(partial(_chunk_bytes, flat), starts).encode())
    return "loaded:sha256:" + digest.hexdigest()


def _chunk_bytes(flat: Tensor, start: int) -> bytes:
    chunk: bytes = flat[start : start + CHUNK_BYTES].cpu().numpy().tobytes()
    return chunk
