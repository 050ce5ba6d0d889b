"""A lease that finds out whether its pages could be granted has not used what it found: one request tells the eviction
policy of one use, however long its prefetch runs."""

from __future__ import annotations

from random import Random

import pytest

from asynccache import AsyncCache
from asynccache.storage import CheckedStore
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import parts, settings, text
from tests.runtime.test_hung_storage import serve
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

pytestmark = pytest.mark.source                          # it listens to the policy


@pytest.mark.parametrize("delay", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_request_whose_prefetch_runs_tells_the_policy_of_one_use(
    policy: str, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = SimulatedBackend(Random(1), Hostility(delay=delay))
        config = settings(40, 40, eviction="p2c", prefetch_policy=policy, prefetch_timeout_base=0.05)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        async with AsyncCache(config, device=device, storage=store) as cache:
            learner = parts(cache).core.world.policy
            use, uses = learner.use, list[int]()

            def used(*args: int) -> None:
                uses.append(args[-1])
                use(*args)  # type: ignore[arg-type]

            monkeypatch.setattr(learner, "use", used)
            await serve(cache, text(5, seed=1))
            assert await serve(cache, text(5, seed=1) + text(5, seed=2)) == 20
            assert await serve(cache, text(5, seed=3)) == 0
            assert len(uses) == 3
        await store.aclose()
        await device.aclose()

    simulate(main, 1)
