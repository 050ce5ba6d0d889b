"""Converts an engine's tokens to keys, and hashes the pages of keys. A key is one ``bytes`` of little-endian int32.

Buffers of int32 are taken as they are (one memcpy, none for ``bytes``); a list is converted once. Behind this module
every sequence of tokens is a key.

``asynccache.hashes`` has the chain of page hashes. The core never hashes; this module does, in slices short enough for
the loop. Small pages are hashed on the loop, because sha256 of less than 2 KiB keeps the GIL, and a thread would not
help. Larger pages are hashed in a thread.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynccache import checks
from asynccache.checks import INT32_MAX, shown
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.errors import ConfigError
from asynccache.hashes import extend_chain, namespace_digest

if TYPE_CHECKING:
    from asynccache.runtime.announcer import NoticeQueue

SIGN_BYTE = TOKEN_BYTES - 1
"""The offset of a token's highest byte. The token is negative if that byte is not ASCII, that is 128 or more."""
INT32 = np.dtype("<i4")

Tokens = Any
"""``list[int]``, ``array('i')``, a numpy array of integers, a CPU tensor, or bytes-like int32."""


def as_key(tokens: Tokens) -> bytes:
    """Return ``tokens`` as a key.

    Raises:
        ConfigError: a token is negative or beyond int32 (the message names its position and value), or ``tokens`` does
            not hold integers, or does not have one dimension.
    """
    if type(tokens) is np.ndarray and tokens.dtype == INT32 and tokens.ndim == 1:  # what engines hold
        key = tokens.tobytes()
        if key and tokens.item(tokens.argmin()) < 0:  # a third of the time that it takes to slice the key
            raise _negative(key)
        return key
    if isinstance(tokens, np.ndarray):
        key = _of_array(tokens)
    elif type(tokens) is bytes:
        key = tokens
    elif isinstance(tokens, (list, tuple)):
        try:
            key = array("i", tokens).tobytes()
        except Exception:  # an object that claims to be an integer may raise anything
            raise ConfigError(_first_bad(tokens)) from None
    elif isinstance(tokens, (bytes, bytearray, memoryview, array)):
        key = _of_buffer(tokens)
    else:
        key = _of_array(_of_tensor(tokens))
    if len(key) % TOKEN_BYTES:
        raise ConfigError(f"tokens: {len(key)} bytes are not whole int32 tokens")
    if not key[SIGN_BYTE::TOKEN_BYTES].isascii():
        raise _negative(key)
    return key


def _negative(key: bytes) -> ConfigError:
    values = np.frombuffer(key, np.int32)
    position = int((values < 0).argmax())
    return ConfigError(f"tokens[{position}]={values[position]} is negative")


def _first_bad(tokens: Sequence[int]) -> str:
    for position, token in enumerate(tokens):
        try:
            array("i", [token])
        except OverflowError:
            return f"tokens[{position}]={shown(token)} is beyond int32"
        except Exception:
            return f"tokens[{position}]={shown(token)} is no integer"
    return "tokens: not a sequence of integers"


def _of_buffer(tokens: bytes | bytearray | memoryview | array[int]) -> bytes:
    try:
        view = memoryview(tokens)
        if view.ndim == 1 and view.format in ("i", "l", "B", "b", "c") and view.itemsize in (1, TOKEN_BYTES):
            return view.tobytes()
        found = np.asarray(view)
    except (TypeError, ValueError, BufferError) as error:  # a format that numpy does not know, a released view
        raise ConfigError(f"tokens: {type(tokens).__name__} holds no int32 tokens: {error}") from None
    return _of_array(found)


def _of_array(tokens: npt.NDArray[Any]) -> bytes:
    if tokens.dtype != INT32:
        tokens = _to_int32(tokens)
    if tokens.ndim != 1:
        raise ConfigError(f"tokens: an array of {tokens.ndim} dimensions; tokens lie in one row, as in reshape(-1)")
    raw: bytes = tokens.tobytes()
    return raw


def _of_tensor(tokens: Tokens) -> npt.NDArray[np.generic]:
    """Return a CPU tensor, or anything else that numpy understands, as an array. A tensor is converted by its own
    method ``numpy``, so torch is not imported."""
    try:
        to_numpy = getattr(tokens, "numpy", None)
        return np.asarray(to_numpy() if to_numpy is not None else tokens)
    except Exception as error:  # an unknown object may raise anything
        raise ConfigError(f"tokens: {type(tokens).__name__} holds no int32 tokens: {error}") from None


