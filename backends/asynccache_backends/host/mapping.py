"""The shared memory of a host process, mapped into this one.

The mapping lives as long as somebody copies from or to it, also after the server has gone. It is not inherited by a
forked child (``MADV_DONTFORK``).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asynccache.errors import BackendError
from asynccache.host.wire import Welcomed
from asynccache.storage import HEADER_BYTES

Bytes = npt.NDArray[np.uint8]
AROUND = 64 << 10
"""Linux maps this many bytes around a page of the system's memory that is first read, and the page alone if it is first
written. So one page in this many bytes is read before a place is first written: that halves the cost."""


class HostMapping:
    """The shared memory, as it is mapped here."""

    def __init__(self, fd: int, welcome: Welcomed) -> None:
        mapped = mmap.mmap(fd, welcome.size)
        mapped.madvise(mmap.MADV_DONTFORK)
        self._all: Bytes = np.frombuffer(mapped, np.uint8)
        end = welcome.headers_at + welcome.slots * HEADER_BYTES
        if not welcome.slots * 8 <= welcome.headers_at <= end <= welcome.payloads_at <= welcome.size:
            raise BackendError(f"the host process describes memory that cannot be: {welcome}")
        self._payloads_at = welcome.payloads_at
        self._touched = bytearray(welcome.size // AROUND + 1)  # whether this process has touched a block
        self._generations = self._all[: welcome.slots * 8].view(np.uint64)
        self._headers = self._all[welcome.headers_at : end].reshape(-1, HEADER_BYTES)

    def places(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Bytes]:
        """Return the payloads at these offsets. Raises BackendError: one lies elsewhere."""
        if offsets and not self._payloads_at <= min(offsets) <= max(map(int.__add__, offsets, sizes)) <= len(self._all):
            raise BackendError("the host process named a place that is not in its memory")
        everything = self._all
        return [everything[at : at + size] for at, size in zip(offsets, sizes, strict=True)]

    def headers(self, slots: Sequence[int]) -> bytes:
        """Return the headers of these slots, one behind the other."""
        return self._headers[slots].tobytes()

    def set_headers(self, slots: Sequence[int], headers: bytes) -> None:
        """Write the headers of these slots."""
        self._headers[slots] = np.frombuffer(headers, np.uint8).reshape(-1, HEADER_BYTES)

    def generations(self, slots: Sequence[int]) -> list[int]:
        """Return the generations of these slots as they are now."""
        found: list[int] = self._generations[slots].tolist()
        return found

    def copy_in(self, offsets: Sequence[int], places: Sequence[Bytes], payloads: Sequence[memoryview]) -> None:
        """Copy pages to these places, which ``places`` has returned for these offsets."""
        touched = self._touched
        for at, place, payload in zip(offsets, places, payloads, strict=True):
            blocks = slice(at // AROUND, (at + len(place) - 1) // AROUND + 1)
            if 0 in touched[blocks]:
                place[::AROUND].max()
                touched[blocks] = bytes([1]) * (blocks.stop - blocks.start)
            np.copyto(place, np.frombuffer(payload, np.uint8))


def copy_out(places: Sequence[Bytes], payloads: Sequence[memoryview]) -> None:
    """Copy pages out of the memory."""
    for place, payload in zip(places, payloads, strict=True):
        np.copyto(np.frombuffer(payload, np.uint8), place)
