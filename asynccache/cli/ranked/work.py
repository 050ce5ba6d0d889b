"""What a batch tells the ranks to do, and what a rank says of pages that it has verified."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asynccache.cli.engine import Piece, Verdict
from asynccache.core.settings import ComponentKind

_WRONG = "pages are wrong: "


class _Piece(msgspec.Struct, array_like=True):
    component: int
    ids: bytes
    values: bytes
    first: int


class _Work(msgspec.Struct, array_like=True):
    verifies: bool
    pieces: list[_Piece]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Work)


def packed(pieces: Sequence[Piece], *, verifies: bool) -> bytes:
    """Return a batch's payload that tells the ranks to verify these pages or, if ``verifies`` is False, to fill
    them."""
    parts = [_Piece(int(piece.component), piece.ids.tobytes(), piece.values.tobytes(), piece.first) for piece in pieces]
    return _encode(_Work(verifies, parts))


def unpacked(payload: bytes) -> tuple[bool, list[Piece]]:
    """Return what a payload says: True to verify pages or False to fill them, and the pages."""
    work = _decoder.decode(payload)
    return work.verifies, [
        Piece(ComponentKind(one.component), np.frombuffer(one.ids, np.int32).copy(),
              np.frombuffer(one.values, np.uint64).copy(), one.first)
        for one in work.pieces
    ]  # fmt: skip


def complaint(verdict: Verdict) -> str:
    """Return what a rank says when pages are wrong."""
    return f"{verdict.wrong} {_WRONG}{'; '.join(verdict.what[:2])}"


def understood(rank: int, reason: str) -> Verdict | None:
    """Return the verdict of a ``complaint`` that ``rank`` has sent; None if ``reason`` is no complaint about pages."""
    count, _, what = reason.partition(" ")
    if not (count.isdecimal() and what.startswith(_WRONG)):
        return None
    return Verdict(0, int(count), (f"rank {rank}: {what.removeprefix(_WRONG)}",))