def _to_int32(tokens: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    if tokens.dtype.kind not in "iu":
        raise ConfigError(f"tokens: dtype {tokens.dtype} is no integer type")
    beyond = tokens.reshape(-1) > INT32_MAX  # type: ignore[operator]
    if beyond.any():
        position = int(beyond.argmax())
        raise ConfigError(f"tokens[{position}]={tokens.reshape(-1)[position]} is beyond int32")
    below = tokens.reshape(-1) < 0  # type: ignore[operator]
    if below.any():
        position = int(below.argmax())
        raise ConfigError(f"tokens[{position}]={tokens.reshape(-1)[position]} is negative")
    return tokens.astype("<i4")


SLICE_BYTES = 12 << 10
"""Bytes that are hashed in one turn of the loop: less than 100 us for pages of any size below ``THREAD_PAGE_BYTES``. A
thread hashes 64 times as many in one call."""
PER_PAGE_BYTES = 192
"""Bytes that each page counts in a slice beyond its own: the fixed cost of a hash."""
THREAD_PAGE_BYTES = 2048
"""Pages of this size in bytes, and larger ones, are hashed in a thread."""


class Chain:
    """The hashes of one growing key. Mutable state: ``key``, the part that has been hashed, and ``hashes``, one for
    each of its pages."""

    __slots__ = ("_page_bytes", "_space", "hashes", "key")

    def __init__(self, space: bytes, page_size: int, key: bytes = b"", hashes: bytes = b"") -> None:
        self._space = space
        self._page_bytes = page_size * TOKEN_BYTES
        self.key = key[: len(hashes) // HASH_BYTES * self._page_bytes]
        self.hashes = hashes

    def __repr__(self) -> str:
        return f"Chain({len(self.hashes) // HASH_BYTES} pages)"

    def copy(self) -> Chain:
        """Return an independent chain with the same key and hashes."""
        return Chain(self._space, self._page_bytes // TOKEN_BYTES, self.key, self.hashes)

    def covers(self, key: bytes) -> bool:
        """Return True if every whole page of ``key`` is hashed already."""
        whole = len(key) // self._page_bytes * self._page_bytes
        return len(self.key) >= whole and self.key.startswith(key[:whole])

    def known(self, key: bytes, hashes: bytes) -> None:
        """Take over ``hashes``, those of the first pages of ``key``, if they are more than have been computed here, or
        if those that have been computed are of another key."""
        if len(hashes) > len(self.hashes) or not key.startswith(self.key):
            self.key = key[: len(hashes) // HASH_BYTES * self._page_bytes]
            self.hashes = hashes

    async def extend(self, key: bytes) -> bytes:
        """Return the hashes of all whole pages of ``key``. Several calls at once do not disturb each other.

        Cancelling keeps what is hashed so far.
        """
        stop = len(key) // self._page_bytes * self._page_bytes
        if self.covers(key):
            return self.hashes[: stop // self._page_bytes * HASH_BYTES]
        threaded = self._page_bytes >= THREAD_PAGE_BYTES
        pages = max(1, (64 * SLICE_BYTES if threaded else SLICE_BYTES) // (self._page_bytes + PER_PAGE_BYTES))
        at, hashes = (len(self.key), self.hashes) if key.startswith(self.key) else (0, b"")
        while at < stop:
            if at:
                await asyncio.sleep(0)
            end = min(stop, at + pages * self._page_bytes)
            parent = hashes[-HASH_BYTES:] or self._space
            if threaded:
                new = await asyncio.to_thread(extend_chain, parent, key, at, end, self._page_bytes)
            else:
                new = extend_chain(parent, key, at, end, self._page_bytes)
            at, hashes = end, hashes + new
            if at > len(self.key):
                self.key, self.hashes = key[:at], hashes
        return hashes


class Namespaces:
    """The namespaces of one cache. Mutable state: how often each was invalidated, and when."""

    def __init__(self, config: CacheConfig, names: NoticeQueue | None) -> None:
        self.changes = 0
        """How many invalidations there have been, each of one namespace or of all. A caller that finds ``changes`` as
        it was before need not ask ``valid``."""
        self._reset_at = 0
        self._outdated_at: dict[str | bytes | None, int] = {}
        self._config = config
        self._names = names
        self._epochs: Counter[str | bytes | None] = Counter()
        self._plain = namespace_digest(config.model, config.page_size)

    def __repr__(self) -> str:
        return f"Namespaces({len(self._epochs)} invalidated, {self.changes} invalidations)"

    def space(self, namespace: str | bytes | None) -> bytes:
        """Return the digest of a namespace, as of its last invalidation.

        Raises:
            ConfigError: ``namespace`` is neither text nor bytes nor None.
        """
        if namespace is None:
            if not self._epochs:  # what most requests ask for
                return self._plain
        else:
            checks.namespace("namespace", namespace)
        epoch = self._epochs[namespace] if self._epochs else 0
        space = namespace_digest(self._config.model, self._config.page_size, namespace, epoch)
        if self._names is not None and namespace is not None:
            self._names.name(space, namespace)
        return space

    def valid(self, namespace: str | bytes | None, since: int) -> bool:
        """Return True if the namespace was not invalidated, alone or with all others, since ``changes`` was
        ``since``."""
        return since >= self._reset_at and since >= self._outdated_at.get(namespace, 0)

    def reset(self) -> None:
        """Make void whatever was begun in any namespace. The namespaces' digests stay."""
        self.changes += 1
        self._reset_at = self.changes

    def outdate(self, namespace: str | bytes | None) -> bytes:
        """Give the namespace another digest from now on. Returns the digest that it had. Raises as ``space``."""
        space = self.space(namespace)
        self._epochs[namespace] += 1
        self.changes += 1
        self._outdated_at[namespace] = self.changes
        return space
