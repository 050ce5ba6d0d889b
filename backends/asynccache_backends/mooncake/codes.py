"""What the client's numbers mean. Pure functions; the numbers were seen, or are named in the client's own header.

A ``get`` answers with the bytes it has written, everything else with 0 (``exists``: 1 or 0), and all with a negative
code for a page that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import Result

OK = 0
NO_SEGMENT = -101                                  # nobody contributes memory
FULL = -200                                        # no room now; eviction runs behind
BAD_PARAMETER = -600                               # among others: the page is longer than the buffer
NOT_READY = -703                                   # somebody is writing it
MISSING = -704
EXISTS = -705
GONE = -712                                        # what held it has left
TRANSFER_FAILED = -800                             # the owner of the segment does not answer, or lengths differ
RPC_FAILED = -900                                  # the master is not there
RPC_TIMEOUT = -901                                 # the master does not answer
NOT_TRIED = -990                                   # ours: a part of the same call has found nobody there

FULL_CODES = frozenset((FULL, NO_SEGMENT))
NOBODY_CODES = frozenset((TRANSFER_FAILED, RPC_FAILED, RPC_TIMEOUT, NOT_TRIED))
MASTER_CODES = frozenset((RPC_FAILED, RPC_TIMEOUT))
LENGTH_CODES = frozenset((BAD_PARAMETER, TRANSFER_FAILED))

MISS, HIT, CORRUPT, FAILED = Result

_ABSENT = frozenset((MISSING, NOT_READY, GONE))


def put_result(code: int) -> Result:
    """An existing key counts as stored: keys are written once."""
    return HIT if code in (OK, EXISTS) else FAILED


def get_result(code: int, length: int) -> Result:
    """``length``: header and payload. A page of another length is not the one that was asked for."""
    if code >= 0:
        return HIT if code == length else CORRUPT
    return MISS if code in _ABSENT else FAILED


def exists_result(code: int) -> Result:
    """1: there; 0: not."""
    return FAILED if code < 0 else HIT if code else MISS


def delete_result(code: int) -> Result:
    """A key that is being written is not there yet."""
    return HIT if code == OK else MISS if code in _ABSENT else FAILED


def is_nobody(codes: Sequence[int]) -> bool:
    """Whether the call reached nobody, for any of its keys."""
    return bool(codes) and NOBODY_CODES.issuperset(codes)


def lost_master(codes: Iterable[int]) -> bool:
    """Whether the master failed to answer for some key."""
    return not MASTER_CODES.isdisjoint(codes)


def nobody_error(codes: Sequence[int], master: str) -> BackendError:
    """What to raise for a call that reached nobody."""
    if RPC_TIMEOUT in codes:
        return Timeout(f"mooncake: master {master} does not answer")
    if RPC_FAILED in codes:
        return Unavailable(f"mooncake: master {master} cannot be reached")
    return Unavailable("mooncake: no transfer succeeded; the owners of the segments do not answer")
