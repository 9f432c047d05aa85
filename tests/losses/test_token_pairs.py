"""Token pairs of gold, h-kl, simct and strict: those that the tokenizers emit."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from xtk.tokens.tokenizer import Tokenizer
from xtk.training.losses_per_teacher import DistillationTeacher


@dataclass
class Source:
    """What a teacher's cache knows of its tokenizer."""

    teacher_tokenizer: Tokenizer

    @property
    def header(self):
        own = self.teacher_tokenizer
        return {"teacher": {"embedding_rows": own.embedding_rows, "tokenizer": own.fingerprint}, "options": {}}


def emitted_characters(tokenizer: Tokenizer) -> dict[str, int]:
    """The token of each printable ASCII character inside of a text, where it is a token of its own."""
    found = {}
    for character in string.ascii_letters + string.digits + string.punctuation:
        encoded = tokenizer.encode([f"\n{character}"])[0]
        last = int(encoded.ids[-1])
        if tokenizer.vocabulary.bytes_of(last) == character.encode():
            found[character] = last
    return found


@pytest.mark.parametrize("kind", ["pairs", "projection"])
@pytest.mark.parametrize(
    ("student", "teacher"), [("metaspace", "pair"), ("pair", "metaspace"), ("mistral-v1", "llama3")]
)
def test_characters_are_paired_as_both_tokenizers_emit_them(request, kind, student, teacher):
    def tokenizer(name):
        if "-" in name or "llama" in name:
            return Tokenizer(request.getfixturevalue("real_data") / "tokenizers" / name)
        own = request.getfixturevalue(name)
        return Tokenizer(own if isinstance(own, Path) else own.teacher)

    one, other = tokenizer(student), tokenizer(teacher)
    space = DistillationTeacher("teacher", "teacher", Source(other), one).comparison_space(kind)
    ours, theirs = emitted_characters(one), emitted_characters(other)
    shared = sorted(set(ours) & set(theirs))
    assert len(shared) > 40
    partners = space.pairs.student_of_teacher
    assert [(one, int(partners[theirs[one]])) for one in shared] == [(one, ours[one]) for one in shared]
    assert {ours[one] for one in shared} <= set(space.pairs.paired_students.tolist())
    assert np.unique(partners[partners >= 0]).size == len(space.pairs.paired_students)
