"""A tokenizer as xtk needs it: ids, and the byte of the text where each token ends."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.tokens.vocabulary import (
    BYTE_LEVEL,
    LETTER_OF_BYTE,
    LITERAL,
    METASPACE,
    METASPACE_LETTER,
    WORD_PIECE,
    Vocabulary,
    read_vocabulary,
)

ROLES = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class Encoded:
    """The tokens of one text.

    Attributes:
        ids: int32 [n].
        ends: int32 [n], never falling: token i ends before byte `ends[i]` of the text. A token that
            spells nothing of it (a prefix that the tokenizer added) ends where the one before it does;
            of tokens that share a character which a normaliser rewrote, only the last has its end.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int32]


class Tokenizer:
    """A fast tokenizer, read from a folder without transformers.

    Args:
        folder: holds `tokenizer.json`, and beside it the configuration that names the special tokens.
        name: how messages call it; the folder if left out.

    Attributes:
        vocabulary: what each token spells.
        fingerprint: names the tokenizer, whatever folder it lies in: hash of its JSON without `truncation`
            and `padding`, which ordinary calls switch on.
        template_fingerprint: the same for its chat template; None without one.
        roles: {"bos", "eos", "pad", "unk": id}, as far as it has them.
        width: rows of the model's embedding if the folder has a model's configuration, else the vocabulary.

    Raises:
        XtkError: there is no fast tokenizer in the folder, or it cannot be read.
    """

    def __init__(self, folder: str | Path, *, name: str | None = None) -> None:
        self.folder = Path(folder)
        self.name = name or str(folder)
        raw = self._read_json_bytes()
        try:
            with _no_garbage_collection():
                content = json.loads(raw)
                self._backend = tokenizers.Tokenizer.from_buffer(raw)
                self.fingerprint = _fingerprint_of(content)
        except Exception as wrong:  # the backend raises bare Exceptions
            raise XtkError(
                f"this tokenizer.json cannot be read: {wrong}",
                where=str(self.folder),
                hint="copy tokenizer.json of the model into it again, whole",
            ) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        # Text is text: the spelling of a special token inside a document is not that token.
        self._backend.encode_special_tokens = True
        configuration = _json_of(self.folder / "tokenizer_config.json")
        self.template_fingerprint = self._template_fingerprint(configuration)
        self.vocabulary = self._read_vocabulary(content)
        self.roles = self._read_roles(configuration)
        self.width = max(len(self.vocabulary), _embedding_rows(self.folder))

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def start_id(self) -> int | None:
        """The token before the text: bos, or else eos, as models without a bos were trained; or none."""
        return self.roles.get("bos", self.roles.get("eos"))

    @property
    def end_id(self) -> int | None:
        """The token after the text: eos, or none."""
        return self.roles.get("eos")

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenise texts, without special tokens, and find the byte where each token ends.

        Exact where the tokens' bytes spell the text, also after a space that the tokenizer put in front.
        Where a normaliser rewrote the text, the tokenizer's own character offsets are used.
        """
        from xtk.tokens.kernels import byte_ends  # numba takes half a second to import; projections do without it

        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        vocabulary = self.vocabulary
        results = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            spelled = np.frombuffer(text.encode(), np.uint8)
            ends, exact = byte_ends(vocabulary.pool, vocabulary.offsets, ids, spelled)
            results.append(Encoded(ids, ends) if exact else self._encode_by_offsets(text))
        return results

    def _encode_by_offsets(self, text: str) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if not len(ids):
            return Encoded(ids, np.zeros(0, np.int32))
        byte_of_character = np.cumsum([0, *(len(character.encode()) for character in text)], dtype=np.int32)
        before, after = _cluster_edges(text)
        offsets = np.array(encoding.offsets, np.int64)
        starts = byte_of_character[before[offsets[:, 0]]]
        ends = np.maximum.accumulate(byte_of_character[after[offsets[:, 1]]])
        # Of tokens that share a character only the last ends with it; the others end where the token before them does.
        shared = np.append(starts[1:] < ends[:-1], False)
        ends = np.maximum.accumulate(np.where(shared, 0, ends))
        ends[-1] = byte_of_character[-1]
        return Encoded(ids, ends.astype(np.int32))

    def spell(self, spellings: Sequence[bytes]) -> list[NDArray[np.int32] | None]:
        """Spell byte strings with this tokenizer's tokens, as it would inside a text.

        Args:
            spellings: whatever a foreign token spells; need not be UTF-8.

        Returns:
            One array of ids for each; their bytes are exactly the ones asked for. None where this
            tokenizer cannot write them.
        """
        results: list[NDArray[np.int32] | None] = [None] * len(spellings)
        if self.vocabulary.family == BYTE_LEVEL:
            texts = [(at, text) for at, text in enumerate(map(_decoded, spellings)) if text is not None]
            normalizer = self._backend.normalizer
            self._backend.normalizer = None  # what a token spells is normalised already
            encodings = self._backend.encode_batch_fast([text for _, text in texts], add_special_tokens=False)
            self._backend.normalizer = normalizer
            for (at, _), encoding in zip(texts, encodings, strict=True):
                ids = encoding.ids
                if self._spells(ids, spellings[at]):
                    results[at] = np.array(ids, np.int32)
        for at, spelling in enumerate(spellings):
            if results[at] is None:
                results[at] = self._spell_with_model(spelling)
        return results

    def _spells(self, ids: list[int], spelling: bytes) -> bool:
        return b"".join(map(self.vocabulary.spellings.__getitem__, ids)) == spelling

    def _spell_with_model(self, spelling: bytes) -> NDArray[np.int32] | None:
        """Spell with the merges alone, past the pre-tokenizer; byte by byte where even that fails."""
        family = self.vocabulary.family
        text = _decoded(spelling)
        written: str | None
        if family == BYTE_LEVEL:
            written = "".join(LETTER_OF_BYTE[byte] for byte in spelling)
        elif text is None:
            written = None
        else:
            written = text.replace(" ", METASPACE_LETTER) if family == METASPACE else text
        if written:
            ids = [token.id for token in self._backend.model.tokenize(written)]
            if ids and self._spells(ids, spelling):
                return np.array(ids, np.int32)
        table = self.vocabulary.token_of_bytes
        single = [table.get(bytes([byte])) for byte in spelling]
        if not single or any(token is None for token in single):
            return None
        return np.array(single, np.int32)

    def _read_json_bytes(self) -> bytes:
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return path.read_bytes()
        if not self.folder.is_dir():
            raise XtkError(
                "no such model or tokenizer folder",
                where=str(self.folder),
                hint="a folder that holds tokenizer.json; check the spelling",
            )
        slow = [name for name in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
                if (self.folder / name).is_file()]  # fmt: skip
        if slow:
            raise XtkError(
                f"this tokenizer has no fast backend: the folder has {slow[0]}, not tokenizer.json",
                where=str(self.folder),
                hint='python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{self.folder}').save_pretrained('{self.folder}')\"",
            )
        raise XtkError(
            "there is no tokenizer in this folder (tokenizer.json)",
            where=str(self.folder),
            hint="copy tokenizer.json and tokenizer_config.json of the model into it",
        )

    def _read_vocabulary(self, content: dict[str, Any]) -> Vocabulary:
        added = content.get("added_tokens") or []
        return read_vocabulary(
            _family(content),
            self._tokens_in_order(content, added),
            literal={token["id"]: token["content"] for token in added},
            special={token["content"]: token["id"] for token in added if token.get("special")},
        )

    def _tokens_in_order(self, content: dict[str, Any], added: Sequence[dict[str, Any]]) -> list[str | None]:
        """Return the token of each id: from the JSON where it says the same as the backend, which takes ten times."""
        table: dict[str, int] = content["model"].get("vocab")
        added_ids = {token["content"]: token["id"] for token in added}
        as_written = all(self._backend.token_to_id(token) == number for token, number in added_ids.items())
        if isinstance(table, dict) and as_written:
            told = list(table) if list(table.values()) == list(range(len(table))) else _by_number(table)
            told += [None] * (max(added_ids.values(), default=-1) + 1 - len(told))
            for token, number in added_ids.items():
                told[number] = token
            if len(told) - told.count(None) == self._backend.get_vocab_size(with_added_tokens=True):
                return told
        return _by_number(self._backend.get_vocab(with_added_tokens=True))

    def _read_roles(self, configuration: dict[str, Any]) -> dict[str, int]:
        fallback = _json_of(self.folder / "special_tokens_map.json")
        roles = {}
        for role in ROLES:
            value = configuration.get(f"{role}_token", fallback.get(f"{role}_token"))
            token = value.get("content") if isinstance(value, dict) else value
            number = self._backend.token_to_id(token) if isinstance(token, str) else None
            if number is not None:
                roles[role] = int(number)
        return roles

    def _template_fingerprint(self, configuration: dict[str, Any]) -> str | None:
        path = self.folder / "chat_template.jinja"
        template = path.read_text(encoding="utf-8") if path.is_file() else configuration.get("chat_template")
        if template is None:
            return None
        return "sha256:" + hashlib.sha256(json.dumps(template).encode()).hexdigest()


def _cluster_edges(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each offset into the text the edges of its character with marks, at or before and at or after it.

    A normaliser composes a character with the marks behind it and puts marks into order, and gives the
    result the offset of the first character alone: "e" + U+0301 as U+00E9 seems to end after the "e".
    """
    inside = [_goes_on(character) for character in text[1:]]
    edges = np.flatnonzero(~np.array([False, *inside, False][: len(text) + 1], np.bool_))
    offsets = np.arange(len(text) + 1)
    before = edges[np.searchsorted(edges, offsets, side="right") - 1]
    after = edges[np.searchsorted(edges, offsets, side="left")]
    return before, after


