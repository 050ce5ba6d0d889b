"""Closing ends by its deadline and a grace, also if a store never lets go. What such a store uses is not freed, and the
process can end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache import AsyncCache
from asynccache.errors import BackendError, CacheClosed
from asynccache.storage import CheckedStore
from asynccache.storage.checked import store_layout
from asynccache.worker.local import LATE
from tests.runtime.runtime_kit import local, settings, text
from tests.runtime.test_hung_storage import Hangs, forget_host
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("deaf", [20.0, 1e6])
@pytest.mark.parametrize("verb", ["put", "get", "exists"])
def test_closing_ends_by_its_deadline_and_says_which_store_did_not_let_go(verb: str, deaf: float) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Hangs(verb, deaf=deaf)
        config = settings(40, 80, prefetch_policy="best_effort")
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        cache = await AsyncCache(config, device=device, storage=store).__aenter__()
        if verb == "get":
            async with cache.lease(text(5, seed=1)) as lease:
                await lease.commit(text(5, seed=1))
            await forget_host(cache)
        backend.hung.set()
        if verb == "put":
            async with cache.lease(text(5, seed=2)) as lease:
                await lease.commit(text(5, seed=2))
        handle = cache.prefetch(text(5, seed=1))
        await asyncio.sleep(0.05)
        assert backend.holding == 1, handle
        begun = loop.time()
        waiting = [asyncio.ensure_future(cache.aclose(seconds)) for seconds in (30.0, 1.0)]
        for call in waiting:
            with pytest.raises(BackendError, match="Hangs"):
                await call
        assert loop.time() - begun <= 1.0 + LATE + 0.1
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        assert backend.holding == 1
        assert local(cache)._tiers.busy == ["Hangs"], "nothing that it uses was closed"
        backend.answers.set()
        await asyncio.sleep(1.0)
        assert local(cache)._tiers.busy == []
        with pytest.raises(BackendError):
            await cache.aclose()
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


@pytest.mark.slow(6)
@pytest.mark.parametrize("kind", ["file", "own"])
def test_a_process_ends_though_a_thread_of_its_store_hangs(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("hung_thread_child.py"))]
    ended = subprocess.run(
        [*command, str(tmp_path / "store") if kind == "file" else "own"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    took, _, said = ended.stdout.partition(" ")
    assert float(took) < 0.2 + LATE + 2.0
    assert ("file" if kind == "file" else "Own") in said
