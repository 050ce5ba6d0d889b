"""Who may call the core next, where that must not depend on what finishes when.

With one rank everybody goes on as soon as what it waits for is there (``Turns``). With several, a *player* (a task that
calls the core: today, those that serve prefetches) goes on only in a turn, and ``LockstepTurns.run``, inside the
cache's ``step``, deals the turns: one after the other, in the order in which they were earned. What earns one is the
core's own doing or the ranks' decision, so that order is the same everywhere.

Laws of a player: it calls the core in its turns only; whatever it awaits goes through ``sleep``, or comes after
``away``, behind which it calls the core no more until its next ``sleep`` has returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Waiter = asyncio.Future[Any]
Work = Coroutine[Any, Any, None]


class Turns:
    """One rank: nobody waits for a turn. ``lockstep``: whether anybody does."""

    lockstep = False

    def patience(self, seconds: float) -> float:
        """When ``seconds`` will have gone by: an argument of ``sleep``."""
        return asyncio.get_running_loop().time() + seconds

    def call_later(self, seconds: float, call: Callable[..., object], *args: object) -> Alarm:
        """Have ``call`` made when ``seconds`` have gone by, unless the answer is cancelled first."""
        return asyncio.get_running_loop().call_later(seconds, call, *args)

    def wake(self, waiter: Waiter, value: object = None) -> None:
        """What ``waiter`` waits for is there."""
        if not waiter.done():
            waiter.set_result(value)

    async def sleep(self, waiter: asyncio.Future[T], until: float = inf) -> T:
        """Return when it is woken. Cancelling it stops the waiting.

        Raises:
            TimeoutError: ``until`` came first.
        """
        if until == inf:
            return await waiter
        async with asyncio.timeout_at(until):
            return await waiter

    def away(self) -> None:
        """From here on the player touches nothing that is shared."""

    def play(self, work: Callable[[], Work]) -> Work:
        """What a player's task is to run."""
        return work()

    async def run(self) -> None:
        """Deal the turns that are earned."""

    def stop(self) -> None:
        """The cache is closed: no more are dealt, and nobody waits for the end of one."""

    def playing(self) -> bool:
        """Whether this task may sleep here."""
        return True


class Alarm(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """It is not to be made."""


class Player:
    """A task that calls the core, from the moment it was spawned."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None


class _Call:
    """An ``Alarm`` in rounds."""

    __slots__ = ("call", "round")

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.round = at
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None


class LockstepTurns(Turns):
    """Several ranks. ``rounds`` counts ``run`` calls: all times are measured in them, because clocks differ."""

    lockstep = True
    rounds_per_second = 100

    def __init__(self) -> None:
        self.rounds = 0
        self._calls: list[_Call] = []
        self._earned: deque[tuple[Waiter, object]] = deque()
        self._players: dict[asyncio.Task[Any] | None, Player] = {}
        self._asleep: dict[Waiter, tuple[Player, float]] = {}
        self._player: Player | None = None
        self._over = asyncio.Event()
        self._stopped = False

    def __repr__(self) -> str:
        return f"LockstepTurns({len(self._asleep)} asleep, {len(self._earned)} turns to deal)"

    def patience(self, seconds: float) -> float:
        """A round number."""
        return self.rounds + seconds * self.rounds_per_second

    def call_later(self, seconds: float, call: Callable[..., object], *args: object) -> Alarm:
        """In a ``run`` to come."""
        alarm = _Call(self.patience(seconds), partial(call, *args))
        self._calls.append(alarm)
        return alarm

    def wake(self, waiter: Waiter, value: object = None) -> None:
        """A player earns a turn; anybody else goes on at once."""
        if waiter in self._asleep:
            self._earned.append((waiter, value))
        elif not waiter.done():
            waiter.set_result(value)

    async def sleep(self, waiter: asyncio.Future[T], until: float = inf) -> T:
        """As ``Turns``; returns in a turn."""
        player = self._players[asyncio.current_task()]
        if waiter.done():  # it was woken in its own turn
            woken, waiter = waiter, asyncio.get_running_loop().create_future()
            self._earned.append((waiter, woken.result()))
        self.away()
        return await self._turn(player, waiter, until)

    async def _turn(self, player: Player, waiter: asyncio.Future[T], until: float) -> T:
        self._asleep[waiter] = player, until
        try:
            result = await waiter
        finally:
            self._asleep.pop(waiter, None)
        if result is _OVER:
            raise TimeoutError
        return result

    @property
    def earned(self) -> bool:
        """Whether there are turns to deal: the same on all ranks."""
        return bool(self._earned)

    def playing(self) -> bool:
        """Whether this task is a player."""
        return asyncio.current_task() in self._players

    def away(self) -> None:
        """The turn, if it is this task's, is over."""
        if self._player is not None and self._player.task is asyncio.current_task():
            self._player = None
            self._over.set()

    def play(self, work: Callable[[], Work]) -> Work:
        """The first turn is earned now, not when the task begins: that depends on what else is ready."""
        player = Player()
        first: Waiter = asyncio.get_running_loop().create_future()
        self._asleep[first] = player, inf
        self._earned.append((first, None))
        return self._play(player, first, work)

    async def _play(self, player: Player, first: Waiter, work: Callable[[], Work]) -> None:
        player.task = asyncio.current_task()
        self._players[player.task] = player
        try:
            await self._turn(player, first, inf)
            await work()
        finally:
            del self._players[player.task]
            self.away()

    async def run(self) -> None:
        """Deal the turns that are earned, and those that are earned meanwhile."""
        self.rounds += 1
        if self._calls:
            self._make_calls()
        if not self._asleep:
            return
        for waiter, (_, until) in tuple(self._asleep.items()):
            if until <= self.rounds:
                self._earned.append((waiter, _OVER))
        while self._earned and not self._stopped:
            waiter, value = self._earned.popleft()
            if not waiter.done() and waiter in self._asleep:
                self._over.clear()
                self._player, _ = self._asleep[waiter]
                waiter.set_result(value)
                await self._over.wait()

    def stop(self) -> None:
        """As ``Turns``. A player that is cancelled before it begins would never say that its turn is over."""
        self._stopped = True
        self._over.set()

    def _make_calls(self) -> None:
        due = [alarm for alarm in self._calls if alarm.round <= self.rounds]
        self._calls = [alarm for alarm in self._calls if alarm.round > self.rounds and alarm.call is not None]
        for alarm in due:
            if alarm.call is not None:
                alarm.call()


_OVER = object()
