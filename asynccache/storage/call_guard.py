"""The guard before a backend: it decides whether a call is made, how many run at a time, and how long each may take.

A call with keys first asks the breaker, then waits for its place, then has ``timeout`` seconds. If the backend raises
any error, all keys are FAILED and nothing is raised. A call that has taken ``slow`` seconds counts as failed for the
breaker, however it ends later. So a store that hangs is left alone before its deadline. Calls without keys (``clear``,
``flush``, ``scrub``) are made whatever the breaker says, and raise their errors.

A call with buffers of its caller ends only when the backend has let go of them, however long that takes. Deletions and
calls without keys use no such buffers. They end after twice ``timeout`` seconds (for a place, and for the answer), even
if the backend ignores that it is cancelled.

Reads and writes have places of their own, as many of each, and wait for one first come, first served. So a request's
read finds a place however slow the writes are, and writes go on however much is read.

The breaker says when to stop calling a backend that fails, and when to try it again. It is a pure state machine:
callers pass the time in.

    CLOSED     --threshold failures, see below-->  OPEN       every call is refused until the back-off is over
    OPEN       --back-off over, ``allow``-->       HALF_OPEN  what was allowed is the probe, all else is refused
    HALF_OPEN  --probe succeeds-->                 CLOSED     on probation
    HALF_OPEN  --probe fails-->                    OPEN       the back-off doubles, up to its limit
    HALF_OPEN  --probe abandoned-->                OPEN       the next call may probe at once

Calls are of several *kinds* (a read, a write, a question). Failures are counted by kind, and a success clears only the
count of its own kind: a store that still answers questions and serves no pages is found out. The breaker opens when the
counts of all kinds together reach the threshold.

After a successful probe the breaker is on probation for the kind whose failure had opened it. The next failure of that
kind opens it again, with the back-off doubled. The next success of that kind ends the probation, and the back-off is
short again.

Every change of state begins a new *period*, and a permit is the number of the period in which it was given. The outcome
of a call from an earlier period tells how the backend was then, so it changes nothing.

The guard makes no caller's call the probe. The first call with keys after a back-off is refused like those before it,
and begins a probe beside itself: the backend is asked for a sign of life (``contract.probe``). The probe has ``slow``
seconds at most and takes none of the places. So a store that is still away delays nobody, and where nobody calls there
are no probes. A call without keys begins none: it may take ``timeout`` seconds, and may succeed without asking the
store anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from enum import IntEnum
from typing import Any, Literal, NewType, TypeVar

from asynccache import checks
from asynccache.errors import BackendError, Timeout
from asynccache.redaction import redacted
from asynccache.settle import settled
from asynccache.storage.contract import PageKey, Result

Permit = NewType("Permit", int)
REFUSED = Permit(0)


class BreakerState(IntEnum):
    """The state of a breaker, which says what calls are let through: all of them, none of them, or one as a probe."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


BEST_FIRST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def best_off(states: Iterable[float]) -> BreakerState:
    """Return the best of the states of several stores, by ``BEST_FIRST``: HALF_OPEN is better than OPEN. The numbers of
    ``BreakerState`` are not in that order."""
    return min(map(BreakerState, map(int, states)), key=BEST_FIRST.index)


