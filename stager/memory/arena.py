"""Shared staging memory: one sealed memfd, mapped by the trainer and by its writer daemon.

The arena owns a file descriptor and a raw mapping. It does not handle tensors, disks or sockets,
and never imports torch: the daemon maps the same memory through this module. Layout::

    0      header page    magic, sizes, and the words that trainer and daemon read from each other
    4096   descriptor     the encoded SAVE message of the newest staged save
    data_offset ...       the file images, each page-aligned

The mapping is raw rather than an ``mmap`` object: collecting an inherited ``mmap`` object in a
forked child unmaps addresses that the child may have reused. The mapping is hidden from children
(``MADV_DONTFORK``), and its descriptor is closed in them, so that no DataLoader worker keeps a dead
trainer's memory alive. Core dumps exclude it (``MADV_DONTDUMP``): they would contain the weights
once for each slot.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Final

from sidesave.errors import ProtocolError
from sidesave.stager.system_calls import REFUSED, needs

PAGE: Final = 4096
"""Alignment of everything that O_DIRECT touches, in bytes."""

HUGE_PAGE: Final = 2 << 20
"""Size and alignment, in bytes, of the huge pages that a mapping gets if the kernel has them."""

_MAGIC: Final = b"SIDESAV1"
_HEADER = struct.Struct("<8sQQ")  # magic, arena bytes, data offset
_GENERATION_AT: Final = 64  # each word on a cache line of its own
_STAGED_AT: Final = 128
_DESCRIPTOR_NBYTES_AT: Final = 136
_FILLED_AT: Final = 192
_NODE_AT: Final = 256

_MADV_DONTFORK: Final = 10
_MADV_DONTDUMP: Final = 16
_MADV_DONTNEED: Final = 4
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x10  # SEAL, SHRINK, GROW, FUTURE_WRITE
_MFD_NOEXEC_SEAL: Final = 0x8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def page_up(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def madvise(address: int, nbytes: int, advice: int) -> int:
    """Call ``madvise(2)``; returns 0 or the errno."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


_child_cleanups: weakref.WeakSet[object] = weakref.WeakSet()


def forget_in_child(owner: object) -> None:
    """Call ``owner._forget()`` in every forked child; it must only close descriptors."""
    _child_cleanups.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_child_cleanups):
        forget: Callable[[], None] = getattr(owner, "_forget")  # noqa: B009 - of our own classes
        forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def arena_nbytes(descriptor_nbytes: int, data_nbytes: int) -> int:
    """Return the size of an arena with that capacity."""
    return PAGE + page_up(descriptor_nbytes) + page_up(data_nbytes)


