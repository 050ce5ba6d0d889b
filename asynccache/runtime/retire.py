"""Retiring slots: nobody takes them before the engine's batches are over. Duplicates also wait to be adopted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asynccache.core.plan import Outcome, Status
from asynccache.worker.contract import Batch


class RetireStage:
    """Answers RETIRE operations once their batches are over; a task each while one is not."""

    def __init__(
        self, post: Callable[[Outcome], None], spawn: Callable[[Coroutine[Any, Any, None], str], object]
    ) -> None:
        self._post = post
        self._spawn = spawn

    def put(self, ops: Sequence[int], batches: Sequence[Batch]) -> None:
        """``ops`` are done when all ``batches`` are over: now, if there are none."""
        if batches and ops:
            self._spawn(self._when_over(tuple(ops), tuple(batches)), "asynccache-retire")
        else:
            self._done(ops)

    async def _when_over(self, ops: Sequence[int], batches: Sequence[Batch]) -> None:
        for batch in batches:
            await batch.wait()
        self._done(ops)

    def _done(self, ops: Sequence[int]) -> None:
        for op in ops:
            self._post(Outcome(op, Status.DONE))
