"""Waiting in tests: always for a condition, and always with an end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


async def turns(count: int = 20) -> None:
    """Let all tasks run that can, for ``count`` turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(
    condition: Callable[[], bool | Awaitable[bool]], what: str = "it has not become so", *, seconds: float = 60.0
) -> None:
    """Return when ``condition()`` is true, or what it says when it is awaited: other tasks, threads or processes bring
    that about. It is an error, which says ``what``, if that takes more than ``seconds``."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert loop.time() < end, what
        await asyncio.sleep(0.0005)                    # threads set no asyncio.Event


def wait_until(condition: Callable[[], object], what: str = "it has not become so", *, seconds: float = 60.0) -> None:
    """The same without a loop: for what other processes bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@contextmanager
def interrupted_after(seconds: int) -> Iterator[None]:
    """After so many ``seconds`` a block that hangs, in a system call or in the loop, is interrupted, and the test
    fails. For the main thread only."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
