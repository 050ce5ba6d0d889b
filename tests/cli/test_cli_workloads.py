"""Made-up conversations, and the stand-in for their KV."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.cli.engine import NOTHING, Comparison, PageRun, Pattern, StandInEngine, page_values
from asynccache.cli.meter import run_delay
from asynccache.cli.options import WORKLOADS
from asynccache.cli.workloads import RunRequest, StressSource, stream_tokens
from asynccache.config import CacheConfig, Full, Mamba, SlidingWindow
from asynccache.core.settings import ComponentKind
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import DevicePool

# Made-up conversations: the same seed says the same, turns build on one another, and sessions share prefixes.


def draw(workload: str, count: int, seed: int = 1) -> list[RunRequest]:
    source = StressSource(workload, seed=seed, requests=count, open_conversations=16, hints=0.5)
    requests = []
    while (request := source.next()) is not None:
        requests.append(request)
        source.done(request)
    return requests


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_fixes_everything(workload: str) -> None:
    one, other = draw(workload, 60), draw(workload, 60)
    assert len(one) == 60
    assert [r.namespace for r in one] == [r.namespace for r in other]
    assert [r.ended for r in one] == [r.ended for r in other]
    assert all(np.array_equal(a.prompt(), b.prompt()) for a, b in zip(one, other, strict=True))
    assert any(not np.array_equal(a.prompt(), b.prompt()) for a, b in zip(one, draw(workload, 60, 2), strict=True))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_are_what_they_say(workload: str) -> None:
    for request in draw(workload, 100):
        prompt, output = request.prompt(), request.output()
        assert prompt.dtype == output.dtype == np.int32
        assert (len(prompt), len(output)) == (request.length, request.output_length)
        assert 0 < request.length <= 4800
        assert prompt.min() >= 0


def shared_with_earlier(requests: list[RunRequest], page: int = 16) -> float:
    """The share of pages whose whole prefix an earlier prompt or output had."""
    seen: set[tuple[str | None, bytes]] = set()
    hit = total = 0
    for request in requests:
        whole = np.concatenate([request.prompt(), request.output()])
        pages = [(request.namespace, whole[:end].tobytes()) for end in range(page, len(whole) + 1, page)]
        prompt = pages[: request.length // page]
        total += len(prompt)
        hit += sum(p in seen for p in prompt)
        seen.update(pages)
    return hit / total


@pytest.mark.parametrize(("workload", "low", "high"), [
    ("chat", 0.4, 0.9), ("shared", 0.4, 0.98), ("agent", 0.5, 0.98), ("random", 0.0, 0.2),
])
def test_workloads_share_as_much_as_their_kind_does(workload: str, low: float, high: float) -> None:
    assert low <= shared_with_earlier(draw(workload, 250)) <= high


def test_the_next_turn_waits_for_the_last() -> None:
    source = StressSource("chat", seed=3, requests=None, open_conversations=1, hints=0.0)
    first, second = source.next(), source.next()
    assert first is not None
    assert second is not None
    assert not np.array_equal(second.prompt()[: first.length], first.prompt()), "another conversation"
    source.done(first)
    third = source.next()
    assert third is not None
    assert np.array_equal(third.prompt()[: first.length], first.prompt())


def test_half_of_the_ends_are_hinted() -> None:
    requests = draw("shared", 400)
    assert 120 < sum(r.ended for r in requests) < 280


# The stand-in for KV: bytes depend on the whole prefix, the namespace, the pool and the layer, and any flip shows.


TOKENS = stream_tokens(1, 0, 1000)


def test_a_value_depends_on_all_tokens_before_and_none_behind() -> None:
    values = page_values(TOKENS, 16)
    assert (len(values), len(page_values(TOKENS[:15], 16))) == (62, 0), "one a whole page"
    assert np.array_equal(page_values(TOKENS[:320], 16), values[:20])
    changed = TOKENS.copy()
    changed[17] += 1
    assert np.array_equal(page_values(changed, 16) == values, np.arange(62) < 1)
    swapped = TOKENS.copy()
    swapped[[0, 500]] = swapped[[500, 0]]
    assert not (page_values(swapped, 16) == values)[:31].any()


def test_values_of_many_pages_and_namespaces_are_distinct() -> None:
    many = [page_values(stream_tokens(i, 0, 4096), 16) for i in range(64)]
    values = np.concatenate([*many, *(page_values(TOKENS, 16, key) for key in ("a", "b"))])
    assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize("size", [8, 256, 100, 3])
def test_what_was_written_verifies_and_a_flip_shows(size: int) -> None:
    layer = torch.zeros(32, size, dtype=torch.uint8)
    pattern = Pattern("full", 0, layer)
    pages = torch.tensor([5, 1, 30, 7])
    values = torch.from_numpy(page_values(TOKENS[:64], 16).view(np.int64))
    pattern.write(pages, values)
    assert pattern.mismatches(pages, values) == ()
    assert pattern.mismatches(pages.roll(1), values) == [0, 1, 2, 3]
    layer[30, size - 1] ^= 1
    assert pattern.mismatches(pages, values) == [2]


def test_pools_and_layers_differ() -> None:
    layer = torch.zeros(4, 64, dtype=torch.uint8)
    pages, values = torch.tensor([2]), torch.tensor([123456789])
    Pattern("full", 0, layer).write(pages, values)
    for pool, index in (("full", 1), ("swa", 0)):
        assert Pattern(pool, index, layer).mismatches(pages, values) == [0]
    assert Pattern("full", 0, layer).mismatches(pages, values) == ()


# The stand-in engine finds wrong pages, and its work goes on when the request that asked for it has ended.


CONFIG = CacheConfig(model="m", page_size=16, components=(
    Full(bytes_per_token=8, layers=2, device_tokens=512),
    SlidingWindow(window=64, bytes_per_token=8, layers=2, device_tokens=512),
    Mamba(state_bytes=96, layers=2, device_states=8),
))


def full(*ids: int, first: int = 0) -> PageRun:
    values = np.arange(100, 100 + len(ids), dtype=np.uint64)
    return PageRun(ComponentKind.FULL, np.array(ids, dtype=np.int32), values, first)


@pytest.fixture
def pools() -> dict[str, DevicePool]:
    device = CpuDevice()
    return {spec.name: DevicePool.allocate(spec, device.device_tensor) for spec in CONFIG.pools()}


@pytest.fixture
def engine(pools: dict[str, DevicePool]) -> Any:
    engine = StandInEngine(CONFIG.pools(), pools, CpuDevice().gate)
    yield engine
    engine.close()


@pytest.mark.asyncio
async def test_a_page_without_a_slot_and_one_torn_layer_are_named(
    engine: StandInEngine, pools: dict[str, DevicePool]
) -> None:
    engine.write([full(3, 9, 1)])
    pools["full"].layer(1)[9, 5] ^= 1
    verdict = await engine.begin([full(3, 9, 1, first=20)], verifies=True).verdict()
    assert verdict == Comparison(3, 1, ("full page 21 in slot 9 differs from layer 1 on",))
    verdict = await engine.begin([full(3, -1, 1)], verifies=True).verdict()
    assert (verdict.pages, verdict.wrong) == (3, 1)
    assert verdict.what == ("full page 1 has no slot",)


def burn(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() < began + seconds:
        pass


def test_a_machine_is_as_slow_as_its_jobs_wait_for_a_core(
    engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = [0.0]
    monkeypatch.setattr("asynccache.cli.engine.run_delay", lambda: waited[0])

    def waits(seconds: float) -> Comparison:
        burn(0.05)
        waited[0] += seconds
        return NOTHING

    def sleeps() -> Comparison:
        time.sleep(0.3)
        return NOTHING

    assert engine.slowdown == 1.0
    engine.submit(lambda: NOTHING)[0].result()
    assert engine.slowdown == 1.0, "so little tells nothing"
    engine.submit(lambda: waits(0.0))[0].result()
    assert engine.slowdown == 1.0
    engine.submit(lambda: waits(0.15))[0].result()
    assert engine.slowdown == pytest.approx(2.5, rel=0.2)
    engine.submit(sleeps)[0].result()
    assert engine.slowdown == pytest.approx(2.5, rel=0.2), "who waits for something else is not slow"


def test_the_kernel_says_how_long_a_thread_waited_for_a_core() -> None:
    """More threads than there are cores, each in a process of its own, on one core."""
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("the kernel counts no run delays")
    core = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    found: list[float] = []

    def work() -> None:
        os.sched_setaffinity(0, {core})
        before = run_delay()
        burn(0.2)
        found.append(run_delay() - before)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert found[0] > 0.1


@pytest.mark.asyncio
async def test_cancelled_work_goes_on_and_its_event_tells_when_it_is_over(
    engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(pieces: Any) -> None:
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(engine, "write", slow)
    batch = engine.begin([full(1)], verifies=False)
    task = asyncio.create_task(batch.verdict())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work: Any = batch.work
    assert not work.done()
    go_on.set()
    await work.wait()
    assert work.done()