class Arena:
    """A mapped memfd: create one in the trainer, attach to it by descriptor in the daemon."""

    def __init__(
        self, fd: int, nbytes: int, address: int, data_offset: int, *, writable: bool
    ) -> None:
        """Adopt a mapping; use :meth:`create` or :meth:`attach`."""
        self._fd = fd
        self._address = address
        self._writable = writable
        self.nbytes: Final = nbytes
        self.data_offset: Final = data_offset
        """Offset of the first image, in bytes from the arena's start.

        Validated once: the header may change later.
        """
        forget_in_child(self)

    @classmethod
    def create(cls, descriptor_nbytes: int, data_nbytes: int) -> Arena:
        """Create an arena for ``data_nbytes`` bytes of images, map it for writing, then seal it.

        Allocates no pages yet. Raises ``OSError`` if the kernel refuses the descriptor or the
        mapping.
        """
        data_offset = PAGE + page_up(descriptor_nbytes)
        nbytes = arena_nbytes(descriptor_nbytes, data_nbytes)
        try:
            fd = os.memfd_create(
                "sidesave", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL
            )
        except OSError:  # NOEXEC_SEAL is younger (Linux 6.3) than memfd itself
            with needs("memfd_create"):
                fd = os.memfd_create("sidesave", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with needs("ftruncate"):
                os.ftruncate(fd, nbytes)
            address = _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(fd)
            raise
        arena = cls(fd, nbytes, address, data_offset, writable=True)
        try:
            ctypes.memmove(address, _HEADER.pack(_MAGIC, nbytes, data_offset), _HEADER.size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            arena.close()
            raise
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map a received descriptor for reading; takes ownership of ``fd``, also if this raises.

        Raises ``ProtocolError`` if it is not a sealed arena: the trainer could truncate an unsealed
        one while the daemon reads it.
        """
        try:
            nbytes = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, 1034)  # F_GET_SEALS
            if seals & 0x6 != 0x6 or nbytes < PAGE:
                raise ProtocolError("the descriptor is not a sealed staging arena")
            magic, stated, data_offset = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            if magic != _MAGIC or stated != nbytes or not PAGE <= data_offset <= nbytes:
                raise ProtocolError("the descriptor holds no staging arena of this version")
            address = _map(fd, nbytes, mmap.PROT_READ)
        except ProtocolError:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"the descriptor cannot be mapped: {error}") from error
        return cls(fd, nbytes, address, data_offset, writable=False)

    @property
    def fd(self) -> int:
        """The memfd; -1 after :meth:`close`."""
        return self._fd

    @property
    def address(self) -> int:
        """Address of byte 0; 0 after :meth:`close`."""
        return self._address

    @property
    def data_nbytes(self) -> int:
        """Capacity for images, in bytes."""
        return self.nbytes - self.data_offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes ``[offset, offset + nbytes)`` without a copy.

        The view is valid until :meth:`close`.
        """
        if not (self._address and 0 <= offset and 0 <= nbytes and offset + nbytes <= self.nbytes):
            raise ValueError(f"bytes {offset}+{nbytes} are outside an arena of {self.nbytes}")
        return memoryview((ctypes.c_ubyte * nbytes).from_address(self._address + offset)).cast("B")

    def _word(self, at: int) -> ctypes.c_uint64:
        if not self._address:
            raise ValueError("the arena is closed")
        return ctypes.c_uint64.from_address(self._address + at)

    @property
    def generation(self) -> int:
        """Number of saves that have used this memory.

        A writer that sees it change publishes nothing.
        """
        return self._word(_GENERATION_AT).value

    @property
    def node(self) -> int | None:
        """NUMA node chosen for a device, on which the daemon runs as well; None without one."""
        word = self._word(_NODE_AT).value
        return word - 1 if word else None

    @node.setter
    def node(self, node: int | None) -> None:
        self._word(_NODE_AT).value = 0 if node is None else node + 1

    @property
    def filled(self) -> int:
        """Number of bytes, from the arena's start, that are final in this generation.

        They may be written out.
        """
        return self._word(_FILLED_AT).value

    def advance(self, nbytes: int) -> None:
        """Declare the first ``nbytes`` of the arena final."""
        self._word(_FILLED_AT).value = nbytes

    def advance_to(self, address: int) -> None:
        """Declare all bytes below ``address`` final."""
        self.advance(address - self._address)

    def begin_generation(self) -> int:
        """Invalidate the staged content, so that the arena can be refilled.

        Returns the new generation.
        """
        self.advance(0)
        word = self._word(_GENERATION_AT)
        word.value += 1
        return word.value

    def mark_staged(self, descriptor: bytes) -> None:
        """Declare the current generation complete and store its encoded SAVE message.

        From then on the daemon can finish the save alone: if the trainer dies before it sends the
        message, the daemon reads it here.
        """
        if len(descriptor) > self.data_offset - PAGE:
            raise ValueError(
                f"a descriptor of {len(descriptor)} bytes does not fit in {self.data_offset - PAGE}"
            )
        ctypes.memmove(self._address + PAGE, descriptor, len(descriptor))
        self._word(_DESCRIPTOR_NBYTES_AT).value = len(descriptor)
        self._word(_STAGED_AT).value = self.generation
        self.advance(self.nbytes)

    def staged_descriptor(self) -> bytes | None:
        """Return the SAVE message of the staged generation.

        Returns None if the arena holds no complete save.
        """
        nbytes = self._word(_DESCRIPTOR_NBYTES_AT).value
        if (
            self._word(_STAGED_AT).value != self.generation
            or not 0 < nbytes <= self.data_offset - PAGE
        ):
            return None
        return bytes(self.view(PAGE, nbytes))

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Unmap whole pages from this process.

        Their content and the other process's mapping stay.
        """
        start, end = page_up(offset), (offset + nbytes) // PAGE * PAGE
        if end > start and self._address:
            madvise(self._address + start, end - start, _MADV_DONTNEED)

    def close(self) -> None:
        """Unmap and close; idempotent. No view of the arena may be used afterwards."""
        address, self._address = self._address, 0
        fd, self._fd = self._fd, -1
        if address:
            _libc.munmap(address, self.nbytes)
        if fd >= 0:
            os.close(fd)

    def _forget(self) -> None:
        self._address = 0  # MADV_DONTFORK: the child has no such mapping
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _map(fd: int, nbytes: int, protection: int) -> int:
    """Map a whole memfd at a multiple of 2 MiB, as huge pages require."""
    reserved = _mmap(
        None,
        nbytes + HUGE_PAGE,
        _PROT_NONE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        -1,
    )
    address = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    end = address + page_up(nbytes)
    try:
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        madvise(address, nbytes, _MADV_DONTDUMP)
        error = madvise(address, nbytes, _MADV_DONTFORK)
        if error and error not in REFUSED:  # if refused, forked children inherit the mapping
            raise OSError(error, "cannot hide staging memory from forked children")
    except OSError:
        _libc.munmap(reserved, nbytes + HUGE_PAGE)
        raise
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    if reserved + nbytes + HUGE_PAGE > end:
        _libc.munmap(end, reserved + nbytes + HUGE_PAGE - end)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of staging memory: {os.strerror(code)}")
    return int(mapped)
