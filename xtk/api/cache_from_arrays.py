"""Teacher caches from log-probabilities that come from elsewhere."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from xtk.api.tokenizer_argument import to_tokenizer
from xtk.cache.codec.shard_codec_registry import DEFAULT_PRECISION, codec_for_precision
from xtk.cache.columns import OPTIONAL_COLUMNS
from xtk.cache.manifest import MANIFEST
from xtk.cache.output import find_finished_cache
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import Support
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.cache.writer import ShardedCacheWriter, store_shard
from xtk.data.corpus_reader import CorpusFingerprint
from xtk.data.record_to_document import OPT_IN_FIELDS, record_to_document
from xtk.errors import XtkError
from xtk.files.storage_folders import open_folder
from xtk.name_registry import unknown_name_error
from xtk.teachers.cache_build_config import compose_cache_header, make_vocabulary_order
from xtk.teachers.cache_shard_planning import ShardPlan
from xtk.teachers.logprob_checks import TOLERANCE, check_scored_document
from xtk.teachers.logprobs_to_cache_arrays import LogprobArrays, arrays_to_stored
from xtk.text.document import Document
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import TokenSequence

# Supports without samples; see `xtk.cache.teacher_logprobs.SUPPORTS`.
EXACT_SUPPORTS = ("top-k", "candidates", "none")
SAMPLED_SUPPORTS = ("top-k+sample", "sample")
_EXACT_PRECISION = "float32"
# An option in the header of caches without the teacher's tokenizer: the vocabulary has the listed tokens only.
LISTED_VOCABULARY = "listed tokens"
_HINTS = {
    "arrays": "give token ids of the teacher's vocabulary, each at most once per position",
    "values": "give natural logarithms of probabilities that are normalized over the whole vocabulary",
    "logits": "check the log-probabilities; or use CacheWriter(..., precision='float32')",
}


class CacheWriter:
    """Writes a teacher cache from log-probabilities that another program has computed.

    Use it as a context manager. Nothing exists at `output` until the block ends without an exception.

        with xtk.CacheWriter("cache", "teacher-folder") as writer:
            for text in texts:
                ids, positions = writer.tokenize(text)
                ...  # score the token ids `ids` with the teacher; predict ids[positions]
                writer.add(text, top_ids, top_logprobs, observed_logprobs)

    Args:
        output: folder of the cache, used exactly as given.
        tokenizer: the teacher's: a folder, a hub id, or a fast tokenizer of transformers.
        name: the teacher's name in metrics, and its identity: caches with one name and tokenizer can be merged. "": the
            tokenizer's, and the log-probabilities are the identity.
        support: "top-k" if the listed ids are the most likely ones of each position, "candidates" if they are any
            others, "none" for observed tokens only. "top-k+sample" and "sample": with tokens sampled from the others;
            the number of sample sets and their size are those of the first document.
        top_k: number of the most likely ids that each position lists, if the observed token may be listed in addition.
            None: it follows from the lists. 0: not known.
        precision: as `xtk cache-teacher --precision`.
        shard_tokens: teacher tokens per shard.
        force: replace an existing cache.
        exist_ok: keep an existing cache if it has the same content; if not, it is refused at the end.
        is_vocabulary_complete: whether the tokenizer has all tokens of the teacher; if not, losses that need the whole
            vocabulary are refused.

    Raises:
        XtkError: the output has a cache, and `force` and `exist_ok` are false, or has other files; or `top_k` is
            negative, or the support is not "top-k".
    """

    def __init__(
        self,
        output: str | Path,
        tokenizer: Any,
        *,
        name: str = "",
        support: str = "top-k",
        top_k: int | None = None,
        precision: str = DEFAULT_PRECISION,
        shard_tokens: int = 65536,
        force: bool = False,
        exist_ok: bool = False,
        is_vocabulary_complete: bool = True,
    ) -> None:
        self._exist_ok, self._is_vocabulary_complete = exist_ok, is_vocabulary_complete
        if support not in (known := (*EXACT_SUPPORTS, *SAMPLED_SUPPORTS)):
            raise unknown_name_error("support of CacheWriter", support, known)
        if top_k is not None and (support not in ("top-k", "top-k+sample") or top_k < 0):
            raise XtkError(
                f"top_k is {top_k} with support={support!r}, but must be at least 0, and is only for support='top-k'",
                hint="use top_k=None: it follows from the lists",
            )
        codec_for_precision(precision)
        self.output, self._force, self._precision, self._support = output, force, precision, support
        self.tokenizer = to_tokenizer(tokenizer)
        self._sampling = {"num_samples": 0, "num_sample_sets": 0}  # with samples, that of the first document
        self._given_name, self._name = name, name or Path(self.tokenizer.name).name
        self._folder = open_folder(output)
        self._claim()
        self._plan = ShardPlan(shard_tokens, np.zeros(self.tokenizer.embedding_rows, np.int64))
        self._fingerprint, self._values = CorpusFingerprint(), hashlib.sha256()
        self._pending: list[TeacherDocument] = []
        self._is_closing = False
        self._top_k, self._num_positions = top_k, 0
        self._list_forms = set[tuple[int, bool]]()
        self._has_exact_entropy = True
        self._used_columns: set[str] = set()
        self._spool: Path | None = Path(tempfile.mkdtemp(prefix="xtk-cache-"))
        self._remove_spool = weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)

    def _claim(self) -> None:
        self._folder.check_as_output("a cache", (), force=self._force)
        if not self._force and not self._exist_ok and MANIFEST in self._folder.file_sizes():
            raise XtkError(
                "the output folder already contains a teacher cache",
                where=str(self.output),
                hint="use another output, force=True to replace it, or exist_ok=True to keep an equal one",
            )

    def tokenize(self, document: str | Mapping[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return a document's teacher tokens, and which of them need log-probabilities.

        Args:
            document: a text, or a mapping with the columns of `xtk cache-teacher` ("text", "messages", "input_ids"...),
                and optionally "weight", the document's weight in losses, and "route", the name of its teacher.

        Returns:
            Token ids, int32 [T], with start and end tokens or the chat template; and positions, int32 [P]: the
            log-probabilities of token `ids[p]` given `ids[:p]` are needed.
        """
        tokens = self._view(document)[1]
        return tokens.ids, np.flatnonzero(tokens.train_mask).astype(np.int32)

    def add(
        self,
        document: str | Mapping[str, Any],
        top_ids: ArrayLike,
        top_logprobs: ArrayLike,
        observed_logprobs: ArrayLike,
        *,
        entropy: ArrayLike | None = None,
        sampled_ids: ArrayLike | None = None,
        sampled_logprobs: ArrayLike | None = None,
    ) -> None:
        """Add a document with the teacher's log-probabilities, in nats, normalized over its whole vocabulary.

        Args:
            document: as for `tokenize`.
            top_ids: [P, K], the listed token ids of each position of `tokenize`; -1: fewer than K.
            top_logprobs: [P, K], their log-probabilities.
            observed_logprobs: [P], those of the observed tokens.
            entropy: [P], of the full distributions; None: its lower bound from the listed tokens is stored.
            sampled_ids: [P, R, n], ids sampled from the distribution without the listed and the observed ids, with
                repetitions; -1 at positions where these have all probability. Only for supports with samples.
            sampled_logprobs: [P, R, n], their log-probabilities.

        Raises:
            XtkError: a shape does not fit the tokens, or the values are not a distribution.
        """
        self.add_tokenized(
            *self._view(document),
            top_ids,
            top_logprobs,
            observed_logprobs,
            entropy=entropy,
            sampled_ids=sampled_ids,
            sampled_logprobs=sampled_logprobs,
        )

    def add_tokenized(
        self,
        view: Document,
        tokens: TokenSequence,
        top_ids: ArrayLike,
        top_logprobs: ArrayLike,
        observed_logprobs: ArrayLike,
        *,
        entropy: ArrayLike | None = None,
        sampled_ids: ArrayLike | None = None,
        sampled_logprobs: ArrayLike | None = None,
    ) -> None:
        """Add a document whose teacher tokens are known; arguments as for `add`."""
        where = f"document {self._plan.num_documents}"
        if self._spool is None or self._is_closing:
            raise XtkError(
                "this CacheWriter is closed",
                where=str(self.output),
                hint="create another one; or call close() again if it failed",
            )
        arrays = _checked_arrays(tokens, top_ids, top_logprobs, observed_logprobs, entropy, where)
        arrays = self._with_samples(arrays, sampled_ids, sampled_logprobs, where)
        scored = TeacherDocument(view, tokens, arrays_to_stored([tokens], arrays)[0])
        vocab_size = self.tokenizer.embedding_rows
        support = Support(self._support, **self._sampling) if self._sampling["num_samples"] else None
        check_scored_document(
            scored, where, vocab_size=vocab_size, support=support, precision=self._precision, hints=_HINTS
        )
        list_forms = _list_forms(tokens, arrays)
        self._check_top_k(list_forms, where)
        self._list_forms |= list_forms
        self._used_columns |= _used_columns(view)
        self._has_exact_entropy &= entropy is not None
        before = len(self._plan.shards)
        self._plan.add_chunk(self._plan.num_documents, 0, tokens)
        if before and len(self._plan.shards) > before:
            self._spool_shard(before - 1)
        self._pending.append(scored)
        self._plan.num_documents += 1
        self._num_positions += len(arrays.ids)
        self._fingerprint.add(view)
        stored = scored.stored_logprobs
        for values in (stored.ids, stored.logprobs, stored.observed_logprobs, stored.entropy):
            self._values.update(values.tobytes())
        if stored.sample_logprobs is not None:
            for values in (stored.sample_ids, stored.sample_counts, stored.sample_logprobs):
                self._values.update(values.tobytes())

    def _with_samples(
        self, arrays: LogprobArrays, ids: ArrayLike | None, logprobs: ArrayLike | None, where: str
    ) -> LogprobArrays:
        """Return the arrays with sampled ids, refused if they do not fit the support."""
        if self._support not in SAMPLED_SUPPORTS and ids is None and logprobs is None:
            return arrays
        sampled = to_array("sampled_ids", [] if ids is None else ids, np.int64, where)
        values = to_array("sampled_logprobs", [] if logprobs is None else logprobs, np.float32, where)
        shape = len(arrays.ids), self._sampling["num_sample_sets"], self._sampling["num_samples"]
        if self._support in SAMPLED_SUPPORTS and not self._plan.num_documents and sampled.ndim == 3:
            shape = len(arrays.ids), *sampled.shape[1:]
        if (
            sampled.shape != shape
            or values.shape != shape
            or not all(shape[1:])
            or not np.isfinite(values[sampled >= 0]).all()
        ):
            raise XtkError(
                f"sampled_ids and sampled_logprobs have the shapes {sampled.shape} and {values.shape}; they must be "
                "finite and [positions, sample sets, samples], with the same sizes in all documents",
                where=where,
                hint=f"give both, with support={' or '.join(map(repr, SAMPLED_SUPPORTS))} only",
            )
        self._sampling = {"num_samples": shape[2], "num_sample_sets": shape[1]}
        return replace(arrays, sampled_ids=sampled.astype(np.int32), sampled_logprobs=values)

    def close(self) -> TeacherCache:
        """Write the cache and open it. After an error in writing, it can be called again.

        Raises:
            XtkError: no documents or no positions were added, or another program wrote to the output.
        """
        if self._spool is None:
            return TeacherCache(self.output)
        if not self._plan.num_documents:
            self._discard()
            raise XtkError("no documents were added", where=str(self.output), hint="call add for each document")
        if not self._num_positions:
            self._discard()
            raise XtkError(
                "no document has a log-probability: a cache without positions trains nothing",
                where=str(self.output),
                hint="add documents with at least one trained token",
            )
        self._is_closing = True
        if self._pending:  # none are left if an earlier call failed later
            self._spool_shard(len(self._plan.shards) - 1)
        plan, self._plan.fingerprint = self._plan, str(self._fingerprint)
        plan.optional_columns = [name for name in OPTIONAL_COLUMNS if name in self._used_columns]
        order = make_vocabulary_order(self._precision, self.tokenizer, plan)
        top_k = 0
        if self._support in ("top-k", "top-k+sample"):
            known = self._top_k
            top_k = _common_top_k(self._list_forms, self.tokenizer.embedding_rows) if known is None else known
        values = f"values:sha256:{self._values.hexdigest()}"
        header = compose_cache_header(
            self.tokenizer,
            plan,
            order,
            support=Support(self._support, top_k=top_k, **self._sampling),
            precision=self._precision,
            name=self._name,
            weights=f"name:{self._given_name}" if self._given_name else values,
            options={
                "entropy": "exact" if self._has_exact_entropy else "lower bound",
                "backend": "external",
                "dtype": _EXACT_PRECISION,
                "shard_tokens": plan.shard_tokens,
                **({} if self._is_vocabulary_complete else {"vocabulary": LISTED_VOCABULARY}),
            },
        )
        if self._given_name:  # else the identity of the weights is that of the values
            header["data"]["values"] = values
        with self._folder.lock("cache", 0):
            self._claim()
            if self._force:
                self._folder.move_aside()
            if not find_finished_cache(self._folder, header):
                self._write(header, order)
        self._discard()
        return TeacherCache(self.output)

    def _write(self, header: dict[str, Any], order: VocabularyOrder | None) -> None:
        writer = ShardedCacheWriter(self._folder, header, self._plan.chunks_per_shard())
        writer.write_shared_files(
            self.tokenizer.to_files() | ({} if order is None else {order.file_name: order.file_content})
        )
        for number in writer.missing_shards():
            entry = store_shard(
                self._folder, header, writer.shard_position(number), list(self._read_spooled(number)), order
            )
            writer.add_manifest_entry(number, entry)
        writer.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _view(self, document: str | Mapping[str, Any]) -> tuple[Document, TokenSequence]:
        record = {"text": document} if isinstance(document, str) else document
        columns = {name: name for name in OPT_IN_FIELDS if record.get(name) is not None}
        read = record_to_document(dict(record), columns, f"document {self._plan.num_documents}")
        ((view, tokens),) = teacher_views(self.tokenizer, [read])
        return view, tokens

    def _check_top_k(self, list_forms: set[tuple[int, bool]], where: str) -> None:
        """Refuse lists that are shorter than the argument `top_k`; if it is above the vocabulary size, than that."""
        top_k = min(self._top_k or 0, self.tokenizer.embedding_rows)
        shortest = min((length for length, _ in list_forms), default=top_k)
        if shortest < top_k:
            raise XtkError(
                f"a position has {shortest:,} of the {top_k:,} most likely ids",
                where=where,
                hint="list top_k ids at each position, or use another top_k",
            )

    def _spool_shard(self, number: int) -> None:
        """Write the pending documents, exactly, to a temporary file, so that memory does not grow with the cache."""
        assert self._spool is not None
        codec = {"name": codec_for_precision(_EXACT_PRECISION), "precision": _EXACT_PRECISION, **self._sampling,
                 "sample_logprobs": self._sampling["num_samples"] > 0}  # fmt: skip
        header = {
            "codec": codec,
            "teacher": {"embedding_rows": self.tokenizer.embedding_rows},
            "data": {"optional_columns": list(OPTIONAL_COLUMNS)},
            "options": {},
        }
        position = ShardPosition(number, 0, len(self._pending))
        write_shard(self._spool / f"{number}.arrow", header, position, self._pending)
        self._pending = []

    def _read_spooled(self, number: int) -> Iterator[TeacherDocument]:
        assert self._spool is not None
        shard = CacheShard(self._spool / f"{number}.arrow")
        for at in range(len(shard)):
            stored = shard.read_document(at)
            yield TeacherDocument(stored.document, stored.tokens, stored.stored_logprobs)

    def _discard(self) -> None:
        self._remove_spool()
        self._spool, self._pending = None, []


