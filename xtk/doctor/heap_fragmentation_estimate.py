"""Estimate of heap fragmentation: replays a sequence of allocations with the C library's allocator.

glibc returns allocations above its threshold (which grows to 32 MiB) at once, and others when the end of the heap is
free. Before 2.38 its `posix_memalign`, which torch calls, allocates more than it needs and frees the excess, where
small objects are then placed: the hole no longer fits a tensor of the same size. A process that allocates and frees
tensors of a few MiB therefore holds up to 50 % more. The replay never touches its memory, so it takes none.

This file runs as a script in a new process with a fresh heap, with the environment variables of this process
(`MALLOC_MMAP_THRESHOLD_`).
"""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys

# Sizes of the small objects that are allocated and freed with a tensor: storage, autograd node. Chosen to agree with
# three measured runs (docs/explanation/numbers.md, doctor).
SMALL_OBJECT_BYTES = (16, 48, 80)
ALIGNMENT = 64  # bytes, as torch asks for
REPLAY_ROUNDS = 3


def fragmentation_bytes(events: list[tuple[int, int]]) -> int:
    """Return the bytes by which the heap exceeds the peak of live bytes; 0 if the allocator has no statistics.

    Args:
        events: (number, bytes) for an allocation, (number, -1) for its release; the rest is released at the end.
    """
    flat = array.array("q", [number for event in events for number in event])
    command = [sys.executable, "-I", __file__]
    done = subprocess.run(command, input=flat.tobytes(), capture_output=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


class _MallocStatistics(ctypes.Structure):
    """Result of glibc's mallinfo2."""

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

    def heap_bytes() -> int:
        statistics = library.mallinfo2()
        return int(statistics.arena + statistics.hblkhd)

    before, grown, most, now = heap_bytes(), 0, 0, 0
    for _ in range(REPLAY_ROUNDS):
        allocated: dict[int, tuple[int, list[int]]] = {}

        def release(number: int, allocated: dict[int, tuple[int, list[int]]] = allocated) -> int:
            size, addresses = allocated.pop(number)
            for address in addresses:
                library.free(address)
            return size

        for number, size in zip(flat[::2], flat[1::2], strict=True):
            if size < 0:
                now -= release(number)
                continue
            address = ctypes.c_void_p()
            if library.posix_memalign(ctypes.byref(address), ALIGNMENT, max(size, 1)):
                raise MemoryError
            allocated[number] = (
                size,
                [int(address.value or 0), *(library.malloc(small) for small in SMALL_OBJECT_BYTES)],
            )
            now += size
            most, grown = max(most, now), max(grown, heap_bytes() - before)
        for number in list(allocated):
            now -= release(number)
    return max(0, grown - most)


if __name__ == "__main__":
    sys.stdout.write(str(_replay_allocations(array.array("q", sys.stdin.buffer.read()))))
