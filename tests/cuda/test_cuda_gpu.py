"""On a GPU: every path's bytes, an engine in torch, many transfers, and the commands. ``make test-gpu`` runs it with
the tests of the runtime, the scheduler and the sidecars on the same device."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.main import main
from asynccache.errors import ConfigError
from asynccache.memory.cuda import choosing_paths
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.mover import Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import DMA, GPU, KERNEL
from tests.cuda.test_cuda_memory import WAYS, every_byte_arrives
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool

pytestmark = GPU

LONG = 200_000_000
"""Cycles: about a tenth of a second."""


@pytest.mark.parametrize(("size", "layers", "align"), [
    (64, 4, 1), (96, 1, 1), (100, 5, 1), (128, 2, 4096), (3 << 20, 3, 4096), (8208 * 3, 3, 1),
])
@pytest.mark.parametrize("way", WAYS)
async def test_every_path_brings_every_byte(
    gpu_device: Make, monkeypatch: pytest.MonkeyPatch, way: str, size: int, layers: int, align: int
) -> None:
    monkeypatch.setattr(choosing_paths, "FEW", 1)
    device = gpu_device(settings=WAYS[way])
    mover, rng = Mover(device, [pool(size=size, layers=layers)], host_align=align), np.random.default_rng(size)
    fill_device(mover)
    for _ in range(4):
        await every_byte_arrives(mover, rng)


async def test_launches_with_full_tables_bring_every_byte(gpu_device: Make) -> None:
    device = gpu_device(settings=KERNEL)
    mover = Mover(device, [pool(size=40 * 64, layers=40, device_pages=1000, host_pages=1000)])
    fill_device(mover)
    there, here = (np.random.default_rng(seed).permutation(1000).tolist() for seed in (1, 2))
    await mover.backup([move(there, here)]).wait()
    assert all(host_page(mover, "full", h) == device_page(mover, "full", t) for t, h in zip(there, here, strict=True))
    await mover.load([move(here, here)]).done.wait()
    assert all(host_page(mover, "full", h) == device_page(mover, "full", h) for h in here)


@pytest.mark.parametrize("settings", [DMA, KERNEL], ids=["copy engines", "kernel"])
async def test_a_backup_waits_for_the_torch_stream_that_wrote_the_pages(
    gpu_device: Make, settings: CudaSettings
) -> None:
    device = gpu_device(settings=settings)
    mover, stream = Mover(device, [pool(size=1 << 16)]), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    engine = mover.engine_stream(stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
        for i in range(mover.layers):
            mover.device_pools["full"].layer(i).fill_(7)
    written = engine.record()
    backup = mover.backup([move([3, 5, 9, 1], [5, 2, 7, 30])], after=[written])
    assert not backup.done()
    await backup.wait()
    assert host_page(mover, "full", 30) == bytes([7]) * (1 << 16)


@pytest.mark.parametrize("library", ["torch", "cupy"])
async def test_a_backup_waits_for_the_event_of_torch_or_cupy_as_it_was_recorded(
    gpu_device: Make, library: str
) -> None:
    device = gpu_device()
    mover, stream = Mover(device, [pool(size=1 << 16)]), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event: Any = (torch.cuda if library == "torch" else pytest.importorskip("cupy").cuda).Event()
    assert mover.engine_event(event).done(), "it was never recorded"
    own = stream if library == "torch" else pytest.importorskip("cupy").cuda.Stream.from_external(Named(stream))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
        for i in range(mover.layers):
            mover.device_pools["full"].layer(i).fill_(7)
        event.record(own)
        written = mover.engine_event(event)
        torch.cuda._sleep(10 * LONG)  # type: ignore[no-untyped-call]
        event.record(own)
    backup = mover.backup([move([3], [5])], after=[written])
    assert not backup.done()
    await backup.wait()
    assert host_page(mover, "full", 5) == bytes([7]) * (1 << 16)
    assert not stream.query(), "it waited for what was recorded later"
    stream.synchronize()


class Named:
    """A stream of torch for cupy. torch speaks the protocol itself in later versions."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


async def test_a_cache_opens_in_a_process_that_has_used_torch() -> None:
    """torch has memory at hand then, so it asks CUDA for nothing in the thread in which the device opens, and that
    thread would have no context."""
    torch.empty(1 << 10, device="cuda:0")
    torch.cuda.synchronize()
    full = Full(bytes_per_token=64, device_tokens=1600, host_tokens=3200)
    async with AsyncCache(CacheConfig(model="m", components=(full,), device="cuda:0")) as cache:
        async with cache.lease(list(range(33))) as lease:
            await lease.commit(list(range(33)))
        await cache.flush()
        assert (await cache.explain(list(range(33)))).host == 32


async def test_an_event_of_a_captured_stream_is_refused_and_the_graph_is_whole(gpu_device: Make) -> None:
    device = gpu_device()
    mover, graph, event = Mover(device, [pool(size=1 << 16)]), torch.cuda.CUDAGraph(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    numbers = torch.zeros(8, device="cuda:0")
    with torch.cuda.graph(graph):
        numbers += 1
        event.record()
        with pytest.raises(ConfigError, match="this thread captures a graph"):
            mover.engine_event(event)
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [1.0] * 8


@pytest.mark.parametrize("settings", [DMA, KERNEL], ids=["copy engines", "kernel"])
async def test_a_torch_stream_waits_for_each_layer_and_the_host_for_nothing(
    gpu_device: Make, settings: CudaSettings
) -> None:
    device = gpu_device(settings=settings)
    mover = Mover(device, [pool(size=8 << 20, layers=8, device_pages=32, host_pages=32)])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    engine = mover.engine_stream(stream)
    host = mover.host_pools["full"]
    for page in range(32):
        host.page(page)[:] = bytes([page + 1]) * (8 << 20)
    load = mover.load([move(list(range(32)), list(range(32)))])
    sums = []
    for i in range(mover.layers):
        engine.wait_event(load.layers[i])
        with torch.cuda.stream(stream):
            sums.append(mover.device_pools["full"].layer(i).amin(dim=1))
    await engine.record().wait()
    assert all(s.tolist() == list(range(1, 33)) for s in sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
async def test_an_engines_torch_tensors_are_where_loads_arrive(gpu_device: Make, dtype: torch.dtype) -> None:
    device = gpu_device()
    mine = [torch.zeros((32, 4096), dtype=torch.uint8, device="cuda:0").view(dtype) for _ in range(2)]
    mover = Mover(device, [pool(size=8192, layers=2)], device_tensors={"full": mine})
    fill_device(mover)
    wanted = device_page(mover, "full", 8)
    await mover.backup([move([8], [1])]).wait()
    await mover.load([move([1], [9])]).done.wait()
    assert b"".join(t[9].view(torch.uint8).cpu().numpy().tobytes() for t in mine) == wanted


async def test_thousands_of_transfers_are_in_flight(gpu_device: Make) -> None:
    device = gpu_device()
    mover = Mover(device, [pool(size=1 << 14)])
    fill_device(mover)
    gate = device.gate()
    events = [mover.backup([move([i % 32], [i % 48])], after=[gate] if not i else []) for i in range(5000)]
    waiting = asyncio.gather(*(e.wait() for e in events))
    gate.open()
    async with asyncio.timeout(60):
        await waiting
    assert host_page(mover, "full", 4999 % 48) == device_page(mover, "full", 4999 % 32)


def test_doctor_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for path in ("engines", "kernel"):
        assert report["copies"][path]["whole"]
        assert report["copies"][path]["device to host"] > 0.5
    assert report["wake_up"]["p50_us"] < 100_000
