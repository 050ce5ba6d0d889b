"""The operations in flight, and the tasks that wait for each of them to end.

Law: each waiter awaits a future of its own, so cancelling one never touches another; an operation that is not here
has ended. When the cache closes, every waiter gets the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from asynccache.core.plan import Status

Waiter = asyncio.Future[Status]


class Operations:
    """The operations in flight, and the futures of those who wait for them."""

    def __init__(self) -> None:
        self._live: dict[int, list[Waiter]] = {}

    def __repr__(self) -> str:
        return f"Operations({len(self._live)} in flight)"

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, op: int) -> bool:
        return op in self._live

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._live))

    def open(self, op: int) -> None:
        """Note that ``op`` has begun; from now on it can be waited for."""
        self._live.setdefault(op, [])

    def end(self, op: int, status: Status) -> None:
        """Note that ``op`` has ended with ``status``, and wake everybody who waits for it."""
        for waiter in self._live.pop(op, ()):
            if not waiter.done():
                waiter.set_result(status)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The cache is closed: every waiter gets an ``error()`` of its own, and nothing is in flight any more."""
        live, self._live = self._live, {}
        for waiters in live.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error())

    def watch(self, ops: Iterable[int]) -> Waiter | None:
        """A future that is set when the first of ``ops`` ends; None if one of them has ended before, or ``ops`` is
        empty. The caller hands it to ``unwatch``."""
        ops = tuple(ops)
        if not ops or any(op not in self._live for op in ops):
            return None
        waiter: Waiter = asyncio.get_running_loop().create_future()
        for op in ops:
            self._live[op].append(waiter)
        return waiter

    def unwatch(self, ops: Iterable[int], waiter: Waiter) -> None:
        """The caller of ``watch`` does not need the future any more."""
        for op in ops:
            waiters = self._live.get(op)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)

    def call_when_any(self, ops: Iterable[int], call: Callable[[], object]) -> None:
        """Call ``call`` soon after one of ``ops`` has ended; at once, if one has ended before. It is also called when
        the cache closes."""
        ops = tuple(ops)
        waiter = self.watch(ops)
        if waiter is None:
            call()
        else:
            waiter.add_done_callback(partial(self._call, ops, call))

    def _call(self, ops: tuple[int, ...], call: Callable[[], object], waiter: Waiter) -> None:
        self.unwatch(ops, waiter)
        waiter.exception()  # if the cache is closed: those who wait for what ``call`` does hear of that elsewhere
        call()

    async def any(self, ops: Iterable[int]) -> Status | None:
        """Return when one of ``ops`` has ended, with its status (None: one had ended before).

        Cancelling stops the waiting and nothing else.
        """
        waiter = self.watch(ops)
        if waiter is None:
            return None
        try:
            return await waiter
        finally:
            self.unwatch(ops, waiter)

    async def all(self, ops: Iterable[int]) -> list[Status]:
        """Return when each of ``ops`` has ended, with the statuses of those that were in flight. Cancelling it stops
        the waiting and nothing else."""
        with self._watching(ops) as waiters:
            return [await waiter for waiter in waiters]

    @contextmanager
    def _watching(self, ops: Iterable[int]) -> Iterator[list[Waiter]]:
        """A future for each of ``ops`` that is in flight, which its end sets."""
        watched = [(op, waiter) for op in ops if (waiter := self.watch((op,))) is not None]
        try:
            yield [waiter for _, waiter in watched]
        finally:
            for op, waiter in watched:
                self.unwatch((op,), waiter)
                if not waiter.cancel() and not waiter.cancelled():
                    waiter.exception()  # asyncio complains of errors nobody looked at; the first was raised
