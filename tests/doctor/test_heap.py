"""What a heap keeps is what this machine's allocator says of the same sequence."""

from __future__ import annotations

import ctypes

import pytest

from xtk.doctor.heap_fragmentation_estimate import fragmentation_bytes

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc (2.33 and later) tells what its heap has"
)

MIB = 1 << 20
# Every other one stays: the holes are too small for what comes next.
HOLES = [
    *((number, 4 * MIB) for number in range(60)),
    *((number, -1) for number in range(0, 60, 2)),
    *((number, 5 * MIB) for number in range(60, 90)),
]


def test_what_fits_into_no_hole_is_kept_beside_the_holes():
    assert 100 * MIB < fragmentation_bytes(HOLES) < 250 * MIB


def test_what_is_given_back_at_once_is_not_kept(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    assert fragmentation_bytes(HOLES) < 2 * MIB


def test_of_one_after_the_other_little_is_kept():
    sequence = [event for number in range(100) for event in ((number, 4 * MIB), (number, -1))]
    assert fragmentation_bytes(sequence) < 40 * MIB  # of 400: what is small settles beside some of them
