"""A process of its own with a Mooncake cache in it, that does what it is told, one line of JSON after the other.

A process has one client, which may freeze or end it: so whoever kills masters or needs other options does it here.
``Child`` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from threading import Thread
from typing import Any, Self

from asynccache_backends.mooncake import MooncakeBackend

from asynccache.cli.meter import run_delay
from asynccache.storage import HEADER_BYTES, PageKey, Record, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content, page_key
from tests.stores.server import ROOT, ours

ANSWER_WITHIN = 90.0
PAGES = 256


class Child:
    """The process; ``child.ask("put", count=64)`` is what it answers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1, env=ours(),
        )  # fmt: skip

    def tell(self, do: str, **arguments: Any) -> None:
        """Have the process begin to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")

    def answer(self) -> dict[str, Any]:
        """The result of what it was told to do."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], ANSWER_WITHIN)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"no answer; exit status {self.process.poll()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """``tell``, and return the ``answer``."""
        self.tell(do, **arguments)
        return self.answer()

    def end(self) -> int:
        """Let the process end; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(ANSWER_WITHIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Pool:
    """Host memory as the runtime has it: a registered slab of pages, and headers that are not registered."""

    def __init__(self, backend: MooncakeBackend, size: int, pages: int) -> None:
        slab, headers = aligned(pages * size), memoryview(bytearray(pages * HEADER_BYTES))
        backend.register("full", slab)
        self.records = [
            Record(headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], slab[i * size : (i + 1) * size])
            for i in range(pages)
        ]

    def fill(self, keys: Sequence[PageKey]) -> list[Record]:
        """What belongs to the keys; as many of the records."""
        for key, record in zip(keys, self.records, strict=False):
            whole = content(key, HEADER_BYTES + record.payload.nbytes)
            record.header[:], record.payload[:] = whole[:HEADER_BYTES], whole[HEADER_BYTES:]
        return self.records[: len(keys)]

    def wrong(self, keys: Sequence[PageKey], at: int = 0) -> list[bool]:
        """Of which keys the records, from that one on, are not what belongs to them."""
        pairs = zip(keys, self.records[at:], strict=False)
        return [bytes(r.header) + bytes(r.payload) != content(k, HEADER_BYTES + r.payload.nbytes) for k, r in pairs]


class Worker:
    """The child's side: one cache, its pool, and a clock that notices when the loop stands still (waiting for a core of
    a busy machine is not standing still)."""

    def __init__(self) -> None:
        self.lag = 0.0
        self.backend: Any = None

    async def run(self) -> None:
        """Do orders until there are no more."""
        clock = asyncio.ensure_future(self._watch())
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
        while line := await lines.get():
            await self._do(json.loads(line))
        clock.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before, waited = loop.time(), run_delay()
            await asyncio.sleep(0.005)
            self.lag = max(self.lag, loop.time() - before - (run_delay() - waited) - 0.005)

    async def _do(self, order: dict[str, Any]) -> None:
        """Do one order, and print the answer in one line."""
        action: Callable[..., Awaitable[dict[str, Any]]] = getattr(self, order.pop("do"))
        sys.stdout.write(json.dumps(await action(**order)) + "\n")
        sys.stdout.flush()

    async def _measured(self, call: Awaitable[Any]) -> tuple[Any, dict[str, Any]]:
        """Await ``call``. Returns its result, how long it took, and how long the loop stood still meanwhile."""
        await asyncio.sleep(0.01)  # what was before is not this call's fault
        loop = asyncio.get_running_loop()
        self.lag, began, result, error = 0.0, loop.time(), None, {}
        try:
            result = await call
        except Exception as failure:
            error = {"error": type(failure).__name__, "message": str(failure)}
        seconds = loop.time() - began
        await asyncio.sleep(0.006)  # so that the clock has seen all of it
        return result, {"seconds": seconds, "lag": self.lag, **error}

    async def _answered(self, call: Awaitable[Sequence[Result]]) -> tuple[Sequence[Result], dict[str, Any]]:
        results, figures = await self._measured(call)
        return results or (), {**Counter(result.name for result in results or ()), **figures}

    async def open(self, url: str, **options: str) -> dict[str, Any]:
        """Open a cache with a registered pool."""
        backend, figures = await self._measured(MooncakeBackend.open(parse_url(url, options), LAYOUT))
        if backend is None:
            return figures
        self.backend, self.pool = backend, Pool(backend, LAYOUT.page_bytes["full"], PAGES)
        return figures

    async def put(self, count: int, name: str = "") -> dict[str, Any]:
        """Store pages whose content is a function of their key."""
        keys = _keys(count, name)
        return (await self._answered(self.backend.put(keys, self.pool.fill(keys))))[1]

    async def get(self, count: int, name: str = "") -> dict[str, Any]:
        """``wrong``: hits that are not what was put."""
        keys, records = _keys(count, name), self.pool.fill(_keys(count, "nothing"))
        results, figures = await self._answered(self.backend.get(keys, records))
        wrong = [bad for result, bad in zip(results, self.pool.wrong(keys), strict=False) if result is Result.HIT]
        return {**figures, "wrong": sum(wrong)}

    async def exists(self, count: int, name: str = "") -> dict[str, Any]:
        """Ask whether pages are stored."""
        return (await self._answered(self.backend.exists(_keys(count, name))))[1]

    async def cancel(self, count: int, after: float) -> dict[str, Any]:
        """Cancel a get after ``after`` seconds. Returns how long it held its buffers from then on."""
        getting = asyncio.ensure_future(self.backend.get(_keys(count, ""), self.pool.records[:count]))
        await asyncio.sleep(after)
        getting.cancel()
        began = asyncio.get_running_loop().time()
        await asyncio.wait([getting])
        return {"held": asyncio.get_running_loop().time() - began, "cancelled": getting.cancelled()}

    async def stats(self) -> dict[str, Any]:
        """The backend's counters."""
        return dict(self.backend.stats())

    async def close(self) -> dict[str, Any]:
        """The cache; the client stays."""
        await self.backend.aclose()
        return {}

    async def leave_inside(self) -> dict[str, Any]:
        """A thread that nobody waits for, inside the client."""
        names = [f"inside{i}" for i in range(64)]
        Thread(target=lambda: self.backend._transfers.exists(names), daemon=True).start()
        await asyncio.sleep(0.05)
        return {}


def _keys(count: int, name: str) -> list[PageKey]:
    return [page_key(f"{name}{i}") for i in range(count)]


if __name__ == "__main__":
    asyncio.run(Worker().run())
