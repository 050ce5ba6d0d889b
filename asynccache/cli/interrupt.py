"""Cancels a coroutine at its n-th await: the same place in every run that takes the same turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class CancelledAt(Generic[_T]):
    """Await it in a task of its own: at await number ``at`` that task cancels itself, as if from outside. ``awaits``
    counts how often the coroutine really gave up the loop."""

    def __init__(self, work: Coroutine[Any, Any, _T], at: int | None) -> None:
        self._work = work
        self._at = at
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, _T]:
        steps = self._work.__await__()
        try:
            waited = next(steps)
            while True:
                self.awaits += 1
                if self.awaits == self._at:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    sent = yield waited
                except BaseException as error:
                    waited = steps.throw(error)
                else:
                    waited = steps.send(sent)
        except StopIteration as end:
            result: _T = end.value
            return result
