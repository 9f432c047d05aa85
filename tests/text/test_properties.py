"""Properties that hold for every tokenizer family and any text; each generated text is checked for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from expected_token_bytes import (
    GROUND_TRUTHS,
    assert_ends_at_possible_positions,
    assert_groups_match_text,
    assert_valid_byte_ends,
)
from hypothesis import HealthCheck, given, settings
from hypothesis_texts import FAMILIES, batches

from xtk.text.alignment import align
from xtk.text.alignment_numba import token_byte_ends
from xtk.text.normalization_changes import count_normalization_loss
from xtk.text.tokenizer import EncodedText, Tokenizer

# (number of texts, texts from one sample of fragments)
DEFAULT_SIZE, LONG_SIZE = (400, 8), (20_000, 40)
# Families on the other side: lossless, with a space in front, dropping spaces, composing characters.
PARTNERS = ["student", "metaspace", "word-piece", "composing"]


class Family:
    """A family's tokenizer, its backend without xtk, and its ground truth."""

    def __init__(self, families, name: str) -> None:
        self.name, self.truth = name, GROUND_TRUTHS[name]
        self.tokenizer = Tokenizer(families[name])
        self.backend = tokenizers.Tokenizer.from_file(str(families[name] / "tokenizer.json"))
        self.backend.encode_special_tokens = True
        self.unknown = self.tokenizer.unknown_id
        self.control_ids = set(self.tokenizer.vocabulary.special_tokens.values()) - {self.unknown}


@pytest.fixture(scope="session")
def tested_families(families):
    return {name: Family(families, name) for name in FAMILIES}


def reference_spans(student_ends: list[int], teacher_ends: list[int]) -> list[list[int]]:
    """Reference implementation: a span ends at every byte where a token ends on both sides."""
    spans = []
    first_student = first_teacher = 0
    for end in sorted(set(student_ends) & set(teacher_ends) - {0}):
        # The first token that ends at this byte; later ones have no bytes of the text and join the next span.
        student, teacher = student_ends.index(end) + 1, teacher_ends.index(end) + 1
        spans.append([first_student, student, first_teacher, teacher])
        first_student, first_teacher = student, teacher
    return spans


def reference_byte_ends(spellings: list[bytes], text: bytes) -> list[int] | None:
    """Reference implementation of byte ends; None where the tokens do not decode to the text."""
    joined = b"".join(spellings)
    space_added = joined == b" " + text
    if joined != text and not space_added:
        return None
    return [max(len(b"".join(spellings[: index + 1])) - space_added, 0) for index in range(len(spellings))]


def assert_tokens_correct(family: Family, text: str, tokens: EncodedText) -> None:
    """Check one side of the alignment: ids are those of the backend, ends are the ends of the tokens' text."""
    assert_valid_byte_ends(text, tokens)
    ids = family.backend.encode(text, add_special_tokens=False).ids
    if family.control_ids.isdisjoint(ids):
        assert tokens.ids.tolist() == ids
    assert family.control_ids.isdisjoint(tokens.ids.tolist()), "a control token in the midst of a text"
    truth, vocabulary = family.truth, family.tokenizer.vocabulary
    if truth.lossless and not (truth.metaspace and "▁" in text):
        assert tokens.exact
    spellings = [vocabulary.bytes_of(token) for token in tokens.ids.tolist()]
    ends, exact = token_byte_ends(
        vocabulary.token_bytes, vocabulary.offsets, tokens.ids, np.frombuffer(text.encode(), np.uint8)
    )
    assert (ends.tolist() if exact else None) == reference_byte_ends(spellings, text.encode())
    assert tokens.exact == exact
    assert_groups_match_text(truth, family.tokenizer, text, tokens)
    if len(text) <= 12 and family.unknown not in tokens.ids.tolist():
        assert_ends_at_possible_positions(truth, family.tokenizer, text, tokens)


def assert_spans_correct(student: EncodedText, teacher: EncodedText) -> None:
    """Check that spans are minimal, cover both sides once in order, and are the same if the sides are swapped."""
    spans = align(student, teacher)
    assert spans.dtype == np.int32
    assert spans.tolist() == reference_spans(student.byte_ends.tolist(), teacher.byte_ends.tolist())
    assert align(teacher, student).tolist() == spans[:, [2, 3, 0, 1]].tolist()
    if not len(student.ids) or not len(teacher.ids):
        assert not len(spans)
        return
    boundaries = np.concatenate([[[0, 0]], spans[:, [1, 3]]])
    assert (spans[:, [0, 2]] == boundaries[:-1]).all()
    assert (np.diff(boundaries, axis=0) > 0).all()
    assert boundaries[-1].tolist() == [len(student.ids), len(teacher.ids)]
    assert (student.byte_ends[spans[:, 1] - 1] == teacher.byte_ends[spans[:, 3] - 1]).all()


def assert_one_to_one_with_itself(tokens: EncodedText) -> None:
    spans = align(tokens, tokens)
    # Tokens without bytes of the text join the next span.
    assert spans[:, 1].tolist() == (np.flatnonzero(np.diff(tokens.byte_ends, prepend=0) > 0) + 1).tolist()
    assert (spans[:, :2] == spans[:, 2:]).all()


def assert_same(first: EncodedText, second: EncodedText) -> None:
    assert (first.ids.tolist(), first.byte_ends.tolist(), first.exact) == (
        second.ids.tolist(),
        second.byte_ends.tolist(),
        second.exact,
    )


def assert_all_properties(tested_families: dict[str, Family], name: str, texts: list[str]) -> None:
    family = tested_families[name]
    encoded = family.tokenizer.encode(texts)
    # The result does not depend on the order of texts, nor on the other texts.
    for tokens, tokens_of_reversed in zip(encoded, reversed(family.tokenizer.encode(texts[::-1])), strict=True):
        assert_same(tokens, tokens_of_reversed)
    assert_same(encoded[-1], family.tokenizer.encode(texts[-1:])[0])
    partner_names = [name for name in PARTNERS if name != family.name]
    encoded_by_partner = tested_families[partner_names[len("".join(texts)) % len(partner_names)]].tokenizer.encode(
        texts
    )
    for text, tokens, partner_tokens in zip(texts, encoded, encoded_by_partner, strict=True):
        assert_tokens_correct(family, text, tokens)
        assert_spans_correct(tokens, partner_tokens)
        assert_one_to_one_with_itself(tokens)
    loss = count_normalization_loss(family.tokenizer, texts, encoded)
    assert loss.num_characters == sum(map(len, texts))
    assert 0 <= loss.lost <= loss.num_characters
    changed = any(text and not tokens.exact for text, tokens in zip(texts, encoded, strict=True))
    # The spaces that "added-metaspace" adds before the text after each added word are not counted as a loss.
    assert loss.lost > 0 if changed and name != "added-metaspace" else changed or loss.lost == 0


def check_texts(tested_families: dict[str, Family], name: str, num_texts: int, batch_size: int) -> None:
    count = 0

    @given(texts=batches(batch_size))
    @settings(
        max_examples=-(-num_texts // batch_size), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    def check(texts: list[str]) -> None:
        nonlocal count
        count += len(texts)
        assert_all_properties(tested_families, name, texts)

    check()
    assert count >= num_texts
    print(f"{name}: {count:,} cases")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_properties_hold_for_any_text(tested_families, name):
    check_texts(tested_families, name, *DEFAULT_SIZE)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_all_properties_hold_for_twenty_thousand_texts(tested_families, name):
    check_texts(tested_families, name, *LONG_SIZE)


def test_every_family_has_a_ground_truth():
    assert set(GROUND_TRUTHS) == set(FAMILIES)
