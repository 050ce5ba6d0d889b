"""The stores of a group: which there are, by number, and which pages the watched ones have.

Laws:
* A store is opened on all workers or on none.
* A store has the same number on all workers: the head chooses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.settle import settled
from asynccache.storage.url import StoreOptions, check_name
from asynccache.worker import messages as m
from asynccache.worker.contract import Storage, StoreEntry
from asynccache.worker.watched_keys import WatchedKeys

T = TypeVar("T")


class CallAll(Protocol):
    """See ``WorkerGroup._call``."""

    async def __call__(self, make: Callable[[int], m.Message], kind: type[T]) -> dict[int, T]: ...


async def completed_quietly(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile, and drop its error."""
    task = asyncio.get_running_loop().create_task(work)
    await settled([task])
    if not task.cancelled():
        task.exception()


class GroupStores:
    """See ``WorkerStores``. ``call``: sends all workers a message, and returns their answers. ``put``: sends all a
    message that nobody answers. ``be_patient``: called with 1 before a store is opened, and with -1 afterwards.
    ``keys``: the pages that the watched stores have. ``slowest``: the longest ``timeout`` of an open store, in
    seconds."""

    def __init__(
        self, call: CallAll, put: Callable[[m.Message], None], be_patient: Callable[[int], None], keys: WatchedKeys
    ) -> None:  # fmt: skip
        self.entries: tuple[StoreEntry, ...] = ()
        self.keys = keys
        self._call = call
        self._put = put
        self._be_patient = be_patient
        self._open: dict[int, tuple[StoreEntry, bool]] = {}
        self._last = 0

    def __repr__(self) -> str:
        return f"GroupStores({', '.join(entry.options.name for entry in self.entries)})"

    @property
    def slowest(self) -> float:
        return max((entry.options.timeout for entry, _ in self._open.values()), default=0.0)

    def begin(self, options: StoreOptions, *, shared: bool) -> None:
        """Note a store that all workers have opened with their pools: it is the next in number, and the farthest.
        ``shared``: see ``is_shared``."""
        self._last += 1
        entry = StoreEntry(self._last, options)
        self._open[entry.number] = entry, shared
        self.entries = (*self.entries, entry)

    def find(self, name: str | None) -> StoreEntry:
        """See ``WorkerStores``."""
        if name is not None:
            name = checks.text("name", name)
        found = [entry for entry in self.entries if name in (None, entry.options.name)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(entry.options.name for entry in self.entries) or "none"
        raise ConfigError(f"storage: {'name the store' if name is None else f'no store {name!r}'}; attached: {there}")

    async def open(self, storage: Storage, options: Mapping[str, str], position: int | None) -> StoreEntry:
        """See ``WorkerStores``."""
        if not isinstance(storage, str):
            raise ConfigError(f"storage={checks.shown(storage)}: workers of other processes take URLs")
        url = storage
        self._last += 1
        number = self._last
        try:
            self._be_patient(1)
            try:
                opened = await self._call(
                    lambda call: m.OpenStore(call, number, url, dict(options), position), m.StoreOpened
                )
            finally:
                self._be_patient(-1)
            first = next(iter(opened.values()))
            for rank, one in opened.items():
                if (one.options.name, one.options.write) != (first.options.name, first.options.write):
                    raise ConfigError(f"storage: rank {rank} opened another store: {one.options}")
        except BaseException:
            await completed_quietly(self.drop(number))
            raise
        entry = StoreEntry(number, first.options)
        self._open[number] = entry, any(one.shared for one in opened.values())
        return entry

    def use(self, number: int, position: int | None) -> None:
        """See ``WorkerStores``."""
        entry, _ = self._open[number]
        check_name(entry.options.name, [other.options.name for other in self.entries])
        if position is not None:
            position = checks.integer("position", position, 0, len(self.entries))
        at = len(self.entries) if position is None else position
        self.entries = (*self.entries[:at], entry, *self.entries[at:])
        self._put(m.UseStore(number, position))

    async def drop(self, number: int) -> None:
        """See ``WorkerStores``."""
        self._open.pop(number, None)
        await self._call(lambda call: m.DropStore(call, number), m.CallDone)

    def leave(self, number: int) -> None:
        """See ``WorkerStores``."""
        if any(entry.number == number for entry in self.entries):
            self.entries = tuple(entry for entry in self.entries if entry.number != number)
            self._put(m.LeaveStore(number))

    async def close(self, number: int) -> None:
        """See ``WorkerStores``."""
        self._open.pop(number, None)
        await self._call(lambda call: m.CloseStore(call, number), m.CallDone)

    async def watch(self, number: int) -> None:
        """See ``WorkerStores``."""
        self.keys.watch(number, shared=self._open[number][1])
        await self._call(lambda call: m.WatchStore(call, number), m.CallDone)

    def unwatch(self, number: int) -> None:
        """See ``WorkerStores``."""
        if self.keys.unwatch(number):
            self._put(m.UnwatchStore(number))
