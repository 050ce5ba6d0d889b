"""Receiving pages on the guess that all of them are there. Pure: it says where bytes are to land, and what came.

If they are, every byte that comes is known but for the pages' own: the length of the first, the first, its end and the
length of the second, and so on. So many pages can be received by one system call, each straight into its buffers, and
nothing is copied. Where something else comes the guess is wrong from there on: bytes have landed in buffers of pages
that were not received yet (of this same request, and undefined until they are), and are taken out of them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.storage import HEADER_BYTES, Record

SPAN_BYTES = 1 << 20
MOST_PAGES = 16


class Guess:
    """Parts to fill, in order; every third is text that must be as guessed: what is between two pages."""

    def __init__(self, records: Sequence[Record]) -> None:
        sizes = [HEADER_BYTES + len(record.payload) for record in records]
        self._texts = [b"$%d\r\n" % sizes[0], *(b"\r\n$%d\r\n" % size for size in sizes[1:]), b"\r\n"]
        self._parts: list[memoryview] = []
        for text, (header, payload) in zip(self._texts, records, strict=False):
            self._parts += (memoryview(bytearray(len(text))), header, payload)
        self._parts.append(memoryview(bytearray(2)))
        self._span = 3 * max(1, min(MOST_PAGES, SPAN_BYTES * len(sizes) // sum(sizes))) + 1
        self._next = self._filled = 0

    @property
    def texts(self) -> int:
        """How many were as guessed: one more than there are pages that are there to their ends, or none."""
        return (self._next + 2) // 3

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong, if all is as guessed."""
        parts = self._parts[self._next : self._next + self._span]
        if self._filled:
            parts[0] = parts[0][self._filled :]
        return parts

    def received(self, count: int) -> bytes | None:
        """``count`` bytes are in ``buffers()``. What has come instead of the next text, and all behind it; or None."""
        while count:
            part = self._parts[self._next]
            took = min(count, len(part) - self._filled)
            self._filled += took
            count -= took
            if self._next % 3 == 0 and part[: self._filled] != self._texts[self._next // 3][: self._filled]:
                return self._stray(count)
            if self._filled == len(part):
                self._next, self._filled = self._next + 1, 0
        return None

    def _stray(self, count: int) -> bytes:
        """The text that is being filled, and ``count`` bytes behind it."""
        found = [bytes(self._parts[self._next][: self._filled])]
        for part in self._parts[self._next + 1 :]:
            found.append(bytes(part[:count]))
            count -= len(found[-1])
            if not count:
                break
        return b"".join(found)
