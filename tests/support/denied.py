"""A process whose system calls are refused, as a container's seccomp profile or an old kernel does
it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_X86_64: dict[str, int | tuple[int, ...]] = {
    "pwrite64": 18,
    "madvise": 28,
    "socketpair": 53,
    "flock": 73,
    "fsync": 74,
    "ftruncate": 77,
    "setsid": 112,
    "fstatfs": 138,
    "setpriority": 141,
    "sched_setaffinity": 203,
    "sched_getaffinity": 204,
    "mkdirat": 258,
    "unlinkat": 263,
    "renameat": 264,
    "linkat": 265,
    "fchmodat": 268,
    "fallocate": 285,
    "eventfd2": 290,
    "preadv": (295, 327),  # and preadv2
    "prlimit64": 302,
    "renameat2": 316,
    "memfd_create": 319,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
}
_AARCH64: dict[str, int | tuple[int, ...]] = {
    "eventfd2": 19,
    "flock": 32,
    "mkdirat": 34,
    "unlinkat": 35,
    "linkat": 37,
    "renameat": 38,
    "fstatfs": 44,
    "ftruncate": 46,
    "fallocate": 47,
    "fchmodat": 53,
    "pwrite64": 68,
    "preadv": (69, 286),
    "fsync": 82,
    "sched_setaffinity": 122,
    "sched_getaffinity": 123,
    "setpriority": 140,
    "setsid": 157,
    "socketpair": 199,
    "madvise": 233,
    "prlimit64": 261,
    "renameat2": 276,
    "memfd_create": 279,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
}
NUMBERS = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})
"""The numbers of the calls in ``system_calls``; none on a machine of another kind."""
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2


def deny(names: list[str], code: int) -> None:
    """Have these calls fail with errno ``code`` in this thread and all that it starts; ``OSError``
    where that fails.
    """
    program = struct.pack("HBBI", _LOAD_NUMBER, 0, 0, 0)
    known = [NUMBERS[name] for name in names]
    for number in (
        each
        for numbers in known
        for each in (numbers if isinstance(numbers, tuple) else (numbers,))
    ):
        program += struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, number)
        program += struct.pack("HBBI", _RETURN, 0, 0, _FAIL | code)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p(ctypes.addressof(header))
    failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if failed or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
