"""A thread with an event loop that makes the calls of other threads to the stores. Each call has a future.

The memory of one pool of pages is given as ``Rows`` of equal size, counted from 0. It belongs to the caller, and a call
has its rows *on loan*. When the loan ends, the call's views of the rows stop working, and ``RowLoan.end`` tells whether
somebody still refers to the memory through something made from them (a slice, an array). Between calls nothing here
holds an export of the memory (a memoryview or an array on it), so its owner can close or release it whenever no call is
under way.

* A call begins when the loop takes it from the queue. Until then its future can be cancelled, and nothing refers to its
  memory. From then on its future is done only after its loan has ended.
* One wake-up of the loop begins all calls in the queue, and a call's future is done in the turn of the loop in which
  its last store answered. Each further turn would cost 5 ms beside a thread that never lets go of the GIL.
* A call that is late, or is cut short by ``close``, is answered with what is known by then, and with FAILED for the
  rest. A call with memory is cancelled for that. A question or a hint has no memory, so it is answered at once and
  goes on unheard until the store's own deadline: otherwise the breaker would not learn that the store hangs. Only
  ``close`` cancels it.
* The main task owns the stores. It opens them, waits until ``close`` is called and all calls have ended, and closes
  them. Then the thread ends. A ``clear`` does not wait in the queue; ``close`` cuts it short as it does a call.

Mutable state: ``_lock`` guards the queue and the flags that other threads use. All else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import TIMEOUT_MAX, Event, Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from asynccache.errors import ConfigError, Timeout, Unavailable, forget_frames
from asynccache.storage.attachment import open_all
from asynccache.storage.contract import Hint, PageKey, Result, StorageBackend, StoreLayout
from asynccache.storage.tiers import TieredStore

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


ATTEMPTS = 50
PAUSE = 0.002
"""The memory is looked at up to ``ATTEMPTS`` times, ``PAUSE`` seconds apart, until it is free. By contract a store has
let go when it answers, but a thread of its own may be just about to drop its last reference."""

_T = TypeVar("_T")


StoreVerb = Literal["exists", "get", "put", "hint"]


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call. ``slots`` are the rows where its pages lie, in the order of ``keys``; EXISTS and a hint have none.
    ``until`` is its deadline by ``time.monotonic``, or None. ``known`` has the answers that have come so far, MISS for
    the rest. ``hint``: what a hint says, and its seconds.
    """

    verb: StoreVerb
    keys: Sequence[PageKey]
    rows: Rows
    slots: Sequence[int]
    until: float | None
    future: Future[list[Result]] = field(default_factory=Future)
    asking: bool = False
    """Whether the stores work on this call and were not told to give up."""
    known: list[Result] = field(default_factory=list)
    loan: RowLoan | None = None
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    hint: tuple[Hint, float] | None = None

    def __repr__(self) -> str:
        return f"PendingCall({self.verb}, {len(self.keys)} pages of {self.rows.pool!r})"

    @property
    def borrows(self) -> bool:
        """True if it uses the caller's memory."""
        return self.verb in ("get", "put")

    def so_far(self) -> list[Result]:
        """Return the results of a call that is cut short now: HIT and CORRUPT as the stores have answered, FAILED for
        the rest."""
        known = self.known or [Result.MISS] * len(self.keys)
        return [Result.FAILED if result is Result.MISS else result for result in known]


class NoThread(Unavailable):
    """The system lets this process start no further thread."""


