"""Isolation of an unprivileged Linux process: namespaces, resource limits, and a filter of system calls (seccomp).

Only the standard library is imported: the processes of the sandbox start without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD = 0x00010000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY = 1
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR = 442  # the same number on every architecture, as for all system calls since Linux 5.1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
NOBODY = 65534

_LIBC = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library; OSError: it returned -1."""
    packed = [ctypes.c_ulong(value & 2**64 - 1) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(_LIBC, name)(*packed))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind-mount a folder."""
    words = [None if word is None else word.encode() for word in (kind, options)]
    call_libc("mount", source.encode(), target.encode(), words[0], flags, words[1])


def enter_namespaces(flags: int, proc: int) -> None:
    """Enter new namespaces (flags of clone(2)); a new user namespace maps only the current user and group."""
    user, group = os.geteuid(), os.getegid()
    call_libc("unshare", flags)
    if flags & CLONE_NEWUSER:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"),
        ):  # fmt: skip
            file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
            os.write(file, text.encode())
            os.close(file)


def make_read_only(mount_point: str, recursive: bool) -> None:
    """Make a mount read-only, with the mounts below it if `recursive`."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call_libc("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, mount_point.encode(), flags, attributes, len(attributes))


def enter_new_root(new_root: str, readable: Sequence[str]) -> None:
    """Change to a new root with a few read-only folders, /dev/null and /dev/urandom, and unmount the old one."""
    devices = ("/dev/null", "/dev/urandom")  # no /dev/zero: its shared mappings count for no process
    wanted = [path for path in dict.fromkeys([*readable, *devices]) if Path(path).exists()]
    opened = {path: os.open(path, os.O_PATH) for path in wanted}  # before the new root hides them
    call_libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, file in opened.items():
        target = Path(new_root + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(f"/proc/self/fd/{file}").is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        mount(f"/proc/self/fd/{file}", str(target), None, MS_BIND | MS_REC)
        make_read_only(str(target), recursive=True)
        os.close(file)
    Path(new_root, "own").mkdir()
    Path(new_root, "own").chmod(0o777)
    os.chdir(new_root)
    call_libc("pivot_root", b".", b".")
    call_libc("umount2", b".", MNT_DETACH)
    os.chdir("/")
    make_read_only("/", recursive=False)


def drop_capabilities() -> None:
    """Drop all capabilities, also those in a new user namespace."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call_libc("capset", header, none)


def set_resource_limits(seconds: float, memory: int, processes: int, file_size: int, files: int) -> None:
    """Set limits, which subprocesses inherit and cannot raise; `memory`: bytes of address space per process."""
    for name, value in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (value, value))


# Numbers of system calls: x86_64, aarch64. None: the architecture has no such call.
_REACHING_OUT: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # Memory that counts for no process: anonymous files, pages in pipes, large buffers.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75), "io_setup": (206, 0),
    "setsockopt": (54, 208),  # could raise socket buffers above `BYTES_PER_OPEN_FILE`
}  # fmt: skip
# Without namespaces: also refuse all changes of files, signals and new processes.
_CHANGING: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "openat2": (437, 437), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None),
    "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "mknod": (133, None), "mknodat": (259, 33),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "execveat": (322, 281), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "setpriority": (141, 140), "sched_setattr": (314, 274), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
}  # fmt: skip
_OPEN, _OPENAT, _CLONE, _CLONE3, _IOCTL = (2, None), (257, 56), (56, 220), (435, 435), (16, 29)
_MMAP = (9, 222)
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_TIOCSTI = 0x5412  # types into a terminal
# Input on a file signals its owner, which may be any process of the user: F_SETOWN, F_SETSIG, F_SETOWN_EX.
_FCNTL, _SIGNAL_OWNERS = (72, 25), (8, 10, 15)
_SIGNAL_OWNER_REQUESTS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP


def install_seccomp_filter(without_namespaces: bool) -> None:
    """Refuse the system calls that reach outside of the process, permanently; a refused call fails with EPERM.

    `without_namespaces`: also refuse to change files, start or signal processes. OSError: the kernel has no seccomp, or
    the architecture is not in the table.
    """
    code = seccomp_program(without_namespaces)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call_libc("prctl", PR_SET_SECCOMP, 2, head, 0, 0)


@functools.cache
def seccomp_program(without_namespaces: bool) -> bytes:
    """Return the filter of `install_seccomp_filter` as classic BPF."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"the sandbox supports {' and '.join(_ARCHITECTURES)}, not {platform.machine()}")
    column, architecture = _ARCHITECTURES[platform.machine()]
    forbidden = {**_REACHING_OUT, **(_CHANGING if without_namespaces else {})}
    program = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _EPERM),  # x32
    ]  # fmt: skip

    def refuse(number: int | None, error: int = _EPERM) -> None:
        if number is not None:
            program.extend([(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)])

    def refuse_if(number: int | None, argument: int, bits: int, wanted: bool = True) -> None:
        """Refuse if the argument has one of the bits; with wanted=False, if it has none of the bits."""
        if number is not None:
            hit, miss = (0, 1) if wanted else (1, 0)
            program.extend([
                (_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * argument), (_ANY_OF, hit, miss, bits),
                (_RETURN, 0, 0, _ERRNO | _EPERM), (_LOAD, 0, 0, 0),
            ])  # fmt: skip

    def refuse_values(number: int | None, argument: int, values: Sequence[int]) -> None:
        """Refuse if the argument has one of the values."""
        if number is not None:
            program.extend([(_EQUAL, 0, len(values) + 3, number), (_LOAD, 0, 0, 16 + 8 * argument)])
            for left, value in zip(reversed(range(len(values))), values, strict=True):
                program.append((_EQUAL, left, 0 if left else 1, value))
            program.extend([(_RETURN, 0, 0, _ERRNO | _EPERM), (_LOAD, 0, 0, 0)])

    for numbers in forbidden.values():
        refuse(numbers[column])
    refuse(_CLONE3[column], _ENOSYS)  # a filter cannot read its flags; the C library falls back to clone
    refuse_if(_CLONE[column], 0, CLONE_NEWUSER)
    # Anonymous shared memory: its pages stay allocated after munmap while one page is mapped.
    program.extend([
        (_EQUAL, 0, 5, _MMAP[column]), (_LOAD, 0, 0, 16 + 8 * 3), (_ANY_OF, 0, 2, _MAP_ANONYMOUS),
        (_ANY_OF, 0, 1, _MAP_SHARED), (_RETURN, 0, 0, _ERRNO | _EPERM), (_LOAD, 0, 0, 0),
    ])  # fmt: skip
    if without_namespaces:
        refuse_if(_CLONE[column], 0, CLONE_THREAD, wanted=False)
        refuse_if(_OPEN[column], 1, _WRITES)
        refuse_if(_OPENAT[column], 2, _WRITES)
        refuse_values(_FCNTL[column], 1, _SIGNAL_OWNERS)
        refuse_values(_IOCTL[column], 1, _SIGNAL_OWNER_REQUESTS)
    program.extend([(_EQUAL, 0, 3, _IOCTL[column] or 0), (_LOAD, 0, 0, 24), (_EQUAL, 0, 1, _TIOCSTI)])
    program.extend([(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)])
    return b"".join(struct.pack("HBBI", *step) for step in program)