def _used_columns(document: Document) -> set[str]:
    """Return which optional columns of a shard a document needs."""
    needed = {"weight": document.weight != 1, "route": document.teacher_name, "sampled_tokens": document.sampled_tokens}
    return {name for name, value in needed.items() if value}


def _list_forms(tokens: TokenSequence, arrays: LogprobArrays) -> set[tuple[int, bool]]:
    """Return the number of listed ids at each position, and whether the observed token is the least likely of them."""
    is_observed = arrays.ids == tokens.ids[tokens.train_mask][:, None]
    lowest = np.where(arrays.ids >= 0, arrays.logprobs, np.inf).min(1, initial=np.inf)
    is_last = (is_observed & (arrays.logprobs <= lowest[:, None])).any(1)
    return set(zip((arrays.ids >= 0).sum(1).tolist(), is_last.tolist(), strict=True))


def _common_top_k(list_forms: set[tuple[int, bool]], vocab_size: int) -> int:
    """Return how many of the most likely ids every position certainly lists.

    A program lists K ids, or K and the observed token. In the second form the lists have K ids where the observed token
    is one of them, and else K + 1. If lists have other lengths, a least likely observed token need not be one of the
    most likely ids.
    """
    shortest = min(length for length, _ in list_forms)
    is_regular = all(length == shortest or (is_last and length == shortest + 1) for length, is_last in list_forms)
    # Lists of one length in which the observed token is always the last one can have either form.
    is_ambiguous = list_forms == {(shortest, True)} and 1 < shortest < vocab_size
    if is_regular and not is_ambiguous:
        return shortest
    return min(length - is_last for length, is_last in list_forms)