class Breaker:
    """The breaker of one store.

    Args:
        threshold: failures after which it opens.
        backoff: seconds for which it stays open the first time. Each further time in a row takes twice as long.
        max_backoff: seconds that a back-off takes at most.
        jitter: returns a factor for each back-off, so that the users of a shared store do not all come back at once.

    ``opened`` counts how often it went from CLOSED to OPEN. ``changed`` is called without arguments after every change
    of ``state``; it must return soon, and may be replaced by the owner.

    In the methods ``now`` is a time in seconds by a clock that never goes back, ``permit`` is what ``allow`` returned,
    and ``kind`` is any text. Any other value raises ``ConfigError`` and changes nothing.
    """

    def __init__(
        self,
        threshold: int = 5,
        backoff: float = 1.0,
        max_backoff: float = 15.0,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self.changed: Callable[[], object] = lambda: None
        self._threshold = checks.integer("threshold", threshold, 1)
        self._backoff = self._first_backoff = checks.number("backoff", backoff, above=0)
        self._max_backoff = checks.number("max_backoff", max_backoff, above=0)
        self._jitter = checks.function("jitter", jitter)
        self._failures: Counter[str] = Counter()
        self._blamed: str | None = None
        self._retry_at = 0.0
        self._shut_at = 0.0
        self._probed_at = 0.0
        self._shut_for = 0.0
        self._period = Permit(1)

    @classmethod
    def brief(cls) -> Breaker:
        """Return a breaker for a part of a store, such as one server, or the room for new pages. It opens at the first
        failure, for 0.1 s; each further time in a row takes twice as long, up to 1 s."""
        return cls(threshold=1, backoff=0.1, max_backoff=1.0)

    def __repr__(self) -> str:
        return f"Breaker({self.state.name}, failures={dict(self._failures)}, backoff={self._backoff})"

    def allow(self, now: float) -> Permit:
        """Return a permit for one call, or REFUSED. When the call has ended, its permit is to be passed to ``success``,
        ``failure`` or ``abandon``."""
        now = checks.number("now", now)
        if self.state is BreakerState.CLOSED:
            return self._period
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self._probed_at = now
            return self._enter(BreakerState.HALF_OPEN)
        return REFUSED

    def success(self, permit: Permit, now: float | None = None, kind: str = "") -> None:
        """Note that the call succeeded. ``now`` is used only for the sum that ``shut_for`` returns; without it the
        time since the probe began is not added."""
        permit = Permit(checks.integer("permit", permit, 0))
        now = None if now is None else checks.number("now", now)
        kind = checks.text("kind", kind)
        if permit != self._period:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.CLOSED)
            self._shut_for += (self._probed_at if now is None else now) - self._shut_at
            return
        self._failures[kind] = 0
        if kind == self._blamed:
            self._blamed = None

    def failure(self, permit: Permit, now: float, kind: str = "") -> None:
        """Note that the call failed as a whole, or took too long."""
        permit = Permit(checks.integer("permit", permit, 0))
        now, kind = checks.number("now", now), checks.text("kind", kind)
        if permit != self._period:
            return
        longer = True
        if self.state is BreakerState.CLOSED:
            self._failures[kind] += 1
            longer = kind == self._blamed
            if not longer and self._failures.total() < self._threshold:
                return
            self._blamed = kind
            self._failures.clear()
            self.opened += 1
            self._shut_at = now
        self._backoff = min(self._backoff * 2, self._max_backoff) if longer else self._first_backoff
        self._retry_at = now + self._backoff * self._jitter()
        self._enter(BreakerState.OPEN)

    def abandon(self, permit: Permit) -> None:
        """Note that the call was cancelled, so that it says nothing about the backend. If it was the probe, the next
        call may probe at once."""
        if checks.integer("permit", permit, 0) == self._period and self.state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.OPEN)

    def shut_for(self, now: float) -> float:
        """Return for how many seconds, all in all, the breaker has not been CLOSED."""
        now = checks.number("now", now)
        return self._shut_for + (0.0 if self.state is BreakerState.CLOSED else now - self._shut_at)

    def _enter(self, state: BreakerState) -> Permit:
        self.state = state
        self._period = Permit(self._period + 1)
        self.changed()
        return self._period


_T = TypeVar("_T")

BackendCall = Callable[[Sequence[PageKey]], Awaitable[list[Result]]]
CallKind = Literal["ask", "get", "drop", "put", "other"]
"""What a call does. The breaker counts failures by kind. ``drop`` is the deletion of what a get found to be corrupt: it
takes a read's place, since the caller of that get is waiting. Only a ``put`` takes a write's."""


LET_GO = 0.5
"""Seconds for which a call without buffers may go on after it was cancelled. Then it is left behind."""
RESULTS = tuple(Result)
LOG = logging.getLogger("asynccache")
COUNTERS = ("failed_pages", "failed_calls", "timeouts", "slow_calls", "refused_calls", "crowded_calls")


