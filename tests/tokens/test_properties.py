"""What holds of every tokenizer family and any text. Each generated text is held against all properties."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from expected_token_bytes import TRUTHS, assert_ends_where_it_could, assert_groups_spell, assert_whole
from hypothesis import HealthCheck, given, settings
from hypothesis_texts import FAMILIES, batches

from xtk.tokens.alignment import align
from xtk.tokens.alignment_numba import token_byte_ends
from xtk.tokens.normalization_changes import count_normalization_loss
from xtk.tokens.tokenizer import EncodedText, Tokenizer

# Texts in all, and texts made from one drawing of fragments.
SHORT, LONG = (400, 8), (20_000, 40)
# The other side: one that spells every byte, one with a space in front, one that drops spaces, one that composes.
PARTNERS = ["student", "metaspace", "word-piece", "composing"]


class Side:
    """A family's tokenizer, its backend once more without xtk, and the truth about it."""

    def __init__(self, families, name: str) -> None:
        self.name, self.truth = name, TRUTHS[name]
        self.tokenizer = Tokenizer(families[name])
        self.backend = tokenizers.Tokenizer.from_file(str(families[name] / "tokenizer.json"))
        self.backend.encode_special_tokens = True
        self.unknown = self.tokenizer.unknown_id
        self.controls = set(self.tokenizer.vocabulary.special_tokens.values()) - {self.unknown}


@pytest.fixture(scope="session")
def sides(families):
    return {name: Side(families, name) for name in FAMILIES}


def readable_spans(student_ends: list[int], teacher_ends: list[int]) -> list[list[int]]:
    """Slow twin: a span closes at every byte where a token ends on both sides."""
    spans = []
    first_student = first_teacher = 0
    for byte in sorted(set(student_ends) & set(teacher_ends) - {0}):
        # The first token that ends there; those after it spell nothing and join the next span.
        student, teacher = student_ends.index(byte) + 1, teacher_ends.index(byte) + 1
        spans.append([first_student, student, first_teacher, teacher])
        first_student, first_teacher = student, teacher
    return spans


def readable_byte_ends(spellings: list[bytes], text: bytes) -> list[int] | None:
    """Slow twin of byte_ends: None where the tokens do not spell the text."""
    whole = b"".join(spellings)
    added = whole == b" " + text
    if whole != text and not added:
        return None
    return [max(len(b"".join(spellings[: at + 1])) - added, 0) for at in range(len(spellings))]


def assert_tokens_true(side: Side, text: str, tokens: EncodedText) -> None:
    """One side of the alignment: ids are the backend's, ends are where the tokens' text ends."""
    assert_whole(text, tokens)
    ids = side.backend.encode(text, add_special_tokens=False).ids
    if side.controls.isdisjoint(ids):
        assert tokens.ids.tolist() == ids
    assert side.controls.isdisjoint(tokens.ids.tolist()), "a control token in the midst of a text"
    truth, vocabulary = side.truth, side.tokenizer.vocabulary
    if truth.bytes_spell and not (truth.escapes and "▁" in text):
        assert tokens.exact
    spellings = [vocabulary.bytes_of(token) for token in tokens.ids.tolist()]
    ends, exact = token_byte_ends(
        vocabulary.token_bytes, vocabulary.offsets, tokens.ids, np.frombuffer(text.encode(), np.uint8)
    )
    assert (ends.tolist() if exact else None) == readable_byte_ends(spellings, text.encode())
    assert tokens.exact == exact
    assert_groups_spell(truth, side.tokenizer, text, tokens)
    if len(text) <= 12 and side.unknown not in tokens.ids.tolist():
        assert_ends_where_it_could(truth, side.tokenizer, text, tokens)


def assert_spans_true(student: EncodedText, teacher: EncodedText) -> None:
    """Spans are the smallest, cover both sides once in order, and are the same seen from either side."""
    spans = align(student, teacher)
    assert spans.dtype == np.int32
    assert spans.tolist() == readable_spans(student.byte_ends.tolist(), teacher.byte_ends.tolist())
    assert align(teacher, student).tolist() == spans[:, [2, 3, 0, 1]].tolist()
    if not len(student.ids) or not len(teacher.ids):
        assert not len(spans)
        return
    edges = np.concatenate([[[0, 0]], spans[:, [1, 3]]])
    assert (spans[:, [0, 2]] == edges[:-1]).all()
    assert (np.diff(edges, axis=0) > 0).all()
    assert edges[-1].tolist() == [len(student.ids), len(teacher.ids)]
    assert (student.byte_ends[spans[:, 1] - 1] == teacher.byte_ends[spans[:, 3] - 1]).all()


def assert_one_to_one_with_itself(tokens: EncodedText) -> None:
    spans = align(tokens, tokens)
    # Tokens that spell nothing of the text join the span after them.
    assert spans[:, 1].tolist() == (np.flatnonzero(np.diff(tokens.byte_ends, prepend=0) > 0) + 1).tolist()
    assert (spans[:, :2] == spans[:, 2:]).all()


def assert_same(one: EncodedText, other: EncodedText) -> None:
    assert (one.ids.tolist(), one.byte_ends.tolist(), one.exact) == (
        other.ids.tolist(),
        other.byte_ends.tolist(),
        other.exact,
    )


def assert_all_properties(sides: dict[str, Side], name: str, texts: list[str]) -> None:
    side = sides[name]
    encoded = side.tokenizer.encode(texts)
    # In another order and company, and alone.
    for tokens, again in zip(encoded, reversed(side.tokenizer.encode(texts[::-1])), strict=True):
        assert_same(tokens, again)
    assert_same(encoded[-1], side.tokenizer.encode(texts[-1:])[0])
    others = [name for name in PARTNERS if name != side.name]
    partner = sides[others[len("".join(texts)) % len(others)]].tokenizer.encode(texts)
    for text, tokens, foreign in zip(texts, encoded, partner, strict=True):
        assert_tokens_true(side, text, tokens)
        assert_spans_true(tokens, foreign)
        assert_one_to_one_with_itself(tokens)
    found = count_normalization_loss(side.tokenizer, texts, encoded)
    assert found.num_characters == sum(map(len, texts))
    assert 0 <= found.lost <= found.num_characters
    changed = any(text and not tokens.exact for text, tokens in zip(texts, encoded, strict=True))
    # The spaces that "added-metaspace" puts in front of every stretch between added words are no loss.
    assert found.lost > 0 if changed and name != "added-metaspace" else changed or found.lost == 0


def run_cases(sides: dict[str, Side], name: str, cases: int, batch: int) -> None:
    count = 0

    @given(texts=batches(batch))
    @settings(max_examples=-(-cases // batch), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def hold(texts: list[str]) -> None:
        nonlocal count
        count += len(texts)
        assert_all_properties(sides, name, texts)

    hold()
    assert count >= cases
    print(f"{name}: {count:,} cases")


@pytest.mark.parametrize("name", FAMILIES)
def test_all_properties_hold_of_any_text(sides, name):
    run_cases(sides, name, *SHORT)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_all_properties_hold_of_twenty_thousand_texts(sides, name):
    run_cases(sides, name, *LONG)


def test_there_is_a_truth_for_every_family():
    assert set(TRUTHS) == set(FAMILIES)
