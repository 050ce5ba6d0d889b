"""Signals, by which a thread wakes coroutines of any loop; bells, which wake the coroutines of one loop; and the thread
of a stream, which does one piece of work after the other.

No loop is blocked: ``block`` and ``join`` are for other threads. All coroutines for which a bell is rung before its
loop answers are woken by one callback of the loop.

Where the mutable state lives: a signal's state and waiters under the signal's lock, a bell's list under the bell's.
Everything may be called from any thread; ``wait`` is a coroutine of whatever loop runs it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from asynccache.errors import CacheClosed, CopyFailed

Callback = Callable[[], object]


class Happened:
    """An event before which there is no work: it is done from the start."""

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False

    async def wait(self) -> None:
        """Return at once; there is nothing to cancel."""


HAPPENED = Happened()


class Bell:
    """Wakes coroutines of one loop. All coroutines for which it is rung before the loop answers are woken by one
    callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._rung: list[asyncio.Future[None]] = []

    def ring(self, *futures: asyncio.Future[None]) -> None:
        """Have the loop mark ``futures`` as done, soon. From any thread."""
        with self._lock:
            quiet = not self._rung
            self._rung += futures
        if not quiet:
            return
        try:
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return  # the loop was closed, and its waiters went with it

    def _answer(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for future in rung:
            if not future.done():
                future.set_result(None)


class Bells:
    """One bell for each loop that waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: dict[asyncio.AbstractEventLoop, Bell] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> Bell:
        """Return the bell of ``loop``, which is made if there is none. From any thread."""
        with self._lock:
            bell = self._bells.get(loop)
            if bell is None:
                self._bells = {k: b for k, b in self._bells.items() if not k.is_closed()}
                bell = self._bells[loop] = Bell(loop)
            return bell


class _Ring:
    """The callback of a coroutine that waits: it rings for the coroutine's future."""

    __slots__ = ("bell", "future")

    def __init__(self, bell: Bell, future: asyncio.Future[None]) -> None:
        self.bell = bell
        self.future = future

    def __call__(self) -> None:
        self.bell.ring(self.future)


def call_all(callbacks: Iterable[Callback]) -> None:
    """Call each of ``callbacks``. Coroutines of one loop are woken by one callback of it, however many there are."""
    rings: dict[Bell, list[asyncio.Future[None]]] = {}
    for callback in callbacks:
        if isinstance(callback, _Ring):
            rings.setdefault(callback.bell, []).append(callback.future)
        else:
            callback()
    for bell, futures in rings.items():
        bell.ring(*futures)


class Signal:
    """An event that happens once, in success or failure. Any number of coroutines and threads may wait for it."""

    def __init__(
        self, bells: Bells, source: str, lock: threading.Lock | threading.Condition | None = None
    ) -> None:
        """``source``: the name of the stream that the signal belongs to, for messages. ``lock``: a lock to share with
        other signals; None: the signal has its own."""
        self._bells = bells
        self._source = source
        self._lock = lock or threading.Lock()
        self._fired = False
        self._error: Exception | None = None
        self._callbacks: list[Callback] = []

    def done(self) -> bool:
        return self._fired

    def failed(self) -> bool:
        return self._error is not None

    async def wait(self) -> None:
        """Return when the work before the event is done. Cancelling stops the waiting, never the work.

        Raises:
            CopyFailed: that work failed; the device's error is its cause.
        """
        if not self._fired:
            await self._fires()
        if self._error is not None:
            raise CopyFailed(f"a copy on stream {self._source!r} failed: {self._error}") from self._error

    async def _fires(self) -> None:
        loop = asyncio.get_running_loop()
        callback = _Ring(self._bells.of(loop), loop.create_future())
        if not self.subscribe(callback):
            return
        try:
            await callback.future
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

    def block(self) -> None:
        """Hold the calling thread until the event has fired. For the threads of streams, never for a loop's."""
        fired = threading.Event()
        if self.subscribe(fired.set):
            fired.wait()

    def subscribe(self, callback: Callback) -> bool:
        """Have ``callback`` called from the thread that fires the event, and return True. If it has fired already,
        return False and call nothing."""
        with self._lock:
            if not self._fired:
                self._callbacks.append(callback)
            return not self._fired

    def fire(self, error: Exception | None = None) -> None:
        """Note that the work has ended, with ``error`` or well, and tell all who wait. Firing twice does nothing."""
        call_all(self.note_fired(error))

    def note_fired(self, error: Exception | None = None) -> list[Callback]:
        """Do the same as ``fire``, but return the callbacks for ``call_all`` instead of calling them: so a caller that
        fires several events tells all who wait at once."""
        with self._lock:
            if self._fired:
                return []
            self._error, self._fired = error, True
            callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        state = "pending" if not self._fired else "failed" if self._error else "done"
        return f"<{type(self).__name__} of {self._source!r}: {state}>"


class HostGate(Signal):
    """An event that is fired by hand, by a test that holds a stream or by an engine that computes on the host.

    ``shut``: the gates of a device that are not open yet. A gate enters itself there, and takes itself out."""

    def __init__(self, bells: Bells, shut: dict[HostGate, None]) -> None:
        super().__init__(bells, "gate")
        self._shut = shut
        shut[self] = None

    def open(self) -> None:
        """Let go of every stream and coroutine that waits. From any thread."""
        self.fire()

    def fire(self, error: Exception | None = None) -> None:
        """Do the same as ``open``; with ``error``, the work that the gate stands for has failed."""
        self._shut.pop(self, None)
        super().fire(error)


class WorkThread:
    """The thread of a stream, which does the work that it is given, in order. ``first``, ``last``: work to do before
    all other, and after it. No work may raise."""

    def __init__(self, name: str, first: Callback | None = None, last: Callback | None = None) -> None:
        self._name = name
        self._first, self._last = first, last
        self._queue: SimpleQueue[Callback | None] = SimpleQueue()
        self._closed = False
        self._process = os.getpid()
        # No work is queued behind the end mark, where it would never run. Reentrant, for finalizers that submit.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=f"asynccache-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callback) -> None:
        """Have the thread do ``work`` after all that it was given before.

        Raises:
            CacheClosed: the stream was released, or its device closed. Or this process was forked from the one that
                has the thread: here nobody would do the work.
        """
        if self._process != os.getpid():  # first: another thread may have held the lock when the process was forked
            raise CacheClosed(f"stream {self._name!r} belongs to the process that this one was forked from: open a "
                              "device of its own here")  # fmt: skip
        with self._lock:
            if self._closed:
                raise CacheClosed(f"stream {self._name!r} was released, or its device is closed")
            self._queue.put(work)

    def close(self) -> None:
        """Take no more work; the thread ends after what is queued."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def ended(self) -> bool:
        """Return True if the thread was closed and has done all that was queued."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    def queued(self) -> int:
        """Return about how many pieces of work wait."""
        return self._queue.qsize()

    def _run(self) -> None:
        if self._first is not None:
            self._first()
        while work := self._queue.get():
            work()
            del work  # it holds buffers, and the next get may last
        if self._last is not None:
            self._last()
