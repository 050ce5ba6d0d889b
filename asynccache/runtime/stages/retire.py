"""Retiring slots: nobody takes them before the engine's events have fired. Duplicates also wait to be adopted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asynccache.core.plan import Outcome, Status
from asynccache.memory.device import Event
from asynccache.runtime.readiness import fired


class RetireStage:
    """Answers RETIRE operations once their events have fired; a task each while one has not."""

    def __init__(
        self, post: Callable[[Outcome], None], spawn: Callable[[Coroutine[Any, Any, None], str], object]
    ) -> None:
        self._post = post
        self._spawn = spawn

    def put(self, ops: Sequence[int], events: Sequence[Event]) -> None:
        """``ops`` are done when all ``events`` have fired: now, if there are none."""
        if events and ops:
            self._spawn(self._when_fired(tuple(ops), tuple(events)), "asynccache-retire")
        else:
            self._done(ops)

    async def _when_fired(self, ops: Sequence[int], events: Sequence[Event]) -> None:
        for event in events:
            await fired(event)
        self._done(ops)

    def _done(self, ops: Sequence[int]) -> None:
        for op in ops:
            self._post(Outcome(op, Status.DONE))
