"""A smaller vocabulary for a BPE tokenizer, exact on the tokens that it keeps.

BPE applies the merge of the lowest rank first. When it has finished, no merge applies across two tokens of the text, so
each token was made by merges inside of it only, in any text. If a vocabulary keeps the tokens that these merges make,
and their merges in the same order, then a text whose tokens are all kept has the same tokens as before.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.text.vocabulary import BYTE_LEVEL, BYTE_LEVEL_ENCODER
from xtk.transplant.tokenizer_folder import tokenizer_settings

BATCH_DOCUMENTS = 256
_HINT = "use xtk transplant with another tokenizer instead"
# Reserved tokens that training did not use: <unused12>, <|reserved_special_token_3|>, [control_8], <|dummy_85|>.
_PLACEHOLDER = re.compile(
    r"\W*(unused|reserved|control|special|dummy|place_?holder(_no)?|extra)(_special)?(_token)?_?\d+\W*", re.IGNORECASE
)


class BpeVocabulary:
    """The vocabulary and merges of a tokenizer (byte-level BPE, or BPE with byte fallback), for pruning."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.content: dict[str, Any] = json.loads(tokenizer.to_files()["tokenizer.json"])
        model = self.content["model"]
        affixes = [model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")]
        byte_level = tokenizer.vocabulary.alphabet == BYTE_LEVEL
        if model["type"] != "BPE" or any(affixes) or not (byte_level or model.get("byte_fallback")):
            raise XtkError(
                "only vocabularies of byte-level BPE and of BPE with byte fallback can be pruned exactly; this one is "
                f"{model['type']}{' with affixes' if any(affixes) else ''}",
                where=tokenizer.name,
                hint=_HINT,
            )
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {pair: rank for rank, pair in enumerate(_merge_pairs(model))}
        self._base = self._base_tokens(byte_level)
        self._added = self._added_tokens()
        self._added_ids = set(self._added.values())
        self._names = {number: name for name, number in self._ids.items()}

    @cached_property
    def smallest(self) -> set[int]:
        """The tokens that every pruned vocabulary has: single bytes, roles, and added tokens without placeholders."""
        template = self.tokenizer.to_files().get("chat_template.jinja", b"").decode()
        added = {
            number
            for name, number in self._added.items()
            if name in template or not _PLACEHOLDER.fullmatch(name.replace("\u2581", "_"))
        }
        roles = set(self.tokenizer.special_token_ids.values())
        return self._base | added | roles | set(_ids_in(self.content.get("post_processor")))

    def closure(self, token: int) -> set[int]:
        """Return a token and those that its merges make; only itself if no merges make it."""
        name = self._names.get(token)
        if name is None or token in self._added_ids:
            return {token}
        made = _apply_merges(name, self._ranks)
        if made[-1] != [name]:  # found as a whole word, without merges (`ignore_merges`), or in no text
            return {token}
        return {self._ids[part] for parts in made for part in parts if part in self._ids}

    def in_merge_order(self) -> Iterable[int]:
        """Yield tokens in the order of their merges: the most frequent in the tokenizer's training first."""
        for one, other in self._ranks:
            yield self._ids[one + other]

    def pruned(self, kept: set[int]) -> tuple[dict[str, bytes], NDArray[np.int32]]:
        """Return the files of the tokenizer with these tokens, and the old id of each new one."""
        kept = kept | self.smallest
        inside = sorted(number for number in kept if number in self._names)
        outside = sorted(kept - self._names.keys())
        order = [*inside, *outside]
        new_id = {old: new for new, old in enumerate(order)}
        content = json.loads(json.dumps(self.content))
        names = {self._names[number] for number in inside}
        model = content["model"]
        model["vocab"] = {self._names[number]: new_id[number] for number in inside}
        model["merges"] = [list(pair) for pair in self._ranks
                           if pair[0] in names and pair[1] in names and pair[0] + pair[1] in names]  # fmt: skip
        added = [token for token in content.get("added_tokens") or [] if self._added.get(token["content"]) in new_id]
        for token in added:
            token["id"] = new_id[self._added[token["content"]]]
        content["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
        content["post_processor"] = _renumber(content.get("post_processor"), new_id)
        content["truncation"] = content["padding"] = None
        files = self.tokenizer.to_files()
        files["tokenizer.json"] = json.dumps(content, ensure_ascii=False).encode()
        files["tokenizer_config.json"] = json.dumps(tokenizer_settings(self.tokenizer), ensure_ascii=False).encode()
        return files, np.array(order, np.int32)

    def _added_tokens(self) -> dict[str, int]:
        """Return the id of each added token that the model has a row for.

        Where the vocabulary has the same token, the file may state another id.
        """
        loaded = tokenizers.Tokenizer.from_str(json.dumps(self.content))
        added = (
            (token["content"], loaded.token_to_id(token["content"])) for token in self.content.get("added_tokens") or []
        )
        return {name: number for name, number in added if number is not None and number < len(self.tokenizer)}

    def _base_tokens(self, byte_level: bool) -> set[int]:
        """Return the tokens of single bytes, those that the vocabulary has, and the unknown token."""
        names = BYTE_LEVEL_ENCODER.values() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        unknown = self.tokenizer.unknown_id
        return {self._ids[name] for name in names if name in self._ids} | ({unknown} if unknown is not None else set())


def count_tokens(tokenizer: Tokenizer, corpus: Iterable[Document]) -> NDArray[np.int64]:
    """Return int64 [U], how often each token occurs in the documents, as the model reads them."""
    counts = np.zeros(len(tokenizer), np.int64)
    documents = iter(corpus)
    has_text = False
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        has_text = has_text or any(document.text for document in batch)
        for sequence in tokenize_documents(tokenizer, batch):
            counts += np.bincount(sequence.ids, minlength=len(counts))
    if not has_text:
        raise XtkError(
            "the data of --keep-vocabulary contains no text", hint="use data with a non-empty text in at least one row"
        )
    return counts


def choose_tokens(vocabulary: BpeVocabulary, counts: NDArray[np.int64] | None, size: int | None) -> set[int]:
    """Return the tokens to keep, with those that their merges need.

    Args:
        counts: int64 [U], occurrences in a corpus; None: tokens in the order of their merges.
        size: largest number of tokens; None: all tokens that occur.
    """
    kept = set(vocabulary.smallest)
    total = len(vocabulary.tokenizer)
    if size is not None and not len(kept) <= size < total:
        raise XtkError(
            f"--prune-to is {size:,}, but must be at least {len(kept):,} (single bytes and special tokens) and below "
            f"the {total:,} tokens of the model",
            where=vocabulary.tokenizer.name,
            hint="use another --prune-to",
        )
    wanted: Iterable[int]
    if counts is None:
        wanted = vocabulary.in_merge_order()
    else:
        wanted = np.lexsort((np.arange(len(counts)), -counts))[: int((counts > 0).sum())].tolist()
    for token in wanted:
        if token in kept:
            continue
        more = vocabulary.closure(token) - kept
        if size is not None and len(kept) + len(more) > size:
            break
        kept |= more
    return kept


def _merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(str(pair), str(other)) for pair, other in pairs]


def _apply_merges(name: str, ranks: dict[tuple[str, str], int]) -> list[list[str]]:
    """Return the parts of a token before and after each merge, from single characters to the last state."""
    parts = list(name)
    states = [list(parts)]
    while len(parts) > 1:
        pairs = [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            break
        _, at = heapq.nsmallest(1, pairs)[0]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        states.append([parts[at]])
    states.append(list(parts))
    return states


def _ids_in(part: Any) -> Iterator[int]:
    """Yield the token ids in a post-processor."""
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int:
            yield part[1]
        else:
            for item in part:
                yield from _ids_in(item)
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "ids" and isinstance(value, list) and all(type(number) is int for number in value):
                yield from value
            else:
                yield from _ids_in(value)


def _renumber(part: Any, new_id: dict[int, int]) -> Any:
    """Return a post-processor with new ids: `[token, id]` pairs of BERT and RoBERTa, and `ids` of templates."""
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int:
            return [part[0], new_id[part[1]]]
        return [_renumber(item, new_id) for item in part]
    if isinstance(part, dict):
        return {
            key: [new_id[number] for number in value]
            if key == "ids" and isinstance(value, list) and all(type(number) is int for number in value)
            else _renumber(value, new_id)
            for key, value in part.items()
        }
    return part
