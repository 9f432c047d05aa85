"""Arrays that follow from two vocabularies alone, which all micro-batches of a run share."""

from __future__ import annotations

import hashlib
import weakref
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


class VocabularyArray:
    """An array that follows from two vocabularies alone; it travels once to a process and once to a device."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values  # the array, which must not change
        self.copies: dict[Any, Any] = {}  # by device, for `vocabulary_tensor`, and other tensors that follow from it

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> Any:
        """Send the array without the copies; a process that has it already keeps its own."""
        return _received_array, (self.values, self.digest)

    @cached_property
    def digest(self) -> str:
        """A digest of type and contents."""
        contents = np.ascontiguousarray(self.values)
        return f"{contents.dtype}:{hashlib.blake2b(contents.data, digest_size=16).hexdigest()}"


_RECEIVED: weakref.WeakValueDictionary[str, VocabularyArray] = weakref.WeakValueDictionary()  # by digest


def _received_array(values: NDArray[Any], digest: str) -> VocabularyArray:
    """Return the array that this process has with a digest, or a new one."""
    array = _RECEIVED.get(digest)
    if array is None:
        array = VocabularyArray(values)
        array.digest = digest
        _RECEIVED[digest] = array
    return array