class StoreThread:
    """The thread, its event loop and its stores. ``start`` begins the thread and opens the stores. After a
    ``start`` that failed there is neither a thread nor an open store."""

    def __init__(self, name: str) -> None:
        self.tiers = TieredStore()
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._lock = Lock()
        self._queue: deque[PendingCall] = deque()
        self._waking = False
        self._refusing = False
        self._under_way: dict[PendingCall, None] = {}
        self._clearing: set[asyncio.Task[None]] = set()
        self._cut = False
        self._closing = asyncio.Event()
        self._opened: Future[None] = Future()
        self._over = False
        self._ended = Event()
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = Thread(target=self._live, name=name, daemon=True)
        self._begin: tuple[Sequence[str | StorageBackend], StoreLayout, Mapping[str, str], Sequence[Rows]]

    # in any thread

    def start(
        self, storages: Sequence[str | StorageBackend], layout: StoreLayout, options: Mapping[str, str],
        memory: Sequence[Rows],
    ) -> None:  # fmt: skip
        """Start the thread, open all stores and register ``memory`` with them. Returns when they are ready.

        If opening fails, its error is raised here, without its frames. By then the thread has ended and every store
        that was opened is closed.
        """
        self._begin = storages, layout, options, memory
        try:
            try:
                self._thread.start()
            except RuntimeError as error:
                self._loop.close()
                self._forget()
                raise NoThread(f"no thread can be started to serve the stores: {error}") from None
            self._opened.result()
        except NoThread:
            raise
        except BaseException:
            with self._lock:
                if not self._over:  # this thread was interrupted while it waited, maybe before the other one began
                    self._loop.call_soon_threadsafe(self._give_up)
            self._ended.wait()
            self._thread.join()
            raise

    def submit(self, call: PendingCall) -> Future[list[Result]]:
        """Put ``call`` into the queue and return its future.

        Raises:
            Unavailable: the stores are closed, or being closed.
        """
        with self._lock:
            self._check_open()
            self._queue.append(call)
            if not self._waking:
                self._waking = True
                self._loop.call_soon_threadsafe(self._begin_queued)
        return call.future

    def clear(self, seconds: float | None) -> Future[None]:
        """Clear the stores within ``seconds`` (None: no limit). Returns a future that is done when they are cleared.
        Its exception is ``Unavailable`` if ``close`` cut it short.

        Raises:
            Unavailable: the stores are closed, or being closed.
        """
        with self._lock:
            self._check_open()
            return asyncio.run_coroutine_threadsafe(self._clear(seconds), self._loop)

    def ask(self, question: Callable[[], _T]) -> _T:
        """Call ``question`` on the loop, wait for it, and return what it returns.

        Raises:
            Unavailable: the stores are closed, or being closed.
        """
        if current_thread() is self._thread:
            return question()
        answer: Future[_T] = Future()
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(_answer, answer, question)
        return answer.result()

    def close(self, deadline: float, patience: float) -> bool:
        """Refuse new calls, and cancel those that are left after ``deadline`` seconds. Waits until the thread has
        ended, or until ``patience`` seconds after the deadline. Returns whether the thread has ended.

        Raises:
            ConfigError: it was called in the loop's own thread, which would wait for itself.
        """
        if current_thread() is self._thread:
            raise ConfigError("close() was called in a callback of a future, in the thread that it waits for: call it "
                              "in another thread")  # fmt: skip
        with self._lock:
            self._refusing = True
            if not self._over:
                self._loop.call_soon_threadsafe(self._begin_closing, deadline)
        self._thread.join(min(deadline + patience, TIMEOUT_MAX))
        return not self._thread.is_alive()

    def held(self) -> int:
        """Return how many pages there are whose memory a store may be using now."""
        return sum(len(call.keys) for call in list(self._under_way) if call.borrows)

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters of the stores and of this instance. To be called on the loop only."""
        counts = {name: self.counts[name] for name in ("late_calls", "kept_pages")}
        return {**self.tiers.stats(), "calls_in_flight": len(self._under_way), **counts}

    def _check_open(self) -> None:
        if self._refusing:
            why = "" if self.error is None else f" because of {self.error!r}"
            raise Unavailable(f"the stores were closed{why}: nothing can be asked of them any more")

    # the thread

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run(*self._begin))
        except BaseException as error:
            forget_frames(error)
            self.error = error
        for call in self._queue:  # some are left only if an error has ended the loop
            if call.future.set_running_or_notify_cancel():
                self._answer(call, call.so_far())
        self._forget()
        if self.error is not None and not self._opened.done():
            self._opened.set_exception(self.error)
        self._ended.set()

    def _forget(self) -> None:
        for rows in self._begin[-1]:
            rows.forget()
        del self._begin

    async def _run(
        self, storages: Sequence[str | StorageBackend], layout: StoreLayout, options: Mapping[str, str],
        memory: Sequence[Rows],
    ) -> None:  # fmt: skip
        """Open the stores, wait until ``close`` is called and every call has ended, and close the stores. Cancelling it
        while it opens them closes those that are open by then."""
        self._main = asyncio.current_task()
        try:
            await open_all(self.tiers, storages, layout, options)
            for attached in self.tiers.attached:
                for rows in memory:
                    attached.store.register(rows.pool, rows.view())
            self._opened.set_result(None)
            await self._closing.wait()
            while left := [call.task for call in self._under_way if call.task is not None] + [*self._clearing]:
                await asyncio.wait(left)
        finally:
            try:
                await self.tiers.aclose()
            finally:
                with self._lock:
                    self._refusing = self._over = True

    def _give_up(self) -> None:
        """End the thread because ``start`` was interrupted, so that nobody waits for the stores any more."""
        self._closing.set()
        if self._main is not None:
            self._main.cancel()

    def _begin_closing(self, deadline: float) -> None:
        self._begin_queued()
        for call in self._under_way:
            if call.future.done():  # an EXISTS call that was answered at its deadline and goes on unheard
                self._end(call)
        self._closing.set()
        self._loop.call_later(deadline, self._cut_short)

    def _cut_short(self) -> None:
        self._cut = True
        for task in self._clearing:
            task.cancel()
        for call in self._under_way:
            if not call.future.done():
                self.counts["abandoned_pages"] += len(call.keys)
            if not call.borrows:
                self._answer(call, call.so_far())
            self._end(call)

    async def _clear(self, seconds: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clearing.add(task)
        try:
            async with asyncio.timeout(seconds):
                await self.tiers.clear()
        except TimeoutError:
            raise Timeout(f"the stores were not cleared within {seconds} s") from None
        except asyncio.CancelledError:
            if not self._cut:
                raise
            raise Unavailable("the stores were closed before they were cleared") from None
        finally:
            self._clearing.discard(task)

    # calls

    def _begin_queued(self) -> None:
        self._waking = False  # first, so that a call which is put into the queue from now on wakes the loop again
        while self._queue:
            call = self._queue.popleft()
            if call.future.set_running_or_notify_cancel():
                self._begin_call(call)

    def _begin_call(self, call: PendingCall) -> None:
        left = None if call.until is None else call.until - time.monotonic()
        if left is not None and left <= 0:
            self.counts["late_calls"] += 1
            self._answer(call, call.so_far())
            return
        if call.borrows:
            try:
                call.loan = call.rows.lend(call.slots)
            except ConfigError as error:
                forget_frames(error)
                self._end_future(partial(call.future.set_exception, error))
                return
        call.asking = True
        self._under_way[call] = None
        call.task = self._loop.create_task(self._serve(call))
        if left is not None:
            call.timer = self._loop.call_later(left, self._late, call)

    async def _serve(self, call: PendingCall) -> None:
        results = None
        try:
            if call.loan is not None and call.verb == "put":
                results = await self.tiers.put(call.keys, call.loan.views)
            else:
                call.known = [Result.MISS] * len(call.keys)
                if call.loan is not None:
                    results = await self.tiers.get(call.keys, call.loan.views, call.known)
                elif call.hint is not None:
                    results = await self.tiers.hint(call.hint[0], call.keys, call.hint[1])
                else:
                    results = await self.tiers.exists(call.keys, call.known)
        except BaseException as error:  # it was cancelled, or a plug-in raised what no store has a right to raise
            forget_frames(error)
        if call.timer is not None:
            call.timer.cancel()
        call.asking = False
        if call.loan is not None:
            await self._let_go(call.loan, len(call.keys))
        del self._under_way[call]
        self._answer(call, call.so_far() if results is None else results)

    def _late(self, call: PendingCall) -> None:
        """End a call whose deadline is over. One without memory is answered at once and goes on unheard."""
        if call.future.done():
            return
        self.counts["late_calls"] += 1
        if not call.borrows:
            self._answer(call, call.so_far())
        else:
            self._end(call)

    def _end(self, call: PendingCall) -> None:
        if call.asking and call.task is not None:
            call.asking = False
            call.task.cancel()

    async def _let_go(self, loan: RowLoan, pages: int) -> None:
        """End the loan. If somebody still refers to the memory, wait up to ``ATTEMPTS`` times ``PAUSE`` for them to let
        go of it; what is not free then is counted."""
        free, attempts = loan.end(), 0
        while not free and attempts < ATTEMPTS:
            await asyncio.sleep(PAUSE)
            free, attempts = loan.end(), attempts + 1
        if not free:
            self.counts["kept_pages"] += pages

    def _answer(self, call: PendingCall, results: list[Result]) -> None:
        if not call.future.done():
            self._end_future(partial(call.future.set_result, results))

    def _end_future(self, done: Callable[[], None]) -> None:
        """Make a future done by ``done()``. That runs the callbacks of the future's owner: one that raises, maybe
        SystemExit, must not end the loop."""
        try:
            done()
        except BaseException as error:
            self._loop.call_exception_handler({"message": "a callback of a future raised", "exception": error})


def _answer(answer: Future[_T], question: Callable[[], _T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