def _goes_on(character: str) -> bool:
    # Hangul vowels and final consonants (U+1160 to U+11FF) are composed too, and are no marks.
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold Python's collector while half a million small objects are made, none of them garbage: half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_number(table: dict[str, int]) -> list[str | None]:
    token_of_id: list[str | None] = [None] * (max(table.values(), default=-1) + 1)
    for token, number in table.items():
        token_of_id[number] = token
    return token_of_id


def _decoded(spelling: bytes) -> str | None:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None


def _fingerprint_of(content: dict[str, Any]) -> str:
    identity = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    return "sha256:" + hashlib.sha256(_canonical_json(identity).encode()).hexdigest()


def _canonical_json(content: Any) -> str:
    """Return `json.dumps` with sorted keys. A vocabulary, of numbers only, is sorted by names alone: half the time."""
    if not isinstance(content, dict):
        return json.dumps(content, sort_keys=True, separators=(",", ":"))
    if set(map(type, content.values())) == {int}:
        return json.dumps({key: content[key] for key in sorted(content)}, separators=(",", ":"))
    return "{" + ",".join(f"{json.dumps(key)}:{_canonical_json(content[key])}" for key in sorted(content)) + "}"


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as wrong:
        raise XtkError(f"this file is no JSON: {wrong}", where=str(path)) from None
    return content if isinstance(content, dict) else {}


def _embedding_rows(folder: Path) -> int:
    configuration = _json_of(folder / "config.json")
    text = configuration.get("text_config")
    rows = configuration.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return int(rows or 0)


def _family(content: dict[str, Any]) -> str:
    parts = [content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer")]
    kinds = {kind for part in parts for kind in _types(part)}
    if "ByteLevel" in kinds:
        return BYTE_LEVEL
    if (
        "Metaspace" in kinds
        or content.get("model", {}).get("byte_fallback")
        or METASPACE_LETTER in json.dumps(parts, ensure_ascii=False)
    ):
        return METASPACE
    if "WordPiece" in kinds or content.get("model", {}).get("type") == "WordPiece":
        return WORD_PIECE
    return LITERAL


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)