def _checked_arrays(
    tokens: TokenSequence,
    top_ids: ArrayLike,
    top_logprobs: ArrayLike,
    observed_logprobs: ArrayLike,
    entropy: ArrayLike | None,
    where: str,
) -> LogprobArrays:
    """Return the arrays of one document, refused if they do not fit its tokens."""
    positions = int(tokens.train_mask.sum())
    ids = to_array("top_ids", top_ids, np.int64, where)
    logprobs = to_array("top_logprobs", top_logprobs, np.float32, where)
    observed = to_array("observed_logprobs", observed_logprobs, np.float32, where)
    if ids.ndim == 1 and not ids.size:
        ids, logprobs = ids.reshape(positions, 0), logprobs.reshape(positions, 0)
    if ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != positions or observed.shape != (positions,):
        raise XtkError(
            f"the document has {positions:,} trained teacher tokens, but the arrays have the shapes {ids.shape}, "
            f"{logprobs.shape} and {observed.shape}",
            where=where,
            hint="give top_ids, top_logprobs [P, K] and observed_logprobs [P] at the positions of tokenize(document)",
        )
    if entropy is None:
        with np.errstate(invalid="ignore", over="ignore"):
            probs = np.where(ids >= 0, np.exp(logprobs.astype(np.float64)), 0.0)
            rest = np.clip(1 - probs.sum(1), 0, 1)
            of_listed = np.where(probs > 0, probs * logprobs, 0.0).sum(1)
            given = -of_listed - np.where(rest > 0, rest * np.log(np.where(rest > 0, rest, 1.0)), 0.0)
    else:
        given = to_array("entropy", entropy, np.float64, where)
        if given.shape != (positions,):
            raise XtkError(
                f"entropy has the shape {given.shape}, but must be ({positions},)",
                where=where,
                hint="give one value per position of tokenize(document), or None",
            )
    if ids.size and (ids.min() < -1 or ids.max() > np.iinfo(np.int32).max):
        wrong_id = int(ids.min() if ids.min() < -1 else ids.max())
        raise XtkError(f"top_ids contains {wrong_id}, which is not a token id", where=where, hint=_HINTS["arrays"])
    ordered = np.sort(ids, axis=1)
    repeated = (np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)
    if repeated.any():
        raise XtkError("top_ids contains a token id twice at one position", where=where, hint=_HINTS["arrays"])
    is_observed = ids == tokens.ids[tokens.train_mask][:, None]
    with np.errstate(invalid="ignore"):
        limits = TOLERANCE * (1 + np.abs(observed[:, None]))  # one of both may be rounded to bfloat16
        differs = is_observed & (np.abs(logprobs - observed[:, None]) > limits)
    if differs.any():
        at, place = np.argwhere(differs)[0].tolist()
        raise XtkError(
            f"at position {at}, the observed token has the log-probability {observed[at]:g} in observed_logprobs, and "
            f"{logprobs[at, place]:g} in top_logprobs",
            where=where,
            hint="give the distributions that predict ids[positions] of tokenize(document), not those after them",
        )
    return LogprobArrays(
        ids.astype(np.int32),
        logprobs,
        observed,
        np.maximum(given, 0).astype(np.float32),
        np.zeros((positions, 0, 0), np.int32),
    )


def to_array(name: str, values: Any, dtype: Any, where: str) -> NDArray[Any]:
    """Return an argument as an array of a dtype; a tensor of torch may be on any device and of any dtype."""
    try:
        if isinstance(values, torch.Tensor):
            values = (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            result = np.asarray(values, dtype)
            given = np.asarray(values)
            if (
                np.issubdtype(dtype, np.integer)
                and given.dtype.kind in "bf"
                and not (given.dtype.kind == "f" and np.array_equal(result, given))
            ):
                raise ValueError("it has a number that is not an integer")
            return result
    except (TypeError, ValueError, OverflowError) as failure:
        raise XtkError(
            f"{name} is not an array of numbers: {failure}",
            where=where,
            hint="give arrays or tensors with one row per position; fill rows with fewer ids with -1",
        ) from None
