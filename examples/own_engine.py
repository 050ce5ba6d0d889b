"""An engine with a scheduler of its own on ``AsyncCache``: continuous batching with chunked prefill, streams of tokens,
clients that leave in the middle, tenants. Where the Scheduler of ``asynccache_shim`` will do, take that: see
``fastapi_app.py``.

Run it: python examples/own_engine.py
"""

# ruff: noqa: T201
from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tiny_llama import FULL, PAGE, VOCABULARY, Row, TinyLlama, make_weights

from asynccache import AsyncCache, CacheClosed, CacheConfig, Lease, LoadFailed
from asynccache.storage import weights_digest

STEP_TOKENS, CHUNK = 256, 64
"""Tokens that one step computes at most, of all requests together and of one."""


def config_of(folder: Path) -> CacheConfig:
    """A cache for the weights in ``folder``: other weights there are another model, and find none of its pages."""
    return CacheConfig(model=weights_digest(folder), components=(FULL,), page_size=PAGE, storage="memory:")


class Turn:
    """A row that waits for a step, or is in one. ``over``: an event of the device that fires when the step is over;
    None: no step has the row yet."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.over: Any = None


class OwnEngine:
    """Generates tokens for many requests at once, in an open cache: ``async with OwnEngine(cache, folder) as engine``.
    The model runs in a thread of its own. ``cached``: prompt tokens that came from the cache so far."""

    def __init__(self, cache: AsyncCache, folder: Path) -> None:
        self.cached = 0
        assert cache.device is not None, "this process has no rank of the cache"
        self._cache, self._device = cache, cache.device
        self._model = TinyLlama(folder, cache.pools["full"])
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[Turn] = []
        self._bell = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> OwnEngine:
        self._steps = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the step end that is being computed. Requests that go on fail with ``CacheClosed``."""
        self._closing = True
        self._bell.set()
        await asyncio.wait([self._steps])
        self._thread.shutdown()

    # one request

    async def generate(self, prompt: list[int], count: int, tenant: str | None = None) -> AsyncGenerator[int, None]:
        """Yield ``count`` tokens, as they are made. When the caller leaves, all pages are given back: to be used within
        ``contextlib.aclosing``, as any generator that holds something.

        Raises:
            CacheFull: the prompt and ``count`` tokens are more than the device has room for.
            LoadFailed: cached pages could not be copied to the device, three times.
            CacheClosed: the engine has ended.
        """
        lease = await self._granted(prompt, count, tenant)
        turn: Turn | None = None
        try:
            self.cached += lease.cached
            tokens, done, pages = list(prompt), lease.cached, lease.pages
            while True:
                stop = min(len(tokens), done + CHUNK)
                turn = self._ask(Row(tokens, done, stop, pages))
                token, done = await turn.token, stop
                if done < len(tokens):
                    continue  # the rest of the prompt comes in the next steps
                if done == len(prompt):
                    pages = await lease.commit(prompt)  # others can hit the prompt; the table may be another one now
                tokens.append(token)
                yield token
                if done == len(prompt) + count - 1:
                    await lease.commit(tokens[:done])  # the last token has no KV
                    return
        finally:
            if turn is not None and turn in self._waiting:
                self._waiting.remove(turn)
            lease.release(after=None if turn is None else turn.over)  # a step that still writes these pages ends first

    async def _granted(self, prompt: list[int], count: int, tenant: str | None) -> Lease:
        """A lease with all pages that the request will need, and with what is cached on the device. Cancelling gives
        everything back."""
        handle = self._cache.prefetch(prompt, namespace=tenant)  # from storage, as soon as the request arrives
        attempts = 3
        while True:
            lease = self._cache.lease(prompt, new_tokens=count, namespace=tenant, prefetch=handle)
            try:
                await lease.__aenter__()  # waits in the cache's line
                await lease.loaded()
                return lease
            except BaseException as error:  # pages that failed to load are forgotten, and computed next time
                lease.release()
                attempts -= 1
                if not attempts or not isinstance(error, LoadFailed):
                    raise

    # the steps of all requests

    def _ask(self, row: Row) -> Turn:
        if self._closing:
            raise CacheClosed("the engine has ended")
        turn = Turn(row)
        self._waiting.append(turn)
        self._bell.set()
        return turn

    async def _run(self) -> None:
        """Compute step after step, each of the rows that wait."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            step = self._next_step()
            if not step:
                self._bell.clear()
                await self._bell.wait()
                continue
            over = self._device.gate()
            for turn in step:
                turn.over = over
            made = loop.run_in_executor(self._thread, self._model.compute, [turn.row for turn in step])
            await asyncio.wait([made])
            over.open()
            error = made.exception()
            for turn, token in zip(step, [0] * len(step) if error else made.result(), strict=True):
                if turn.token.cancelled():
                    continue  # its client has left
                if error:
                    turn.token.set_exception(error)
                else:
                    turn.token.set_result(token)
            await asyncio.sleep(0)  # the requests of this step ask for the next one
        for turn in self._waiting:
            if not turn.token.done():
                turn.token.set_exception(CacheClosed("the engine has ended"))

    def _next_step(self) -> list[Turn]:
        """Take rows off the line, in their order, as many as one step computes."""
        taken, left = 0, STEP_TOKENS
        for turn in self._waiting:
            left -= turn.row.stop - turn.row.start
            if left < 0:
                break
            taken += 1
        step, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return step


async def answer(engine: OwnEngine, prompt: list[int], count: int, tenant: str | None = None) -> list[int]:
    """All tokens of one request."""
    async with aclosing(engine.generate(prompt, count, tenant)) as tokens:
        return [token async for token in tokens]


async def leave(engine: OwnEngine, prompt: list[int], after: int) -> None:
    """A client that leaves after so many tokens."""
    async with aclosing(engine.generate(prompt, 100)) as tokens:
        async for _ in tokens:
            after -= 1
            if not after:
                return


async def main(folder: Path) -> bool:
    rng = random.Random(1)
    system = [rng.randrange(VOCABULARY) for _ in range(500)]
    prompts = [system + [rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(16)]
    async with AsyncCache(config_of(folder)) as cache, OwnEngine(cache, folder) as engine:
        first = await answer(engine, prompts[0], 24)
        leaving = [asyncio.create_task(leave(engine, prompt, 5)) for prompt in prompts[:4]]
        answers = [first, *await asyncio.gather(*(answer(engine, prompt, 24) for prompt in prompts[1:]))]
        await asyncio.gather(*leaving)
        saved, total = engine.cached, sum(map(len, prompts + prompts[:4]))
        alone = await asyncio.gather(*(answer(engine, prompt, 24, str(i)) for i, prompt in enumerate(prompts)))
        held = cache.statistics().leases
    print(f"{saved} of {total} prompt tokens came from the cache ({saved / total:.0%}); without it, the answers are "
          f"{'the same' if answers == alone else 'different'}; {held} leases are held")  # fmt: skip
    return answers == alone and not held and engine.cached == saved


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(0 if asyncio.run(main(make_weights(Path(folder)))) else 1)
