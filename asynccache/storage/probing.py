"""Asking a store for a sign of life, also where the backend's ``exists`` answers from memory and asks no store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from asynccache.storage.contract import PageKey, Result, StorageBackend


@runtime_checkable
class Probeable(Protocol):
    """A backend with a call that only asks its store for a sign of life. Optional: of a backend without it an answer of
    ``exists`` is taken for one."""

    async def probe(self) -> None:
        """Return when the store has answered anything at all. Cancelling it is safe.

        Raises:
            BackendError: it does not answer.
        """
        ...


async def probe(backend: StorageBackend, keys: Sequence[PageKey]) -> list[Result]:
    """Ask ``backend`` for a sign of life: by its ``probe`` if it has one, else by ``exists`` of ``keys``. Returns a
    result for each key, MISS after a ``probe``. Raises what the backend's call raises; cancelling it cancels that
    call."""
    if not isinstance(backend, Probeable):
        return await backend.exists(keys)
    await backend.probe()
    return [Result.MISS] * len(keys)