class CallGuard:
    """The guard of one backend, which errors call ``name``. Belongs to one event loop.

    ``ask`` makes the probe: it asks the backend for a sign of life (``contract.probe``). ``timeout`` and ``slow`` are
    seconds; ``slow`` 0 means that no call counts as slow. ``concurrency``: how many reads the backend has at a time,
    and how many writes.
    ``clock`` returns the breaker's time in seconds; None stands for the event loop's clock.
    """

    def __init__(
        self, name: object, ask: BackendCall, breaker: Breaker, *, timeout: float, slow: float, concurrency: int,
        clock: Callable[[], float] | None,
    ) -> None:  # fmt: skip
        self.breaker = breaker
        self.reads = asyncio.Semaphore(concurrency)
        self.writes = asyncio.Semaphore(concurrency)
        self.last_error: Exception | None = None
        self._name = name
        self._ask = ask
        self._timeout = timeout
        self._slow = slow
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._probing: asyncio.Task[list[Result]] | None = None
        self._unbuffered: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"CallGuard({self.breaker!r}, {self.reads!r}, {self.writes!r})"

    def stats(self) -> dict[str, int | float]:
        """Return the counters of this guard and of its breaker, by name."""
        now = self._clock() if self._clock else 0.0
        return {
            **{name: self._counts[name] for name in COUNTERS},
            "breaker": int(self.breaker.state),
            "breaker_opened": self.breaker.opened,
            "breaker_open_seconds": self.breaker.shut_for(now),
        }

    async def aclose(self) -> None:
        """Cancel the probe, if there is one, and wait for its end and that of calls without buffers, such as
        those that were left behind. Cancelling it does not shorten that."""
        if self._probing is not None:
            self._probing.cancel()
            await settled([self._probing])
        await settled(list(self._unbuffered))

    def refuses(self, keys: Sequence[PageKey]) -> bool:
        """Return True if the breaker refuses a call for these keys now. If so the call is counted as refused, and a
        probe is begun where one is due."""
        if self.breaker.state is BreakerState.CLOSED:
            return False
        if self._probing is None or self._probing.done():  # while a probe hangs no other is begun
            permit = self.breaker.allow(self._now())
            if permit != REFUSED:
                timeout = min(self._timeout, self._slow or self._timeout)
                probe = self._call_with_keys("ask", permit, keys[:1], self._ask, timeout)
                self._probing = asyncio.get_running_loop().create_task(probe, name="asynccache-probe")
        self._counts["refused_calls"] += 1
        return True

    async def answers(self, kind: CallKind, keys: Sequence[PageKey], act: BackendCall) -> list[Result]:
        """Make the call ``act(keys)`` and return its answers. Returns FAILED for every key if the call is refused, gets
        no place in time, raises, misses its deadline, or answers something else than a result for each key. The
        breaker counts its failures under ``kind``.

        Cancelling it returns at once while it waits for a place, and otherwise when the backend has let go of the
        call's buffers.
        """
        if not keys:
            return []
        places = self.writes if kind == "put" else self.reads
        if self.refuses(keys) or not await self._takes(places):
            return [Result.FAILED] * len(keys)
        try:
            if self.refuses(keys):
                return [Result.FAILED] * len(keys)
            return await self._call_with_keys(kind, self.breaker.allow(self._now()), keys, act, self._timeout)
        finally:
            places.release()

    async def on_request(self, name: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """Make the call ``act()``, which somebody asked for by ``name`` (``clear``, ``flush``, ``scrub``), and return
        what it returns. The call is made even while the breaker refuses calls; the breaker does not hear then how it
        ends.

        Raises:
            BackendError: the backend failed. ``Timeout``: it did not answer within the deadline, or no place came free.
        """

        async def with_a_place() -> _T:
            if not await self._takes(self.writes):
                raise Timeout(f"{name}: the store is busy with other calls for {self._timeout} s")
            try:
                closed = self.breaker.state is BreakerState.CLOSED  # else a permit would make this call the probe
                permit = self.breaker.allow(self._now()) if closed else REFUSED
                return await self._timed_call("other", permit, lambda: _not_cancelled_inside(act()), self._timeout)
            except BackendError:
                raise
            except TimeoutError as error:
                raise Timeout(f"{name}: no answer in {self._timeout} s") from error
            except Exception as error:
                raise BackendError(f"{name}: {error!r}") from error
            finally:
                self.writes.release()

        return await self.without_buffers(name, with_a_place())

    async def without_buffers(self, name: str, work: Coroutine[Any, Any, _T]) -> _T:
        """Make the call ``work``, which uses no buffer of its caller, and return what it returns. If the backend does
        not let go when its time is up or the caller is cancelled, the call is left behind after ``LET_GO`` seconds. It
        keeps its place, and ``aclose`` waits for it.

        Raises:
            Timeout: the call was left behind.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"asynccache-{name}")
        self._unbuffered.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task], timeout=2 * self._timeout + LET_GO)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=LET_GO)
            raise
        if not task.done():
            raise Timeout(f"{name}: the store has not let go of the call after {2 * self._timeout} s")
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unbuffered.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio would log the error of a call that was left behind

    async def _takes(self, places: asyncio.Semaphore) -> bool:
        """Wait for a place and take it; False if none came free in time."""
        if not places.locked():
            return await places.acquire()  # at once: a timer would cost more than all else here
        try:
            async with asyncio.timeout(self._timeout):
                await places.acquire()
        except TimeoutError:
            self._counts["crowded_calls"] += 1
            return False
        return True

    async def _call_with_keys(
        self, kind: CallKind, permit: Permit, keys: Sequence[PageKey], act: BackendCall, timeout: float
    ) -> list[Result]:
        async def results() -> list[Result]:
            found = list(await _not_cancelled_inside(act(keys)))
            if len(found) != len(keys) or sum(map(found.count, RESULTS)) != len(keys):
                raise BackendError(f"{self._name!r} answered {len(found)} for {len(keys)} keys, or no results at all")
            return found

        try:
            answers = await self._timed_call(kind, permit, results, timeout, self._slow)
        except Exception:  # whatever a plug-in raises is a failed call, and the cache goes on without storage
            return [Result.FAILED] * len(keys)
        self._counts["failed_pages"] += answers.count(Result.FAILED)
        return answers

    async def _timed_call(
        self, kind: CallKind, permit: Permit, act: Callable[[], Awaitable[_T]], timeout: float, slow: float = 0.0
    ) -> _T:
        """Make the call ``act()`` within ``timeout`` seconds, and report to the breaker how it has ended, or after
        ``slow`` seconds that it failed; only the first report counts. Raises what the call raises."""

        def too_slow() -> None:
            nonlocal permit
            self._counts["slow_calls"] += 1
            late, permit = permit, REFUSED
            self._note_failure(late, kind, f"a call takes longer than {slow:g} s")

        watch = asyncio.get_running_loop().call_later(slow, too_slow) if slow else None
        try:
            async with asyncio.timeout(timeout):
                result = await act()
        except Exception as error:
            self.last_error = _without_frames(error)
            late = isinstance(error, TimeoutError)
            self._counts["timeouts" if late else "failed_calls"] += 1
            self._note_failure(permit, kind, f"no answer in {timeout:g} s" if late else redacted(repr(self.last_error)))
            raise
        except BaseException:
            self.breaker.abandon(permit)
            raise
        finally:
            if watch is not None:
                watch.cancel()
        was = self.breaker.state
        self.breaker.success(permit, self._now(), kind)
        if was is not self.breaker.state:
            LOG.warning("store %r answers again", self._name)
        return result

    def _note_failure(self, permit: Permit, kind: str, why: str) -> None:
        opened = self.breaker.opened
        self.breaker.failure(permit, self._now(), kind)
        if opened != self.breaker.opened:
            LOG.warning("store %r is left alone until it answers a probe: %s", self._name, why)

    def _now(self) -> float:
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        return self._clock()


async def _not_cancelled_inside(call: Awaitable[_T]) -> _T:
    """Return what a backend's call returns. Cancelling it cancels the call.

    Raises:
        BackendError: the call ended as cancelled although nobody had cancelled it. That happens when a task or a thread
            pool of the backend's own was ended.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise BackendError("the backend cancelled the call by itself") from error


def _is_cancelled() -> bool:
    """Return True if somebody cancels the current task. This is a function of its own so that no frame of the
    cancellation refers to the task: the task keeps the cancellation, so they would keep each other and the call's
    buffers alive."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _without_frames(error: Exception) -> Exception:
    """Return a stand-in for ``error`` with the same class and text, for ``last_error``.

    The error itself refers to the frames that it passed through, and those to the buffers of the call, so it cannot be
    kept. Its class may not let itself be copied or built from a text; then the stand-in is a ``BackendError``.
    """
    kind = type(error)
    try:
        text = str(error)
        kept = kind.__new__(kind, text)
        kept.args = (text,) if text else ()
        if str(kept) == text:
            return kept
    except Exception:  # the class is a plug-in's, and its __new__ and __str__ may raise anything
        text = ""
    return BackendError(f"{kind.__name__}: {text}" if text else kind.__name__)
