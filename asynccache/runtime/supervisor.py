"""The supervisor, which owns all other tasks of a cache: a ``TaskGroup`` inside a task of the cache's own.

When a task of the group dies, its error ends the group, everybody who waits is told, and no task of the user is
cancelled. The same happens when the supervisor's own task, or one of the group, is cancelled from outside: its work
would never be done.

Why not simply a ``TaskGroup`` in ``AsyncCache.__aenter__``? It would belong to the user's task: it would cancel the
body that runs there, and the user's other tasks would hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Supervisor:
    """Owns the tasks of a cache. ``on_death``: called once, at most, with the error that ends them; ``error`` is that
    error from then on, and None before."""

    def __init__(self, on_death: Callable[[BaseException], None]) -> None:
        self._on_death = on_death
        self._group: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Future[None]
        self._tasks: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Supervisor({len(self._tasks)} tasks, {'running' if self.running else 'stopped'})"

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def running(self) -> bool:
        """True if new work may be spawned."""
        return self._group is not None

    async def start(self) -> None:
        """Open the group. Cancelling it ends the group again."""
        loop = asyncio.get_running_loop()
        self._stopping = loop.create_future()
        started: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._run(started), name="asynccache-supervisor")
        try:
            await started
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
        """Return a new task in the group; None if the group has ended, or a task of it has failed. ``work`` is closed
        then."""
        try:
            task = self._group.create_task(work, name=name) if self._group is not None else None
        except RuntimeError:  # a task has failed, of which this supervisor is still to hear
            task = None
        if task is None:
            work.close()
            return None
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """End the group with ``error``: something outside it broke what its tasks rely on."""
        self._died(error)
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def stop(self) -> None:
        """Cancel all tasks and return when they have ended. Cancelling this call stops the waiting only."""
        if self._task is None:
            return
        if not self._stopping.done():
            self._stopping.set_result(None)
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if self.running:  # from outside; or by the group, since a task failed whose own callback is still to come
                failed = next((error for other in self._tasks if (error := _error(other)) is not None), None)
                self.fail(failed or asyncio.CancelledError(f"{task.get_name()} was cancelled"))
        elif (error := task.exception()) is not None:
            self._died(error)

    def _died(self, error: BaseException) -> None:
        """Tell ``on_death`` at once: the other tasks may take a while to let go of their buffers."""
        if self.error is None:
            self.error = error
            self._group = None
            self._on_death(error)

    async def _run(self, started: asyncio.Future[None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                if not started.done():
                    started.set_result(None)
                try:
                    await self._stopping
                finally:
                    self._group = None
                for task in tuple(self._tasks):
                    task.cancel()
        except BaseExceptionGroup as failures:
            self._died(failures.exceptions[0])
        except asyncio.CancelledError as error:  # from outside: a loop that shuts down, or start() that was cancelled
            self._died(error)
            raise
        finally:
            self._group = None


def _error(task: asyncio.Task[None]) -> BaseException | None:
    """Return what ``task`` has raised; None if it goes on, was cancelled or ended well."""
    return task.exception() if task.done() and not task.cancelled() else None