def process_tree(process: int, proc: int) -> list[int]:
    """Return a process and all its descendants, also those started by its threads."""
    processes, todo = list[int](), [process]
    while todo:
        processes.append(todo.pop())
        for task in _list_proc_folder(f"{processes[-1]}/task", proc):
            text = _content(f"{processes[-1]}/task/{task}/children", proc) or b""
            todo += [int(word) for word in text.split() if int(word) not in processes]
    return processes


BYTES_PER_OPEN_FILE = 512 << 10  # the buffer of a pipe or socket, which /proc attributes to no process


def memory_upper_bound(processes: Sequence[int], proc: int) -> int:
    """Return a cheap upper bound of `memory_in_use`: shared pages count once per process."""
    total = 0
    for process in processes:
        words = (_content(f"{process}/statm", proc) or b"0 0").split()
        total += int(words[1]) * resource.getpagesize() + _bytes_of_open_files(process, proc)
    return total


def _bytes_of_open_files(process: int, proc: int) -> int:
    return len(_list_proc_folder(f"{process}/fd", proc)) * BYTES_PER_OPEN_FILE


def memory_in_use(processes: Sequence[int], proc: int) -> int:
    """Return the bytes that processes use together.

    Counts RAM and swap; a page that several of the processes map counts once. An open file counts
    `BYTES_PER_OPEN_FILE`. A process whose pages cannot be read counts with its resident set size.
    """
    counted = (b"Pss:", b"SwapPss:", b"Private_Hugetlb:", b"Shared_Hugetlb:")
    total = 0
    for process in processes:
        text = _content(f"{process}/smaps_rollup", proc)
        if text is None:
            total += memory_upper_bound([process], proc)
            continue
        rows = [line.split() for line in text.splitlines() if line.startswith(counted)]
        total += 1024 * sum(int(row[1]) for row in rows) + _bytes_of_open_files(process, proc)
    return total


def _content(path: str, proc: int) -> bytes | None:
    """Return the content of a file in /proc; None if it cannot be read or its process has ended."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY, dir_fd=proc)
        try:
            return os.read(file, 1 << 16)
        finally:
            os.close(file)
    return None


def _list_proc_folder(path: str, proc: int) -> list[str]:
    """Return the names in a folder of /proc; an empty list if it cannot be read or its process has ended."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            return os.listdir(folder)  # noqa: PTH208 - an open descriptor
        finally:
            os.close(folder)
    return []
