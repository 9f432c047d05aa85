"""Two small vocabularies of byte strings, their partition, and texts in both, made without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from reference_byte_kl import Words

from xtk.projection.vocabulary_byte_partition import BytePartition, SortedVocabulary, sort_vocabulary

LETTERS = [b"a", b"b", b"\xc3", b"\xa9"]


def draw_spellings(draw: np.random.Generator, size: int) -> list[bytes]:
    """A token that spells nothing, letters, strings of letters; large ones have two alike, and one that is no token."""
    letters = LETTERS[: 2 if size < 12 else 4]
    strings: list[bytes] = []
    odd = [b"a", b""] if size >= 12 else []
    while len(strings) < size - 1 - len(letters) - len(odd):
        string = b"".join(letters[at] for at in draw.integers(0, len(letters), draw.integers(2, 5)))
        if string not in strings:
            strings.append(string)
    return [b"", *letters, *strings, *odd]


def spell(spellings: Sequence[bytes], text: bytes) -> list[int] | None:
    """The longest tokens that fit, one after the other; of tokens that are alike the first."""
    ids = []
    while text:
        fits = [token for token, spelling in enumerate(spellings) if spelling and text.startswith(spelling)]
        if not fits:
            return None
        ids.append(max(fits, key=lambda token: (len(spellings[token]), -token)))
        text = text[len(spellings[ids[-1]]) :]
    return ids


def draw_tokens(draw: np.random.Generator, spellings: Sequence[bytes], text: bytes) -> list[int]:
    """Some way to spell a text, rather in long tokens."""
    ids: list[int] = []
    while text:
        fits = [token for token, spelling in enumerate(spellings) if spelling and text.startswith(spelling)]
        sizes = np.array([len(spellings[token]) ** 2 for token in fits])
        ids.append(int(draw.choice(fits, p=sizes / sizes.sum())))
        text = text[len(spellings[ids[-1]]) :]
    return ids


def partition_of(student: list[bytes], teacher: list[bytes], V: int, U: int) -> tuple[Words, Words]:
    """Cells by joining each token with the first of its spelling on the other side; token 0 of both is the end."""
    if student == teacher:
        own = [token if spelling or token == 0 else -1 for token, spelling in enumerate(student)]
        cells = [own + [-1] * (V - len(own)), own + [-1] * (U - len(own))]
    else:
        parent = {("s", 0): ("t", 0), ("t", 0): ("t", 0)}

        def find(node: tuple[str, int]) -> tuple[str, int]:
            parent.setdefault(node, node)
            return node if parent[node] == node else find(parent[node])

        for name, own_side, foreign, other in (("s", student, "t", teacher), ("t", teacher, "s", student)):
            for token, spelling in enumerate(own_side):
                ids = spell(other, spelling) if spelling else None
                if spelling:
                    find((name, token))
                if ids:
                    parent[find((name, token))] = find((foreign, ids[0]))
        numbers: dict[tuple[str, int], int] = {}
        cells = [
            [numbers.setdefault(find((name, token)), len(numbers)) if (name, token) in parent else -1
             for token in range(width)]
            for name, width in (("s", V), ("t", U))
        ]  # fmt: skip

    def piece_cell(other: list[bytes], other_cells: list[int], piece: bytes) -> int:
        ids = spell(other, piece)
        return other_cells[ids[0]] if ids else -1

    return (
        Words(student, cells[0], lambda piece: piece_cell(teacher, cells[1], piece)),
        Words(teacher, cells[1], lambda piece: piece_cell(student, cells[0], piece)),
    )


def next_bytes_of(student: Words, teacher: Words) -> BytePartition:
    """What the losses are given of the same partition."""

    def side(words: Words) -> SortedVocabulary:
        cells = np.array(words.cells, np.int32)
        return sort_vocabulary(words.spellings, cells, lambda pieces: [words.cell_of_piece(piece) for piece in pieces])

    return BytePartition.from_vocabularies(side(student), side(teacher))
