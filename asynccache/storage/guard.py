"""Between the cache and a backend: how many calls at a time, for how long, and whether at all.

Law: a call first asks the breaker, then waits for its place, then has ``timeout`` seconds. It may fail, but raises no
error, not even one that no backend should raise. A call that takes longer than ``slow`` seconds is a failure to the
breaker from that moment on, whatever comes of it: a store that hangs is left alone before its deadline.

Nobody's call is the probe. The one that finds the back-off over is refused like all others, and a question for one of
its keys is asked beside it, for ``slow`` seconds at most and in no place of its own; so a store that is still away
holds up nobody, and with no calls there are no probes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from asynccache.errors import BackendError, Timeout
from asynccache.settle import settled
from asynccache.storage.breaker import REFUSED, Breaker, BreakerState, Hearing, Permit
from asynccache.storage.contract import PageKey, Result
from asynccache.storage.places import READ, WRITE, Lane, Places

_T = TypeVar("_T")

Ask = Callable[[Sequence[PageKey]], Awaitable[list[Result]]]


class Call(Enum):
    """What a call is to the breaker, and the lane that it waits in."""

    ASK = "ask", READ
    GET = "get", READ
    DROP = "drop", READ  # what a get has found to be corrupt: its caller is waiting
    PUT = "put", WRITE
    OTHER = "other", WRITE

    def __init__(self, kind: str, lane: Lane) -> None:
        self.kind = kind
        self.lane = lane


RESULTS = tuple(Result)
COUNTERS = ("failed_pages", "failed_calls", "timeouts", "slow_calls", "refused_calls", "crowded_calls")


class Guard:
    """Stands before one backend, ``name`` in errors. Belongs to one event loop.

    ``ask``: for a sign of life, about a key (``probing``). ``clock``: the breaker's, the loop's own if not given.
    """

    def __init__(
        self, name: object, ask: Ask, breaker: Breaker, *, timeout: float, slow: float, concurrency: int,
        clock: Callable[[], float] | None,
    ) -> None:  # fmt: skip
        self.breaker = breaker
        self.places = Places(concurrency)
        self.last_error: Exception | None = None
        self._name = name
        self._ask = ask
        self._timeout = timeout
        self._slow = slow
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._probing: asyncio.Task[list[Result]] | None = None

    def __repr__(self) -> str:
        return f"Guard({self.breaker!r}, {self.places!r})"

    def stats(self) -> dict[str, int | float]:
        """What it counted, and how the breaker is."""
        now = self._clock() if self._clock else 0.0
        return {
            **{name: self._counts[name] for name in COUNTERS},
            "breaker": int(self.breaker.state),
            "breaker_opened": self.breaker.opened,
            "breaker_open_seconds": self.breaker.shut_for(now),
        }

    async def aclose(self) -> None:
        """End the probe under way. Cancelling it waits for that all the same."""
        if self._probing is not None:
            self._probing.cancel()
            await settled([self._probing])

    def refuses(self, keys: Sequence[PageKey]) -> bool:
        """Whether a call for these keys would be in vain now. Then it is counted as refused, and it may have had a
        probe begun."""
        if self.breaker.state is BreakerState.CLOSED:
            return False
        if self._probing is None or self._probing.done():  # one that hangs is not joined by others
            permit = self.breaker.allow(self._now())
            if permit != REFUSED:
                self._begin_probe(permit, keys[:1])
        self._counts["refused_calls"] += 1
        return True

    async def answers(self, call: Call, keys: Sequence[PageKey], act: Ask) -> list[Result]:
        """What ``act`` answers for ``keys``; FAILED for all of them where it does not.

        Cancelling it returns after the backend has let go, or at once while it waits for a place.
        """
        if not keys:
            return []
        if self.refuses(keys) or not (self.places.take_now(call.lane) or await self._placed(call.lane)):
            return [Result.FAILED] * len(keys)
        try:
            if self.refuses(keys):
                return [Result.FAILED] * len(keys)
            permit = self.breaker.allow(self._now())
            return await self._answered(Hearing(self.breaker, permit, call.kind), keys, act, self._timeout)
        finally:
            self.places.give(call.lane)

    async def whole(self, name: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """A call that somebody asked for by name: made also where the breaker refuses it, which then hears nothing.

        Raises:
            BackendError: the backend could not. ``Timeout``: not before the deadline, or there was no place.
        """
        lane = Call.OTHER.lane
        if not (self.places.take_now(lane) or await self._placed(lane)):
            raise Timeout(f"{name}: the store is busy with other calls for {self._timeout} s")
        try:
            return await self._whole(name, act)
        finally:
            self.places.give(lane)

    async def _placed(self, lane: Lane) -> bool:
        """Wait for a place; False if none came free in time."""
        try:
            async with asyncio.timeout(self._timeout):
                await self.places.take(lane)
        except TimeoutError:
            self._counts["crowded_calls"] += 1
            return False
        return True

    async def _answered(self, hearing: Hearing, keys: Sequence[PageKey], act: Ask, timeout: float) -> list[Result]:
        watch = self._watch(hearing)
        try:
            async with asyncio.timeout(timeout):
                results = list(await _heard(act(keys)))
            if len(results) != len(keys) or sum(map(results.count, RESULTS)) != len(keys):
                raise BackendError(f"{self._name!r} answered {len(results)} for {len(keys)} keys, or no results at all")
        except Exception as error:  # a plug-in's bug is a failed call; the cache goes on without storage
            self._failed(hearing, error)
            return [Result.FAILED] * len(keys)
        except BaseException:
            hearing.abandon()
            raise
        finally:
            if watch is not None:
                watch.cancel()
        hearing.success(self._now())
        self._counts["failed_pages"] += results.count(Result.FAILED)
        return results

    async def _whole(self, name: str, act: Callable[[], Awaitable[_T]]) -> _T:
        hearing = Hearing(self.breaker, self.breaker.allow(self._now()), Call.OTHER.kind)
        try:
            async with asyncio.timeout(self._timeout):
                result = await _heard(act())
        except Exception as error:
            self._failed(hearing, error)
            if isinstance(error, BackendError):
                raise
            if isinstance(error, TimeoutError):
                raise Timeout(f"{name}: no answer in {self._timeout} s") from error
            raise BackendError(f"{name}: {error!r}") from error
        except BaseException:
            hearing.abandon()
            raise
        hearing.success(self._now())
        return result

    def _watch(self, hearing: Hearing) -> asyncio.TimerHandle | None:
        return asyncio.get_running_loop().call_later(self._slow, self._too_slow, hearing) if self._slow else None

    def _too_slow(self, hearing: Hearing) -> None:
        self._counts["slow_calls"] += 1
        hearing.failure(self._now())

    def _failed(self, hearing: Hearing, error: Exception) -> None:
        self.last_error = _bare(error)
        self._counts["timeouts" if isinstance(error, TimeoutError) else "failed_calls"] += 1
        hearing.failure(self._now())

    def _begin_probe(self, permit: Permit, keys: Sequence[PageKey]) -> None:
        hearing = Hearing(self.breaker, permit, Call.ASK.kind)
        timeout = min(self._timeout, self._slow or self._timeout)
        work = self._answered(hearing, keys, self._ask, timeout)
        self._probing = asyncio.get_running_loop().create_task(work, name="asynccache-probe")

    def _now(self) -> float:
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        return self._clock()


async def _heard(answer: Awaitable[_T]) -> _T:
    """What a backend answers. Cancelling it cancels the call; a cancellation that the backend comes up with by itself,
    because a task or a thread pool of its own was ended, is an error of the backend's."""
    try:
        return await answer
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise BackendError("the backend cancelled the call by itself") from error


def _is_cancelled() -> bool:
    """Whether somebody cancels the task. A function of its own: a frame of the cancellation that knew the task would
    keep itself, and the buffers of the call."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _bare(error: Exception) -> Exception:
    """What is kept of ``error``: its class and its text. It has itself the frames that it went through, and maybe more,
    which would keep the buffers of the call for as long as it is kept; and a copy may need what only it knows."""
    kind = type(error)
    try:
        text = str(error)
        kept = kind.__new__(kind, text)
        kept.args = (text,) if text else ()
        if str(kept) == text:
            return kept
    except Exception:  # a plug-in's errors are made in ways of their own
        text = ""
    return BackendError(f"{kind.__name__}: {text}" if text else kind.__name__)
