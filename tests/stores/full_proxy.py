"""An S3 server that is full, where the real one never is: a proxy before it that takes no more objects when it is told
to. All else goes on to the server and back as it is, as late as ``SlowProxy`` makes it.

The refusals are those of real servers: Ceph's radosgw, over its quota (as it was seen to answer), and one whose disks
are full (MinIO's). Requests are told apart by their heads: the client must say how long each is, and send it when it
has the answer to the one before.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

from tests.stores.slow_proxy import PIECE, SlowProxy


class Refusal(NamedTuple):
    """The answer of a full server."""

    status: str
    code: str


QUOTA = Refusal("403 Forbidden", "QuotaExceeded")
DISKS = Refusal("507 Insufficient Storage", "XMinioStorageFull")


class FullProxy(SlowProxy):
    """``refused``: how many objects were not taken."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.refused = 0
        self._refusal: Refusal | None = None

    def full(self, refusal: Refusal | None) -> None:
        """From now on refuse objects with ``refusal``; None: take them again."""
        self._refusal = refusal

    async def _forward(
        self, reader: asyncio.StreamReader, theirs: asyncio.StreamWriter, ours: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                refusal = self._refusal if head.startswith(b"PUT ") else None
                if refusal is None:
                    theirs.write(head)
                await _body(reader, _length(head), None if refusal is not None else theirs)
                if refusal is not None:
                    self.refused += 1
                    ours.write(_answer(refusal))
                    await ours.drain()


async def _body(reader: asyncio.StreamReader, length: int, to: asyncio.StreamWriter | None) -> None:
    """Pass on the rest of a request to ``to``; None: drop it."""
    while length:
        piece = await reader.read(min(PIECE, length))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        if to is not None:
            to.write(piece)
            await to.drain()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _answer(refusal: Refusal) -> bytes:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{refusal.code}</Code><Message></Message></Error>'
    head = f"HTTP/1.1 {refusal.status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()
