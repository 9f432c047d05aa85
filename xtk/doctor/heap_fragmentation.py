"""What a heap keeps beyond what is asked of it: a sequence of allocations is given to this machine's own allocator.

glibc gives memory of more than its threshold (which grows to 32 MiB) back at once, and everything else when the end of
the heap is free. Before 2.38 its `posix_memalign`, which torch calls, asks for more than it needs and returns the rest,
and small objects settle in the rest: a hole then no longer takes what was in it. So a process that makes and drops
tensors of a few MiB holds up to half as much again. Nothing is written to the memory, which hence takes none.

This file is run as a script, in a process without a heap of its own, under the variables (`MALLOC_MMAP_THRESHOLD_`) of
this one.
"""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys

# Of the objects that are made with a tensor and dropped with it: its storage, its place in the graph. Ours: the first
# of four guesses that three runs agreed with (docs/explanation/numbers.md, doctor).
SMALL_OBJECT_BYTES = (16, 48, 80)
ALIGNMENT = 64  # bytes, as torch asks for
REPLAY_ROUNDS = 3


def fragmentation_bytes(events: list[tuple[int, int]]) -> int:
    """Return the bytes that a heap grows to beyond the most that is held at a time; 0 where the allocator does not say.

    Args:
        events: (number, bytes) of what is made, (number, -1) of what is dropped; what is left is dropped at the end.
    """
    flat = array.array("q", [number for event in events for number in event])
    command = [sys.executable, "-I", __file__]
    done = subprocess.run(command, input=flat.tobytes(), capture_output=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


class _MallocStatistics(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


def _replay_allocations(flat: array.array[int]) -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocStatistics
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]

    def whole() -> int:
        told = library.mallinfo2()
        return int(told.arena + told.hblkhd)

    before, grown, most, now = whole(), 0, 0, 0
    for _ in range(REPLAY_ROUNDS):
        there: dict[int, tuple[int, list[int]]] = {}

        def drop(number: int, there: dict[int, tuple[int, list[int]]] = there) -> int:
            size, places = there.pop(number)
            for place in places:
                library.free(place)
            return size

        for number, size in zip(flat[::2], flat[1::2], strict=True):
            if size < 0:
                now -= drop(number)
                continue
            place = ctypes.c_void_p()
            if library.posix_memalign(ctypes.byref(place), ALIGNMENT, max(size, 1)):
                raise MemoryError
            there[number] = size, [int(place.value or 0), *(library.malloc(small) for small in SMALL_OBJECT_BYTES)]
            now += size
            most, grown = max(most, now), max(grown, whole() - before)
        for number in list(there):
            now -= drop(number)
    return max(0, grown - most)


if __name__ == "__main__":
    sys.stdout.write(str(_replay_allocations(array.array("q", sys.stdin.buffer.read()))))
