"""Where the rows of new tokens come from: copied from one old token, combined from several, or neither."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xtk.projection.special_tokens import match_special_tokens
from xtk.projection.token_categories import CATEGORIES, token_categories
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.text.tokenizer import Tokenizer


class TokenSources:
    """The tokens of a new tokenizer, in terms of those of the model's old one.

    Args:
        new: the new tokenizer, V tokens.
        old: the tokenizer of the model, U tokens.
        kept: int32 [V], for a pruned vocabulary: the old id of each new token.
    """

    def __init__(self, new: Tokenizer, old: Tokenizer, kept: NDArray[np.int32] | None = None) -> None:
        self.new, self.old = new, old
        self.pair = VocabularyPair(new, old)
        if kept is not None:
            self.pair.__dict__["equal_ids"] = kept  # fills the cached property
        self._special_ids, counterparts = match_special_tokens(new, old, repeats_roles=True)
        # int32 [V], the old token with equal bytes, or the special token with the same role; -1: none.
        self.copied = self.pair.equal_ids.copy()
        if kept is None:
            self.copied[self._special_ids] = counterparts
            single, of_single = match_special_tokens(new, old)
            self.copied[single] = of_single  # a token of the same name before a further copy
            if new.text_fingerprint != old.text_fingerprint:
                self._copy_unused()
        # int32 [V], the same without further copies of an old token with several roles. With the rows of one token in
        # the head, the model would predict each of its copies where it predicted that token.
        self.copied_outputs = self.copied.copy()
        if kept is None:
            self.copied_outputs[np.setdiff1d(self._special_ids, single)] = -1

    def _copy_unused(self) -> None:
        """Let tokens that are never emitted have the rows of such tokens of the old tokenizer, or none."""
        old = self.old.vocabulary
        fallback = {old.bytes_by_id[token]: token for token in np.flatnonzero(old.byte_fallback_mask).tolist()}
        for token in self.unused_ids.tolist():
            spelling = self.new.vocabulary.bytes_by_id[token]
            copied = fallback.get(spelling, -1)
            self.copied[token] = -1 if copied == old.token_of_bytes.get(spelling) else copied

    @cached_property
    def unused_ids(self) -> NDArray[np.int64]:
        """Byte-fallback tokens of characters that have a separate token: a tokenizer never emits them.

        Their rows are those of the old tokenizer's, or a mean. With the row of the character a model would write both.
        """
        vocabulary = self.new.vocabulary
        fallback = np.flatnonzero(vocabulary.byte_fallback_mask)
        first = [vocabulary.token_of_bytes[vocabulary.bytes_by_id[token]] for token in fallback.tolist()]
        unused: NDArray[np.int64] = fallback[np.array(first, np.int64) != fallback]
        return unused

    def report(self, combined: NDArray[np.int32]) -> dict[str, object]:
        """Return numbers of tokens by category: copied, composed (the tokens `combined`), unknown."""
        composed = np.zeros(len(self.new), np.bool_)
        composed[combined] = True
        composed &= self.copied < 0
        special = np.zeros(len(self.new), np.bool_)
        special[self._special_ids] = True
        kinds = {
            "exact": (self.copied >= 0) & ~special,
            "special": special,
            "composed": composed,
            "unknown": (self.copied < 0) & ~composed,
        }
        categories = token_categories(self.new.vocabulary)
        by_category = {
            name: {"tokens": int((categories == at).sum())}
            | {kind: int((mask & (categories == at)).sum()) for kind, mask in kinds.items()}
            for at, name in enumerate(CATEGORIES)
            if (categories == at).any()
        }
        return {
            "tokens": len(self.new),
            **{kind: int(mask.sum()) for kind, mask in kinds.items()},
            "categories": by_category,
        }
