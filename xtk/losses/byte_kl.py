"""byte-kl: what each side says about the next bytes, wherever one of them ends a token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.cells import Alternatives, Cells, Example, Ground
from xtk.projection.next_bytes import NextBytes


class ByteKL:
    """byte-kl: `KL(t(next bytes) | s(next bytes))` at each token boundary of either side, averaged over them.

    What comes next, given the bytes so far: with `E` the probability, at a side's last boundary, of the token that
    ends here and `M` that of the tokens that begin like it and go on, it is `(E D + F) / (E + M)`; `D` is what the
    side predicts here, `F` what those longer tokens leave when they are cut. Inside of a token, `E / (E + M)` is
    mass of which nothing is known. Both sides are mapped to cells: a token and the first token with which the other
    side spells it are in one. Mass that is not known, or that the other side does not name, is in the other cell.
    """

    ground = "bytes"
    item = "token boundaries of either side"
    unit = "nats"
    asks = "distribution"

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a boundary of the text that both sides spell, in its order."""
        from xtk.losses.byte_kernels import HERE, PAST, STUDENT, Path, Said, fill_byte_cells, find_items
        from xtk.losses.sampled_values import exact_stops, mean_surprisals

        signal = example.signal
        assert isinstance(ground, NextBytes)
        assert signal is not None
        student = Path(example.student_ids, _where(len(example.student_ids), example.rows + 1))
        teacher = Path(example.teacher_ids, _where(len(example.teacher_ids), signal.positions))
        items = find_items(ground.student, ground.teacher, student, teacher, example.spans)
        stops = exact_stops(signal)
        surprisals = mean_surprisals(signal.offsets, stops, signal.logprobs, signal.entropy)
        said = Said(signal.offsets, stops, signal.ids, signal.logprobs, signal.tail_mass, surprisals)
        cell_offsets, entry_offsets, probs, rows, tokens, *runs, corrections = fill_byte_cells(
            ground.student, ground.teacher, ground.continuations, ground.member_offsets, ground.members, said, items
        )
        here, past = items[:, STUDENT + HERE], items[:, STUDENT + PAST]
        return Cells(
            cell_offsets=cell_offsets,
            entry_offsets=entry_offsets,
            teacher_probs=probs,
            rows=rows,
            tokens=tokens,
            log_weights=np.zeros(len(tokens), np.float32),
            item_rows=np.maximum(here, past).astype(np.int32),
            alternatives=Alternatives(past.astype(np.int32), here < 0, ground.student.order, *runs),
            corrections=None if signal.exact is None else corrections,
        )


def _where(length: int, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return int64 [length], where in `positions` each number below `length` stands; -1: nowhere."""
    found = np.full(length, -1, np.int64)
    found[positions] = np.arange(len(positions))
    return found
