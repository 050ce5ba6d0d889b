"""The memory of one pool of pages, which belongs to somebody else: rows of one size, counted from 0.

Law: nothing here exports the memory between calls. A view of a row lives as long as the call that asked for it, so its
owner may close or release the memory whenever no call has any of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from asynccache.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Rows:
    """``memory`` (a writable, contiguous buffer) as rows of ``page_bytes`` bytes. ``count``: how many rows there are.

    Raises:
        ConfigError: it is no such buffer, or it is not a whole number of rows long.
    """

    def __init__(self, pool: str, memory: WriteableBuffer, page_bytes: int) -> None:
        self.pool = pool
        self.page_bytes = page_bytes
        self._memory: WriteableBuffer | None = memory
        with self._whole() as flat:
            self.nbytes = flat.nbytes
        self.count, rest = divmod(self.nbytes, page_bytes)
        if rest or not self.count:
            raise ConfigError(
                f"memory of pool {pool!r} has {self.nbytes} bytes, which is not one or more whole pages of "
                f"page_bytes={page_bytes}"
            )

    def __repr__(self) -> str:
        return f"Rows({self.pool!r}, {self.count} of {self.page_bytes} bytes)"

    def view(self) -> memoryview:
        """All of it as bytes, for a store that wants to register it.

        Raises:
            ConfigError: as ``views``.
        """
        with self._whole() as flat:
            return flat[:]

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """The rows ``slots``, all of them less than ``count``. Whoever asks for them releases them.

        Raises:
            ConfigError: the memory was closed or released since ``open``, or has another size now.
        """
        size = self.page_bytes
        with self._whole() as flat:
            if flat.nbytes != self.nbytes:
                raise ConfigError(
                    f"memory of pool {self.pool!r} has {flat.nbytes} bytes now and had {self.nbytes} when it was given"
                )
            return [flat[slot * size : slot * size + size] for slot in slots]

    def forget(self) -> None:
        """Keep the memory no longer. From now on ``views`` raises."""
        self._memory = None

    @contextmanager
    def _whole(self) -> Iterator[memoryview]:
        """All of it as writable bytes, released afterwards."""
        with _exported(self.pool, self._memory) as whole, _flat(self.pool, whole) as flat:
            yield flat


def release(views: list[memoryview]) -> None:
    """End ``views``, whoever else has one of them. Those that are left in the list afterwards could not be ended:
    somebody has made something of their bytes (an array, say) and keeps it."""
    kept = []
    for view in views:
        try:
            view.release()
        except BufferError:
            kept.append(view)
    views[:] = kept


def _exported(pool: str, memory: WriteableBuffer | None) -> memoryview:
    if memory is None:
        raise ConfigError(f"memory of pool {pool!r} was given back: the stores were closed")
    with suppress(TypeError, ValueError, BufferError):
        return memoryview(memory)
    kind = type(memory).__name__
    raise ConfigError(
        f"memory of pool {pool!r} is a {kind} without bytes to use (any more): give an open mmap, a bytearray, a "
        f"memoryview or a NumPy array, and close it after the stores"
    )


def _flat(pool: str, whole: memoryview) -> memoryview:
    if whole.readonly:
        raise ConfigError(f"memory of pool {pool!r} is read-only: pages are read into it, so give a writable buffer")
    with suppress(TypeError):
        return whole.cast("B")
    raise ConfigError(
        f"memory of pool {pool!r} of shape {whole.shape} and format {whole.format!r} cannot be used as plain bytes: "
        f"give a C-contiguous buffer of uint8"
    )
