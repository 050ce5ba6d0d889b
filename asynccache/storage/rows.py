"""The memory of one pool of pages, as rows of equal size that are counted from 0. The memory belongs to the caller.

Laws:
* Between calls nothing here holds an export of the memory (a memoryview or an array on it). So its owner can close or
  release it whenever no call is under way.
* A call has its rows on loan. When the loan ends, the call's views of the rows stop working. ``RowLoan.end`` also tells
  whether somebody still refers to the memory through something made from those views (a slice, an array).
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
    """The rows of ``page_bytes`` bytes in ``memory``, a writable, contiguous buffer. There are ``count`` of them.

    Raises:
        ConfigError: ``memory`` is no such buffer, or is not one or more whole rows long.
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
        """Return a view of all the memory as bytes, for stores that register it. Raises as ``lend`` does."""
        with self._whole() as flat:
            return flat[:]

    def lend(self, slots: Sequence[int]) -> RowLoan:
        """Return a loan of the rows ``slots``, each of which is less than ``count``.

        Raises:
            ConfigError: the memory was closed or released meanwhile, or has another size than at first.
        """
        size = self.page_bytes
        with self._whole() as flat:
            if flat.nbytes != self.nbytes:
                raise ConfigError(
                    f"memory of pool {self.pool!r} has {flat.nbytes} bytes now and had {self.nbytes} when it was given"
                )
            return RowLoan(flat, size, slots)

    def forget(self) -> None:
        """Drop the reference to the memory. From now on ``lend`` raises."""
        self._memory = None

    @contextmanager
    def _whole(self) -> Iterator[memoryview]:
        """A context with all the memory as writable bytes. The view is released at its end."""
        with _exported(self.pool, self._memory) as whole, _flat(self.pool, whole) as flat:
            yield flat


class RowLoan:
    """Rows of ``size`` bytes of ``flat`` on loan to one call. ``views`` has a view of each row, in the order of
    ``slots``."""

    __slots__ = ("_alive", "views")

    def __init__(self, flat: memoryview, size: int, slots: Sequence[int]) -> None:
        import numpy as np  # imported here because commands that only inspect a store do without NumPy

        array = np.frombuffer(flat, np.uint8)  # it lives as long as anything that was made from it
        self._alive = weakref.ref(array)
        with memoryview(cast("bytearray", array)) as whole:
            self.views = [whole[slot * size : slot * size + size] for slot in slots]

    def end(self) -> bool:
        """Release all views, whoever has them. Returns whether the memory is free now. If it is not, somebody still has
        something that was made from a view; ``end`` can be called again to see whether that has changed."""
        for view in self.views:
            with suppress(BufferError):
                view.release()
        self.views = []
        return self._alive() is None


def _exported(pool: str, memory: Memory | None) -> memoryview:
    with suppress(TypeError, ValueError, BufferError):
        return memoryview(cast("bytearray", memory))  # the cast is for mypy, which takes NumPy's arrays for no buffers
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
