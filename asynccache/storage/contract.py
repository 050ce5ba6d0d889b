"""The contract that a storage backend fulfils. A backend keeps bytes under keys and knows nothing else.

A backend stores *records*: a 64-byte header and a payload, two buffers, under a 32-byte key, in a named pool. It never
looks inside a header. Integrity is not its business: ``CheckedStore`` builds the header on the way out and verifies
it on the way in, whatever the backend claims.

Every call takes many keys and answers for each of them, in order. If one key fails, the call does not raise: the answer
for that key is FAILED. A call raises ``BackendError`` (``Unavailable``, ``Timeout``) when it could not be made at all;
whatever else it raises counts as one. Cancelling a call returns only after the backend has let go of every buffer that
was passed in. To cancel a question or a listing changes nothing.

Some parts of a backend are optional. ``Listable`` and ``Collectable`` are for people and tools (``asynccache store
ls|stat|verify|gc``), and the cache itself never calls them. ``Probeable`` is for the breaker's probe, ``Layered`` for a
backend that has a page in several places, ``Counting`` for one whose server counts for all of its clients,
``Hintable`` for one that can use what is known of pages beforehand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asynccache import checks

HEADER_BYTES = 64
KEY_BYTES = 32
BLOCK_BYTES = 8
_KIND_AT = KEY_BYTES - BLOCK_BYTES - 1
_NO_BLOCK, _BLOCK, _BELOW_ZERO = range(3)


class Result(IntEnum):
    """The answer for one key in one call.

    For ``put``, HIT means that the record is stored now, or was stored already. CORRUPT means that a record was found
    and is not the one that was stored. FAILED means that the store could not do it, or cannot tell.
    """

    MISS = 0
    HIT = 1
    CORRUPT = 2
    FAILED = 3


class Hint(Enum):
    """A piece of knowledge about pages, before they are asked for. It is no order: a store does what it can.

    PREFETCH: they will be wanted soon, so have them where they are read fastest.
    KEEP: spare them for some seconds.
    ENDED: their conversation is over, so they may go before all others.
    """

    PREFETCH = "PREFETCH"
    KEEP = "KEEP"
    ENDED = "ENDED"


def named_key(digest: bytes, block: int | None) -> bytes:
    """Return the storage key, 32 bytes, of a page with this ``digest`` (32 bytes). ``block``: the hash that the
    engine's KV events give the block in this page, from -2**63 to 2**64 - 1; None: the page has none.

    The last 9 bytes of a key name the block, so whoever holds pages can tell routers of them in the routers' own words,
    whichever engine has stored them, and after a restart, too. 23 bytes are left of the digest.
    """
    if block is None:
        return digest[:_KIND_AT] + bytes((_NO_BLOCK,)) + digest[_KIND_AT + 1 :]
    kind = _BELOW_ZERO if block < 0 else _BLOCK
    return digest[:_KIND_AT] + bytes((kind,)) + (block % (1 << 64)).to_bytes(BLOCK_BYTES, "big")


def block_in(key: bytes) -> int | None:
    """Return the block that a storage key names; None: it names none."""
    kind = key[_KIND_AT]
    if kind not in (_BLOCK, _BELOW_ZERO):
        return None
    return int.from_bytes(key[-BLOCK_BYTES:], "big", signed=kind == _BELOW_ZERO)


class PageKey(NamedTuple):
    """A pool's name and a page's 32-byte storage key, unique over all pools."""

    pool: str
    key: bytes


class Record(NamedTuple):
    """The two buffers of a stored page. ``header`` has 64 writable bytes, ``payload`` the bytes of one page of the
    pool."""

    header: memoryview
    payload: memoryview


class StoreLayout(NamedTuple):
    """The description of the pools that a backend is given when it is opened.

    ``page_bytes`` maps each pool's name to the bytes of one payload of that pool. ``schema`` is a digest of the format
    of records. Records of another schema do not verify, so a backend whose place may hold some does well to refuse it
    when it is opened, or to keep them apart.
    """

    page_bytes: Mapping[str, int]
    schema: bytes
    any_size: int = 0
    """If it is above 0, payloads of every pool may have any size up to this, as in a host process, which does not know
    its clients' pools."""

    @property
    def largest(self) -> int:
        """Bytes of the largest payload; 0: nothing may be stored."""
        return max(self.any_size, *self.page_bytes.values(), 0)

    def takes(self, pool: str, size: int) -> bool:
        """Return True if a payload of ``pool`` may have ``size`` bytes."""
        return size == self.page_bytes.get(pool) or 0 < size <= self.any_size


def check_layout(layout: object) -> StoreLayout:
    """Check ``layout`` and return it unchanged.

    Raises:
        ConfigError: it is no ``StoreLayout``, a pool's name is not text, a payload has less than 1 byte, or the schema
            is not bytes.
    """
    found = checks.instance("layout", layout, StoreLayout)
    sizes = checks.instance("layout: page_bytes", found.page_bytes, Mapping)
    for pool, size in sizes.items():
        checks.integer(f"layout: page_bytes of {checks.shown(pool)}", size, 1)
        checks.text("layout: page_bytes: a pool", pool)
    checks.instance("layout: schema", found.schema, bytes)
    checks.integer("layout: any_size", found.any_size, 0)
    return found


def is_shared(backend: object) -> bool:
    """Return True if several processes that open this backend at the same place find each other's pages.

    A backend says so with an optional attribute ``shared``; without it the answer is False. Where several workers hold
    the same page, only one of them writes it to a shared store. To any other store each worker writes its own copy.
    """
    return bool(getattr(backend, "shared", False))


