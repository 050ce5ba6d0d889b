"""Whether a store is there: for backends whose ``exists`` knows the answer without asking the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from asynccache.storage.contract import PageKey, Result, StorageBackend


@runtime_checkable
class Probeable(Protocol):
    """A backend that can ask its store for a sign of life. Optional; ``exists`` is the sign of all others."""

    async def probe(self) -> None:
        """Return when the store has answered anything at all. Cancelling it is safe.

        Raises:
            BackendError: it does not answer.
        """
        ...


async def probe(backend: StorageBackend, keys: Sequence[PageKey]) -> list[Result]:
    """Ask for a sign of life; as ``exists`` of ``keys`` where that is one. Cancelling it cancels the backend's call."""
    if not isinstance(backend, Probeable):
        return await backend.exists(keys)
    await backend.probe()
    return [Result.MISS] * len(keys)
