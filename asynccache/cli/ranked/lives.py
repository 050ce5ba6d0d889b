"""How requests take turns in the scheduler's own task.

With several ranks one task calls the cache. So a request is a coroutine that this task runs itself, from one ``turn()``
to the next; whatever else it awaits, the task waits for.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any


class Aborted(Exception):
    """The request is not wanted any more."""


class _Turn:
    """What a coroutine yields when it waits for its next turn."""


_TURN = _Turn()


@types.coroutine
def turn() -> Generator[_Turn, None, None]:
    """Return in the next iteration. Raises ``Aborted`` if the request was aborted meanwhile."""
    yield _TURN


class Life:
    """One request under way."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._steps = work.__await__()
        self._aborted = False

    def abort(self) -> None:
        """Its next turn raises ``Aborted`` in it; of work that has not begun, ``resume`` raises it."""
        self._aborted = True

    async def resume(self) -> bool:
        """Let it have its turn; whether that was its last. Raises what it raises."""
        return await _Resumed(self._steps, Aborted() if self._aborted else None)

    def close(self) -> None:
        """Nobody steps any more: have it give back what it holds."""
        try:
            while True:
                self._steps.throw(Aborted())
        except (StopIteration, Aborted):
            pass
        finally:
            self._work.close()


class _Resumed:
    """Awaitable: as far as the next turn."""

    def __init__(self, steps: Generator[Any, Any, None], error: Aborted | None) -> None:
        self._steps = steps
        self._error = error

    def __await__(self) -> Generator[Any, Any, bool]:
        steps = self._steps
        try:
            waited = steps.send(None) if self._error is None else steps.throw(self._error)
            while waited is not _TURN:
                try:
                    sent = yield waited
                except BaseException as error:
                    waited = steps.throw(error)
                else:
                    waited = steps.send(sent)
        except StopIteration:
            return True
        return False