def longest_backoff(backend: object, usual: float) -> float:
    """Return for how many seconds the breaker leaves this backend alone at most. A backend whose failed calls cost
    nothing, as one on the same machine, says so with an optional attribute ``longest_backoff``; else it is
    ``usual``."""
    return float(getattr(backend, "longest_backoff", usual))


class StorageBackend(Protocol):
    """A store of records. Its methods are asynchronous and take many keys at once; an instance belongs to one event
    loop. If processes can share the store, the instance has a true attribute ``shared`` (see ``is_shared``)."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS, or FAILED where the store cannot tell."""
        ...

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read the record under ``keys[i]`` into the buffers ``records[i]``. Only HIT means that the buffers hold the
        record; after any other answer their content is undefined. A stored record of another length is CORRUPT."""
        ...

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store each record: HIT once a later ``get`` may find it. A key that is stored already keeps its old record.
        After FAILED either nothing or the whole record is stored, never a part."""
        ...

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the record of each key: HIT if there was one, else MISS."""
        ...

    async def clear(self) -> None:
        """Delete every record."""
        ...

    def register(self, pool: str, memory: memoryview) -> None:
        """Note that payloads of ``pool`` may be slices of ``memory`` from now on. This is called once for each such
        memory, before the first of its slices is passed in. Payloads in other memory are still allowed (promoted pages
        are copies). A backend that has no use for this does nothing."""
        ...

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters by name. They have at least ``pages`` and ``bytes`` (what is stored, as far as the
        backend knows) and ``errors`` (since it was opened)."""
        ...

    async def flush(self) -> None:
        """Return once everything put so far would survive a power loss, as far as the backend can promise that."""
        ...

    async def aclose(self) -> None:
        """Finish or abandon the calls in flight and release all resources. Calling it twice is fine. Calls
        with keys that come later raise ``BackendError``."""
        ...


class Stored(NamedTuple):
    """One stored page. ``size`` is the bytes of header and payload together. ``written`` is the unix time at which it
    was stored, or 0.0 if the backend does not know."""

    key: bytes
    size: int
    written: float


class Collected(NamedTuple):
    """The things that one call of ``collect`` has removed."""

    pages: int = 0
    """The number of pages that were stored too long ago."""
    waste: int = 0
    """The number of other things of no use, such as dead pages, orphans and half-written objects."""
    size: int = 0
    """The bytes of both together."""


@runtime_checkable
class Listable(Protocol):
    """A backend whose pages can be listed."""

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all stored pages, in batches. Pages that are put or deleted meanwhile may or may not be among them.

        Raises:
            BackendError: the store cannot be listed now. Cancelling it changes nothing.
        """
        ...


@runtime_checkable
class Collectable(Protocol):
    """A backend from which waste can be removed."""

    async def collect(self, older_than: float | None) -> Collected:
        """Remove waste. If ``older_than`` is given, also remove pages that were written more than so many seconds ago.

        Pages that are read or written meanwhile are never damaged. Cancelling it leaves the rest for the next call.
        """
        ...


@runtime_checkable
class Probeable(Protocol):
    """A backend with a call that only asks its store for a sign of life. Optional: for a backend without ``probe`` an
    answer of ``exists`` is the sign of life."""

    async def probe(self) -> None:
        """Return when the store has answered anything at all. Cancelling it is safe.

        Raises:
            BackendError: the store does not answer.
        """
        ...


@runtime_checkable
class Layered(Protocol):
    """A backend that may have a page in several places, such as memory before a disk. Optional."""

    async def damaged(self, keys: Sequence[PageKey]) -> list[Result]:
        """Drop what the last ``get`` has read for these keys, since it does not verify, from where it was read: HIT if
        that was there. Copies in other places stay, and may be good."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A backend whose server counts what all of its clients do. Optional, and for people and tools."""

    async def server_counts(self) -> tuple[Mapping[str, float], Mapping[str, Mapping[str, int]]]:
        """Return the server's counters by name, and those of each label by the label's name.

        Raises:
            BackendError: the server does not answer.
        """
        ...


@runtime_checkable
class Hintable(Protocol):
    """A backend that decides itself which pages stay, and can use hints. Optional."""

    async def hint(self, verb: Hint, keys: Sequence[PageKey], seconds: float) -> list[Result]:
        """Take a hint about the pages of ``keys``, those of a conversation in its order: HIT for each that is now as
        the hint wants it, else MISS. ``seconds``: for how long, 0 or more, for KEEP; a store bounds it. Cancelling it
        may leave any of it done."""
        ...


async def drop_damaged(backend: Any, keys: Sequence[PageKey]) -> list[Result]:
    """Drop pages that were read from ``backend`` and do not verify: by its ``damaged`` if it has one, else by
    ``delete``. Raises what the backend's call raises; cancelling it cancels that call."""
    answers: list[Result] = await (backend.damaged if isinstance(backend, Layered) else backend.delete)(keys)
    return answers


async def probe(backend: StorageBackend, keys: Sequence[PageKey]) -> list[Result]:
    """Ask ``backend`` for a sign of life: by its ``probe`` if it has one, else by ``exists`` of ``keys``. Returns a
    result for each key, MISS after a ``probe``. Raises what the backend's call raises; cancelling it cancels that
    call."""
    if not isinstance(backend, Probeable):
        return await backend.exists(keys)
    await backend.probe()
    return [Result.MISS] * len(keys)
