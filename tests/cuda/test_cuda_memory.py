"""Pinned host memory: exact, in chunks, unpinned before it is unmapped; and room that is checked first."""

from __future__ import annotations

import gc

import pytest
import torch

from asynccache.config import PoolSpec
from asynccache.errors import ConfigError
from asynccache.memory.cuda import pinned
from asynccache.memory.cuda.pinned import Pinning, pinned_tensor
from asynccache.memory.mover import Mover
from asynccache.memory.pools import BLOCK
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import driver_of
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import pool

MIB = 1 << 20


@pytest.fixture
def driver(drivers: list[SimulatedCuda]) -> SimulatedCuda:
    drivers.append(SimulatedCuda(pinnable=64 * MIB))
    return drivers[-1]


@pytest.mark.parametrize("shape", [(3, 4096), (1, 5), (1000, 4097)])
def test_exactly_as_much_as_was_asked_for_is_pinned(driver: SimulatedCuda, shape: tuple[int, ...]) -> None:
    tensor = pinned_tensor(driver, shape, Pinning())
    assert driver.pinned == {tensor.data_ptr(): shape[0] * shape[1]}
    assert tensor.data_ptr() % BLOCK == 0
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch.uint8
    assert not tensor.any()
    del tensor
    gc.collect()
    assert driver.pinned == {}


def test_large_memory_is_pinned_in_chunks_and_touched_in_parts(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "TOUCH", MIB)
    monkeypatch.setattr(pinned, "CHUNK", 4 * MIB)
    tensor = pinned_tensor(driver, (10 * MIB + 7,), Pinning())
    start = tensor.data_ptr()
    assert driver.pinned == {start: 4 * MIB, start + 4 * MIB: 4 * MIB, start + 8 * MIB: 2 * MIB + 7}
    view = tensor[3:9]
    del tensor
    gc.collect()
    assert len(driver.pinned) == 3  # a view is enough to keep it
    del view
    gc.collect()
    assert driver.pinned == {}


@pytest.mark.parametrize(("stride", "chunk"), [
    (4096, 4 * MIB), (5, 4 * MIB // 20480 * 20480), (3 << 10, 4 * MIB // 12288 * 12288), (5 * MIB, 5 * MIB),
    (5 * MIB + 1, (5 * MIB + 1) * 4096),  # a strange page is worth a larger registration
])  # fmt: skip
def test_a_registration_ends_with_a_page_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, stride: int, chunk: int
) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 4 * MIB)
    assert pinned.chunk_of(stride) == chunk
    assert chunk % stride == chunk % BLOCK == 0


def test_memory_that_cannot_be_pinned_whole_is_not_kept(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 30 * MIB)
    with pytest.raises(ConfigError, match=r"0\.12 GiB of host memory cannot be pinned: out of memory; .*doctor"):
        pinned_tensor(driver, (128 * MIB,), Pinning())
    gc.collect()
    assert driver.pinned == {}


def test_nothing_is_no_memory(driver: SimulatedCuda) -> None:
    assert pinned_tensor(driver, (0, 4096), Pinning()).numel() == 0
    assert driver.pinned == {}


def test_memory_of_a_numa_node(driver: SimulatedCuda) -> None:
    try:
        tensor = pinned_tensor(driver, (BLOCK,), Pinning(numa_node=0))
    except ConfigError as error:
        pytest.skip(f"this system does not bind memory: {error}")
    assert len(driver.pinned) == 1
    del tensor


def test_memory_of_a_numa_node_that_there_is_not(driver: SimulatedCuda) -> None:
    with pytest.raises(ConfigError, match="numa_node=1000"):
        pinned_tensor(driver, (BLOCK,), Pinning(numa_node=1000))
    assert driver.pinned == {}


def big(device: int, host: int) -> PoolSpec:
    return pool(size=MIB, device_pages=device, host_pages=host)


def test_each_tier_has_a_memory_of_its_own(simulated_device: Make) -> None:
    device = simulated_device(free=100 * MIB)
    device.check_room({"a": 90 * MIB}, {"b": 90 * MIB})
    with pytest.raises(ConfigError, match="'full' on the device"):
        Mover(device, [big(101, 1)])
    with pytest.raises(ConfigError, match="'full' on the host"):
        Mover(device, [big(1, 1 << 30)])
    assert driver_of(device).pinned == {}


def test_a_pool_that_cannot_be_pinned_says_so_by_name(simulated_device: Make) -> None:
    device = simulated_device(pinnable=MIB)
    with pytest.raises(ConfigError, match="pinned"):
        Mover(device, [big(1, 2)])
    gc.collect()
    assert driver_of(device).pinned == {}
