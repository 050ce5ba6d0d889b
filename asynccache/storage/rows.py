"""The memory of one pool of pages, which belongs to somebody else: rows of one size, counted from 0.

Laws:
* Nothing here exports the memory between calls: its owner may close or release it whenever no call has any of it.
* A call has rows on loan. When it ends them nobody can use them any more, and it is known whether somebody still keeps
  the memory by something that was made of them (a slice, an array).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from asynccache.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import WriteableBuffer

    Memory = WriteableBuffer | npt.NDArray[Any]


class Rows:
    """``memory`` (a writable, contiguous buffer) as rows of ``page_bytes`` bytes. ``count``: how many rows there are.

    Raises:
        ConfigError: it is no such buffer, or it is not a whole number of rows long.
    """

    def __init__(self, pool: str, memory: Memory, page_bytes: int) -> None:
        self.pool = pool
        self.page_bytes = page_bytes
        self._memory: Memory | None = memory
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
            ConfigError: as ``lend``.
        """
        with self._whole() as flat:
            return flat[:]

    def lend(self, slots: Sequence[int]) -> Loan:
        """The rows ``slots``, all of them less than ``count``.

        Raises:
            ConfigError: the memory was closed or released since ``open``, or has another size now.
        """
        size = self.page_bytes
        with self._whole() as flat:
            if flat.nbytes != self.nbytes:
                raise ConfigError(
                    f"memory of pool {self.pool!r} has {flat.nbytes} bytes now and had {self.nbytes} when it was given"
                )
            return Loan(flat, size, slots)

    def forget(self) -> None:
        """Keep the memory no longer. From now on ``lend`` raises."""
        self._memory = None

    @contextmanager
    def _whole(self) -> Iterator[memoryview]:
        """All of it as writable bytes, released afterwards."""
        with _exported(self.pool, self._memory) as whole, _flat(self.pool, whole) as flat:
            yield flat


class Loan:
    """Some rows of ``size`` bytes of ``flat``, for one call. ``views`` are in the order of ``slots``."""

    __slots__ = ("_alive", "views")

    def __init__(self, flat: memoryview, size: int, slots: Sequence[int]) -> None:
        import numpy as np  # here, so that whoever only looks at a store need not load it

        array = np.frombuffer(flat, np.uint8)  # which lives as long as anything that was made of it
        self._alive = weakref.ref(array)
        with memoryview(cast("bytearray", array)) as whole:
            self.views = [whole[slot * size : slot * size + size] for slot in slots]

    def end(self) -> bool:
        """End every view, whoever else has it. Returns whether the memory is free: if not, somebody keeps something
        that was made of a view, and it can be asked again. Twice is fine."""
        for view in self.views:
            with suppress(BufferError):
                view.release()
        self.views = []
        return self._alive() is None


def _exported(pool: str, memory: Memory | None) -> memoryview:
    with suppress(TypeError, ValueError, BufferError):
        return memoryview(cast("bytearray", memory))  # whatever has bytes; mypy does not know that of NumPy's arrays
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
