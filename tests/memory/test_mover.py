"""The mover: components become pools, batches are cut into calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccache.config import CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.settings import ComponentKind
from asynccache.errors import ConfigError, CopyFailed, InvariantViolation
from asynccache.memory import host_copies
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.device import CopyDirection, Event, Stream
from asynccache.memory.host_copies import Faults
from asynccache.memory.mover import Mover
from asynccache.memory.pools import DevicePool, HostPool, PageCopy
from asynccache.memory.signals import HAPPENED
from asynccache.worker.pool_layout import PoolMap
from tests.memory.small_pools import device_page, fill_device, filled, host_page, move, pool
from tests.simulated.device import SimulatedDevice, SimulatedStream

# The mover: components become pools, logical pools move nothing, fences hold, errors come before allocation.


FULL, SWA, MAMBA = ComponentKind
CONFIG = CacheConfig(
    model="m",
    page_size=4,
    components=(
        Full(bytes_per_token=0, device_tokens=64, host_tokens=64),
        SlidingWindow(window=8, bytes_per_token=6, device_tokens=32, host_tokens=48, layers=3),
        Mamba(state_bytes=40, device_states=5, host_states=6, layers=5),
    ),
    sidecars=(
        Sidecar(name="compressed", indices_from="full", bytes_per_page=10, layers=2),
        Sidecar(name="indexer", indices_from="compressed", bytes_per_page=7),
        Sidecar(name="scales", indices_from="swa", bytes_per_page=9, layers=3),
    ),
)


async def test_a_move_covers_the_components_pool_and_its_sidecars(cpu: CpuDevice) -> None:
    mover = Mover(cpu, CONFIG.pools(), host_align=16)
    fill_device(mover)
    moves = [move([1, 2], [8, 9], FULL), move([7], [3], SWA), move([4], [5], MAMBA)]
    await mover.backup(moves).wait()
    copied = [("compressed", 1, 8), ("compressed", 2, 9), ("indexer", 2, 9), ("swa", 7, 3), ("scales", 7, 3)]
    for name, src, dst in [*copied, ("mamba", 4, 5)]:
        assert host_page(mover, name, dst) == device_page(mover, name, src)
    for name, dst in (("swa", 8), ("scales", 8), ("compressed", 3), ("mamba", 4)):
        assert not any(host_page(mover, name, dst))
    assert mover.layers == 5
    sizes = PoolMap(CONFIG.pools(), CONFIG.page_size, {}).size_of(moves)
    assert sizes == (4, 2, 2 * (10 + 7) + (24 + 9) + 40), "pages, those of FULL, bytes: with the sidecars"


async def test_a_logical_pool_alone_moves_nothing_and_is_done(cpu: CpuDevice) -> None:
    mover = Mover(cpu, [pool(size=0, layers=1)])
    moves = [move([1], [2])]
    load = mover.load(moves)
    for event in (mover.backup(moves), mover.clone(moves), *load.layers):
        assert event is HAPPENED
        assert event.done()
        await event.wait()
    load.wait_layer(mover.device.stream("engine"), 0)


@pytest.mark.parametrize("moves", [[], [move([], [])]])
async def test_an_empty_batch_is_done(moves: list[object], cpu: CpuDevice) -> None:
    mover = Mover(cpu, [pool()])
    assert mover.backup(moves) is mover.clone(moves) is mover.load(moves).done is HAPPENED  # type: ignore[arg-type]
    assert len(mover.load([]).layers) == 4


async def test_what_a_copy_waits_for_holds_it_and_what_follows_on_its_stream_but_no_backup(
    make_device: Callable[..., CpuDevice | SimulatedDevice],
) -> None:
    device = make_device()
    mover = filled(device)
    before = mover.load([move([0], [0])])
    gates = [device.gate(), device.gate()]
    held = [
        mover.load([move([0], [1])], gates).done,
        mover.clone([move([2], [3])], gates),
        mover.load([move([0], [4])]).done,
    ]
    await before.done.wait()
    await mover.backup([move([5], [5])]).wait()
    gates[0].open()
    await mover.backup([move([6], [6])]).wait()
    assert not any(e.done() for e in held)
    gates[1].open()
    for event in held:
        await event.wait()


async def test_an_engines_tensors_are_where_loads_arrive(cpu: CpuDevice) -> None:
    spec = pool(size=64, layers=2)
    mine = [torch.zeros((32, 16), dtype=torch.bfloat16) for _ in range(2)]
    mover = Mover(cpu, [spec], device_tensors={"full": mine})
    fill_device(mover)
    wanted = device_page(mover, "full", 8)
    await mover.backup([move([8], [1])]).wait()
    await mover.load([move([1], [9])]).done.wait()
    await mover.clone([move([9], [10])]).wait()
    assert b"".join(t[10].view(torch.uint8).numpy().tobytes() for t in mine) == wanted


def test_tensors_for_an_unknown_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="no pool is called 'ful'"):
        Mover(CpuDevice(), [pool()], device_tensors={"ful": []})


class _SmallDevice(SimulatedDevice):
    """Counts allocations, on a machine with 1 MiB."""

    allocated = 0

    def check_room(self, device: object, host: object) -> None:
        from asynccache.memory.pools import check_room

        check_room((*dict(device).items(), *dict(host).items()), 1 << 20)  # type: ignore[call-overload]

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        type(self).allocated += 1
        return super().device_tensor(shape)


def test_pools_that_do_not_fit_together_are_refused_before_any_is_allocated() -> None:
    fits = pool(size=1 << 14, device_pages=16, host_pages=16)
    Mover(_SmallDevice(), [fits])
    _SmallDevice.allocated = 0
    with pytest.raises(ConfigError, match=r"pool 'aux' on the host: .* do not fit in memory"):
        Mover(_SmallDevice(), [fits, pool("aux", size=1 << 13, device_pages=16, host_pages=64)])
    assert _SmallDevice.allocated == 0


def test_a_pool_larger_than_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool 'full' on the device"):
        Mover(CpuDevice(), [pool(size=1 << 30, device_pages=1 << 20)])


async def test_without_a_host_tier_there_are_no_host_pools(cpu: CpuDevice) -> None:
    mover = Mover(cpu, [pool(host_pages=0)])
    assert mover.host_pools == {}
    fill_device(mover)
    await mover.clone([move([1], [2])]).wait()
    assert device_page(mover, "full", 1) == device_page(mover, "full", 2)


def test_a_device_that_refuses_a_stream_has_those_before_it_back() -> None:
    class Few(SimulatedDevice):
        def __init__(self) -> None:
            super().__init__()
            self.out: list[object] = []

        def stream(self, name: str) -> SimulatedStream:
            if len(self.out) == 2:
                raise DriverError("no more", 2)
            self.out.append(stream := super().stream(name))
            return stream

        def release(self, stream: Stream) -> None:
            self.out.remove(stream)

    device = Few()
    with pytest.raises(DriverError, match="no more"):
        Mover(device, [pool()])
    assert device.out == []


# How a batch is cut into calls, and that every cut copies every page exactly once.


def ids(values: list[int]) -> host_copies.Ids:
    return np.array(values, np.intp)


def test_neighbours_become_runs_and_the_rest_index_lists() -> None:
    row = host_copies.DIRECT_BYTES // 2
    pieces = host_copies.cut(ids([3, 4, 9, 20, 21, 22]), ids([7, 8, 1, 30, 31, 40]), row)
    assert pieces[:2] == [(slice(7, 9), slice(3, 5)), (slice(30, 32), slice(20, 22))]
    [(dst, src)] = pieces[2:]
    assert isinstance(dst, np.ndarray)
    assert isinstance(src, np.ndarray)
    assert (dst.tolist(), src.tolist()) == ([1, 40], [9, 22])


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(12)),
    st.permutations(range(12)),
    st.integers(0, 12),
    st.sampled_from([1, 1 << 10, host_copies.DIRECT_BYTES // 3, host_copies.DIRECT_BYTES, host_copies.RUN_BYTES + 1]),
)
def test_every_cut_copies_every_row_once(src: list[int], dst: list[int], n: int, row: int) -> None:
    of, to, written = np.arange(100, 112), np.zeros(12, int), np.zeros(12, int)
    for d, s in host_copies.cut(ids(src[:n]), ids(dst[:n]), row):
        to[d] = of[s]
        written[d] += 1
    expected = {d: 100 + s for s, d in zip(src[:n], dst[:n], strict=True)}
    assert {i: int(to[i]) for i in range(12) if written[i]} == expected
    assert written.max(initial=0) <= 1


@pytest.mark.parametrize(("src", "dst"), [([0, 8], [0, 1]), ([-1], [0]), ([0], [5]), ([0], [-1]), ([0, 1], [2])])
def test_ids_outside_a_pool_are_a_bug_of_the_caller(src: list[int], dst: list[int]) -> None:
    spec, device = pool(device_pages=8, host_pages=5), CpuDevice()
    pair = DevicePool.allocate(spec, device.device_tensor), HostPool.allocate(spec, device.host_tensor)
    with pytest.raises(InvariantViolation):
        host_copies.checked([PageCopy(*pair, np.array(src, np.int32), np.array(dst, np.int32))], CopyDirection.OUT)


def test_the_halves_of_a_torn_step_are_the_whole() -> None:
    spec, device = pool(size=3, layers=1), CpuDevice()  # an odd size: the halves differ
    p = DevicePool.allocate(spec, device.device_tensor)
    host = HostPool.allocate(spec, device.host_tensor)
    p.arrays[0][:] = 5
    ids = (np.array([1], np.int32), np.array([2], np.int32))
    part = host_copies.checked([PageCopy(p, host, *ids)], CopyDirection.OUT)
    step = host_copies.whole_step(part, CopyDirection.OUT)
    running = host_copies.perform(step, {0: host_copies.Hitch(1.0, 2.0, False)}, ())
    assert next(running) == 1.0
    assert bytes(host.page(2)) == bytes([0, 0, 0])
    assert next(running) == 2.0
    assert bytes(host.page(2)) == bytes([5, 0, 0])
    with pytest.raises(StopIteration):
        next(running)
    assert bytes(host.page(2)) == bytes([5, 5, 5])


# A copy that failed keeps no pool alive, neither by its event nor by the stream: a device may outlive many caches.


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _asked(mover: Mover, direction: str) -> Event:
    moves = [move([1], [2])]
    if direction == "backup":
        return mover.backup(moves)
    return mover.clone(moves) if direction == "clone" else mover.load(moves).done


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("direction", ["backup", "load", "clone", "unheard"])
async def test_the_pools_of_a_failed_copy_are_let_go(direction: str) -> None:
    device = CpuDevice(faults=Faults(failing=1.0))
    mover = Mover(device, [pool()])
    host, full = weakref.ref(mover.host_pools["full"]), weakref.ref(mover.device_pools["full"])
    if direction == "unheard":
        device.copy(mover._backups, CopyDirection.OUT, mover._copies([move([1], [1])]))
        ended = mover._loads.record()
        await ended.wait()
    else:
        ended = _asked(mover, direction)
        with suppress(CopyFailed):
            await ended.wait()
            pytest.fail("it went well")
    mover.close()
    await device.aclose()
    del mover
    assert host() is None
    assert full() is None
    assert ended.done()
