"""Occurrences of each token of a tokenizer in a corpus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

BATCH_DOCUMENTS = 256


def count_tokens(tokenizer: Tokenizer, corpus: Iterable[Document]) -> NDArray[np.int64]:
    """Return int64 [U], how often each token occurs in the documents, as the model reads them."""
    counts = np.zeros(len(tokenizer), np.int64)
    documents = iter(corpus)
    has_text = False
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        has_text = has_text or any(document.text for document in batch)
        for sequence in tokenize_documents(tokenizer, batch):
            counts += np.bincount(sequence.ids, minlength=len(counts))
    if not has_text:
        raise XtkError(
            "the data of --keep-vocabulary contains no text", hint="use data with a non-empty text in at least one row"
        )
    return counts
