"""Fast tokenizers with byte offsets: token ids, and the byte of the text where each token ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import XtkError
from xtk.text.alignment_numba import batch_token_byte_ends
from xtk.text.chat.template import ChatTemplate
from xtk.text.normalized_byte_offsets import byte_ends_from_offsets, characters_kept_by_normalizer
from xtk.text.start_tokens import AUTO_START, NO_START, START_ROLES, own_start_ids, start_post_processor
from xtk.text.tokenizer_files import (
    STOP_TOKENS_KEY,
    configured_vocab_size,
    read_tokenizer_files,
    tokenizer_folder,
    wrap_backend_errors,
)
from xtk.text.vocabulary import (
    BYTE_LEVEL,
    BYTE_LEVEL_ENCODER,
    METASPACE,
    METASPACE_CHARACTER,
    component_types,
    read_vocabulary,
)

_dropout_warned: set[str] = set()  # fingerprints of tokenizers

# End-of-turn tokens, as the publishers of the chat formats document them.
END_OF_TURN_TOKENS = (
    "<|im_end|>",  # ChatML: openai-python, chatml.md; Qwen
    "<|eot_id|>",  # Llama 3: meta-llama/llama-models, prompt format
    "<|eot|>",  # Llama 4: the same
    "<end_of_turn>",  # Gemma 1 to 3: Google's page on its formatting
    "<|end|>",  # Phi-3: its model card; gpt-oss: openai/harmony
    "<|END_OF_TURN_TOKEN|>",  # Command R: Cohere's prompt guide
)
HARMONY_STOPS = ("<|return|>", "<|call|>")  # gpt-oss: openai/harmony

# Instead of those: GLM-4 writes no end; its models stop at the mark of the next turn (generation_config of zai-org).
NEXT_TURN_TOKENS = ("<|user|>",)
# Tokens that end a turn with tool calls, or the last turn, where others end with one of those above.
TOOL_TURN_END_TOKENS = (
    "<|eom_id|>",  # Llama 3.1
    "<|eom|>",  # Llama 4
    "<|call|>",  # gpt-oss: openai/harmony
    "<|return|>",  # the same
    "<|observation|>",  # GLM-4
)
_TURN_MARKS = (*END_OF_TURN_TOKENS, *HARMONY_STOPS, *NEXT_TURN_TOKENS, *TOOL_TURN_END_TOKENS)
# Special tokens that end reasoning, and that start tool calls. Where a tokenizer has them as text, they are text.
REASONING_END_TOKENS = (
    "</think>",
    "[/THINK]",  # Mistral: mistral-common
    "<|END_THINKING|>",  # Command A: Cohere's prompt guide
)
TOOL_CALL_START_TOKENS = (
    "<tool_call>",
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama 3.1
    "<|START_ACTION|>",  # Command A
    "<|tool_call|>",  # Granite, Phi-4-mini
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",  # DeepSeek V3
)


@dataclass(frozen=True)
class EncodedText:
    """The tokens of one text."""

    ids: NDArray[np.int32]  # [n]
    # [n], never decreasing: token i ends before this byte of the text. A token without bytes in the text (an added
    # prefix) has the end before it; of tokens that share a rewritten character, only the last has its end.
    byte_ends: NDArray[np.int32]
    # Whether the tokens' bytes equal the text, perhaps after a space that the tokenizer prepended. Otherwise the
    # tokenizer normalized the text, and the ends come from its offsets.
    exact: bool = True


class Tokenizer:
    """A fast tokenizer, loaded from a folder without transformers.

    `name`: in messages; the folder by default. `embedding_rows`: for a folder without a model configuration.
    `start_token`: what precedes a text: `auto` (as in transformers), `none`, `bos`, `eos`, a special token, or ids.
    `adapter`: folder of the model's adapter, whose tokenizer counts if it has one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        embedding_rows: int | None = None,
        start_token: str | tuple[int, ...] = AUTO_START,
        adapter: Path | None = None,
    ) -> None:
        self.name = name or str(folder)
        model_folder = Path(folder)
        num_rows = embedding_rows or configured_vocab_size(model_folder)
        self._model_folder, self.folder = model_folder, tokenizer_folder(model_folder, adapter)
        files = read_tokenizer_files(self.folder, model_folder)
        if self.folder != model_folder and 0 < num_rows < files.backend.get_vocab_size():
            terminal.note(
                f"{self.name}: the model's tokenizer is used; the adapter's has more tokens than the model rows"
            )
            self.folder = model_folder
            files = read_tokenizer_files(model_folder, model_folder)
        # fingerprint: identifies the tokenizer independent of its folder: hash of its JSON without `truncation` and
        # `padding`, which calls may change. text_fingerprint: the same whatever its start token.
        content, self._backend, self.fingerprint = files.content, files.backend, files.fingerprint
        self.text_fingerprint = files.text_fingerprint
        self._disable_dropout(content["model"].get("dropout"))
        self._backend.no_truncation()
        self._backend.no_padding()
        with self._backend_errors():
            self._own_start_ids = own_start_ids(self._backend, files.configuration)
            self._written_start_ids = own_start_ids(self._backend, {})  # of tokenizer.json, with any class
        # The post-processor adds special tokens, which xtk adds itself, and trims white space from the offsets.
        self._backend.post_processor = None
        # The text of a special token inside a document is not that token.
        self._backend.encode_special_tokens = True
        self._lock = threading.Lock()  # guards that setting, which `encode_rendered` changes temporarily
        self._template = files.chat_template
        self.template_fingerprint = files.template_fingerprint  # identifies its chat template; None without one
        vocabulary = read_vocabulary(content, self._backend)
        # Gemma 3 1B has one special token (of images) more than rows.
        first = vocabulary.without_special_tokens_above(num_rows)
        left_out = vocabulary.special_tokens.keys() - first.special_tokens.keys()
        needed = {*files.special_tokens.values(), *_TURN_MARKS}
        is_used = any(name in needed or name in (files.chat_template or "") for name in left_out)
        self.vocabulary = vocabulary if is_used else first  # the bytes of each token
        self._unusable = frozenset() if is_used else left_out
        self._has_precompiled_charsmap = "Precompiled" in component_types(content.get("normalizer"))
        unknown = content["model"].get("unk_token")
        number = content["model"].get("unk_id") if unknown is None else self._backend.token_to_id(unknown)
        # The unk token; None if the tokenizer can encode every text.
        self.unknown_id: int | None = None if number is None else int(number)
        self._whitespace_stripping = {
            token["id"]: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in content["added_tokens"]
        }
        self._role_contents = files.special_tokens
        self._named_stops = files.stop_tokens
        numbers = {role: self._backend.token_to_id(token) for role, token in files.special_tokens.items()}
        # {"bos", "eos", "pad", "unk": id}, those that it has.
        self.special_token_ids = {role: int(number) for role, number in numbers.items() if number is not None}
        # Rows of the model's embedding if the folder has a model configuration, else the vocabulary size.
        self.embedding_rows = max(len(self.vocabulary), num_rows)
        self._raw = files.raw
        self.start_token: str | tuple[int, ...]
        self.start_ids: tuple[int, ...]  # tokens that precede a text; empty: a text's first token has no prediction
        self._set_start(start_token)

    @property
    def num_left_out(self) -> int:
        """Number of special tokens for which the model has no row; nothing writes them."""
        return len(self._unusable)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tokenizer as its folder; the other process loads it again."""
        adapter = self.folder if self.folder != self._model_folder else None
        loading = partial(Tokenizer, self._model_folder, name=self.name, embedding_rows=self.embedding_rows)
        loading = partial(loading, adapter=adapter)
        return partial(loading, start_token=self.start_token), ()

    def __len__(self) -> int:
        return len(self.vocabulary)

    def with_start_token(self, start_token: str | tuple[int, ...]) -> Tokenizer:
        """Return the same tokenizer with another start token."""
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other._set_start(start_token)
        return other

    def _set_start(self, start_token: str | tuple[int, ...]) -> None:
        self.start_token = start_token
        if isinstance(start_token, tuple) or start_token in (AUTO_START, NO_START):
            own = self._own_start_ids if start_token == AUTO_START else ()
            self.start_ids = start_token if isinstance(start_token, tuple) else own
            if max(self.start_ids, default=0) >= len(self):
                raise XtkError(
                    f"the post-processor of this tokenizer puts the token id {max(self.start_ids)} before a text, "
                    "which is not in its vocabulary",
                    where=self.name,
                    hint="download tokenizer.json again, or use --start-token none",
                )
            return
        ids = self.special_token_ids if start_token in START_ROLES else self.vocabulary.special_tokens
        if start_token not in ids:
            known = [role for role in START_ROLES if role in self.special_token_ids]
            raise XtkError(
                f"this tokenizer has no special token {start_token!r} to start a text with",
                where=self.name,
                hint=f"use --start-token {', '.join([AUTO_START, NO_START, *known])} or a special token's text",
            )
        self.start_ids = (ids[start_token],)

    @property
    def end_id(self) -> int | None:
        """The token after a text: eos, or None."""
        return self.special_token_ids.get("eos")

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text or a turn: eos, and those of END_OF_TURN_TOKENS in the vocabulary."""
        turns = self.special_ids(END_OF_TURN_TOKENS) or self.special_ids(NEXT_TURN_TOKENS)
        return frozenset(turns if self.end_id is None else {self.end_id, *turns})

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which generation stops: `turn_end_ids`, without those that end messages inside of a turn.

        gpt-oss ends each message (such as its reasoning) with `<|end|>`, and its turn with `<|return|>` or `<|call|>`.
        """
        is_harmony = bool(self.special_ids(HARMONY_STOPS))
        return self.turn_end_ids - self.special_ids(("<|end|>",)) if is_harmony else self.turn_end_ids

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """The tokens with which a turn may end: `end_ids`, TOOL_TURN_END_TOKENS, and those that the model's files name.

        These are the stop tokens of generation_config.json, and the special token after a reply in the chat template.
        """
        named = self.special_ids(TOOL_TURN_END_TOKENS) | self._template_end_ids
        return self.end_ids | named | frozenset(self.declared_stop_ids)

    @cached_property
    def declared_stop_ids(self) -> tuple[int, ...]:
        """The special tokens at which generation_config.json ends an answer, in its order; without it, eos."""
        special = self.vocabulary.special_tokens
        known = [special.get(stop) if isinstance(stop, str) else stop for stop in self._named_stops]
        stops = dict.fromkeys(stop for stop in known if stop in self.special_token_names and stop != self.unknown_id)
        return tuple(stops) or (() if self.end_id is None else (self.end_id,))

    @property
    def ordinary_stop_tokens(self) -> list[int | str]:
        """The stop tokens of generation_config.json that are not special tokens, at which generation does not stop."""
        return [
            stop
            for stop in self._named_stops
            if stop not in (self.vocabulary.special_tokens if isinstance(stop, str) else self.special_token_names)
        ]

    @cached_property
    def _template_end_ids(self) -> frozenset[int]:
        """The special token that the chat template writes right after a reply; empty without one."""
        if self._template is None or self._control_spellings is None:
            return frozenset()
        try:
            after = self.chat_template.text_after_reply
        except XtkError:  # an invalid template is an error where it is used
            return frozenset()
        first = self._control_spellings.match(after.lstrip())
        token = None if first is None else self.vocabulary.special_tokens.get(first[0])
        return frozenset() if token is None else frozenset({token}) - self.special_ids(NEXT_TURN_TOKENS)

    @cached_property
    def next_turn_ids(self) -> frozenset[int]:
        """The tokens at which generation stops, but with which a template begins the next turn."""
        return self.special_ids((*NEXT_TURN_TOKENS, "<|observation|>"))

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens of these names that the vocabulary has."""
        special = self.vocabulary.special_tokens
        return frozenset(special[name] for name in names if name in special)

    @cached_property
    def adds_prefix_space(self) -> bool:
        """Whether it prepends a space to a text."""
        (letter,) = self.encode(["a"])
        return b"".join(map(self.vocabulary.bytes_of, letter.ids.tolist())) == b" a"

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the tokens of texts, without special tokens, and the byte where each token ends.

        Exact where the tokens' bytes equal the text, possibly after a prepended space. Where the tokenizer normalizes
        the text, its character offsets are used: see `byte_ends_from_offsets`.
        """
        with self._backend_errors(), self._lock:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        results = self._encode_by_bytes(texts, [encoding.ids for encoding in encodings])
        rewritten = [at for at, encoded in enumerate(results) if not encoded.exact]
        if rewritten:
            some = [texts[at] for at in rewritten]
            with self._backend_errors(), self._lock:
                encodings = self._backend.encode_batch(some, add_special_tokens=False)
            for at, text, encoding in zip(rewritten, some, encodings, strict=True):
                results[at] = self._encode_by_offsets(text, encoding)
        return results

    def _encode_one(self, backend: Any, text: str) -> Any:
        with self._backend_errors(), self._lock:
            return backend.encode(text, add_special_tokens=False)

    def _backend_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that converts errors of the backend, such as a missing unk token, to XtkError."""
        return wrap_backend_errors("the tokenizer cannot encode a text", self.name)

    def _disable_dropout(self, dropout: Any) -> None:
        """Switch off BPE dropout (skipped merges), so that the same text always has the same tokens."""
        if not dropout or not isinstance(dropout, int | float):
            return
        self._backend.model.dropout = None
        if self.fingerprint not in _dropout_warned:
            _dropout_warned.add(self.fingerprint)
            terminal.note(f"{self.name}: disabled this tokenizer's BPE dropout of {dropout:g}")

    @property
    def has_normalizer(self) -> bool:
        """Whether texts are normalized before tokenization, so that they may have more bytes."""
        return self._backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """Return the text after the tokenizer's normalizer, before tokenization."""
        normalizer = self._backend.normalizer
        with self._backend_errors():
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def _encode_by_bytes(self, texts: Sequence[str], ids: Sequence[list[int]]) -> list[EncodedText]:
        raw = [text.encode() for text in texts]
        edges, text_edges = (np.cumsum([0, *map(len, parts)]) for parts in (ids, raw))
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(edges[-1]))
        ends, exact = batch_token_byte_ends(
            self.vocabulary.token_bytes,
            self.vocabulary.offsets,
            flat,
            edges,
            np.frombuffer(b"".join(raw), np.uint8),
            text_edges,
        )
        return [
            EncodedText(flat[first:stop], ends[first:stop], spelled)
            for (first, stop), spelled in zip(itertools.pairwise(edges.tolist()), exact.tolist(), strict=True)
        ]

    def _encode_by_offsets(self, text: str, encoding: Any) -> EncodedText:
        backend = self._backend
        if not self._control_ids.isdisjoint(encoding.ids):
            backend = self._backend_without_controls
            encoding = self._encode_one(backend, text)
            (encoded,) = self._encode_by_bytes([text], [encoding.ids])
            if encoded.exact:
                return encoded
        offsets = encoding.offsets
        if self._has_precompiled_charsmap:
            offsets = self._offsets_past_dropped(backend, text, encoding)
        spellings = [self.vocabulary.bytes_of(token) for token in encoding.ids]
        ends = byte_ends_from_offsets(text, offsets, spellings, self.normalize if backend.normalizer else None)
        return EncodedText(np.array(encoding.ids, np.int32), ends, exact=False)

    def _offsets_past_dropped(self, backend: Any, text: str, encoding: Any) -> Sequence[tuple[int, int]]:
        """Return the tokens' offsets where a charsmap drops characters: the backend's are too low after the first one.

        They are the offsets in the text without these characters; or, if its tokens differ, the whole text for each
        token.
        """
        kept = characters_kept_by_normalizer(text, self.normalize)
        if len(kept) == len(text):
            return list(encoding.offsets)
        shorter = self._encode_one(backend, "".join(text[at] for at in kept))
        if shorter.ids != encoding.ids or shorter.tokens != encoding.tokens:
            return [(0, len(text))] * len(encoding.ids)
        return [(kept[start], kept[stop - 1] + 1) if stop > start else (0, 0) for start, stop in shorter.offsets]

    @cached_property
    def _control_ids(self) -> set[int]:
        return set(self.vocabulary.special_tokens.values()) - {self.unknown_id}

    @cached_property
    def _backend_without_controls(self) -> Any:
        """The backend for texts in which the model itself would parse special tokens, despite `encode_special_tokens`.

        A Unigram vocabulary includes the special tokens, so "</s>" in a document would become the eos token. This copy
        appends the tokenizer's fingerprint to their spelling, which no text contains.
        """
        content = json.loads(self._backend.to_str())
        model = content["model"]
        # Only those in the model's vocabulary are renamed: ids of other added tokens depend on its size.
        controls = {token for token in self._control_ids if token < len(model.get("vocab") or [])}
        if model["type"] == "Unigram":
            for token in controls:
                model["vocab"][token][0] += self.fingerprint
        elif model["type"] in ("WordLevel", "WordPiece"):
            model["vocab"] = {
                key + self.fingerprint * (token in controls): token for key, token in model["vocab"].items()
            }
        else:
            return self._backend
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] not in controls]
        with wrap_backend_errors("the tokenizer cannot be rebuilt without its special tokens", self.name):
            backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template."""
        if self._template is None:
            raise XtkError(
                "this tokenizer has no chat template, but the data has conversations",
                where=self.name,
                hint="copy chat_template.jinja into its folder, for example from the model's chat version",
            )
        tokens = {f"{role}_token": content for role, content in self._role_contents.items()}
        return ChatTemplate(self._template, tokens, self.name)

    def encode_rendered(
        self, texts: Sequence[str], content_ranges: Sequence[Sequence[tuple[int, int]]]
    ) -> list[EncodedText]:
        """Return the tokens of conversations rendered with this chat template; special tokens end after their text.

        `content_ranges`: for each text, the character ranges `[start, stop)` of message contents, in order. The text of
        a special token is plain text inside of them, and the special token outside.
        """
        controls = self._control_spellings
        spelled = [
            controls is not None and any(controls.search(text, start, stop) for start, stop in regions)
            for text, regions in zip(texts, content_ranges, strict=True)
        ]
        for name in self._unusable:
            self._refuse_unusable(
                name for text, special in zip(texts, spelled, strict=True) if not special and name in text
            )
        with self._backend_errors(), self._parse_special_tokens():
            plain = [text for text, special in zip(texts, spelled, strict=True) if not special]
            encodings = iter(self._backend.encode_batch_fast(plain, add_special_tokens=False))
        return [
            self._around_contents(text, regions) if special else self._between_controls(text, next(encodings))
            for text, regions, special in zip(texts, content_ranges, spelled, strict=True)
        ]

    def _refuse_unusable(self, names: Iterable[str]) -> None:
        """Refuse special tokens of a template for which the model has no row."""
        if name := next((name for name in names if name in self._unusable), None):
            raise XtkError(
                f"the chat template writes the token {name}, for which the model has no row in its embedding",
                where=self.name,
                hint="remove the token from chat_template.jinja, or add its row with model.resize_token_embeddings",
            )

    def _around_contents(self, text: str, contents: Sequence[tuple[int, int]]) -> EncodedText:
        """Tokenize a text in which only special tokens outside of the contents are parsed.

        Parts between them are tokenized separately, so a tokenizer that prepends a space does so for each part.
        """
        assert self._control_spellings is not None
        outside = [
            match
            for match in self._control_spellings.finditer(text)
            if not any(start < match.end() and match.start() < stop for start, stop in contents)
        ]
        self._refuse_unusable(match[0] for match in outside)
        controls = [(match.start(), self.vocabulary.special_tokens[match[0]]) for match in outside]
        parts, spelled = self._split_at_special_tokens(text, controls)
        return self._join_parts(parts, spelled, self.encode(parts))

    def _split_at_special_tokens(
        self, text: str, controls: Sequence[tuple[int, int]]
    ) -> tuple[list[str], list[tuple[int, str]]]:
        """Return the parts of a text around special tokens, (character, id), ascending; and (id, text) of these.

        Their text includes the white space that they strip from adjacent parts.
        """
        parts, spelled, at = [], [], 0
        for place, token in controls:
            left, right = self._whitespace_stripping.get(token, (False, False))
            start, stop = place, place + len(self.special_token_names[token])
            while left and start > at and text[start - 1].isspace():
                start -= 1
            while right and stop < len(text) and text[stop].isspace():
                stop += 1
            parts.append(text[at:start])
            spelled.append((token, text[start:stop]))
            at = stop
        return [*parts, text[at:]], spelled

    def _join_parts(self, texts: list[str], controls: list[tuple[int, str]], encoded: list[EncodedText]) -> EncodedText:
        """Join the tokens of parts and the special tokens between them."""
        ids, ends, byte = [], [], 0
        for number, (text, tokens) in enumerate(zip(texts, encoded, strict=True)):
            ids.append(tokens.ids)
            ends.append(tokens.byte_ends + byte)
            byte += len(text.encode())
            if number < len(controls):
                token, spelled = controls[number]
                byte += len(spelled.encode())
                ids.append(np.array([token], np.int32))
                ends.append(np.array([byte], np.int32))
        exact = all(tokens.exact for tokens in encoded)
        return EncodedText(np.concatenate(ids), np.concatenate(ends).astype(np.int32), exact)

    def _between_controls(self, text: str, encoding: Any) -> EncodedText:
        """Return the byte ends of tokens of a text in which all special tokens are parsed."""
        ids = np.array(encoding.ids, np.int32)
        places = [at for at, token in enumerate(encoding.ids) if token in self._control_ids]
        controls, at = [], 0
        for place in places:
            token = int(ids[place])
            start = text.find(self.special_token_names[token], at)
            if start < 0:  # a special token with another text: tokens cannot be located
                return EncodedText(ids, np.full(len(ids), len(text.encode()), np.int32), exact=False)
            controls.append((start, token))
            at = start + len(self.special_token_names[token])
        parts, spelled = self._split_at_special_tokens(text, controls)
        edges = [-1, *places, len(ids)]
        tokens = [encoding.ids[first + 1 : stop] for first, stop in itertools.pairwise(edges)]
        encoded = [
            encoded if encoded.exact else self._encode_part(part, encoded.ids)
            for part, encoded in zip(parts, self._encode_by_bytes(parts, tokens), strict=True)
        ]
        return self._join_parts(parts, spelled, encoded)

    def _encode_part(self, text: str, ids: NDArray[np.int32]) -> EncodedText:
        """Return the byte ends of a part between special tokens that was normalized, from tokenizing it separately.

        If the part has other tokens when tokenized separately, all its tokens share one end.
        """
        (alone,) = self.encode([text])
        if alone.ids.tolist() == ids.tolist():
            return alone
        ends = np.zeros(len(ids), np.int32)
        ends[-1:] = len(text.encode())
        return EncodedText(ids, ends, exact=False)

    @contextlib.contextmanager
    def _parse_special_tokens(self) -> Iterator[None]:
        """Parse special tokens in texts while the context is active."""
        with self._lock:
            self._backend.encode_special_tokens = False
            try:
                yield
            finally:
                self._backend.encode_special_tokens = True

    @cached_property
    def _control_spellings(self) -> re.Pattern[str] | None:
        spellings = sorted({*self.vocabulary.special_tokens, *self._unusable}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @cached_property
    def special_token_names(self) -> dict[int, str]:
        """{id: text} of the special tokens, which have no bytes in a document."""
        return {token: content for content, token in self.vocabulary.special_tokens.items()}

    def to_files(self, *, with_start: bool = False) -> dict[str, bytes]:
        """Return {file name: content} of the files that are needed to load this tokenizer again.

        `with_start`: let the post-processor put `start_ids` before a text, for other libraries.
        """
        content: dict[str, Any] = {f"{role}_token": text for role, text in self._role_contents.items()}
        if self._named_stops and not with_start:
            content[STOP_TOKENS_KEY] = [self.special_token_names[token] for token in self.declared_stop_ids]
        files = {
            "tokenizer.json": self._json_with_start() if with_start else self._raw,
            "tokenizer_config.json": json.dumps(content, sort_keys=True, ensure_ascii=False).encode(),
        }
        return files if self._template is None else {**files, "chat_template.jinja": self._template.encode()}

    def _json_with_start(self) -> bytes:
        if self.start_ids == self._written_start_ids:
            return self._raw
        names = [self.special_token_names[number] for number in self.start_ids]
        content = json.loads(self._raw) | {"post_processor": start_post_processor(names, self.start_ids)}
        return json.dumps(content, ensure_ascii=False, indent=2).encode()

    def encode_bytes(self, byte_strings: Sequence[bytes]) -> list[NDArray[np.int32] | None]:
        """Return tokens with exactly the given bytes, also without UTF-8, as inside of a text; None: there are none."""
        results: list[NDArray[np.int32] | None] = [None] * len(byte_strings)
        if self.vocabulary.alphabet == BYTE_LEVEL:
            texts = [(at, text) for at, text in enumerate(map(_decode_or_none, byte_strings)) if text is not None]
            with self._backend_errors(), self._lock:
                normalizer = self._backend.normalizer
                self._backend.normalizer = None  # a token's bytes are normalized already
                try:
                    encodings = self._backend.encode_batch_fast([text for _, text in texts], add_special_tokens=False)
                finally:
                    self._backend.normalizer = normalizer
            for (at, _), encoding in zip(texts, encodings, strict=True):
                ids = encoding.ids
                if self._spells(ids, byte_strings[at]):
                    results[at] = np.array(ids, np.int32)
        for at, spelling in enumerate(byte_strings):
            if results[at] is None:
                results[at] = self._encode_bytes_with_model(spelling)
        return results

    def _spells(self, ids: list[int], spelling: bytes) -> bool:
        return b"".join(map(self.vocabulary.bytes_by_id.__getitem__, ids)) == spelling

    def _encode_bytes_with_model(self, spelling: bytes) -> NDArray[np.int32] | None:
        """Encode bytes with the model's merges, skipping the pre-tokenizer; byte by byte if that fails."""
        family = self.vocabulary.alphabet
        text = _decode_or_none(spelling)
        written: str | None
        if family == BYTE_LEVEL:
            written = "".join(BYTE_LEVEL_ENCODER[byte] for byte in spelling)
        elif text is None:
            written = None
        else:
            written = text.replace(" ", METASPACE_CHARACTER) if family == METASPACE else text
        if written:
            with self._backend_errors():
                ids = [token.id for token in self._backend.model.tokenize(written)]
            if ids and self._spells(ids, spelling):
                return np.array(ids, np.int32)
        table = self.vocabulary.token_of_bytes
        single = [table.get(bytes([byte])) for byte in spelling]
        if not single or any(token is None for token in single):
            return None
        return np.array(single, np.int32)


def _decode_or_none(spelling: bytes) -> str | None:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None
