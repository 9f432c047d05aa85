"""The alignment of two tokenisations of one text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.document import Document
from xtk.tokens.kernels import smallest_spans
from xtk.tokens.tokenizer import Encoded, Tokenizer


def align(student: Encoded, teacher: Encoded) -> NDArray[np.int32]:
    """Cut two tokenisations of one text into the smallest spans of equal bytes.

    Tokens that spell nothing (an added prefix) join the span after them. Where one side was cut
    short, the spans end with the common text.

    Returns:
        int32 [C, 4], `[s0, s1, t0, t1]`: student tokens `[s0, s1)` spell what teacher tokens `[t0, t1)`
        spell. Spans follow each other without a gap from token 0 on.
    """
    spans: NDArray[np.int32] = smallest_spans(student.ends, teacher.ends)
    return spans


class Sequence:
    """A document as one model reads it: start token, text, end token.

    Attributes:
        ids: int32 [T].
        ends: int32 [T], the byte where each token ends; 0 for the start token, the text's length for the end token.
        trained: bool [T], whether the token is predicted and carries a loss: not the first one, and
            only inside trained segments.
        starts: 1 if the first token is a start token, else 0.
        finished: whether the last token is the end token.
    """

    def __init__(
        self, ids: NDArray[np.int32], ends: NDArray[np.int32], trained: NDArray[np.bool_], starts: int, finished: bool
    ) -> None:
        self.ids, self.ends, self.trained, self.starts, self.finished = ids, ends, trained, starts, finished

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_stop(self) -> int:
        """The index after the last token of the text."""
        return len(self.ids) - int(self.finished)

    def text_tokens(self) -> Encoded:
        """Return the tokens of the text alone."""
        return Encoded(self.ids[self.starts : self.text_stop], self.ends[self.starts : self.text_stop])

    def cut(self, length: int) -> Sequence:
        """Return the first `length` tokens; the end token goes first."""
        if length >= len(self):
            return self
        return Sequence(self.ids[:length], self.ends[:length], self.trained[:length], self.starts, finished=False)


def sequences(tokenizer: Tokenizer, documents: list[Document]) -> list[Sequence]:
    """Tokenise documents as a model reads them.

    The start token is bos, or eos for tokenizers without a bos; the end token is eos. Without a start
    token the first token of a text is not predicted by anything and not trained.
    """
    encoded = tokenizer.encode([document.text for document in documents])
    start, end = tokenizer.start_id, tokenizer.end_id
    results = []
    for document, tokens in zip(documents, encoded, strict=True):
        front = [] if start is None else [start]
        back = [] if end is None or not document.ends else [end]
        size = int(tokens.ends[-1]) if len(tokens.ends) else 0
        trained = document.trained(tokens.ends)
        results.append(
            Sequence(
                ids=np.concatenate([np.array(front, np.int32), tokens.ids, np.array(back, np.int32)]),
                ends=np.concatenate([np.zeros(len(front), np.int32), tokens.ends, np.full(len(back), size, np.int32)]),
                trained=np.concatenate(
                    [np.zeros(len(front), np.bool_), trained, np.full(len(back), document.ends_trained, np.bool_)]
                ),
                starts=len(front),
                finished=bool(back),
            )
        )
        if not front and len(results[-1]):
            results[-1].trained[0] = False
    return results


def align_sequences(student: Sequence, teacher: Sequence) -> NDArray[np.int32]:
    """Align what two models read of one document: the text by bytes, the end token with the end token.

    Returns:
        int32 [C, 4], in positions of the sequences (the start token is position 0).
    """
    spans = align(student.text_tokens(), teacher.text_tokens())
    spans = spans + np.array([student.starts, student.starts, teacher.starts, teacher.starts], np.int32)
    if student.finished and teacher.finished:
        last = np.array([[student.text_stop, len(student), teacher.text_stop, len(teacher)]], np.int32)
        spans = np.concatenate([spans, last])
    return spans
