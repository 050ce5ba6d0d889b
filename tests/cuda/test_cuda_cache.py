"""A whole cache on a CUDA device, with an engine that computes on a stream of its own and never waits on the host."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from asynccache import AsyncCache
from asynccache.errors import CopyFailed, LoadFailed
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.runtime.lease import Lease
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import SimulatedEngine, driver_of
from tests.runtime.runtime_kit import LAYERS, PAGE, opened, page_hashes, settings, text, value


class Worker:
    """Prefill on a stream: for each layer it waits, on the device, for that layer, checks what is cached, writes the
    rest."""

    def __init__(self, cache: AsyncCache, device: CudaDevice) -> None:
        self.cache = cache
        self.engine = SimulatedEngine(device)
        self.wrong: list[str] = []
        self.checked = 0
        self.loaded = 0

    async def serve(self, tokens: Sequence[int]) -> None:
        async with self.cache.lease(tokens) as lease:
            self.loaded += lease.hits.host
            self._prefill(lease, tokens)
            ready = self.engine.stream.record()
            await lease.commit(tokens, after=ready)
            lease.release(after=self.engine.stream.record())

    def _prefill(self, lease: Lease, tokens: Sequence[int]) -> None:
        hashes, cached = page_hashes(tokens), lease.cached // PAGE
        for layer in range(LAYERS):
            lease.wait_layer(self.engine.torch, layer)
            memory = self.cache.pools["full"].layer(layer)
            for number, (page, slot) in enumerate(zip(hashes, lease.pages.tolist(), strict=False)):
                row = memory[slot]
                wanted = torch.from_numpy(value(page, "full", layer, row.numel()))
                if number < cached:
                    self._check(row, wanted)
                else:
                    self._write(row, wanted)

    def _check(self, row: torch.Tensor, wanted: torch.Tensor) -> None:
        def check() -> None:
            self.checked += 1
            if not torch.equal(row, wanted):
                self.wrong.append("a cached page has other bytes")

        self.engine.driver.compute(self.engine.handle, check, reads=[row])

    def _write(self, row: torch.Tensor, wanted: torch.Tensor) -> None:
        def write() -> None:
            row.copy_(wanted)

        self.engine.driver.compute(self.engine.handle, write, writes=[row])


@pytest.mark.parametrize("seed", range(4))
async def test_requests_that_evict_and_reload_each_others_pages_read_right_bytes(
    simulated_device: Make, seed: int
) -> None:
    """The device holds a quarter of the prompts. All order is on the device; the driver looks for races."""
    device, rng = simulated_device(), random.Random(seed)
    async with opened(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        for _ in range(8):
            prompts = [text(4, rng.randrange(12), extra=1) for _ in range(3)]
            await asyncio.gather(*(worker.serve(p) for p in prompts))
        await worker.engine.stream.record().wait()
        assert worker.wrong == []
        assert worker.loaded > 0
        assert worker.checked > 0
    await device.aclose()


async def test_cancelled_requests_free_no_page_that_is_in_flight(simulated_device: Make) -> None:
    device, rng = simulated_device(), random.Random(3)
    async with opened(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        for turn in range(12):
            tasks = [asyncio.create_task(worker.serve(text(4, rng.randrange(12), extra=1))) for _ in range(3)]
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            tasks[turn % 3].cancel()
            await asyncio.wait(tasks)
            assert not [t.exception() for t in tasks if not t.cancelled() and t.exception()]
        await worker.engine.stream.record().wait()
        assert worker.wrong == []
    await device.aclose()


async def test_a_device_that_fails_fails_its_loads_and_the_cache_still_closes(simulated_device: Make) -> None:
    device = simulated_device(break_at=400)
    async with AsyncCache(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        failed = 0
        for turn in range(40):
            try:
                await worker.serve(text(4, turn % 12, extra=1))
            except (LoadFailed, CopyFailed, DriverError):  # the last is what the engine meets itself
                failed += 1
        assert device.failure is not None
        assert cache.statistics().stages["backup_host"].errors + failed > 0
    async with asyncio.timeout(30):
        await device.aclose()
    driver_of(device).problems.clear()
