"""The meaning of the codes that the client returns. Pure functions.

The codes were observed, or are named in the client's own header file. For a page that failed every call returns a
negative code. Otherwise a ``get`` returns the bytes that it has written, ``exists`` returns 1 or 0, and all others 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import Result

OK = 0
NO_SEGMENT = -101       # no process contributes memory
FULL = -200             # there is no room now; the store evicts in the background
BAD_PARAMETER = -600    # also if the page is longer than the buffers
NOT_READY = -703        # somebody is writing the object
MISSING = -704
EXISTS = -705
GONE = -712             # the process that had the object has ended
TRANSFER_FAILED = -800  # the owner of the segment does not answer, or the lengths differ
RPC_FAILED = -900       # the master cannot be reached
RPC_TIMEOUT = -901      # the master does not answer
NOT_TRIED = -990        # this backend's own code: not asked, since another part of the call has reached nobody

FULL_CODES = frozenset((FULL, NO_SEGMENT))
NOBODY_CODES = frozenset((TRANSFER_FAILED, RPC_FAILED, RPC_TIMEOUT, NOT_TRIED))
MASTER_CODES = frozenset((RPC_FAILED, RPC_TIMEOUT))
LENGTH_CODES = frozenset((BAD_PARAMETER, TRANSFER_FAILED))

MISS, HIT, CORRUPT, FAILED = Result

_ABSENT = frozenset((MISSING, NOT_READY, GONE))


def put_result(code: int) -> Result:
    """Return the result of a put. A key that exists already counts as stored."""
    return HIT if code in (OK, EXISTS) else FAILED


def get_result(code: int, length: int) -> Result:
    """Return the result of a get. ``length`` is the bytes of header and payload; a page of another length is
    CORRUPT."""
    if code >= 0:
        return HIT if code == length else CORRUPT
    return MISS if code in _ABSENT else FAILED


def exists_result(code: int) -> Result:
    """Return the result of an exists, whose code is 1 or 0."""
    return FAILED if code < 0 else HIT if code else MISS


def delete_result(code: int) -> Result:
    """Return the result of a delete. A key that is being written counts as missing."""
    return HIT if code == OK else MISS if code in _ABSENT else FAILED


def is_nobody(codes: Sequence[int]) -> bool:
    """Return True if there are codes, and each says that the master or the owner of the page did not answer, or that
    this page was not tried."""
    return bool(codes) and NOBODY_CODES.issuperset(codes)


def lost_master(codes: Iterable[int]) -> bool:
    """Return True if the master did not answer for at least one key."""
    return not MASTER_CODES.isdisjoint(codes)


def nobody_error(codes: Sequence[int], master: str) -> BackendError:
    """Return the error to raise for a call that reached nobody."""
    if RPC_TIMEOUT in codes:
        return Timeout(f"mooncake: master {master} does not answer")
    if RPC_FAILED in codes:
        return Unavailable(f"mooncake: master {master} cannot be reached")
    return Unavailable("mooncake: no transfer succeeded; the owners of the segments do not answer")
