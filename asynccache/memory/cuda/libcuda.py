"""The calls of the CUDA driver that cupy does not have, or does not make without holding the GIL.

``cuMemcpyBatchAsync`` is looked up by the version in which it appeared (12.8). So every driver returns the function
with its first ABI, the one with ``failIdx``. ``cuEventQuery`` is called here and not by cupy, because cupy holds the
GIL for it, and the call may wait long for the driver's lock while another thread pins memory. Only calls that take no
lock of the driver's keep the GIL here: beside a thread that computes in Python, to get it back takes 5 ms.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.errors import AsyncCacheError

Addresses = npt.NDArray[np.uint64]

LIBRARY = "libcuda.so.1"
BATCHES_SINCE = 12080
NOT_READY = 600
IN_STREAM_ORDER = 1
"""The order in which the driver reads the sources of copies: when the stream gets to the copy. With the other order for
pinned memory (ANY) it may read a source at any moment, even before the end of a backup that writes it and that the
stream was told to wait for."""
OVERLAP_WITH_COMPUTE = 1
"""Has the driver use the copy engines. They are slow within the device (87 GiB/s of 1,600), so copies there go without
this flag."""
_RELAXED = 2


STICKY = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
"""CUDA's codes after which a context does nothing any more: illegal addresses and instructions, failed launches, memory
and links with errors, a driver that is shutting down."""

CAPTURED = 905
"""CUDA's code for work outside of a graph that is ordered behind work in one."""


class DriverError(AsyncCacheError):
    """The driver refused a call, or reports that earlier work failed."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        """CUDA's number of the error; None if it has none."""

    @property
    def sticky(self) -> bool:
        """True if this error is the end of the context. Otherwise the call alone was refused, and work in flight runs
        on."""
        return self.code in STICKY


class Spans(NamedTuple):
    """Runs of bytes to copy: ``size[i]`` bytes from the address ``src[i]`` to the address ``dst[i]``."""

    dst: Addresses
    src: Addresses
    size: Addresses

    def part(self, start: int, stop: int) -> Spans:
        return Spans(self.dst[start:stop], self.src[start:stop], self.size[start:stop])


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_uint), ("src", _Location), ("dst", _Location), ("flags", ctypes.c_uint),
    )  # fmt: skip


class LibCuda:
    """The library, by ctypes."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            self._quick = ctypes.PyDLL(LIBRARY)  # keeps the GIL
        except OSError as error:
            raise DriverError(f"{LIBRARY} cannot be loaded: {error}") from None
        self._library.cuEventQuery.argtypes = (ctypes.c_void_p,)
        self._thread = threading.local()  # ``relaxed``: True in the device's own threads
        self._batch = self._find_batch()
        self.batches = self._batch is not None
        """True if this driver takes many copies in one call."""

    def _find_batch(self) -> Any:
        found, status = ctypes.c_void_p(), ctypes.c_int()
        refused = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(found), ctypes.c_int(BATCHES_SINCE), ctypes.c_uint64(0),
            ctypes.byref(status),
        )  # fmt: skip
        if refused or not found.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        return kind(found.value)

    def relax_thread(self) -> None:
        """Allow this thread, for good, to call the driver while an engine captures a graph in another thread. Otherwise
        many calls would be refused meanwhile, and would spoil the graph, though they have nothing to do with it."""
        self._exchange(_RELAXED)
        self._thread.relaxed = True

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Do the same for the calls in this context, in a thread that may be an engine's."""
        if getattr(self._thread, "relaxed", False):
            yield
            return
        before = self._exchange(_RELAXED)
        try:
            yield
        finally:
            self._exchange(before)

    def _exchange(self, mode: int) -> int:
        """Set the thread's mode of capture, and return the former one."""
        exchanged = ctypes.c_int(mode)
        self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        return exchanged.value

    def event_query(self, event: int) -> bool:
        """Return True if ``event`` has happened.

        Raises:
            DriverError: the driver answers neither yes nor no.
        """
        answer: int = self._library.cuEventQuery(event)
        if answer not in (0, NOT_READY):
            raise DriverError(f"cuEventQuery: {self._name(answer)}", answer)
        return answer == 0

    def copy_batch(self, stream: int, spans: Spans, flags: int) -> None:
        """Enqueue all copies of ``spans``, one or more, by one call. Not for the default stream. ``flags``: 0 or
        ``OVERLAP_WITH_COMPUTE``.

        Raises:
            DriverError: the driver refuses one; the message says which.
        """
        count = len(spans.size)
        dst, src, size = (np.ascontiguousarray(array, np.uint64) for array in spans)
        attributes = _Attributes(order=IN_STREAM_ORDER, flags=flags)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        answer = self._batch(dst.ctypes.data, src.ctypes.data, size.ctypes.data, count, ctypes.addressof(attributes),
                             ctypes.addressof(first), 1, ctypes.addressof(failed), stream)  # fmt: skip
        if answer:
            text = f"cuMemcpyBatchAsync: {self._name(answer)} at copy {failed.value} of {count}"
            raise DriverError(text, answer)

    def _name(self, answer: int) -> str:
        text = ctypes.c_char_p()
        self._quick.cuGetErrorString(ctypes.c_int(answer), ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'error'} ({answer})"
