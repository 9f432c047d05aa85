"""Token pairs of gold, h-kl, simct and strict: those that the tokenizers emit."""

from __future__ import annotations

import json
import re
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from xtk.batches.losses_per_teacher import DistillationTeacher
from xtk.projection.vocabulary_byte_partition import build_byte_partition
from xtk.text.tokenizer import Tokenizer


@dataclass
class CacheSource:
    """The part of a teacher cache that describes the tokenizer."""

    teacher_tokenizer: Tokenizer

    @property
    def header(self):
        own = self.teacher_tokenizer
        return {"teacher": {"embedding_rows": own.embedding_rows, "tokenizer": own.fingerprint}, "options": {}}


def emitted_characters(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the token of each printable ASCII character that is a single token inside of a text."""
    found = {}
    for character in string.ascii_letters + string.digits + string.punctuation:
        encoded = tokenizer.encode([f"\n{character}"])[0]
        last = int(encoded.ids[-1])
        if tokenizer.vocabulary.bytes_of(last) == character.encode():
            found[character] = last
    return found


@pytest.mark.slow
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

    student_tokenizer, teacher_tokenizer = tokenizer(student), tokenizer(teacher)
    space = DistillationTeacher(
        "teacher", "teacher", CacheSource(teacher_tokenizer), student_tokenizer
    ).comparison_space(kind)
    student_tokens, teacher_tokens = emitted_characters(student_tokenizer), emitted_characters(teacher_tokenizer)
    shared = sorted(set(student_tokens) & set(teacher_tokens))
    assert len(shared) > 40
    partners = space.pairs.student_of_teacher
    assert {text: int(partners[teacher_tokens[text]]) for text in shared} == {
        text: student_tokens[text] for text in shared
    }
    assert {student_tokens[text] for text in shared} <= set(space.pairs.paired_students.values.tolist())
    assert np.unique(partners[partners >= 0]).size == len(space.pairs.paired_students)


def test_byte_fallback_tokens_are_matched_at_any_ids(metaspace, tmp_path):
    # The same tokenizer twice, with the byte-fallback tokens at the beginning and at the end of the vocabulary.
    content = json.loads((metaspace / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    specials = {added["content"] for added in content["added_tokens"]}
    fallback = [token for token in tokens if re.fullmatch("<0x[0-9A-F]{2}>", token)]
    others = [token for token in tokens if token not in specials and token not in fallback]
    tokenizers, vocabularies = [], []
    for name, ordered in (("first", fallback + others), ("last", others + fallback)):
        free = [vocabulary[token] for token in tokens if token not in specials]
        content["model"]["vocab"] = vocabulary | dict(zip(ordered, free, strict=True))
        shutil.copytree(metaspace, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        tokenizers.append(Tokenizer(tmp_path / name))
        vocabularies.append(content["model"]["vocab"])
    assert len(fallback) > 100
    for student, teacher in ((0, 1), (1, 0)):
        found = build_byte_partition(tokenizers[student], tokenizers[teacher]).longest_prefixes
        for token in fallback + others:
            student_id, teacher_id = vocabularies[student][token], vocabularies[teacher][token]
            assert found.student_cells[student_id] == found.teacher.token_cells[teacher_id] != -1, token
