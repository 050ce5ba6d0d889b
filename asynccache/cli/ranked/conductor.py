"""The ticks: which requests arrive in which, which are aborted, and whether ranks are of one mind afterwards.

Law: every rank gets the same ticks. A request has ended when all ranks have said so; that is in the same tick, or they
have parted. After the loss of a rank the others go on for a while: so they find out by themselves.

Mutable state: the ticks that not all have answered yet, the requests under way, and what is known of each rank.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from asynccache.cli.options import Settings
from asynccache.cli.ranked.crew import Crew
from asynccache.cli.ranked.messages import Answer, Arrival, Ended, Failure, Leave, Opened, Pulse, Refused, Tick
from asynccache.cli.request import Request, Source
from asynccache.errors import AsyncCacheError, ConfigError, RankFailure

WINDOW = 4
LOOK_EVERY = 16
BUSY_PAUSE, IDLE_PAUSE, NUDGE = 0.001, 0.02, 0.5
STARTS = 150.0
GRACE, DOUBT = 5.0, 1.0
SAVING = 120.0
CLOSING = 60.0
_LIVES = 20.0


class Compared(NamedTuple):
    """How often all ranks were asked what they had become, and how often they had to look at the whole tree."""

    ticks: int
    trees: int


class Conductor:
    """One run. ``problem`` takes sentences for the reader."""

    def __init__(
        self, crew: Crew, source: Source, settings: Settings, pack: Callable[[Request], Arrival],
        problem: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.running: dict[int, Request] = {}
        self.given = 0
        self.steps = 0
        self.compared = Compared(0, 0)
        self.pulses: dict[int, Pulse] = {}
        self.ended: dict[int, Ended] = {}
        self.lost: dict[int, str] = {}
        self.stopping = False
        self.failed = False
        self._parted = False
        self._crew = crew
        self._source = source
        self._settings = settings
        self._pack = pack
        self._problem = problem
        self._living = {member.rank for member in crew.members}
        self._answers: dict[int, dict[int, Answer]] = {}
        self._sent = self._complete = 0
        self._aborts: dict[int, list[int]] = {}
        self._born: dict[int, int] = {}
        self._mean_life = _LIVES
        self._random = random.Random(settings.seed + 1)
        self._next: Request | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._failing: set[int] = set()
        self._heard_at: dict[int, float] = {}
        self._began = self._completed_at = self._failed_at = time.monotonic()

    @property
    def total(self) -> int | None:
        """How many requests there will be, where that is known."""
        return self._source.total

    # from outside

    def stop(self) -> None:
        """No new requests."""
        self.stopping = True
        self._changed.set()

    def abort(self) -> None:
        """Abort what runs."""
        self.stop()
        self._aborts.setdefault(self._sent + 1, []).extend(self.running)

    async def opened(self) -> None:
        """Return when every rank is ready. Cancelling it does nothing.

        Raises:
            AsyncCacheError: one cannot be; the reason is its own.
        """
        waiting, gone = set(self._living), None
        try:
            async with asyncio.timeout(STARTS):
                while waiting:
                    rank, message = await self._crew.said.get()
                    if isinstance(message, Opened):
                        waiting.discard(rank)
                    elif isinstance(message, Refused) and message.kind != RankFailure.__name__:
                        raise ConfigError(f"rank {rank}: {message.sentence}")
                    else:  # because of another one, perhaps, whose reason is on its way
                        words = message.sentence if message else self._crew.members[rank].last_words()
                        gone = gone or f"rank {rank} did not start: {words}"
                        waiting.discard(rank)
        except TimeoutError:
            gone = gone or f"rank {min(waiting)} did not start within {STARTS:.0f} s"
        if gone is not None:
            raise AsyncCacheError(gone)

    async def run(self) -> None:
        """Return when every rank has ended, or is lost. Cancelling it leaves them as they are."""
        self._began = self._completed_at = time.monotonic()
        self._heard_at = dict.fromkeys(self._living, self._began)
        listening = asyncio.create_task(self._listen())
        try:
            await self._tick_on()
            await self._saved()
            await self._see_off()
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    # ticks

    async def _tick_on(self) -> None:
        patience = 2 * self._settings.rank_timeout + GRACE    # twice: for who is told by somebody who was told
        while not self._over and not self.failed:
            if self._sent - self._complete < WINDOW:
                self._send(self._compose())
                await self._pause()
            elif await self._change(NUDGE):
                continue
            elif time.monotonic() - self._completed_at < patience:
                self._send(self._compose())    # who waits for a rank that hangs waits in a step, and is told there
            else:
                self._silent(patience)
    def _compose(self) -> Tick:
        number = self._sent + 1
        if self._settings.steps is not None and number > self._settings.steps:
            self.stop()
        arrivals = tuple(map(self._pack, self._arriving()))
        aborts = tuple(self._aborts.pop(number, ()))
        self._over = not self.running and self._is_dry()
        return Tick(number, arrivals, aborts, number % LOOK_EVERY == 0 or self._over, self._over)

    def _send(self, tick: Tick) -> None:
        self._sent = tick.number
        self._crew.send(tick, sorted(self._waited_for()))

    def _arriving(self) -> list[Request]:
        found = []
        while not self.stopping and (self._settings.speed or len(self.running) < self._settings.concurrency):
            request = self._next or self._source.next()
            if request is None:
                break
            self._next = request
            if self._began + request.at > time.monotonic():
                break
            self._next = None
            self._begin(request)
            found.append(request)
        return found

    def _begin(self, request: Request) -> None:
        self.given += 1
        self.running[request.number] = request
        self._born[request.number] = self._sent + 1
        if self._random.random() < self._settings.cancel_rate:
            at = self._sent + 2 + int(self._random.random() * self._mean_life)
            self._aborts.setdefault(at, []).append(request.number)

    def _is_dry(self) -> bool:
        if self.stopping:
            return True
        if self._next is None and not self.running:
            self._next = self._source.next()
            return self._next is None
        return False

    async def _pause(self) -> None:
        """Nobody is helped by more iterations than that."""
        if not self._over:
            await self._change(BUSY_PAUSE if self.running else IDLE_PAUSE)

    async def _change(self, seconds: float) -> bool:
        """Wait for something to be said; whether it was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        heard = self._changed.is_set()
        self._changed.clear()
        return heard

    # what ranks say

    def _waited_for(self) -> set[int]:
        return self._living - self.ended.keys() - self.lost.keys()

    async def _saved(self) -> None:
        """Return when all have ended, or one has failed."""
        end = time.monotonic() + SAVING
        while self._waited_for() and not self.failed:
            await self._change(IDLE_PAUSE)
            if time.monotonic() > end:
                self._lose(min(self._waited_for()), f"did not end within {SAVING:.0f} s")

    async def _see_off(self) -> None:
        """Something has failed: ticks go on until those who live have noticed, in a step. Who has not noticed by then
        is told; who says nothing is killed. Ranks that have parted notice soon or not at all."""
        patience, told = self._settings.rank_timeout + GRACE, False
        while waited := sorted(self._waited_for()):
            now = time.monotonic()
            for rank in waited:
                silence = now - self._heard_at[rank]
                if silence > (CLOSING if told or rank in self._failing else patience):
                    self._lose(rank, f"said nothing for {silence:.0f} s")
            if not told and not self._over:
                self._send(Tick(self._sent + 1))
            if not told and now - self._failed_at > (DOUBT if self._parted else patience):
                told = True
                self._crew.send(Leave(), waited)
            await self._change(IDLE_PAUSE)

    async def _listen(self) -> None:
        while True:
            rank, message = await self._crew.said.get()
            self._heard_at[rank] = time.monotonic()
            if isinstance(message, Answer):
                self._heard(rank, message)
            elif isinstance(message, Failure):
                self._failing.add(rank)
                self._fail()
            elif isinstance(message, Ended):
                self._end(rank, message)
            elif rank not in self.ended:
                self._lose(rank, self._crew.members[rank].last_words())
            self._changed.set()

    def _heard(self, rank: int, answer: Answer) -> None:
        answers = self._answers.setdefault(answer.tick, {})
        answers[rank] = answer
        if answer.pulse is not None:
            self.pulses[rank] = answer.pulse
        if answers.keys() >= self._living:
            del self._answers[answer.tick]
            self._complete, self._completed_at = answer.tick, time.monotonic()
            self._compare(answer.tick, answers)

    def _compare(self, tick: int, answers: Mapping[int, Answer]) -> None:
        first = answers[min(answers)]
        self.steps = first.steps
        for rank, answer in sorted(answers.items()):
            what = _difference(first, answer)
            if what:
                self._problem(f"after tick {tick}, step {first.steps}, {what} of rank {rank} is another than that of "
                              f"rank {min(answers)}")
                self._parted = True
                self._fail()
        self.compared = Compared(self.compared.ticks + 1, self.compared.trees + (first.tree is not None))
        for number in first.ended:
            self._retire(number, tick)

    def _retire(self, number: int, tick: int) -> None:
        request = self.running.pop(number)
        self._mean_life += (tick - self._born.pop(number) - self._mean_life) * 0.05
        self._source.done(request)

    def _end(self, rank: int, ended: Ended) -> None:
        self.ended[rank] = ended
        if ended.failure is not None:
            self._fail()

    def _lose(self, rank: int, words: str) -> None:
        if rank not in self.lost:
            self.lost[rank] = words
            self._crew.members[rank].process.kill()
            self._problem(f"rank {rank} {words}")
            self._fail()

    def _silent(self, seconds: float) -> None:
        """Nobody goes on. Who has not answered holds the others up."""
        answers = self._answers.get(self._complete + 1, {})
        for rank in sorted(self._waited_for() - answers.keys()):
            self._lose(rank, f"did not answer for {seconds:.0f} s")

    def _fail(self) -> None:
        if not self.failed:
            self.failed, self._failed_at = True, time.monotonic()
        self._changed.set()


def _difference(one: Answer, other: Answer) -> str:
    """What two ranks differ in."""
    if (one.steps, one.digest) != (other.steps, other.digest):
        return "the history"
    if one.tree != other.tree:
        return "the tree"
    return "the list of ended requests" if one.ended != other.ended else ""
