"""Two small random vocabularies of byte strings, their partition, and token sequences, without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from reference_byte_kl import ReferenceVocabulary

from xtk.projection.vocabulary_byte_partition import BytePartition, SortedVocabulary, sort_vocabulary

LETTERS = [b"a", b"b", b"\xc3", b"\xa9"]


def random_spellings(rng: np.random.Generator, size: int) -> list[bytes]:
    """Return an empty token, letters and random strings of them; from size 12 on, also duplicates of two tokens."""
    letters = LETTERS[: 2 if size < 12 else 4]
    strings: list[bytes] = []
    duplicates = [b"a", b""] if size >= 12 else []
    while len(strings) < size - 1 - len(letters) - len(duplicates):
        string = b"".join(letters[index] for index in rng.integers(0, len(letters), rng.integers(2, 5)))
        if string not in strings:
            strings.append(string)
    return [b"", *letters, *strings, *duplicates]


def greedy_encode(spellings: Sequence[bytes], text: bytes) -> list[int] | None:
    """Return the ids of the longest matching tokens, the first of equal ones; None if a byte matches none."""
    ids = []
    while text:
        matching = [token for token, spelling in enumerate(spellings) if spelling and text.startswith(spelling)]
        if not matching:
            return None
        ids.append(max(matching, key=lambda token: (len(spellings[token]), -token)))
        text = text[len(spellings[ids[-1]]) :]
    return ids


def random_encode(rng: np.random.Generator, spellings: Sequence[bytes], text: bytes) -> list[int]:
    """Return a random tokenization of a text, in which long tokens are more likely."""
    ids: list[int] = []
    while text:
        matching = [token for token, spelling in enumerate(spellings) if spelling and text.startswith(spelling)]
        sizes = np.array([len(spellings[token]) ** 2 for token in matching])
        ids.append(int(rng.choice(matching, p=sizes / sizes.sum())))
        text = text[len(spellings[ids[-1]]) :]
    return ids


def partition_vocabularies(
    student: list[bytes], teacher: list[bytes], V: int, U: int
) -> tuple[ReferenceVocabulary, ReferenceVocabulary]:
    """Return both vocabularies; cells join a token with the first token of its encoding by the other; 0 is the end."""
    if student == teacher:
        own_cells = [token if spelling or token == 0 else -1 for token, spelling in enumerate(student)]
        cells = [own_cells + [-1] * (V - len(own_cells)), own_cells + [-1] * (U - len(own_cells))]
    else:
        parent = {("s", 0): ("t", 0), ("t", 0): ("t", 0)}

        def find(node: tuple[str, int]) -> tuple[str, int]:
            parent.setdefault(node, node)
            return node if parent[node] == node else find(parent[node])

        for side, own_spellings, other_side, other_spellings in (
            ("s", student, "t", teacher),
            ("t", teacher, "s", student),
        ):
            for token, spelling in enumerate(own_spellings):
                ids = greedy_encode(other_spellings, spelling) if spelling else None
                if spelling:
                    find((side, token))
                if ids:
                    parent[find((side, token))] = find((other_side, ids[0]))
        cell_numbers: dict[tuple[str, int], int] = {}
        cells = [
            [cell_numbers.setdefault(find((side, token)), len(cell_numbers)) if (side, token) in parent else -1
             for token in range(width)]
            for side, width in (("s", V), ("t", U))
        ]  # fmt: skip

    def piece_cell(other_spellings: list[bytes], other_cells: list[int], piece: bytes) -> int:
        ids = greedy_encode(other_spellings, piece)
        return other_cells[ids[0]] if ids else -1

    return (
        ReferenceVocabulary(student, cells[0], lambda piece: piece_cell(teacher, cells[1], piece)),
        ReferenceVocabulary(teacher, cells[1], lambda piece: piece_cell(student, cells[0], piece)),
    )


def make_byte_partition(student: ReferenceVocabulary, teacher: ReferenceVocabulary) -> BytePartition:
    """Return the partition of both vocabularies as the losses read it."""

    def sort_side(vocabulary: ReferenceVocabulary) -> SortedVocabulary:
        cells = np.array(vocabulary.cells, np.int32)
        return sort_vocabulary(
            vocabulary.spellings, cells, lambda pieces: [vocabulary.cell_of_piece(piece) for piece in pieces]
        )

    return BytePartition.from_vocabularies(sort_side(student), sort_side(teacher))
